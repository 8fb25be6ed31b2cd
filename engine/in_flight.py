"""A step that has been given to the device and has not ended."""

from __future__ import annotations

from dataclasses import dataclass
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
    launched_at: float

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_new for sequence in self.output.sequences)

    def with_requests(self) -> list[tuple[ScheduledSequence, Request]]:
        return list(zip(self.output.sequences, self.requests, strict=True))
