"""The kernels that sum impacts: the same bits as PyTorch on every thread, and what they take of a GPU."""

import threading
from pathlib import Path

import pytest
import torch
from builders import SIZES
from harness import compiled, run_interpreted
from test_lexicon import entries_of, some_postings, some_queries

from zeromem_torch.bank import Postings, axis_of
from zeromem_torch.retrieval.lexical import LexicalScores


@pytest.mark.parametrize("rows", [*SIZES, 1000, 9000])
@pytest.mark.parametrize("slots", [0, 1, 7, 129])
@pytest.mark.parametrize("threads", [1, 3])
def test_numba_gives_the_bits_of_torch(rows: int, slots: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr("zeromem_torch.kernels.lexical_numba.WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    postings, entries = some_postings(rows), entries_of(some_queries(slots, signed=rows % 2 == 0))
    scores, expected = (LexicalScores(name)(*entries, postings, slots, rows) for name in ("numba", "torch"))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, expected)
    axis = axis_of([rows // 3, 0, rows - rows // 3])
    for k in (1, 10):
        found, sought = (LexicalScores(name).best(*entries, postings, slots, axis, k) for name in ("numba", "torch"))
        assert all(torch.equal(a, b) for a, b in zip(found, sought, strict=True))


@pytest.mark.parametrize("here", [True, False])
def test_an_error_of_any_thread_is_raised(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from zeromem_torch.kernels import lexical_numba

    met = threading.Barrier(2, timeout=10)

    def part(first: int, last: int) -> None:
        if first < 2:  # each thread takes one of the first two stretches
            met.wait()
            if (threading.current_thread() is threading.main_thread()) == here:
                raise ValueError("a slot of no use")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(ValueError, match="of no use"):
        lexical_numba._share_out(part, 16, lexical_numba.WORTH_A_THREAD)


@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_kernels_that_sum_steps_leave_other_floats_to_torch(backend: str) -> None:
    pytest.importorskip(backend)
    from zeromem_torch.backends import kernel

    refuses = kernel("lexical", backend).refuses
    assert refuses(torch.device("cpu"), torch.float32, {}) is None
    assert "float64" in refuses(torch.device("cpu"), torch.float64, {})


def test_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_lexical.py"))


@pytest.mark.parametrize("sm", [89, 90])
def test_the_triton_kernel_stays_in_registers(sm: int) -> None:
    pytest.importorskip("triton")
    from zeromem_torch.kernels.lexical_triton import BLOCK, scatter

    signature = {
        "slot": "*i64", "term": "*i64", "weight": "*fp64", "ptr": "*i64", "row": "*i64", "impact": "*fp32",
        "sums": "*i32", "rows": "i32",
    }  # fmt: skip
    taken = compiled(scatter, signature, {"BLOCK": BLOCK}, 4, sm)
    assert taken.registers <= 64
    assert not taken.spills


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [*SIZES, 100_000])
def test_a_gpu_gives_the_bits_of_the_cpu(rows: int) -> None:
    postings, entries = some_postings(rows), entries_of(some_queries(129))
    here = LexicalScores("torch")(*entries, postings, 129, rows)
    there = Postings(*(tensor.cuda() for tensor in (postings.counts, postings.row, postings.impact)))
    for backend in ("torch", "triton"):
        scores = LexicalScores(backend)(*(entry.cuda() for entry in entries), there, 129, rows)
        assert torch.equal(scores.cpu(), here)
