"""The README and the pages in docs tell the truth: their code runs, and figures are those of the result files."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = sorted((ROOT / "bench" / "results").glob("retrieval-*.json"))
ANSWERS = sorted((ROOT / "bench" / "results").glob("answers-*.json"))


def test_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert "a/3" in capsys.readouterr().out, "the turn with the answer is found"


@pytest.mark.parametrize("page", ["library.md", "reader.md"])
def test_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 2
    shared: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), shared)


@pytest.mark.parametrize(
    ("kind", "table", "files"),
    [("results", "retrieval_table.py", RESULTS), ("answers", "answers_table.py", ANSWERS)],
)
def test_figures_are_those_of_the_result_files(kind: str, table: str, files: list[Path]) -> None:
    lines = runpy.run_path(str(ROOT / "bench" / table))["lines"]
    printed = re.search(rf"<!-- {kind} -->\n(.*?)<!-- /{kind} -->", README, re.DOTALL)
    assert printed is not None
    assert files
    for path in files:
        for line in lines(json.loads(path.read_text(encoding="utf-8"))):
            assert line in printed[1], path.name


@pytest.mark.parametrize("script", ["retrieval_table", "answers_table", "versus"])
def test_a_script_of_the_benches_says_what_it_is_for(script: str) -> None:
    call = [sys.executable, str(ROOT / "bench" / f"{script}.py"), "--help"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    assert f"bench/{'pipeline' if script == 'versus' else script}.py" in done.stdout + done.stderr


def test_the_package_is_installed_by_a_path_and_never_by_a_name() -> None:
    """No registry has it: whoever takes its name there would be installed."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("zeromem_torch/**/*.py")]
    for page in pages:
        assert not re.search(r"pip install ['\"]?zeromem", page.read_text(encoding="utf-8")), page.name


@pytest.mark.parametrize(("kind", "pattern"), [("speed", "pipeline-*.json"), ("serving", "serving-*.json")])
def test_figures_of_speed_are_those_of_the_result_files(kind: str, pattern: str) -> None:
    lines = runpy.run_path(str(ROOT / "bench" / "table.py"))["lines"]
    printed = re.search(rf"<!-- {kind} -->\n(.*?)<!-- /{kind} -->", README, re.DOTALL)
    files = sorted((ROOT / "bench" / "results").glob(pattern))
    assert printed is not None
    assert files
    for path in files:
        for line in lines(path, short=True):
            assert line in printed[1], path.name


def test_every_file_that_the_stage_table_names_is_there() -> None:
    table = README[README.index("## Stages") : README.index("## What is the paper's")]
    names = re.findall(r"`([\w/]+\.py)`", table)
    assert len(names) > 15
    package = ROOT / "zeromem_torch"
    for name in names:
        assert (package / name).exists() or (package / "retrieval" / name).exists() or (ROOT / name).exists(), name
