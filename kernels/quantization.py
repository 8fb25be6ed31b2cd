"""Keys and values in 8 bits: the element types, and the rounding of `kernels.triton_store` in plain torch.

    stored = x / scale, rounded to nearest even and limited to the type's range
    scales   fp32 [num_layers, 2, num_kv_heads]: one a layer, K or V, and head, the same for all blocks and all time

A scale for each block would follow what is in it more closely. But a block is filled over several steps, and a scale
that changes when a token is added changes what was stored before: the same prefix would no longer be the same bytes.
"""

from __future__ import annotations

import torch

LARGEST_ELEMENT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The 8-bit element types of a KV cache that needs scales, and the largest number that each holds."""


def check_scales(kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """Raises ValueError unless there are scales exactly where elements need them."""
    if (kv_cache.dtype.itemsize == 1) != (kv_scales is not None):
        raise ValueError(f"a KV cache of {kv_cache.dtype}: 8-bit elements, and only they, have scales")


def quantize(
    rows: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    scales: torch.Tensor,  # fp32 [num_kv_heads]
    dtype: torch.dtype,
) -> torch.Tensor:
    """What is stored of `rows`. fp8 e4m3 has no infinity: what is not limited would become NaN."""
    scaled = rows.float() / scales[:, None]
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-LARGEST_ELEMENT[dtype], LARGEST_ELEMENT[dtype]).to(dtype)


def widen(
    stored: torch.Tensor,  # [..., num_kv_heads, head_dim]
    scales: torch.Tensor,  # fp32 [num_kv_heads]
) -> torch.Tensor:
    """The values that stored elements stand for, in fp32."""
    return stored.float() * scales[:, None]
