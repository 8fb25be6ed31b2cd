"""A device that computes nothing, at once: what is left of a step is our own bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import SchedulerOutput, StepResult, TransferReport


@dataclass(frozen=True, slots=True)
class EndedStep:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class IdleDevice:
    """A runner without a model and without tiers."""

    runs_ahead = False

    def launch(self, output: SchedulerOutput) -> EndedStep:
        return EndedStep(StepResult([1 if sequence.sample else None for sequence in output.sequences]))

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self.launch(output).wait()

    def transfer_report(self) -> TransferReport:
        return TransferReport(num_done=0, fetched_bytes=0, fetch_seconds=0.0, offload_seconds=0.0)

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        raise NotImplementedError("it holds no content")
