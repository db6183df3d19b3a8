"""The shipped conversations through the whole memory, on the page that a person reads."""

import io
import re

import pytest

from zeromem_torch.demo import run_demo
from zeromem_torch.library import ZeroMem

QUESTIONS = 18


@pytest.fixture(scope="module")
def memory() -> ZeroMem:
    return ZeroMem()


def page_of(memory: ZeroMem, width: int) -> list[str]:
    out = io.StringIO()
    run_demo(memory, out, width)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 96])
def test_page_fits_its_width(memory: ZeroMem, width: int) -> None:
    page = page_of(memory, width)
    assert not [line for line in page if len(line) > width]
    assert sum(bool(re.match(r" *\d+\. ", line)) for line in page) == QUESTIONS


def test_evidence_is_found_and_stays_in_its_own_conversation(memory: ZeroMem) -> None:
    page = page_of(memory, 100)
    kiln = page[next(i for i, line in enumerate(page) if line.endswith("kiln, namesake")) :]
    asked = kiln[: kiln.index("-- What it comes to ".ljust(100, "-"))]
    assert any("kiln/" in line for line in asked)
    assert not any("harbour/" in line for line in asked)
    (whole,) = re.findall(r"found whole: (\d+) of 18", "\n".join(page))
    assert int(whole) >= 15
    assert re.search(r"another conversation than the one asked in: 0 of [1-9]\d+", "\n".join(page))


def test_page_ends_with_what_the_memory_spent(memory: ZeroMem) -> None:
    assert page_of(memory, 80)[-1] == "LLM calls by memory: 0, tokens: 0"
