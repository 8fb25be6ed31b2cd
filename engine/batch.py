"""What the scheduler hands to the model runner: plain numbers, no tensors."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.protocol import SamplingParams


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step.

        token_ids       t0 ──────────────── tN                     all tokens known so far (prompt + output)
        in the cache    [0, num_computed)
        this step                [num_computed, num_computed + num_new)
    """

    request_id: str
    token_ids: list[int]  # the request's own list: read, never changed
    num_computed: int
    num_new: int
    block_table: array[int]  # 'i', block ids; covers at least num_computed + num_new slots
    sampling: SamplingParams
    seed: int  # of this request; with the token's position it fixes the draw
    num_prompt_tokens: int
    sample: bool  # whether the last new token's logits are sampled (False in the middle of a prefill)

    @property
    def end(self) -> int:
        return self.num_computed + self.num_new


@dataclass(slots=True)
class BlockCopy:
    """Copy-on-write: the first `num_slots` token slots of block `src`, all layers, into `dst`, before the step."""

    src: int
    dst: int
    num_slots: int


@dataclass(slots=True)
class SchedulerOutput:
    sequences: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])  # done first, in this order
