"""How a step's query rows are cut into products on the CPU, so that a row's bits do not depend on the step.

    positions    0 ─────────── 64 ────────── 128 ────────── 192          tiles: absolute multiples of `TILE`
    new rows                        [90 ────────────── 140)              a prefill chunk; [90, 91) if it were a decode
    runs                            [90 ── 128)[128 ─ 140)               cut at the tiles' edges
    keys of the first run       [0 ──────────── 128)                     to the tile's end, whatever is known of it
    keys of the second run      [0 ────────────────────────── 192)       [140, 192): zeros, and masked

1. The products of a row are taken over the keys of its tile: with or without a window, which keys these are is a
   function of the row's position. torch sums in blocks of keys and in vector lanes; one key more, even a masked one,
   is another order of summation.
2. The number of rows is a multiple of `_ROW_MULTIPLE`: the kernels for fewer rows sum in another order; from there on
   a row's sum is the same among 4 rows and among 768. What is missing is filled up with rows of zeros.

One plan is made a step and read by every layer: it depends on lengths only. Made in every layer it took half as long
as the attention of a short sequence itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.metadata import AttentionMetadata
from kernels.reference import first_visible_key

# Query rows (before the fold) that are taken together. Fewer rows skip more of the keys above the diagonal, more
# rows fill the products better; 64 was best or equal from 40 to 512 new tokens. A multiple of a vector's lanes.
TILE = 64
_ROW_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class QueryRun:
    """New rows of one sequence in one tile. Folded, row r·group + g is new row r of head g of its group."""

    rows: slice  # of the packed query
    keys: slice  # of the sequence's gathered keys
    num_rows: int
    num_folded: int  # num_rows · group, filled up
    late: torch.Tensor  # [num_folded or 1, TILE], True where the last keys come after the row's own
    early: torch.Tensor | None  # [num_folded or 1, < TILE], True where the first keys come before the row's window
    lone_bias: torch.Tensor | None  # of a single new row, which is what decoding has

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """0 where a key is seen, -inf elsewhere, to be added to the scores; [num_folded or 1, num_keys].

        Made anew for each layer unless it is a single row's: kept for a whole step, those of a long prompt would
        take hundreds of MB.
        """
        if self.lone_bias is not None:
            return self.lone_bias
        return _bias(self.keys.stop - self.keys.start, self.late, self.early, dtype)


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What the products of one sequence need.

    blocks                   │▒▒▒▒▒▒▒│▒▒▒▒▒▒▒│▒▒▒▒▒▒▒│
    slots      0 ────────────────────────────────────────── num_slots
    of which seen                  [first ─── seq_len)            `cleared`: the others within `keys`
    keys                       [first_key ─────────── end_key)
    """

    blocks: torch.Tensor  # int32 [num_blocks]
    num_slots: int
    keys: slice  # of the slots
    cleared: tuple[slice, ...]  # of the slots
    runs: tuple[QueryRun, ...]


def plan_step(
    metadata: AttentionMetadata, sliding_window: int | None, group: int, dtype: torch.dtype
) -> list[SequencePlan]:
    """One plan for each sequence that has new rows. `dtype` is that of the products."""
    planner = _Planner(sliding_window, group, dtype)
    plans: list[SequencePlan] = []
    first_row = 0
    for index, query_len in enumerate(metadata.host_query_lens):
        if query_len:
            plans.append(planner.sequence(metadata, index, first_row))
        first_row += query_len
    return plans


@dataclass(frozen=True, slots=True)
class _Planner:
    sliding_window: int | None
    group: int
    dtype: torch.dtype

    def sequence(self, metadata: AttentionMetadata, index: int, first_row: int) -> SequencePlan:
        block_size, seq_len = metadata.block_size, metadata.host_seq_lens[index]
        start = seq_len - metadata.host_query_lens[index]
        first = first_visible_key(start, self.sliding_window)
        first_key = first_visible_key(start // TILE * TILE, self.sliding_window)
        end_key = -(-seq_len // TILE) * TILE
        first_block, end_block = first_key // block_size, -(-seq_len // block_size)
        skipped = first_block * block_size
        unseen = (slice(first_key - skipped, first - skipped), slice(seq_len - skipped, end_key - skipped))
        return SequencePlan(
            blocks=metadata.block_table[index, first_block:end_block],
            num_slots=max(end_block * block_size, end_key) - skipped,
            keys=slice(first_key - skipped, end_key - skipped),
            cleared=tuple(part for part in unseen if part.start < part.stop),
            runs=tuple(self.run(positions, first_row - start, first_key) for positions in _tiles(start, seq_len)),
        )

    def run(self, positions: range, row_offset: int, gathered_from: int) -> QueryRun:
        """`row_offset` leads from a position to its packed row; the gathered keys begin at `gathered_from`."""
        tile = positions.start // TILE * TILE
        first_key, end_key = first_visible_key(tile, self.sliding_window), tile + TILE
        num_folded = -(-len(positions) * self.group // _ROW_MULTIPLE) * _ROW_MULTIPLE
        own = torch.tensor([[positions.start]])  # position of each folded row
        if len(positions) > 1:
            # A row that only fills up sees what the last one sees.
            own = torch.arange(num_folded).div(self.group, rounding_mode="floor").add_(positions.start)[:, None]
            own.clamp_(max=positions[-1])
        late = torch.arange(tile, end_key) > own
        early = None
        if self.sliding_window is not None and first_key <= positions[-1] - self.sliding_window:
            early = torch.arange(first_key, positions.stop - self.sliding_window) <= own - self.sliding_window
        return QueryRun(
            rows=slice(positions.start + row_offset, positions.stop + row_offset),
            keys=slice(first_key - gathered_from, end_key - gathered_from),
            num_rows=len(positions),
            num_folded=num_folded,
            late=late,
            early=early,
            lone_bias=_bias(end_key - first_key, late, early, self.dtype) if len(positions) == 1 else None,
        )


def _tiles(start: int, end: int) -> Iterator[range]:
    """Positions [start, end), cut at multiples of `TILE`."""
    while start < end:
        stop = min(end, start // TILE * TILE + TILE)
        yield range(start, stop)
        start = stop


def _bias(num_keys: int, late: torch.Tensor, early: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.zeros(late.shape[0], num_keys, dtype=dtype)
    bias[:, num_keys - TILE :].masked_fill_(late, -torch.inf)
    if early is not None:
        bias[:, : early.shape[1]].masked_fill_(early, -torch.inf)
    return bias
