"""The report of runs: whole without a network, true to the runs, and deaf to what their texts say."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_run import DEMO, conversations, write_run
from toys import RULES, HashEncoder

from zeromem_torch.cli.options import Parser
from zeromem_torch.cli.qa import add_qa_parser, report_command
from zeromem_torch.evaluation.qa import run_qa
from zeromem_torch.evaluation.report import build_report
from zeromem_torch.evaluation.report.figures import spread
from zeromem_torch.evaluation.report.runs import MISSES, miss_of, read_runs
from zeromem_torch.evidence import Evidence
from zeromem_torch.reader.protocol import Reply, Usage
from zeromem_torch.substrate.traces import ZeroMemError

SMALL = ("zeromem", "no_closure", "bm25", "rag")
HOSTILE = (
    "</script><script>document.title = 'broken into'</script>",
    "<img src=x onerror=\"document.title = 'broken into'\">",
    "\" onmouseover='document.title=1' x=\"",
    "--><svg onload=document.title=1>{{data}}{{body}}",
    "&lt;b&gt; $x_1$ \\1 \u202e\x00 \ud800 #010101",
)


class Page(HTMLParser):
    """Tags with their attributes' names, the text between them, and what scripts hold."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: dict[str, list[str]] = {}
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self._inside = tag
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def data_of(page: Page) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(base64.b64decode(page.scripts[0]))))


def change_lines(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    for line in lines[1:]:
        change(line)
    path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), systems=SMALL, sweep=True)


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    return build_report([run])


def test_the_page_is_whole(html: str) -> None:
    page = Page(html)
    assert all(link.startswith("#") for link in page.links), page.links
    assert not re.search(r"@import|url\((?!#)|<link|<iframe|fetch\(|XMLHttpRequest|import\(", html)
    ids = page.attributes["id"]
    assert len(ids) == len({*ids})
    assert {link[1:] for link in page.links} <= {*ids}


def test_only_its_own_script_may_run(html: str) -> None:
    page = Page(html)
    (policy,) = [value for value in page.attributes["content"] if "default-src" in value]
    _, script = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)


def test_tables_figures_and_provenance_are_there(run: Path, html: str) -> None:
    page, result = Page(html), json.loads(run.read_text())
    for name in ("Table 1", "Table 2", "Figure 3", "Figure 4", "What went wrong", "p of the paired bootstrap"):
        assert name in page.text
    assert page.tags["svg"] == 3
    for name in ("command", "commit", "sha256", "reader"):
        assert result[name] in page.text
    assert "mem0 was not run: it is not installed" in page.text
    overall = result["systems"]["zeromem"]["overall"]
    assert f"{100 * overall['f1']['gam']:.2f} / {100 * overall['bleu1']['gam']:.2f}" in page.text
    low, high = overall["interval"]["f1"]
    assert f"{100 * low:.1f} to {100 * high:.1f}" in page.text


def test_every_answer_is_listed_and_the_sweep_is_not(run: Path, html: str) -> None:
    data = data_of(Page(html))
    lines = {(line["system"], line["id"]): line for line in read_runs([run])[0].lines if "@" not in line["system"]}
    rows = {(row["system"], question["id"]): row for question in data["questions"] for row in question["rows"]}
    assert rows.keys() == lines.keys()
    assert data["runs"][0]["systems"] == list(SMALL)
    for key, row in rows.items():
        line = lines[key]
        assert (row["raw"], row["answer"], row["rule"]) == (line["raw"], line["answer"], line["rule"])
        assert [data["traces"][at][4] for at, *_ in row["evidence"]] == [item["text"] for item in line["evidence"]]
        assert row["rankings"].keys() == line["rankings"].keys()


def test_the_same_runs_give_the_same_page(run: Path, html: str) -> None:
    assert build_report([run]) == html


def test_counts_of_misses_open_their_questions(html: str) -> None:
    page, data = Page(html), data_of(Page(html))
    rows = [row for question in data["questions"] for row in question["rows"]]
    counted = Counter((row["system"], row["miss"]) for row in rows if row["miss"])
    pairs = list(zip(page.attributes["data-system"], page.attributes["data-miss"], strict=True))
    assert set(pairs) == set(counted)
    assert len(pairs) == len(set(pairs))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, with hostile texts wherever a run holds text."""
    attack = " ".join(HOSTILE)
    change = {
        "dataset": attack,
        "reader": attack,
        "encoder": attack,
        "command": attack,
        "notes": [attack],
        "unavailable": {"mem0": attack},
        "labels": {"rag": attack, "no_closure": attack},
        "categories": dict.fromkeys("1234", attack),
        "config": {"routing": {"rho": attack}, attack: 1},
    }
    path = write_run(tmp_path_factory.mktemp("hostile"), systems=SMALL, sweep=True, change=change)

    def poison(line: dict[str, Any]) -> None:
        for name in ("question", "raw", "answer", "rule", "explanation", "route"):
            line[name] = attack
        for name in ("gold", "gold_evidence", "reasons", "answer_types", "subjects"):
            line[name] = [attack]
        for item in line["evidence"]:
            item |= {"text": attack, "speaker": attack, "session": attack, "reason": attack, "trace_id": attack}

    change_lines(path, poison)
    return path


def test_hostile_texts_change_no_tag_and_run_nothing(hostile: Path, html: str) -> None:
    page, plain = Page(build_report([hostile])), Page(html)
    del page.tags["button"], plain.tags["button"]  # one for each kind of miss, which other evidence changes
    assert page.tags == plain.tags
    assert page.attributes.keys() == plain.attributes.keys()
    assert page.scripts[1] == plain.scripts[1]
    assert data_of(page)["questions"][0]["text"] == " ".join(HOSTILE).replace("\ud800", "?")
    page.text.encode()


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("attacked", [False, True])
def test_a_browser_draws_the_list(run: Path, hostile: Path, tmp_path: Path, attacked: bool) -> None:
    (tmp_path / "report.html").write_text(build_report([hostile if attacked else run]), encoding="utf-8")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    shown = ("--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path / 'report.html'}")
    done = subprocess.run(["chromium", *options, *shown], capture_output=True, text=True, timeout=120, check=True)
    page = Page(done.stdout)
    assert "36 of 36 questions" in page.text
    assert page.tags["summary"] >= 36
    assert page.tags["img"] == 0
    assert done.stdout.partition("<title>")[2].startswith("zeromem_torch: ")


def test_runs_of_several_lengths_share_table_3(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, f"run-{length}", systems=("zeromem", "bm25"), questions=20, seed=seed, context=length)
        for seed, length in enumerate(("224k", "56k"))
    ]
    text = Page(build_report(runs)).text
    assert text.count("Table 3.") == 1
    assert "Table 1." not in text
    assert text.index("56K tokens n = 20") < text.index("224K tokens n = 20")
    assert "made-up (made_up), embedded: run-56k" in text  # names that would be the same hold the file's


@dataclass
class Parrot:
    """A reader that repeats the first piece of evidence."""

    name: str = "parrot"
    context_tokens: int = 2048

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def read(
        self, questions: Sequence[str], evidence: Sequence[Evidence], *, token_budget: int | None = None
    ) -> list[Reply]:
        return [Reply(one.items[0].text if one else "", Usage(9, 3, 1), "0" * 64) for one in evidence]


def test_a_run_as_it_is_written_becomes_a_page(tmp_path: Path) -> None:
    systems = ("zeromem", "no_closure", "no_answer_calibration", "bm25", "rag", "zeromem@2")
    data = conversations()
    result = run_qa(data, systems, Parrot(), HashEncoder(), RULES, out=tmp_path / "run.jsonl")
    (tmp_path / "run.json").write_text(json.dumps(result))
    page = Page(build_report([tmp_path / "run.json"]))
    assert page.tags["svg"] == 3
    assert len(data_of(page)["questions"]) == len(data.questions)
    for system in systems[:-1]:
        assert result["labels"].get(system, system) in page.text


def test_commands_run_measure_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zeromem_torch.reader.load_reader", lambda name: Parrot(name), raising=False)
    monkeypatch.setattr("zeromem_torch.cli.qa.cached_encoder", lambda options, config: HashEncoder())
    (tmp_path / "rules.toml").write_text('[substrate]\nentities = "rules"\n')
    data, run, page = DEMO, tmp_path / "run.json", tmp_path / "run.html"
    asked = f"jsonl --data {data} --systems bm25 --json {run} --limit 5 --reader parrot".split()

    def called(fill: Callable[[ArgumentParser], None], *arguments: str) -> int:
        options = Parser(prog="zeromem", fill=fill).parse_args(arguments)
        return int(options.run(options))

    assert called(add_qa_parser, *asked, "--config", str(tmp_path / "rules.toml")) == 0
    assert "bm25" in capsys.readouterr().out
    assert json.loads(run.read_text())["questions"] == 5
    assert called(report_command, str(run), "--out", str(page)) == 0
    assert str(page) in capsys.readouterr().err
    assert called(report_command, str(run), "--out", "-") == 0
    assert capsys.readouterr().out == page.read_text(encoding="utf-8") == build_report([run])
    with pytest.raises(ZeroMemError, match="a file that can be written"):
        called(report_command, str(run), "--out", str(tmp_path))
    with pytest.raises(SystemExit):
        called(add_qa_parser, *asked, "--context", "56k")


def test_few_questions_have_no_intervals(tmp_path: Path) -> None:
    path = write_run(tmp_path, systems=("zeromem", "no_closure"), questions=7)
    text = Page(build_report([path])).text
    assert not re.search(r"\d+\.\d to \d+\.\d", text.partition("Cost")[0].partition("Table 1")[2])
    assert "Figure 3." in text


def test_a_run_without_lines_is_shown_without_questions(tmp_path: Path) -> None:
    path = write_run(tmp_path, systems=("bm25",), questions=20, lines=False)
    page = Page(build_report([path]))
    assert "its lines were not found" in page.text
    assert "Figure 3." not in page.text
    assert data_of(page)["questions"] == []


def test_later_lines_replace_earlier_ones_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path, systems=("zeromem",), questions=20)
    lines = path.with_suffix(".jsonl")
    kept = lines.read_text().splitlines()
    again = json.loads(kept[1]) | {"answer": "asked again"}
    lines.write_text("\n".join([*kept, json.dumps(again), kept[2][:50]]))
    (read,) = read_runs([path])
    assert len(read.lines) == 20
    assert read.lines[0]["answer"] == "asked again"


LINE: dict[str, Any] = {
    "error": "",
    "metrics": {"f1": {"gam": 0.4}},
    "raw_metrics": {"f1": {"gam": 0.4}},
    "in_evidence": {"handed": 0},
    "gold_evidence": ["a"],
    "evidence": [{"trace_id": "b"}],
    "rankings": {"graph": [{"trace_id": "c"}]},
}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("", {"metrics": {"f1": {"gam": 0.5}}}),
        ("", {"metrics": {}, "raw_metrics": {}, "in_evidence": {}}),  # no gold answer
        ("reader failed", {"error": "timed out", "in_evidence": {"handed": 1}}),
        ("lowered by calibration", {"raw_metrics": {"f1": {"gam": 0.5}}, "in_evidence": {"handed": 1}}),
        ("overlooked", {"in_evidence": {"handed": 1}}),
        ("to be inferred", {"evidence": [{"trace_id": "a"}]}),
        ("ranked too low", {"rankings": {"hierarchy": [{"trace_id": "a"}]}}),
        ("not found", {}),
        ("not found", {"gold_evidence": [], "rankings": {}, "evidence": []}),
    ],
)
def test_a_wrong_answer_has_one_reason(kind: str, change: dict[str, Any]) -> None:
    assert miss_of(LINE | change) == kind
    assert not kind or kind in MISSES


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 100), max_size=8), st.floats(0.01, 20))
def test_labels_stand_apart_in_their_order(heights: dict[str, float], gap: float) -> None:
    moved = spread(heights, gap)
    ordered = sorted(heights, key=lambda label: heights[label])
    assert list(moved) == ordered
    assert all(moved[b] - moved[a] >= gap - 1e-9 for a, b in pairwise(ordered))


def test_labels_that_stand_apart_stay() -> None:
    assert spread({"b": 10.0, "a": 5.0}, 2.0) == {"a": 5.0, "b": 10.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "JSON"), ("[]", '"qa"'), ('{"kind": "retrieval"}', "retrieval"), ('{"systems": {}}', "zeromem eval qa")],
)
def test_a_file_that_is_no_run_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ZeroMemError, match=re.escape(words)) as caught:
        build_report([path])
    assert "other.json" in str(caught.value)


def test_a_missing_file_and_no_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ZeroMemError, match="No such file"):
        build_report([tmp_path / "none.json"])
    with pytest.raises(ZeroMemError, match="at least one"):
        build_report([])


@pytest.mark.parametrize("bad", ["{", "[]", "7", '{"system": "zeromem"}'])
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, bad: str) -> None:
    path = write_run(tmp_path, systems=("bm25",), questions=20)
    with path.with_suffix(".jsonl").open("a") as file:
        file.write(bad + "\n")
    with pytest.raises(ZeroMemError, match=r"run\.jsonl:22"):
        build_report([path])


def test_without_matplotlib_the_error_names_the_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[report\]'"):
        build_report([run])
