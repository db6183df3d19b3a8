"""Every operator by every back end that runs here, on made data of real sizes: `python bench/operators.py --json OUT`.

For each operator, size and number of queries: the result must be that of the PyTorch definition in float64 (or what
the definition makes of integers), then it is timed. A back end that cannot run here is named with its reason. Figures
are microseconds a query, beside the floor of the bytes that have to be moved at this machine's own copy bandwidth.

  python bench/operators.py --quick                        a few small cases, to see that it runs
  python bench/operators.py --operators pagerank,spmm      some of them
  python bench/operators.py --floors                       only what the machine can do: copies and matrix products
  python bench/operators.py --device cuda --json bench/results/operators-h200.jsonl

The file has a line of JSON for each figure; the first line says what made them.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script knows only its own folder

from bench.measure import (
    Peak,
    backends_of,
    device_name,
    floor_of,
    floors,
    lines,
    made_by,
    moved,
    say,
    threads,
    timed,
)
from zeromem_torch.backends import choose, explain
from zeromem_torch.bank import Axis, Postings, TokenStates, axis_of, segment_minmax, segment_topk
from zeromem_torch.retrieval.dense import LateInteraction
from zeromem_torch.retrieval.fusion import ViewFusion
from zeromem_torch.retrieval.lexical import LexicalScores
from zeromem_torch.retrieval.pagerank import PersonalizedPageRank
from zeromem_torch.retrieval.propagation import EntityPropagation
from zeromem_torch.sparse import Csr, offsets
from zeromem_torch.substrate.traces import ZeroMemError

QUERIES = (1, 16, 64, 256, 1024, 4096)
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"units": 40, "entities": 30, "mentions": 120, "sentences": 60, "terms": 50},
    "LoCoMo": {"units": 680, "entities": 700, "mentions": 2_200, "sentences": 1_500, "terms": 3_000},
    "HotpotQA 448K": {"units": 4_500, "entities": 15_000, "mentions": 43_000, "sentences": 20_000, "terms": 40_000},
    "HotpotQA pool": {"units": 7_704, "entities": 54_000, "mentions": 86_000, "sentences": 31_000, "terms": 60_000},
}
"""Rows of a memory as it is met: six conversations, the paper's longest context, and our pool of documents."""
DIM, WORDS, QUERY_WORDS, TOP = 384, 40, 8, 5
EXHAUSTIVE, CANDIDATES = 2048, 256  # of late interaction: units compared whole, and of a larger memory
SHOWN = ("op", "size", "queries", "backend", "median_us", "iqr_us", "p99_us", "cold_us", "gb_s", "floor_share", "error")


@dataclass(frozen=True)
class Case:
    """One operator on one input. ``run`` takes a back end's name; ``bytes`` have to be moved at least."""

    run: Callable[[str], Any]
    expected: Callable[[], Any]  # the definition's result
    error: Callable[[Any, Any], float]
    within: float
    bytes: float
    largest: int  # elements of the largest tensor
    others: Mapping[str, Callable[[], Any]]  # baselines, by name
    flops: float = 0.0


class Made:
    """A memory of one size with ``queries`` asked of it: random, but with real counts and a few hubs."""

    def __init__(self, size: Mapping[str, int], queries: int, device: str) -> None:
        self.size, self.queries, self.device = size, queries, device
        self.draw = torch.Generator().manual_seed(0)

    def whole(self, count: int, most: int) -> Tensor:
        """Numbers below ``most``, small ones more often: hubs, and words that everybody uses."""
        share = torch.rand(count, generator=self.draw)
        return (most * share**3).long().clamp(max=most - 1)

    def real(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.draw)

    def matrix(self, rows: int, cols: int, entries: int) -> Csr:
        row = torch.arange(entries) % rows
        return moved(Csr.from_coo(row, self.whole(entries, cols), 0.5 + self.real(entries), rows, cols), self.device)

    @property
    def graph(self) -> Csr:
        """Units and entities, both ways."""
        units, entities = self.size["units"], self.size["entities"]
        held = self.matrix(units, entities, self.size["mentions"])
        row, col = held.row_of_entry().cpu(), held.col.cpu() + units
        ends, others = torch.cat([row, col]), torch.cat([col, row])
        values, nodes = held.val.cpu().repeat(2), units + entities
        return moved(Csr.from_coo(ends, others, values, nodes, nodes), self.device)

    @property
    def axis(self) -> Axis:
        return axis_of([self.size["units"]], self.device)

    @property
    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.queries, self.size["units"]
        weight = torch.where(self.real(self.queries, 1) < 0.5, 0.4, 0.6)
        return self.real(*shape).to(self.device), self.real(*shape).to(self.device), weight.to(self.device)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))


def _l1(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().sum(-1).max())


def _differing(found: Tensor, expected: Tensor) -> float:
    return float((found != expected).sum())


def _double(matrix: Csr) -> Csr:
    return Csr(matrix.crow, matrix.col, matrix.val.double(), matrix.cols)


def spmm(made: Made) -> Case:
    """One product of a walk: A @ X."""
    matrix = made.graph
    dense = made.real(matrix.cols, made.queries).to(made.device)

    def run(backend: str) -> Tensor:
        name = choose("spmm", backend, device=dense.device, dtype=dense.dtype, sizes={"elements": dense.numel()}).name
        return matrix.times(dense, name)

    size = 8 * matrix.col.numel() + 4 * (matrix.rows + 1) + 8 * dense.numel()
    return Case(run, lambda: _double(matrix) @ dense.double(), _relative, 1e-5, size, dense.numel(), {})


def pagerank(made: Made) -> Case:
    """The walk of Eq. 10. Its floor is that of all steps of power iteration, each reading and writing its vectors once:
    a solver that needs fewer, or keeps them in the cache, gets past it."""
    matrix = made.graph
    reset = made.real(made.queries, matrix.rows).to(made.device) ** 12
    reset /= reset.sum(1, keepdim=True)
    liking = made.real(made.queries, matrix.rows).clamp(min=1e-3).to(made.device) ** 2
    nodes = axis_of([matrix.rows], made.device)
    walk = PersonalizedPageRank(backend="torch")

    def expected() -> Tensor:
        exact = _double(matrix)
        found: Tensor = PersonalizedPageRank(tolerance=1e-9, backend="torch")(
            reset.double(), exact, exact, nodes, liking.double()
        )
        return found

    def run(backend: str) -> Tensor:
        found: Tensor = PersonalizedPageRank(backend=backend)(reset, matrix, matrix, nodes, liking)
        return found

    step = 8 * matrix.col.numel() + 4 * (matrix.rows + 1) + 12 * reset.numel()
    return Case(run, expected, _l1, 4e-6, step * walk.steps, reset.numel(), {})


def propagation(made: Made) -> Case:
    """Two hops of Eq. 9, from one or two entities a query."""
    sentences, entities = made.size["sentences"], made.size["entities"]
    mentions = made.matrix(sentences, entities, made.size["mentions"])
    mentions = Csr(mentions.crow, mentions.col, torch.ones_like(mentions.val), mentions.cols)
    back = mentions.transpose()
    seeds = torch.zeros(made.queries, entities)
    seeds[torch.arange(made.queries), made.whole(made.queries, entities)] = 1.0
    seeds = seeds.to(made.device)
    near = (2 * made.real(made.queries, sentences) - 1).to(made.device)
    axis = axis_of([entities], made.device)

    def run(backend: str) -> Tensor:
        found: Tensor = EntityPropagation(2, 0.2, backend=backend)(seeds, near, mentions, back, axis)
        return found

    def expected() -> Tensor:
        exact = EntityPropagation(2, 0.2, backend="torch")
        found: Tensor = exact(seeds.double(), near.double(), _double(mentions), _double(back), axis)
        return found

    hop = 16 * mentions.col.numel() + 4 * (sentences + entities)
    size = 2 * hop + 4 * (2 * seeds.numel() + near.numel())
    return Case(run, expected, _relative, 1e-5, size, max(near.numel(), seeds.numel()), {})


def _lexical_input(made: Made) -> tuple[tuple[Tensor, Tensor, Tensor], Postings]:
    units, terms = made.size["units"], made.size["terms"]
    key = torch.unique(made.whole(units * WORDS, terms) * units + torch.arange(units * WORDS) % units)
    counts = torch.bincount(key // units, minlength=terms)
    held = Postings(*(part.to(made.device) for part in (counts, key % units, 0.1 + made.real(len(key)))))
    slot = torch.arange(made.queries).repeat_interleave(QUERY_WORDS).to(made.device)
    term = made.whole(made.queries * QUERY_WORDS, terms).to(made.device)
    return (slot, term, torch.ones(len(slot), device=made.device)), held


def _exact_lexical(entries: tuple[Tensor, Tensor, Tensor], held: Postings, queries: int, units: int) -> Tensor:
    double = Postings(held.counts, held.row, held.impact.double())
    found: Tensor = LexicalScores(backend="torch")(*entries[:2], entries[2].double(), double, queries, units)
    return found


def lexical(made: Made) -> Case:
    """Scores of all units by BM25."""
    entries, held = _lexical_input(made)
    units = made.size["units"]

    def run(backend: str) -> Tensor:
        found: Tensor = LexicalScores(backend=backend)(*entries, held, made.queries, units)
        return found

    size = 8 * int(held.counts[entries[1]].sum()) + 4 * made.queries * units
    expected = partial(_exact_lexical, entries, held, made.queries, units)
    return Case(run, expected, _relative, 1e-5, size, made.queries * units, {})


def lexical_best(made: Made) -> Case:
    """The best 50 of them, without the others."""
    entries, held = _lexical_input(made)
    units = made.size["units"]
    k = min(50, units)

    def run(backend: str) -> Tensor:
        return LexicalScores(backend=backend).best(*entries, held, made.queries, made.axis, k)[0][:, 0]

    def expected() -> Tensor:
        return _exact_lexical(entries, held, made.queries, units).topk(k).values

    size = 8 * int(held.counts[entries[1]].sum())
    return Case(run, expected, _relative, 1e-5, size, made.queries * units, {})


def maxsim(made: Made, precision: str = "stored") -> Case:
    """Late interaction with all units of a conversation, or with 256 candidates of a larger memory."""
    units, k = made.size["units"], min(CANDIDATES, made.size["units"])
    counts = 1 + made.whole(units, 2 * WORDS)
    ptr = offsets(counts).to(made.device)
    axis = made.axis
    kept = normalize(torch.randn(int(counts.sum()), DIM, generator=made.draw), dim=1).half().to(made.device)
    states = TokenStates.kept(kept, ptr, precision)
    queries = normalize(torch.randn(made.queries, 1, QUERY_WORDS, DIM, generator=made.draw), dim=-1).to(made.device)
    weights = made.real(made.queries, 1, QUERY_WORDS).to(made.device)
    whole = units <= EXHAUSTIVE
    share = made.real(made.queries, units).topk(k).indices.sort().values  # other units for each query
    candidates = share[:, None].to(made.device)
    alone = torch.arange(units, device=made.device)  # documents: every unit is a window of its own
    bank: Any = SimpleNamespace(
        axes=dict.fromkeys(("units", "windows", "members"), axis), member_window=alone, member_unit=alone,
        states=lambda _: states, token_states_of=lambda _: states.values, state_ptr=states.ptr,
        states_by_memory=lambda _: ([states.values], [states.scale], [0]), best_window=lambda scores: scores,
    )  # fmt: skip

    def run(backend: str) -> Tensor:
        late = LateInteraction(EXHAUSTIVE, backend=backend, precision=precision)
        return torch.cat(late(queries, weights, bank, candidates))

    def expected() -> Tensor:
        late = LateInteraction(EXHAUSTIVE, backend="torch", precision=precision)
        return torch.cat(late(queries.double(), weights.double(), bank, candidates))

    met = len(kept) if whole else int(counts[share.flatten()].sum())
    size = met * states.bytes_per_token + 8 * made.queries * units
    flops = 2.0 * DIM * QUERY_WORDS * (met * made.queries if whole else met)
    largest = max(made.queries * units * QUERY_WORDS, kept.numel())
    return Case(run, expected, _relative, 1e-4, size, largest, {}, flops)


def fused_score(made: Made) -> Case:
    """Min-max of both views, their mix and its best five; and the same as plain PyTorch, one operator after another."""
    (graph, hierarchy, weight), axis = made.views, made.axis
    fusion = partial(ViewFusion, 4.0, 10.0)

    def run(backend: str) -> Tensor:
        return fusion(backend).best(graph, hierarchy, weight, axis, TOP)[1][:, 0]

    def expected() -> Tensor:
        return fusion("torch").best(graph, hierarchy, weight, axis, TOP)[1][:, 0]

    def unfused() -> Tensor:
        def scaled(scores: Tensor) -> Tensor:
            least, most = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
            return (scores - least) / (most - least)

        mixed = weight * scaled(graph) ** 4 + (1 - weight) * scaled(hierarchy) ** 10
        return mixed.topk(min(TOP, mixed.shape[1])).indices

    return Case(run, expected, _differing, 0, 12 * graph.numel(), graph.numel(), {"unfused": unfused})


def top_k(made: Made) -> Case:
    """The best five units of a view, ties by row; beside `torch.topk`, which promises no order of ties."""
    (scores, _, _), axis = made.views, made.axis

    def run(backend: str) -> Tensor:
        return segment_topk(scores, axis, TOP)[:, 0]

    def expected() -> Tensor:
        steps = (scores.double() / 1e-6).round()
        order = torch.argsort(steps, dim=1, descending=True, stable=True)[:, :TOP]
        return torch.nn.functional.pad(order, (0, TOP - order.shape[1]), value=-1)

    others = {"torch.topk": lambda: scores.topk(min(TOP, scores.shape[1]))}
    return Case(run, expected, _differing, 0, 4 * scores.numel(), scores.numel(), others)


def minmax(made: Made) -> Case:
    """A view brought to [0, 1] over each memory (Eq. 12)."""
    (scores, _, _), axis = made.views, made.axis

    def expected() -> Tensor:
        exact = scores.double()
        least, most = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
        return (exact - least) / (most - least)

    return Case(
        lambda _: segment_minmax(scores, axis), expected, _relative, 1e-6, 8 * scores.numel(), scores.numel(), {}
    )


OPERATORS: Mapping[str, tuple[Callable[[Made], Case], str]] = {
    "spmm": (spmm, "spmm"),
    "pagerank": (pagerank, "pagerank"),
    "propagation": (propagation, "propagation"),
    "lexical": (lexical, "lexical"),
    "lexical_best": (lexical_best, "lexical"),
    "maxsim": (maxsim, "maxsim"),
    "maxsim_int8": (partial(maxsim, precision="int8"), "maxsim"),
    "fused_score": (fused_score, "fused_score"),
    "segment_topk": (top_k, ""),
    "segment_minmax": (minmax, ""),
}
"""How a case is made, and which operator's back ends there are; "" = PyTorch alone."""


def measure(
    op: str, size: str, queries: int, device: str, calls: int, largest: int, refused: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The figures of one case; none where it would take more than ``largest`` bytes a tensor."""
    make, operator = OPERATORS[op]
    rows = max(SIZES[size]["units"] + SIZES[size]["entities"], SIZES[size]["sentences"])
    if op in ("spmm", "pagerank", "propagation") and 4 * queries * rows > largest:
        refused[f"{op}, {size}, {queries} queries"] = f"a tensor would take more than {largest >> 20} MiB"
        return
    case = make(Made(SIZES[size], queries, device))
    if 4 * case.largest > largest:
        refused[f"{op}, {size}, {queries} queries"] = f"a tensor would take more than {largest >> 20} MiB"
        return
    expected = case.expected()
    base: dict[str, Any] = {
        "op": op,
        "size": size,
        **SIZES[size],
        "queries": queries,
        "threads": torch.get_num_threads(),
    }
    base |= {"device": device_name(device), "torch": torch.__version__}

    def figure(name: str, do: Callable[[], Any], checked: bool) -> dict[str, Any]:
        peak = Peak(device)
        timing, found = timed(do, items=queries, calls=calls, seconds=1.0, device=device)
        row: dict[str, Any] = {**base, "backend": name, **timing.to_dict(), "peak_mib": peak.mib}
        if checked:
            row["error"] = case.error(found, expected)
            if not row["error"] <= case.within:
                bound = f"{case.within} of the definition"
                raise SystemExit(f"{op}, {size}, {queries} queries, {name}: expected {bound}, got {row['error']}")
        return row | floor_of(timing, device, size=case.bytes, flops=case.flops)

    for name in backends_of(operator, device, refused) if operator else ["torch"]:
        try:
            yield figure(name, partial(case.run, name), checked=True)
        except ZeroMemError as error:  # a limit that goes by size
            refused[f"{op}, {size}, {queries} queries, {name}"] = str(error)
    for name, do in case.others.items():
        yield figure(name, do, checked=False)


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", default=",".join(OPERATORS), metavar="A,B", help="some of %(default)s")
    parser.add_argument("--sizes", default=",".join(SIZES), metavar="A,B", help="some of %(default)s")
    parser.add_argument("--queries", default=",".join(map(str, QUERIES)), metavar="N,M", help="(%(default)s)")
    parser.add_argument("--calls", type=int, default=20, help="warm calls of each, fewer when they are slow")
    parser.add_argument("--largest", type=int, metavar="MIB", help="of a tensor (256 on cpu, 4096 on cuda)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of PyTorch (default: its own choice)")
    parser.add_argument("--floors", action="store_true", help="only measure what the machine can do")
    parser.add_argument("--quick", action="store_true", help="tiny, 1 and 7 queries")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write a line a figure here")
    args = parser.parse_args(words)
    for given, known in ((args.operators, OPERATORS), (args.sizes, SIZES)):
        if wrong := set(given.split(",")) - set(known):
            parser.error(f"expected some of {', '.join(known)}, got {', '.join(sorted(wrong))}")
    sizes = ["tiny"] if args.quick else [size for size in args.sizes.split(",") if size != "tiny"]
    counts = [1, 7] if args.quick else [int(count) for count in args.queries.split(",")]
    largest = (args.largest or (256 if args.device == "cpu" else 4096)) << 20
    refused: dict[str, str] = {}
    figures: list[dict[str, Any]] = []
    with threads(args.threads or torch.get_num_threads()):
        made = {"made": made_by("operators", words, args.device), "floors": floors(args.device)}
        cases = [(op, size, count) for op in args.operators.split(",") for size in sizes for count in counts]
        for op, size, count in tqdm([] if args.floors else cases, desc="operators", unit="case", disable=None):
            figures += measure(op, size, count, args.device, 3 if args.quick else args.calls, largest, refused)
        chosen = [
            explain(name, device=torch.device(args.device))
            for name in sorted({o for _, o in OPERATORS.values()} - {""})
        ]
    print(", ".join(f"{name} {value:,.4g}" for name, value in made["floors"].items()))
    print("\n".join(chosen))
    print("\n".join(lines(figures, SHOWN)))
    for what, why in refused.items():
        say(f"left out: {what}: {why}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**made, "auto": chosen, "left_out": refused}, *figures]
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
