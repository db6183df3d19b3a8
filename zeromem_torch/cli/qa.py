"""`zeromem eval qa` and `zeromem report`: answers measured, and shown."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from zeromem_torch.cli.options import (
    cached_encoder,
    check_writable,
    command_line,
    config_of,
    dataset_arguments,
    describe,
    encoding_options,
    positive,
    reader_option,
    say,
    use_threads_and_device,
)
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.substrate.traces import ZeroMemError

QA = """\
Asks a reader every question over what each system found, and measures the answers. All systems share the reader, its
prompt, the cap on what it is handed, and the calibration of its answers; only the reader spends LLM tokens.

With --json OUT.json each answer is kept in OUT.jsonl as it comes. The same command goes on where it was stopped, and
asks nothing twice. `zeromem report OUT.json` shows the run as a page.

A system may carry a cap of its own, zeromem@10: how many items are handed over instead of the configuration's."""

COMPARED = "zeromem,no_answer_calibration,bm25,dense,hybrid,context,rag"


def add_qa_parser(parser: argparse.ArgumentParser) -> None:
    from zeromem_torch.evaluation.long_context import CONTEXTS
    from zeromem_torch.evaluation.systems import SYSTEMS

    describe(
        parser,
        _eval_qa,
        QA,
        "zeromem eval qa locomo --data locomo10.json --reader embedded --limit 100 --json locomo.json",
        "zeromem eval qa hotpotqa --data dev.json.gz --corpus corpus.jsonl.gz --context 56k --reader embedded",
        "zeromem eval qa locomo --data locomo10.json --reader openai:MODEL@http://localhost:8000/v1",
    )
    dataset_arguments(parser)
    parser.add_argument("--context", choices=list(CONTEXTS), help="hotpotqa: tokens of each question's context")
    parser.add_argument("--audited", action="store_true", help="locomo: citations as corrected by label_errors.json")
    reader_option(parser)
    parser.add_argument(
        "--systems",
        default=COMPARED,
        metavar="A,B",
        help=f"some of {', '.join(SYSTEMS)} (default: %(default)s)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only N questions, drawn with the seed")
    parser.add_argument("--token-budget", type=positive, metavar="N", help="tokens of evidence the reader is handed")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the questions (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there, and every answer beside it")
    encoding_options(parser)


def _eval_qa(options: argparse.Namespace) -> int:
    from zeromem_torch.evaluation.datasets import load_dataset
    from zeromem_torch.evaluation.long_context import load_long_context
    from zeromem_torch.evaluation.qa import run_qa
    from zeromem_torch.evaluation.qa_tables import tables
    from zeromem_torch.reader import load_reader

    if options.context and (options.dataset != "hotpotqa" or not options.corpus):
        options.fail("--context needs hotpotqa, and its --corpus")
    systems = list(dict.fromkeys(name.strip() for name in options.systems.split(",") if name.strip()))
    use_threads_and_device(options)
    config = config_of(options) or ZeroMemConfig()
    if options.context:
        data = load_long_context(options.data, options.corpus, options.context)
    else:
        data = load_dataset(options.dataset, options.data, options.corpus, audited=options.audited)
    if options.json:
        check_writable(options.json)
    result = run_qa(
        data,
        systems,
        load_reader(options.reader),
        cached_encoder(options, config),
        config,
        out=options.json.with_suffix(".jsonl") if options.json else None,
        token_budget=options.token_budget,
        limit=options.limit,
        seed=options.seed,
        device=options.device,
    )
    # Where files lie on this machine is no part of what was done.
    result["command"] = command_line()
    for line in tables(result):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def report_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _report,
        "Makes one HTML page of runs of `zeromem eval qa`: tables, figures, differences with intervals, what went "
        "wrong, and every question with its evidence and answer. The page needs no network, and holds the texts of the "
        "run: share it as you would share the data. Needs matplotlib: pip install '.[report]' in a clone.",
        "zeromem report locomo.json",
        "zeromem report hotpotqa-56k.json hotpotqa-224k.json hotpotqa-448k.json --out hotpotqa.html",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="what `zeromem eval qa --json RUN` wrote")
    parser.add_argument(
        "--out", default="report.html", metavar="FILE", help="where to write; - is stdout (default: %(default)s)"
    )


def _report(options: argparse.Namespace) -> int:
    from zeromem_torch.evaluation.report import build_report

    page = build_report(options.runs)
    if options.out == "-":
        sys.stdout.write(page)
        return 0
    try:
        Path(options.out).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ZeroMemError.of("out", "a file that can be written", options.out, f"name another ({error})") from error
    say(f"wrote {options.out} ({len(page) / 1e6:.1f} MB); open it in a browser")
    return 0
