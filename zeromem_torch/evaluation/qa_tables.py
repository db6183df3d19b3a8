"""The paper's tables and the data of its figures, for a terminal: F1 and BLEU-1 in percent, by its convention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zeromem_torch.evaluation.scores import HEADLINE, depth_of
from zeromem_torch.evaluation.systems import ABLATIONS, DEPTHS, MAIN

Result = Mapping[str, Any]
CAPS = (1, 2, 3, 5, 10, 15, 20)
"""Of the depths measured, those a terminal has room for."""


def tables(result: Result) -> Iterator[str]:
    """All that one run fills, with what was compared."""
    yield (
        f"{result['dataset']} ({result['split']}): {result['questions']} questions over {result['traces']} traces; "
        f"reader {result['reader']}; encoder {result['encoder']}"
    )
    yield from (f"  note: {note}" for note in result["notes"])
    yield from (f"  {name} did not run: {why}" for name, why in result["unavailable"].items())
    yield from (f"  {name}: {label}" for name, label in result["labels"].items() if name in result["systems"])
    for part in (table1, table2, conventions, figure3, figure4, comparisons):
        yield from part(result)


def table1(result: Result) -> Iterator[str]:
    """F1 / BLEU-1 by category; a weighted average where the benchmark's own proportions are known."""
    systems: Mapping[str, Any] = result["systems"]
    categories = [name for name in result["categories"] if any(name in s["by_category"] for s in systems.values())]
    weighted = any(system["weighted"] for system in systems.values())
    yield f"Table 1: F1 / BLEU-1 ({HEADLINE}) by category"
    labels = {name: result["categories"][name] for name in categories}
    heads = [name[:15] if label == name else f"{name} {label}"[:15] for name, label in labels.items()]
    heads += ["average"] + ["weighted"] * weighted
    yield f"  {'system':<22}{'n':>5}" + "".join(f"{head:>16}" for head in heads)
    for name, system in systems.items():
        parts = [system["by_category"].get(category) for category in categories] + [system["overall"]]
        parts += [system["weighted"]] * weighted
        yield f"  {name:<22}{system['overall']['n']:>5}" + "".join(f"{_both(part):>16}" for part in parts)


def table2(result: Result) -> Iterator[str]:
    """Quality, tokens and seconds. Memory operations are building and searching; the reader comes after them."""
    heads = ["F1", "BLEU-1", "in evid.", "LLM tok.", "enc. tok.", "reader tok.", "a query"]
    heads += ["memory s", "a query", "read s"]
    yield "Table 2: quality, and what memory operations (LLM tokens, encoder tokens, seconds) and the reader spent"
    yield f"  {'system':<22}" + "".join(f"{head:>12}" for head in heads)
    for name, system in result["systems"].items():
        row = system["overall"]
        llm = "uncounted" if row["memory_llm_tokens"] is None else f"{row['memory_llm_tokens']:,}"
        cells = (
            _percent(row["f1"][HEADLINE]), _percent(row["bleu1"][HEADLINE]), _percent(row["answer_in_evidence"]), llm,
            f"{row['encoder_tokens']:,.0f}", f"{row['reader_tokens']:,}", f"{row['reader_tokens'] / row['n']:,.1f}",
            f"{row['seconds']:.2f}", f"{row['seconds'] / row['n']:.3f}", f"{row['read_seconds']:.1f}",
        )  # fmt: skip
        yield f"  {name:<22}" + "".join(f"{cell:>12}" for cell in cells)


def table3(results: Mapping[str, Result]) -> Iterator[str]:
    """F1 / BLEU-1 by the length of the context; the results by length."""
    names = list(dict.fromkeys(name for result in results.values() for name in result["systems"]))
    yield f"Table 3: F1 / BLEU-1 ({HEADLINE}) by length of the context"
    yield f"  {'system':<22}" + "".join(f"{context:>16}" for context in results)
    for name in names:
        parts = [result["systems"].get(name, {}).get("overall") for result in results.values()]
        yield f"  {name:<22}" + "".join(f"{_both(part):>16}" for part in parts)


def conventions(result: Result) -> Iterator[str]:
    """The same answers under every convention."""
    every = [system["overall"] for system in result["systems"].values()]
    names = [(kind, name) for kind in ("f1", "bleu1") for name in (every[0][kind] if every else ())]
    yield "Conventions: " + ", ".join(f"{kind} {name}" for kind, name in names)
    for name, system in result["systems"].items():
        yield f"  {name:<22}" + "".join(f"{_percent(system['overall'][kind][c]):>8}" for kind, c in names)


def figure3(result: Result) -> Iterator[str]:
    """Ablations, each against the whole."""
    ablations = [name for name in ABLATIONS if name in result["systems"]]
    if ablations == [MAIN] or not ablations:
        return
    yield "Figure 3: ablations, F1 / BLEU-1, and zeromem's lead in F1 with its 95% interval"
    versus = result["systems"].get(MAIN, {}).get("vs", {})
    for name in ablations:
        test = versus.get(name, {}).get("f1")
        yield f"  {name:<22}{_both(result['systems'][name]['overall']):>16}{f'   {_test(test)}' if test else ''}"


def figure4(result: Result) -> Iterator[str]:
    """How much is handed over: answer-in-evidence by cap, and F1 / BLEU-1 of the caps that were read."""
    yield "Figure 4: answer in evidence by k, and within 256 / 512 / 1024 tokens"
    yield f"  {'system':<22}" + "".join(f"{f'k={k}':>7}" for k in CAPS)
    for name, system in result["systems"].items():
        row = system["overall"]
        if depth_of(name) is None and row["answer_in_evidence_k"]:
            shares = [row["answer_in_evidence_k"][DEPTHS.index(k)] for k in CAPS]
            at = " / ".join(_percent(share) for share in row["answer_in_evidence_at"].values())
            yield f"  {name:<22}" + "".join(f"{_percent(share):>7}" for share in shares) + f"   {at}"
    for name, system in result["systems"].items():
        if depth_of(name) is not None:
            yield f"  {name:<22}{_both(system['overall']):>16}"


def comparisons(result: Result) -> Iterator[str]:
    """What zeromem leads or trails by, and what answer calibration is worth."""
    versus: Mapping[str, Any] = result["systems"].get(MAIN, {}).get("vs", {})
    for other, tests in versus.items():
        shown = (f"{name} {_test(test)}" for name, test in tests.items() if name != "n")
        yield f"{MAIN} - {other} (n {tests['n']}): " + "; ".join(shown)
    for name, system in result["systems"].items():
        if test := system["calibration"].get("f1"):
            changed = system["calibration"]["changed"]
            yield f"{name}, answers calibrated - raw: F1 {_test(test)}; {changed} of {system['overall']['n']} changed"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _both(part: Mapping[str, Any] | None) -> str:
    return "-" if not part else f"{_percent(part['f1'][HEADLINE])} / {_percent(part['bleu1'][HEADLINE])}"


def _test(test: Mapping[str, float]) -> str:
    low, high = 100 * test["low"], 100 * test["high"]
    return f"{100 * test['diff']:+.1f} [{low:+.1f}, {high:+.1f}] p {test['p']:.4f}"
