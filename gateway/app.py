"""The gateway's application, wired in one place.

    /livez /readyz ───────────────────────► ReadinessProbe ─► Engine.probe
    /metrics  guard: the metrics' token ──► GatewayMetrics, Engine.metrics_text
    /dashboard  its own login ────────────► HistoryReader, Engine.cache_view
    /v1  guard: tenant of the API key
      ├─ chat/completions ─► ChatCompletions ─► ServedModel (prompt) ─► ChatCompletionResponse ─► Engine.generate
      └─ models ───────────► ServedModels ─► Engine.info

Objects are handed to the routes by closure: what a route needs is in its signature, and typed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litestar import Litestar, Router

from engine.settings import Settings
from gateway.auth import tenant_guard
from gateway.chat import ChatCompletions, chat_route
from gateway.dashboard.routes import template_config
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.error_responses import exception_handlers
from gateway.health import ReadinessProbe, StoreProblem, health_routes
from gateway.models import model_routes
from gateway.operations import Operations
from gateway.request_context import add_request_id
from gateway.served_model import ServedModels
from gateway.tenants import TenantDirectory


def create_app(
    settings: Settings,
    engine: Engine,
    tenants: TenantDirectory,
    *,
    drain: Drain | None = None,
    store_problem: StoreProblem = lambda: None,
    operations: Operations | None = None,
) -> Litestar:
    """The app starts and closes `engine` with its lifespan. `drain` is for whoever shuts the server down."""
    drain = drain or Drain()
    models = ServedModels(engine)
    chat = ChatCompletions(engine, models, drain, settings.server.max_choices)
    v1 = Router("/v1", guards=[tenant_guard(tenants)], route_handlers=[chat_route(chat), *model_routes(models)])

    routes: list[Router] = [v1] if operations is None else [v1, *operations.routers(settings, engine, tenants, drain)]

    @asynccontextmanager
    async def engine_connection(_: Litestar) -> AsyncGenerator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()

    return Litestar(
        route_handlers=[*routes, *health_routes(ReadinessProbe(engine, drain, store_problem))],
        lifespan=[engine_connection] if operations is None else [operations.lifespan, engine_connection],
        exception_handlers=exception_handlers(),
        template_config=template_config(),
        before_send=[add_request_id],
        request_max_body_size=settings.server.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )
