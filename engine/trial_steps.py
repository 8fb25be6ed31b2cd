"""Steps that a GPU runs before its first request: to see what the largest one takes, and to have every kernel compiled.

    largest     as many sequences and tokens as a step may have            its peak of memory is what KV cannot have
    short       a few new tokens each: the end of a chunk                  wide decode tiles
    sharing     one token each, over one and the same prefix               the shared pass, and decode beside it

A kernel that is compiled in the middle of serving holds everyone up for seconds. The others (prefill, plain decode) are
compiled by the largest step and by the capture of graphs. What these steps write is nobody's: no block is in use yet.
"""

from __future__ import annotations

from array import array

from engine.batch import ScheduledSequence, SchedulerOutput
from engine.protocol import MAX_TOP_LOGPROBS, SamplingParams
from engine.settings import EngineSettings

_SHORT = 8  # new tokens: the most that decode kernels take
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
    short = min(_SHORT, settings.max_num_batched_tokens, max_model_len)
    length = min(max_model_len, num_blocks * settings.block_size)
    table = array("i", range(-(-length // settings.block_size)))
    return [
        SchedulerOutput([_sequence(0, 0, short, table)]),
        SchedulerOutput([_sequence(index, length - 1, 1, table) for index in range(settings.max_num_seqs)]),
    ]


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
