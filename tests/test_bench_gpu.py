"""bench/gpu.sh goes on when a step fails, and says what it left out; the steps themselves are tested elsewhere."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gpu.sh"

# Runs what looks around, and only says what else it was asked to do; one step fails, one does not end.
PYTHON = """#!/bin/sh
case "$1" in
    -c) case "$2" in *find_spec*) exec {python} "$@" ;; *) echo Python, torch ;; esac ;;
    -) echo "cpu cpu" ;;
    bench/encoder.py) echo "asked: $*"; exit 3 ;;
    *) echo "asked: $*" ;;
esac
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    if shutil.which("bash") is None or shutil.which("timeout") is None:
        pytest.skip("needs bash and timeout")
    path = tmp_path / "python"
    path.write_text(PYTHON.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(interpreter: Path, *given: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(interpreter)}
    return subprocess.run(["bash", str(SCRIPT), *given], capture_output=True, text=True, env=environment, check=False)


def parts(folder: Path) -> tuple[dict[str, str], list[str]]:
    """What each step printed, by its name, and the lines at the end of the log."""
    printed, _, last = (folder / "gpu-cpu.log").read_text().rpartition("\n\n")
    steps = dict(part.split(": ", 1) for part in printed.removeprefix("== ").split("\n\n== "))
    return steps, last.splitlines()


def test_one_failure_does_not_lose_the_rest(interpreter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(interpreter, "--out", str(out), "--data", str(tmp_path / "none"))
    assert done.returncode == 1, done.stderr
    printed, summary = parts(out)
    assert [line.split()[0] for line in summary] == ["floors", "tests", "parity", "operators", "encoder", "pipeline"]
    assert summary[1].endswith("skipped: tests marked gpu need a CUDA device")
    assert "failed (3), " in summary[4]
    assert all(" ok, " in summary[place] for place in (0, 2, 3, 5))
    assert "no GPU: what needs one is skipped" in done.stdout
    assert "asked: bench/operators.py --floors --device cpu --json " in printed["floors"]
    assert "--sizes=LoCoMo --queries=1,256" in printed["operators"]
    assert "--made --quick --encoder table --entities rules" in printed["pipeline"]
    assert [path.name for path in out.iterdir()] == ["gpu-cpu.log"]


def test_quick_is_passed_on(interpreter: Path, tmp_path: Path) -> None:
    run(interpreter, "--quick", "--out", str(tmp_path))
    printed, _ = parts(tmp_path)
    assert all("--quick" in printed[name] for name in ("parity", "operators", "encoder", "pipeline"))


def test_limits_add_up_to_less_than_nine_minutes() -> None:
    limits = [int(line.split()[2]) for line in SCRIPT.read_text().splitlines() if line.lstrip().startswith("step ")]
    assert len(limits) == 6
    assert sum(limits) < 9 * 60


def test_help_and_unknown_words(interpreter: Path) -> None:
    shown = run(interpreter, "--help")
    assert shown.returncode == 0
    assert "--wheels DIR" in shown.stdout
    assert "#" not in shown.stdout
    wrong = run(interpreter, "--fast")
    assert wrong.returncode == 2
    assert "expected --out, --data, --wheels or --quick, got --fast" in wrong.stderr
