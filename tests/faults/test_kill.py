"""A short run of kill_writer.py, and proof that it can fail: memories that break a promise are found out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import kill_writer

from zeromem_torch.index import Segments
from zeromem_torch.keeper import Keeper
from zeromem_torch.library import ZeroMem
from zeromem_torch.store import Record

Change = Callable[[pytest.MonkeyPatch], None]


def test_nothing_acknowledged_is_lost_and_every_memory_heals(capsys: pytest.CaptureFixture[str]) -> None:
    assert kill_writer.main(["--points", "12"]) == 0
    score = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert score == {"points": 12, "acknowledged": score["acknowledged"], "lost": 0, "unhealed": 0}
    assert score["acknowledged"] > 12


def test_the_help_says_what_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kill_writer.main(["--help"])
    shown = capsys.readouterr().out
    for said in ("--points N", "What counts as lost", "--seed", "--folder DIR"):
        assert said in shown


def acknowledges_before_it_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out, waiting = kill_writer.carry_out, list[kill_writer.Operation]()

    def later(memory: ZeroMem, operation: kill_writer.Operation) -> None:
        waiting.append(operation)
        if len(waiting) > 1:
            carry_out(memory, waiting.pop(0))

    monkeypatch.setattr(kill_writer, "carry_out", later)


def never_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "catch_up", lambda *_: 0)


def keeps_the_old_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that reaches the record, and the digest in the index, and leaves the row."""
    append = Segments.append

    def stale(self: Segments, seqs: Any, digests: Any, forward: Any) -> None:
        if len(seqs) == 1 and seqs[0] in self.seqs:
            forward = self.rows(seqs)
        append(self, seqs, digests, forward)

    monkeypatch.setattr(Segments, "append", stale)


def deletes_instead_of_purging(monkeypatch: pytest.MonkeyPatch) -> None:
    def purge(self: Record, keys: Any = None, boundaries: Any = None) -> list[int]:
        there = {(trace.boundary, trace.id) for name in self.boundaries() for _, trace in self.traces_of(name)}
        return self.delete(sorted(key for key in there if key in set(keys or ()) or key[0] in set(boundaries or ())))

    monkeypatch.setattr(Record, "purge", purge)


def adds_a_batch_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ZeroMem.add

    def singly(self: ZeroMem, messages: Any, **rest: Any) -> list[str]:
        return [id for message in messages for id in add(self, message, **rest)]

    monkeypatch.setattr(ZeroMem, "add", singly)


@pytest.mark.parametrize(
    ("broken", "shows_as"),
    [
        (acknowledges_before_it_commits, "lost"),
        (deletes_instead_of_purging, "lost"),
        (never_catches_up, "unhealed"),
        (keeps_the_old_vectors, "unhealed"),
        (adds_a_batch_one_by_one, "unhealed"),
    ],
)
def test_a_memory_that_breaks_its_promise_is_found_out(
    broken: Change, shows_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(20):
        score = kill_writer.run(2, seed, tmp_path / str(seed))
        if getattr(score, shows_as):
            return
    pytest.fail(f"40 kills, and none was {shows_as}")
