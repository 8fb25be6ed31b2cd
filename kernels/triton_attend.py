"""What every attention kernel does with a tile of keys: find it, read it, fold it into a running softmax.

    block_table row   [7, 2, 9 …]        key j of the sequence: block table[j // block_size], slot j % block_size
    tile              keys [start, start + BLOCK_N), start a multiple of BLOCK_N, so that a tile lies in one block
                      (one table read) whenever BLOCK_N divides the block size, and else reads the table once a key

    query rows        row r of a KV head's rows is query token r // GROUP, query head kv_head · GROUP + r % GROUP
                      so a key is read once for all heads of its group, any group ratio fills a tile without gaps,
                      and `tl.dot` gets its 16 rows

    running softmax   acc, row_sum, row_max of scores in base 2 (score · log2 e): exp2 is one instruction, exp is two

Rules that every kernel gets from here:
 - A slot outside [first, end) is not read: 0 · NaN is NaN, so a mask on the scores alone would not do.
 - A block's offset is computed in 64 bits: 32,768 blocks of 64 KiB elements already pass 2^31.
 - A row that has seen nothing keeps row_max = -inf; what is subtracted from the scores is then 0, never -inf.
 - tanh is made of exp2, whose overflow to infinity gives exactly ±1: a soft cap holds at any logit.
 - KV in 8 bits is widened to the query's type before the product. Tensor cores add fp8 products in about 14 bits, so
   whoever multiplies in fp8 has to move partial sums to fp32 every few products; decode is bound by the bytes it
   reads, not by products, so nothing is lost by not doing it.

The tile loop is one function; the kernels that inline it are several (`triton_decode`, `triton_prefill`,
`triton_shared_prefix`). One kernel with a branch per kind of row was the alternative: its loops cannot be pipelined
for both, and its tile is wrong for one of them.
"""

# Triton's language looks like Python but is not: constants in capitals, arguments that are tensors and numbers at once.
# ruff: noqa: N803
# pyright: reportUnknownParameterType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_blocks(
    table: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The block ids of keys [start, start + BLOCK_N), or one for all; entries that hold no key are not read."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:  # noqa: RET505 - Triton compiles what follows a return
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(table + keys // BLOCK_SIZE, mask=(keys >= first) & (keys < end), other=0)


@triton.jit
def slot_offsets(
    blocks: tl.tensor,
    start: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """int64 [BLOCK_N]: where the rows of keys [start, start + BLOCK_N) lie, in elements, within a layer and head."""
    keys = start + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        keys = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    return blocks.to(tl.int64) * BLOCK_STRIDE + (keys % BLOCK_SIZE) * SLOT_STRIDE


@triton.jit
def load_rows(
    base: tl.tensor,
    offsets: tl.tensor,  # [ROWS]
    readable: tl.tensor,  # [ROWS]
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[ROWS, BLOCK_D]; columns from HEAD_DIM on are zero, rows that are not readable too."""
    columns = tl.arange(0, BLOCK_D)
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=readable[:, None] & (columns[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM == BLOCK_D:  # noqa: RET505 - Triton compiles what follows a return
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def scaled_scores(
    products: tl.tensor,
    score_scale: tl.tensor,  # softmax scale and the keys' quantization scale
    soft_cap: tl.tensor,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Scores in base 2."""
    if HAS_SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        power = tl.exp2(products * (score_scale * (2.0 * LOG2_E) / soft_cap))
        return (soft_cap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))
    else:  # noqa: RET505 - Triton compiles what follows a return
        return products * (score_scale * LOG2_E)


@triton.jit
def attend_tiles(
    acc: tl.tensor,  # fp32 [BLOCK_M, BLOCK_D]
    row_sum: tl.tensor,  # fp32 [BLOCK_M]
    row_max: tl.tensor,  # fp32 [BLOCK_M]
    query: tl.tensor,  # [BLOCK_M, BLOCK_D]
    positions: tl.tensor,  # int32 [BLOCK_M]
    keys_base: tl.tensor,  # key of slot 0 of block 0, of the kernel's layer and head
    table: tl.tensor,  # the sequence's row of block ids
    begin: tl.tensor,  # a multiple of BLOCK_N
    end: tl.tensor,
    first: tl.tensor,  # the first key that may be read
    window: tl.tensor,
    score_scale: tl.tensor,
    soft_cap: tl.tensor,
    MASKED: tl.constexpr,  # False: every row sees every key of [begin, end), a whole number of tiles
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys and values of [begin, end) into the running softmax."""
    # The interpreter accepts smaller products, a GPU does not.
    tl.static_assert(query.shape[0] >= 16)
    tl.static_assert(BLOCK_N >= 16)
    tl.static_assert(BLOCK_D >= 16)
    values_base = keys_base + BLOCK_SIZE * SLOT_STRIDE
    blocks = load_blocks(table, begin, first, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        readable = (columns >= first) & (columns < end)
        offsets = slot_offsets(blocks, start, BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N)
        blocks = load_blocks(table, start + BLOCK_N, first, end, BLOCK_SIZE, BLOCK_N)
        key = load_rows(keys_base, offsets, readable, HEAD_DIM, BLOCK_D, MASKED).to(query.dtype)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = scaled_scores(products, score_scale, soft_cap, HAS_SOFT_CAP)
        if MASKED:
            seen = readable[None, :] & (columns[None, :] <= positions[:, None])
            if HAS_WINDOW:
                seen &= columns[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        value = load_rows(values_base, offsets, readable, HEAD_DIM, BLOCK_D, MASKED).to(query.dtype)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(query.dtype), value, acc * decay[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def add_sink(row_sum: tl.tensor, row_max: tl.tensor, sink: tl.tensor):
    """The softmax's sum with one more logit, which has no value: (row_sum, row_max, the factor for acc)."""
    logit = sink * LOG2_E
    new_max = tl.maximum(row_max, logit)
    decay = tl.exp2(row_max - new_max)
    return row_sum * decay + tl.exp2(logit - new_max), new_max, decay


@triton.jit
def log_sum(row_sum: tl.tensor, row_max: tl.tensor):
    """The base-2 logarithm of the softmax's sum; -inf where nothing was seen."""
    return tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum)))


@triton.jit
def divide(acc: tl.tensor, row_sum: tl.tensor):
    """acc / row_sum, zero for rows that have seen nothing."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
