"""Captured decode steps, with a capture that any device can do: a graph repeats the work over its own inputs."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.batch import ScheduledSequence, SchedulerOutput
from engine.decode_graphs import CapturedWork, DecodeGraphs, graph_sizes
from engine.kv_cache import allocate_kv_cache
from engine.load_progress import no_progress
from engine.model_loader import LoadedModel
from engine.model_runner import ModelRunner
from engine.protocol import SamplingParams
from engine.sampler import Sampler
from kernels import reference
from kernels.dispatch import AttentionKernels, select_kernels
from kernels.metadata import AttentionMetadata, StepPlan
from tests.engine.test_model_runner import load_tiny, random_prompt
from tests.engine.tiny_models import write_tiny_model

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 4, 48, 6
CPU = torch.device("cpu")


def tensors_only(kernels: AttentionKernels) -> AttentionKernels:
    """The reference, from tensors alone: in a replay the host's numbers are those of the capture, and wrong."""

    def attention(query: torch.Tensor, kv_cache: torch.Tensor, layer: int, metadata: AttentionMetadata, **rest: object):
        ends = metadata.cu_seqlens_q.tolist()
        real = replace(
            metadata,
            host_query_lens=[end - start for start, end in pairwise(ends)],
            host_seq_lens=metadata.seq_lens.tolist(),
            host_block_tables=[],
        )
        output = torch.full_like(query, 1e4)  # rows that no sequence owns may hold anything
        rows = ends[-1]
        output[:rows] = reference.paged_attention(query[:rows], kv_cache, layer, real, **rest)  # type: ignore[arg-type]
        return output

    return replace(kernels, paged_attention=attention)


class Repeat:
    """Does the work again over the same inputs, and leaves its result where the first one lay."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_replays = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> CapturedWork:
        output = work().clone()
        self.sizes.append(output.shape[0])

        def replay() -> None:
            self.num_replays += 1
            output.copy_(work())

        return CapturedWork(replay, output)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(write_tiny_model("gemma2", tmp_path_factory.mktemp("model")), BLOCK_SIZE)


def runner_of(loaded: LoadedModel) -> ModelRunner:
    kv_cache = allocate_kv_cache(loaded.kv_layout, NUM_BLOCKS, CPU).fill_(float("nan"))
    return ModelRunner(loaded, kv_cache, tensors_only(select_kernels(CPU, "reference")), Sampler(), MAX_SEQS)


def graphed(runner: ModelRunner, sizes: list[int], sharing: Callable[[], AttentionKernels] | None = None) -> Repeat:
    plain = tensors_only(select_kernels(CPU, "reference"))
    graphs = DecodeGraphs(runner.forward, plain, sharing, BLOCK_SIZE, CPU)
    repeat = Repeat()
    graphs.capture(sizes, table_width=NUM_BLOCKS // MAX_SEQS, capturer=repeat, progress=no_progress)
    runner.attach_graphs(graphs)
    return repeat


def prefilled(runner: ModelRunner, lengths: list[int]) -> list[ScheduledSequence]:
    """One sequence a length, its prompt computed and its first token drawn."""
    width = NUM_BLOCKS // MAX_SEQS
    rows: list[ScheduledSequence] = []
    for index, length in enumerate(lengths):
        sampling = SamplingParams(max_tokens=64, temperature=0.0 if index % 2 else 0.8)
        table = array("i", range(NUM_BLOCKS - 1 - index * width, NUM_BLOCKS - 1 - (index + 1) * width, -1))
        prompt = random_prompt(length, seed=index)
        row = ScheduledSequence(f"r{index}", prompt, 0, length, table, sampling, index, length, True)
        rows.append(row)
        (token,) = runner.execute(SchedulerOutput([row])).token_ids
        assert token is not None
        row.token_ids.append(token)
    return rows


def decode(runner: ModelRunner, rows: list[ScheduledSequence], steps: int) -> list[list[int]]:
    """The last sequence leaves in the middle: a smaller batch, over what a larger one left in the buffers."""
    for step in range(steps):
        batch = [replace(row, num_computed=len(row.token_ids) - 1, num_new=1) for row in rows]
        batch = batch[:-1] if step >= steps // 2 and len(rows) > 1 else batch
        for row, token in zip(batch, runner.execute(SchedulerOutput(batch)).token_ids, strict=True):
            assert token is not None
            row.token_ids.append(token)
    return [row.token_ids for row in rows]


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5])
def test_padded_steps_give_the_tokens_and_the_cache_of_unpadded_ones(loaded: LoadedModel, num_seqs: int) -> None:
    lengths = [5, 16, 1, 9, 12][:num_seqs]
    plain, padded = runner_of(loaded), runner_of(loaded)
    repeat = graphed(padded, [2, 4, MAX_SEQS])
    assert torch.isnan(padded.kv_cache).all(), "capturing writes nowhere"
    expected = decode(plain, prefilled(plain, lengths), 8)
    assert decode(padded, prefilled(padded, lengths), 8) == expected
    # Prefills of one token are decodes, too.
    assert repeat.num_replays == 8 + lengths.count(1)
    assert torch.equal(torch.isnan(padded.kv_cache), torch.isnan(plain.kv_cache)), "padded rows write nowhere"
    torch.testing.assert_close(padded.kv_cache, plain.kv_cache, equal_nan=True)


def test_captured_largest_first() -> None:
    """A smaller graph then finds its memory in the pool; the other way round each needs more."""
    repeat = Repeat()
    plain = select_kernels(CPU, "reference")
    graphs = DecodeGraphs(
        lambda inputs, kernels: torch.zeros(inputs.input_ids.shape[0], 3), plain, None, BLOCK_SIZE, CPU
    )
    stages: list[float] = []
    graphs.capture([1, 4, 2], 3, repeat, lambda stage, fraction: stages.append(fraction))
    assert repeat.sizes == [4, 2, 1]
    assert graphs.sizes == [1, 2, 4]
    assert (stages[0], stages[-1]) == (0.0, 1.0)
    assert stages == sorted(stages)


def test_what_was_not_captured_runs_as_ever(loaded: LoadedModel) -> None:
    """More sequences than the largest graph, and a prefill in the step."""
    plain, padded = runner_of(loaded), runner_of(loaded)
    repeat = graphed(padded, [1, 2])
    lengths = [5, 9, 7]
    ours, theirs = prefilled(padded, lengths), prefilled(plain, lengths)
    assert decode(padded, ours, 2)[:2] == decode(plain, theirs, 2)[:2]
    assert repeat.num_replays == 1  # the step after the third has left
    before = repeat.num_replays
    chunk = ScheduledSequence("new", random_prompt(6, 9), 0, 6, array("i", [0, 1]), ours[0].sampling, 0, 6, True)
    batch = [replace(ours[0], num_computed=len(ours[0].token_ids) - 1, num_new=1), chunk]
    assert padded.execute(SchedulerOutput(batch)).token_ids == plain.execute(SchedulerOutput(batch)).token_ids
    assert repeat.num_replays == before


class SharingKernels:
    """Sets for steps that share: they see the host's numbers before a replay, and in it only tensors."""

    def __init__(self, pays: Callable[[StepPlan], bool]) -> None:
        self._pays = pays
        self.staged: list[tuple[int, list[int]]] = []  # which set, and the lengths of the step that it was asked for
        self.used: list[int] = []  # the set of each attention that ran
        self.num_sets = 0

    def __call__(self) -> AttentionKernels:
        number, self.num_sets = self.num_sets, self.num_sets + 1
        plain = tensors_only(select_kernels(CPU, "reference"))

        def stage(plan: StepPlan, block_size: int) -> bool:
            assert block_size == BLOCK_SIZE
            self.staged.append((number, plan.seq_lens))
            return self._pays(plan)

        def attention(*arguments: Any, **rest: Any) -> torch.Tensor:
            self.used.append(number)
            return plain.paged_attention(*arguments, **rest)

        return replace(plain, paged_attention=attention, stage_prefixes=stage)


def test_a_step_that_shares_a_prefix_replays_the_graph_that_shares(loaded: LoadedModel) -> None:
    """Over the same inputs as the other one; a sequence alone has nobody to share with, and no such graph."""
    plain, runner = runner_of(loaded), runner_of(loaded)
    sharing = SharingKernels(lambda plan: len(plan.seq_lens) == 2)
    repeat = graphed(runner, [1, 2, 4], sharing)
    assert sharing.num_sets == 2  # of 4 and of 2: the largest comes first
    lengths = [5, 9, 7]
    expected = decode(plain, prefilled(plain, lengths), 4)
    ours = prefilled(runner, lengths)
    sharing.used.clear()
    assert decode(runner, ours, 4) == expected
    # Two steps of three sequences: asked, told no; then two of two.
    assert sharing.staged == [(0, [6, 10, 8]), (0, [7, 11, 9]), (1, [8, 12]), (1, [9, 13])]
    assert sharing.used == [1] * 2 * loaded.num_layers
    assert repeat.num_replays == 4
    assert repeat.sizes == [4, 4, 2, 2, 1]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (32, [1, 2, 4, 8, 16, 24, 32]), (33, [1, 2, 4, 8, 16, 24, 32, 33])],
)
def test_sizes_end_at_the_most_sequences_of_a_step(most: int, expected: list[int]) -> None:
    assert graph_sizes(most) == expected


def test_padding_wastes_an_eighth_of_a_large_batch_at_most() -> None:
    sizes = graph_sizes(512)
    for count in range(64, 513):
        size = next(size for size in sizes if size >= count)
        assert size - count <= count / 8
    assert len(sizes) < 50
