from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.tiers.store_process import StoreProcess


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    process = StoreProcess(tmp_path_factory.mktemp("store"))
    yield process
    process.close()


@pytest.fixture
def store(shared_store: StoreProcess) -> StoreProcess:
    """Empty, and alive for the whole session: for tests that do not harm it."""
    shared_store.flush()
    return shared_store


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[StoreProcess]:
    """For tests that kill or pause it."""
    process = StoreProcess(tmp_path / "store")
    yield process
    process.close()
