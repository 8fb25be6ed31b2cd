"""The running choices of one HTTP request, as one stream of deltas that anybody may fail.

    engine.generate(choice 0) ─ pump task ─┐
    engine.generate(choice 1) ─ pump task ─┼─► pending: {choice: delta} ─► updates() ─► the response
                        fail(error) ───────┘   (disconnect, drain deadline)

A client that reads slowly never makes this grow past one delta a choice: a delta that is not yet fetched is
merged with the next. What ends a request from outside comes through `fail`, never by cancelling the response's
task: so a response can still say what happened, and every engine request is closed in one place, `__aexit__`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import NamedTuple, Self

import msgspec

from engine.client import with_account_of
from engine.errors import EngineUnavailableError, RadixgateError
from engine.protocol import Delta, Submit
from gateway.engine_port import Engine
from gateway.request_timing import RequestTiming

logger = logging.getLogger(__name__)


class ClientDisconnectedError(Exception):
    """The client is gone: nobody reads an answer any more."""


class Update(NamedTuple):
    choice: int
    delta: Delta


class Generation:
    """An async context manager: leaving it aborts every choice that has not finished, and only those."""

    def __init__(self, engine: Engine, submits: Sequence[Submit], timing: RequestTiming | None = None) -> None:
        self._engine = engine
        self._timing = timing or RequestTiming()
        self._submits = submits
        self._pumps: list[asyncio.Task[None]] = []
        self._pending: dict[int, Delta] = {}
        self._finished: set[int] = set()
        self._ready = asyncio.Event()
        self._error: RadixgateError | ClientDisconnectedError | None = None

    async def __aenter__(self) -> Self:
        self._timing.submitted()
        for choice, submit in enumerate(self._submits):
            pump = asyncio.create_task(self._pump(choice, submit))
            pump.add_done_callback(self._pump_ended)
            self._pumps.append(pump)
        return self

    async def __aexit__(self, *_: object) -> None:
        for choice, pump in enumerate(self._pumps):
            # A finished choice's generator is about to end by itself; closing it early could read as an abort.
            if choice not in self._finished:
                pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def fail(self, error: RadixgateError | ClientDisconnectedError) -> None:
        """`updates` raises `error` once it has handed out what was already there. The first error counts."""
        self._error = self._error or error
        self._ready.set()

    async def updates(self) -> AsyncIterator[Update]:
        """Every choice's deltas until all have finished."""
        unfinished = set(range(len(self._submits)))
        while unfinished:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, {}
            for choice, delta in pending.items():
                if delta.finish_reason is not None:
                    unfinished.discard(choice)
                yield Update(choice, delta)
            if self._error is not None and unfinished:
                raise self._error

    async def _pump(self, choice: int, submit: Submit) -> None:
        async with aclosing(self._engine.generate(submit)) as deltas:
            async for delta in deltas:
                self._timing.arrived(delta)
                earlier = self._pending.get(choice)
                self._pending[choice] = delta if earlier is None else merge(earlier, delta)
                if delta.finish_reason is not None:
                    self._finished.add(choice)
                self._ready.set()
        if choice not in self._finished:
            raise EngineUnavailableError("The engine ended this request without a finish reason.")

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():
            return
        error = pump.exception()
        if isinstance(error, RadixgateError):
            self.fail(error)
        elif error is not None:
            logger.error("the stream of a request failed", exc_info=error)
            self.fail(RadixgateError(f"unexpected {type(error).__name__}"))


def merge(earlier: Delta, later: Delta) -> Delta:
    """Two deltas of one request as one."""
    merged = with_account_of(earlier, later) if earlier.account is not None else later
    return msgspec.structs.replace(merged, text=earlier.text + later.text, tokens=earlier.tokens + later.tokens)
