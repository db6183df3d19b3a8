"""Print the figures of `bench/results/` as Markdown: `python bench/table.py`, or name the files.

Nothing is computed here: the files are what pipeline.py, encoder.py, operators.py and serving.py wrote. With
--headline, only what the README shows of them. Those of `zeromem eval` are printed by retrieval_table.py and
answers_table.py.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KINDS = ("pipeline", "encoder", "operators", "serving")
AIMS = {
    "retrieval_vs_linearrag_locomo": ("all stages but MaxSim, against LinearRAG's search, LoCoMo", "30x"),
    "retrieval_vs_linearrag_hotpotqa": ("the same, HotpotQA's pool", "30x"),
    "pagerank_vs_igraph_locomo": ("PageRank against igraph, one core each, LoCoMo", "12x"),
    "pagerank_vs_igraph_60k": ("the same, the pool's 60k nodes", "3x"),
    "bm25_vs_bm25s_numba": ("BM25, best 50, against bm25s with numba, one core each", "1x"),
    "encoder_vs_sentence_transformers": ("encoder against sentence-transformers, mixed lengths", "1x"),
    "idle_memories_1000_vs_1": ("a search with 999 idle memories beside, over one without", "flat: 1x"),
}


PIPELINE = {
    "data": "data", "what": "what", "queries": "queries at once", "texts": "texts at once", "threads": "threads",
    "median_us": "median us each", "p95_us": "p95", "p99_us": "p99", "cold_us": "first call", "floor_share": "floor",
    "peak_mib": "MiB",
}  # fmt: skip
ENCODER = {
    "load": "load", "what": "what", "batch_tokens": "tokens a batch", "median_us": "median us a text", "p95_us": "p95",
    "tokens_s": "tokens/s", "floor_share": "floor", "peak_mib": "MiB",
}  # fmt: skip


SERVING = {
    "what": "what", "clients": "clients", "rate": "asked a second", "throughput": "answered a second",
    "p50_ms": "p50 ms", "p95_ms": "p95", "p99_ms": "p99", "shed_share": "refused", "late_share": "late",
    "errors": "errors", "peak_mib": "MiB at most",
}  # fmt: skip
SOAK = {
    "seconds": "seconds", "clients": "clients", "searches": "searches", "adds": "adds", "deletes": "deletes",
    "refused": "refused", "errors": "errors", "acknowledged_and_missing_or_deleted_and_there": "lost or undead",
    "mib_at_half_time": "MiB at half time", "mib_in_the_last_sixth": "MiB at the end", "peak_mib": "MiB at most",
}  # fmt: skip
BATCHING = {
    "batched_vs_unbatched": "queries a second with batches, over one at a time, texts encoded",
    "batched_vs_unbatched_cached": "the same, vectors known",
}


def read(path: Path) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """What made a file, and its figures."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        head, *figures = map(json.loads, text.splitlines())
        return {**head["made"], **{name: value for name, value in head.items() if name != "made"}}, figures
    whole = json.loads(text)
    return whole, whole["figures"]


def heading(made: Mapping[str, Any]) -> Iterator[str]:
    threads = _threads(made["threads"])
    by = f"{threads}, commit {made['commit'][:9]}, torch {made['versions']['torch']}"
    yield f"**{made['device']}**, {by}: `{made['command']}`"
    if rates := made.get("floors"):
        yield ""
        yield "Floors measured first: " + ", ".join(f"{_spoken(name)} {value:,.4g}" for name, value in rates.items())
    for line in made.get("skipped", ()):
        yield f"- left out: {line}"
    yield ""


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def _spoken(name: str) -> str:
    return name.replace("_gb_s", " (GB/s)").replace("_gflop_s", " (GFLOP/s)").replace("_", " ")


def ratios(made: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name, value in made["ratios"].items():
        what, aim = AIMS.get(name, (name.replace("_", " "), ""))
        rows.append([what, aim, "not measured" if value is None else f"{value:.3g}x", f"`{name}`"])
    yield from _table(("figure", "aim", "measured", "name"), rows)


def pipeline(made: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from heading(made)
    yield from ratios(made)
    for figure in dict.fromkeys(row["figure"] for row in figures):
        own = [row for row in figures if row["figure"] == figure]
        timed = [row for row in own if not row["what"].startswith("stage ")]
        yield f"{figure}:"
        yield ""
        yield from _figures(timed, PIPELINE)
        stages = [row for row in own if row["what"].startswith("stage ")]
        for data in dict.fromkeys(row["data"] for row in stages):
            parts = [
                f"{r['what'][6:]} {r['median_us']:,.4g} us ({r['share']:.0%})" for r in stages if r["data"] == data
            ]
            yield f"Where a query's time goes, {data}: " + ", ".join(parts)
            yield ""


def encoder(made: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from heading(made)
    yield from _figures(figures, ENCODER)
    for name, value in made["ratios"].items():
        yield f"- `{name}`: {'not measured' if value is None else f'{value:.3g}x'}"
    yield ""


def operators(made: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from heading(made)
    for op in dict.fromkeys(row["op"] for row in figures):
        own = [row for row in figures if row["op"] == op]
        counts = sorted({row["queries"] for row in own})
        rows = []
        for size, backend in dict.fromkeys((row["size"], row["backend"]) for row in own):
            held = {row["queries"]: row for row in own if (row["size"], row["backend"]) == (size, backend)}
            cells = [_with_floor(held[count]) if count in held else "" for count in counts]
            rows.append([size, backend, *cells])
        yield f"{op}, us a query (share of the floor) by queries at once:"
        yield ""
        yield from _table(("size", "back end", *map(str, counts)), rows)


def serving(made: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from heading({**made, "threads": made["server_threads"]})
    yield (
        f"Threads are those of the server's PyTorch; its budget is {made['memory_budget']}, and the load comes from "
        f"another process on the same machine. {made['data']}: {made['traces']:,} traces."
    )
    yield ""
    if figures[0]["what"] == "soak":
        (row,) = figures
        yield from _table(tuple(SOAK.values()), [[_cell(name, row[name]) for name in SOAK]])
        return
    yield from _figures(figures, SERVING)
    for name, what in BATCHING.items():
        yield f"- {what}: {made[name]:.3g}x (`{name}`)"
    yield ""


def headline(made: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the README shows of a file: how it was made, and its ratios or its table."""
    if "ratios" not in made:
        yield from serving(made, figures)
        return
    yield from heading({**made, "skipped": (), "floors": None})
    yield from ratios(made)


def _with_floor(row: Mapping[str, Any]) -> str:
    return f"{_number(row['median_us'])} ({_share(row.get('floor_share'))})"


def _figures(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Iterator[str]:
    yield from _table(list(columns.values()), [[_cell(name, row.get(name)) for name in columns] for row in rows])


def _cell(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return _share(value) if name.endswith("share") else _number(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    yield f"| {' | '.join(heads[i] for i in kept)} |"
    yield "|---" * len(kept) + "|"
    for row in rows:
        yield f"| {' | '.join(row[i] for i in kept)} |"
    yield ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def lines(path: Path, *, short: bool = False) -> Iterator[str]:
    made, figures = read(path)
    kind = next((kind for kind in KINDS if f"bench/{kind}.py" in made["command"]), None)
    if kind is None:
        raise SystemExit(f"{path}: expected a file that {', '.join(f'{k}.py' for k in KINDS)} wrote")
    if short:
        yield from headline(made, figures)
        return
    yield f"### {kind}: {path.name}"
    yield ""
    whole = {"pipeline": pipeline, "encoder": encoder, "operators": operators, "serving": serving}
    yield from whole[kind](made, figures)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="(default: those of bench/results)")
    parser.add_argument("--headline", action="store_true", help="only what the README shows")
    args = parser.parse_args(argv)
    files = args.files or [path for kind in KINDS for path in sorted(RESULTS.glob(f"{kind}-*.json*"))]
    if not files:
        print(f"no results yet in {RESULTS}: a bench writes them with --json", file=sys.stderr)
    for path in files:
        print("\n".join(lines(path, short=args.headline)))


if __name__ == "__main__":
    main()
