"""The examples of docs/extending.md run, and what they add is trained like our own."""

import dataclasses
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_evaluation_run import DATA
from toys import RULES, HashEncoder

from zeromem_torch.cli import train
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.retrieval import hierarchy
from zeromem_torch.routing import features, router
from zeromem_torch.training import losses
from zeromem_torch.training.cache import cached
from zeromem_torch.training.fit import fit
from zeromem_torch.training.settings import Stage, TrainingSettings

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture
def example() -> Iterator[dict[str, Any]]:
    """What the page defines; what it registers is taken out again."""
    tables: list[dict[str, Any]] = [features.FEATURES, losses.LOSSES, router.ROUTERS, hierarchy.VIEWS]
    before = [dict(table) for table in tables]
    shared: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "extending.md", "exec"), shared)
    yield shared
    for table, held in zip(tables, before, strict=True):
        table.clear()
        table.update(held)


def test_what_the_page_adds_is_trained(example: dict[str, Any], tmp_path: Path) -> None:
    memory = ZeroMem(RULES, encoder=HashEncoder())
    memory.add(DATA.traces)
    questions = cached(memory, DATA)
    settings = TrainingSettings(
        stages=(Stage(("route", "bonus"), epochs=2),),
        loss="margin",
        router="cautious",
        features=(*features.DEFAULT, "dates_asked"),
        refit=False,
    )
    made, _ = fit(RULES, questions, (), settings)
    assert isinstance(made.router, example["Cautious"])
    pipeline = made.pipeline()
    pipeline.save_pretrained(tmp_path)
    memory.use(tmp_path)
    assert isinstance(memory.pipeline.router, example["Cautious"])
    assert 0.2 <= memory.search("Where was the boat bought?", boundary="a").rho <= 0.8


def test_the_script_of_the_page_brings_them_to_the_command_line(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table, names in ((losses.LOSSES, ["margin"]), (router.ROUTERS, ["cautious"])):
        for name in names:
            table.pop(name)  # of the page's code, which the script is to bring
    (script,) = re.findall(r"```\n(import sys\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(script)
    (tmp_path / "my_parts.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    (tmp_path / "mine.toml").write_text(
        'router = "cautious"\nloss = "margin"\nfeatures = ["dates_asked"]\n[[stages]]\nlearn = ["route"]\nepochs = 1\n'
    )
    rows: list[dict[str, Any]] = []
    for boundary in "ab":
        rows.append({"id": boundary, "boundary": boundary, "text": "A boat."})
        rows.append({"boundary": boundary, "question": "A boat?", "evidence": [boundary]})
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rules.toml").write_text("[substrate]\nentities = 'rules'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as python does with a script's folder
    monkeypatch.setattr(train, "cached_encoder", lambda options, config: HashEncoder())
    words = "train router jsonl --data mine.jsonl --config rules.toml --settings mine.toml --out checkpoint"
    monkeypatch.setattr("sys.argv", ["mine.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("mine.py", run_name="__main__")
    assert ended.value.code == 0
    assert json.loads((tmp_path / "checkpoint" / "router.json").read_text())["kind"] == "cautious"


@torch.no_grad()
def test_a_view_of_the_page_ranks(example: dict[str, Any]) -> None:
    memory = ZeroMem(RULES, encoder=HashEncoder())
    memory.add(DATA.traces)
    (own, _) = cached(memory, DATA)
    pipeline = ZeroMemPipeline(dataclasses.replace(RULES, hierarchy=example["config"].hierarchy))
    assert isinstance(pipeline.hierarchy, example["LexicalView"])
    views = pipeline.views_of(own.batch, own.bank, own.signals)
    plain = memory.pipeline.views_of(own.batch, own.bank, own.signals)
    assert torch.equal(views.graph, plain.graph)
    assert not torch.equal(views.hierarchy, plain.hierarchy)


def test_figures_of_the_study_are_those_of_the_result_file() -> None:
    tables = runpy.run_path(str(ROOT / "bench" / "routing_study.py"))["tables"]
    found = json.loads((ROOT / "bench" / "results" / "routing-study.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "routing-study.md").read_text(encoding="utf-8")
    printed = re.search(r"<!-- study -->\n(.*?)<!-- /study -->", page, re.DOTALL)
    assert printed is not None
    assert printed[1].strip() == "\n".join(tables(found)).strip()
    assert all((ROOT / "docs" / picture).exists() for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page))
