"""store_kv: scatter the new tokens' keys and values of one layer into their slots, quantized on the way if asked.

    key    [num_tokens, num_kv_heads, head_dim], any strides      row = (token, KV head): head_dim elements in one piece
    cache  block slot // block_size, layer, 0 | 1, slot % block_size, KV head

A negative slot is padding and is not written: the rows that fill a captured graph's batch carry tables of an earlier
step, whose blocks belong to others by now. A slot past the cache is not written either; nothing hands one out.

In 8 bits, an element is x / scale of its layer, K or V, and head: rounded to nearest even and limited to the type's
range (fp8 e4m3 has no infinity: what overflows would become NaN).
"""

# Triton's language looks like Python but is not: constants in capitals, arguments that are tensors and numbers at once.
# ruff: noqa: N803, N806
# pyright: reportUnknownParameterType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantized(rows: tl.tensor, scale: tl.tensor, INTEGER: tl.constexpr):
    """Values to be cast to the cache's type: x / scale in its range."""
    scaled = rows.to(tl.float32) / scale
    if INTEGER:
        # 1.5 · 2^23: adding it rounds to nearest even, as there is no fraction left at that size.
        rounded = (scaled + 12582912.0) - 12582912.0
        return tl.clamp(rounded, -127.0, 127.0)
    else:  # noqa: RET505 - Triton compiles what follows a return
        return tl.clamp(scaled, -448.0, 448.0)


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def store_rows(
    key: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: tl.tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_cache: tl.tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    slot_mapping: tl.tensor,  # int64 [num_tokens]
    kv_scales: tl.tensor,  # fp32 [num_layers, 2, num_kv_heads]
    layer: tl.tensor,
    num_tokens: tl.tensor,
    num_slots: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    QUANTIZED: tl.constexpr,
    INTEGER: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (ceil(num_tokens · num_kv_heads / BLOCK_R),)."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = (rows // NUM_KV_HEADS).to(tl.int64)
    heads = rows % NUM_KV_HEADS
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    used = (slots >= 0) & (slots < num_slots)

    SLOT_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    LAYER_STRIDE: tl.constexpr = 2 * BLOCK_SIZE * SLOT_STRIDE
    columns = tl.arange(0, BLOCK_D)[None, :]
    mask = used[:, None] & (columns < HEAD_DIM)
    key_rows = tl.load(
        key + (tokens * key_token_stride + heads * key_head_stride)[:, None] + columns, mask=mask, other=0.0
    )
    value_rows = tl.load(
        value + (tokens * value_token_stride + heads * value_head_stride)[:, None] + columns, mask=mask, other=0.0
    )
    if QUANTIZED:
        key_scale = tl.load(kv_scales + layer * 2 * NUM_KV_HEADS + heads)[:, None]
        value_scale = tl.load(kv_scales + (layer * 2 + 1) * NUM_KV_HEADS + heads)[:, None]
        key_rows = quantized(key_rows, key_scale, INTEGER)
        value_rows = quantized(value_rows, value_scale, INTEGER)
    blocks = slots // BLOCK_SIZE
    targets = (
        blocks * (NUM_LAYERS * LAYER_STRIDE)
        + layer.to(tl.int64) * LAYER_STRIDE
        + (slots % BLOCK_SIZE) * SLOT_STRIDE
        + heads * HEAD_DIM
    )
    pointers = kv_cache + targets[:, None] + columns
    tl.store(pointers, key_rows.to(kv_cache.dtype.element_ty), mask=mask)
    tl.store(pointers + BLOCK_SIZE * SLOT_STRIDE, value_rows.to(kv_cache.dtype.element_ty), mask=mask)
