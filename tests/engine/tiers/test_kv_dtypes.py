"""KV in 8 bits below the device: found after a restart, proven against the model, and by no other type's engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch

from engine.load_progress import no_progress
from engine.model_loader import load_model
from engine.tiers.disk_tier import DiskTier
from tests.engine.tiers.killed_engine import Life, make_prompts, settings_for
from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiny_models import write_tiny_model

pytestmark = pytest.mark.redis

Kind = Literal["auto", "fp8", "int8"]
KINDS: tuple[Kind, ...] = ("auto", "fp8", "int8")


def life_in(kind: Kind, directory: Path, url: str) -> Life:
    settings = settings_for(directory, url)
    settings = msgspec.structs.replace(
        settings, engine=msgspec.structs.replace(settings.engine, kv_cache_dtype=kind, kv_cache_memory=1 << 16)
    )
    loaded = load_model(settings.model, torch.device("cpu"), directory, no_progress, block_size=4, kv_cache_dtype=kind)
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


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_8_bit_blocks_come_back_after_a_restart_and_no_other_type_reads_them(
    kind: Kind, tmp_path: Path, store: StoreProcess
) -> None:
    """Scales that a restart measured anew, a little differently, would read the old blocks as other numbers."""
    write_tiny_model("llama", tmp_path / "model")
    prompts = make_prompts()[:6]
    first = life_in(kind, tmp_path, store.url)
    texts = first.answers(prompts)
    first.engine.close()
    for other in KINDS:
        if other == kind:
            continue
        life = life_in(other, tmp_path, store.url)
        assert disk_of(life).counters.num_restored == 0
        life.answers(prompts[:1])
        assert life.hits == 0
        life.engine.close()
    again = life_in(kind, tmp_path, store.url)
    assert disk_of(again).counters.num_restored > 0
    assert again.answers(prompts) == texts
    assert again.hits > 0
    proof = again.engine.verify(4)
    assert proof.num_recomputed > 0
    assert (proof.num_unreadable, proof.num_different) == (0, 0)
    again.engine.close()
