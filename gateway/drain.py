"""Ending well: no new requests, the running ones finish, and at the deadline the rest are told so.

open ──begin()──► draining: `admit` refuses ──► all done, or the deadline: `fail` on the rest ──► they end ──► return
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from engine.errors import RadixgateError, ShuttingDownError

# How long the requests that were failed may take to say so to their clients, in seconds.
_GRACE = 5.0

Fail = Callable[[RadixgateError], None]


class Drain:
    """Tracks the running requests of one server. Used from its event loop only."""

    def __init__(self) -> None:
        self._active: set[Fail] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cut = asyncio.Event()
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def is_cut(self) -> bool:
        return self._cut.is_set()

    @property
    def num_active(self) -> int:
        return len(self._active)

    @contextmanager
    def admit(self, fail: Fail) -> Generator[None]:
        """For as long as a request runs. `fail` must make it end soon, with the error it is given.

        Raises `ShuttingDownError` while draining.
        """
        if self._draining:
            raise ShuttingDownError("The server is shutting down.")
        self._active.add(fail)
        self._idle.clear()
        try:
            yield
        finally:
            self._active.discard(fail)
            if not self._active:
                self._idle.set()

    def begin(self) -> None:
        self._draining = True

    def cut(self) -> None:
        """Ends a running `drain` now, as if its deadline had come."""
        self._cut.set()

    async def drain(self, deadline: float) -> int:
        """Waits up to `deadline` seconds for the running requests, fails the rest, waits until they have ended.

        The number of requests that had to be failed.
        """
        self.begin()
        waits = [asyncio.create_task(event.wait()) for event in (self._idle, self._cut)]
        try:
            await asyncio.wait(waits, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        failed = list(self._active)
        for fail in failed:
            fail(ShuttingDownError("The server is shutting down; this request was not finished in time."))
        with suppress(TimeoutError):  # a client that does not read its last bytes cannot keep the server alive
            async with asyncio.timeout(_GRACE):
                await self._idle.wait()
        return len(failed)
