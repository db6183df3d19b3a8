"""Print result files of answers as Markdown: `python bench/answers_table.py bench/results/answers-*.json`.

The files are what `zeromem eval qa ... --json` wrote; nothing is computed here. F1 and BLEU-1 are the paper's (gam), in
percent.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HEADS = ("F1", "F1 as said", "BLEU-1", "answer in evidence", "@256", "@512", "@1024", "reader tokens")
MEASURES = {
    "answer_in_evidence": "answer in what was handed",
    "answer_in_evidence@512tok": "answer within 512 tokens",
    "f1": "F1",
}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    systems: Mapping[str, Any] = result["systems"]
    yield (
        f"**{result['dataset']}** (`{result['split']}`, {result['questions']} questions"
        f"{', drawn with seed {}'.format(result['seed']) if result['limit'] else ''}; "
        f"reader {result['reader']}, at most {result['top_k']} items"
        f"{' and {:,} tokens'.format(result['token_budget']) if result['token_budget'] else ''}; "
        f"encoder {result['encoder']}, {result['device']}, commit {result['commit'][:9]})"
    )
    yield ""
    yield f"| system | {' | '.join(HEADS)} |"
    yield "|---|" + "---|" * len(HEADS)
    for name, system in systems.items():
        row = system["overall"]
        shares = [row["f1"]["gam"], row["raw_f1"]["gam"], row["bleu1"]["gam"], row["answer_in_evidence"]]
        shares += [row["answer_in_evidence_at"][budget] for budget in ("256", "512", "1024")]
        cells = ["-" if share is None else f"{100 * share:.1f}" for share in shares]
        cells.append(f"{row['reader_tokens'] / row['n']:,.0f}")
        shown = result["labels"].get(name, name) if name in ("rag", "long_llm", "no_answer_calibration") else name
        yield f"| {'**zeromem**' if name == 'zeromem' else shown} | {' | '.join(cells)} |"
    yield ""
    for other, tests in systems["zeromem"]["vs"].items():
        if other == "no_answer_calibration":  # the last line has it
            continue
        told = [f"{words} {_test(tests[measure])}" for measure, words in MEASURES.items() if measure in tests]
        yield f"- zeromem - {other}: {'; '.join(told)}"
    for name, system in systems.items():
        if name == "zeromem" and (test := system["calibration"].get("f1")):
            changed = f"{system['calibration']['changed']} of {system['overall']['n']} answers changed"
            yield f"- answers of zeromem calibrated - as said: F1 {_test(test)}; {changed}"
    yield ""


def _test(test: Mapping[str, float]) -> str:
    return f"{100 * test['diff']:+.1f} [{100 * test['low']:+.1f}, {100 * test['high']:+.1f}]"


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for path in parser.parse_args(arguments).files:
        print("\n".join(lines(json.loads(path.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
