"""How one gateway process takes over from another without a refused or a reset connection.

supervisor   owns the listening socket; LISTEN_FD names it to every gateway
   │ SIGHUP
   ├─► successor      reaches the engine, accepts on the same socket, writes a byte to READY_FD
   └─► predecessor    SIGUSR1: accepts no more, serves what is connected with `connection: close`, ends
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping

from uvicorn.server import ServerState

LISTEN_FD = "GATEWAY_LISTEN_FD"
READY_FD = "GATEWAY_READY_FD"
SHARED_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus-client's own; the supervisor sets it
HAND_OVER = signal.SIGUSR1

ENGINE_SECONDS = 55.0  # that a successor may take to reach the engine
_IDLE_SECONDS = 15.0  # that an idle connection is kept: longer than most clients keep one in their pool
_POLL = 0.05

Announce = Callable[[], Coroutine[None, None, None]]


def inherited_sockets(environ: Mapping[str, str]) -> list[socket.socket] | None:
    """The supervisor's listening socket; None when this process is to open its own."""
    fd = environ.get(LISTEN_FD)
    return None if fd is None else [socket.socket(fileno=int(fd))]


def ready_announcement(fd: int) -> Announce:
    """To be called when connections are accepted. A process that ends before closes `fd` without a word."""

    async def announce() -> None:
        os.write(fd, b"1")
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
