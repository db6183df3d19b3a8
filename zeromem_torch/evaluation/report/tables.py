"""The report's tables, as HTML; every text of a run goes through `text`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from zeromem_torch.evaluation.report.runs import CONVENTION, MAIN, MISSES, Run, miss_of

ABLATIONS = ("graph", "hierarchy", "no_closure", "no_calibration", "no_answer_calibration")
NOTHING = "–"
Cell = tuple[str, str]  # HTML, and the class of its cell
Interval = Sequence[float] | None


def text(value: object) -> str:
    """Safe between tags and in quoted attributes."""
    return escape(str(value))


def table(caption: str, head: Sequence[str], rows: Iterable[tuple[Sequence[Cell], bool]]) -> str:
    """Heads and cells are HTML; the first cell of a row names it, and a marked row is ours."""
    heads = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = []
    for (first, *cells), ours in rows:
        rest = "".join(f'<td class="{kind}">{cell}</td>' if kind else f"<td>{cell}</td>" for cell, kind in cells)
        body.append(f'<tr{" class=ours" if ours else ""}><th scope="row">{first[0]}</th>{rest}</tr>')
    lines = "\n".join(body)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}"><table>\n'
        f"<caption><span>{caption}</span></caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def by_category(run: Run) -> str:
    """Table 1: F1 and BLEU-1 of each kind of question."""
    keys = [key for key in run.result["categories"] if any(key in s["by_category"] for s in run.systems.values())]
    counts = {key: max(s["by_category"].get(key, {}).get("n", 0) for s in run.systems.values()) for key in keys}
    head = ["System", "n", *(f"{text(run.category(key))}<br>n = {counts[key]}" for key in keys), "Average"]
    columns = [[_part(s["by_category"].get(key), "f1") for s in run.systems.values()] for key in keys]
    columns.append([_part(s["overall"], "f1") for s in run.systems.values()])
    if weighted := any(s.get("weighted") for s in run.systems.values()):
        head.append("Average, weighted")
        columns.append([_part(s.get("weighted"), "f1") for s in run.systems.values()])

    def row(name: str, system: Mapping[str, Any], place: int) -> list[Cell]:
        parts = [*(system["by_category"].get(key) for key in keys), system["overall"]]
        parts += [system.get("weighted")] if weighted else []
        cells = [(_pair(part), _best(columns[at], place)) for at, part in enumerate(parts)]
        interval = system["overall"].get("interval", {}).get("f1")
        cells[len(keys)] = (cells[len(keys)][0] + _range(interval), cells[len(keys)][1])
        return [(text(run.label(name)), ""), (f"{system['overall']['n']}", ""), *cells]

    rows = [(row(name, system, at), name == MAIN) for at, (name, system) in enumerate(run.systems.items())]
    return table(f"Table 1. F1 / BLEU-1 by kind of question. {text(run.name)}", head, rows)


def costs(run: Run) -> str:
    """Table 2: what the answers are worth, and what memory and reader took."""
    head = ["System", "F1", "BLEU-1", "Answer in<br>evidence", "at 512<br>tokens", "Evidence<br>tokens"]
    head += ["Reader<br>tokens", "tokens<br>a query", "LLM tokens<br>of memory"]
    head += ["Memory<br>seconds", "seconds<br>a query", "Reading<br>seconds"]
    every = [system["overall"] for system in run.systems.values()]
    at_512 = [part.get("answer_in_evidence_at", {}).get("512") for part in every]
    measured = [[_part(part, "f1") for part in every], [_part(part, "bleu1") for part in every]]
    measured += [[part.get("answer_in_evidence") for part in every], at_512]

    def row(name: str, part: Mapping[str, Any], place: int) -> list[Cell]:
        spans = [part.get("interval", {}).get(key) for key in ("f1", "bleu1", "answer_in_evidence")] + [None]
        cells = [
            (_percent(column[place]) + _range(interval), _best(column, place))
            for column, interval in zip(measured, spans, strict=True)
        ]
        asked = max(1, part["n"])
        llm = part.get("memory_llm_tokens")
        tokens, seconds = part["reader_tokens"], part["seconds"]
        spent = [_count(part["evidence_tokens"]), _count(tokens), _count(tokens / asked)]
        spent += ["not counted" if llm is None else _count(llm)]
        spent += [f"{seconds:.2f}", f"{seconds / asked:.3f}", f"{part['read_seconds']:.1f}"]
        return [(text(run.label(name)), ""), *cells, *((cell, "") for cell in spent)]

    rows = [(row(name, part, at), name == MAIN) for at, (name, part) in enumerate(zip(run.systems, every, strict=True))]
    return table(f"Table 2. Quality and cost. {text(run.name)}", head, rows)


def by_context(runs: Sequence[Run]) -> str:
    """Table 3: F1 and BLEU-1 by the length of the context; the runs share data set and reader."""
    ordered = sorted(runs, key=lambda run: int((run.context or "0K")[:-1]))
    names = list(dict.fromkeys(name for run in ordered for name in run.systems))
    parts = [[run.systems.get(name, {}).get("overall") for name in names] for run in ordered]
    columns = [[_part(part, "f1") for part in column] for column in parts]

    def row(name: str, place: int) -> list[Cell]:
        label = next(run.label(name) for run in ordered if name in run.systems)
        spans = [(column[place] or {}).get("interval", {}).get("f1") for column in parts]
        cells = [
            (_pair(column[place]) + _range(span), _best(columns[at], place))
            for at, (column, span) in enumerate(zip(parts, spans, strict=True))
        ]
        return [(text(label), ""), *cells]

    counts = [max(part["n"] for part in column if part) for column in parts]
    head = ["System", *(f"{run.context} tokens<br>n = {n}" for run, n in zip(ordered, counts, strict=True))]
    said = text(f"{ordered[0].result['dataset']}, {ordered[0].result['reader']}")
    rows = [(row(name, at), name == MAIN) for at, name in enumerate(names)]
    return table(f"Table 3. F1 / BLEU-1 by length of the context. {said}", head, rows)


def conventions(run: Run) -> str:
    """The same answers under every convention, before and after calibration."""
    kinds = [("f1", "F1"), ("bleu1", "BLEU-1"), ("raw_f1", "F1 raw"), ("raw_bleu1", "BLEU-1 raw")]
    every = [system["overall"] for system in run.systems.values()]
    names = {kind: dict.fromkeys(name for part in every for name in part.get(kind, {})) for kind, _ in kinds}
    keys = [(kind, label, name) for kind, label in kinds for name in names[kind]]
    head = ["System", *(f"{label}<br>{text(name)}" for _, label, name in keys)]
    rows = [
        ([(text(run.label(name)), ""), *((_percent(_part(part, kind, of)), "") for kind, _, of in keys)], name == MAIN)
        for name, part in zip(run.systems, every, strict=True)
    ]
    return table(f"Every convention; raw is before calibration of the answer. {text(run.name)}", head, rows)


def comparisons(run: Run) -> str:
    """zeromem minus each other system, on the questions that both answered; "" where nothing was compared."""
    done: Mapping[str, Any] = run.systems.get(MAIN, {}).get("vs", {})
    tests = {other: test for other, test in done.items() if other in run.systems}
    shown = [("f1", "F1"), ("bleu1", "BLEU-1"), ("answer_in_evidence", "Answer in evidence")]
    shown += [(f"answer_in_evidence@{n}tok", f"at {n} tokens") for n in (256, 512, 1024)]
    shown = [(key, label) for key, label in shown if any(key in test for test in tests.values())]
    if not shown:
        return ""
    rows = [
        ([(text(run.label(other)), ""), (str(test["n"]), ""), *((_test(test.get(key)), "") for key, _ in shown)], False)
        for other, test in tests.items()
    ]
    head = ["zeromem minus", "n", *(label for _, label in shown)]
    return table(f"Differences in points, 95% interval and p of the paired bootstrap. {text(run.name)}", head, rows)


def calibration(run: Run) -> str:
    """What calibrating the reader's answers did, in all and by rule; "" where no answer changed."""
    done: Mapping[str, Any] = run.systems.get(MAIN, {}).get("calibration", {})
    if not done.get("changed"):
        return ""
    changed, f1, bleu = str(done["changed"]), _test(done.get("f1")), _test(done.get("bleu1"))
    rows = [([("all changes", ""), (changed, ""), (f1, ""), (bleu, "")], True)]
    for rule, part in sorted(done["by_rule"].items(), key=lambda pair: -pair[1]["n"]):
        rows.append(([(text(rule), ""), (str(part["n"]), ""), (_signed(part["f1_diff"]), ""), (NOTHING, "")], False))
    head = ["Rule", "Answers", "F1, calibrated minus raw", "BLEU-1"]
    caption = f"Calibration of zeromem's answers: over all questions, and the mean of a rule's own. {text(run.name)}"
    return table(caption, head, rows)


def misses(run: Run, number: int) -> str:
    """How many answers of each system are wrong, by what went wrong; a count opens its questions."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in run.systems}
    for line in run.lines:
        if line["system"] in counts:
            counts[line["system"]][miss_of(line)] += 1
    systems = [name for name, count in counts.items() if count.total()]

    def cell(system: str, kind: str) -> Cell:
        count = counts[system][kind]
        where = f'data-run="{number}" data-system="{text(system)}" data-miss="{text(kind)}"'
        named = f'aria-label="{count}, {text(run.label(system))}, {text(kind)}"'
        return (f'<button type="button" class="link" {where} {named}>{count}</button>' if count else "0", "")

    rows = [
        ([(f"{kind}<br><small class=soft>{about}</small>", ""), *(cell(system, kind) for system in systems)], False)
        for kind, about in MISSES.items()
    ]
    totals = [(str(sum(counts[system][kind] for kind in MISSES)), "") for system in systems]
    rows.append(([("all", ""), *totals], True))
    head = ["Answers with an F1 below one half", *(text(run.short[system]) for system in systems)]
    return table(f"What went wrong, the first that applies. {text(run.name)}", head, rows) if systems else ""


def by_k(run: Run, series: Mapping[str, Mapping[int, float]]) -> str:
    """The numbers of Figure 4."""
    ks = sorted({k for points in series.values() for k in points})
    rows = [
        ([(text(label), ""), *((_percent(points.get(k)), "") for k in ks)], label == run.short.get(MAIN))
        for label, points in series.items()
    ]
    return table("Percent by k", ["System", *map(str, ks)], rows)


def _part(part: Mapping[str, Any] | None, kind: str, convention: str = CONVENTION) -> float | None:
    value = (part or {}).get(kind, {}).get(convention)
    return None if value is None else float(value)


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.2f}"


def _pair(part: Mapping[str, Any] | None) -> str:
    f1, bleu = _part(part, "f1"), _part(part, "bleu1")
    return NOTHING if f1 is None else f"{_percent(f1)} / {_percent(bleu)}"


def _count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _range(interval: Interval) -> str:
    return f"<br><small>{100 * interval[0]:.1f} to {100 * interval[1]:.1f}</small>" if interval else ""


def _signed(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-", "−")


def _test(test: Mapping[str, float] | None) -> str:
    if not test:
        return NOTHING
    low, high = (f"{100 * test[end]:+.1f}".replace("-", "−") for end in ("low", "high"))
    p = "p &lt; 0.001" if test["p"] < 0.001 else f"p {test['p']:.3f}"
    return f"{_signed(test['diff'])}<br><small>{low} to {high}, {p}</small>"


def _best(column: Sequence[float | None], place: int) -> str:
    known = [value for value in column if value is not None]
    return "best" if len(known) > 1 and column[place] == max(known) else ""
