"""What ends a request from outside: its client leaves, or the server's drain has reached its deadline.

    receive: http.disconnect ─┐
    drain's deadline ─────────┴─► Interruption.fail ─► the generation that runs now, or the next one that begins

A request may have several generations, one after the other (its query is rewritten, then it is answered), and spends
time between them. It is watched once, for all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress

from litestar.types import Receive

from engine.errors import RadixgateError
from gateway.drain import Drain
from gateway.generation import ClientDisconnectedError, Generation


class Interruption:
    def __init__(self) -> None:
        self._error: RadixgateError | ClientDisconnectedError | None = None
        self._generation: Generation | None = None

    def fail(self, error: RadixgateError | ClientDisconnectedError) -> None:
        """The first error counts."""
        self._error = self._error or error
        if self._generation is not None:
            self._generation.fail(self._error)

    def check(self) -> None:
        """Where no generation runs. Raises what has ended the request meanwhile."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def reaches(self, generation: Generation) -> Generator[None]:
        """For as long as `generation` is the one that runs."""
        self._generation = generation
        if self._error is not None:
            generation.fail(self._error)
        try:
            yield
        finally:
            self._generation = None


@asynccontextmanager
async def interruptible(receive: Receive, drain: Drain) -> AsyncGenerator[Interruption]:
    """The body has been read, so the next thing that a client can say is that it leaves.

    Raises `ShuttingDownError` while draining.
    """
    interruption = Interruption()

    async def watch() -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
        interruption.fail(ClientDisconnectedError())

    with drain.admit(interruption.fail):
        watcher = asyncio.create_task(watch())
        try:
            yield interruption
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
