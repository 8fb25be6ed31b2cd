"""Paged attention on the CPU with torch's own products; `kernels.reference` says what it computes.

    per sequence:   block_table ─► gather its K and V into the workspace ─► products over runs of query rows
                                   [num_keys, num_kv_heads, head_dim] each      `_fused`: torch's SDPA
                                                                                `_explicit`: with a soft cap or sinks

The query heads of a group are folded into rows, so that a key is read once for its whole group: row r·group + g of KV
head h is query row r of head h·group + g.

A row's bits do not depend on how its sequence was cut into steps, nor on the rows beside it (I7 to the bit):
`kernels.query_runs` gives a row's products the same keys each time, and never too few rows. One thing is left to do
here: a product must be one thread's. torch gives a thread each (KV head, 32 rows); if there is only one such part, it
is not in a parallel region, and the product itself is split between the threads, by its size. Then it is computed
twice, side by side.

Established for head sizes that are a multiple of 32 (rows begin at cache lines; products look at the alignment) in
bf16 and fp32 with AVX-512, for 1 to 8 threads. A test says whether it holds on the machine at hand.

Rules:
 - A sequence's result depends on that sequence alone: the batch around it changes no bit. This is why sequences are
   computed one after the other, and it is the faster way at long contexts: one sequence's K and V stay in the
   processor's cache between gather and product, a padded batch's do not (8 sequences of 1,800 keys: batched takes 1.2
   times as long in bf16, 1.9 times in fp32). At 100 keys a batch takes 0.6 of the time.
 - No slot outside [first, seq_len) is part of a product. The gather copies whole blocks, the rest is zeroed.
 - 8-bit keys and values are widened in the gather. Their scales do not meet them: a head's is on its query rows, and
   on its results, of which there are far fewer. In bf16 the widened elements are exact (fp8 has 4 bits, int8 8).
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

import math
from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.metadata import AttentionMetadata
from kernels.quantization import check_scales
from kernels.query_runs import QueryRun, SequencePlan, plan_step
from kernels.reference import SlotCopy

_ROWS_PER_THREAD = 32  # at least as many are a part of torch's SDPA


class CpuAttention:
    """The kernels for CPU tensors. Not for two threads at once: they share a workspace."""

    def __init__(self, kv_scales: torch.Tensor | None = None) -> None:
        """`kv_scales`: fp32 [num_layers, 2, num_kv_heads], for a cache of 8-bit elements."""
        self._kv_scales = kv_scales
        self._workspace = torch.empty(0)
        self._planned: AttentionMetadata | None = None
        self._plans: dict[tuple[int | None, int, torch.dtype], list[SequencePlan]] = {}

    def store_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> None:
        # Steps on the CPU are never padded. An index_copy_ into a flat view takes as long.
        reference.write_slots(key, value, kv_cache, layer, slot_mapping, kv_scales=self._kv_scales)

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
        check_scales(kv_cache, self._kv_scales)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = kv_cache.shape[4]
        grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        output = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        sink_logits = None if sinks is None else sinks.view(num_kv_heads, -1)
        fused = soft_cap is None and sinks is None
        dtype = _product_dtype(query.dtype, kv_cache.dtype, fused)
        scales = None if self._kv_scales is None else self._kv_scales[layer, :, :, None, None].to(dtype)
        for plan in self._plan(metadata, sliding_window, grouped.shape[2], dtype):
            key, value = self._gather(kv_cache, layer, plan, dtype)
            for run in plan.runs:
                rows = _fold(grouped[run.rows], run, dtype)
                if scales is not None:
                    rows = rows * scales[0]
                keys, values = key[:, run.keys], value[:, run.keys]
                if fused:
                    attended = _fused(rows, keys, values, run, scale)
                else:
                    attended = _explicit(rows, keys, values, run, scale, soft_cap, sink_logits)
                if scales is not None:
                    attended = attended * scales[1]
                output[run.rows] = _unfold(attended, run, grouped.shape[2])
        return output.view(num_tokens, num_heads, head_dim)

    def _plan(
        self, metadata: AttentionMetadata, sliding_window: int | None, group: int, dtype: torch.dtype
    ) -> list[SequencePlan]:
        """Made by the first layer of a step that has such a window, read by the others."""
        if self._planned is not metadata:
            self._planned, self._plans = metadata, {}
        key = (sliding_window, group, dtype)
        if key not in self._plans:
            self._plans[key] = plan_step(metadata, sliding_window, group, dtype)
        return self._plans[key]

    def _gather(
        self, kv_cache: torch.Tensor, layer: int, plan: SequencePlan, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of all runs, each [num_kv_heads, num_keys, head_dim], until the next gather."""
        block_size, num_kv_heads, head_dim = kv_cache.shape[3:]
        num_blocks = plan.blocks.shape[0]
        gathered = self._reserve((2, plan.num_slots, num_kv_heads, head_dim), kv_cache.dtype)
        # Two reads of rows that are contiguous; one of [2, ...] rows would interleave keys and values.
        for part in range(2):
            target = gathered[part, : num_blocks * block_size].view(num_blocks, -1)
            torch.index_select(kv_cache[:, layer, part].flatten(1), 0, plan.blocks, out=target)
        for unseen in plan.cleared:
            gathered[:, unseen].zero_()
        key, value = (_widened(part[plan.keys], dtype).transpose(0, 1) for part in gathered)
        return key, value

    def _reserve(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        if self._workspace.numel() < size or self._workspace.dtype != dtype:
            # Grown in powers of two, so that a sequence that grows by a block a step does not allocate as often.
            # An ordinary tensor, so that the next caller may write to it outside inference mode.
            with torch.inference_mode(False):
                self._workspace = torch.empty(1 << (size - 1).bit_length(), dtype=dtype)
        return self._workspace[:size].view(shape)


def _widened(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `stored.to(dtype)`. fp8 goes by a table, two elements at a time: torch converts them one by one, and a decode
    over 8 sequences of 1,800 keys took ten times as long as one in bf16. So it takes four times as long."""
    if stored.dtype != torch.float8_e4m3fn or stored.shape[-1] % 2 or dtype.itemsize > 4:
        return stored.to(dtype)
    pairs = stored.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    return F.embedding(pairs, _fp8_pairs(dtype)).view(dtype).flatten(-2)


@cache
def _fp8_pairs(dtype: torch.dtype) -> torch.Tensor:
    """[65536, 1]: two neighbours in fp8, read as one number, to the same two in `dtype`, as one number."""
    with torch.inference_mode(False):
        single = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
        numbers = torch.arange(65536)
        pairs = torch.stack((single[numbers % 256], single[numbers // 256]), dim=1)
        return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64)


def _product_dtype(query: torch.dtype, cache: torch.dtype, fused: bool) -> torch.dtype:
    if torch.float64 in (query, cache):
        return torch.float64
    # A bf16 product outside of SDPA rounds its scores, a score of 30 by up to 1/16. Few processors have fp16
    # arithmetic; without it fp16 products take twice as long as a conversion and fp32 ones.
    in_bf16 = query == torch.bfloat16 and (cache == torch.bfloat16 or cache.itemsize == 1)
    return torch.bfloat16 if fused and in_bf16 else torch.float32


def _fused(
    rows: torch.Tensor,  # [num_kv_heads, num_folded, head_dim]
    key: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,
    run: QueryRun,
    scale: float,
) -> torch.Tensor:  # [num_kv_heads, num_folded, head_dim]
    rows, key, value = rows[None], key[None], value[None]
    if key.shape[1] == 1 and run.num_folded <= _ROWS_PER_THREAD and torch.get_num_threads() > 1:
        rows, key, value = (part.expand(2, -1, -1, -1) for part in (rows, key, value))
    return F.scaled_dot_product_attention(rows, key, value, attn_mask=run.bias(rows.dtype), scale=scale)[0]


def _explicit(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: QueryRun,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [num_kv_heads, group]
) -> torch.Tensor:
    """As `_fused`, for what SDPA cannot do."""
    scores = torch.bmm(rows, key.transpose(1, 2)).mul_(scale)
    logits = None
    if sinks is not None:
        repeats = -(-run.num_folded // sinks.shape[1])
        logits = sinks.to(rows.dtype).repeat(1, repeats)[:, : run.num_folded, None]
    return torch.bmm(_softmax(scores, run.bias(rows.dtype), soft_cap, logits), value)


def _softmax(
    scores: torch.Tensor,  # [num_kv_heads, num_rows, num_keys], overwritten
    bias: torch.Tensor,  # [num_rows, num_keys] or [1, num_keys]
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [num_kv_heads, num_rows, 1]
) -> torch.Tensor:
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.add_(bias)
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def _fold(query: torch.Tensor, run: QueryRun, dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, num_kv_heads, group, head_dim] → [num_kv_heads, num_folded, head_dim], filled up with zeros."""
    num_rows, num_kv_heads, group, head_dim = query.shape
    rows = query.transpose(0, 1).reshape(num_kv_heads, num_rows * group, head_dim).to(dtype)
    missing = run.num_folded - num_rows * group
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _unfold(rows: torch.Tensor, run: QueryRun, group: int) -> torch.Tensor:
    """The inverse of `_fold`."""
    num_kv_heads, _, head_dim = rows.shape
    return rows[:, : run.num_rows * group].view(num_kv_heads, run.num_rows, group, head_dim).transpose(0, 1)
