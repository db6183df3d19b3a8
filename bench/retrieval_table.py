"""Print result files as Markdown: `python bench/retrieval_table.py bench/results/retrieval-*.json`.

The files are what `zeromem eval retrieval ... --json` wrote; nothing is computed here.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("recall@2", "recall@5", "recall@10", "all@5", "recall@512tok", "recall@1024tok", "recall_handed")
COMPARE = {"locomo": ("context", "recall@5")}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    systems: Mapping[str, Any] = result["systems"]
    yield (
        f"**{result['dataset']}** (`{result['split']}`, {result['traces']} traces, "
        f"n = {systems['zeromem']['overall']['n']}; encoder {result['encoder']}, {result['device']}, "
        f"commit {result['commit'][:9]}, torch {result['versions']['torch']})"
    )
    yield ""
    yield f"| system | {' | '.join(COLUMNS)} | tokens handed |"
    yield "|---|" + "---|" * (len(COLUMNS) + 1)
    for name, system in systems.items():
        row = system["overall"]
        cells = " | ".join(f"{row[column]:.3f}" for column in COLUMNS)
        yield f"| {'**zeromem**' if name == 'zeromem' else name} | {cells} | {row['tokens_handed']:.0f} |"
    other, measure = COMPARE.get(result["dataset"], ("hybrid", "all@5"))
    test = systems["zeromem"]["vs"][other][measure]
    yield ""
    yield (
        f"zeromem - {other}, {measure}: {test['diff']:+.3f} "
        f"[{test['low']:+.3f}, {test['high']:+.3f}], p = {test['p']:.4f} (paired bootstrap over questions)"
    )
    if result["dataset"] == "locomo":
        yield ""
        names = ("zeromem", "context", "hybrid")
        heads = " | ".join(f"{name} @5 / @10" for name in names)
        yield f"| category | n | {heads} | zeromem - context, @10 |"
        yield "|---|---|---|---|---|---|"
        for category, label in result["categories"].items():
            rows = [systems[name]["by_category"][category] for name in names]
            cells = " | ".join(f"{row['recall@5']:.3f} / {row['recall@10']:.3f}" for row in rows)
            tests = systems["zeromem"]["vs_by_category"][category]["context"]["recall@10"]
            yield f"| {category} {label} | {rows[0]['n']} | {cells} | {tests['diff']:+.3f} (p {tests['p']:.4f}) |"
    yield ""


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for path in parser.parse_args(arguments).files:
        print("\n".join(lines(json.loads(path.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
