"""Which back end runs an operator, and what is said about the others."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

import pytest
import torch

from zeromem_torch import backends
from zeromem_torch.backends import BACKENDS, OPERATORS, choose, explain
from zeromem_torch.substrate.traces import ZeroMemError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PACKAGES = {"numba", "triton", "cupy", "torch_sparse"}


class Shelf:
    """Kernels and packages that are there as far as the module under test can tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.packages = set(PACKAGES)
        self.kernels: dict[str, ModuleType | Exception] = {}
        self.imported: list[str] = []
        monkeypatch.setattr(backends, "_exists", self._exists)
        monkeypatch.setattr(backends, "import_module", self._import)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def put(self, name: str, *, gradient: bool = False, limit: int | None = None) -> None:
        module = ModuleType(name)
        if gradient:
            vars(module)["GRADIENT"] = True
        if limit is not None:

            def refuses(device: torch.device, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
                return f"more than {limit} nodes" if sizes.get("nodes", 0) > limit else None

            vars(module)["refuses"] = refuses
        self.kernels[name] = module

    def _exists(self, module: str) -> bool:
        return module in self.packages or module.rpartition(".")[2] in self.kernels

    def _import(self, module: str) -> ModuleType:
        name = module.rpartition(".")[2]
        self.imported.append(name)
        found = self.kernels[name]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    backends._loaded.cache_clear()
    yield Shelf(monkeypatch)
    backends._loaded.cache_clear()


def test_without_kernels_everything_runs_on_pytorch(shelf: Shelf) -> None:
    for operator in OPERATORS:
        for device in (CPU, CUDA, torch.device("meta")):
            choice = choose(operator, device=device, dtype=torch.float32)
            assert choice.name == "torch"
            assert choice.reasons.keys() == set(BACKENDS) - {"auto"}
            assert choice.reasons["cupy"] == f"no kernel for {operator}"
    assert not shelf.imported


def test_auto_takes_the_fastest_that_the_device_has(shelf: Shelf) -> None:
    for name in ("lexical_numba", "lexical_triton", "lexical_cupy", "lexical_torch_sparse"):
        shelf.put(name)
    on_cpu = choose("lexical", "auto", device=CPU, dtype=torch.float32)
    assert on_cpu.name == "numba"
    assert on_cpu.reasons["cupy"] == "cupy needs a CUDA device"
    assert on_cpu.reasons["torch_sparse"] == "only if asked for"
    assert on_cpu.reasons["torch"] == "numba comes first"
    on_cuda = choose("lexical", "auto", device=CUDA, dtype=torch.float32)
    assert on_cuda.name == "cupy"
    assert on_cuda.reasons["triton"] == "cupy comes first"
    assert on_cuda.reasons["numba"] == "numba needs the CPU"
    assert shelf.imported == ["lexical_numba", "lexical_cupy"]  # no other was loaded to find out


def test_a_kernel_states_its_own_limits(shelf: Shelf) -> None:
    shelf.put("pagerank_cupy", limit=100)
    shelf.put("pagerank_triton")
    small = choose("pagerank", device=CUDA, dtype=torch.float32, sizes={"nodes": 100})
    large = choose("pagerank", device=CUDA, dtype=torch.float32, sizes={"nodes": 101})
    assert (small.name, large.name) == ("cupy", "triton")
    assert large.reasons["cupy"] == "more than 100 nodes"
    with pytest.raises(ZeroMemError, match="got 'cupy'; more than 100 nodes; or use \"auto\""):
        choose("pagerank", "cupy", device=CUDA, dtype=torch.float32, sizes={"nodes": 101})


def test_auto_keeps_to_what_has_a_gradient_when_one_is_needed(shelf: Shelf) -> None:
    shelf.put("maxsim_numba")
    assert choose("maxsim", device=CPU, dtype=torch.float32).name == "numba"
    choice = choose("maxsim", device=CPU, dtype=torch.float32, needs_grad=True)
    assert (choice.name, choice.reasons["numba"]) == ("torch", "no gradient")
    with pytest.raises(ZeroMemError, match="no gradient"):
        choose("maxsim", "numba", device=CPU, dtype=torch.float32, needs_grad=True)
    shelf.put("spmm_numba", gradient=True)
    assert choose("spmm", device=CPU, dtype=torch.float32, needs_grad=True).name == "numba"


def test_a_loop_runs_where_its_product_does(shelf: Shelf) -> None:
    shelf.put("spmm_triton", gradient=True)
    assert choose("pagerank", device=CUDA, dtype=torch.float32, needs_grad=True).name == "triton"
    assert shelf.imported == ["spmm_triton"]


@pytest.mark.parametrize(
    ("wanted", "device", "why"),
    [
        ("numba", CUDA, "numba needs the CPU"),
        ("triton", CPU, "triton needs a CUDA device"),
        ("cupy", CPU, "cupy needs a CUDA device"),
    ],
)
def test_an_explicit_choice_runs_or_says_why_not(shelf: Shelf, wanted: str, device: torch.device, why: str) -> None:
    for name in ("numba", "triton", "cupy", "torch_sparse"):
        shelf.put(f"spmm_{name}")
    with pytest.raises(ZeroMemError, match=why):
        choose("spmm", wanted, device=device, dtype=torch.float32)
    other = CPU if device is CUDA else CUDA
    assert choose("spmm", wanted, device=other, dtype=torch.float32).name == wanted


def test_what_is_not_installed_is_named_with_the_command(shelf: Shelf) -> None:
    shelf.put("spmm_torch_sparse")
    shelf.put("spmm_numba")
    shelf.packages.clear()
    with pytest.raises(ZeroMemError, match="torch_sparse is not installed: pip install torch-sparse torch-scatter"):
        choose("spmm", "torch_sparse", device=CPU, dtype=torch.float32)
    choice = choose("spmm", device=CPU, dtype=torch.float32)
    assert (choice.name, choice.reasons["numba"]) == ("torch", "numba is not installed: pip install numba")
    assert not shelf.imported


def test_a_package_that_does_not_load_is_passed_over(shelf: Shelf) -> None:
    shelf.kernels["spmm_numba"] = OSError("undefined symbol")
    choice = choose("spmm", device=CPU, dtype=torch.float32)
    assert (choice.name, choice.reasons["numba"]) == ("torch", "does not load: undefined symbol")
    choose("spmm", device=CPU, dtype=torch.float32)
    assert shelf.imported == ["spmm_numba"]  # tried once


def test_the_interpreter_stands_in_for_a_gpu(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.put("spmm_triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("spmm", "triton", device=CPU, dtype=torch.float32).name == "triton"
    assert choose("spmm", "auto", device=CPU, dtype=torch.float32).name == "torch"


def test_pytorch_can_always_be_asked_for(shelf: Shelf) -> None:
    shelf.put("spmm_numba")
    assert choose("spmm", "torch", device=CPU, dtype=torch.float64, needs_grad=True).name == "torch"
    assert not shelf.imported


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ZeroMemError, match=r"expected one of auto, torch, .* got 'trition'; did you mean 'triton'"):
        choose("spmm", "trition", device=CPU, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"expected an operator of spmm, .* got 'gemm'"):
        choose("gemm", device=CPU, dtype=torch.float32)


def test_one_line_explains(shelf: Shelf) -> None:
    shelf.put("spmm_numba")
    shelf.put("spmm_triton")
    line = explain("spmm", device=CPU)
    assert line.startswith("spmm: numba (the fastest on CPU; ")
    assert "triton: triton needs a CUDA device" in line
    assert "cupy: no kernel for spmm" in line
    assert explain("spmm", "torch", device=CPU) == "spmm: torch (asked for)"


def test_kernels_are_twins_by_name() -> None:
    """A file that no operator and back end name would never be found."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    stems = {name[:-3] for name in os.listdir(os.path.join(root, "kernels")) if name.endswith(".py")}
    assert stems - {"lanes_numba"} <= {f"{operator}_{backend}" for operator in OPERATORS for backend in BACKENDS[2:]}


def test_importing_it_imports_no_back_end() -> None:
    code = (
        "import sys, torch, zeromem_torch.backends as b\n"
        "loaded = {'numba', 'triton.compiler', 'cupy', 'torch_sparse'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "b.choose('spmm', 'torch', device=torch.device('cpu'), dtype=torch.float32)\n"
        "assert not {'numba', 'cupy', 'torch_sparse'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
