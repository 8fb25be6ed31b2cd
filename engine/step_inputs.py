"""What a forward pass reads of a step, packed into one buffer: one copy to the device, from pinned memory.

    int64   input_ids │ positions │ slot_mapping │ sources │ logits_rows        num_tokens each; the last: num_rows
    int32   cu_seqlens_q │ seq_lens │ block_table                               num_seqs + 1; num_seqs; num_seqs · width

    padded to 4 of 2 sequences, each with one new token:

        input_ids     a  b  0  0        sources: the row of the step before whose token this is, -1: it is in input_ids
        slot_mapping  5 37 -1 -1        nothing is written for a padded row
        cu_seqlens_q  0  1  2  2  2     a padded sequence has no new token: attention skips it

A token that the step before samples is not known on the host while this step is prepared. It lies on the device, in
`ModelRunner._last_tokens`, and `resolve_tokens` puts it in its place there.

Each array begins at a multiple of 16 bytes, and a row of the table is one of 16 blocks: Triton compiles a kernel anew
for pointers and strides that are not, in the middle of serving.

Rejected: a tensor an array, as `AttentionMetadata.build` makes them. Six copies a step cost as much CPU time as the
launch of a captured graph, and each graph needs its inputs where they were when it was captured: one buffer a graph.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.batch import ScheduledSequence
from kernels.metadata import AttentionMetadata, StepPlan

_ALIGNMENT = 16  # bytes, and blocks of a row of the table


def aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides where each array lies in the buffer."""

    num_tokens: int
    num_seqs: int
    num_rows: int  # of logits
    table_width: int
    has_sources: bool

    @property
    def sizes(self) -> list[int]:
        """Bytes of each array, in their order, up to where the next one begins."""
        per_token = [self.num_tokens] * (4 if self.has_sources else 3)
        longs = [8 * count for count in (*per_token, self.num_rows)]
        ints = [4 * count for count in (self.num_seqs + 1, self.num_seqs, self.num_seqs * self.table_width)]
        return [aligned(size) for size in longs + ints]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def num_bytes_before_tables(self) -> int:
        return sum(self.sizes[:-1])


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step's numbers on the host."""

    buffer: torch.Tensor  # uint8 [shape.num_bytes]
    shape: StepShape
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's numbers where the model reads them: views of one buffer."""

    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    logits_rows: torch.Tensor  # int64 [num_rows]
    sources: torch.Tensor | None  # int64 [num_tokens]; None: every token is in input_ids
    metadata: AttentionMetadata

    @classmethod
    def of(cls, buffer: torch.Tensor, shape: StepShape, plan: StepPlan, block_size: int) -> StepInputs:
        """`buffer`, uint8 [shape.num_bytes], may be filled later; `plan` is what the host decides by."""
        *per_token, rows, cu_seqlens, seq_lens, tables = buffer.split(shape.sizes)
        input_ids, positions, slots, *sources = (_longs_of(part, shape.num_tokens) for part in per_token)
        return cls(
            input_ids=input_ids,
            positions=positions,
            logits_rows=_longs_of(rows, shape.num_rows),
            sources=sources[0] if sources else None,
            metadata=AttentionMetadata(
                block_table=tables_of(tables, shape),
                slot_mapping=slots,
                cu_seqlens_q=_ints_of(cu_seqlens, shape.num_seqs + 1),
                seq_lens=_ints_of(seq_lens, shape.num_seqs),
                host_block_tables=plan.block_tables,
                host_query_lens=plan.query_lens,
                host_seq_lens=plan.seq_lens,
                block_size=block_size,
            ),
        )


def _longs_of(part: torch.Tensor, count: int) -> torch.Tensor:
    return part.view(torch.int64)[:count]


def _ints_of(part: torch.Tensor, count: int) -> torch.Tensor:
    return part.view(torch.int32)[:count]


def tables_of(part: torch.Tensor, shape: StepShape) -> torch.Tensor:
    """Block tables, int32 [num_seqs, table_width], of a buffer's last array."""
    return _ints_of(part, shape.num_seqs * shape.table_width).view(shape.num_seqs, shape.table_width)


def decode_shape(num_seqs: int, table_width: int) -> StepShape:
    """Of a step in which each of `num_seqs` sequences has one new token."""
    return StepShape(num_seqs, num_seqs, num_seqs, table_width, has_sources=True)


def pack_step(
    sequences: Sequence[ScheduledSequence],
    block_size: int,
    rows_before: Mapping[str, int],  # request id → its row among the tokens that the step before sampled
    pad_to: int | None = None,  # sequences, of a step that only decodes; None: exactly what there is
) -> PackedStep:
    plan = StepPlan.of(
        [row.block_table for row in sequences],
        [row.num_computed for row in sequences],
        [row.num_new for row in sequences],
        block_size,
    )
    table_width = aligned(plan.table_width)
    if pad_to is not None:
        shape = decode_shape(pad_to, table_width)
    else:
        shape = StepShape(
            num_tokens=sum(plan.query_lens),
            num_seqs=len(sequences),
            num_rows=sum(row.sample for row in sequences),
            table_width=table_width,
            has_sources=any(row.takes_last for row in sequences),
        )
    arrays = [*_longs(sequences, plan, rows_before, shape), *_ints(plan, shape)]
    parts = [*(part.tobytes() for part in arrays), plan.packed_tables(table_width)]
    packed = bytearray().join(part.ljust(size, b"\0") for part, size in zip(parts, shape.sizes, strict=True))
    buffer = torch.frombuffer(packed, dtype=torch.uint8) if packed else torch.empty(0, dtype=torch.uint8)
    return PackedStep(buffer, shape, plan)


def _longs(
    sequences: Sequence[ScheduledSequence], plan: StepPlan, rows_before: Mapping[str, int], shape: StepShape
) -> list[array[int]]:
    input_ids, positions, sources = array("q"), array("q"), array("q")
    for row in sequences:
        known = row.token_ids[row.num_computed : row.end - row.takes_last]
        input_ids.extend(known)
        positions.extend(range(row.num_computed, row.end))
        if shape.has_sources:
            sources.extend([-1] * len(known))
        if row.takes_last:
            input_ids.append(0)
            sources.append(rows_before[row.request_id])
    padding = shape.num_tokens - len(input_ids)
    zeros, nowhere = array("q", [0] * padding), array("q", [-1] * padding)
    rows = array("q", _sampled_rows(sequences))
    rows.extend(range(len(rows), shape.num_rows))
    per_token = [input_ids + zeros, positions + zeros, array("q", plan.slots) + nowhere]
    return [*per_token, *([sources + nowhere] if shape.has_sources else []), rows]


def _ints(plan: StepPlan, shape: StepShape) -> list[array[int]]:
    padding = shape.num_seqs - len(plan.seq_lens)
    ends = array("i", accumulate(plan.query_lens, initial=0))
    ends.extend([ends[-1]] * padding)
    return [ends, array("i", plan.seq_lens) + array("i", [0] * padding)]


def _sampled_rows(sequences: Sequence[ScheduledSequence]) -> list[int]:
    """The packed index of each sampled sequence's last new token."""
    rows: list[int] = []
    end = 0
    for sequence in sequences:
        end += sequence.num_new
        if sequence.sample:
            rows.append(end - 1)
    return rows


def resolve_tokens(inputs: StepInputs, last_tokens: torch.Tensor) -> torch.Tensor:
    """The input ids, with those of the step before in place. `last_tokens`: int64, one a row of that step."""
    if inputs.sources is None:
        return inputs.input_ids
    return torch.where(inputs.sources >= 0, last_tokens[inputs.sources.clamp(min=0)], inputs.input_ids)
