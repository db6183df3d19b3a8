"""What every test relies on: shapes checked, no network, one thread, the shared data if it is there."""

import os
from pathlib import Path

# Before torch and transformers are imported, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)  # tests are small, and the machine's cores belong to pytest's own workers

# Every annotation of ours is checked at each call, axis names included; as for mypy, an int will do where a float is asked for.
install_import_hook("zeromem_torch", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The benchmark data beside the checkout, which may not be shipped with it."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no benchmark data at {folder}")
    return folder
