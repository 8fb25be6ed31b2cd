"""How one gateway process takes over from another without a refused or a reset connection.

supervisor   owns the listening socket; LISTEN_FD names it to every gateway
   │ SIGHUP
   ├─► successor      accepts on the same socket, reaches the engine, writes a byte to READY_FD
   └─► predecessor    SIGUSR1: accepts no more, serves what is connected with `connection: close`, ends
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Protocol

from uvicorn.server import ServerState

from engine.errors import EngineUnavailableError
from engine.protocol import EngineInfo

LISTEN_FD = "GATEWAY_LISTEN_FD"
READY_FD = "GATEWAY_READY_FD"
SHARED_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus-client's own; the supervisor sets it
HAND_OVER = signal.SIGUSR1

_ENGINE_SECONDS = 55.0
_IDLE_SECONDS = 15.0  # that an idle connection is kept: longer than most clients keep one in their pool
_POLL = 0.05

Announce = Callable[[], Coroutine[None, None, None]]


class Reachable(Protocol):
    async def wait_ready(self, timeout: float) -> EngineInfo: ...


def inherited_sockets(environ: Mapping[str, str]) -> list[socket.socket] | None:
    """The supervisor's listening socket; None when this process is to open its own."""
    fd = environ.get(LISTEN_FD)
    return None if fd is None else [socket.socket(fileno=int(fd))]


def ready_announcement(fd: int, engine: Reachable) -> Announce:
    """Writes to `fd` once the engine has been reached; closes it without a word if that takes too long."""

    async def announce() -> None:
        try:
            await engine.wait_ready(_ENGINE_SECONDS)
            os.write(fd, b"1")
        except EngineUnavailableError:
            return  # the closed pipe says it
        finally:
            os.close(fd)

    return announce


async def finish_connections(state: ServerState, seconds: float, is_cut: Callable[[], bool]) -> None:
    """Until every connection is gone, for `seconds` or until `is_cut` at most. All are served meanwhile.

    Idle ones are closed after a while. A request that a client sends into that very moment is lost to it, as whenever
    a server closes an idle connection; by then the clients' own pools have let go of theirs.
    """
    start = time.monotonic()
    idle_closed = False
    while state.connections and not is_cut() and (waited := time.monotonic() - start) < seconds:
        if waited > _IDLE_SECONDS and not idle_closed:
            idle_closed = True
            for connection in list(state.connections):
                connection.shutdown()  # at once if it is idle, else behind its answer
        await asyncio.sleep(_POLL)
