"""Paged attention on the CPU with torch's own products; `kernels.reference` says what it computes.

    per sequence:   block_table ─► gather its K and V into the workspace ─► products over runs of query rows
                                   [num_keys, num_kv_heads, head_dim] each      `_fused`: torch's SDPA
                                                                                `_explicit`: with a soft cap or sinks

The query heads of a group are folded into rows, so that a key is read once for its whole group: row r·group + g of KV
head h is query row r of head h·group + g.

Rules:
 - A sequence's result depends on that sequence alone: the batch around it changes no bit. This is why sequences are
   computed one after the other, and it is the faster way at long contexts: one sequence's K and V stay in the
   processor's cache between gather and product, a padded batch's do not (8 sequences of 1,800 keys: batched takes 1.2
   times as long in bf16, 1.9 times in fp32). At 100 keys a batch takes 0.6 of the time.
 - No slot outside [first, seq_len) is part of a product. The gather copies whole blocks, the views cut them.
 - The workspace holds one sequence's K and V of one layer, and is reused by every layer. It is the kernel's own
   state: one instance belongs to one thread.

Alternatives measured and rejected:
 - bf16 matrix products (torch.bmm) for one new token: half of SDPA's time when a shape repeats. But a sequence that
   grows has a new shape each step, and oneDNN compiles for each one: milliseconds a step; at 100 keys three times
   SDPA's time even without that. And their scores are rounded to bf16.
 - No gather where blocks are neighbours: a block's slots of one layer are contiguous, two blocks' are not (the other
   layers lie between), so the product goes block by block, and takes twice the time of gather and product.
 - SDPA with `enable_gqa`: it repeats K and V for each head of a group; four times the time for one new token.
 - `is_causal`: it aligns top-left, so the cached part has to be merged in by its log-sum. The explicit mask of a run
   costs 2% and was never slower than that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.metadata import AttentionMetadata
from kernels.reference import SlotCopy, first_visible_key

# Query rows (before the fold) that are taken together. Fewer rows skip more of the keys above the diagonal, more
# rows fill the products better; 64 was best or equal from 40 to 512 new tokens.
_ROWS = 64


class CpuAttention:
    """The kernels for CPU tensors. Not for two threads at once: they share a workspace."""

    def __init__(self) -> None:
        self._workspace = torch.empty(0)

    def store_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> None:
        # An index_copy_ into a flat view takes as long.
        reference.store_kv(key, value, kv_cache, layer, slot_mapping)

    def copy_slots(self, kv_cache: torch.Tensor, copies: Iterable[SlotCopy]) -> None:
        reference.copy_slots(kv_cache, copies)

    def paged_attention(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,  # [num_heads]
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = kv_cache.shape[4]
        grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        output = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        sink_logits = None if sinks is None else sinks.view(num_kv_heads, -1)
        start = 0
        for index, query_len in enumerate(metadata.host_query_lens):
            rows = slice(start, start + query_len)
            start += query_len
            if query_len == 0:
                continue
            seq_len = metadata.host_seq_lens[index]
            first = first_visible_key(seq_len - query_len, sliding_window)
            key, value = self._gather(kv_cache, layer, metadata.block_table[index], first, seq_len)
            if soft_cap is None and sink_logits is None:
                _fused(grouped[rows], key, value, output[rows], scale, sliding_window)
            else:
                _explicit(grouped[rows], key, value, output[rows], scale, sliding_window, soft_cap, sink_logits)
        return output.view(num_tokens, num_heads, head_dim)

    def _gather(
        self, kv_cache: torch.Tensor, layer: int, block_table: torch.Tensor, first: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, values of positions [first, end), each [num_kv_heads, end - first, head_dim], until the next gather."""
        block_size, num_kv_heads, head_dim = kv_cache.shape[3:]
        first_block = first // block_size
        blocks = block_table[first_block : -(-end // block_size)]
        skipped = first_block * block_size
        shape = (2, blocks.shape[0], block_size * num_kv_heads * head_dim)
        gathered = self._reserve(shape, kv_cache.dtype)
        # Two reads of rows that are contiguous; one of [2, ...] rows would interleave keys and values.
        torch.index_select(kv_cache[:, layer, 0].flatten(1), 0, blocks, out=gathered[0])
        torch.index_select(kv_cache[:, layer, 1].flatten(1), 0, blocks, out=gathered[1])
        slots = gathered.view(2, -1, num_kv_heads, head_dim)[:, first - skipped : end - skipped]
        if kv_cache.dtype == torch.float16:
            # Few processors have fp16 arithmetic; without it fp16 products take twice as long as this and fp32 ones.
            slots = slots.float()
        key, value = slots.transpose(1, 2)
        return key, value

    def _reserve(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        size = shape[0] * shape[1] * shape[2]
        if self._workspace.numel() < size or self._workspace.dtype != dtype:
            # Grown in powers of two, so that a sequence that grows by a block a step does not allocate as often.
            # An ordinary tensor, so that the next caller may write to it outside inference mode.
            with torch.inference_mode(False):
                self._workspace = torch.empty(1 << (size - 1).bit_length(), dtype=dtype)
        return self._workspace[:size].view(shape)


def _fused(
    query: torch.Tensor,  # [num_rows, num_kv_heads, group, head_dim]
    key: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]; the last row's own key is the last
    value: torch.Tensor,
    output: torch.Tensor,  # written: [num_rows, num_kv_heads, group, head_dim]
    scale: float,
    sliding_window: int | None,
) -> None:
    group = query.shape[2]
    for start, end, keys in _runs(query.shape[0], key.shape[1], sliding_window):
        bias = None  # a single row sees every key of its run
        if end - start > 1:
            mask = _unseen(end - start, keys.stop - keys.start, sliding_window)
            bias = torch.zeros(mask.shape, dtype=key.dtype).masked_fill_(mask, -torch.inf).repeat_interleave(group, 0)
        rows = _fold(query[start:end]).to(key.dtype)
        attended = F.scaled_dot_product_attention(
            rows.unsqueeze(0), key[None, :, keys], value[None, :, keys], attn_mask=bias, scale=scale
        )
        output[start:end] = _unfold(attended[0], group)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [num_kv_heads, group]
) -> None:
    """As `_fused`, for what SDPA cannot do. In fp32: a bf16 product rounds its scores, a score of 30 by up to 1/16."""
    group = query.shape[2]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    key, value = key.to(dtype), value.to(dtype)
    for start, end, keys in _runs(query.shape[0], key.shape[1], sliding_window):
        mask = _unseen(end - start, keys.stop - keys.start, sliding_window).repeat_interleave(group, 0)
        scores = torch.bmm(_fold(query[start:end]).to(dtype), key[:, keys].transpose(1, 2)).mul_(scale)
        logits = None if sinks is None else sinks.to(dtype).repeat(1, end - start).unsqueeze(-1)
        weights = _softmax(scores, mask, soft_cap, logits)
        output[start:end] = _unfold(torch.bmm(weights, value[:, keys]), group)


def _softmax(
    scores: torch.Tensor,  # [num_kv_heads, num_rows, num_keys], overwritten
    mask: torch.Tensor,  # [num_rows, num_keys], True where unseen
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [num_kv_heads, num_rows, 1]
) -> torch.Tensor:
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.masked_fill_(mask, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def _runs(num_rows: int, num_keys: int, sliding_window: int | None) -> Iterable[tuple[int, int, slice]]:
    """Runs of query rows (start, end), and the keys that any row of the run sees.

        keys   0 ─────────────────────────────────────── num_keys
        rows                    0 ─── start ──── end ─── num_rows
        run's keys       └ first of start ─┴─ own of end ┘

    The rows are the sequence's last positions: the last row's own key is the last key.
    """
    offset = num_keys - num_rows
    for start in range(0, num_rows, _ROWS):
        end = min(num_rows, start + _ROWS)
        yield start, end, slice(first_visible_key(offset + start, sliding_window), offset + end)


def _unseen(num_rows: int, num_keys: int, sliding_window: int | None) -> torch.Tensor:
    """[num_rows, num_keys], True where a key comes after the row's own, or before its window."""
    own = torch.arange(num_keys - num_rows, num_keys)[:, None]
    keys = torch.arange(num_keys)
    unseen = keys > own
    if sliding_window is not None:
        unseen |= keys <= own - sliding_window
    return unseen


def _fold(query: torch.Tensor) -> torch.Tensor:
    """[num_rows, num_kv_heads, group, head_dim] → [num_kv_heads, num_rows · group, head_dim]."""
    num_rows, num_kv_heads, group, head_dim = query.shape
    return query.transpose(0, 1).reshape(num_kv_heads, num_rows * group, head_dim)


def _unfold(rows: torch.Tensor, group: int) -> torch.Tensor:
    """The inverse of `_fold`."""
    num_kv_heads, _, head_dim = rows.shape
    return rows.view(num_kv_heads, -1, group, head_dim).transpose(0, 1)
