from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError
from engine.kv_cache import (
    MIN_BLOCKS,
    DeviceMemory,
    KVCacheLayout,
    allocate_kv_cache,
    fit_max_model_len,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
)
from engine.settings import EngineSettings

LAYOUT = KVCacheLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 2


def test_a_block_is_one_contiguous_region() -> None:
    """Offloading and persisting a block is one memory copy only while this holds."""
    kv_cache = allocate_kv_cache(LAYOUT, 5, torch.device("cpu"))
    assert kv_cache.shape == (5, 3, 2, 4, 2, 8)
    assert kv_cache[3].is_contiguous()
    assert kv_cache[3].nbytes == LAYOUT.bytes_per_block == BLOCK_BYTES


def test_cpu_blocks_fill_the_budget() -> None:
    assert num_blocks_on_cpu(LAYOUT, EngineSettings(kv_cache_memory=20 * BLOCK_BYTES - 1)) == 19


def test_gpu_blocks_are_what_the_largest_batch_leaves() -> None:
    """Counting activations or other processes' memory twice, or not at all, ends in an out-of-memory step later."""
    memory = DeviceMemory(total=1_000_000, used_by_others=100_000, peak=300_000, graphs=50_000)
    assert num_blocks_on_gpu(LAYOUT, EngineSettings(gpu_memory_utilization=0.9), memory) == 450_000 // BLOCK_BYTES


def test_a_limit_that_was_set_holds_on_a_gpu_too() -> None:
    """It was ignored there, and then only where it differed from what a CPU takes by itself."""
    memory = DeviceMemory(total=100 << 30, used_by_others=0, peak=10 << 30)
    left = 80 << 30
    assert num_blocks_on_gpu(LAYOUT, EngineSettings(), memory) == left // BLOCK_BYTES
    assert num_blocks_on_gpu(LAYOUT, EngineSettings(kv_cache_memory=20 * BLOCK_BYTES), memory) == 20
    assert num_blocks_on_gpu(LAYOUT, EngineSettings(kv_cache_memory=1 << 30), memory) == (1 << 30) // BLOCK_BYTES
    assert num_blocks_on_cpu(LAYOUT, EngineSettings()) == (1 << 30) // BLOCK_BYTES
    assert num_blocks_on_gpu(LAYOUT, EngineSettings(kv_cache_memory=90 << 30), memory) == left // BLOCK_BYTES
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_memory = 7 holds 0 KV blocks"):
        num_blocks_on_gpu(LAYOUT, EngineSettings(kv_cache_memory=7), memory)


def test_too_little_memory_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=rf"engine\.kv_cache_memory = .* set it to {MIN_BLOCKS * BLOCK_BYTES}") as cpu:
        num_blocks_on_cpu(LAYOUT, EngineSettings(kv_cache_memory=MIN_BLOCKS * BLOCK_BYTES - 1))
    assert cpu.value.param == "engine.kv_cache_memory"
    memory = DeviceMemory(total=1_000_000, used_by_others=300_000, peak=600_000, graphs=50_000)
    with pytest.raises(
        ConfigError, match=r"engine\.gpu_memory_utilization = 0\.9 .* leaves 0 bytes .* 50000 of graphs"
    ):
        num_blocks_on_gpu(LAYOUT, EngineSettings(), memory)


def test_max_model_len_is_held_by_model_and_cache() -> None:
    """A sequence longer than the cache would be preempted by nobody but itself, for ever."""
    settings = EngineSettings(block_size=4)
    assert fit_max_model_len(settings, model_limit=100, num_blocks=10) == 40
    assert fit_max_model_len(settings, model_limit=30, num_blocks=10) == 30
    chosen = EngineSettings(block_size=4, max_model_len=35)
    assert fit_max_model_len(chosen, model_limit=100, num_blocks=10) == 35
    with pytest.raises(ConfigError, match="the model ends at 30 tokens"):
        fit_max_model_len(chosen, model_limit=30, num_blocks=10)
    with pytest.raises(ConfigError, match="holds 32 tokens"):
        fit_max_model_len(chosen, model_limit=100, num_blocks=8)


@pytest.mark.parametrize(
    "other",
    [
        KVCacheLayout(4, 2, 8, 4, torch.bfloat16),
        KVCacheLayout(3, 8, 2, 4, torch.bfloat16),
        KVCacheLayout(3, 2, 8, 8, torch.bfloat16),
        KVCacheLayout(3, 2, 8, 4, torch.float16),
    ],
)
def test_description_tells_layouts_apart(other: KVCacheLayout) -> None:
    """Blocks of equal size and another meaning must not share a fingerprint."""
    assert other.describe() != LAYOUT.describe()
