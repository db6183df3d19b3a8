"""`zeromem demo` and `zeromem eval`: what the method finds, shown and measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromem_torch.cli.options import (
    cached_encoder,
    check_writable,
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

if TYPE_CHECKING:
    from zeromem_torch.evaluation.datasets import Dataset
    from zeromem_torch.evaluation.run import Found

MEASURES = """\
Measures how much of each question's evidence a system ranks first, and how much fits a budget of tokens.

  recall@k    share of the evidence among the k best units of the main ranking M(q)
  all@k       questions whose evidence is all there
  r@512tok    share of the evidence in what a reader is handed within 512 tokens, R(q)
  r handed    the same for the paper's R(q): top 5 and what closes it; turns and tokens say how much that is
"""


def demo_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _demo,
        "Stores the shipped conversations in an empty memory, answers questions from it, and shows each answer with "
        "what it cites, what was found and why, and what it cost. Nothing is kept.",
        "zeromem demo",
        "zeromem demo --reader openai:MODEL@http://localhost:8000/v1",
        "zeromem demo --encoder bge-m3 --device cuda",
    )
    reader_option(parser)
    encoding_options(parser)


def eval_command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measures systems on a benchmark."
    kinds = parser.add_subparsers(required=True, metavar="WHAT", title="commands")
    own: Any = {"fill": _retrieval_command}  # our Parser's, which argparse's own types do not know
    kinds.add_parser("retrieval", help="is the evidence found?", **own)
    own = {"fill": _qa_command}
    kinds.add_parser("qa", help="are the questions answered?", **own)


def _qa_command(parser: argparse.ArgumentParser) -> None:
    from zeromem_torch.cli.qa import add_qa_parser

    add_qa_parser(parser)


def _retrieval_command(parser: argparse.ArgumentParser) -> None:
    from zeromem_torch.evaluation.run import SYSTEMS

    describe(
        parser,
        _eval_retrieval,
        MEASURES,
        "zeromem eval retrieval locomo --data locomo10.json",
        "zeromem eval retrieval hotpotqa --data questions.json.gz --corpus corpus.jsonl.gz --json out.json",
        "zeromem eval retrieval locomo --data locomo10.json --systems zeromem,context --limit 100",
    )
    dataset_arguments(parser)
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), metavar="A,B", help=f"some of {', '.join(SYSTEMS)} (default: all)"
    )
    parser.add_argument(
        "--router",
        type=Path,
        metavar="CHECKPOINT",
        help="route and rank by what `zeromem train router` wrote there; unlearned is zeromem without it",
    )
    parser.add_argument("--audited", action="store_true", help="locomo: citations as corrected by label_errors.json")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions")
    parser.add_argument("--misses", type=positive, metavar="N", help="print N misses of zeromem, by kind")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    encoding_options(parser)


def _demo(options: argparse.Namespace) -> int:
    from zeromem_torch.demo import run_demo
    from zeromem_torch.library import ZeroMem

    use_threads_and_device(options)
    config = config_of(options) or ZeroMemConfig()
    run_demo(ZeroMem(config, encoder=cached_encoder(options, config), device=options.device), options.reader)
    return 0


def _eval_retrieval(options: argparse.Namespace) -> int:
    from zeromem_torch.evaluation.datasets import load_dataset
    from zeromem_torch.evaluation.misses import describe as describe_misses
    from zeromem_torch.evaluation.misses import find_misses
    from zeromem_torch.evaluation.run import run_retrieval, table

    systems = list(dict.fromkeys(name.strip() for name in options.systems.split(",") if name.strip()))
    use_threads_and_device(options)
    config = config_of(options) or ZeroMemConfig()
    data = load_dataset(options.dataset, options.data, options.corpus, audited=options.audited, limit=options.limit)
    if options.json:
        check_writable(options.json)
    if options.router:
        _say_router(options.router, data, beside="zeromem" in systems)
    kept: dict[str, dict[str, Found]] = {}
    encoder = cached_encoder(options, config)
    result = run_retrieval(data, systems, encoder, config, device=options.device, kept=kept, router=options.router)
    for line in table(result):
        print(line)
    if options.misses and "zeromem" in kept:
        main_ranking = {question: found.main for question, found in kept["zeromem"].items()}
        print("\n".join(describe_misses(find_misses(data, main_ranking), options.misses)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _say_router(folder: Path, data: Dataset, *, beside: bool) -> None:
    """Which weights are measured, and whether they were learned from what they are measured on."""
    from zeromem_torch.training.about import read_about

    told = read_about(folder)
    own = f", learned from {told['questions']} questions of {told['dataset']} ({told['split']})" if told else ""
    say(f"weights of {folder}{own}{'; unlearned is zeromem with those of the configuration' if beside else ''}")
    if told.get("sha256") == data.sha256:
        say("warning: they were learned from this file: these figures flatter, and say nothing of other questions")
