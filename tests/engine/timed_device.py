"""A device that takes as long as a model would, on a clock that only it moves."""

from __future__ import annotations

import msgspec

from bench.idle_device import EndedStep, IdleDevice
from engine.batch import SchedulerOutput
from engine.engine import LLMEngine
from engine.settings import EngineSettings
from tests.engine.harness import engine_info


class TimedDevice(IdleDevice):
    """A step takes the reading of the weights, and then so long a token: two CPU cores and the default model."""

    STEP_SECONDS, TOKEN_SECONDS = 0.02, 0.00095

    def __init__(self) -> None:
        self.now = 0.0
        self.outputs: list[SchedulerOutput] = []

    def launch(self, output: SchedulerOutput) -> EndedStep:
        self.outputs.append(output)
        num_tokens = sum(sequence.num_new for sequence in output.sequences)
        self.now += self.STEP_SECONDS + self.TOKEN_SECONDS * num_tokens
        return super().launch(output)

    def clock(self) -> float:
        return self.now

    def prompt_tokens(self) -> list[dict[str, int]]:
        """What each step computed of prompts, by request."""
        return [
            {s.request_id: s.num_new for s in output.sequences if s.num_computed < s.num_prompt_tokens}
            for output in self.outputs
        ]


def timed_engine(num_tokens: int, settings: EngineSettings, max_model_len: int = 4096) -> tuple[LLMEngine, TimedDevice]:
    device = TimedDevice()
    info = engine_info(num_tokens // settings.block_size, settings.block_size, max_model_len)
    info = msgspec.structs.replace(info, vocab_size=4096)
    return LLMEngine(info, settings, device, clock=device.clock), device
