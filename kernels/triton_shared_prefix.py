"""One pass over keys that several decoding sequences share, for all of them together.

    block tables   A [7 2 9 4 | 5]      prefix: blocks 7 2 9 4, read once for A, B and C
                   B [7 2 9 4 | 1 8]    own:    the rest, `triton_decode` from `prefix_lens` on
                   C [7 2 9 4 | 6]      merged: by the sums of both, `triton_decode.reduce_splits`

    a tile's rows  (member, head of the group): 32 sequences of a group of 4 fill 128 rows, one product a key tile

    items   int32 [num_items, 5]   first member, number of members, first key, end key, first row of the partial results
                                   (all zero: room of a captured step; no key is read, nothing is written)
    partial results                [split of the prefix, member of the group, head, BLOCK_D], group after group

Every row sees every key of the prefix, which is cut to whole tiles: no mask. Only sequences with one new token take
part: with several, a tile would hold fewer members and the pass would save less. The items come from the host
(`kernels.shared_prefix`): groups last as long as the batch does, and its block tables show them.
"""

# Triton's language looks like Python but is not: constants in capitals, arguments that are tensors and numbers at once.
# ruff: noqa: N803, N806
# pyright: reportUnknownParameterType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_attend import attend_tiles, divide, load_rows, log_sum


@triton.jit(do_not_specialize=["layer"])
def shared_prefix_decode(
    query: tl.tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: tl.tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    partial_out: tl.tensor,  # fp32 [num_partials, num_heads, BLOCK_D]
    partial_lse: tl.tensor,  # fp32 [num_partials, num_heads]
    items: tl.tensor,  # int32 [num_items, 5]
    members: tl.tensor,  # int32: the sequences of each group
    block_table: tl.tensor,  # int32 [num_seqs, max_blocks]
    cu_seqlens_q: tl.tensor,  # int32 [num_seqs + 1]
    kv_scales: tl.tensor,  # fp32 [num_layers, 2, num_kv_heads]
    layer: tl.tensor,
    table_stride: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    HAS_SOFT_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (num_kv_heads, num_items)."""
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 5
    first_member = tl.load(item)
    num_members = tl.load(item + 1)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    first_partial = tl.load(item + 4)

    rows = tl.arange(0, BLOCK_M)
    member = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    used = member < num_members
    seqs = tl.load(members + first_member + member, mask=used, other=0)
    token_rows = tl.load(cu_seqlens_q + seqs, mask=used, other=0).to(tl.int64)
    query_tile = load_rows(
        query, token_rows * query_token_stride + heads * query_head_stride, used, HEAD_DIM, BLOCK_D, True
    )
    table = block_table + tl.load(members + first_member).to(tl.int64) * table_stride

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
        acc, row_sum, row_max, query_tile, rows, keys_base, table, begin, end, begin, 0, score_scale, soft_cap,
        False, False, HAS_SOFT_CAP, BLOCK_SIZE, NUM_LAYERS * LAYER_STRIDE, SLOT_STRIDE, HEAD_DIM,
        BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip

    columns = tl.arange(0, BLOCK_D)
    partials = (first_partial + member).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
    tl.store(partial_lse + partials, log_sum(row_sum, row_max), mask=used)
    result = divide(acc, row_sum) * value_scale
    tl.store(partial_out + partials[:, None] * BLOCK_D + columns[None, :], result, mask=used[:, None])
