"""GET /metrics (this gateway, all of its workers) and /metrics/engine (the engine's own, passed on).

They tell of every tenant, so they ask for a token of their own: `security.metrics_token`, or the one that the first
start leaves in the data directory for Prometheus' `credentials_file`. Two paths, not one body: with several gateways
each is scraped for itself, and the engine once.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

from litestar import Response, Router, get
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers.base import BaseRouteHandler

from engine.errors import AuthenticationError
from gateway.auth import load_or_create_random
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.metrics import GatewayMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE_SECONDS = 8.0  # below Prometheus' own default of ten


def metrics_router(
    metrics: GatewayMetrics, engine: Engine, drain: Drain, store_problem: Callable[[], str | None], token: str
) -> Router:
    @get("/")
    async def gateway_metrics() -> Response[bytes]:
        metrics.set_active(drain.num_active)
        text = metrics.text(engine_up=engine.connected, store_up=store_problem() is None)
        return Response(text, media_type=CONTENT_TYPE)

    @get("/engine")
    async def engine_metrics() -> Response[bytes]:
        return Response(await engine.metrics_text(_ENGINE_SECONDS), media_type=CONTENT_TYPE)

    return Router("/metrics", route_handlers=[gateway_metrics, engine_metrics], guards=[_token_guard(token)])


def _token_guard(token: str) -> Callable[[ASGIConnection[Any, Any, Any, State], BaseRouteHandler], None]:
    def require_token(connection: ASGIConnection[Any, Any, Any, State], _: BaseRouteHandler) -> None:
        sent = connection.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), token.encode()):
            raise AuthenticationError("The metrics need their token: `Authorization: Bearer …`.")

    return require_token


def load_or_create_metrics_token(configured: str, data_dir: Path) -> str:
    """From the settings, else from `data_dir/metrics.token`, which the first start makes."""
    if configured:
        return configured
    data_dir.mkdir(parents=True, exist_ok=True)
    return load_or_create_random(metrics_token_path(data_dir))


def metrics_token_path(data_dir: Path) -> Path:
    return data_dir / "metrics.token"
