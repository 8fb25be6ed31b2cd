"""The KV tensor: how a block is laid out, how many fit, and where they are allocated.

    kv_cache   [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
                ▲           └────────────────── one block: contiguous ────────┘
                └ block id                 2: keys, values

A block holds all layers of its token slots in one contiguous region, so that copying, offloading and persisting it
is one memory copy each. The usual layout, a tensor per layer, would need two copies per layer and block.

There is one such tensor, allocated once. Nothing may ever copy it whole: it is most of the engine's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import ConfigError
from engine.settings import EngineSettings

MIN_BLOCKS = 8  # below, no useful prompt fits beside a second request


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """What decides the bytes of a block, and with them whether stored KV can be read again."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def describe(self) -> str:
        """One line for the model's fingerprint: the order of the axes, their sizes and the element type."""
        return f"block-major [layer,kv,slot,head,dim] {'x'.join(map(str, self.block_shape))} {self.dtype}"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory in bytes, as a profiling run with the largest batch saw it."""

    total: int
    used_by_others: int  # other processes, and what the driver keeps
    peak: int  # of our own tensors: weights and the activations of the largest batch
    graphs: int = 0  # what captured graphs keep for themselves


def allocate_kv_cache(layout: KVCacheLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """The cache. A slot is written before it is read, and kernels never read one that was not.

    On a CPU it is written once all the same: the operating system hands memory out at the first write, and the first
    requests would pay for it (0.6 ms a MiB: 24 ms for a prompt of 1,800 tokens, ten times the copy from host memory).
    """
    kv_cache = torch.empty((num_blocks, *layout.block_shape), dtype=layout.dtype, device=device)
    return kv_cache.zero_() if device.type == "cpu" else kv_cache


def num_blocks_on_cpu(layout: KVCacheLayout, settings: EngineSettings) -> int:
    return _num_blocks_in(settings.kv_bytes_on_cpu, layout)


def _num_blocks_in(kv_cache_memory: int, layout: KVCacheLayout) -> int:
    num_blocks = kv_cache_memory // layout.bytes_per_block
    if num_blocks < MIN_BLOCKS:
        needed = MIN_BLOCKS * layout.bytes_per_block
        raise ConfigError(
            f"engine.kv_cache_memory = {kv_cache_memory} holds {num_blocks} KV blocks of "
            f"{layout.bytes_per_block} bytes; at least {MIN_BLOCKS} are needed: set it to {needed} or more, "
            f"or make engine.block_size ({layout.block_size}) smaller",
            param="engine.kv_cache_memory",
        )
    return num_blocks


def num_blocks_on_gpu(layout: KVCacheLayout, settings: EngineSettings, memory: DeviceMemory) -> int:
    allowed = int(memory.total * settings.gpu_memory_utilization)
    budget = allowed - memory.used_by_others - memory.peak - memory.graphs
    num_blocks = max(budget, 0) // layout.bytes_per_block
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"engine.gpu_memory_utilization = {settings.gpu_memory_utilization} of {memory.total} bytes leaves "
            f"{max(budget, 0)} bytes for KV beside {memory.peak} of weights and activations, {memory.graphs} of graphs "
            f"and {memory.used_by_others} of others, too few for {MIN_BLOCKS} blocks of {layout.bytes_per_block} "
            "bytes: raise it, make engine.max_num_batched_tokens smaller, or take a smaller model",
            param="engine.gpu_memory_utilization",
        )
    limit = settings.kv_cache_memory  # on each GPU, of several
    return min(num_blocks, _num_blocks_in(limit, layout)) if limit else num_blocks


def fit_max_model_len(settings: EngineSettings, model_limit: int, num_blocks: int) -> int:
    """The longest sequence to accept, in tokens: what is set, else what both the model and the cache can hold."""
    capacity = num_blocks * settings.block_size
    if not settings.max_model_len:
        return min(model_limit, capacity)
    if settings.max_model_len > model_limit:
        raise ConfigError(
            f"engine.max_model_len = {settings.max_model_len}, but the model ends at {model_limit} tokens",
            param="engine.max_model_len",
        )
    if settings.max_model_len > capacity:
        raise ConfigError(
            f"engine.max_model_len = {settings.max_model_len}, but the KV cache holds {capacity} tokens: "
            "raise engine.kv_cache_memory (on a GPU engine.gpu_memory_utilization, and that one too if it was set)",
            param="engine.max_model_len",
        )
    return settings.max_model_len
