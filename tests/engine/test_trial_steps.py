from __future__ import annotations

import pytest

from engine.settings import EngineSettings
from engine.trial_steps import largest_step, num_blocks_of, warm_up_steps
from kernels.heuristics import KEY_ALIGNMENT
from kernels.metadata import StepPlan
from kernels.shared_prefix import find_groups
from kernels.tile_table import MIN_SHARED_SAVING

KEY_BYTES = 2 * 8 * 128 * 2  # of a layer: a model of 8 billion parameters


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(32, 1024), (1, 512), (7, 100), (64, 80)])
def test_the_largest_step_fills_the_budget_and_shares_no_block(max_num_seqs: int, budget: int) -> None:
    settings = EngineSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=16)
    step = largest_step(settings)
    assert sum(sequence.num_new for sequence in step.sequences) == budget
    assert len(step.sequences) == max_num_seqs
    blocks = [block for sequence in step.sequences for block in sequence.block_table]
    assert sorted(blocks) == list(range(num_blocks_of(step)))


@pytest.mark.parametrize("max_num_seqs", [1, 32, 300])
@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(4096, 32768), (4096, 5000), (40, 600), (8, 20), (8, 1)])
def test_warm_up_steps_stay_within_pool_context_and_budget(
    num_blocks: int, max_model_len: int, max_num_seqs: int
) -> None:
    settings = EngineSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + 7, block_size=16)
    for step in warm_up_steps(settings, num_blocks, max_model_len):
        assert len(step.sequences) <= max_num_seqs
        assert sum(sequence.num_new for sequence in step.sequences) <= max_num_seqs + 7
        for sequence in step.sequences:
            assert 0 < sequence.end <= max_model_len
            assert sequence.num_new > 0
            assert max(sequence.block_table) < num_blocks
            assert len(sequence.block_table) * 16 >= sequence.end
        for copy in step.copies:
            assert max(copy.src, copy.dst) < num_blocks


def test_a_prefix_that_pays_on_every_architecture_is_shared_alone_and_beside_a_chunks_end() -> None:
    """Else the shared pass is compiled when the first two requests meet on a prefix."""
    sharing: list[list[int]] = []
    for step in warm_up_steps(EngineSettings(max_num_seqs=32, block_size=16), 4096, 32768):
        rows = step.sequences
        plan = StepPlan.of([r.block_table for r in rows], [r.num_computed for r in rows], [r.num_new for r in rows], 16)
        decoding = [index for index, count in enumerate(plan.query_lens) if count == 1]
        min_saving = max(MIN_SHARED_SAVING.values()) // KEY_BYTES
        groups = find_groups(plan.block_tables, plan.seq_lens, decoding, 16, min_saving)
        if groups:
            assert plan.seq_lens[0] > KEY_ALIGNMENT
            assert groups[0].members == tuple(decoding)
            sharing.append(plan.query_lens)
    assert sharing == [[1] * 32, [1] * 31 + [8]]
