"""Paper Eqs. 3-16 as plain Python loops: the executable specification that every operator is compared with.

Slow and obvious on purpose. Numbers and lists go in and come out; each function takes one query and one memory, since
packing and batching are what the operators add. "Ours" marks what the paper leaves open and how we chose; DESIGN
section 3 lists those choices.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

Row = list[float]
Matrix = list[list[float]]
Pairs = Iterable[Sequence[int]]

STEP = 1e-6  # ours: scores closer than this are equal


def product(matrix: Matrix, dense: Matrix, columns: int) -> Matrix:
    """``C(i, k) = sum_j A(i, j) B(j, k)``: what a sparse product must equal."""
    return [[sum(row[j] * dense[j][k] for j in range(len(dense))) for k in range(columns)] for row in matrix]


# Eqs. 3-4


def entity_context_graph(
    mentions: Pairs,  # (unit, entity), once per occurrence
    titles: Pairs,  # (unit, entity that is its title)
    links: Pairs,  # (unit, unit whose title it names)
    neighbours: Pairs,  # (unit, unit beside it), once per pair
    units: int,
    entities: int,
    *,
    rarity: float,
    title: float,
    link: float,
    adjacency: float,
) -> Matrix:
    """Eqs. 3-4: ``w(d, e) = c(e, d) / sum_e' c(e', d)``, and adjacency edges. Nodes: units first, then entities.

    Ours: a count is weighed by ``idf(e)^rarity`` with ``idf(e) = ln((N + 1) / (df + 1/2))``, at least .001 (rarity 0 =
    the paper's); an entity leads back by its count, and by ``title`` more to the unit it is the title of; a unit leads
    by ``link`` to one whose title it names; ``adjacency`` is the share of a unit's mass that its neighbours split.
    """
    count = [[0.0] * entities for _ in range(units)]
    for d, e in mentions:
        count[d][e] += 1
    rare = []
    for e in range(entities):
        frequency = sum(count[d][e] > 0 for d in range(units))
        rare.append(max(math.log((units + 1) / (frequency + 0.5)), 1e-3) ** rarity)
    beside: list[list[int]] = [[] for _ in range(units)]
    for a, b in neighbours:
        beside[a].append(b)
        beside[b].append(a)

    edges = [[0.0] * (units + entities) for _ in range(units + entities)]
    for d in range(units):
        total = sum(count[d][e] * rare[e] for e in range(entities))
        for e in range(entities):
            if count[d][e]:
                edges[d][units + e] += (1 - adjacency) * count[d][e] * rare[e] / total
                edges[units + e][d] += count[d][e]
        for other in beside[d]:
            edges[d][other] += adjacency / len(beside[d])
    for d, e in titles:
        edges[units + e][d] += title
    for d, other in links:
        edges[d][other] += link
    return edges


# Eq. 5


def windows(session: Sequence[int], length: int) -> list[list[int]]:
    """Eq. 5: every run of ``length`` units inside one session. Ours: stride 1; a shorter session is one window."""
    found = []
    for first in range(len(session)):
        run = [u for u in range(first, min(first + length, len(session))) if session[u] == session[first]]
        starts_session = first == 0 or session[first - 1] != session[first]
        if len(run) == length or starts_session:
            found.append(run)
    return found


def episodes(session: Sequence[int], length: int) -> list[int]:
    """Eq. 5: the episode of each unit. Ours: a session of n units is cut into round(n / length) even runs, or left."""
    found: list[int] = []
    for s in sorted(set(session)):
        size = sum(own == s for own in session)
        parts = max(1, round(size / length))
        begun = found[-1] + 1 if found else 0
        found += [begun + place * parts // size for place in range(size)]
    return found


# Lexical and dense signals


def bm25(texts: Sequence[Sequence[str]], asked: Mapping[str, float], k1: float, b: float) -> Row:
    """``sum_t count(t, q) idf(t) tf (k1 + 1) / (tf + k1 (1 - b + b |d| / mean|d|))``, the Lucene variant:

    ``idf(t) = ln(1 + (N - df + 1/2) / (df + 1/2))``.
    """
    mean = sum(len(words) for words in texts) / len(texts) if texts else 0.0
    scores = []
    for words in texts:
        score = 0.0
        for term, weight in asked.items():
            tf, df = words.count(term), sum(term in other for other in texts)
            if tf:
                idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
                score += weight * idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(words) / mean))
        scores.append(score)
    return scores


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine of two vectors of unit length."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def best_matches(query: Matrix, states: Matrix) -> Row:
    """``max_j <q_i, d_j>`` per query token. Ours: an opposite direction is no match (0), nor is having no token."""
    return [max([0.0, *(dot(q, d) for d in states)]) for q in query]


def late_interaction(best: Row, weights: Sequence[float]) -> float:
    """``sum_i w_i max_j <q_i, d_j> / sum_i w_i``. Ours: the weights (the paper's multi-vector head has none)."""
    total = sum(weights)
    return sum(w * match for w, match in zip(weights, best, strict=True)) / total if total else 0.0


def told_apart(best: Matrix) -> Matrix:
    """Ours: each query token's matches brought to [0, 1] over the units; 0 where all are equal, as it tells nothing.

    A span of less than .01 counts as .01.
    """
    spread = [[0.0] * len(row) for row in best]
    for i in range(len(best[0]) if best else 0):
        column = [row[i] for row in best]
        span = max(column) - min(column)
        for u, value in enumerate(column):
            spread[u][i] = (value - min(column)) / max(span, 0.01) if span > STEP else 0.0
    return spread


# Eqs. 7-10


def graph_weight(relational: float, local: float, rho: float) -> float:
    """Eq. 7: the primary view weighs ``rho``; the graph is primary on the relational route. Ours: a tie is local."""
    return rho if relational > local else 1 - rho


def alignment(keys: Iterable[str], titles: Iterable[str], entities: Mapping[str, int], name: float) -> dict[int, float]:
    """Eq. 8: the graph entities that a query names, and ``eta_0``.

    Ours: by exact key, which makes ``cos`` 1, for a title; any other known entity starts with ``name``.
    """
    seeds = {entities[key]: name for key in keys if key in entities}
    for key in titles:
        if key in entities:
            seeds[entities[key]] = 1.0
    return seeds


def propagation(
    seeds: Sequence[float], similarity: Sequence[float], sentences: Sequence[set[int]], *, hops: int, decay: float
) -> Row:
    """Eq. 9: ``eta_{t+1}(e') = sum_e eta_t(e) sum_{z in Z(e) and Z(e')} sim(q, z)``.

    Ours: a negative similarity counts as 0; an entity passes activation to itself too; a hop is scaled to ``decay``
    times the mass of the one before; the result is the sum over hops, with the seeds.
    """
    eta, total = list(seeds), list(seeds)
    for _ in range(hops):
        reached = [0.0] * len(seeds)
        for z, named in enumerate(sentences):
            for e in named:
                for other in named:
                    reached[other] += eta[e] * max(similarity[z], 0.0)
        mass, arrived = sum(eta), sum(reached)
        eta = [value * decay * mass / arrived if arrived > 0 else 0.0 for value in reached]
        total = [before + value for before, value in zip(total, eta, strict=True)]
    return total


def transition(edges: Matrix, affinity: Sequence[float] | None = None) -> Matrix:
    """``P(i, j) = A(i, j) g(j) / sum_j' A(i, j') g(j')``; a row without anything to go to stays 0: it dangles.

    Ours: ``g``, how much the query likes a node; ``g = 1`` is the paper's row-normalised matrix.
    """
    liked = [1.0] * len(edges) if affinity is None else list(affinity)
    steps = []
    for row in edges:
        weighed = [edge * g for edge, g in zip(row, liked, strict=True)]
        leaving = sum(weighed)
        steps.append([w / leaving if leaving > 0 else 0.0 for w in weighed])
    return steps


def pagerank(reset: Sequence[float], steps: Matrix, damping: float) -> Row:
    """Eq. 10: the fixed point of ``pi = (1 - damping) r + damping P^T pi``.

    Ours: the mass of dangling nodes returns to ``r``; a query without any reset mass gets none.
    """
    nodes = range(len(reset))
    leads = [[(j, p) for j, p in enumerate(row) if p] for row in steps]
    pi, change = list(reset), 1.0
    while change > 1e-14:
        new = [(1 - damping) * r for r in reset]
        for i in nodes:
            for j, p in leads[i]:
                new[j] += damping * pi[i] * p
            if not leads[i]:
                for j in nodes:
                    new[j] += damping * pi[i] * reset[j]
        change = sum(abs(a - b) for a, b in zip(new, pi, strict=True))
        pi = new
    return pi


def reset(prior: Sequence[float], activation: Sequence[float], sharpness: float) -> tuple[Row, Row, int]:
    """``r`` of Eq. 10 for units and for entities, and which rung of the ladder it stands on.

    Ours: units share 1 by ``minmax(prior) ^ sharpness``, entities hold their activation, and both are divided by the
    whole. Rungs: 0 an entity is active, 1 the prior alone, 2 a prior that tells no unit from another, so all share.
    """
    sharp = [p**sharpness for p in minmax(prior)]
    whole = 1 + sum(activation)
    of_units = [p / sum(sharp) / whole for p in sharp]
    of_entities = [a / whole for a in activation]
    flat = len(set(sharp)) <= 1
    return of_units, of_entities, 0 if sum(activation) > 0 else 2 if flat else 1


def graph_view(
    prior: Sequence[float],
    exact: Sequence[float],
    rest: Sequence[float],  # how well a unit answers the query without its names
    seeds: Sequence[float],
    similarity: Sequence[float],
    sentences: Sequence[set[int]],
    edges: Matrix,
    *,
    damping: float,
    sharpness: float,
    affinity: float,
    named: float,
    hops: int,
    decay: float,
) -> Row:
    """Eqs. 8-10 as one score per unit: ``minmax(pi ^ (1 / sharpness)) + exact``.

    Ours: the step's liking of a unit is ``max(rest, .001) ^ affinity``, of a seed entity ``named``, of another 1.
    """
    activation = propagation(seeds, similarity, sentences, hops=hops, decay=decay)
    of_units, of_entities, _ = reset(prior, activation, sharpness)
    liking = [max(r, 1e-3) ** affinity for r in rest] + [named if seed > 0 else 1.0 for seed in seeds]
    pi = pagerank(of_units + of_entities, transition(edges, liking), damping)
    spread = minmax([(pi[u] + 1e-30) ** (1 / sharpness) for u in range(len(of_units))])
    return [score + boost for score, boost in zip(spread, exact, strict=True)]


# Eq. 11


def best_window(scores: Sequence[float], members: Sequence[Sequence[int]], units: int) -> Row:
    """A window's score reaches its units: each takes the best of the windows that hold it."""
    return [max(score for score, held in zip(scores, members, strict=True) if u in held) for u in range(units)]


def nearness(day: int, asked: Pairs, reach: float) -> float:
    """Ours: 1 on a day asked about, falling to 0 at ``reach`` days from it; 0 for an unknown day (0)."""
    best = 0.0
    for first, last in asked:
        if first <= last and day > 0:
            apart = max(first - day, day - last, 0)
            best = max(best, 1 - apart / reach)
    return best


def speaks_of(spoken: Pairs, asked: Pairs, longest: int) -> float:
    """Ours: 1 where a unit speaks of at most ``longest`` days (past the first) that meet an interval asked about."""
    asked = list(asked)
    for first, last in spoken:
        for begin, end in asked:
            if begin <= end and last - first <= longest and first <= end and begin <= last:
                return 1.0
    return 0.0


def follows_question(asks: Sequence[bool], session: Sequence[int]) -> Row:
    """Ours: 1 for a unit behind one of its session that ends with a question."""
    return [float(u > 0 and asks[u - 1] and session[u - 1] == session[u]) for u in range(len(asks))]


def weighted(signals: Mapping[str, Sequence[float]], weights: Mapping[str, float], units: int) -> Row:
    """Eq. 11: ``sum_k w_k signal_k(u)`` over the levels' semantic scores and the compatibilities. Ours: no pruning."""
    return [sum(weight * signals[name][u] for name, weight in weights.items()) for u in range(units)]


def prune_episodes(scores: Sequence[float], episode: Sequence[int], keep: int) -> Row:
    """Eq. 11, hard: only units of the ``keep`` best episodes keep their score. Ours: the rest get the lowest of all."""
    best = [max(s for s, own in zip(scores, episode, strict=True) if own == e) for e in range(len(set(episode)))]
    kept = ranking(best, keep)
    return [score if own in kept else min(scores) for score, own in zip(scores, episode, strict=True)]


# Eqs. 12-13


def minmax(scores: Sequence[float], present: Sequence[bool] | None = None) -> Row:
    """Eq. 12: ``(s - min) / (max - min)`` over the present ones. Ours: absent -> 0, all equal -> 1."""
    there = [True] * len(scores) if present is None else list(present)
    held = [score for score, is_there in zip(scores, there, strict=True) if is_there]
    scaled = []
    for score, is_there in zip(scores, there, strict=True):
        if not is_there:
            scaled.append(0.0)
        elif max(held) - min(held) <= STEP:
            scaled.append(1.0)
        else:
            scaled.append((score - min(held)) / (max(held) - min(held)))
    return scaled


def fuse(
    graph: Sequence[float],
    hierarchy: Sequence[float],
    weight: float,
    contrasts: tuple[float, float] = (1.0, 1.0),
    *,
    returned: tuple[Sequence[bool] | None, Sequence[bool] | None] = (None, None),
    bonus: Sequence[float] | None = None,
) -> Row:
    """Eq. 13: ``S = rho primary + (1 - rho) secondary``, ``weight`` being the graph's.

    Ours: each view's score is raised to its contrast first; 1 is the paper's. ``returned`` says which units each view
    returned (all), and ``bonus`` is added.
    """
    views = minmax(graph, returned[0]), minmax(hierarchy, returned[1])
    extra = [0.0] * len(graph) if bonus is None else bonus
    return [
        weight * g ** contrasts[0] + (1 - weight) * h ** contrasts[1] + more
        for g, h, more in zip(*views, extra, strict=True)
    ]


def ranking(scores: Sequence[float], k: int, admitted: Iterable[int] | None = None) -> list[int]:
    """The ``k`` best units, best first. Ours: scores are compared in steps of ``STEP``, and equal ones go by number."""
    units = range(len(scores)) if admitted is None else sorted(set(admitted))
    return sorted(units, key=lambda u: (-round(scores[u] / STEP), u))[:k]


# Eqs. 14-15


def closure(
    fused: Sequence[float],
    main: Iterable[int],
    session: Sequence[int],
    asks: Sequence[bool],
    leans: Sequence[bool],
    edges: Matrix,
    *,
    neighbour: float,
    graph: float,
) -> tuple[Row, Row]:
    """Eq. 14: what supports each unit beside M(q), by nearness and along the graph.

    Ours: support is a score. A main unit gives ``neighbour S`` to the one behind or before it in its session when the
    first of the two asks or the second leans; and, over all main units, ``graph minmax-by-peak(sum S P^2)`` to units
    outside M(q), with ``P^2`` two steps of the graph.
    """
    main, units = set(main), range(len(fused))
    source = [max(fused[u], 0.0) if u in main else 0.0 for u in units]
    near = [0.0] * len(fused)
    for first in list(units)[:-1]:
        second = first + 1
        if session[first] == session[second] and (asks[first] or leans[second]):
            near[second] = max(near[second], source[first])
            near[first] = max(near[first], source[second])
    steps = transition(edges)
    mass = source + [0.0] * (len(edges) - len(fused))
    for _ in range(2):
        mass = [sum(mass[i] * steps[i][j] for i in range(len(mass)) if mass[i]) for j in range(len(mass))]
    reached = [0.0 if u in main else mass[u] for u in units]
    peak = max(reached, default=0.0)
    return [neighbour * s for s in near], [graph * r / peak if peak else 0.0 for r in reached]


def calibrate(
    scores: Sequence[float],
    closed: Iterable[int],
    signals: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    k: int,
) -> list[int]:
    """Eq. 15: filter (only units of C(q), which are of the query's boundary), then rank by the profile.

    Ours: by ``score(u) + sum_k w_k signal_k(u)``.
    """
    added = weighted(signals, weights, len(scores))
    return ranking([score + more for score, more in zip(scores, added, strict=True)], k, closed)


def within_budget(rows: Sequence[int], tokens: Sequence[int], budget: int) -> list[int]:
    """The ranked units handed over. Ours: one that no longer fits is skipped, and later ones may still fit."""
    handed, left = [], budget
    for u in rows:
        if tokens[u] <= left:
            handed.append(u)
            left -= tokens[u]
    return handed


# Eq. 16


def supporting_item(
    answer: Iterable[str], asked: Iterable[str], items: Sequence[Iterable[str]], share: float = 1.0
) -> int | None:
    """The best item that bears an answer out, all of them given as content words. Ours.

    It holds at least ``share`` of the words that the question does not have (of all, where it has them all), and no
    other holds more.
    """
    words = set(answer) - set(asked) or set(answer)
    best, most = None, 0
    for i, item in enumerate(items):
        held = sum(word in set(item) for word in words)
        if held > most and held >= share * len(words):
            best, most = i, held
    return best


def item_about(asked: Iterable[str], names: Iterable[str], items: Sequence[Iterable[str]]) -> int | None:
    """The item whose date stands in for one that nothing bears out: the first that holds most of the question's words,
    if it holds half of them, the speakers' names aside. Ours."""
    words, others = set(asked), set(asked) - set(names)
    held = [len(words & set(item)) for item in items]
    if not items or not others:
        return None
    best = held.index(max(held))
    return best if 2 * len(others & set(items[best])) >= len(others) else None


def pruned(
    elements: Sequence[Sequence[str]], asked: Iterable[str], items: Sequence[Iterable[str]], share: float
) -> list[int]:
    """The elements of a list that stay: each once, new beside the question, and supported; all where none would."""
    kept: list[int] = []
    for i, element in enumerate(elements):
        new = set(element) - set(asked)
        again = any(set(element) == set(elements[j]) for j in kept)
        if new and not again and supporting_item(element, asked, items, share) is not None:
            kept.append(i)
    return kept or list(range(len(elements)))


def only_candidate(candidates: Sequence[Sequence[str]]) -> str | None:
    """What replaces a scalar: the one value of its type in all of R(q), if there is just one."""
    values = {value for item in candidates for value in item}
    return values.pop() if len(values) == 1 else None


def calibrate_scalar(
    answer: str | None, form: Mapping[str, str], candidates: Sequence[Sequence[str]], *, abstain: bool
) -> str | None:
    """Eq. 16 for a scalar: in form if it was given, else the only candidate, else nothing (None).

    Ours: an answer of the type asked for is not replaced, as a count may be right and stand in no single item; one
    that nothing supports can be taken back (``abstain``).
    """
    if answer is None:
        return only_candidate(candidates)
    supported = any(form[answer] == value for item in candidates for value in item)
    return form[answer] if supported or not abstain else None
