"""Move stored keys to other positions: RoPE is a rotation, so a key at p becomes the key at p + delta by turning it on.

    key of a head   [x_0 … x_h-1 | y_0 … y_h-1 | rest]      h = rotary_dim / 2 pairs (x_i, y_i), the rest is not rotated
    turned          x cos a - y sin a | y cos a + x sin a      a_i = delta · inv_freq_i of the layer

The turn is made in fp32 from the original block into another one, never from a turned one: each turn rounds once to
the cache's type, and errors would add up. Cosines and sines come from the host in fp32 made of float64 angles:
delta · inv_freq in fp32 is off by 0.004 at a delta of 100,000. Values are copied.
"""

# Triton's language looks like Python but is not: constants in capitals, arguments that are tensors and numbers at once.
# ruff: noqa: N803, N806
# pyright: reportUnknownParameterType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rerotate_blocks(
    kv_cache: tl.tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    moves: tl.tensor,  # int64 [num_moves, 3]: source block, destination block, row of the tables
    cosines: tl.tensor,  # fp32 [num_deltas, num_layers, HALF]
    sines: tl.tensor,  # fp32 [num_deltas, num_layers, HALF]
    NUM_LAYERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # block_size · num_kv_heads
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (ceil(BLOCK_ROWS / BLOCK_R), num_layers, num_moves)."""
    layer = tl.program_id(1)
    move = moves + tl.program_id(2) * 3
    PLANE: tl.constexpr = BLOCK_ROWS * HEAD_DIM
    source = kv_cache + (tl.load(move) * NUM_LAYERS + layer) * (2 * PLANE)
    destination = kv_cache + (tl.load(move + 1) * NUM_LAYERS + layer) * (2 * PLANE)
    angles = (tl.load(move + 2) * NUM_LAYERS + layer) * HALF

    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < BLOCK_ROWS
    pairs = tl.arange(0, BLOCK_H)
    in_half = pairs < HALF
    cosine = tl.load(cosines + angles + pairs, mask=in_half, other=1.0)[None, :]
    sine = tl.load(sines + angles + pairs, mask=in_half, other=0.0)[None, :]
    offsets = rows[:, None] * HEAD_DIM + pairs[None, :]
    mask = inside[:, None] & in_half[None, :]
    x = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    element = kv_cache.dtype.element_ty
    tl.store(destination + offsets, (x * cosine - y * sine).to(element), mask=mask)
    tl.store(destination + offsets + HALF, (y * cosine + x * sine).to(element), mask=mask)

    columns = tl.arange(0, BLOCK_D)
    whole = rows[:, None] * HEAD_DIM + columns[None, :]
    rest = inside[:, None] & (columns[None, :] < HEAD_DIM)
    if 2 * HALF < HEAD_DIM:
        unrotated = rest & (columns[None, :] >= 2 * HALF)
        tl.store(destination + whole, tl.load(source + whole, mask=unrotated), mask=unrotated)
    tl.store(destination + PLANE + whole, tl.load(source + PLANE + whole, mask=rest), mask=rest)
