"""The torch-sparse adapter, run for real in a process of its own: the package is no dependency of ours."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from zeromem_torch.backends import choose
from zeromem_torch.substrate.traces import ZeroMemError

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT.parent / "shared" / "wheels"

RUN = """
import torch
torch.set_num_threads(1)
import walk_cases
from zeromem_torch.backends import choose, explain
from zeromem_torch.kernels import spmm_torch_sparse
from zeromem_torch.substrate.traces import ZeroMemError

cpu = torch.device("cpu")
assert choose("spmm", "torch_sparse", device=cpu, dtype=torch.float32, needs_grad=True).name == "torch_sparse"
for dtype, elements, why in ((torch.float64, 9, "float32 only"), (torch.float32, 2**31, "fewer than 2^31")):
    try:
        choose("pagerank", "torch_sparse", device=cpu, dtype=dtype, sizes={"elements": elements})
    except ZeroMemError as error:
        assert why in str(error), error
    else:
        raise AssertionError(why)
walk_cases.check_product("torch_sparse", "cpu", torch.float32)
walk_cases.check_step("torch_sparse", "cpu", torch.float32)
walk_cases.check_pagerank("torch_sparse", "cpu", torch.float32)
walk_cases.check_propagation("torch_sparse", "cpu", torch.float32)
walk_cases.check_gradient("torch_sparse", "cpu", torch.float32)
print("torch_sparse ran")
"""


def test_it_runs(tmp_path: Path) -> None:
    wheels = sorted(WHEELS.glob("torch_s*.whl"))
    if len(wheels) < 2:
        pytest.skip(f"no torch-sparse and torch-scatter wheels in {WHEELS}")
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--target", str(tmp_path)]
    installed = subprocess.run([*install, *map(str, wheels)], capture_output=True, text=True)
    if installed.returncode and "not a supported wheel" in installed.stderr:
        pytest.skip(f"the wheels in {WHEELS} are for another Python: {installed.stderr.strip()}")
    assert installed.returncode == 0, installed.stderr
    folders = [ROOT, ROOT / "tests", ROOT / "tests" / "kernels", tmp_path]
    code = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}\n{RUN}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch_sparse ran" in done.stdout


@pytest.mark.skipif(find_spec("torch_sparse") is not None, reason="torch-sparse is installed")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(ZeroMemError, match=r"torch_sparse is not installed: pip install torch-sparse torch-scatter"):
        choose("spmm", "torch_sparse", device=torch.device("cpu"), dtype=torch.float32)
