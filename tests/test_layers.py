"""The import arrows between our modules, the owners of optional dependencies, and the public names."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zeromem_torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zeromem_torch"

# From the bottom up: a layer may import itself and the layers below it, never one above it.
LAYERS = (
    {"disk", "errors"},
    {"backends", "sizes", "twins"},
    {"config", "evidence", "sparse", "bank"},
    {"substrate"},
    {"index", "scope", "messages", "imports", "ledger", "folder", "results"},
    {"routing"},
    {"retrieval"},
    {"closure"},
    {"calibration"},
    {"pipeline"},
    {"memories", "collect"},
    {"residents"},
    {"searcher", "keeper", "answering", "encoding"},
    {"derived"},
    {"library"},
    {"evaluation", "training", "handles"},
    {"serving"},
    {"demo"},
    {"cli"},
)
# Beside the layers: what a module may import, and who may import it.
ASIDE = {
    "kernels": set[str](),
    "store": {"disk", "errors", "substrate"},
    "reader": {"config", "errors", "evidence", "ledger", "substrate"},
}
IMPORTERS_ASIDE = {
    "kernels": {"sparse", "retrieval", "closure", "calibration", "training"},
    "store": {"keeper", "derived", "library", "serving", "cli"},
    "reader": {"results", "answering", "library", "evaluation", "serving", "demo", "cli"},
}
# Peers of one layer stay apart, apart from these.
PEERS = {("bank", "sparse"), ("training", "evaluation")}

OPTIONAL = {
    "FlagEmbedding", "cupy", "fastapi", "mcp", "opentelemetry", "prometheus_client", "spacy", "starlette",
    "torch_scatter", "torch_sparse", "triton", "uvicorn",
}  # fmt: skip
MAY_IMPORT_KERNELS = {"cupy", "llvmlite", "numba", "numpy", "torch", "torch_sparse", "triton"}

PUBLIC_NAMES = (
    "CachedEncoder",
    "Encoder",
    "Evidence",
    "EvidenceItem",
    "Trace",
    "ZeroMem",
    "ZeroMemConfig",
    "ZeroMemError",
    "ZeroMemPipeline",
    "load_encoder",
)


def modules() -> Iterator[tuple[str, Path]]:
    """Each module of ours by its dotted name below zeromem_torch, the package itself being ''."""
    for folder, prefix in ((PACKAGE, ()), (ROOT / "kernels", ("kernels",))):
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            if folder == PACKAGE and parts[0] == "kernels":
                continue  # a Python that follows links comes here twice
            yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> Iterator[str]:
    """Full dotted names of everything a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.resolve().parents[node.level - 1].relative_to(ROOT)
                base = ".".join([*package.parts, *filter(None, [base])])
            # `from zeromem_torch import sparse` names a module only in its last part
            yield from ([f"{base}.{alias.name}" for alias in node.names] if base == "zeromem_torch" else [base])


def parts_imported(path: Path) -> set[str]:
    """The parts of ours (first name below zeromem_torch) that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("zeromem_torch.")}


def rank(part: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


def allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if imported in ASIDE:
        return importer in IMPORTERS_ASIDE[imported]
    if importer in ASIDE:
        return imported in ASIDE[importer]
    if rank(importer) == rank(imported):
        return (importer, imported) in PEERS
    return rank(importer) > rank(imported)


MODULES = dict(modules())
PARTS = {name.split(".")[0] for name in MODULES} - {""}


def test_every_module_has_a_place() -> None:
    assert PARTS.issubset(set.union(*LAYERS) | set(ASIDE))


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_point_downwards(name: str) -> None:
    # A name taken from the package itself would hide which module is meant: import it from where it lives.
    part = name.split(".")[0]
    wrong = {other for other in parts_imported(MODULES[name]) if other not in PARTS or not allowed(part, other)}
    assert not wrong, f"zeromem_torch.{name} imports {sorted(wrong)}; DESIGN section 7 says which way imports point"


def test_importing_the_package_loads_neither_reader_nor_command() -> None:
    assert parts_imported(MODULES[""]).isdisjoint({"reader", "demo", "cli", "kernels", "serving", "training"})


def test_kernels_import_nothing_but_their_back_ends() -> None:
    for name, path in MODULES.items():
        if name.split(".")[0] == "kernels":
            others = [other for other in imports(path) if not other.startswith("zeromem_torch.kernels.")]
            third_party = {other.split(".")[0] for other in others} - sys.stdlib_module_names
            assert third_party <= MAY_IMPORT_KERNELS, name


@pytest.mark.parametrize("dependency", sorted(OPTIONAL))
def test_an_optional_dependency_has_one_owner(dependency: str) -> None:
    users = {
        name
        for name, path in MODULES.items()
        if name.split(".")[0] != "kernels" and any(other.split(".")[0] == dependency for other in imports(path))
    }
    assert len(users) <= 1


def test_the_checker_sees_through_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "zeromem_torch" / "retrieval"
    folder.mkdir(parents=True)
    file = folder / "graph.py"
    file.write_text(
        "import zeromem_torch.cli\n"
        "from zeromem_torch import pipeline\n"
        "from zeromem_torch.closure import close\n"
        "from .. import demo\n"
        "from ..library import ZeroMem\n"
        "from . import dense\n"
        "def late():\n    from zeromem_torch.reader import Reader\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    above = {"cli", "pipeline", "closure", "demo", "library", "reader"}
    assert parts_imported(file) == above | {"retrieval"}
    assert not any(allowed("retrieval", part) for part in above)
    assert allowed("retrieval", "routing")
    assert not allowed("pipeline", "reader")


def test_public_names() -> None:
    assert tuple(zeromem_torch.__all__) == PUBLIC_NAMES
    assert all(hasattr(zeromem_torch, name) for name in PUBLIC_NAMES)
