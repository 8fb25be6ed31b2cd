"""Prefill: the causal attention of many new tokens of each sequence over its cached keys and themselves.

    sequence        keys   0 ───── cached ───── ctx ─── new ─── seq_len
    query rows             (token, head of the group) of the new tokens, cut into tiles of BLOCK_M rows
    one tile               ├── window edge ──┤──── all rows see all ────┤── diagonal ──┤
                                masked               not masked              masked

64 or 128 rows a tile: with 16, as decode has them, each key is read eight times as often and prefill of 8,000 tokens
takes 2.5 times as long. The loop without masks is where the time goes; a mask in it costs as much as the exponentials.

Program (head, tile): the heads of a tile run next to each other and tiles from the last to the first, so that the
longest start first and the short ones fill the gaps at the end. A persistent grid with the same order would only save
the starts of programs, which are few and long here.

Tiles of sequence i: ceil(query_len · GROUP / BLOCK_M). Each program finds its sequence in `cu_seqlens_q` by itself.
"""

# Triton's language looks like Python but is not: constants in capitals, arguments that are tensors and numbers at once.
# ruff: noqa: N803, N806
# pyright: reportUnknownParameterType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_attend import add_sink, attend_tiles, divide, load_rows


@triton.jit(do_not_specialize=["layer", "num_seqs", "min_query", "window"])
def paged_prefill(
    query: tl.tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: tl.tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    output: tl.tensor,  # [num_tokens, num_heads, head_dim], contiguous
    block_table: tl.tensor,  # int32 [num_seqs, max_blocks]
    cu_seqlens_q: tl.tensor,  # int32 [num_seqs + 1]
    seq_lens: tl.tensor,  # int32 [num_seqs]
    sinks: tl.tensor,  # [num_heads]
    kv_scales: tl.tensor,  # fp32 [num_layers, 2, num_kv_heads]
    layer: tl.tensor,
    num_seqs: tl.tensor,
    min_query: tl.tensor,  # sequences with fewer new tokens are decode's
    table_stride: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
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
    """Grid (num_kv_heads, tiles of all sequences)."""
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    seqs = tl.arange(0, SEQS)
    valid = seqs < num_seqs
    lens = tl.load(cu_seqlens_q + seqs + 1, mask=valid, other=0) - tl.load(cu_seqlens_q + seqs, mask=valid, other=0)
    tiles = tl.where(lens >= min_query, tl.cdiv(lens * GROUP, BLOCK_M), 0)
    starts = tl.cumsum(tiles, 0) - tiles
    mine = (starts <= tile) & (tile < starts + tiles)
    if tl.sum(mine.to(tl.int32)) == 0:
        return
    seq = tl.sum(tl.where(mine, seqs, 0))
    first_row = (tile - tl.sum(tl.where(mine, starts, 0))) * BLOCK_M

    query_begin = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - query_begin
    context = tl.load(seq_lens + seq) - query_len
    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    used = tokens < query_len
    positions = context + tl.minimum(tokens, query_len - 1)
    first_position = context + first_row // GROUP
    last_position = context + tl.minimum((first_row + BLOCK_M - 1) // GROUP, query_len - 1)

    token_rows = (query_begin + tokens).to(tl.int64)
    query_tile = load_rows(
        query, token_rows * query_token_stride + heads * query_head_stride, used, HEAD_DIM, BLOCK_D, True
    )
    SLOT_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    LAYER_STRIDE: tl.constexpr = 2 * BLOCK_SIZE * SLOT_STRIDE
    BLOCK_STRIDE: tl.constexpr = NUM_LAYERS * LAYER_STRIDE
    keys_base = kv_cache + layer.to(tl.int64) * LAYER_STRIDE + kv_head * HEAD_DIM
    table = block_table + seq.to(tl.int64) * table_stride
    score_scale = scale
    value_scale = 1.0
    if QUANTIZED:
        score_scale = scale * tl.load(kv_scales + layer * 2 * NUM_KV_HEADS + kv_head)
        value_scale = tl.load(kv_scales + (layer * 2 + 1) * NUM_KV_HEADS + kv_head)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    end = last_position + 1
    first = last_position * 0
    whole_begin = first
    if HAS_WINDOW:
        first = tl.maximum(first_position - window + 1, 0)
        begin = first // BLOCK_N * BLOCK_N
        # The first tile that lies in every row's window.
        whole_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
        acc, row_sum, row_max = attend_tiles(
            acc, row_sum, row_max, query_tile, positions, keys_base, table,
            begin, tl.minimum(whole_begin, end), first, window, score_scale, soft_cap, True, True, HAS_SOFT_CAP,
            BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    whole_end = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, whole_begin)
    acc, row_sum, row_max = attend_tiles(
        acc, row_sum, row_max, query_tile, positions, keys_base, table,
        whole_begin, whole_end, first, window, score_scale, soft_cap, False, HAS_WINDOW, HAS_SOFT_CAP,
        BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    acc, row_sum, row_max = attend_tiles(
        acc, row_sum, row_max, query_tile, positions, keys_base, table,
        whole_end, end, first, window, score_scale, soft_cap, True, HAS_WINDOW, HAS_SOFT_CAP,
        BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=used, other=0.0).to(tl.float32)
        row_sum, row_max, decay = add_sink(row_sum, row_max, sink)
        acc = acc * decay[:, None]
    result = divide(acc, row_sum) * value_scale
    columns = tl.arange(0, BLOCK_D)
    offsets = (token_rows * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
    tl.store(
        output + offsets[:, None] + columns[None, :],
        result.to(output.dtype.element_ty),
        mask=used[:, None] & (columns[None, :] < HEAD_DIM),
    )
