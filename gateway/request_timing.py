"""When the tokens of a request arrived: measured at the first token, whether or not the client sees it as a stream."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from engine.protocol import Delta


class RequestTiming:
    """Of all choices of one HTTP request. Seconds on the monotonic clock."""

    __slots__ = (
        "_last",
        "_started",
        "intervals",
        "prepare_seconds",
        "queue_seconds",
        "retrieval",
        "time_to_first_token",
    )

    def __init__(self, started: float | None = None) -> None:
        self._started = time.monotonic() if started is None else started
        self._last: dict[str, tuple[float, int]] = {}  # of a choice: when, and how many tokens there were
        self.time_to_first_token: float | None = None
        self.intervals: list[float] = []  # between the tokens of one choice
        self.prepare_seconds: float | None = None
        self.queue_seconds: float | None = None
        self.retrieval: tuple[float, float] | None = None  # from when to when, in seconds since the request's arrival

    @contextmanager
    def retrieving(self) -> Generator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.retrieval = (begin - self._started, time.monotonic() - self._started)

    def submitted(self) -> None:
        """The prompt is ready and goes to the engine."""
        self.prepare_seconds = time.monotonic() - self._started

    def arrived(self, delta: Delta, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        if delta.queue_seconds is not None and self.queue_seconds is None:
            # Of the first choice: the prompt is counted once, however many choices there are.
            self.queue_seconds = delta.queue_seconds
        if not delta.num_output_tokens:
            return
        if self.time_to_first_token is None:
            self.time_to_first_token = now - self._started
        then, count = self._last.get(delta.request_id, (now, 0))
        if count and (num_new := delta.num_output_tokens - count) > 0:
            # Tokens that arrived together share the wait.
            self.intervals.extend([(now - then) / num_new] * num_new)
        self._last[delta.request_id] = (now, delta.num_output_tokens)
