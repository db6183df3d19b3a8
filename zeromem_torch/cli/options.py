"""What the commands share: how they are described, the options of several of them, and opening the memory."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.substrate.traces import ZeroMemError, nearest

if TYPE_CHECKING:
    from zeromem_torch.library import ZeroMem
    from zeromem_torch.substrate.encoder import CachedEncoder

MEMORY = "zeromem-memory"
ADD = "`zeromem import FILE` or `zeromem add TEXT --boundary NAME`"
"""What fills a memory, as errors advise it."""
NO = 3
"""Exit code of an answer that is no."""
EXIT_CODES = """\
exit codes: 0 done; 1 the input cannot be used, as said on stderr; 2 the command line is wrong; 3 the answer is no:
nothing was found, problems were found, or a deletion was not confirmed; 130 interrupted
"""
Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Declares its arguments (``fill``) when it is first used."""

    def __init__(self, *, fill: Callable[[argparse.ArgumentParser], None] | None = None, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self._fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
        known, others = super().parse_known_args(args, namespace)
        if others:  # said here, and not by the whole command, which would show its own usage
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return known, others


def describe(parser: argparse.ArgumentParser, run: Run, about: str, *examples: str) -> None:
    """What a command does, how it is called, and what runs it. A paragraph that is set in stays as it is."""
    lines = "".join(f"  {example}\n" for example in examples)
    paragraphs = (part if part.startswith(" ") else textwrap.fill(part, 96) for part in about.split("\n\n"))
    parser.description = "\n\n".join(paragraphs)
    parser.epilog = f"examples:\n{lines}\n{EXIT_CODES}"
    parser.set_defaults(run=run, fail=parser.error)


# Options


def folder_option(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Where the memory is: ``name`` is an option's, or that of an argument."""
    default = Path(os.environ.get("ZEROMEM_MEMORY") or MEMORY)
    about = f"where the memory is (default: $ZEROMEM_MEMORY, else {MEMORY} in the working folder)"
    parser.add_argument(name, type=Path, default=default, metavar="FOLDER", help=about, **settings)


def memory_options(parser: argparse.ArgumentParser) -> None:
    folder_option(parser, "--memory")
    parser.add_argument("--json", action="store_true", help="write JSON to standard output, an object a line")


def boundary_option(parser: argparse.ArgumentParser, about: str, *, several: bool = False) -> None:
    more = '; "acme/" is acme and all below it; may be repeated' if several else ""
    parser.add_argument("--boundary", action="append" if several else "store", metavar="NAME", help=f"{about}{more}")


def maker_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--encoder",
        metavar="NAME",
        help="of a new memory: minilm, bge-m3, a folder or a hub name (default: minilm, which is offline); "
        "a memory remembers it",
    )
    parser.add_argument("--config", type=Path, metavar="TOML", help="of a new memory: what differs from the defaults")


def compute_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default: %(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: PyTorch's)")


def encoding_options(parser: argparse.ArgumentParser) -> None:
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


def dataset_arguments(parser: argparse.ArgumentParser) -> None:
    from zeromem_torch.evaluation.datasets import DATASETS

    parser.add_argument("dataset", choices=list(DATASETS), metavar="DATASET", help=", ".join(DATASETS))
    parser.add_argument("--data", type=Path, required=True, metavar="PATH", help=".json, .jsonl, or either gzipped")
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="documents to search, for hotpotqa and 2wiki")


def reader_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reader",
        default="embedded",
        metavar="NAME",
        help="embedded (small, offline), openai:MODEL@URL, hf:FOLDER or vllm:NAME (default: %(default)s)",
    )


def actor_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--actor", default="cli", metavar="NAME", help="who does this, for the history (default: cli)")


def meta_option(parser: argparse.ArgumentParser, about: str) -> None:
    about = f"{about}; may be repeated"
    parser.add_argument("--meta", action="append", type=name_and_value, metavar="NAME=VALUE", default=[], help=about)


def validity_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--valid-from", metavar="TIME", help="what it says holds from then on")
    parser.add_argument("--valid-to", metavar="TIME", help="and until just before then")
    parser.add_argument("--expires-at", metavar="TIME", help="no search finds it from then on")


def positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def name_and_value(text: str) -> tuple[str, str | int | float | bool]:
    """NAME=VALUE; true, false and numbers are what they are in JSON, and "7" in quotes is a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    if value in ("true", "false"):
        return name, value == "true"
    if re.fullmatch(r"-?(0|[1-9]\d{0,17})", value, re.ASCII):
        return name, int(value)
    if re.fullmatch(r"-?(0|[1-9]\d*)\.\d+(e[+-]?\d{1,2})?", value, re.ASCII | re.IGNORECASE):
        return name, float(value)
    return name, value[1:-1] if re.fullmatch(r'".*"', value, re.DOTALL) else value


# What they mean


def use_threads_and_device(options: argparse.Namespace) -> None:
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        advice = f"try cpu ({error})"
        raise ZeroMemError.of("device", "one that PyTorch finds here", options.device, advice) from error


def config_of(options: argparse.Namespace) -> ZeroMemConfig | None:
    try:
        return ZeroMemConfig.from_toml(options.config) if options.config else None
    except OSError as error:
        raise ZeroMemError.of("config", "a TOML file", str(options.config), f"check the path ({error})") from error


def cached_encoder(options: argparse.Namespace, config: ZeroMemConfig) -> CachedEncoder:
    from zeromem_torch.substrate.encoder import CachedEncoder, load_encoder

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return CachedEncoder(
        load_encoder(options.encoder or config.encoder.name, device=options.device),
        options.cache or home / "zeromem" / "encoded.sqlite",
    )


def command_line() -> str:
    """This call, as a result file tells it: of a path that holds on this machine only, its name."""
    return shlex.join(["zeromem", *(Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:])])


def check_writable(path: Path) -> None:
    """What cannot be written should not cost a run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ZeroMemError.of("json", "a file that can be written", str(path), f"name another ({error})") from error


def opened(options: argparse.Namespace, *, read_only: bool = False, make: bool = False) -> ZeroMem:
    """The memory that the options name; only commands that add make one."""
    from zeromem_torch.folder import RECORD
    from zeromem_torch.library import ZeroMem

    folder: Path = options.memory
    is_new = not (folder / RECORD).exists()
    if is_new and not make:
        advice = f"make one with {ADD}, or name another with --memory or $ZEROMEM_MEMORY"
        raise ZeroMemError.of("memory", "a folder that holds a memory", str(folder), advice)
    settings: dict[str, Any] = {"read_only": read_only}
    if "encoder" in options:
        settings |= {"encoder": options.encoder, "config": config_of(options)}
    if "device" in options:
        use_threads_and_device(options)
        settings["device"] = options.device
    memory = ZeroMem.open(folder, **settings)
    if is_new:
        say(f"made a new memory in {folder}")
    for note in memory.notes:
        say(note)
    return memory


def the_boundary(memory: ZeroMem, named: str | None) -> str:
    """The boundary named, else the only one there is."""
    known = memory.boundaries
    if named is not None:
        return named
    if not known:
        advice = f"bring something in with {ADD}, or name another memory with --memory or $ZEROMEM_MEMORY"
        raise ZeroMemError.of(f"memory {memory.path}", "something stored in it", "nothing yet", advice)
    if len(known) != 1:
        expected, example = f"one of the {len(known)} that the memory holds", f"such as {known[0]!r}"
        raise ZeroMemError.of("boundary", expected, None, f"pass --boundary, {example}; `zeromem stats` lists them")
    return known[0]


def unknown(memory: ZeroMem, names: Sequence[str]) -> None:
    """Say which of the boundaries named hold nothing, and what they may have been meant for."""
    for name in names:
        if not name.endswith("/") and name not in memory.boundaries:
            say(f"nothing is stored in boundary {name!r}; {nearest(name, memory.boundaries)}".rstrip("; "))


def confirmed(options: argparse.Namespace, question: str) -> bool:
    """Asked on a terminal only: a script has said what it wants."""
    if options.yes or not sys.stdin.isatty():
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")


def say(line: str) -> None:
    """Tell a person, beside the output."""
    print(f"zeromem: {line}", file=sys.stderr)
