"""Exact strings in texts: every way of finding them gives what comparing at each character gives.

The CUDA kernel is compiled by nvcc for what it takes, and by g++, against `cuda_on_cpu.h`, for its results.
"""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import Dice
from harness import nvcc

from zeromem_torch.backends import Choice
from zeromem_torch.retrieval import phrases as operator
from zeromem_torch.retrieval.phrases import ByteTexts, Matches, Phrases

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
NAME = "zeromem_torch.kernels.phrases_cupy"


def matches(texts: Sequence[str], phrases: Sequence[str], *, whole_words: bool) -> list[tuple[int, int, int, int]]:
    """Text, phrase, and bytes from and to, by comparing each phrase at each character of each text."""

    def part_of_word(pair: str) -> bool:
        return len(pair) == 2 and all(c.isalnum() or c == "_" for c in pair)

    found = []
    for t, text in enumerate(texts):
        for first in range(len(text)):
            for p in sorted(range(len(phrases)), key=lambda p: len(phrases[p].encode())):
                last = first + len(phrases[p])
                inside = part_of_word(text[max(0, first - 1) : first + 1]) or part_of_word(text[last - 1 : last + 1])
                if text.startswith(phrases[p], first) and not (whole_words and inside):
                    start = len(text[:first].encode())
                    found.append((t, p, start, start + len(phrases[p].encode())))
    return found


def rows_of(found: Matches) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in found), strict=True))


CASES = [
    (["Ann met Anna in Rome.", "", "Anna!"], ["Ann", "Anna", "Rome", "met Anna in"]),
    (["Straße in 東京, Ωmega; é e\u0301", "東京東京"], ["Straße", "東京", "京東", "é", "e", "Ωmega; é", "\u0301"]),
    (["aaaa", "aa"], ["a", "aa", "aaa", "aaaaa"]),
    (["on 7 May 2023, (2023-05-07) v2.1", "7 May 20"], ["7 May 2023", "2023", "05", "v2.1", "(", ", ("]),
    (["snake_case case", "#case"], ["case", "#case", "snake"]),
    (["nothing"], []),
    ([], ["a"]),
    (["", "", ""], ["a"]),
    (["x" * 129], ["x" * 129, "x" * 128, "y"]),
]
BY_LIBRARY = ["auto"] if importlib.util.find_spec("ahocorasick") else []


@pytest.mark.parametrize("backend", ["torch", *BY_LIBRARY])
@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize(("texts", "phrases"), CASES)
def test_every_match_and_no_other(texts: list[str], phrases: list[str], whole_words: bool, backend: str) -> None:
    found = Phrases(phrases, whole_words=whole_words, backend=backend)(ByteTexts.of(texts))
    assert rows_of(found) == matches(texts, phrases, whole_words=whole_words)


def drawn(count: int, most: int, seed: int) -> list[str]:
    """Texts of a few letters, so that much matches."""
    dice, letters = Dice(seed), "ab_ é京"
    return ["".join(letters[i] for i in dice.below(len(letters), dice.one(most + 1))) for _ in range(count)]


@pytest.mark.parametrize("backend", ["torch", *BY_LIBRARY])
@pytest.mark.parametrize("whole_words", [False, True])
def test_texts_drawn_by_chance(backend: str, whole_words: bool) -> None:
    for seed in range(20):
        texts, phrases = drawn(7, 40, seed), sorted({*drawn(20, 4, 100 + seed)} - {""})
        found = Phrases(phrases, whole_words=whole_words, backend=backend)(ByteTexts.of(texts))
        assert rows_of(found) == matches(texts, phrases, whole_words=whole_words)


def test_what_parts_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="without NUL"):
        ByteTexts.of(["a", "b\0c"])
    for phrases in (["a", "a"], ["a", ""], ["a\0b"]):
        with pytest.raises(ValueError, match="different phrases"):
            Phrases(phrases)


def test_without_the_library_the_trie_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(Phrases, "_by_automaton", None)
    texts, phrases = CASES[0]
    assert rows_of(Phrases(phrases)(ByteTexts.of(texts))) == matches(texts, phrases, whole_words=False)


class CpuKernel:
    """What cupy.RawKernel is, compiled for the CPU."""

    folder: Path

    def __init__(self, code: str, name: str) -> None:
        source, library = self.folder / "phrases.cpp", self.folder / "phrases.so"
        kinds = (
            "const unsigned char*, const unsigned char*, long long, const int*, const unsigned char*, const int*, "
            "const int*, unsigned long long*, unsigned long long, long long*, int*"
        ).split(", ")
        declared = ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds))
        passed = ", ".join(f"a{i}" for i in range(len(kinds)))
        source.write_text(
            f'#include <atomic>\n#include "{HEADER}"\n'
            "template <class T> T atomicAdd(T* to, T value) { return std::atomic_ref<T>(*to).fetch_add(value); }\n"
            f'{code}\nextern "C" void run(int blocks, int threads, {declared}) '
            f"{{ launch(blocks, threads, [&] {{ {name}({passed}); }}); }}\n"
        )
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        self.run = ctypes.CDLL(str(library)).run

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        kinds: dict[str, Any] = {"uint64": ctypes.c_uint64, "int64": ctypes.c_int64}
        self.run(grid[0], block[0], *(kinds[value.dtype.name](value.item()) for value in args))


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    CpuKernel.folder = tmp_path
    cupy = ModuleType("cupy")
    vars(cupy)["RawKernel"] = CpuKernel
    vars(cupy)["cuda"] = SimpleNamespace(Device=nullcontext, ExternalStream=nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(operator, "choose", lambda *_, **__: Choice("cupy", {"cupy": "asked for"}))
    sys.modules.pop(NAME, None)
    yield
    sys.modules.pop(NAME, None)


@pytest.mark.usefixtures("on_cpu")
def test_results_of_the_cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module(NAME), "THREADS", 32)  # each is a thread of the system's
    some = [(drawn(5, 30, seed), sorted({*drawn(9, 3, 100 + seed)} - {""})) for seed in range(4)]
    for texts, phrases in [*CASES, *some]:
        for whole_words in (False, True):
            found = Phrases(phrases, whole_words=whole_words)(ByteTexts.of(texts))
            assert rows_of(found) == matches(texts, phrases, whole_words=whole_words)


@pytest.mark.usefixtures("on_cpu")
def test_more_matches_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind the texts would match, and what is written behind the room would show."""
    monkeypatch.setattr(import_module(NAME), "THREADS", 32)
    monkeypatch.setattr(import_module(NAME), "ROOM", 3)
    behind: list[int] = []
    run = CpuKernel.__call__

    def with_a_guard(self: CpuKernel, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        bytes_, room, places = (args[i].item() for i in (2, 8, 9))
        guarded = torch.full((room + 100,), -7)
        text = torch.tensor([*ctypes.string_at(args[0].item(), bytes_), *b"a" * 32, 0], dtype=torch.uint8)
        joins = torch.zeros(len(text), dtype=torch.bool)
        texts = (np.uint64(text.data_ptr()), np.uint64(joins.data_ptr()))
        run(self, grid, block, (*texts, *args[2:9], np.uint64(guarded.data_ptr()), args[10]))
        ctypes.memmove(places, guarded.data_ptr(), 8 * room)
        behind.append(int((guarded[room:] != -7).sum()))

    monkeypatch.setattr(CpuKernel, "__call__", with_a_guard)
    texts, phrases = CASES[2]
    assert rows_of(Phrases(phrases)(ByteTexts.of(texts))) == matches(texts, phrases, whole_words=False)
    assert behind == [0, 0], "two rounds, which write nothing behind the room there is"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("sm", [89, 90])
def test_the_cuda_kernel_stays_in_registers(sm: int, tmp_path: Path) -> None:
    used = nvcc(import_module(NAME).SOURCE, sm, tmp_path)
    assert not used.spills
    assert used.registers <= 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("whole_words", [False, True])
def test_a_gpu_finds_what_the_cpu_finds(whole_words: bool) -> None:
    pytest.importorskip("cupy")
    texts = ByteTexts.of(drawn(129, 200, 1))
    phrases = sorted({*drawn(100, 4, 2)} - {""})
    here = Phrases(phrases, whole_words=whole_words, backend="torch")(texts)
    there = Phrases(phrases, whole_words=whole_words, backend="cupy")(texts.to("cuda"))
    assert rows_of(there) == rows_of(here)
