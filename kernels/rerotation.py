"""Keys at other positions: the tables that `kernels.triton_rerotate` reads, and the same turn in plain torch.

    row of the table      one position delta
    angles                delta · inv_freq of each layer, in float64; only their cosines and sines are rounded to fp32

RoPE in the half-split layout (pairs i, i + rotary_dim / 2) only: keys whose pairs are neighbours (i, i + 1), as some
models have them, come out wrong. A scaling of RoPE is part of inv_freq; one that multiplies cosines (an attention
factor) is in the stored keys already and stays there.

Nothing in the engine uses this yet: a cached block is read at the positions that it was written for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotationTable:
    cosines: torch.Tensor  # fp32 [num_deltas, num_layers, rotary_dim / 2]
    sines: torch.Tensor  # fp32 [num_deltas, num_layers, rotary_dim / 2]

    @classmethod
    def build(cls, inv_freq: torch.Tensor, deltas: Sequence[int]) -> RotationTable:
        """inv_freq: [num_layers, rotary_dim / 2], on the device of the cache."""
        steps = torch.tensor(deltas, dtype=torch.float64, device=inv_freq.device)
        angles = steps[:, None, None] * inv_freq.double()
        return cls(angles.cos().float().contiguous(), angles.sin().float().contiguous())


def rerotate(
    kv_cache: torch.Tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    src: int,
    dst: int,
    table: RotationTable,
    row: int,
) -> None:
    """The specification: block `src`'s keys turned into block `dst`, its values copied."""
    half = table.cosines.shape[2]
    cosine, sine = table.cosines[row][:, None, None], table.sines[row][:, None, None]
    keys = kv_cache[src, :, 0].float()
    x, y, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    turned = torch.cat([x * cosine - y * sine, y * cosine + x * sine, rest], dim=-1)
    kv_cache[dst, :, 0] = turned.to(kv_cache.dtype)
    kv_cache[dst, :, 1] = kv_cache[src, :, 1]
