"""An engine's process without a model: the whole of engine/ over the fake device, where `python -m engine` is expected.

Started by the environment that a supervisor gives its children, and ended by SIGTERM, as the real one.
"""

from __future__ import annotations

import os
import signal
import time

import msgspec

from engine.batch import SchedulerOutput
from engine.engine import LLMEngine, new_incarnation
from engine.measured_engine import MeasuredEngine
from engine.server import EngineServer
from engine.settings import engine_endpoint, load_settings
from tests.engine.fake_runner import FakeRunner, FakeStep
from tests.engine.harness import engine_info
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.gateway.chat_templates import CHATML, SPECIAL_TOKENS

NUM_BLOCKS = 2048
BLOCK_SIZE = 16
STEP_SECONDS = 0.002


class SlowRunner(FakeRunner):
    """Takes its time, so that requests overlap."""

    def launch(self, output: SchedulerOutput) -> FakeStep:
        time.sleep(STEP_SECONDS)
        return super().launch(output)


def main() -> None:
    settings = load_settings(None, os.environ)
    tokenizer = byte_tokenizer()
    info = msgspec.structs.replace(
        engine_info(NUM_BLOCKS, BLOCK_SIZE, 8192),
        incarnation=new_incarnation(),
        tokenizer_json=tokenizer.to_str().encode(),
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(tokenizer.token_to_id("<|im_end|>"),),
        chat_template=CHATML,
        special_tokens=SPECIAL_TOKENS,
    )
    limits = msgspec.structs.replace(settings.engine, block_size=BLOCK_SIZE)
    engine = LLMEngine(info, limits, SlowRunner(NUM_BLOCKS, BLOCK_SIZE, vocab_size=256))
    server = EngineServer(
        MeasuredEngine(engine), engine_endpoint(settings), drain_seconds=settings.server.drain_seconds
    )
    signal.signal(signal.SIGTERM, lambda _number, _frame: server.stop())
    server.serve()


if __name__ == "__main__":
    main()
