"""Which implementation of an operator runs, resolved in one place, with the reasons.

PyTorch is the definition of every operator and runs anywhere. A faster twin lives in ``kernels/OPERATOR_BACKEND.py``,
imported when it is first chosen, so that neither it nor its compiler costs anything before. A kernel that does not
take every input says so itself: a function ``refuses(device, dtype, sizes)`` returns the reason, or None. It has
``GRADIENT = True`` if what it computes can be differentiated.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from zeromem_torch.errors import ZeroMemError, nearest

BACKENDS = ("auto", "torch", "numba", "triton", "cupy", "torch_sparse")
OPERATORS = ("spmm", "propagation", "pagerank", "maxsim", "lexical", "fused_score", "segments", "closure", "phrases")

_AUTO = {"cpu": ("numba", "torch"), "cuda": ("cupy", "triton", "torch")}
"""What auto tries on each kind of device, the fastest first. torch_sparse computes what torch does: only if asked."""
_PACKAGES = {
    "numba": ("numba", "numba"),
    "triton": ("triton", "triton"),
    "cupy": ("cupy", "cupy-cuda12x, or cupy-cuda13x, never both"),
    "torch_sparse": ("torch_sparse", "torch-sparse torch-scatter"),
}
_PARTS = {"propagation": "spmm", "pagerank": "spmm"}
"""An operator that is a loop over another's: a back end without a kernel for the whole can still do the part."""


@dataclass(frozen=True)
class Choice:
    """A back end, and why: what speaks for it, and for each other one why it was not taken."""

    name: str
    tried: Mapping[str, str]
    untried: Callable[[], Mapping[str, str]] = field(default=dict, compare=False)  # for people: looked up if they ask

    @cached_property
    def reasons(self) -> Mapping[str, str]:
        return {**self.tried, **self.untried()}

    def __str__(self) -> str:
        others = [f"{name}: {why}" for name, why in self.reasons.items() if name != self.name]
        return f"{self.name} ({'; '.join([self.reasons[self.name], *others])})"


def choose(
    operator: str,
    wanted: str = "auto",
    *,
    device: torch.device,
    dtype: torch.dtype,
    needs_grad: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Choice:
    """The back end that runs ``operator`` on these inputs: the one that is wanted, or else the fastest that can.

    ``sizes`` are what a kernel's limits depend on, by the operator's own names. Raises ZeroMemError where the wanted
    one is unknown or cannot run here.
    """
    if wanted not in BACKENDS:
        raise ZeroMemError.of("backend", f"one of {', '.join(BACKENDS)}", wanted, nearest(wanted, BACKENDS))
    if operator not in OPERATORS:
        raise ValueError(f"expected an operator of {', '.join(OPERATORS)}, got {operator!r}")
    sizes = sizes or {}
    if wanted == "torch":  # asked for on every call where kernels are off: nothing to look at
        return Choice("torch", {"torch": "asked for"})
    if wanted != "auto":
        if why := _refusal(operator, wanted, device, dtype, needs_grad, sizes):
            raise ZeroMemError.of("backend", f"one that can run {operator} here", wanted, f'{why}; or use "auto"')
        return Choice(wanted, {wanted: "asked for"})
    order = _AUTO.get(device.type, ("torch",))
    reasons: dict[str, str] = {}
    for name in order:
        if why := _refusal(operator, name, device, dtype, needs_grad, sizes):
            reasons[name] = why
        else:
            kind = device.type.upper()
            reasons[name] = f"runs on any device, {kind} too" if name == "torch" else f"the fastest on {kind}"
            break
    return Choice(name, reasons, partial(_untried, operator, name, device, order, frozenset(reasons)))


def _untried(
    operator: str, name: str, device: torch.device, order: Sequence[str], tried: Collection[str]
) -> Mapping[str, str]:
    """Why each of the others was not even tried."""
    reasons = {}
    for other in BACKENDS[1:]:
        if other not in tried:
            why = _refusal_by_place(operator, other, device)
            reasons[other] = why or ("only if asked for" if other not in order else f"{name} comes first")
    return reasons


def explain(
    operator: str,
    wanted: str = "auto",
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    needs_grad: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """One line for people: the back end that `choose` takes, and why not another."""
    return f"{operator}: {choose(operator, wanted, device=device, dtype=dtype, needs_grad=needs_grad, sizes=sizes)}"


def kernel(operator: str, backend: str) -> ModuleType:
    """The module that holds the twin of an operator; its functions are the operator's own."""
    return import_module(f"zeromem_torch.kernels.{operator}_{backend}")


def has_kernel(operator: str, backend: str) -> bool:
    """Whether a twin of the whole operator exists, or else only of its parts."""
    return _exists(f"zeromem_torch.kernels.{operator}_{backend}")


def _refusal(
    operator: str,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    needs_grad: bool,
    sizes: Mapping[str, int],
) -> str | None:
    if name == "torch":
        return None
    if why := _refusal_by_place(operator, name, device):
        return why
    whole = operator if has_kernel(operator, name) else _PARTS[operator]
    found = _loaded(whole, name)
    if isinstance(found, str):
        return found
    if needs_grad and not getattr(found, "GRADIENT", False):
        return "no gradient"
    refuses = getattr(found, "refuses", None)
    why = refuses(device, dtype, sizes) if refuses else None
    return why if why is None else str(why)


def _refusal_by_place(operator: str, name: str, device: torch.device) -> str | None:
    """Why a back end cannot run here, as far as can be told without importing it."""
    if name == "torch":
        return None
    if not has_kernel(operator, name) and not (operator in _PARTS and has_kernel(_PARTS[operator], name)):
        return f"no kernel for {operator}"
    package, install = _PACKAGES[name]
    if name == "numba" and device.type != "cpu":
        return "numba needs the CPU"
    if name in ("triton", "cupy") and device.type != "cuda" and not (name == "triton" and _interpreted()):
        return f"{name} needs a CUDA device"
    if not _exists(package):
        return f"{package} is not installed: pip install {install}"
    return None


def _interpreted() -> bool:
    """Triton's interpreter, which runs its kernels on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _exists(module: str) -> bool:
    return find_spec(module) is not None


@cache
def _loaded(operator: str, backend: str) -> ModuleType | str:
    """The kernel's module, or why it does not load: a package can be there and not fit this PyTorch."""
    try:
        return kernel(operator, backend)
    except (ImportError, OSError, RuntimeError) as error:
        return f"does not load: {error}"
