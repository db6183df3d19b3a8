"""What stands in for a GPU: Triton's interpreter for results, compilation ahead of time for what a kernel will cost.

The interpreter is chosen when triton is imported, so interpreted tests have a process of their own. Their files are
named so that a plain run does not collect them (`interpreted_*.py`), and a test of the plain run starts them:

    def test_interpreted() -> None:
        run_interpreted(Path(__file__).with_name("interpreted_spmm.py"))

Compiling needs no GPU either: triton ships ptxas and cuobjdump, and CUDA source is compiled where there is an nvcc.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(tests: Path, *arguments: str) -> None:
    """Run a file of tests under TRITON_INTERPRET=1; every one of them must run, and pass."""
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(tests), *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes."""

    registers: int  # per thread
    spills: int  # bytes per thread of local memory: what did not fit into registers, or was indexed
    shared: int  # bytes per program


def compiled(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    num_warps: int,
    sm: int,
    aligned: Collection[str] = (),
) -> Resources:
    """Compile a `triton.jit` function for compute capability ``sm`` (89: 4090; 90: H100, H200).

    ``signature`` gives the type of each argument that is no constant, such as "*fp32" or "i32"; ``aligned`` names
    pointers and counts that are multiples of 16, which a launch finds out by itself.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(fn.arg_names)
    types = {name: signature.get(name, "constexpr") for name in names}
    missing = [name for name in names if name not in signature and name not in constexprs]
    assert not missing, f"neither typed nor constant: {missing}"
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn, types, {(names.index(name),): value for name, value in constexprs.items()}, attributes)
    # triton warns where nobody says whether a product and a sum may be rounded once: a launch has to say it too
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed)}
    return Resources(used["REG"], used["STACK"] + used["LOCAL"], kernel.metadata.shared)


def nvcc(source: str, sm: int, folder: Path) -> Resources:
    """Compile CUDA source that holds one kernel; skips where there is no nvcc. ``shared`` leaves out the dynamic."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc is not installed")
    file = folder / f"kernel_{sm}.cu"
    file.write_text(source)
    command = [compiler, f"-arch=sm_{sm}", "-Xptxas", "-v", "-cubin", str(file), "-o", str(file.with_suffix(".cubin"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr

    def count(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, printed))

    spills = count(r"(\d+) bytes stack frame") + count(r"(\d+) bytes spill stores")
    return Resources(count(r"Used (\d+) registers"), spills, count(r"(\d+) bytes smem"))
