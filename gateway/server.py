"""The gateway's process: uvicorn around the application, and a SIGTERM that loses nobody's answer.

    SIGTERM ─► draining: new requests get 503, /readyz says so; the socket stays open, so that they *get* it
            ─► running requests end, or the deadline fails them with an error they can read
            ─► uvicorn stops, lifespan closes the engine connection, exit status 0
    SIGTERM again ─► the deadline is now
    SIGUSR1 ─► handing over: another process accepts on the same socket; what is connected here is served to its end,
               with `connection: close`, and then this process goes

uvicorn alone would close the socket first, cut streams at its own deadline without a word, and then raise the
signal again, so that a clean end looks like a killed process to a supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn

from engine.client import EngineClient
from engine.logging_setup import configure_logging
from engine.settings import Settings, embedder_endpoint, engine_endpoint, load_settings, store_url
from gateway.access_log import AccessLog
from gateway.app import create_app
from gateway.auth import load_or_create_secret
from gateway.connections import Connection, SilenceWatch, allow_many_files
from gateway.drain import Drain
from gateway.first_run import completed
from gateway.handover import (
    ENGINE_SECONDS,
    HAND_OVER,
    READY_FD,
    Announce,
    finish_connections,
    inherited_sockets,
    ready_announcement,
)
from gateway.operations import Operations
from gateway.store_client import StoreClient
from gateway.tenants import TenantDirectory
from retrieval.embedder_client import EmbedderClient
from retrieval.redis_commands import connect_store

logger = logging.getLogger(__name__)

# After the drain nothing of value is left on any connection; uvicorn may wait this long for their last bytes.
_CLOSE_SECONDS = 5

# Longer than clients keep idle connections in their pools, so that it is they who close them.
_KEEP_ALIVE_SECONDS = 75

_TICKS_A_SWEEP = 10


class GatewayServer(uvicorn.Server):
    """A uvicorn server whose signals drain first."""

    def __init__(
        self, config: uvicorn.Config, drain: Drain, drain_seconds: float, announce: Announce | None = None
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._announce = announce
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self.silence = SilenceWatch(time.monotonic)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's, ten times a second."""
        if counter % _TICKS_A_SWEEP == 0:
            self.silence.sweep(cast("set[Connection]", self.server_state.connections))
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(HAND_OVER, self.begin_handover)
        if self._announce is not None:
            self._announcing = self._loop.create_task(self._announce())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs as a signal handler: it may interrupt the loop anywhere, so it only leaves a note for it."""
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.begin_shutdown)

    def begin_shutdown(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain_and_exit())
        else:
            self._drain.cut()

    def begin_handover(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._hand_over())

    async def _hand_over(self) -> None:
        for server in self.servers:
            server.close()  # here only: the socket itself lives on in the other processes
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)
        self.server_state.default_headers = [*self.server_state.default_headers, close]
        logger.info("handed over: %d requests are running", self._drain.num_active)
        try:
            await finish_connections(self.server_state, self._drain_seconds, lambda: self._drain.is_cut)
            await self._drain.drain(0.0)
        finally:
            self.should_exit = True

    async def _drain_and_exit(self) -> None:
        logger.info("draining: %d requests are running", self._drain.num_active)
        try:
            num_failed = await self._drain.drain(self._drain_seconds)
            logger.info("drained: %d requests could not finish", num_failed)
        finally:
            self.should_exit = True


def build_server(settings: Settings) -> GatewayServer:
    """The server for these settings, not yet started. Raises `ConfigError`."""
    secret = load_or_create_secret(settings.security.secret, settings.store.data_dir)
    tenants = TenantDirectory(secret, settings.tenants)
    if not len(tenants):
        logger.warning("no tenant has an API key: every request to /v1 will be refused; see `radixgate key`")
    drain = Drain()
    engine = EngineClient(engine_endpoint(settings))
    store = StoreClient(settings.store.url or None, settings.store.timeout_ms / 1000)
    operations = Operations(settings, store)
    ready_fd = os.environ.get(READY_FD)

    async def reach_engine() -> None:
        await engine.wait_ready(ENGINE_SECONDS)

    app = create_app(
        settings,
        engine,
        tenants,
        drain=drain,
        store=store,
        redis=connect_store(store_url(settings)),
        embedder=EmbedderClient(embedder_endpoint(settings)),
        operations=operations,
        # A first gateway serves while the engine still loads, and says so. A successor that did would refuse what its
        # predecessor answers: both accept on one socket.
        before_accepting=None if ready_fd is None else reach_engine,
    )
    config = uvicorn.Config(
        AccessLog(app, operations.observers),
        host=settings.server.host,
        port=settings.server.port,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    announce = None if ready_fd is None else ready_announcement(int(ready_fd))
    return GatewayServer(config, drain, settings.server.drain_seconds, announce)


def run_gateway(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then returns."""
    allow_many_files()
    build_server(settings).run(sockets=inherited_sockets(os.environ))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.server", description="The HTTP gateway alone.")
    parser.add_argument("--config", type=Path, help="the TOML settings; the environment goes over it")
    parser.add_argument(
        "--first-run", action="store_true", help="make a demo tenant and a password if the settings have none"
    )
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.config, os.environ)
    if arguments.first_run:
        settings = completed(settings)
    configure_logging(settings.server)
    run_gateway(settings)


if __name__ == "__main__":
    main()
