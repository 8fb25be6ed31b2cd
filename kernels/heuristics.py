"""Which tile a kernel uses on a device, by table; and into how many parts the keys of a decoding batch are cut.

    Tile(block_m, block_n, num_warps, num_stages)      query rows, keys, warps of a program, depth of the load pipeline

The table (`kernels.tile_table`) is data: `python -m bench.tune` writes it. Tuning at run time was the alternative: it
costs seconds in the first requests, differs between two servers of the same kind, and picks by the batch that happens
to come first.

    key   (architecture, kernel, head size rounded up to 64, 128, 256, bytes of a KV element)
    architectures   90: Hopper   100: Blackwell   80: all others, which have 99 KB of shared memory a program at least
    kernels         decode: up to 16 rows   decode_wide: up to 64   prefill   shared_prefix
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from kernels.tile_table import MIN_SHARED_SAVING, PROGRAMS_PER_SM, TILES

KernelName: TypeAlias = Literal["decode", "decode_wide", "prefill", "shared_prefix"]
TileTable: TypeAlias = Mapping[tuple[int, str, int, int], tuple[int, int, int, int]]

HEAD_DIMS = (64, 128, 256)
# Every tile's keys divide this: a run of keys that is cut here is a whole number of tiles for any kernel.
KEY_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Tile:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What the heuristics need to know of a device."""

    num_sms: int
    capability: tuple[int, int]
    cut_for: int = 0  # programs a multiprocessor; 0: the table's. `bench.tune` tries others

    @classmethod
    def of(cls, device: torch.device) -> DeviceModel:
        properties = torch.cuda.get_device_properties(device)
        return cls(num_sms=properties.multi_processor_count, capability=(properties.major, properties.minor))

    @property
    def architecture(self) -> int:
        """The row of the table. A Blackwell without tensor memory (sm_12x) is an Ampere to these kernels."""
        return {9: 90, 10: 100}.get(self.capability[0], 80)

    @property
    def programs_per_sm(self) -> int:
        """Programs that a decoding batch's keys are cut for: more than run at a time, so that uneven ends fill up."""
        return self.cut_for or PROGRAMS_PER_SM[self.architecture]

    @property
    def min_shared_saving(self) -> int:
        """Bytes of a layer's keys and values, times (sequences - 1), that a shared pass must not read again to pay for
        its launch and its merge. It is bytes that take time: with few KV heads or in 8 bits, more keys are needed."""
        return MIN_SHARED_SAVING[self.architecture]

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)


def select_tile(
    device: DeviceModel, kernel: KernelName, head_dim: int, kv_dtype: torch.dtype, tiles: TileTable = TILES
) -> Tile:
    """Raises ValueError for a head that no tile holds."""
    bucket = next((size for size in HEAD_DIMS if head_dim <= size), None)
    if bucket is None:
        raise ValueError(f"attention heads of {head_dim} elements; the kernels hold up to {HEAD_DIMS[-1]}")
    return Tile(*tiles[device.architecture, kernel, bucket, kv_dtype.itemsize])


def target_items(device: DeviceModel, num_kv_heads: int, num_row_tiles: int) -> int:
    """Into how many parts to cut the keys of all sequences together, for one KV head and row tile.

    With n sequences of equal length this is the usual ceil(c · SMs / (n · heads)) splits of each.
    """
    return -(-device.programs_per_sm * device.num_sms // (num_kv_heads * num_row_tiles))


def scan_size(num_seqs: int) -> int:
    """Sequences that a program scans for its own: few sizes, since each is a compiled variant."""
    size = 32
    while size < num_seqs:
        size *= 8
    return size
