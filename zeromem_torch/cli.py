"""The `zeromem` command."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.demo import run_demo
from zeromem_torch.evaluation.datasets import DATASETS, load_dataset
from zeromem_torch.evaluation.misses import describe, find_misses
from zeromem_torch.evaluation.run import SYSTEMS, Found, run_retrieval, table
from zeromem_torch.library import ZeroMem
from zeromem_torch.substrate.encoder import CachedEncoder, load_encoder
from zeromem_torch.substrate.traces import ZeroMemError

EVAL_HELP = """\
Measures how much of each question's evidence a system ranks first, and how much fits a budget of tokens.

  recall@k    share of the evidence among the k best units of the main ranking M(q)
  all@k       questions whose evidence is all there
  r@512tok    share of the evidence in what a reader is handed within 512 tokens, R(q)
  r handed    the same for the paper's R(q): top 5 and what closes it; turns and tokens say how much that is

examples:
  zeromem eval retrieval locomo --data locomo10.json
  zeromem eval retrieval hotpotqa --data questions.json.gz --corpus corpus.jsonl.gz --json out.json
  zeromem eval retrieval locomo --data locomo10.json --systems zeromem,context --limit 100
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 = done, 1 = the input cannot be used (said on stderr), 2 = the command line is wrong."""
    options = _parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        _check_device(options.device)
        result: int = options.run(options)
    except BrokenPipeError:  # the reader of our output has gone, as in `zeromem demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError) as error:  # a ZeroMemError is a ValueError
        print(f"zeromem: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return result


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--encoder",
        metavar="NAME",
        help="minilm, bge-m3, a folder or a hub name (default: the configuration's, which is minilm)",
    )
    common.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default: %(default)s)")
    common.add_argument("--config", type=Path, metavar="TOML", help="differences from the default configuration")
    common.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: PyTorch's)")
    common.add_argument(
        "--cache", type=Path, metavar="FILE", help="where encoded texts are kept (default: in the user's cache folder)"
    )
    parser = argparse.ArgumentParser(prog="zeromem", description="Long-term memory for LLM agents, with no LLM in it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        parents=[common],
        help="store a shipped conversation and ask it questions",
        description="Stores the shipped conversations in an empty memory, asks every question at once, and shows what "
        "was found and why.",
    )
    demo.set_defaults(run=_demo)

    evaluate = commands.add_parser("eval", help="measure systems on a benchmark")
    kinds = evaluate.add_subparsers(required=True, metavar="WHAT")
    retrieval = kinds.add_parser(
        "retrieval",
        parents=[common],
        help="is the evidence found?",
        description=EVAL_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    retrieval.add_argument("dataset", choices=list(DATASETS), metavar="DATASET", help=", ".join(DATASETS))
    retrieval.add_argument("--data", type=Path, required=True, metavar="PATH", help=".json, .jsonl, or either gzipped")
    retrieval.add_argument("--corpus", type=Path, metavar="PATH", help="documents to search, for hotpotqa and 2wiki")
    retrieval.add_argument(
        "--systems", default=",".join(SYSTEMS), metavar="A,B", help=f"some of {', '.join(SYSTEMS)} (default: all)"
    )
    retrieval.add_argument("--audited", action="store_true", help="locomo: citations as corrected by label_errors.json")
    retrieval.add_argument("--limit", type=_positive, metavar="N", help="only the first N questions")
    retrieval.add_argument("--misses", type=_positive, metavar="N", help="print N misses of zeromem, by kind")
    retrieval.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    retrieval.set_defaults(run=_eval_retrieval)
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise ZeroMemError.of("device", "one that PyTorch finds here", name, f"try cpu ({error})") from error


def _demo(options: argparse.Namespace) -> int:
    config = _config(options)
    run_demo(ZeroMem(config, encoder=_encoder(options, config), device=options.device))
    return 0


def _eval_retrieval(options: argparse.Namespace) -> int:
    systems = list(dict.fromkeys(name.strip() for name in options.systems.split(",") if name.strip()))
    config = _config(options)
    data = load_dataset(options.dataset, options.data, options.corpus, audited=options.audited, limit=options.limit)
    if options.json:
        _check_writable(options.json)
    kept: dict[str, dict[str, Found]] = {}
    result = run_retrieval(data, systems, _encoder(options, config), config, device=options.device, kept=kept)
    for line in table(result):
        print(line)
    if options.misses and "zeromem" in kept:
        main_ranking = {question: found.main for question, found in kept["zeromem"].items()}
        print("\n".join(describe(find_misses(data, main_ranking), options.misses)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _check_writable(path: Path) -> None:
    """What cannot be written should not cost a run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ZeroMemError.of("json", "a file that can be written", str(path), f"name another ({error})") from error


def _config(options: argparse.Namespace) -> ZeroMemConfig:
    try:
        return ZeroMemConfig.from_toml(options.config) if options.config else ZeroMemConfig()
    except OSError as error:
        raise ZeroMemError.of("config", "a TOML file", str(options.config), f"check the path ({error})") from error


def _encoder(options: argparse.Namespace, config: ZeroMemConfig) -> CachedEncoder:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return CachedEncoder(
        load_encoder(options.encoder or config.encoder.name, device=options.device),
        options.cache or home / "zeromem" / "encoded.sqlite",
    )
