"""`zeromem demo` and `zeromem eval`: what the method finds, shown and measured."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromem_torch.cli.options import compute_options, config_of, describe, positive, use_threads_and_device
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.substrate.traces import ZeroMemError

if TYPE_CHECKING:
    from zeromem_torch.evaluation.run import Found
    from zeromem_torch.substrate.encoder import CachedEncoder

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
        "Stores the shipped conversations in an empty memory, asks every question at once, and shows what was found "
        "and why. Nothing is kept.",
        "zeromem demo",
        "zeromem demo --encoder bge-m3 --device cuda",
    )
    _encoding_options(parser)


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
    from zeromem_torch.evaluation.datasets import DATASETS
    from zeromem_torch.evaluation.run import SYSTEMS

    describe(
        parser,
        _eval_retrieval,
        MEASURES,
        "zeromem eval retrieval locomo --data locomo10.json",
        "zeromem eval retrieval hotpotqa --data questions.json.gz --corpus corpus.jsonl.gz --json out.json",
        "zeromem eval retrieval locomo --data locomo10.json --systems zeromem,context --limit 100",
    )
    parser.add_argument("dataset", choices=list(DATASETS), metavar="DATASET", help=", ".join(DATASETS))
    parser.add_argument("--data", type=Path, required=True, metavar="PATH", help=".json, .jsonl, or either gzipped")
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="documents to search, for hotpotqa and 2wiki")
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), metavar="A,B", help=f"some of {', '.join(SYSTEMS)} (default: all)"
    )
    parser.add_argument("--audited", action="store_true", help="locomo: citations as corrected by label_errors.json")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions")
    parser.add_argument("--misses", type=positive, metavar="N", help="print N misses of zeromem, by kind")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    _encoding_options(parser)


def _encoding_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--encoder",
        metavar="NAME",
        help="minilm, bge-m3, a folder or a hub name (default: the configuration's, which is minilm)",
    )
    parser.add_argument("--config", type=Path, metavar="TOML", help="differences from the default configuration")
    parser.add_argument(
        "--cache", type=Path, metavar="FILE", help="where encoded texts are kept (default: in the user's cache folder)"
    )
    compute_options(parser)


def _demo(options: argparse.Namespace) -> int:
    from zeromem_torch.demo import run_demo
    from zeromem_torch.library import ZeroMem

    use_threads_and_device(options)
    config = config_of(options) or ZeroMemConfig()
    run_demo(ZeroMem(config, encoder=_encoder(options, config), device=options.device))
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
        _check_writable(options.json)
    kept: dict[str, dict[str, Found]] = {}
    result = run_retrieval(data, systems, _encoder(options, config), config, device=options.device, kept=kept)
    for line in table(result):
        print(line)
    if options.misses and "zeromem" in kept:
        main_ranking = {question: found.main for question, found in kept["zeromem"].items()}
        print("\n".join(describe_misses(find_misses(data, main_ranking), options.misses)))
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


def _encoder(options: argparse.Namespace, config: ZeroMemConfig) -> CachedEncoder:
    from zeromem_torch.substrate.encoder import CachedEncoder, load_encoder

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return CachedEncoder(
        load_encoder(options.encoder or config.encoder.name, device=options.device),
        options.cache or home / "zeromem" / "encoded.sqlite",
    )
