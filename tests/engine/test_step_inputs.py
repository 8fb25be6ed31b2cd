"""What a forward pass reads, packed: the same numbers as tensor by tensor, padding that is nothing, tokens in place."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ScheduledSequence
from engine.protocol import SamplingParams
from engine.step_inputs import StepInputs, pack_step, resolve_tokens
from kernels.metadata import AttentionMetadata

BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def sequence(name: str, start: int, new: int, *, sample: bool = True, takes_last: bool = False) -> ScheduledSequence:
    """Its tokens are 100, 101, …; its blocks descend, so that a position is not its slot."""
    end = start + new
    blocks = array("i", range(60, 60 - -(-end // BLOCK_SIZE), -1))
    token_ids = list(range(100, 100 + end - takes_last))
    return ScheduledSequence(name, token_ids, start, new, blocks, GREEDY, 0, 1, sample, takes_last)


def inputs_of(
    rows: list[ScheduledSequence], before: dict[str, int] | None = None, pad_to: int | None = None
) -> StepInputs:
    packed = pack_step(rows, BLOCK_SIZE, before or {}, pad_to)
    return StepInputs.of(packed.buffer, packed.shape, packed.plan, BLOCK_SIZE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.booleans()), max_size=6))
def test_a_packed_step_holds_what_separate_tensors_would(parts: list[tuple[int, int, bool]]) -> None:
    rows = [sequence(str(i), start, new, sample=sample) for i, (start, new, sample) in enumerate(parts)]
    inputs = inputs_of(rows)
    expected = AttentionMetadata.build(
        [row.block_table for row in rows],
        [row.num_computed for row in rows],
        [row.num_new for row in rows],
        BLOCK_SIZE,
        "cpu",
    )
    width = expected.block_table.shape[1]
    assert torch.equal(inputs.metadata.block_table[:, :width], expected.block_table)
    assert not inputs.metadata.block_table[:, width:].any()
    for name in ("slot_mapping", "cu_seqlens_q", "seq_lens"):
        ours, theirs = getattr(inputs.metadata, name), getattr(expected, name)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
    for name in ("host_block_tables", "host_query_lens", "host_seq_lens", "block_size"):
        assert getattr(inputs.metadata, name) == getattr(expected, name)
    assert inputs.input_ids.tolist() == [t for row in rows for t in row.token_ids[row.num_computed : row.end]]
    assert inputs.positions.tolist() == [p for row in rows for p in range(row.num_computed, row.end)]
    ends = expected.cu_seqlens_q[1:].tolist()
    assert inputs.logits_rows.tolist() == [end - 1 for row, end in zip(rows, ends, strict=True) if row.sample]
    assert inputs.sources is None


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_array_begins_where_a_kernel_can_rely_on_it(count: int) -> None:
    """Triton compiles a kernel for whether a pointer is a multiple of 16 bytes, and a stride of 16 elements: seconds,
    in the middle of serving, whenever a step has another number of tokens."""
    rows = [sequence(str(i), 3 * i, 1 + i % 3) for i in range(count)]
    inputs = inputs_of(rows)
    base = inputs.input_ids.data_ptr()
    metadata = inputs.metadata
    for tensor in (metadata.slot_mapping, metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_table):
        assert (tensor.data_ptr() - base) % 16 == 0
    assert metadata.block_table.stride(0) % 16 == 0
    assert metadata.block_table.is_contiguous()


def test_padded_rows_have_no_slot_and_padded_sequences_no_new_token() -> None:
    """A padded row that wrote would write into whatever block its table named last."""
    inputs = inputs_of([sequence("a", 5, 1), sequence("b", 2, 1)], pad_to=4)
    assert inputs.metadata.slot_mapping.tolist()[2:] == [-1, -1]
    assert inputs.metadata.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2]
    assert inputs.metadata.seq_lens.tolist() == [6, 3, 0, 0]
    assert inputs.metadata.block_table[:, :3].tolist() == [[60, 59, 0], [60, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert inputs.logits_rows.tolist() == [0, 1, 2, 3]
    assert inputs.input_ids.tolist() == [105, 102, 0, 0]


@pytest.mark.parametrize("pad_to", [None, 4])
def test_a_token_that_is_still_on_the_device_is_taken_from_there(pad_to: int | None) -> None:
    rows = [sequence("known", 5, 1), sequence("b", 2, 1, takes_last=True), sequence("c", 7, 1, takes_last=True)]
    inputs = inputs_of(rows, {"c": 0, "gone": 1, "b": 2}, pad_to)
    resolved = resolve_tokens(inputs, torch.tensor([70, 71, 72, 73]))
    assert resolved.tolist()[:3] == [105, 72, 70]
    assert resolved.tolist()[3:] == ([0] if pad_to else [])


def test_a_prompt_whose_last_token_is_still_on_the_device() -> None:
    """After a preemption: prompt and output are computed again, while the newest token is not known."""
    inputs = inputs_of([sequence("a", 4, 3, takes_last=True)], {"a": 1})
    assert resolve_tokens(inputs, torch.tensor([70, 71])).tolist() == [104, 105, 71]
