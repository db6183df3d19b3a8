"""The wheel holds what it should, and works where the source cannot be reached."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (".py", ".toml", ".html", ".jsonl", "py.typed")
# Benchmark sets, by what their files are called; their licences keep them out of what we hand on.
DATASETS = ("locomo", "hotpot", "musique", "2wiki", "longmemeval")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run to the end and give what it printed; its error output is in the failure."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the source with one more kernel, which only a build that follows the link can find."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("zeromem_torch", "kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "kernels" / "probe.py").write_text("ANSWER = 42\n")
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), ".")
    run(sys.executable, "-m", "pip", *build, cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = ("install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    run(sys.executable, "-m", "pip", *command, cwd=folder)
    return folder


def test_kernels_is_a_relative_link() -> None:
    link = ROOT / "zeromem_torch" / "kernels"
    assert link.is_symlink()
    assert Path(os.readlink(link)) == Path("../kernels")
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    files = {path.relative_to(ROOT) for name in ("zeromem_torch", "kernels") for path in (ROOT / name).rglob("*")}
    expected = {
        str(Path("zeromem_torch", path) if path.parts[0] == "kernels" else path)
        for path in files
        if path.name.endswith(SHIPPED) and "__pycache__" not in path.parts
    }
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected | {"zeromem_torch/kernels/probe.py"}
    assert {"zeromem_torch/py.typed", "zeromem_torch/data/demo.jsonl"} <= held
    assert any(name.endswith("cues.toml") for name in held)


def test_wheel_holds_no_benchmark_data(wheel: Path) -> None:
    data = [name.lower() for name in ZipFile(wheel).namelist() if not name.endswith(".py")]
    assert not [name for name in data if any(word in name for word in DATASETS)]


def test_wheel_names_its_command_and_extras(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
        commands = archive.read(f"{info}/entry_points.txt").decode()
    assert "zeromem = zeromem_torch.cli:main" in commands
    for extra in project["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in metadata


def run_installed(folder: Path, *arguments: str | Path, cwd: Path) -> str:
    """Run Python with the installed copy and its dependencies, and no way back to the source.

    -S leaves out what an editable install puts in place, which would lend a module that the wheel lacks; -P leaves out
    the working folder.
    """
    path = os.pathsep.join([str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return run(sys.executable, "-S", "-P", *arguments, cwd=cwd, PYTHONPATH=path)


def test_every_module_of_the_installed_copy_imports(installed: Path, tmp_path: Path) -> None:
    report = (
        "import importlib, pkgutil, zeromem_torch, zeromem_torch.kernels.probe as probe\n"
        "for module in pkgutil.walk_packages(zeromem_torch.__path__, 'zeromem_torch.'):\n"
        "    print(importlib.import_module(module.name).__file__)\n"
        "print(zeromem_torch.__file__, probe.__file__, sep='\\n')\n"
    )
    files = run_installed(installed, "-c", report, cwd=tmp_path).splitlines()
    assert len(files) > 10
    assert not [file for file in files if not Path(file).is_relative_to(installed)]


def test_installed_command_prints_its_help(installed: Path, tmp_path: Path) -> None:
    assert "demo" in run_installed(installed, installed / "bin" / "zeromem", "--help", cwd=tmp_path)
