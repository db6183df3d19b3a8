"""What it costs to add to a memory that holds much already: `python bench/append.py --json OUT`.

A memory on disk grows to each of the sizes, in one boundary and spread over many. At each size:

- amortised cost of a trace over the stretch from the size before: committing it to the record, reading it (analysis of
  its text), and putting it into the index, with all flushes and merges that follow from it, and one flush at the end;
- single adds, one after another: before anything was searched, and into boundaries in use;
- the first search behind an add, which brings the boundary's statistics up to date, against the next one;
- opening the memory when its files are not in the page cache, and the first search then.

Vectors are looked up in a table, so that encoding costs next to nothing: what is timed is the memory's own work. The
ratios set the costs at the largest size against those at the smaller ones. Up to a thousand traces or so a row is
written once; then it is rewritten by merges, a number of times that stays bounded: "written".
"""

import argparse
import json
import os
import platform
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate, islice, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.nn.functional import normalize

from zeromem_torch import Trace, ZeroMem, ZeroMemConfig
from zeromem_torch.config import SubstrateConfig
from zeromem_torch.evaluation.run import provenance
from zeromem_torch.substrate.encoder import Encoded

SIZES = (1_000, 10_000, 100_000)
LAYOUTS = {"one boundary": 1, "100 boundaries": 100}
BATCH = 512
WORDS = 5_000
NAMES = 200
TURN = (8, 22)  # words
SESSION = 20  # turns
DATA = (
    f"made chat turns of {TURN[0]} to {TURN[1]} words (Zipf over {WORDS} words; every other turn names one of {NAMES} "
    f"names), two speakers, sessions of {SESSION} turns"
)
CONFIG = ZeroMemConfig(substrate=SubstrateConfig(entities="rules"))
_TOKEN = re.compile(r"\w+|[^\w\s]")


class TableEncoder:
    """A token's state is looked up in a table of random vectors, a text's vector is the mean of its states.

    Not an encoder to search with: it stands for one whose vectors are cached.
    """

    late_chunking = True
    max_tokens = 256

    def __init__(self, dim: int = 384, rows: int = 1 << 14) -> None:
        self.dim = dim
        self.fingerprint = f"table-{rows}x{dim}"
        self._table = normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)), dim=1)
        self._row: dict[str, int] = {}

    def token_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return [[match.span() for match in _TOKEN.finditer(text)] for text in texts]

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        spans = [own[: self.max_tokens] for own in self.token_spans(texts)]
        tokens = [text[start:end] for text, own in zip(texts, spans, strict=True) for start, end in own]
        rows = [self._row.setdefault(token, len(self._row) % len(self._table)) for token in tokens]
        held = self._table[torch.tensor(rows, dtype=torch.long)]
        counts = torch.tensor([len(own) for own in spans], dtype=torch.long)
        text = torch.repeat_interleave(torch.arange(len(texts)), counts)
        vectors = normalize(torch.zeros(len(texts), self.dim).index_add_(0, text, held), dim=1)
        bounds = torch.tensor([span for own in spans for span in own], dtype=torch.long).reshape(-1, 2)
        kept = slice(None) if states else slice(0)
        return Encoded(vectors, counts, held[kept], bounds[kept])


def turns(boundaries: int, seed: int = 0) -> Iterator[Trace]:
    """Chat turns without end, session by session, each of a boundary of its own draw."""
    draws = random.Random(seed)
    syllables = [first + second for first in "bdfgklmnprstv" for second in "aeiou"]
    made = ("".join(draws.choices(syllables, k=draws.randint(1, 4))) for _ in range(4 * WORDS))
    words = list(dict.fromkeys(made))[:WORDS]
    weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
    names = [word.capitalize() for word in draws.sample(words, min(NAMES, len(words)))]
    begin, session = datetime(2023, 1, 1, tzinfo=UTC), 0
    while True:
        session += 1
        boundary = f"user-{draws.randrange(boundaries)}"
        for order in range(SESSION):
            said = draws.choices(words, cum_weights=weights, k=draws.randint(*TURN))
            if order % 2:
                said[draws.randrange(len(said))] = draws.choice(names)
            yield Trace(
                id=f"{session}:{order}",
                boundary=boundary,
                text=f"{' '.join(said).capitalize()}.",
                session=str(session),
                order=order,
                time=begin + timedelta(hours=session, minutes=order),
                speaker=("Ann", "Bo")[order % 2],
            )


@dataclass
class Stopwatch:
    """Seconds spent in the parts of an add; the index's own thread counts too."""

    seconds: dict[str, float] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def watch(self, memory: ZeroMem) -> None:
        derived = memory._derived
        assert derived.keeper is not None
        for part, owner, name in (
            ("record", memory._record, "changes"),
            ("record", memory._record, "add"),
            ("read", memory._reader, "read"),
            ("index", derived.keeper.segments, "append"),
            ("index", derived.keeper.segments, "flush"),
            ("merge", derived.keeper.segments, "_merge_all"),
            ("in use", derived.memories, "put"),
        ):
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return do(*args, **kwargs)
            finally:
                with self._lock:
                    self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

        return timed

    def lap(self) -> dict[str, float]:
        with self._lock:
            lap, self.seconds = self.seconds, {}
        return lap


def grow(folder: Path, boundaries: int, sizes: Sequence[int], singles: int) -> Iterator[dict[str, Any]]:
    """The figures at each size."""
    stream, watch, encoder = turns(boundaries), Stopwatch(), TableEncoder()
    warm = ZeroMem(CONFIG, encoder=encoder)  # what the first search of a process imports is no cost of ours
    warm.add("warm", boundary="b")
    warm.search("warm", boundary="b")
    memory = opened(folder, encoder, watch)
    try:
        held = 0
        for size in sizes:
            written = memory.stats()["index"]["rows_written"]
            watch.lap()
            start = time.perf_counter()
            for first in range(held, size, BATCH):
                memory.add(list(islice(stream, min(BATCH, size - first))))
            assert memory._derived.keeper is not None
            memory._derived.keeper.segments.flush()
            memory._derived.keeper.segments.merge()  # waits for those in the background
            wall = time.perf_counter() - start
            lap, added = watch.lap(), size - held
            written = memory.stats()["index"]["rows_written"] - written
            row = {
                "traces": size,
                "amortised_us": {part: _us(lap.get(part, 0.0), added) for part in ("record", "read", "index", "merge")}
                | {"wall": _us(wall, added)},
                "rows_written_per_row": round(written / added, 2),
                "bytes_per_trace": bytes_of(folder, size),
                "add_ms": single_adds(memory, stream, singles, watch),
            }
            busiest = max(memory.boundaries, key=memory._counts.__getitem__)
            row["search_ms"] = searches(memory, stream, busiest)
            row["add_in_use_ms"] = single_adds(memory, stream, singles, watch)
            held = len(memory)
            memory.close()
            row["open_ms"] = opening(folder, encoder, busiest)
            memory = opened(folder, encoder, watch)
            yield row
    finally:
        memory.close()


def opened(folder: Path, encoder: TableEncoder, watch: Stopwatch | None = None) -> ZeroMem:
    memory = ZeroMem.open(folder, encoder=encoder, config=CONFIG)
    if watch:
        watch.watch(memory)
    return memory


def single_adds(memory: ZeroMem, stream: Iterator[Trace], count: int, watch: Stopwatch) -> dict[str, Any]:
    """Milliseconds of adds of one trace each, and the mean of their parts."""
    watch.lap()
    spent = [_ms(memory.add, trace)[0] for trace in islice(stream, count)]
    parts = {part: round(seconds / count * 1e3, 3) for part, seconds in watch.lap().items()}
    ordered = sorted(spent)
    return {
        "median": round(statistics.median(spent), 3),
        "p95": round(ordered[int(0.95 * (count - 1))], 3),
        "max": round(ordered[-1], 3),
        "parts": parts,
    }


def searches(memory: ZeroMem, stream: Iterator[Trace], boundary: str) -> dict[str, float]:
    """Milliseconds of a search that reads the boundary, of another, of the first one behind an add, of another."""
    query = next(stream).text

    def search() -> float:
        return round(_ms(memory.search, query, boundary=boundary)[0], 1)

    times = {"reading": search(), "again": search()}
    memory.add(next(turn for turn in stream if turn.boundary == boundary))
    times |= {"behind_an_add": search(), "after_that": search()}
    return times | {"traces_of_the_boundary": memory._counts[boundary]}


def opening(folder: Path, encoder: TableEncoder, boundary: str) -> dict[str, float]:
    """Milliseconds to open the memory from files that have to be read from the disk, and to search it."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    open_ms, memory = _ms(opened, folder, encoder)
    with memory:
        search_ms, _ = _ms(memory.search, "What did Ann say?", boundary=boundary)
    return {"open": round(open_ms, 1), "first_search": round(search_ms, 1)}


def bytes_of(folder: Path, traces: int) -> dict[str, int]:
    """Bytes on disk per trace."""
    index = sum(path.stat().st_size for path in files(folder / "index"))
    return {"index": index // traces, "record": (sum(path.stat().st_size for path in files(folder)) - index) // traces}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _ms(do: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    done = do(*args, **kwargs)
    return (time.perf_counter() - start) * 1e3, done


def _us(seconds: float, count: int) -> float:
    return round(seconds / count * 1e6, 1)


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Costs at the largest size over those at each smaller one; "total" sums all parts, "wall" is what passes."""
    return {f"{rows[-1]['traces']}/{row['traces']}": _ratio(row, rows[-1]) for row in rows[:-1]}


def _ratio(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, float]:
    sums = {"index": ("index", "merge"), "total": ("record", "read", "index", "merge"), "wall": ("wall",)}
    costs = {
        name: [sum(row["amortised_us"][part] for part in parts) for row in (first, last)]
        for name, parts in sums.items()
    }
    costs["single add"] = [row["add_ms"]["median"] for row in (first, last)]
    return {name: round(late / max(early, 1e-3), 2) for name, (early, late) in costs.items()}


def table(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"{result['data']}; encoder {result['encoder']}, {result['device']}, {result['threads']} threads"
    heads = ["traces", "record", "read", "index", "merge", "wall", "written", "1 add", "p95", "in use", "p95"]
    heads += ["search", "behind add", "open", "1st search", "bytes"]
    for layout, rows in result["layouts"].items():
        yield f"{layout}: us a trace amortised; rows written a row; ms of a single add, of a search, of opening"
        yield "".join(f"{head:>11}" for head in heads)
        for row in rows:
            cost, add, used = row["amortised_us"], row["add_ms"], row["add_in_use_ms"]
            cells = [cost[part] for part in ("record", "read", "index", "merge", "wall")]
            cells += [row["rows_written_per_row"], add["median"], add["p95"], used["median"], used["p95"]]
            cells += [row["search_ms"]["again"], row["search_ms"]["behind_an_add"], *row["open_ms"].values()]
            cells.append(sum(row["bytes_per_trace"].values()))
            yield f"{row['traces']:>11}" + "".join(f"{cell:>11.1f}" for cell in cells)
        for pair, ratio in result["ratios"][layout].items():
            yield f"  {pair}: " + ", ".join(f"{name} {value:.2f}" for name, value in ratio.items())


def device() -> str:
    """The processor, as the machine names it."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{named[1] if named else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="traces, in ascending order (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer single adds, and without the largest size")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, beside the index's own (%(default)s)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the memories, removed later (default: /tmp)")
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    sizes = [int(size) for size in args.sizes.split(",")]
    sizes = sizes[:-1] if args.quick and len(sizes) > 2 else sizes
    singles = 40 if args.quick else 200
    if any(larger - size <= 2 * singles + 1 for size, larger in pairwise(sizes)):
        parser.error(f"--sizes: {2 * singles + 1} single adds are timed at each, so the next must exceed it by more")
    result: dict[str, Any] = {
        "command": shlex.join(["python", "bench/append.py", *words]),
        "device": device(),
        **provenance(),
        "encoder": TableEncoder().fingerprint,
        "data": DATA,
        "batch": BATCH,
        "layouts": {},
        "ratios": {},
    }
    for layout, boundaries in LAYOUTS.items():
        with tempfile.TemporaryDirectory(prefix="zeromem-append-", dir=args.folder) as folder:
            rows = []
            for row in grow(Path(folder) / "memory", boundaries, sizes, singles):
                print(f"{layout}, {row['traces']} traces: done", file=sys.stderr, flush=True)
                rows.append(row)
        result["layouts"][layout], result["ratios"][layout] = rows, ratios(rows)
    print("\n".join(table(result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
