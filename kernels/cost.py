"""How many bytes a kernel has to move and how many operations it has to do: the two limits it is held against.

    seconds ≥ bytes / bandwidth          seconds ≥ operations / rate

Bytes are what must cross the device's memory at least once: each key and value once per KV head, queries, outputs, and
the partial results that a split writes and reads again. Operations count a multiplication and an addition each, of the
rows that see a key; the rows that fill up a tile are not counted, they are the kernel's own loss. Only products of
matrices count: what else there is, sums and turned keys, is done beside the loads.

Into how many parts the keys are cut is the kernels' own rule, for each device by itself.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from kernels.heuristics import DeviceModel, select_tile, target_items
from kernels.shared_prefix import PrefixGroup, plan_prefixes
from kernels.triton_decode import MIN_CHUNK


@dataclass(frozen=True, slots=True)
class Cost:
    bytes_moved: int
    operations: int = 0


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """One layer's attention; the defaults are those of common models of 8 billion parameters."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2
    kv_bytes: int = 2

    @property
    def key_value_bytes(self) -> int:
        """One token's key and value, all KV heads."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_bytes

    @property
    def row_bytes(self) -> int:
        """One token's queries, and its outputs."""
        return 2 * self.num_heads * self.head_dim * self.element_bytes

    @property
    def partial_bytes(self) -> int:
        """One token's partial result in fp32, written and read."""
        return 2 * self.num_heads * (self.head_dim + 1) * 4

    def products(self, pairs: int) -> int:
        """Operations of `pairs` (query token, key) pairs: q·k and p·v."""
        return 4 * self.head_dim * self.num_heads * pairs


def decode_cost(model: AttentionModel, num_seqs: int, seq_len: int, splits: int = 1) -> Cost:
    """One new token of each sequence, its keys in `splits` parts."""
    partials = num_seqs * splits * model.partial_bytes if splits > 1 else 0
    moved = num_seqs * (seq_len * model.key_value_bytes + model.row_bytes) + partials
    return Cost(moved, model.products(num_seqs * seq_len))


def prefill_cost(model: AttentionModel, new: int, cached: int) -> Cost:
    """Each new token sees the cached ones, those before it, and itself."""
    pairs = new * cached + new * (new + 1) // 2
    return Cost((cached + new) * model.key_value_bytes + new * model.row_bytes, model.products(pairs))


def shared_prefix_cost(model: AttentionModel, members: int, shared: int, own: int, splits: int) -> Cost:
    """The shared keys once for all members, each one's own, and the merge."""
    moved = shared * model.key_value_bytes + members * (own * model.key_value_bytes + 2 * model.row_bytes)
    moved += members * (splits + 1) * model.partial_bytes
    return Cost(moved, model.products(members * (shared + own)))


def store_cost(model: AttentionModel, num_tokens: int) -> Cost:
    """Keys and values read in the model's type and written in the cache's; 8 bytes of slot each."""
    read = 2 * model.num_kv_heads * model.head_dim * model.element_bytes
    return Cost(num_tokens * (read + model.key_value_bytes + 8))


def copy_cost(model: AttentionModel, num_blocks: int, block_size: int, num_layers: int) -> Cost:
    """Read and written."""
    return Cost(2 * num_blocks * block_size * num_layers * model.key_value_bytes)


def rerotate_cost(model: AttentionModel, num_blocks: int, block_size: int, num_layers: int) -> Cost:
    """As a copy: keys turned, values as they are. The cosines and sines of a layer stay in the cache."""
    return copy_cost(model, num_blocks, block_size, num_layers)


def reduce_cost(model: AttentionModel, num_seqs: int, splits: int) -> Cost:
    """The part of `decode_cost` in which partial results are read again, and outputs written."""
    return Cost(num_seqs * (splits * model.partial_bytes + model.row_bytes) // 2)


def decode_splits(device: DeviceModel, model: AttentionModel, num_seqs: int, seq_len: int) -> int:
    """Parts of each sequence's keys, where all are equally long: `kernels.triton_decode.find_split` on the host."""
    block_n = select_tile(device, "decode", model.head_dim, _KV_DTYPES[model.kv_bytes]).block_n
    share = -(-num_seqs * seq_len // target_items(device, model.num_kv_heads, 1))
    chunk = -(-max(share, MIN_CHUNK.value) // block_n) * block_n
    return -(-seq_len // chunk)


def prefix_splits(device: DeviceModel, model: AttentionModel, members: int, shared: int) -> int:
    """Parts of the keys that a shared pass reads."""
    tile = select_tile(device, "shared_prefix", model.head_dim, _KV_DTYPES[model.kv_bytes])
    per_tile = tile.block_m // (model.num_heads // model.num_kv_heads)
    group = PrefixGroup(tuple(range(members)), shared)
    partials: array[int] = plan_prefixes(
        [group], members, per_tile, target_items(device, model.num_kv_heads, 1)
    ).prefix_partials
    return partials[2]


_KV_DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}


def workloads(device: DeviceModel) -> dict[str, Cost]:
    """Common work, as this device does it."""
    model, eight_bits = AttentionModel(), AttentionModel(kv_bytes=1)

    def decode(num_seqs: int, seq_len: int, model: AttentionModel = model) -> Cost:
        return decode_cost(model, num_seqs, seq_len, decode_splits(device, model, num_seqs, seq_len))

    return {
        "decode, 1 × 16k": decode(1, 16384),
        "decode, 8 × 16k": decode(8, 16384),
        "decode, 16 × 16k": decode(16, 16384),
        "decode, 64 × 16k": decode(64, 16384),
        "decode, 64 × 16k, 8-bit KV": decode(64, 16384, eight_bits),
        "reduce_splits, of 8 × 16k": reduce_cost(model, 8, decode_splits(device, model, 8, 16384)),
        "prefill, 8k on nothing": prefill_cost(model, 8192, 0),
        "prefill, 8k on 24k cached": prefill_cost(model, 8192, 24576),
        "32 on a prefix of 4k, 256 own": shared_prefix_cost(
            model, 32, 4096, 256, prefix_splits(device, model, 32, 4096)
        ),
        "the same, each for itself": decode(32, 4352),
        "store_kv, 8k tokens": store_cost(model, 8192),
        "copy of 1,000 blocks of 16, 32 layers": copy_cost(model, 1000, 16, 32),
        "rerotate 1,000 blocks of 16, 32 layers": rerotate_cost(model, 1000, 16, 32),
    }
