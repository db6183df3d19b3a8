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
from zeromem_torch.evaluation.run import SYSTEMS, run_retrieval, table
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
        result: int = options.run(options)
    except (ZeroMemError, FileNotFoundError, ValueError) as error:
        print(f"zeromem: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as in `zeromem demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--encoder", default="minilm", metavar="NAME", help="minilm, bge-m3, a folder or a hub name")
    common.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default: %(default)s)")
    common.add_argument("--config", type=Path, metavar="TOML", help="differences from the default configuration")
    common.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's)")
    common.add_argument(
        "--cache", type=Path, metavar="FILE", help="where encoded texts are kept (default: in the user's cache folder)"
    )
    parser = argparse.ArgumentParser(prog="zeromem", description="Long-term memory for LLM agents, with no LLM in it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", parents=[common], help="store a shipped conversation and ask it questions", description=run_demo.__doc__
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
    retrieval.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    retrieval.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    retrieval.set_defaults(run=_eval_retrieval)
    return parser


def _demo(options: argparse.Namespace) -> int:
    run_demo(ZeroMem(_config(options), encoder=_encoder(options), device=options.device))
    return 0


def _eval_retrieval(options: argparse.Namespace) -> int:
    systems = [name.strip() for name in options.systems.split(",") if name.strip()]
    data = load_dataset(options.dataset, options.data, options.corpus, audited=options.audited, limit=options.limit)
    result = run_retrieval(data, systems, _encoder(options), _config(options), device=options.device)
    for line in table(result):
        print(line)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _config(options: argparse.Namespace) -> ZeroMemConfig:
    return ZeroMemConfig.from_toml(options.config) if options.config else ZeroMemConfig()


def _encoder(options: argparse.Namespace) -> CachedEncoder:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return CachedEncoder(
        load_encoder(options.encoder, device=options.device), options.cache or home / "zeromem" / "encoded.sqlite"
    )
