"""The engine's process: `python -m engine [--config FILE]`.

    load the model ──► listen ──► serve until SIGTERM or SIGINT (drain) ──► exit 0
                                  a second signal ends the drain at once

Exit codes: 0 stopped on request; 2 the settings or the model cannot be used (starting again would not help);
anything else is a crash.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from engine.build import build_engine
from engine.errors import RadixgateError
from engine.load_progress import stderr_progress
from engine.logging_setup import configure_logging
from engine.measured_engine import MeasuredEngine
from engine.server import EngineServer, refuse_second_engine
from engine.settings import Settings, engine_endpoint, load_settings

logger = logging.getLogger("engine")

EXIT_UNUSABLE = 2
LOG_PROGRESS_EVERY = 2.0  # seconds
# Young objects are collected as ever; a full collection walks the whole prefix index: only when the engine rests.
GC_THRESHOLDS = (2_000, 20, 1_000_000_000)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine", description="The model process alone.")
    parser.add_argument("--config", type=Path, help="the TOML settings; the environment goes over it")
    try:
        settings = load_settings(parser.parse_args(argv).config, os.environ)
        configure_logging(settings.server)
        run_engine(settings)
    except RadixgateError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return EXIT_UNUSABLE
    return 0


def run_engine(settings: Settings) -> None:
    """Serves until it is told to stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_while_loading)
    endpoint = engine_endpoint(settings)
    refuse_second_engine(endpoint)  # before minutes of loading, not after
    engine = build_engine(settings, stderr_progress if sys.stderr.isatty() else LoggedProgress())
    server = EngineServer(
        MeasuredEngine(engine),
        endpoint,
        drain_seconds=settings.server.drain_seconds,
        persist_when_idle=settings.tiers.persist_when_idle,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: server.stop())
    _tame_garbage_collector()
    info = engine.info()
    logger.info(
        "ready: %s (%s on %s), %d blocks of %d tokens, context %d, at %s",
        info.model, info.dtype, info.device, info.num_blocks, info.block_size, info.max_model_len, server.endpoint,
    )  # fmt: skip
    server.serve()
    engine.close()
    gc.unfreeze()  # or native libraries report every frozen object as leaked
    logger.info("stopped")


class LoggedProgress:
    """The load as log lines, for a process whose output is no terminal: each stage, and every two seconds of it."""

    def __init__(self) -> None:
        self._stage = ""
        self._next = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        now = time.monotonic()
        if stage != self._stage or now >= self._next:
            self._stage = stage
            self._next = now + LOG_PROGRESS_EVERY
            logger.info("loading: %s %.0f%%", stage, fraction * 100)


def _exit_while_loading(number: int, _frame: FrameType | None) -> None:
    """There is nothing to drain yet."""
    logger.info("stopped by signal %d while loading", number)
    raise SystemExit(0)


def _tame_garbage_collector() -> None:
    gc.collect()
    gc.freeze()  # the model and the libraries live as long as the process
    gc.set_threshold(*GC_THRESHOLDS)


if __name__ == "__main__":
    sys.exit(main())
