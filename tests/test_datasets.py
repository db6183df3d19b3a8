"""What every loader has in common: the forms of a file, its hash, limits, errors; and the files that are present."""

import gzip
import hashlib
from pathlib import Path
from typing import Any

import pytest
from benchmarks import CORPUS, asked, check, has_note, haystack, sample, sentenced, titled, write

from zeromem_torch.evaluation.datasets import load_dataset, read_rows
from zeromem_torch.substrate.traces import ZeroMemError


@pytest.mark.parametrize("name", ["part.json", "part.jsonl", "part.json.gz", "part.jsonl.gz"])
def test_every_form_of_a_file_reads_the_same(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, [haystack("q1"), haystack("q2")])
    data = load_dataset("longmemeval", path)
    plain = load_dataset("longmemeval", write(tmp_path, "other.json", [haystack("q1"), haystack("q2")]))

    assert (data.traces, data.questions) == (plain.traces, plain.questions)
    assert data.split == "part"
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_rows(path) == [haystack("q1"), haystack("q2")]


def test_sha256_covers_the_corpus(tmp_path: Path) -> None:
    path, corpus = write(tmp_path, "dev.json", [titled()]), write(tmp_path, "c.json.gz", CORPUS)
    data = load_dataset("hotpotqa", path, corpus)

    assert data.sha256 == hashlib.sha256(path.read_bytes() + corpus.read_bytes()).hexdigest()
    assert has_note(data, "sha256 is of the bytes of dev.json followed by those of c.json.gz")


def test_limit_leaves_out_boundaries_that_nobody_asks_about(tmp_path: Path) -> None:
    data = load_dataset("longmemeval", write(tmp_path, "s.json", [haystack("q1"), haystack("q2")]), limit=1)

    assert [q.id for q in data.questions] == ["q1"]
    assert {t.boundary for t in data.traces} == {"q1"}
    assert has_note(data, "limited to the first 1 of 2 questions")


def test_two_questions_of_one_id(tmp_path: Path) -> None:
    with pytest.raises(ZeroMemError, match="question id: expected each one once, got 't1'"):
        load_dataset("hotpotqa", write(tmp_path, "x.json", [titled(), titled()]), write(tmp_path, "c.json", CORPUS))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("locomo", haystack(), "expected 'sample_id' .*got only the keys answer.*look like those of longmemeval"),
        ("longmemeval", sample(), "expected 'question_id' .*look like those of locomo"),
        ("hotpotqa", {"id": "x", "context": [["A", ["a"]]]}, "expected 'supporting_facts'"),
        ("hotpotqa", sentenced(supporting_facts=[3]), "supporting_facts: expected pairs"),
        ("hotpotqa", sentenced(context={"title": []}), "context: expected pairs"),
        ("musique", sentenced(), "expected 'paragraphs' .*look like those of hotpotqa"),
        ("locomo", sample() | {"qa": {}}, r"expected 'qa' \(list\), got 'qa' as dict"),
        ("locomo", sample(asked(6)), r"x\.json\[0\]\.qa\[0\], category: expected 1 to 5, got '6'"),
        ("locomo", sample(asked(evidence=[3])), r"qa\[0\], evidence: expected strings, got 3"),
        ("longmemeval", haystack(haystack_sessions=[1, 2, 3]), "expected a list, got 1"),
        ("longmemeval", haystack(question_date="soon"), r"question_date: time: expected .*, got 'soon'"),
    ],
)
def test_wrong_schema_names_the_key(tmp_path: Path, name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ZeroMemError, match=message):
        load_dataset(name, write(tmp_path, "x.json", [row]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hotpot", {}, "dataset: expected one of locomo, .*, got 'hotpot'; did you mean 'hotpotqa'"),
        ("nothing like it", {}, "dataset: expected one of .*; pass one of these"),
        ("locomo", {"corpus": "c.json"}, "corpus: expected none for locomo"),
        ("musique", {"audited": True}, "only locomo has an audit"),
        ("locomo", {"limit": 0}, "limit: expected at least 1, got 0"),
        ("locomo", {}, r"absent\.json: expected a file that can be read, got 'No such file"),
    ],
)
def test_wrong_arguments(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ZeroMemError, match=message):
        load_dataset(name, tmp_path / "absent.json", **options)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  \n",
        b"[{]",
        b'[{"a": 1}, 3]',
        b"\xff\xfe",
        gzip.compress(b"[]" * 99, mtime=0)[:-9],
        b"\x1f\x8bnot gzip after all",
        b'{"a": ' * 9999,
    ],
)
def test_damaged_files(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(raw)

    with pytest.raises(ZeroMemError, match=r"x\.json.*: expected .*JSON"):
        load_dataset("locomo", path)


@pytest.mark.parametrize(
    ("name", "data", "corpus", "traces", "questions", "scored"),
    [
        ("longmemeval", "longmemeval/longmemeval_s_single.json.gz", None, 549, 1, 1),  # of 550, one is invisible
        ("hotpotqa", "hotpotqa/hotpot_dev250_titles.json.gz", "hotpotqa/hotpot_corpus.jsonl.gz", 7704, 250, 250),
        ("hotpotqa", "hotpotqa/hotpot_dev_sentences.json.gz", "hotpotqa/hotpot_corpus.jsonl.gz", 7704, 195, 195),
        ("hotpotqa", "hotpotqa/hotpot_dev_sentences.json.gz", None, 1931, 195, 195),
        ("hotpotqa", "hotpotqa/hotpot_train100.json.gz", None, 994, 100, 100),
        ("musique", "musique/musique_dev100.json.gz", None, 1603, 100, 100),
        ("2wiki", "2wikimultihopqa/questions500.json.gz", "2wikimultihopqa/corpus6119.json.gz", 6119, 500, 482),
    ],
)
def test_other_files(
    shared_data: Path, name: str, data: str, corpus: str | None, traces: int, questions: int, scored: int
) -> None:
    loaded = load_dataset(name, shared_data / data, shared_data / corpus if corpus else None)
    check(loaded)

    assert (len(loaded.traces), len(loaded.questions)) == (traces, questions)
    assert sum(bool(q.evidence) for q in loaded.questions) == scored
