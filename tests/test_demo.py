"""The shipped conversations through the whole memory, on the page that a person reads."""

import io
import re

import pytest
from toys import EchoReader

from zeromem_torch.demo import run_demo
from zeromem_torch.library import ZeroMem

QUESTIONS = 18


@pytest.fixture(scope="module")
def memory() -> ZeroMem:
    return ZeroMem()


def page_of(memory: ZeroMem, width: int) -> list[str]:
    out = io.StringIO()
    run_demo(memory, EchoReader(), out, width)
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


def test_every_question_has_an_answer_that_cites_its_evidence() -> None:
    page = page_of(ZeroMem(), 100)
    answers = [line for line in page if line.startswith("     answer: ")]
    assert len(answers) == QUESTIONS
    assert f"answers that cite their evidence: {QUESTIONS} of {QUESTIONS}" in page
    assert any(re.search(r"\[(harbour|kiln)/D\d+:\d+\]$", line) for line in page)
    (after, before) = map(float, re.findall(r"F1 of the answers: (\d\.\d+), and (\d\.\d+) as", "\n".join(page))[0])
    assert 0 < before < after  # "The answer is:" comes off
    assert page[-3:] == [
        f"reader: {QUESTIONS} calls, {5 * QUESTIONS} tokens read, {2 * QUESTIONS} written",
        page[-2],
        "LLM calls by memory operations: 0",
    ]
    assert re.fullmatch(r"encoder: [1-9]\d+ tokens", page[-2])
