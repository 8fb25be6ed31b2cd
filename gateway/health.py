"""/livez says that this process runs; /readyz that a request sent now would be answered, and as fast as any later one:
the engine has made a real decode step (and has back what an earlier life left it), the prompt builder is there.

Probes cost the engine a step, so concurrent ones share one, and its result is good for a second: a balancer that
asks often, or a hundred of them, cannot load the device.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from engine.errors import RadixgateError
from gateway.drain import Drain
from gateway.engine_port import Engine

_PROBE_TIMEOUT = 10.0
_GOOD_FOR = 1.0

# Why the store cannot be used now, or None; without its store the gateway goes on, degraded.
StoreProblem = Callable[[], str | None]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok", "degraded", "unavailable"]
    reason: str | None = None
    model: str | None = None

    @property
    def http_status(self) -> int:
        return 503 if self.status == "unavailable" else 200


class ReadinessProbe:
    def __init__(
        self,
        engine: Engine,
        drain: Drain,
        store_problem: StoreProblem,
        warm_up: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`warm_up` returns when what the first request would have to wait for is there."""
        self._engine = engine
        self._drain = drain
        self._store_problem = store_problem
        self._warm_up = warm_up
        self._clock = clock
        self._running: asyncio.Task[str | None] | None = None
        self._problem: str | None = None
        self._probed_at: float | None = None

    async def check(self) -> Readiness:
        if self._drain.draining:
            return Readiness(status="unavailable", reason="shutting down")
        problem = await self._engine_problem()
        if problem is not None:
            return Readiness(status="unavailable", reason=problem)
        model = self._engine.info.model if self._engine.info is not None else None
        store_problem = self._store_problem()
        if store_problem is not None:
            return Readiness(status="degraded", reason=store_problem, model=model)
        return Readiness(status="ok", model=model)

    async def _engine_problem(self) -> str | None:
        if self._probed_at is not None and self._clock() - self._probed_at < _GOOD_FOR:
            return self._problem
        if self._running is None:
            self._running = asyncio.create_task(self._probe())
        # Shielded: one asker that goes away must not cancel the probe of the others.
        return await asyncio.shield(self._running)

    async def _probe(self) -> str | None:
        try:
            result = await self._engine.probe(_PROBE_TIMEOUT)
            await self._warm_up()
            self._problem = None if result.ok else f"the engine's decode step failed: {result.message}"
        except RadixgateError as error:
            self._problem = error.message
        finally:
            self._running = None
        self._probed_at = self._clock()
        return self._problem


def health_routes(readiness: ReadinessProbe) -> list[HTTPRouteHandler]:
    @get("/livez")
    async def livez() -> Response[bytes]:
        return Response(b'{"status":"ok"}', media_type="application/json")

    @get("/readyz")
    async def readyz() -> Response[bytes]:
        report = await readiness.check()
        body = msgspec.json.encode(report)
        return Response(body, status_code=report.http_status, media_type="application/json")

    return [livez, readyz]
