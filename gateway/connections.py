"""Clients that connect and dawdle: each holds an open file, and a thousand of them hold the server.

    connected ──► head of a request ──► body ──► answer ──► (kept alive, uvicorn's own clock) ──► next head …
    └── at most HEAD_SECONDS ──┘└── BODY_SECONDS, and one more for each BYTES_PER_SECOND ──┘

uvicorn watches a connection only after its first answer. Whoever sends nothing, or a byte a minute, would be kept for
ever.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from litestar.types import ASGIApp, Receive, ReceiveMessage, Scope, Send

from engine.errors import InvalidRequestError

HEAD_SECONDS = 30.0
BODY_SECONDS = 30.0
BYTES_PER_SECOND = 16 * 1024
_MAX_FILES = 1 << 16


class Cycle(Protocol):
    response_complete: bool


class Transport(Protocol):
    def close(self) -> None: ...


class Connection(Protocol):
    """What uvicorn's HTTP protocols have in common."""

    @property
    def cycle(self) -> Cycle | None: ...
    @property
    def timeout_keep_alive_task(self) -> object | None: ...
    @property
    def transport(self) -> Transport: ...


class SilenceWatch:
    """Closes connections on which no request has begun for too long."""

    def __init__(self, clock: Callable[[], float], head_seconds: float = HEAD_SECONDS) -> None:
        self._clock = clock
        self.head_seconds = head_seconds
        self._silent_since: dict[Connection, float] = {}

    def sweep(self, connections: Iterable[Connection]) -> None:
        """Now and then, with all that are open."""
        now = self._clock()
        silent = [each for each in connections if _is_silent(each)]
        self._silent_since = {each: self._silent_since.get(each, now) for each in silent}
        for each, since in self._silent_since.items():
            if now - since >= self.head_seconds:
                each.transport.close()


def _is_silent(connection: Connection) -> bool:
    idle = connection.cycle is None or connection.cycle.response_complete
    return idle and connection.timeout_keep_alive_task is None


def with_body_deadline(app: ASGIApp) -> ASGIApp:
    """An ASGI middleware: who is slower gets a 400, whatever reads the body."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, _Hurried(receive) if scope["type"] == "http" else receive, send)

    return served


class _Hurried:
    """`receive`, until the body is complete; from then on it waits for the client to leave."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._deadline = time.monotonic() + BODY_SECONDS
        self._complete = False

    async def __call__(self) -> ReceiveMessage:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError as error:
            raise InvalidRequestError("The body came too slowly; this server waits no longer for it.") from error
        if message["type"] == "http.request":
            self._deadline += len(message["body"]) / BYTES_PER_SECOND
            self._complete = not message["more_body"]
        return message


def allow_many_files() -> None:
    """A stream is an open file: the usual soft limit of 1,024 is fewer than one worker can serve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
