"""Paged attention on the CPU with torch's own products; `kernels.reference` says what it computes.

    per sequence:   block_table ─► gather its K and V into the workspace ─► products over runs of query rows
                                   [num_keys, num_kv_heads, head_dim] each      `_fused`: torch's SDPA
                                                                                `_explicit`: with a soft cap or sinks

The query heads of a group are folded into rows, so that a key is read once for its whole group: row r·group + g of KV
head h is query row r of head h·group + g.

A row's bits do not depend on how its sequence was cut into steps (I7 to the bit):

    positions    0 ─────────── 64 ────────── 128 ────────── 192          tiles: absolute multiples of `_TILE`
    new rows                        [90 ────────────── 140)              a prefill chunk; [90, 91) if it were a decode
    runs                            [90 ── 128)[128 ─ 140)               cut at the tiles' edges
    keys of the first run       [0 ──────────── 128)                     to the tile's end, whatever is known of it
    keys of the second run      [0 ────────────────────────── 192)       [140, 192): zeros, and masked

1. The products of a row are taken over the keys of its tile: their number is a function of the row's position. torch
   sums in blocks of keys and in vector lanes; one key more, even a masked one, is another order of summation.
2. The number of rows is a multiple of `_ROW_MULTIPLE`: kernels for fewer rows sum in another order; from there on a
   row's sum is the same among 4 rows and among 768.
3. A product is computed by one thread. torch gives a thread each (KV head, 32 rows); if there is only one such part,
   it runs outside of a parallel region, and the product is split between threads, by its size. It is computed twice.

Established for head sizes that are a multiple of 32 (rows begin at cache lines; products look at the alignment) in
bf16 and fp32 with AVX-512, for 1 to 8 threads. A test says whether it holds on the machine at hand.

Rules:
 - A sequence's result depends on that sequence alone: the batch around it changes no bit. This is why sequences are
   computed one after the other, and it is the faster way at long contexts: one sequence's K and V stay in the
   processor's cache between gather and product, a padded batch's do not (8 sequences of 1,800 keys: batched takes 1.2
   times as long in bf16, 1.9 times in fp32). At 100 keys a batch takes 0.6 of the time.
 - No slot outside [first, seq_len) is part of a product. The gather copies whole blocks, the rest is zeroed.
 - The workspace holds one sequence's K and V of one layer, and is reused by every layer. It is the kernel's own
   state: one instance belongs to one thread.

Alternatives measured and rejected:
 - Tiles that start with the chunk, and a decode over exactly the keys there are: no zeros, no mask for one row. In
   bf16 one text in six then differed between a cached and an uncached run.
 - A decode as one row of a whole tile: the same bits by construction, at 64 times the arithmetic.
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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.metadata import AttentionMetadata
from kernels.reference import SlotCopy, first_visible_key

# Query rows (before the fold) that are taken together. Fewer rows skip more of the keys above the diagonal, more
# rows fill the products better; 64 was best or equal from 40 to 512 new tokens. A multiple of a vector's lanes.
_TILE = 64
_ROW_MULTIPLE = 4
_ROWS_PER_THREAD = 32  # torch's SDPA takes as many at least


@dataclass(frozen=True, slots=True)
class _Run:
    """Query rows at positions [start, end) of one tile, and the keys [first_key, end_key) of their products."""

    start: int
    end: int
    first_key: int
    end_key: int
    sliding_window: int | None

    def num_folded(self, group: int) -> int:
        """Rows of the products: every row's group, and what fills up the multiple."""
        rows = (self.end - self.start) * group
        return -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE

    def unseen(self, group: int) -> torch.Tensor:
        """True where a key comes after a row's own or before its window; [num_folded, num_keys], or [1, num_keys]."""
        if self.end - self.start == 1:
            unseen = torch.ones(1, self.end_key - self.first_key, dtype=torch.bool)
            unseen[
                :, first_visible_key(self.start, self.sliding_window) - self.first_key : self.end - self.first_key
            ] = False
            return unseen
        own = torch.arange(self.num_folded(group)).div_(group, rounding_mode="floor").add_(self.start)
        own = own.clamp_(max=self.end - 1)[:, None]  # a row that only fills up sees what the last one sees
        keys = torch.arange(self.first_key, self.end_key)
        unseen = keys > own
        if self.sliding_window is not None:
            unseen |= keys <= own - self.sliding_window
        return unseen


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
            runs = _runs(seq_len - query_len, seq_len, sliding_window)
            key, value = self._gather(kv_cache, layer, metadata.block_table[index], runs, seq_len)
            for run in runs:
                taken = slice(rows.start + run.start - runs[0].start, rows.start + run.end - runs[0].start)
                keys = slice(run.first_key - runs[0].first_key, run.end_key - runs[0].first_key)
                if soft_cap is None and sink_logits is None:
                    attended = _fused(grouped[taken], key[:, keys], value[:, keys], run, scale)
                else:
                    attended = _explicit(
                        grouped[taken], key[:, keys], value[:, keys], run, scale, soft_cap, sink_logits
                    )
                output[taken] = _unfold(attended, run.end - run.start, num_heads // num_kv_heads)
        return output.view(num_tokens, num_heads, head_dim)

    def _gather(
        self, kv_cache: torch.Tensor, layer: int, block_table: torch.Tensor, runs: Sequence[_Run], seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of all runs, each [num_kv_heads, num_keys, head_dim], until the next gather.

        blocks                   │▒▒▒▒▒▒▒│▒▒▒▒▒▒▒│▒▒▒▒▒▒▒│
        of which seen                  [first ─── seq_len)            the rest becomes zeros
        returned                   [first_key ─────────── end_key)
        """
        block_size, num_kv_heads, head_dim = kv_cache.shape[3:]
        first_key, end_key = runs[0].first_key, runs[-1].end_key
        first = first_visible_key(runs[0].start, runs[0].sliding_window)
        first_block, end_block = first_key // block_size, -(-seq_len // block_size)
        skipped = first_block * block_size
        num_slots = max(end_block * block_size, end_key) - skipped
        gathered = self._reserve((2, num_slots, num_kv_heads * head_dim), kv_cache.dtype)
        blocks = block_table[first_block:end_block]
        num_copied = (end_block - first_block) * block_size
        # Two reads of rows that are contiguous; one of [2, ...] rows would interleave keys and values.
        for part in range(2):
            target = gathered[part, :num_copied].view(end_block - first_block, -1)
            torch.index_select(kv_cache[:, layer, part].flatten(1), 0, blocks, out=target)
        if first > first_key:
            gathered[:, : first - skipped].zero_()
        if end_key > seq_len:
            gathered[:, seq_len - skipped : end_key - skipped].zero_()
        slots = gathered[:, first_key - skipped : end_key - skipped].unflatten(2, (num_kv_heads, head_dim))
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
    key: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,
    run: _Run,
    scale: float,
) -> torch.Tensor:  # [num_kv_heads, num_folded, head_dim]
    unseen = run.unseen(query.shape[2])
    bias = torch.zeros(unseen.shape, dtype=key.dtype).masked_fill_(unseen, -torch.inf)
    rows = _fold(query, run).to(key.dtype)
    # A single part would be split between the threads: rule 3.
    alone = key.shape[0] == 1 and rows.shape[1] <= _ROWS_PER_THREAD and torch.get_num_threads() > 1
    rows, key, value = (part.expand(2 if alone else 1, -1, -1, -1) for part in (rows, key, value))
    return F.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scale)[0]


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: _Run,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [num_kv_heads, group]
) -> torch.Tensor:
    """As `_fused`, for what SDPA cannot do. In fp32: a bf16 product rounds its scores, a score of 30 by up to 1/16."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = _fold(query, run).to(dtype)
    scores = torch.bmm(rows, key.to(dtype).transpose(1, 2)).mul_(scale)
    logits = None
    if sinks is not None:
        repeats = -(-rows.shape[1] // query.shape[2])
        logits = sinks.to(dtype).repeat(1, repeats)[:, : rows.shape[1], None]
    return torch.bmm(_softmax(scores, run.unseen(query.shape[2]), soft_cap, logits), value.to(dtype))


def _softmax(
    scores: torch.Tensor,  # [num_kv_heads, num_rows, num_keys], overwritten
    unseen: torch.Tensor,  # [num_rows, num_keys] or [1, num_keys]
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [num_kv_heads, num_rows, 1]
) -> torch.Tensor:
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.masked_fill_(unseen, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def _runs(start: int, end: int, sliding_window: int | None) -> list[_Run]:
    """The query rows at positions [start, end), cut at multiples of `_TILE`; the drawing above."""
    runs: list[_Run] = []
    while start < end:
        tile = start // _TILE * _TILE
        stop = min(end, tile + _TILE)
        runs.append(_Run(start, stop, first_visible_key(tile, sliding_window), tile + _TILE, sliding_window))
        start = stop
    return runs


def _fold(query: torch.Tensor, run: _Run) -> torch.Tensor:
    """[num_rows, num_kv_heads, group, head_dim] → [num_kv_heads, num_folded, head_dim], filled up with zeros."""
    num_rows, num_kv_heads, group, head_dim = query.shape
    num_folded = run.num_folded(group)
    if num_folded == num_rows * group:
        return query.transpose(0, 1).reshape(num_kv_heads, num_folded, head_dim)
    folded = query.new_zeros(num_kv_heads, num_folded, head_dim)
    folded[:, : num_rows * group].unflatten(1, (num_rows, group)).copy_(query.transpose(0, 1))
    return folded


def _unfold(rows: torch.Tensor, num_rows: int, group: int) -> torch.Tensor:
    """The inverse of `_fold`."""
    return rows[:, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)
