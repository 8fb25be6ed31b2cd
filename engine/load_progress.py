"""How far a load is: a callable that is told a stage and a fraction, and transformers' bars turned into calls of it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator

from transformers.utils import logging as transformers_logging

Progress = Callable[[str, float], None]
"""Called with a stage of the load and how much of the stage is done, 0 to 1."""

_CALL_EVERY = 32  # items of a bar


def stderr_progress(stage: str, fraction: float) -> None:
    """For a terminal: one line, rewritten."""
    sys.stderr.write(f"\r\x1b[K{stage} {fraction:4.0%}" + ("\n" if fraction >= 1.0 else ""))
    sys.stderr.flush()


def no_progress(stage: str, fraction: float) -> None:
    """Shows nothing."""


class _Bar:
    """Stands in for transformers' progress bar."""

    def __init__(self, items: list[object], stage: str, progress: Progress) -> None:
        self._items = items
        self._stage = stage
        self._progress = progress

    def __iter__(self) -> Iterator[object]:
        for done, item in enumerate(self._items):
            if done % _CALL_EVERY == 0:
                self._progress(self._stage, done / len(self._items))
            yield item
        self._progress(self._stage, 1.0)


@contextlib.contextmanager
def transformers_bars(progress: Progress) -> Iterator[None]:
    """While transformers loads or writes weights, tell `progress` instead of drawing bars.

    Its GGUF reader draws with tqdm directly, which no hook reaches: what is written to stderr meanwhile is dropped.
    Log records are not: their handler holds the stream that it was made with.
    """
    target = sys.stderr

    def bar(_factory: object, args: tuple[Iterable[object], ...], kwargs: dict[str, object]) -> _Bar:
        def show(stage: str, fraction: float) -> None:
            with contextlib.redirect_stderr(target):
                progress(stage, fraction)

        return _Bar(list(args[0]), str(kwargs.get("desc", "loading")).lower(), show)

    previous = transformers_logging.set_tqdm_hook(bar)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
