"""A rank of a model that several processes compute together: `python -m engine.rank_worker --rank N --port P`.

Started by rank 0 (`engine/ranks.py`), with its settings in the environment. Loads its share, and then does what rank 0
does, step by step, until it is told to stop, or rank 0 is gone.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

from engine.build import load_share, rank_device
from engine.load_progress import no_progress
from engine.model_runner import build_model_runner, configure_threads
from engine.ranks import join_ranks
from engine.settings import load_settings

logger = logging.getLogger("engine.rank")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.rank_worker", description="One rank of an engine.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True, help="of rank 0's store")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group: rank 0 says when it is over
        signal.signal(number, signal.SIG_IGN)
    settings = load_settings(None, os.environ)
    logging.basicConfig(level=settings.server.log_level.upper())
    configure_threads(settings.engine.threads, settings.engine.tensor_parallel_size)
    device = rank_device(settings.engine, arguments.rank)
    group = join_ranks(arguments.rank, settings.engine.tensor_parallel_size, arguments.port, device)
    loaded = load_share(settings, device, no_progress, group)
    runner = build_model_runner(loaded, settings.engine, no_progress, group)
    try:
        while (output := group.receive()) is not None:
            runner.launch(output)
    except RuntimeError as error:
        logger.error("rank %d ends: rank 0 is gone (%s)", group.rank, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
