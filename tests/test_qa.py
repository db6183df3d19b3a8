"""Question answering: figures are those of the lines, no answer is paid for twice, memory operations pay nothing."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from toys import RULES, HashEncoder, talk

from zeromem_torch.evaluation.answers import answer_in_evidence, bleu1, f1
from zeromem_torch.evaluation.datasets import Dataset, Question
from zeromem_torch.evaluation.metrics import paired_bootstrap
from zeromem_torch.evaluation.qa import _within, run_qa
from zeromem_torch.evaluation.qa_tables import table3, tables
from zeromem_torch.evaluation.systems import DEPTHS, Piece, _item, shown
from zeromem_torch.evidence import Evidence
from zeromem_torch.reader import MeteredReader, Reply, Usage
from zeromem_torch.substrate.encoder import Encoded
from zeromem_torch.substrate.traces import ZeroMemError

PLACES = ["Oslo", "Bergen", "Lom", "Tromso", "Bodo", "Molde"]
TRACES = tuple(
    trace
    for name in ("a", "b")
    for trace in talk(
        name, *[[f"I went to {p} with my boat.", f"Was {p} nice, Ann?", f"The kite in {p} was red."] for p in PLACES]
    )
)
QUESTIONS = tuple(
    Question(f"{name}/q{i}{kind}", name, text.format(place), (f"{name}/{i}:1",), answers, category)
    for name in ("a", "b")
    for i, place in enumerate(PLACES, start=1)
    for kind, text, answers, category in (
        ("w", "What was red in {}?", ("kite",), "4"),
        ("g", "Where did Ann go with her boat, {} or elsewhere?", (place,), str(1 + i % 3)),
    )
)
DATA = Dataset("locomo", "made", TRACES, QUESTIONS, {"1": "multi-hop", "4": "single-hop"}, "0" * 64, ("made by hand",))
ENCODER = HashEncoder()


@dataclass
class Quoting:
    """A reader that quotes a word of the best item; counts what it is asked, and can fail."""

    name: str = "quoting"
    context_tokens: int = 800
    asked: list[tuple[str, str]] = field(default_factory=list)
    fails: Callable[[str], str] = lambda question: ""
    stops_after: int = 10**9
    sure: bool = False

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        if len(self.asked) + len(questions) > self.stops_after:
            raise KeyboardInterrupt
        replies = []
        for question, found in zip(questions, evidence, strict=True):
            self.asked.append((question, found.boundary))
            best = found.items[0].text if found.items else ""
            place = re.search("|".join(PLACES), best)
            said = "The answer is kite." if "red" in question else place[0] if place else "unknown"
            usage = Usage(sum(self.count([item.text for item in found])), 2, 1)
            digest = sha256((question + best).encode()).hexdigest()
            error = self.fails(question)
            confidence = -len(best) / 100 if self.sure else None
            replies.append(Reply("" if error else said, usage, digest, error, 0.0, confidence))
        return replies


def run(systems: Sequence[str], reader: Any = None, data: Dataset = DATA, **options: Any) -> dict[str, Any]:
    return run_qa(data, systems, reader or Quoting(), options.pop("encoder", ENCODER), RULES, **options)


def lines_of(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    return rows[0]["head"], rows[1:]


SOME = ("zeromem", "no_closure", "no_answer_calibration", "bm25", "bm25@1", "rag", "long_llm")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Quoting]:
    out = tmp_path_factory.mktemp("run") / "answers.jsonl"
    reader = Quoting(context_tokens=240)
    return run(SOME, reader, out=out), out, reader


def test_every_answer_is_kept_with_what_it_came_from(measured: tuple[dict[str, Any], Path, Quoting]) -> None:
    head, lines = lines_of(measured[1])
    assert head["reader"] == "quoting"
    assert {(line["system"], line["id"]) for line in lines} == {
        (system, question.id) for system in SOME if system != "no_answer_calibration" for question in QUESTIONS
    }
    by_id = {question.id: question for question in QUESTIONS}
    for line in lines:
        question = by_id[line["id"]]
        assert (line["question"], line["gold"], line["category"]) == (
            question.text, list(question.answers), question.category,
        )  # fmt: skip
        assert len(line["evidence"]) <= (1 if line["system"] in ("bm25@1", "long_llm") else 5)
        best = line["evidence"][0]["text"] if line["evidence"] else ""
        assert line["prompt_sha256"] == sha256((question.text + best).encode()).hexdigest()
        assert line["tokens"]["evidence"] == sum(item["tokens"] for item in line["evidence"])
        assert line["memory_llm_calls"] == 0
        for kind, said in (("metrics", line["answer"]), ("raw_metrics", line["raw"].strip())):
            for name, score in line[kind]["f1"].items():
                assert score == f1(said, question.answers[0], name, question.category)
            for name, score in line[kind]["bleu1"].items():
                assert score == bleu1(said, question.answers[0], name)


def test_answer_in_evidence_is_that_of_what_was_handed_over(measured: tuple[dict[str, Any], Path, Quoting]) -> None:
    ids = {trace.id for trace in TRACES}
    for line in lines_of(measured[1])[1]:
        held = line["in_evidence"]
        texts = [item["text"] for item in line["evidence"]]
        if line["category"] == "4":  # a kite is in the text, not in a date or a name
            assert held["handed"] == any(answer_in_evidence(text, line["gold"]) for text in texts)
        if line["system"] == "long_llm":
            assert held["tokens"] == {}
            assert held["k"] == []
            continue
        assert len(held["k"]) == len(DEPTHS)
        if line["system"] != "rag":
            assert held["handed"] == held["k"][len(line["evidence"]) - 1]
            assert all(item["trace_id"] in ids for item in line["evidence"])
        assert held["k"] == sorted(held["k"])
        assert list(held["tokens"].values()) == sorted(held["tokens"].values())


def test_a_chunk_is_cut_to_a_budget_and_a_turn_is_skipped() -> None:
    ranked = [Piece("a" * 30, 30), Piece("b" * 100, 100), Piece("c" * 10, 10)]
    assert [piece.text for piece in _within(ranked, 45, False)] == ["a" * 30, "c" * 10]
    assert [piece.text for piece in _within(ranked, 45, True)] == ["a" * 30, "b" * 15]
    assert list(_within(ranked, 30, False)) == ranked[:1]


def test_figures_are_those_of_the_lines(measured: tuple[dict[str, Any], Path, Quoting]) -> None:
    result, path, reader = measured
    lines = lines_of(path)[1]
    assert list(result["systems"]) == list(SOME)
    for name, system in result["systems"].items():
        raw = name == "no_answer_calibration"
        own = [line for line in lines if line["system"] == ("zeromem" if raw else name)]
        overall, kind = system["overall"], "raw_metrics" if raw else "metrics"
        assert overall["n"] == len(own) == len(QUESTIONS)
        for measure in ("f1", "bleu1"):
            for convention, value in overall[measure].items():
                assert value == pytest.approx(mean(line[kind][measure][convention] for line in own))
        assert overall["answer_in_evidence"] == pytest.approx(mean(line["in_evidence"]["handed"] for line in own))
        spent = sum(line["tokens"]["prompt"] + line["tokens"]["completion"] for line in own)
        assert overall["reader_tokens"] == spent == overall["prompt_tokens"] + overall["completion_tokens"]
        assert overall["memory_llm_tokens"] == 0
        assert overall["interval"]["f1"][0] <= overall["f1"]["gam"] <= overall["interval"]["f1"][1]
        assert sum(part["n"] for part in system["by_category"].values()) == overall["n"]
        assert (system["vs"] == {}) == (name != "zeromem")
    windows = sum(line["tokens"]["calls"] for line in lines if line["system"] == "long_llm")
    assert len(reader.asked) == len(QUESTIONS) * (len(SOME) - 2) + windows
    assert windows > len(QUESTIONS)
    assert result["systems"]["long_llm"]["overall"]["answer_in_evidence_k"] == []


def test_zeromem_is_tested_against_every_other_system(measured: tuple[dict[str, Any], Path, Quoting]) -> None:
    result, path, _ = measured
    by = {(line["system"], line["id"]): line for line in lines_of(path)[1]}
    versus = result["systems"]["zeromem"]["vs"]
    assert list(versus) == [name for name in SOME if name != "zeromem"]
    mine = [by["zeromem", q.id]["in_evidence"]["tokens"]["256"] for q in QUESTIONS]
    theirs = [by["rag", q.id]["in_evidence"]["tokens"]["256"] for q in QUESTIONS]
    assert versus["rag"]["answer_in_evidence@256tok"] == paired_bootstrap(mine, theirs)
    assert "answer_in_evidence@256tok" not in versus["long_llm"]
    calibrated = [by["zeromem", q.id]["metrics"]["f1"]["gam"] for q in QUESTIONS]
    raw = [by["zeromem", q.id]["raw_metrics"]["f1"]["gam"] for q in QUESTIONS]
    assert result["systems"]["zeromem"]["calibration"]["f1"] == paired_bootstrap(calibrated, raw)
    assert versus["no_answer_calibration"]["f1"] == paired_bootstrap(calibrated, raw)


def test_calibration_is_counted_by_rule(measured: tuple[dict[str, Any], Path, Quoting]) -> None:
    result, path, _ = measured
    own = [line for line in lines_of(path)[1] if line["system"] == "zeromem"]
    calibration = result["systems"]["zeromem"]["calibration"]
    assert calibration["changed"] == sum(line["answer"] != line["raw"] for line in own)
    assert sum(rule["n"] for rule in calibration["by_rule"].values()) == len(own)
    total = sum(rule["n"] * rule["f1_diff"] for rule in calibration["by_rule"].values())
    assert total / len(own) == pytest.approx(calibration["f1"]["diff"])
    assert result["systems"]["no_answer_calibration"]["calibration"] == {}


def test_the_average_is_weighted_by_the_benchmarks_own_categories(
    measured: tuple[dict[str, Any], Path, Quoting],
) -> None:
    system = measured[0]["systems"]["zeromem"]
    weights = {"1": 282, "2": 321, "3": 96, "4": 841}
    expected = sum(system["by_category"][name]["f1"]["gam"] * n for name, n in weights.items()) / 1540
    assert system["weighted"]["f1"]["gam"] == pytest.approx(expected)
    other = run(["bm25"], data=dataclasses.replace(DATA, name="made"), limit=4)
    assert other["systems"]["bm25"]["weighted"] is None


def test_tables_name_every_system(measured: tuple[dict[str, Any], Path, Quoting]) -> None:
    text = "\n".join(tables(measured[0]))
    for words in ("Table 1", "Table 2", "Figure 3", "Figure 4", "made by hand", "multi-hop", "long_llm: LONG-LLM"):
        assert words in text
    assert all(name in text for name in SOME)
    both = "\n".join(table3({"56k": measured[0], "224k": run(["dense"], limit=3)}))
    assert re.search(r"bm25 .* -\n", both)
    assert "dense" in both


# Runs that stop


def test_a_stopped_run_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "answers.jsonl"
    first = Quoting(stops_after=30)
    with pytest.raises(KeyboardInterrupt):
        run(["zeromem", "bm25"], first, out=out, at_once=7)
    kept = lines_of(out)[1]
    assert len(kept) == len(first.asked) < 30
    with out.open("ab") as file:
        file.write(b'{"id": "a/q1w", "syst')  # a line that was being written
    second = Quoting()
    result = run(["zeromem", "bm25"], second, out=out, at_once=7)
    asked = [(line["system"], line["id"]) for line in lines_of(out)[1]]
    assert len(asked) == len(set(asked)) == 2 * len(QUESTIONS)
    assert len(first.asked) + len(second.asked) == 2 * len(QUESTIONS)
    whole = run(["zeromem", "bm25"])
    assert without_times(result) == without_times(whole)
    third = Quoting()
    assert without_times(run(["zeromem", "bm25"], third, out=out)) == without_times(whole)
    assert third.asked == []


def without_times(result: dict[str, Any]) -> Any:
    """What does not depend on the clock, nor on how often a query was encoded."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            clock = ("seconds", "read_seconds", "encoder_tokens", "lines")
            return {key: plain(inner) for key, inner in value.items() if key not in clock}
        return value

    return plain(result)


def test_a_killed_run_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    script = f"""
        import os, signal
        from pathlib import Path
        import test_qa

        class Killed(test_qa.Quoting):
            def read(self, questions, evidence, **options):
                replies = super().read(questions, evidence, **options)
                if len(self.asked) > 20:
                    os.kill(os.getpid(), signal.SIGKILL)
                return replies

        test_qa.run(["bm25", "dense"], Killed(), out=Path({str(out)!r}), at_once=6)
    """
    root = Path(__file__).resolve().parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root.parent)])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    kept = [(line["system"], line["id"]) for line in lines_of(out)[1]]
    assert len(kept) == 18  # three batches of six; the fourth was lost with the process
    reader = Quoting()
    run(["bm25", "dense"], reader, out=out)
    assert len(reader.asked) == 2 * len(QUESTIONS) - len(kept)
    every = [(line["system"], line["id"]) for line in lines_of(out)[1]]
    assert every[: len(kept)] == kept
    assert len(every) == len(set(every)) == 2 * len(QUESTIONS)


def test_systems_and_questions_may_be_added_to_a_run(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    run(["bm25"], out=out, limit=5)
    reader = Quoting()
    result = run(["bm25", "dense"], reader, out=out, limit=8)
    assert len(reader.asked) == 3 + 8
    assert [system["overall"]["n"] for system in result["systems"].values()] == [8, 8]


def test_a_question_without_an_answer_is_asked_again(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    failing = Quoting(fails=lambda question: "500 from the server" if "Lom" in question else "")
    result = run(["bm25"], failing, out=out)
    failed = sum("Lom" in question.text for question in QUESTIONS)
    assert result["systems"]["bm25"]["overall"]["errors"] == failed
    assert all(
        line["answer"] == "" and line["metrics"]["f1"]["gam"] == 0 for line in lines_of(out)[1] if line["error"]
    )
    reader = Quoting()
    mended = run(["bm25"], reader, out=out)
    assert len(reader.asked) == failed
    assert mended["systems"]["bm25"]["overall"]["errors"] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_budget": 64}, "another token_budget"),
        ({"seed": 1}, "another seed"),
        ({"reader": Quoting(name="other")}, "another reader"),
        ({"data": dataclasses.replace(DATA, sha256="1" * 64)}, "another sha256"),
        ({"encoder": HashEncoder(fingerprint="hash-2")}, "another encoder"),
    ],
)
def test_answers_of_another_run_are_not_gone_on_with(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    out = tmp_path / "answers.jsonl"
    run(["bm25"], out=out, limit=3)
    before = out.read_bytes()
    with pytest.raises(ZeroMemError, match=words):
        run(["bm25"], change.pop("reader", None), out=out, limit=3, **change)
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["not json\n", "[1]\n", '{"id": 1}\n', "\n"])
def test_a_file_that_no_run_wrote_is_left_alone(tmp_path: Path, text: str) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text(text)
    with pytest.raises(ZeroMemError, match="line 1: expected a line that a run wrote"):
        run(["bm25"], out=out, limit=3)
    assert out.read_text() == text


def test_kept_answers_are_calibrated_anew_and_nothing_is_asked(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    result = run(["zeromem", "bm25"], out=out)
    head, lines = lines_of(out)
    older = [{**line, "answer": line["raw"], "rule": "kept", "metrics": line["raw_metrics"]} for line in lines]
    out.write_text("".join(json.dumps(row) + "\n" for row in [{"head": head}, *older]))
    reader = Quoting()
    again = run(["zeromem", "bm25"], reader, out=out)
    assert reader.asked == []
    assert again["systems"] == result["systems"]
    assert result["systems"]["zeromem"]["calibration"]["changed"] > 0
    written = out.read_text()
    run(["zeromem", "bm25"], reader, out=out)
    assert out.read_text() == written  # what is calibrated already stays as it is


# What memory operations may not do


class Asking(HashEncoder):
    """An encoder that consults the reader."""

    def __init__(self, reader: MeteredReader) -> None:
        super().__init__()
        self.reader = reader

    def encode(self, texts: Sequence[str], *, states: bool = False) -> Encoded:
        self.reader.read(["What matters here?"], [Evidence.nothing("", "", "")])
        return super().encode(texts, states=states)


@pytest.mark.parametrize("system", ["zeromem", "dense", "rag"])
def test_the_reader_refuses_memory_operations(tmp_path: Path, system: str) -> None:
    inner = Quoting()
    reader = MeteredReader(inner)
    with pytest.raises(ZeroMemError, match="reader: expected no call during memory operations"):
        run([system], reader, encoder=Asking(reader), out=tmp_path / "answers.jsonl", limit=2)
    assert inner.asked == []
    assert reader.ledger.memory_llm_calls == 1
    assert lines_of(tmp_path / "answers.jsonl")[1] == []


def test_the_reader_opens_again_and_counts_what_it_spends() -> None:
    reader = MeteredReader(Quoting())
    with reader.ledger.operation():
        assert reader.count(["two words"]) == [2]  # counting spends nothing
    result = run(["bm25"], reader, limit=4)
    assert reader.ledger.reader_calls == 4
    assert reader.ledger.reader_tokens == result["systems"]["bm25"]["overall"]["reader_tokens"]


# LONG-LLM, samples, refusals


def test_long_llm_takes_the_surest_window_else_the_first_supported_one(tmp_path: Path) -> None:
    for sure in (True, False):
        out = tmp_path / f"{sure}.jsonl"
        run(["long_llm"], Quoting(context_tokens=120, sure=sure), out=out, limit=6)
        for line in lines_of(out)[1]:
            assert line["tokens"]["calls"] > 1
            assert line["tokens"]["completion"] == 2 * line["tokens"]["calls"]
            assert line["supported"]
            assert line["answer"] in line["evidence"][0]["text"]


def test_a_limit_draws_questions_with_the_seed() -> None:
    def asked(seed: int) -> list[str]:
        reader = Quoting()
        run(["bm25"], reader, limit=6, seed=seed)
        return [question for question, _ in reader.asked]

    assert asked(0) == asked(0) != asked(1)
    result = run(["bm25"], limit=6)
    assert result["questions"] == 6
    assert "6 of 24 questions, drawn with seed 0" in result["notes"]


def test_questions_without_a_gold_answer_are_left_out() -> None:
    bare = dataclasses.replace(QUESTIONS[0], id="bare", answers=())
    result = run(["bm25"], data=dataclasses.replace(DATA, questions=(bare, *QUESTIONS[:3])))
    assert result["questions"] == 3
    assert "1 of 4 questions have no gold answer: left out" in result["notes"]
    with pytest.raises(ZeroMemError, match="questions: expected at least one with a gold answer"):
        run(["bm25"], data=dataclasses.replace(DATA, questions=(bare,)))


def test_what_cannot_run_is_said_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("ZEROMEM_ADAPTERS", raising=False)
    result = run(["bm25", "light_mem"], limit=2)
    assert list(result["systems"]) == ["bm25"]
    assert "light_mem" in result["unavailable"]
    for systems, words in (
        (["no_answer_calibration"], "expected zeromem beside"),
        ([], "systems: expected at least one"),
        (["bm52"], "did you mean 'bm25'"),
    ):
        reader = Quoting()
        with pytest.raises(ZeroMemError, match=words):
            run(systems, reader)
        assert reader.asked == []
    with pytest.raises(ZeroMemError, match="limit: expected at least 1"):
        run(["bm25"], limit=0)


def test_groups_of_boundaries_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    together = run(["zeromem", "linear_rag"])
    monkeypatch.setattr("zeromem_torch.evaluation.qa.TOGETHER", 1)
    apart = run(["zeromem", "linear_rag"])
    for name in ("zeromem", "linear_rag"):
        one, other = (result["systems"][name]["overall"] for result in (together, apart))
        assert one["f1"] == other["f1"]
        assert np.allclose(one["answer_in_evidence_k"], other["answer_in_evidence_k"])


def test_an_item_is_shown_with_its_date_and_speaker() -> None:
    item = next(iter(DATA.traces))
    assert item.time is not None
    assert shown(_item(item, 3, 0.0)) == f"[{item.time.day} {item.time:%B %Y}] {item.speaker}: {item.text}"
