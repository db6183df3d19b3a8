"""What every test relies on: shapes checked, no network, one thread, the shared data if it is there."""

import os
from pathlib import Path

# Before torch and transformers are imported, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent
torch.set_num_threads(1)  # tests are small, and the machine's cores belong to pytest's own workers

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("untimed")

# Modules that name shapes have them checked at each call; the others would only be slowed down.
SHAPED = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "zeromem_torch").rglob("*.py")
    if "from jaxtyping import" in path.read_text()
]
install_import_hook(SHAPED, "shapes.checked")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The benchmark data beside the checkout, which may not be shipped with it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no benchmark data at {folder}")
    return folder
