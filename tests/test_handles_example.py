"""The documented example of handles runs as it is written, and prints what it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "handles.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_an_example_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/handles.md", "exec"), {})
    printed = capsys.readouterr().out
    promised = re.findall(r"print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert promised
    for line in promised:
        for part in line.split("..."):  # which stands for what was left out
            assert part.strip() in printed, line


def test_the_worked_example_goes_through_all_its_steps() -> None:
    assert all(f"# {step}. " in BLOCKS[0] for step in range(1, 6))
