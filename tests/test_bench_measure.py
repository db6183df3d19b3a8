"""bench/measure.py counts, orders and divides as it says; no clock is looked at."""

import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import measure
from bench.measure import Peak, Timing, backends_of, each, floor_of, lines, timed


def test_figures_are_per_item_and_the_first_call_is_apart() -> None:
    timing = Timing(cold=9.0, warm=[4.0, 1.0, 2.0, 3.0, 100.0], items=10)
    assert (timing.median, timing.best, timing.mean) == (0.3, 0.1, 2.2)
    assert (timing.quantile(0.25), timing.quantile(0.75), timing.quantile(0.99)) == (0.2, 0.4, 10.0)
    figures = timing.to_dict()
    assert figures["median_us"] == 300_000
    assert figures["iqr_us"] == 200_000
    assert figures["p99_us"] == 10_000_000
    assert figures["cold_us"] == 900_000
    assert figures["calls"] == 5


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_a_cold_call_then_as_many_warm_ones(calls: int) -> None:
    done: list[str] = []

    def do() -> int:
        done.append("do")
        return len(done)

    timing, result = timed(do, calls=calls, before=lambda: done.append("before"))
    assert len(timing.warm) == calls
    assert done == ["before", "do"] * (1 + calls)
    assert result == 2


def test_slow_work_is_called_three_times_at_least() -> None:
    timing, _ = timed(lambda: None, calls=50, seconds=0.0)
    assert len(timing.warm) == 3


def test_one_call_an_input_and_the_shortest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 22.0, 30.0, 34.0])  # rounds of 5, 1 and of 2, 4 seconds
    monkeypatch.setattr("bench.measure.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timing, results = each(lambda x: x * x, [1, 2])
    assert results == [1, 4]
    assert (timing.cold, list(timing.warm)) == (5.0, [2.0, 1.0])


def test_threads_are_everybodys() -> None:
    info = pytest.importorskip("threadpoolctl").threadpool_info
    before = torch.get_num_threads()
    with measure.threads(1):
        assert torch.get_num_threads() == 1
        assert {pool["num_threads"] for pool in info()} == {1}
    assert torch.get_num_threads() == before


def test_a_share_of_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(measure, "operations", lambda *_: 1e12)
    timing = Timing(cold=1.0, warm=[4e-3], items=4)
    moved = floor_of(timing, "cpu", size=1e6, flops=1e6)  # a millisecond to move, a microsecond to compute
    assert moved == {"floor_us": 250.0, "floor_share": 0.25, "gb_s": 0.25}
    computed = floor_of(timing, "cpu", flops=2e9)
    assert computed == {"floor_us": 500.0, "floor_share": 0.5, "gb_s": 0.0}


def test_what_the_machine_can_do() -> None:
    found = measure.floors("cpu")
    assert set(found) == {"copy_gb_s", "copy_1mib_gb_s", "matmul_fp32_gflop_s"}
    assert all(value > 0 for value in found.values())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is the process's, from its start")
def test_a_peak_is_what_was_held_at_once() -> None:
    peak = Peak()
    before = peak.mib
    with mmap.mmap(-1, 64 << 20) as pages:  # new ones: an allocator may have as much left from the tests before
        for start in range(0, 64 << 20, mmap.PAGESIZE):
            pages[start] = 1
    assert peak.mib >= before + 60  # though it is given back by now


def test_back_ends_that_do_not_run_say_why() -> None:
    refused: dict[str, str] = {}
    found = backends_of("lexical", "cpu", refused)
    assert found[0] == "torch"
    assert refused["lexical, triton"] == "triton needs a CUDA device"
    assert set(found) & {name.split(", ")[1] for name in refused} == set()


def test_what_made_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measure.made_by("operators", ["--queries", "1,2", "a b"], "cpu")
    assert made["command"] == "python bench/operators.py --queries 1,2 'a b'"
    assert {"device", "host", "commit", "versions", "threads"} <= set(made)
    assert made["versions"]["torch"] == torch.__version__
    monkeypatch.setitem(sys.modules, "zeromem_torch.evaluation.run", None)  # a host that lacks what it imports
    assert measure.made_by("operators", [], "cpu")["commit"].startswith("unknown (")


def test_columns_that_nothing_has_are_left_out() -> None:
    shown = list(lines([{"what": "ours", "us": 1234.5}, {"what": "theirs", "us": 0.1}], ["what", "floor", "us"]))
    assert shown == ["what    us", "ours    1,234", "theirs  0.1"]
