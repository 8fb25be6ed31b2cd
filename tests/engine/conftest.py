from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.embedded_model import embedded_model_dir
from engine.load_progress import no_progress


@pytest.fixture(scope="session", autouse=True)
def _torch_threads() -> None:
    """Two OpenMP pools on the same cores stall each other; tests need one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_data_dir() -> Path:
    """The data directory that keeps the converted embedded model between test runs."""
    return Path(os.environ.get("RADIXGATE_TEST_DATA") or Path(__file__).parents[2] / ".radixgate")


@pytest.fixture(scope="session")
def embedded_model(model_data_dir: Path) -> Path:
    """The directory of the converted embedded model."""
    return embedded_model_dir(model_data_dir, no_progress)
