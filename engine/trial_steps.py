"""Steps that a GPU runs before its first request: to see what the largest one takes, and to have every kernel compiled.

    largest     as many sequences and tokens as a step may have      its peak of memory is what KV cannot have

    warm-up, for each number of sequences that kernels are compiled for (up to 32, 256, 2,048: `scan_size`):
    plain       one token each, nothing before it                    narrow decode tiles
    short       a few new tokens of one of them: a chunk's end       wide decode tiles
    prefill     more of one of them                                  prefill tiles
    sharing     one token each, over one and the same prefix         the shared pass, and narrow decode beside it
    both        a few new tokens beside sequences that share         the shared pass, and wide decode beside it

    copy        a copied block and no sequence                       copy-on-write

A kernel that is compiled in the middle of serving holds everyone up for seconds. The warm-up has all of them, whatever
the largest step and the capture of graphs compile as well: with `engine.enforce_eager` nothing is captured, and the
largest step of 256 sequences has four tokens each. What these steps write is nobody's: no block is in use yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from engine.batch import BlockCopy, ScheduledSequence, SchedulerOutput
from engine.protocol import MAX_TOP_LOGPROBS, SamplingParams
from engine.settings import EngineSettings

_SHORT = 8  # new tokens: the most that decode kernels take
_SCANS = (32, 256, 2048)  # `kernels.heuristics.scan_size`, which a machine without Triton does not have
_SAMPLING = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    num_logprobs=MAX_TOP_LOGPROBS,
)


def largest_step(settings: EngineSettings) -> SchedulerOutput:
    """As many sequences and tokens as one step may have, every sequence sampled with all that may be asked for."""
    num_seqs = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    length, remainder = divmod(settings.max_num_batched_tokens, num_seqs)
    sequences: list[ScheduledSequence] = []
    next_block = 0
    for index in range(num_seqs):
        num_new = length + (index < remainder)
        end_block = next_block + -(-num_new // settings.block_size)
        sequences.append(_sequence(index, 0, num_new, array("i", range(next_block, end_block))))
        next_block = end_block
    return SchedulerOutput(sequences)


def num_blocks_of(step: SchedulerOutput) -> int:
    """Blocks that a cache for this step has."""
    return 1 + max(block for sequence in step.sequences for block in sequence.block_table)


def warm_up_steps(settings: EngineSettings, num_blocks: int, max_model_len: int) -> list[SchedulerOutput]:
    """In no block but the pool's, and no longer than a sequence may be."""
    steps = [SchedulerOutput([], [BlockCopy(0, 1, 1)])]
    length = min(max_model_len, num_blocks * settings.block_size)
    table = array("i", range(-(-length // settings.block_size)))
    fewest = 1
    for scan in _SCANS:
        if fewest > settings.max_num_seqs:
            break
        most = min(scan, settings.max_num_seqs)
        steps += _steps_of_a_scan(fewest, most, length, table, settings.max_num_batched_tokens)
        fewest = scan + 1
    return steps


def _steps_of_a_scan(fewest: int, most: int, length: int, table: array[int], budget: int) -> Iterator[SchedulerOutput]:
    """Few sequences leave most of the budget to one of them; many have the best reason to share a prefix."""

    def ones(count: int, num_computed: int) -> list[ScheduledSequence]:
        return [_sequence(index, num_computed, 1, table) for index in range(count)]

    def beside(others: int, num_new: int, num_computed: int) -> SchedulerOutput:
        """`num_new` of a sequence on nothing, or as many as there may be, and one each of others."""
        num_new = min(num_new, budget - others, length)
        return SchedulerOutput([*ones(others, num_computed), _sequence(others, 0, num_new, table)])

    for num_new in (1, _SHORT, _SHORT + 1):
        yield beside(fewest - 1, num_new, 0)
    yield SchedulerOutput(ones(most, length - 1))
    yield beside(most - 1, _SHORT, length - 1)


def _sequence(index: int, num_computed: int, num_new: int, block_table: array[int]) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=f"trial-{index}",
        token_ids=[0] * (num_computed + num_new),
        num_computed=num_computed,
        num_new=num_new,
        block_table=block_table,
        sampling=_SAMPLING,
        seed=index,
        num_prompt_tokens=num_computed + num_new,
        sample=True,
    )
