"""A model's name says nothing about its KV: the fingerprint does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from engine.load_progress import no_progress
from engine.model_loader import load_model
from engine.tiers.disk_tier import DiskTier
from tests.engine.tiers.killed_engine import Life, make_prompts, settings_for
from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiny_models import write_tiny_model

pytestmark = pytest.mark.redis


def life_of_the_model(directory: Path, url: str, seed: int) -> Life:
    """The model at the one path that all of them are served from, with the weights of this seed."""
    write_tiny_model("llama", directory / "model", seed=seed)
    settings = settings_for(directory, url)
    loaded = load_model(settings.model, torch.device("cpu"), directory, no_progress, block_size=4)
    life = Life(loaded, settings)
    deadline = time.monotonic() + 60
    while disk_of(life).directory is None:
        assert time.monotonic() < deadline, "the index was not read"
        life.engine.idle()
        time.sleep(0.001)
    return life


def disk_of(life: Life) -> DiskTier:
    assert life.engine.tiers is not None
    assert life.engine.tiers.disk is not None
    return life.engine.tiers.disk


def test_other_weights_under_the_same_name_find_nothing(tmp_path: Path, store: StoreProcess) -> None:
    """vllm#30931, #42125: an adapter that was loaded again under its old name was served the old one's KV. Paired with
    the hits of the model that comes back."""
    prompts = make_prompts()[:4]
    first = life_of_the_model(tmp_path, store.url, seed=1)
    texts = first.answers(prompts)
    first.engine.close()
    second = life_of_the_model(tmp_path, store.url, seed=2)
    assert first.engine.info().model == second.engine.info().model
    assert disk_of(second).counters.num_restored == 0
    assert second.answers(prompts) != texts
    assert second.hits == 0
    second.engine.close()
    again = life_of_the_model(tmp_path, store.url, seed=1)
    assert disk_of(again).counters.num_restored > 0
    assert again.answers(prompts) == texts
    assert again.hits > 0
    again.engine.close()
