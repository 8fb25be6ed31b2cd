"""The specification: paged attention in plain torch. Every other kernel is compared with this one.

    kv_cache  [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]       2: key, value
              block-major: a block is one contiguous region over all layers, moved with one copy

    one sequence, layer l:   positions  0 ─────── first ────────────── p ───────── seq_len
                                                    │← sliding_window →│
                             query row at p sees keys j with  p - sliding_window < j ≤ p
                             `first`: the first key that any of the new rows sees

Contract, for this module and for every kernel that stands in for it:
 - Only keys in [first, seq_len) take part in arithmetic. Any other slot may hold anything, NaN too: a masked NaN is
   still NaN after the product with the values (0 · NaN), so what is unseen is left out, not masked.
 - score = scale · q·k, then soft_cap · tanh(score / soft_cap), then the mask, then softmax; transformers' order.
 - `sinks` is one logit a query head: part of the softmax's sum, without a value; neither scaled nor capped.
 - Query head h reads KV head h // (num_heads / num_kv_heads).
 - Arithmetic in fp32, or in float64 when the query is; the result has the query's dtype.
 - A cache of 8-bit elements comes with scales (`kernels.quantization`); any other cache has none.
 - A sequence may have no new tokens; then it has no rows.

Clear before fast: one sequence at a time, its keys gathered, the whole score matrix at once. Gathering all sequences
into one padded batch would be shorter for the device, but the padding would have to be kept out of every product.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from kernels.metadata import AttentionMetadata
from kernels.quantization import check_scales, quantize, widen


class SlotCopy(Protocol):
    """Copy-on-write: the first `num_slots` token slots of block `src`, all layers, into block `dst`."""

    @property
    def src(self) -> int: ...
    @property
    def dst(self) -> int: ...
    @property
    def num_slots(self) -> int: ...


def store_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,  # [num_tokens]; a negative slot is padding and is not written
    *,
    kv_scales: torch.Tensor | None = None,  # fp32 [num_layers, 2, num_kv_heads]
) -> None:
    """Write the new tokens' keys and values of one layer into their slots."""
    real = slot_mapping >= 0
    write_slots(key[real], value[real], kv_cache, layer, slot_mapping[real], kv_scales=kv_scales)


def write_slots(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,  # [num_tokens], none of them padding
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    check_scales(kv_cache, kv_scales)
    block_size, dtype = kv_cache.shape[3], kv_cache.dtype
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for part, rows in enumerate((key, value)):
        stored = rows.to(dtype) if kv_scales is None else quantize(rows, kv_scales[layer, part], dtype)
        kv_cache[blocks, layer, part, offsets] = stored


def copy_slots(kv_cache: torch.Tensor, copies: Iterable[SlotCopy]) -> None:
    """Do the copies in their order; slots past `num_slots` of a destination stay as they are."""
    for copy in copies:
        kv_cache[copy.dst, :, :, : copy.num_slots] = kv_cache[copy.src, :, :, : copy.num_slots]


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [num_heads]
    kv_scales: torch.Tensor | None = None,  # fp32 [num_layers, 2, num_kv_heads]
) -> torch.Tensor:
    """Causal attention of the packed new tokens over each sequence's blocks, [num_tokens, num_heads, head_dim].

    The new tokens' own keys and values are in the cache already (`store_kv`).
    """
    check_scales(kv_cache, kv_scales)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    start = 0
    for index, query_len in enumerate(metadata.host_query_lens):
        rows = slice(start, start + query_len)
        start += query_len
        if query_len == 0:
            continue
        seq_len = metadata.host_seq_lens[index]
        first = first_visible_key(seq_len - query_len, sliding_window)
        key, value = _gather(kv_cache, layer, metadata.block_table[index], first, seq_len)
        if kv_scales is not None:
            key, value = widen(key, kv_scales[layer, 0]), widen(value, kv_scales[layer, 1])
        output[rows] = _attend(query[rows], key, value, scale, sliding_window, soft_cap, sinks)
    return output


def first_visible_key(position: int, sliding_window: int | None) -> int:
    """The first key that a query at `position` sees. A window of w is the query's own key and w - 1 before it."""
    if sliding_window is None:
        return 0
    assert sliding_window >= 1, "a window holds at least the query's own key"
    return max(0, position - sliding_window + 1)


def _gather(
    kv_cache: torch.Tensor, layer: int, block_table: torch.Tensor, first: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [first, end), each [end - first, num_kv_heads, head_dim]."""
    block_size = kv_cache.shape[3]
    positions = torch.arange(first, end, device=kv_cache.device)
    blocks, offsets = block_table[positions // block_size].long(), positions % block_size
    return kv_cache[blocks, layer, 0, offsets], kv_cache[blocks, layer, 1, offsets]


def _attend(
    query: torch.Tensor,  # [num_rows, num_heads, head_dim]: the last rows of the sequence
    key: torch.Tensor,  # [num_keys, num_kv_heads, head_dim]
    value: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32

    grouped = query.to(dtype).reshape(num_rows, num_kv_heads, group, head_dim)
    scores = torch.einsum("rhgd,khd->hgrk", grouped, key.to(dtype)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)

    # Distance of each key before each row's own key: the last row's own key is the last key.
    rows = torch.arange(num_rows, device=query.device)[:, None] + (num_keys - num_rows)
    distance = rows - torch.arange(num_keys, device=query.device)
    unseen = distance < 0
    if sliding_window is not None:
        unseen |= distance >= sliding_window
    scores = scores.masked_fill(unseen, -torch.inf)

    if sinks is not None:
        column = sinks.to(dtype).view(num_kv_heads, group, 1, 1).expand(-1, -1, num_rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys]
    attended = torch.einsum("hgrk,khd->rhgd", weights, value.to(dtype))
    return attended.reshape(num_rows, num_heads, head_dim).to(query.dtype)
