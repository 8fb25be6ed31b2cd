"""A step that has been given to the device and has not ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from engine.batch import ScheduledSequence, SchedulerOutput, StepResult
from engine.request import Request


class PendingStep(Protocol):
    def wait(self) -> StepResult:
        """Returns when the device is done with the step; raises what went wrong in it."""
        ...


@dataclass(slots=True)
class StepInFlight:
    """`requests`: whose sequences they are, in order. Each may have ended, or begun anew, when the step ends."""

    output: SchedulerOutput
    requests: list[Request]
    pending: PendingStep
    launched_at: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_new for sequence in self.output.sequences)

    @property
    def ends_a_prefill(self) -> bool:
        return any(sequence.sample and sequence.num_new > 1 for sequence in self.output.sequences)

    def with_requests(self) -> list[tuple[ScheduledSequence, Request]]:
        return list(zip(self.output.sequences, self.requests, strict=True))
