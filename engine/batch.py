"""What the scheduler hands to the model runner: plain numbers, no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.protocol import SamplingParams


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step.

    token_ids       t0 ──────────────── tN                     all tokens known so far (prompt + output)
    in the cache    [0, num_computed)
    this step                [num_computed, num_computed + num_new)

    With `takes_last` the last new token is not in `token_ids` yet: the step before samples it, it lies on the device.
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
    takes_last: bool = False

    @property
    def end(self) -> int:
        return self.num_computed + self.num_new


@dataclass(slots=True)
class BlockCopy:
    """Copy-on-write: the first `num_slots` token slots of block `src`, all layers, into `dst`, before the step."""

    src: int
    dst: int
    num_slots: int


@dataclass(slots=True, frozen=True)
class BlockOffload:
    """A whole block from the device into a slot of the host slab, before anything of the step overwrites it."""

    block_id: int
    host_slot: int


@dataclass(slots=True, frozen=True)
class BlockFetch:
    """A whole block from a slot of the host slab onto the device, before the step reads it."""

    host_slot: int
    block_id: int


@dataclass(slots=True)
class SchedulerOutput:
    """Done in this order: `offloads`, `copies`, `fetches`, and then the forward pass over `sequences`.

    A block that was evicted is offloaded before anything of its new owner is written into it. The source of a copy is
    not held either: it may have been evicted in this very step, and then be the target of a fetch.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    offloads: list[BlockOffload] = field(default_factory=list[BlockOffload])
    fetches: list[BlockFetch] = field(default_factory=list[BlockFetch])

    def num_prefill_and_decode(self) -> tuple[int, int]:
        """New tokens of prompts, and of output."""
        total = sum(sequence.num_new for sequence in self.sequences)
        prefill = sum(s.num_new for s in self.sequences if s.num_computed < s.num_prompt_tokens)
        return prefill, total - prefill

    @property
    def is_empty(self) -> bool:
        return not (self.sequences or self.copies or self.offloads or self.fetches)


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Natural logarithms, of the model's own distribution (`engine/logprobs.py`)."""

    logprob: float  # of the token that was drawn
    top: tuple[tuple[int, float], ...]  # (token id, log probability), the best first


@dataclass(slots=True, frozen=True)
class StepResult:
    """What came out of a step, one entry a sequence."""

    token_ids: list[int | None]  # None: not sampled, or nothing that could be sampled
    without_logits: frozenset[int] = frozenset()  # sequences whose logits are not finite: their KV is worth nothing
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])  # of those that asked


@dataclass(slots=True, frozen=True)
class TransferReport:
    """What has become of the offloads and fetches of earlier steps."""

    num_done: int  # steps with transfers that have ended, since the start, in order
    fetched_bytes: int  # since the last report, with the time they took
    fetch_seconds: float
    offload_seconds: float  # since the last report; 0: nothing was offloaded
