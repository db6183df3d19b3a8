"""Rows on disk: what is appended is what comes back, whatever is merged, damaged, or cut short."""

import errno
import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from zeromem_torch import disk
from zeromem_torch.index import Segments
from zeromem_torch.index import files as index_files
from zeromem_torch.index import segments as index_segments
from zeromem_torch.index.files import FORMAT, MANIFEST, parsed, printed
from zeromem_torch.index.parts import joined
from zeromem_torch.substrate.forward import DTYPES, RAGGED, Forward
from zeromem_torch.substrate.traces import ZeroMemError

MADE_WITH = {"encoder": "hash-1", "reading": "1"}
DIM = 4
SIZES = [0, 1, 7, 129]


def forward_of(seqs: Sequence[int], salt: int | Sequence[int] = 0, dim: int = DIM, longest: int = 3) -> Forward:
    """Rows that say themselves which they are: each number of each follows from its seq, its place and its salt."""
    seq = torch.tensor(list(seqs), dtype=torch.long)
    salts = torch.tensor(salt, dtype=torch.long).expand_as(seq)
    counts = torch.stack([(seq + salts + axis) % (longest + 1) for axis in range(len(RAGGED))], dim=1)
    held = {}
    for field, kind in DTYPES.items():
        axis = FIELD_AXIS[field]
        own = torch.ones_like(seq) if axis == "units" else counts[:, RAGGED.index(axis)]
        owner = torch.repeat_interleave(seq * 31 + salts * 101, own)
        place = torch.arange(len(owner)) - torch.repeat_interleave(own.cumsum(0) - own, own)
        value = owner + place * 7 + len(field)
        if field in WIDTH:
            value = value[:, None] + torch.arange(2 if field == "chunk_span" else dim)
        held[field] = (value % 2 if kind is torch.bool else value % 1009).to(kind)
    return Forward(**held | {"counts": counts})


FIELD_AXIS = {name: f.metadata.get("axis", "units") for name, f in Forward.__dataclass_fields__.items()}
WIDTH = ("chunk_span", "chunk_vector", "state", "sentence_vector")


def same(one: Forward, other: Forward) -> bool:
    left, right = one.tensors(), other.tensors()
    return all(left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left)


def put(segments: Segments, seqs: Sequence[int], salt: int = 0) -> None:
    segments.append(list(seqs), [seq * 1000 + salt for seq in seqs], forward_of(seqs, salt))


def opened(folder: Path | None, **options: Any) -> Segments:
    return Segments(folder, MADE_WITH, **{"background": False} | options)


def holds(segments: Segments, expected: dict[int, int]) -> None:
    """Refuse an index that holds anything but these seqs, each made with its salt."""
    seqs = sorted(expected)
    assert segments.seqs.tolist() == seqs
    assert segments.digests.tolist() == [seq * 1000 + expected[seq] for seq in seqs]
    asked = seqs[::-1] + seqs[:2]
    if asked:
        assert same(segments.rows(asked), forward_of(asked, [expected[seq] for seq in asked]))
    assert segments.stats()["rows"] == len(seqs)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _named(folder: Path) -> set[str]:
    return {entry["file"] for entry in json.loads((folder / MANIFEST).read_text())["segments"]}


# Rows


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [1, 4])
def test_rows_are_the_same_in_memory_in_a_segment_merged_and_reopened(tmp_path: Path, size: int, dim: int) -> None:
    seqs = list(range(10, 10 + size))
    whole = forward_of(seqs, dim=dim)
    folder = tmp_path / "index"
    segments = opened(folder)

    def check(segments: Segments) -> None:
        assert segments.seqs.tolist() == seqs
        assert segments.digests.tolist() == seqs
        if size:
            assert same(segments.rows(seqs), whole)
            assert segments.rows([]).chunk_vector.shape == (0, dim)

    for half in (seqs[: size // 2], seqs[size // 2 :]):
        segments.append(half, half, forward_of(half, dim=dim))
        segments.append([], [], forward_of([], dim=dim))
        check_held = segments.rows(half)
        assert same(check_held, forward_of(half, dim=dim)) or not half
    check(segments)
    assert not list(folder.glob("segment-*"))
    segments.flush()
    check(segments)
    assert len(list(folder.glob("segment-*"))) == (size > 0)
    segments.append([1], [1], forward_of([1], dim=dim))
    segments.flush()
    segments.compact([1])
    check(segments)
    segments.close()
    reopened = opened(folder)
    assert reopened.problems == []
    check(reopened)
    assert reopened.nbytes == sum(path.stat().st_size for path in folder.glob("segment-*"))
    reopened.close()


def test_rows_come_in_the_order_asked_from_wherever_they_lie(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    for seqs in ([30, 10, 20], [5, 25], [40], [15]):
        put(segments, seqs)
        if seqs != [15]:
            segments.flush()
    asked = [15, 40, 5, 10, 40, 30, 20, 25]
    assert same(segments.rows(asked), forward_of(asked))
    assert same(segments.rows(np.array([5, 10, 15])), forward_of([5, 10, 15]))
    for stranger in (0, 11, 41, -(2**63), 2**63 - 1):
        with pytest.raises(ZeroMemError, match=rf"got {stranger};.*rebuild"):
            segments.rows([5, stranger, 10])
    segments.close()


def test_an_index_of_nothing() -> None:
    segments = opened(None)
    assert len(segments.seqs) == len(segments.digests) == segments.rows([]).rows == segments.nbytes == 0
    segments.retire([])
    segments.retire([7])
    segments.flush()
    segments.merge()
    segments.compact([7])
    with pytest.raises(ZeroMemError, match="got 7"):
        segments.rows([7])
    segments.close()


def test_of_two_rows_of_one_seq_the_later_is_held(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    segments.append([3, 1, 3], [1, 2, 3000], Forward.cat([forward_of([3], 9), forward_of([1]), forward_of([3])]))
    assert (segments.seqs.tolist(), segments.digests.tolist()) == ([1, 3], [2, 3000])
    assert same(segments.rows([3]), forward_of([3]))
    segments.flush()
    put(segments, [2, 3], salt=1)
    assert same(segments.rows([3, 1]), Forward.cat([forward_of([3], 1), forward_of([1])]))
    segments.flush()
    put(segments, [1], salt=2)
    segments.close()
    reopened = opened(tmp_path)
    assert reopened.problems == []
    holds_after = {1: 2, 2: 1, 3: 1}
    holds(reopened, holds_after)
    reopened.merge()
    holds(reopened, holds_after)
    reopened.close()


def test_a_retired_row_is_gone_and_can_come_back(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    put(segments, range(10))
    segments.flush()
    put(segments, range(10, 13))
    segments.retire([11, 3, 3, 99])
    expected = dict.fromkeys(sorted({*range(13)} - {3, 11}), 0)
    holds(segments, expected)
    with pytest.raises(ZeroMemError, match="got 3"):
        segments.rows([2, 3])
    put(segments, [3], salt=5)
    holds(segments, expected | {3: 5})
    segments.close()


def test_what_is_handed_out_is_not_the_callers_to_change() -> None:
    segments = opened(None)
    seqs, digests = np.array([1, 2]), np.array([3, 4])
    segments.append(seqs, digests, forward_of([1, 2]))
    seqs[0] = digests[0] = 99
    assert (segments.seqs.tolist(), segments.digests.tolist()) == ([1, 2], [3, 4])
    with pytest.raises(ValueError, match="read-only"):
        segments.seqs[0] = 5
    segments.append(segments.seqs, segments.digests, forward_of([1, 2], 1))
    assert same(segments.rows([1, 2]), forward_of([1, 2], 1))


def test_rows_without_their_seqs_are_refused() -> None:
    segments = opened(None)
    with pytest.raises(ZeroMemError, match=r"got '1, 2 and 2'"):
        segments.append([1], [1, 2], forward_of([1, 2]))
    assert not len(segments.seqs)


STEPS: st.SearchStrategy[tuple[str, list[int], int]] = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(0, 40), max_size=9), st.integers(0, 3)),
    st.tuples(st.just("retire"), st.lists(st.integers(0, 40), max_size=5), st.just(0)),
    st.tuples(st.just("compact"), st.lists(st.integers(0, 40), max_size=3), st.just(0)),
    st.tuples(st.sampled_from(["flush", "merge", "reopen", "clear"]), st.just([]), st.just(0)),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(STEPS, max_size=25),
    st.fixed_dictionaries({"flush_rows": st.sampled_from([1, 4, 1000]), "largest": st.sampled_from([4096, 1 << 28])}),
    st.booleans(),
)
def test_any_life_gives_what_a_dict_would(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, list[int], int]],
    options: dict[str, int],
    on_disk: bool,
) -> None:
    folder = tmp_path_factory.mktemp("life") if on_disk else None
    segments = opened(folder, **options)
    model: dict[int, int] = {}
    retired: set[int] = set()
    for step, seqs, salt in steps:
        if step == "append":
            put(segments, seqs, salt)
            model |= dict.fromkeys(seqs, salt)
            retired -= {*seqs}
        elif step == "reopen" and folder:
            segments.close()
            segments = opened(folder, **options)
            assert segments.problems == []
            segments.retire(sorted(retired))  # the record says so: a segment may still hold them
        elif step == "clear":
            segments.clear(MADE_WITH)
            model.clear()
        elif step in ("retire", "compact"):
            getattr(segments, step)(seqs)
            retired |= {*seqs} & {*model}
            for seq in seqs:
                model.pop(seq, None)
            assert step == "retire" or segments.stats()["retired"] == 0
        elif step != "reopen":
            getattr(segments, step)()
        holds(segments, model)
    segments.close()


# Cost


def test_a_row_is_written_a_few_times_however_many_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, flushed, batch = 50_000, 500, 25
    copied = 0

    def counting(parts: Sequence[Any], lives: Sequence[Any]) -> Any:
        nonlocal copied
        made = joined(parts, lives)
        copied += len(made.seqs)
        return made

    monkeypatch.setattr(index_segments, "joined", counting)
    segments = opened(tmp_path, flush_rows=flushed)
    most = 0
    for start in range(0, rows, batch):
        seqs = np.arange(start, start + batch)
        segments.append(seqs, seqs, forward_of(seqs.tolist(), longest=1, dim=1))
        most = max(most, segments.stats()["segments"])
    assert segments.stats()["rows"] == rows
    written, segment_growth = segments.stats()["rows_written"], math.log(rows / flushed, 1.5)
    assert written <= rows * (2 + segment_growth)
    assert copied - written <= rows * (2 + math.log(flushed / batch, 1.5))
    assert most <= 2 + math.log2(rows / flushed)
    seqs = np.arange(rows)[::-7]
    assert same(segments.rows(seqs), forward_of(seqs.tolist(), longest=1, dim=1))
    segments.close()


def test_no_merge_exceeds_the_largest_segment(tmp_path: Path) -> None:
    one = forward_of(range(16)).nbytes
    segments = opened(tmp_path, flush_rows=16, largest=8 * one)
    for start in range(0, 1600, 16):
        put(segments, range(start, start + 16))
    put(segments, range(5000, 5640))  # a tail that is larger from the start
    sizes = [path.stat().st_size for path in tmp_path.glob("segment-*")]
    assert max(sizes) <= 8 * one + 4096  # and its header
    assert len(sizes) < 60
    holds(segments, dict.fromkeys([*range(1600), *range(5000, 5640)], 0))
    segments.close()


def test_a_tail_is_full_by_its_bytes_too(tmp_path: Path) -> None:
    segments = opened(tmp_path, flush_bytes=forward_of(range(10)).nbytes)
    for seq in range(20):
        put(segments, [seq])
    assert segments.stats()["segments"] >= 1
    assert segments.stats()["tail_rows"] < 12
    segments.close()


def test_many_short_lives_leave_few_segments(tmp_path: Path) -> None:
    for seq in range(100):
        segments = opened(tmp_path, background=seq % 2 == 0)
        put(segments, [seq])
        segments.close()
    assert len(list(tmp_path.glob("segment-*"))) <= 8
    segments = opened(tmp_path)
    holds(segments, dict.fromkeys(range(100), 0))
    segments.close()


def test_a_segment_of_retired_rows_does_not_stay(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    put(segments, range(500))
    segments.flush()
    before = segments.nbytes
    segments.retire([seq for seq in range(500) if seq % 10])
    segments.merge()
    assert segments.nbytes < before / 4
    holds(segments, dict.fromkeys(range(0, 500, 10), 0))
    segments.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_some_rows_are_read_without_the_rest_of_their_segment(tmp_path: Path) -> None:
    rows, dim = 4000, 4096
    state = torch.zeros(rows, dim, dtype=torch.float16)
    state[:, 0] = torch.arange(rows) % 997
    counts = torch.zeros(rows, len(RAGGED), dtype=torch.long)
    counts[:, RAGGED.index("states")] = 1
    tensors = Forward.empty(dim).tensors() | {"counts": counts, "state": state}
    for name in ("tokens", "kinds", "asks", "leans"):
        tensors[name] = torch.zeros(rows, dtype=DTYPES[name])
    segments = opened(tmp_path)
    segments.append(np.arange(rows), np.arange(rows), Forward.of_tensors(tensors))
    segments.close()

    reopened = opened(tmp_path)
    taken = reopened.rows([5, 3999])
    assert taken.state[:, 0].tolist() == [5, 3999 % 997]
    kept = 0
    for mapped in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if str(tmp_path) in mapped:
            kept += int(re.search(r"Rss:\s+(\d+) kB", mapped)[1])  # type: ignore[index]
    assert 0 < kept << 10 < state.nbytes / 8
    reopened.close()


# Threads


def test_merging_behind_appends_and_reads_of_other_threads(tmp_path: Path) -> None:
    segments = opened(tmp_path, flush_rows=8, background=True)
    failures: list[BaseException] = []
    done = threading.Event()

    def attempt(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def append(first: int) -> None:
        for start in range(first, first + 150, 3):
            put(segments, range(start, start + 3))
            segments.retire([start])

    def read() -> None:
        while not done.is_set():
            for seq in segments.seqs[-40:].tolist():
                try:
                    assert same(segments.rows([seq]), forward_of([seq]))
                except ZeroMemError:  # retired between the two
                    assert seq % 3 == 0

    writers = [attempt(partial(append, first)) for first in (0, 150, 300)]
    reader = attempt(read)
    for thread in writers:
        thread.join()
    segments.flush()
    segments.compact([1])
    done.set()
    reader.join()
    assert failures == []
    expected = dict.fromkeys((seq for seq in range(450) if seq % 3 and seq != 1), 0)
    holds(segments, expected)
    segments.close()
    assert "zeromem-merge" not in {thread.name for thread in threading.enumerate()}
    assert segments.problems == []
    reopened = opened(tmp_path)
    assert reopened.problems == []
    reopened.retire(range(0, 450, 3))
    holds(reopened, expected)
    reopened.close()


def test_a_row_retired_or_replaced_during_a_merge_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = opened(tmp_path)
    put(segments, range(4))
    segments.flush()
    monkeypatch.setattr(index_segments, "due", lambda parts, largest: parts[:2] if len(parts) > 1 else [])
    put(segments, range(4, 8))
    put_file = disk.put
    meanwhile = iter(
        [
            partial(segments.retire, [1, 5]),
            partial(put, segments, [2], salt=3),
            partial(put, segments, [100], salt=1),
        ]
    )

    def interrupted(path: Path, data: bytes) -> None:
        if path.name != MANIFEST:  # while no lock is held
            for act in meanwhile:
                act()
        put_file(path, data)

    monkeypatch.setattr(disk, "put", interrupted)
    segments.flush()
    holds(segments, {0: 0, 2: 3, 3: 0, 4: 0, 6: 0, 7: 0, 100: 1})
    segments.flush()
    segments.merge()
    holds(segments, {0: 0, 2: 3, 3: 0, 4: 0, 6: 0, 7: 0, 100: 1})
    segments.close()


# Purge


def _needle(seq: int) -> bytes:
    return np.int64(7_777_777_000_000 + seq).tobytes()


def _marked(seqs: Sequence[int]) -> Forward:
    """Rows whose term keys can be looked for in a file."""
    rows = forward_of(seqs, longest=2)
    per_row = rows.per_row("terms")
    keys = torch.repeat_interleave(torch.tensor(seqs), per_row) + 7_777_777_000_000
    return Forward(**rows.tensors() | {"term_key": keys})


def test_after_compact_no_byte_of_a_purged_row_is_on_disk(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    for seqs in ([2, 5, 8], [11], [14, 17], [20]):
        segments.append(seqs, seqs, _marked(seqs))
        if seqs != [20]:
            segments.flush()
    marked = [seq for seq in range(21) if any(_needle(seq) in data for data in files(tmp_path).values())]
    assert {2, 5, 8, 11, 14, 17} & set(marked)
    segments.retire([8])
    segments.compact([2, 11, 20])
    segments.flush()
    kept = b"".join(files(tmp_path).values())
    assert not any(_needle(seq) in kept for seq in (2, 8, 11, 20))
    assert segments.seqs.tolist() == [5, 14, 17]
    assert all(_needle(seq) in kept for seq in marked if seq in (5, 14, 17))
    segments.close()


def test_a_purge_reaches_what_a_damaged_or_abandoned_file_holds(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    segments.append([2], [2], _marked([2]))
    segments.close()
    (segment,) = tmp_path.glob("segment-*")
    segment.write_bytes(segment.read_bytes() + b"\0")
    segments = opened(tmp_path)
    assert len(segments.problems) == 1
    segments.compact([2])
    assert not list(tmp_path.glob("segment-*"))
    segments.close()


# Damage


OLDER, LATER = range(200), range(200, 203)


def _small(folder: Path) -> dict[int, int]:
    """Two segments, the later too small beside the other to be merged."""
    segments = opened(folder)
    for seqs in (OLDER, LATER):
        put(segments, seqs)
        segments.flush()
    segments.close()
    assert len(list(folder.glob("segment-*"))) == 2
    return dict.fromkeys([*OLDER, *LATER], 0)


def _heal(folder: Path, expected: dict[int, int]) -> None:
    """What a caller does about problems; afterwards there are none."""
    segments = opened(folder)
    assert segments.problems
    missing = sorted({*expected} - {*segments.seqs.tolist()})
    assert missing
    put(segments, missing)
    segments.close()
    again = opened(folder)
    assert again.problems == []
    holds(again, expected)
    again.close()
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *_named(folder)}


def _flips(path: Path) -> Sequence[int]:
    size = path.stat().st_size
    return 0, 7, 8, 9, size // 4, size // 2, size - 9, size - 1


DAMAGE: dict[str, Callable[[Path], object]] = {
    **{f"flip {n}": partial(lambda n, path: _flip(path, _flips(path)[n]), n) for n in range(8)},
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "halve": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "delete": lambda path: path.unlink(),
}


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_damage_done_since_opening_is_found_by_checking(tmp_path: Path) -> None:
    _small(tmp_path)
    segments = opened(tmp_path)
    assert segments.check() == []
    one, other = sorted(tmp_path.glob("segment-*"))
    _flip(one, 900)
    other.unlink()
    _flip(tmp_path / MANIFEST, 5)
    wrong = segments.check()
    assert [name in said for name, said in zip((one.name, other.name, MANIFEST), wrong, strict=True)] == [True] * 3
    assert segments.problems == []
    assert opened(None).check() == []


def test_a_copy_is_an_index_of_its_own(tmp_path: Path) -> None:
    segments = opened(tmp_path / "one")
    put(segments, range(5))
    segments.flush()
    put(segments, range(5, 9))
    segments.copy(tmp_path / "copies" / "other")
    segments.compact(range(9))
    segments.close()
    copy = opened(tmp_path / "copies" / "other")
    assert (copy.problems, copy.stale) == ([], ())
    holds(copy, dict.fromkeys(range(9), 0))
    copy.close()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_segment_is_reported_and_the_rest_is_used(tmp_path: Path, damage: str, number: int) -> None:
    expected = _small(tmp_path)
    segment = sorted(tmp_path.glob("segment-*"))[number]
    DAMAGE[damage](segment)
    for read_only in (True, False):
        segments = opened(tmp_path, read_only=read_only)
        (problem,) = segments.problems
        assert segment.name in problem
        assert ("bytes instead of" in problem) == (damage in ("truncate", "halve", "empty", "longer"))
        assert problem.isascii()
        holds(segments, dict.fromkeys(LATER if number == 0 else OLDER, 0))
        if read_only:
            segments.close()
        else:
            del segments  # as if killed: found again at the next opening
    _heal(tmp_path, expected)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_is_reported_and_nothing_is_used(tmp_path: Path, damage: str) -> None:
    expected = _small(tmp_path)
    DAMAGE[damage](tmp_path / MANIFEST)
    segments = opened(tmp_path)
    (problem,) = segments.problems
    assert MANIFEST in problem
    assert not len(segments.seqs)
    assert len(list(tmp_path.glob("segment-*"))) == 2  # not removed before there is something in their place
    _heal(tmp_path, expected)


def test_every_changed_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    _small(tmp_path)
    raw = (tmp_path / MANIFEST).read_bytes()
    assert parsed(raw)
    for at in range(len(raw)):
        for flipped in (0x01, 0x02, 0x20, 0x80):
            assert parsed(raw[:at] + bytes([raw[at] ^ flipped]) + raw[at + 1 :]) is None
    for junk in (b"[]", b"{}", b"null", b"\xff", b'{"checksum": 1}', b"[" * 100_000, raw + b"\n"):
        assert parsed(junk) is None


def _rewritten(folder: Path, **changes: Any) -> None:
    """A manifest whose checksum is right, whatever else is not."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(printed(manifest | changes))


@pytest.mark.parametrize("read_only", [False, True])
def test_a_later_format_is_an_error_that_leaves_the_files_alone(tmp_path: Path, read_only: bool) -> None:
    _small(tmp_path)
    _rewritten(tmp_path, format=FORMAT + 1, segments={"of another": "shape"})
    before = files(tmp_path)
    with pytest.raises(ZeroMemError, match=rf"expected format {FORMAT}, got {FORMAT + 1}; upgrade .* made again"):
        opened(tmp_path, read_only=read_only)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"segments": [{"file": "../elsewhere.safetensors"}]},
        {"segments": [{"file": 7}]},
        {"segments": 3},
        {"fingerprint": 3},
    ],
)
def test_a_manifest_that_is_no_manifest_is_damaged(tmp_path: Path, changes: dict[str, Any]) -> None:
    _small(tmp_path)
    _rewritten(tmp_path, **changes)
    assert "damaged" in opened(tmp_path).problems[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("seq"),
        lambda tensors: tensors.pop("state"),
        lambda tensors: tensors.update(seq=tensors["seq"][:-1]),
        lambda tensors: tensors.update(state=tensors["state"].double()),
        lambda tensors: tensors.update(state=tensors["state"][:-1]),
        lambda tensors: tensors.update(extra=tensors["seq"]),
    ],
)
def test_a_segment_with_other_tensors_is_not_used(tmp_path: Path, change: Callable[[Any], object]) -> None:
    expected = _small(tmp_path)
    segment = min(tmp_path.glob("segment-*"))
    tensors = load_file(segment)
    change(tensors)
    data = save({name: tensor.clone() for name, tensor in tensors.items()})
    segment.write_bytes(data)
    entries = json.loads((tmp_path / MANIFEST).read_bytes())["segments"]
    entries[0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _rewritten(tmp_path, segments=entries)
    assert "does not hold rows as this version makes them" in opened(tmp_path).problems[0]
    _heal(tmp_path, expected)


def test_rows_made_with_something_else_are_stale_and_kept_until_cleared(tmp_path: Path) -> None:
    expected = _small(tmp_path)
    (tmp_path / "segment-00000009.safetensors").write_bytes(b"an orphan")
    before = files(tmp_path)
    segments = Segments(tmp_path, {"encoder": "other", "reading": "1", "extractor": "rules"})
    assert segments.stale == ("encoder", "extractor")
    assert segments.problems == []
    assert not len(segments.seqs)
    refusals: list[Callable[[], None]] = [lambda: put(segments, [1]), segments.compact]
    for refused in refusals:
        with pytest.raises(ZeroMemError, match=r"present encoder, extractor.*clear it"):
            refused()
    segments.flush()
    segments.merge()
    segments.close()
    assert files(tmp_path) == before

    segments = opened(tmp_path)
    segments.clear({"encoder": "other"})
    assert segments.stale == ()
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]
    put(segments, [1])
    segments.close()
    assert opened(tmp_path).stale == ("encoder", "reading")
    assert expected
    same_again = Segments(tmp_path, {"encoder": "other"})
    holds(same_again, {1: 0})
    same_again.close()


def test_an_index_without_rows_was_made_with_nothing_yet(tmp_path: Path) -> None:
    opened(tmp_path).close()
    other = {"encoder": "other"}
    segments = Segments(tmp_path, other)
    assert segments.stale == ()
    put(segments, [1])
    segments.close()
    same_again = Segments(tmp_path, other)
    holds(same_again, {1: 0})
    same_again.close()
    assert opened(tmp_path).stale == ("encoder", "reading")


def test_files_that_no_manifest_names_are_removed_and_others_left(tmp_path: Path) -> None:
    expected = _small(tmp_path)
    orphans = ["segment-00000042.safetensors", "segment-00000043.safetensors.tmp", "manifest.json.tmp"]
    for name in [*orphans, "note.txt"]:
        (tmp_path / name).write_bytes(b"x")
    reader = opened(tmp_path, read_only=True)
    holds(reader, expected)
    assert {path.name for path in tmp_path.iterdir()} > {*orphans}
    segments = opened(tmp_path)
    assert not {path.name for path in tmp_path.iterdir()} & {*orphans}
    assert (tmp_path / "note.txt").exists()
    put(segments, [300])
    segments.flush()
    assert max(path.name for path in tmp_path.glob("segment-*")) > "segment-00000043.safetensors"  # none is used twice
    segments.close()


def test_reading_writes_nothing(tmp_path: Path) -> None:
    expected = _small(tmp_path)
    before = files(tmp_path)
    reader = opened(tmp_path, read_only=True, flush_rows=1)
    put(reader, range(300, 320))
    reader.retire([0])
    reader.flush()
    reader.merge()
    reader.compact([1])
    holds(reader, dict.fromkeys([*range(2, 203), *range(300, 320)], 0))
    reader.close()
    assert files(tmp_path) == before
    nowhere = tmp_path / "nowhere"
    reader = opened(nowhere, read_only=True)
    assert (reader.problems, reader.stale, len(reader.seqs)) == ([], (), 0)
    reader.clear({})
    reader.close()
    assert not nowhere.exists()
    assert expected


def test_a_reader_that_meets_a_merge_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _small(tmp_path)
    load = index_files.load
    writer = opened(tmp_path)
    once = iter([range(203, 403)])
    merged = threading.Event()

    def overtaken(folder: Path, entry: dict[str, Any]) -> object:
        for seqs in once:
            put(writer, seqs)
            writer.flush()
            merged.set()
        merged.wait()
        return load(folder, entry)

    monkeypatch.setattr(index_files, "load", overtaken)
    reader = opened(tmp_path, read_only=True)
    assert reader.problems == []
    held = expected | dict.fromkeys(range(203, 403), 0)
    holds(reader, held)
    assert writer.stats()["segments"] == 1
    writer.compact(range(203))
    holds(reader, held)  # what it has mapped stays, removed or not
    reader.close()
    writer.close()


@pytest.mark.parametrize(("code", "message"), [(errno.EIO, "cannot be read"), (errno.EACCES, None)])
def test_a_disk_that_fails_is_damage_and_one_that_forbids_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str | None
) -> None:
    _small(tmp_path)
    segment = min(tmp_path.glob("segment-*"))
    plain = Path.open

    def failing(path: Path, *args: Any, **named: Any) -> Any:
        if path == segment:
            raise OSError(code, "as a test wants it")
        return plain(path, *args, **named)

    monkeypatch.setattr(Path, "open", failing)
    if message:
        assert message in opened(tmp_path).problems[0]
    else:
        with pytest.raises(ZeroMemError, match=r"as a test wants it.*permissions"):
            opened(tmp_path)


@pytest.mark.parametrize(("code", "problem"), [(errno.EIO, True), (errno.EACCES, False)])
def test_so_it_is_with_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, problem: bool
) -> None:
    _small(tmp_path)

    def failing(path: Path) -> bytes:
        raise OSError(code, "as a test wants it")

    monkeypatch.setattr(Path, "read_bytes", failing)
    if problem:
        assert "damaged" in opened(tmp_path).problems[0]
    else:
        with pytest.raises(ZeroMemError, match="as a test wants it"):
            opened(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("")
    with pytest.raises(ZeroMemError, match="files to read and write"):
        opened(tmp_path / "index")


# Cut short


class Crash(BaseException):
    """The process is gone; nothing behind it runs, not even what handles errors."""


class Faults:
    """Counts the steps, keeps what was done, and stops the n-th before it ("halfway": while it writes) or behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.when, self.error = -1, "before", Crash
        self.lasting = False
        self.done: list[tuple[str, str]] = []
        self.steps = 0
        for name in ("write", "replace", "sync", "unlink"):
            monkeypatch.setattr(disk, name, self._hooked(name, getattr(disk, name)))

    def set(self, at: int, when: str, error: Callable[[], BaseException], *, lasting: bool = False) -> None:
        self.at, self.when, self.error, self.lasting = at, when, error, lasting  # type: ignore[assignment]
        self.steps = 0

    def _hooked(self, name: str, plain: Callable[..., None]) -> Callable[..., None]:
        def step(*args: Any) -> None:
            number, self.steps = self.steps, self.steps + 1
            if number == self.at or (self.lasting and 0 <= self.at < number and name != "unlink"):
                if self.when == "halfway" and name == "write":
                    path, data = args
                    path.write_bytes(data[: len(data) // 2])
                elif self.when == "behind":
                    plain(*args)
                raise self.error()
            plain(*args)
            self.done.append((name, args[-1].name if name == "replace" else args[0].name))

        return step


class Life:
    """Appends, flushes, merges, purges; keeps what a flush has acknowledged and what was asked for since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.safe: dict[int, int] = {}
        self.model: dict[int, int] = {}
        self.segments: Segments | None = None

    def run(self, **options: Any) -> None:
        self.segments = segments = opened(self.folder, **{"flush_rows": 6} | options)
        for start in range(0, 15, 3):
            self.model |= dict.fromkeys(range(start, start + 3), 0)
            put(segments, range(start, start + 3))
        self._acknowledge(segments.flush)
        self.model |= {4: 1, 30: 1}
        put(segments, [4, 30], salt=1)
        self._acknowledge(segments.flush)
        for seq in (5, 6, 7, 8, 9):
            del self.model[seq]
            self.safe.pop(seq)
        segments.compact([5, 6, 7, 8, 9])
        segments.merge()
        segments.retire([0])
        del self.model[0], self.safe[0]
        self.model |= {31: 2}
        put(segments, [31], salt=2)
        segments.close()
        self.safe = dict(self.model)

    def _acknowledge(self, flush: Callable[[], None]) -> None:
        flush()
        self.safe = dict(self.model)

    def check(self) -> None:
        """Reopened, it has no problem; it holds what was acknowledged, and nothing that was never appended."""
        again = opened(self.folder)
        assert again.problems == []
        assert again.stale == ()
        held = dict(zip(again.seqs.tolist(), (again.digests % 1000).tolist(), strict=True))
        still = {seq: salt for seq, salt in self.safe.items() if self.model.get(seq) == salt}  # and not replaced since
        assert still.items() <= held.items()
        holds(again, held)
        assert {path.name for path in self.folder.iterdir()} == {MANIFEST, *_named(self.folder)}
        again.close()


def test_a_crash_between_any_two_steps_loses_nothing_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    Life(tmp_path / "whole").run()
    steps = faults.steps
    assert steps > 40
    for when in ("halfway", "behind"):
        for at in range(steps):
            life = Life(tmp_path / f"{when} {at}")
            faults.set(at, when, Crash)
            with pytest.raises(Crash):
                life.run()
            faults.set(-1, when, Crash)
            life.check()


def _full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def _raise(error: Exception) -> None:
    raise error


def test_a_full_disk_at_any_step_is_told_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(monkeypatch)
    Life(tmp_path / "whole").run()
    steps = faults.steps
    for when in ("halfway", "behind", "from then on"):
        for at in range(steps):
            life = Life(tmp_path / f"{when} {at}")
            faults.set(at, when, _full, lasting=when == "from then on")
            told = ""
            try:
                life.run()
            except ZeroMemError as error:
                told = str(error)
                assert "No space left on device" in told
                assert "free some space" in told
            faults.set(-1, when, _full)
            if life.segments is not None:
                told = " ".join([told, *life.segments.problems])
                if life.segments._writable:  # still open: nothing that was appended is gone from it
                    live = {*life.segments.seqs.tolist()} - {5, 6, 7, 8, 9, 0}
                    assert live == {*life.model} - {5, 6, 7, 8, 9, 0}
                    life.segments.compact([5, 6, 7, 8, 9])  # and once there is room, all goes on
                    life.segments.flush()
                    life.safe = {seq: salt for seq, salt in life.model.items() if seq not in (0, 5, 6, 7, 8, 9)}
                    assert {path.name for path in life.folder.iterdir()} == {MANIFEST, *_named(life.folder)}
                    life.segments.close()
            assert "No space left on device" in told
            life.check()


def test_a_full_disk_is_tried_less_and_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(monkeypatch)
    segments = opened(tmp_path, flush_rows=4)
    faults.set(0, "before", _full, lasting=True)
    for seq in range(256):
        put(segments, [seq])
    assert faults.steps < 30
    assert len(segments.problems) == 1
    holds(segments, dict.fromkeys(range(256), 0))
    faults.set(-1, "before", _full)
    for seq in range(256, 600):
        put(segments, [seq])
    assert segments.stats()["tail_rows"] < 4
    segments.close()
    reopened = opened(tmp_path)
    holds(reopened, dict.fromkeys(range(600), 0))
    reopened.close()


def test_a_merge_that_fails_behind_the_back_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = opened(tmp_path, background=True)
    put(segments, range(4))
    segments.flush()
    put(segments, range(4, 8))
    rewrite = Segments._rewrite

    def failing(self: Segments, run: Sequence[Any], *, to_disk: bool) -> None:
        if run[0].file:
            raise _full()
        rewrite(self, run, to_disk=to_disk)

    monkeypatch.setattr(Segments, "_rewrite", failing)
    segments.flush()
    merger = segments._merger
    assert merger
    merger.join()
    assert "No space left on device" in segments.problems[0]
    holds(segments, dict.fromkeys(range(8), 0))
    monkeypatch.undo()
    segments.close()
    assert len(list(tmp_path.glob("segment-*"))) == 1


def test_what_a_failed_merge_has_written_goes_with_the_next_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = opened(tmp_path)
    put(segments, OLDER)
    segments.flush()
    with monkeypatch.context() as patched:
        patched.setattr(Segments, "_merge_soon", lambda self: None)
        put(segments, LATER)
        put(segments, range(300, 500))
        segments.flush()
        patched.setattr(Segments, "_commit", lambda self, parts: _raise(_full()))
        with pytest.raises(ZeroMemError, match="No space left"):
            segments.merge()
    assert {path.name for path in tmp_path.iterdir()} > {MANIFEST, *_named(tmp_path)}
    segments.compact()
    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST, *_named(tmp_path)}
    holds(segments, dict.fromkeys([*OLDER, *LATER, *range(300, 500)], 0))
    segments.close()


def test_a_manifest_follows_its_segments_and_is_followed_by_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    Life(tmp_path / "whole").run()
    pending: set[str] = set()  # renamed, and the folder not yet synced
    written: set[str] = set()
    for step, name in faults.done:
        if step == "write":
            written.add(name)
        elif step == "replace":
            assert f"{name}.tmp" in written  # `write` ends with its sync
            assert not pending
            pending.add(name)
        elif step == "sync":
            pending.clear()
        else:
            assert not pending
    assert sum(step == "unlink" for step, _ in faults.done) > 3


def test_nothing_is_done_to_a_closed_index(tmp_path: Path) -> None:
    expected = _small(tmp_path)
    segments = opened(tmp_path)
    put(segments, [300])
    segments.close()
    before = files(tmp_path)
    segments.close()
    segments.flush()
    segments.merge()
    segments.clear({})
    with pytest.raises(ZeroMemError, match=r"was closed'; open the memory again"):
        put(segments, [1])
    assert files(tmp_path) == before
    reopened = opened(tmp_path)
    holds(reopened, expected | {300: 0})
    reopened.close()
