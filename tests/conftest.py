"""What every test stands on: no settings leak in from the caller's environment, no network, few threads."""

from __future__ import annotations

import os

import pytest

from engine.settings import PREFIX, TEST_PREFIX

# Before any library reads them: tests are offline, and two OpenMP pools on the same cores stall each other.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RADIXGATE_… variable of a developer's shell changed what tests saw."""
    for name in list(os.environ):
        if name.startswith(PREFIX) and not name.startswith(TEST_PREFIX):
            monkeypatch.delenv(name)
