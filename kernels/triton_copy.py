"""Copies of token slots between blocks: all layers, keys and values, bit for bit.

    block            [num_layers, 2, block_size, num_kv_heads, head_dim]
    plane            [block_size, num_kv_heads, head_dim] of one layer, K or V: contiguous, its first slots too
    copy (s, d, n)   the first n slots of every plane of source row s, into destination row d

One kernel is copy-on-write (n slots, within the cache), a copy of whole blocks (n = block_size), gather (cache →
staging buffer of a tier) and scatter (back): source and destination are two base addresses. Elements are moved as
integers, the widest that divide a slot, so that a NaN keeps its bits and no dtype needs its own variant.

A program copies one piece of one plane. Programs run in any order, so copies of one launch must not depend on each
other: `kernels.block_copier` cuts a list of dependent ones into launches.
"""

# Triton's language looks like Python but is not: constants in capitals, arguments that are tensors and numbers at once.
# ruff: noqa: N803, N806
# pyright: reportUnknownParameterType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_planes(
    source: tl.tensor,  # [rows, planes, BLOCK_SIZE · SLOT_WORDS]
    destination: tl.tensor,  # [rows, planes, BLOCK_SIZE · SLOT_WORDS]
    copies: tl.tensor,  # int64 [num_copies, 3]: source row, destination row, slots
    PLANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (ceil(BLOCK_SIZE · SLOT_WORDS / BLOCK), PLANES, num_copies)."""
    copy = copies + tl.program_id(2) * 3
    source_row = tl.load(copy)
    destination_row = tl.load(copy + 1)
    num_words = tl.load(copy + 2) * SLOT_WORDS
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    PLANE_WORDS: tl.constexpr = BLOCK_SIZE * SLOT_WORDS
    plane = tl.program_id(1).to(tl.int64) * PLANE_WORDS
    # A multiple of a slot, said so: else the compiler takes the end for anything and copies word by word.
    mask = words < tl.multiple_of(num_words, SLOT_WORDS)
    moved = tl.load(source + source_row * (PLANES * PLANE_WORDS) + plane + words, mask=mask)
    tl.store(destination + destination_row * (PLANES * PLANE_WORDS) + plane + words, moved, mask=mask)
