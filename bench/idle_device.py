"""A device that computes nothing, at once: what is left of a step is our own bookkeeping."""

from __future__ import annotations

from engine.batch import SchedulerOutput, TransferReport


class IdleDevice:
    """A runner without a model and without tiers."""

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        return [1 if sequence.sample else None for sequence in output.sequences]

    def transfer_report(self) -> TransferReport:
        return TransferReport(num_done=0, fetched_bytes=0, fetch_seconds=0.0, offload_seconds=0.0)

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        raise NotImplementedError("it holds no content")
