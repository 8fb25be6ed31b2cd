"""The gateway's application, wired in one place.

    /livez /readyz ───────────────────────► ReadinessProbe ─► Engine.probe
    /metrics  guard: the metrics' token ──► GatewayMetrics, Engine.metrics_text
    /dashboard  its own login ────────────► HistoryReader, Engine.cache_view
    /v1  guard: tenant of the API key
      ├─ chat/completions ─► ChatCompletions ─► ChatRetriever (documents) ─► ServedModel (prompt) ─┐
      ├─ completions ──────► Completions ─────────────────────────────────► ServedModel (prompt) ─┤
      │                                Admitted ─► Metering (limits, usage) ─► Answer ─► Engine.generate
      ├─ models ───────────► ServedModels ─► Engine.info
      ├─ usage ────────────► UsagePages ─► store
      ├─ vector_stores/ID/search ─► RetrievalService; with a query to be rewritten: ─► Admitted ─► Engine.generate
      └─ files, vector_stores, embeddings, cache/documents ─► RetrievalService ─► store, embedder
    /admin/v1  guard: role of the API key
      └─ tenants, keys, prompts, collections, usage, cache, audit ─► TenantAdmin ─► store

    beside the requests: DirectorySync (tenants, from the store), Limiter and UsageRecorder (to the store)

Objects are handed to the routes by closure: what a route needs is in its signature, and typed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress

from litestar import Litestar, Router
from litestar.handlers import HTTPRouteHandler
from redis.asyncio import Redis

from engine.errors import StoreUnavailableError
from engine.settings import Settings
from gateway.admin_api import admin_router
from gateway.admission import Admissions
from gateway.answering import Answering
from gateway.auth import tenant_guard
from gateway.cache_documents_api import cache_document_routes
from gateway.chat import ChatCompletions, chat_route
from gateway.chat_documents import ChatRetriever
from gateway.completions import Completions, completion_route
from gateway.connections import with_body_deadline
from gateway.dashboard.routes import template_config
from gateway.directory_sync import DirectorySync
from gateway.drain import Drain
from gateway.embeddings_api import embedding_routes
from gateway.engine_port import Engine
from gateway.error_responses import exception_handlers
from gateway.files_api import file_routes
from gateway.health import ReadinessProbe, health_routes
from gateway.metering import Metering
from gateway.models import model_routes
from gateway.operations import Operations
from gateway.rate_limits import Limiter
from gateway.request_context import add_request_id
from gateway.retrieval_service import RetrievalService
from gateway.served_model import ServedModels
from gateway.store_client import StoreClient
from gateway.tenant_admin import TenantAdmin
from gateway.tenants import TenantDirectory, public_scope
from gateway.usage import UsageReader, UsageRecorder
from gateway.usage_api import UsagePages, own_usage_route
from gateway.vector_store_batches_api import vector_store_batch_routes
from gateway.vector_store_files_api import vector_store_file_routes
from gateway.vector_store_search_api import VectorStoreSearch, vector_store_search_route
from gateway.vector_stores_api import vector_store_routes
from retrieval.embedder_client import Embedder

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    engine: Engine,
    tenants: TenantDirectory,
    *,
    drain: Drain | None = None,
    store: StoreClient | None = None,
    operations: Operations | None = None,
    redis: Redis | None = None,
    embedder: Embedder | None = None,
    before_accepting: Callable[[], Awaitable[None]] | None = None,
) -> Litestar:
    """The app starts and closes `engine` and `store` with its lifespan. `drain` is for whoever shuts the server down.

    `before_accepting` is awaited when everything is started: the server listens only then.

    Without a store, tenants are those of the settings, limits are this process's, and what lives in a store is 503.
    With `redis` and an embedder it has retrieval; they are the app's from then on.
    """
    drain = drain or Drain()
    store = store or StoreClient(None)
    sync = DirectorySync(store, tenants)
    limiter = Limiter(store)
    recorder = UsageRecorder(store, settings.usage.retention_days)
    usage = UsagePages(UsageReader(store), recorder, settings.usage)
    models = ServedModels(engine)
    retrieval: RetrievalService | None = None
    if redis is not None and embedder is not None:
        retrieval = RetrievalService(settings.retrieval, redis, embedder, engine, models, tenants.may_store)
    admissions = Admissions(Metering(limiter, recorder, settings.usage), drain)
    retriever = ChatRetriever(engine, retrieval)
    answering = Answering(engine, models, drain, tenants, admissions, settings.server.max_choices)
    chat = ChatCompletions(engine, answering, retriever)
    routes: list[HTTPRouteHandler] = [
        chat_route(chat),
        completion_route(Completions(answering)),
        *model_routes(models),
        own_usage_route(usage),
    ]
    if retrieval is not None:
        routes += [
            *file_routes(retrieval),
            *vector_store_routes(retrieval),
            vector_store_search_route(VectorStoreSearch(retrieval, engine, models, admissions)),
            *vector_store_file_routes(retrieval),
            *vector_store_batch_routes(retrieval),
            *embedding_routes(retrieval),
            *cache_document_routes(retrieval, engine, public_scope(tenants.secret)),
        ]
    v1 = Router("/v1", guards=[tenant_guard(tenants)], route_handlers=routes)
    admin = admin_router(tenants, TenantAdmin(store, tenants.secret, sync.poll), engine, usage)

    routers = [v1] if operations is None else [v1, *operations.routers(settings, engine, tenants, drain)]

    @asynccontextmanager
    async def connections(_: Litestar) -> AsyncGenerator[None]:
        await engine.start()
        await sync.start()
        try:
            if retrieval is not None:
                await retrieval.start()
            async with _background([sync.run(), limiter.run(), recorder.run()]):
                if before_accepting is not None:
                    await before_accepting()
                yield
            with suppress(StoreUnavailableError):
                await limiter.pay_debts()
                await recorder.flush()
        finally:
            if retrieval is not None:
                await retrieval.close()
            await engine.close()
            if operations is None:  # else it is closed with them, after their last words
                await store.close()

    probe = ReadinessProbe(engine, drain, store.problem, models.current)
    return Litestar(
        route_handlers=[*routers, admin, *health_routes(probe)],
        lifespan=[connections] if operations is None else [operations.lifespan, connections],
        exception_handlers=exception_handlers(),
        template_config=template_config(),
        before_send=[add_request_id],
        middleware=[with_body_deadline],
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
