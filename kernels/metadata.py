"""What attention has to know about a step, and no layer may change: built once, read by every layer.

    sequences         A: 2 new tokens after 3 cached     B: 1 new after 5     C: nothing new     (block_size 4)
    block_table       [[7, 2], [4, 9], [1, 0]]           rows padded with 0; padding is never read
    slot_mapping      [31, 8, 37]                        A's tokens 3, 4: block 7 slot 3, block 2 slot 0; B's: 9, 1
    cu_seqlens_q      [0, 2, 3, 3]                       rows cu[i]:cu[i+1] of the packed query are sequence i's
    seq_lens          [5, 6, 4]                          keys of each sequence, the new tokens included

Query row r of sequence i stands at position seq_lens[i] - query_len[i] + r.

Each number is kept twice, as a tensor on the device and as plain numbers on the host. A kernel that has to know a
length in Python (to slice, to choose a path) reads those: reading it from the tensor would wait for the device,
in every layer. Recomputing the one from the other in each layer was the alternative.

Block tables are packed arrays from the request to the tensor, and are copied as memory: as lists, the 16,000 blocks of
32 long sequences are Python objects that cost 3 ms in every step.

The engine packs all numbers of a step into one buffer of its own (`engine/step_inputs.py`), from the same `StepPlan`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The numbers of a step on the host."""

    block_tables: list[array[int]]  # 'i'; only the blocks that hold keys
    query_lens: list[int]
    seq_lens: list[int]
    slots: list[int]  # of the new tokens

    @classmethod
    def of(
        cls,
        block_tables: Sequence[Sequence[int]],
        num_computed: Sequence[int],
        num_new: Sequence[int],
        block_size: int,
    ) -> StepPlan:
        """As `AttentionMetadata.build`."""
        seq_lens = [computed + new for computed, new in zip(num_computed, num_new, strict=True)]
        tables: list[array[int]] = []
        for table, seq_len in zip(block_tables, seq_lens, strict=True):
            num_blocks = -(-seq_len // block_size)
            assert len(table) >= num_blocks, f"{len(table)} blocks of {block_size} slots for {seq_len} tokens"
            tables.append(array("i", table[:num_blocks]))
        slots = [
            slot
            for table, start, end in zip(tables, num_computed, seq_lens, strict=True)
            for slot in _slots(table, start, end, block_size)
        ]
        return cls(tables, list(num_new), seq_lens, slots)

    @property
    def table_width(self) -> int:
        return max(map(len, self.block_tables), default=0)

    def packed_tables(self, width: int) -> bytes:
        """The tables as int32 rows of `width` blocks, filled up with 0."""
        return b"".join(table.tobytes().ljust(4 * width, b"\0") for table in self.block_tables)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    block_table: torch.Tensor  # int32 [num_seqs, max_blocks]
    slot_mapping: torch.Tensor  # int64 [num_tokens], block_id * block_size + offset of each new token
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    host_block_tables: list[array[int]]  # 'i'; only the blocks that hold keys
    host_query_lens: list[int]
    host_seq_lens: list[int]
    block_size: int

    @classmethod
    def build(
        cls,
        block_tables: Sequence[Sequence[int]],
        num_computed: Sequence[int],
        num_new: Sequence[int],
        block_size: int,
        device: torch.device | str,
    ) -> AttentionMetadata:
        """`num_computed` tokens of each sequence are in the cache, `num_new` follow in this step (0 is allowed).

        A block table may be longer than its tokens need; it may not be shorter.
        """
        plan = StepPlan.of(block_tables, num_computed, num_new, block_size)
        return cls(
            block_table=upload(_padded(plan), device),
            slot_mapping=upload(torch.tensor(plan.slots, dtype=torch.int64), device),
            cu_seqlens_q=upload(torch.tensor([0, *accumulate(plan.query_lens)], dtype=torch.int32), device),
            seq_lens=upload(torch.tensor(plan.seq_lens, dtype=torch.int32), device),
            host_block_tables=plan.block_tables,
            host_query_lens=plan.query_lens,
            host_seq_lens=plan.seq_lens,
            block_size=block_size,
        )


def _padded(plan: StepPlan) -> torch.Tensor:
    """The tables as rows of one int32 tensor."""
    shape = (len(plan.block_tables), plan.table_width)
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.int32)
    return torch.frombuffer(bytearray(plan.packed_tables(plan.table_width)), dtype=torch.int32).view(shape)


def _slots(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """The absolute slots of positions [start, end): runs of neighbours, one run a block."""
    slots: list[int] = []
    while start < end:
        index, offset = divmod(start, block_size)
        count = min(block_size - offset, end - start)
        first = table[index] * block_size + offset
        slots.extend(range(first, first + count))
        start += count
    return slots
