"""Decode: one to eight new tokens of each sequence over its blocks, the keys split among programs.

    keys          A ├────────────┬────────────┬───────┤      B ├──────────┤      C ├────────────┬─────┤
    items           0            1            2                3                   4            5
                    each at most `chunk` keys; A's partial results are merged by `reduce_splits`, B is done in one

The unit of work is an item: a run of one sequence's keys. `chunk` is chosen so that all items together are about
`target_items`: every program gets about as many keys as any other, be it one sequence of 100,000 tokens, a dozen of
4,000, or one long one among many short. A number of splits that is the same for every sequence of the batch would
leave the long one to a few programs, and falls to 1 where sequences · heads just about fill the device.

Which item a program has follows from `seq_lens`, which each program reads and sums for itself: a few hundred integers
from L2. So nothing waits for the host, and a captured graph stays right when the lengths change. A plan made on
the host was the alternative: a copy to the device in every step, and a grid that depends on the lengths.

Rows of the tile are query tokens × the heads of one KV head (`triton_attend`). Masks cost nothing here (the loop waits
for memory), so that one loop does whole and partial tiles alike: a second would start its loads only after the first.

Partial results are in fp32, each divided by its own sum, with the base-2 logarithm of that sum. Merging in the last
program to finish, by an atomic counter, would save a launch and needs fences that no test without a GPU can prove.
"""

# Triton's language looks like Python but is not: constants in capitals, arguments that are tensors and numbers at once.
# ruff: noqa: N803, N806
# pyright: reportUnknownParameterType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_attend import LOG2_E, add_sink, attend_tiles, divide, load_rows, log_sum

MIN_CHUNK: tl.constexpr = tl.constexpr(256)  # keys; below, merging costs more than the split gains


@triton.jit
def first_key(seq_len: tl.tensor, query_len: tl.tensor, window: tl.tensor, HAS_WINDOW: tl.constexpr):
    """The first key that any new token of the sequence sees."""
    if HAS_WINDOW:
        return tl.maximum(seq_len - query_len - window + 1, 0)
    else:  # noqa: RET505 - Triton compiles what follows a return
        return seq_len * 0


@triton.jit
def find_split(
    item: tl.tensor,
    cu_seqlens_q: tl.tensor,
    seq_lens: tl.tensor,
    prefix_lens: tl.tensor,
    num_seqs: tl.tensor,
    target_items: tl.tensor,
    max_query: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEQS: tl.constexpr,
):
    """(chunk, items before each sequence [SEQS], items of each sequence [SEQS]).

    Sequences without new tokens, or with more than max_query of them (prefill's), have no items.
    """
    seqs = tl.arange(0, SEQS)
    valid = seqs < num_seqs
    query_len = tl.load(cu_seqlens_q + seqs + 1, mask=valid, other=0) - tl.load(
        cu_seqlens_q + seqs, mask=valid, other=0
    )
    seq_len = tl.load(seq_lens + seqs, mask=valid, other=0)
    first = first_key(seq_len, query_len, window, HAS_WINDOW)
    if HAS_PREFIX:
        first = tl.load(prefix_lens + seqs, mask=valid, other=0)
    num_keys = seq_len - first // BLOCK_N * BLOCK_N
    num_keys = tl.where((query_len > 0) & (query_len <= max_query), num_keys, 0)
    share = tl.cdiv(tl.sum(num_keys.to(tl.int64)), target_items.to(tl.int64)).to(tl.int32)
    chunk = tl.cdiv(tl.maximum(share, MIN_CHUNK), BLOCK_N) * BLOCK_N
    splits = tl.cdiv(num_keys, chunk)
    return chunk, tl.cumsum(splits, 0) - splits, splits


@triton.jit(do_not_specialize=["layer", "num_seqs", "target_items", "max_query", "window"])
def paged_decode(
    query: tl.tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: tl.tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    output: tl.tensor,  # [num_tokens, num_heads, head_dim], contiguous
    partial_out: tl.tensor,  # fp32 [num_partials, num_heads, BLOCK_D]
    partial_lse: tl.tensor,  # fp32 [num_partials, num_heads]
    block_table: tl.tensor,  # int32 [num_seqs, max_blocks]
    cu_seqlens_q: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    prefix_lens: tl.tensor,  # int32 [num_seqs]: keys that a shared pass takes, a multiple of BLOCK_N
    sinks: tl.tensor,  # [num_heads]
    kv_scales: tl.tensor,  # fp32 [num_layers, 2, num_kv_heads]
    layer: tl.tensor,
    num_seqs: tl.tensor,
    target_items: tl.tensor,
    max_query: tl.tensor,
    table_stride: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEQS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (row tiles · num_kv_heads, target_items + num_seqs)."""
    item = tl.program_id(1)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row_tile = tl.program_id(0) // NUM_KV_HEADS
    chunk, starts, splits = find_split(
        item, cu_seqlens_q, seq_lens, prefix_lens, num_seqs, target_items, max_query, window,
        HAS_WINDOW, HAS_PREFIX, BLOCK_N, SEQS,
    )  # fmt: skip
    mine = (starts <= item) & (item < starts + splits)
    if tl.sum(mine.to(tl.int32)) == 0:
        return
    seq = tl.sum(tl.where(mine, tl.arange(0, SEQS), 0))
    split = item - tl.sum(tl.where(mine, starts, 0))
    num_splits = tl.sum(tl.where(mine, splits, 0))

    query_begin = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - query_begin
    seq_len = tl.load(seq_lens + seq)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    used = tokens < query_len
    if row_tile * BLOCK_M >= query_len * GROUP:
        return
    positions = seq_len - query_len + tl.minimum(tokens, query_len - 1)

    first = first_key(seq_len, query_len, window, HAS_WINDOW)
    merge = num_splits > 1
    if HAS_PREFIX:
        first = tl.load(prefix_lens + seq)
        merge = merge | (first > 0)
    begin = first // BLOCK_N * BLOCK_N + split * chunk
    end = tl.minimum(begin + chunk, seq_len)

    token_rows = (query_begin + tokens).to(tl.int64)
    query_tile = load_rows(
        query, token_rows * query_token_stride + heads * query_head_stride, used, HEAD_DIM, BLOCK_D, True
    )
    SLOT_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    LAYER_STRIDE: tl.constexpr = 2 * BLOCK_SIZE * SLOT_STRIDE
    keys_base = kv_cache + layer.to(tl.int64) * LAYER_STRIDE + kv_head * HEAD_DIM
    score_scale = scale
    value_scale = 1.0
    if QUANTIZED:
        score_scale = scale * tl.load(kv_scales + layer * 2 * NUM_KV_HEADS + kv_head)
        value_scale = tl.load(kv_scales + (layer * 2 + 1) * NUM_KV_HEADS + kv_head)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc, row_sum, row_max = attend_tiles(
        acc, row_sum, row_max, query_tile, positions, keys_base, block_table + seq.to(tl.int64) * table_stride,
        begin, end, first, window, score_scale, soft_cap, True, HAS_WINDOW, HAS_SOFT_CAP,
        BLOCK_SIZE, NUM_LAYERS * LAYER_STRIDE, SLOT_STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip

    columns = tl.arange(0, BLOCK_D)
    if merge:
        partials = (item.to(tl.int64) * max_query + tokens) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(partial_lse + partials, log_sum(row_sum, row_max), mask=used)
        result = divide(acc, row_sum) * value_scale
        tl.store(partial_out + partials[:, None] * BLOCK_D + columns[None, :], result, mask=used[:, None])
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=used, other=0.0).to(tl.float32)
            row_sum, row_max, decay = add_sink(row_sum, row_max, sink)
            acc = acc * decay[:, None]
        result = divide(acc, row_sum) * value_scale
        offsets = (token_rows * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
        tl.store(
            output + offsets[:, None] + columns[None, :],
            result.to(output.dtype.element_ty),
            mask=used[:, None] & (columns[None, :] < HEAD_DIM),
        )


@triton.jit
def merge_partials(
    acc: tl.tensor,  # fp32 [BLOCK_D]
    total: tl.tensor,
    largest: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    first: tl.tensor,  # index of the first partial, int64
    stride: tl.tensor,
    count: tl.tensor,
    head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Weigh `count` partial results by their sums. One that saw nothing has -inf and weighs nothing."""
    columns = tl.arange(0, BLOCK_D)
    for start in tl.range(0, count, BLOCK_S):
        members = start + tl.arange(0, BLOCK_S)
        valid = members < count
        rows = (first + members.to(tl.int64) * stride) * NUM_HEADS + head
        lse = tl.load(partial_lse + rows, mask=valid, other=float("-inf"))
        partial = tl.load(partial_out + rows[:, None] * BLOCK_D + columns[None, :], mask=valid[:, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay = tl.exp2(largest - shift)
        weights = tl.exp2(lse - shift)
        acc = acc * decay + tl.sum(partial * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        largest = new_largest
    return acc, total, largest


@triton.jit(do_not_specialize=["num_seqs", "target_items", "max_query", "window"])
def reduce_splits(
    output: tl.tensor,  # [num_tokens, num_heads, head_dim], contiguous
    partial_out: tl.tensor,  # fp32 [num_partials, num_heads, BLOCK_D]
    partial_lse: tl.tensor,  # fp32 [num_partials, num_heads]
    prefix_out: tl.tensor,  # as partial_out, of the shared pass
    prefix_lse: tl.tensor,
    prefix_partials: tl.tensor,  # int32 [num_seqs, 3]: first, stride, count of the sequence's rows in prefix_out
    cu_seqlens_q: tl.tensor,
    seq_lens: tl.tensor,
    prefix_lens: tl.tensor,
    sinks: tl.tensor,
    num_seqs: tl.tensor,
    target_items: tl.tensor,
    max_query: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid (num_heads, num_seqs · max_query). Merges what `paged_decode` left in parts."""
    head = tl.program_id(0)
    seq = tl.program_id(1) // max_query
    token = tl.program_id(1) % max_query
    query_begin = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - query_begin
    if (token >= query_len) | (query_len > max_query):
        return
    _, starts, splits = find_split(
        seq, cu_seqlens_q, seq_lens, prefix_lens, num_seqs, target_items, max_query, window,
        HAS_WINDOW, HAS_PREFIX, BLOCK_N, SEQS,
    )  # fmt: skip
    mine = tl.arange(0, SEQS) == seq
    start = tl.sum(tl.where(mine, starts, 0))
    num_splits = tl.sum(tl.where(mine, splits, 0))
    prefix_count = 0
    if HAS_PREFIX:
        prefix_count = tl.load(prefix_partials + seq * 3 + 2)
    if (num_splits == 1) & (prefix_count == 0):
        return

    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    largest = float("-inf")
    if HAS_SINKS:
        largest = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = 1.0
    acc, total, largest = merge_partials(
        acc, total, largest, partial_out, partial_lse, start.to(tl.int64) * max_query + token, max_query,
        num_splits, head, NUM_HEADS, BLOCK_D, BLOCK_S,
    )  # fmt: skip
    if HAS_PREFIX:
        acc, total, largest = merge_partials(
            acc, total, largest, prefix_out, prefix_lse, tl.load(prefix_partials + seq * 3).to(tl.int64),
            tl.load(prefix_partials + seq * 3 + 1), prefix_count, head, NUM_HEADS, BLOCK_D, BLOCK_S,
        )  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    row = (query_begin + token).to(tl.int64) * NUM_HEADS + head
    tl.store(output + row * HEAD_DIM + columns, (acc / total).to(output.dtype.element_ty), mask=columns < HEAD_DIM)
