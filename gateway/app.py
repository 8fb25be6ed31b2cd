"""The gateway's application, wired in one place.

    /livez /readyz ───────────────────────► ReadinessProbe ─► Engine.probe
    /v1  guard: tenant of the API key
      ├─ chat/completions ─► ChatCompletions ─► ServedModel (prompt) ─► ChatCompletionResponse ─► Engine.generate
      │                                                                    └─► Metering ─► Limiter, UsageRecorder
      ├─ models ───────────► ServedModels ─► Engine.info
      └─ usage ────────────► UsagePages ─► store
    /admin/v1  guard: role of the API key
      └─ tenants, keys, prompts, collections, usage, cache, audit ─► TenantAdmin ─► store

    beside the requests: DirectorySync (tenants, from the store), Limiter and UsageRecorder (to the store), EngineSpeed

Objects are handed to the routes by closure: what a route needs is in its signature, and typed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress

from litestar import Litestar, Router

from engine.errors import StoreUnavailableError
from engine.settings import Settings
from gateway.admin_api import admin_router
from gateway.auth import tenant_guard
from gateway.chat import ChatCompletions, chat_route
from gateway.directory_sync import DirectorySync
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.engine_speed import EngineSpeed
from gateway.error_responses import exception_handlers
from gateway.health import ReadinessProbe, StoreProblem, health_routes
from gateway.metering import Metering
from gateway.models import model_routes
from gateway.rate_limits import Limiter
from gateway.request_context import add_request_id
from gateway.served_model import ServedModels
from gateway.store_client import StoreClient
from gateway.tenant_admin import TenantAdmin
from gateway.tenants import TenantDirectory
from gateway.usage import UsageReader, UsageRecorder
from gateway.usage_api import UsagePages, own_usage_route

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    engine: Engine,
    tenants: TenantDirectory,
    *,
    drain: Drain | None = None,
    store: StoreClient | None = None,
    store_problem: StoreProblem | None = None,
) -> Litestar:
    """The app starts and closes `engine` and `store` with its lifespan. `drain` is for whoever shuts the server down.

    Without a store, tenants are those of the settings, limits are this process's, and what lives in a store is 503.
    """
    drain = drain or Drain()
    store = store or StoreClient(None)
    sync = DirectorySync(store, tenants)
    limiter, speed = Limiter(store), EngineSpeed(engine)
    recorder = UsageRecorder(store, settings.usage.retention_days)
    usage = UsagePages(UsageReader(store), recorder, settings.usage)
    models = ServedModels(engine)
    metering = Metering(limiter, recorder, speed, settings.usage)
    chat = ChatCompletions(engine, models, drain, tenants, metering, settings.server.max_choices)
    v1 = Router(
        "/v1",
        guards=[tenant_guard(tenants)],
        route_handlers=[chat_route(chat), *model_routes(models), own_usage_route(usage)],
    )
    admin = admin_router(tenants, TenantAdmin(store, tenants.secret, sync.poll), engine, usage)

    @asynccontextmanager
    async def connections(_: Litestar) -> AsyncGenerator[None]:
        await engine.start()
        await sync.start()
        try:
            async with _background([sync.run(), limiter.run(), recorder.run(), speed.run()]):
                yield
            with suppress(StoreUnavailableError):
                await limiter.pay_debts()
                await recorder.flush()
        finally:
            await engine.close()
            await store.close()

    probe = ReadinessProbe(engine, drain, store_problem or store.problem)
    return Litestar(
        route_handlers=[v1, admin, *health_routes(probe)],
        lifespan=[connections],
        exception_handlers=exception_handlers(),
        before_send=[add_request_id],
        request_max_body_size=settings.server.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )


@asynccontextmanager
async def _background(work: Sequence[Coroutine[object, object, None]]) -> AsyncGenerator[None]:
    """Tasks beside the requests; one that fails is reported, and the requests go on."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    for task in tasks:
        task.add_done_callback(_report_failure)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of the gateway failed", exc_info=error)
