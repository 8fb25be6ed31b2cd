"""The gateway's application, wired in one place.

    /livez /readyz ───────────────────────► ReadinessProbe ─► Engine.probe
    /metrics  guard: the metrics' token ──► GatewayMetrics, Engine.metrics_text
    /dashboard  its own login ────────────► HistoryReader, Engine.cache_view
    /v1  guard: tenant of the API key
      ├─ chat/completions ─► ChatCompletions ─► ChatRetriever (documents) ─► ServedModel (prompt)
     │                                       ─► ChatCompletionResponse ─► Engine.generate
      ├─ models ───────────► ServedModels ─► Engine.info
     └─ files, vector_stores, embeddings, cache/documents ─► RetrievalService ─► store, embedder

Objects are handed to the routes by closure: what a route needs is in its signature, and typed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litestar import Litestar, Router
from litestar.handlers import HTTPRouteHandler
from redis.asyncio import Redis

from engine.settings import Settings
from gateway.auth import tenant_guard
from gateway.cache_documents_api import cache_document_routes
from gateway.chat import ChatCompletions, chat_route
from gateway.chat_documents import ChatRetriever
from gateway.dashboard.routes import template_config
from gateway.drain import Drain
from gateway.embeddings_api import embedding_routes
from gateway.engine_port import Engine
from gateway.error_responses import exception_handlers
from gateway.files_api import file_routes
from gateway.health import ReadinessProbe, StoreProblem, health_routes
from gateway.models import model_routes
from gateway.operations import Operations
from gateway.request_context import add_request_id
from gateway.retrieval_service import RetrievalService
from gateway.served_model import ServedModels
from gateway.tenants import TenantDirectory
from gateway.vector_store_batches_api import vector_store_batch_routes
from gateway.vector_store_files_api import vector_store_file_routes
from gateway.vector_store_search_api import vector_store_search_routes
from gateway.vector_stores_api import vector_store_routes
from retrieval.embedder_client import Embedder


def create_app(
    settings: Settings,
    engine: Engine,
    tenants: TenantDirectory,
    *,
    drain: Drain | None = None,
    store_problem: StoreProblem = lambda: None,
    operations: Operations | None = None,
    redis: Redis | None = None,
    embedder: Embedder | None = None,
) -> Litestar:
    """The app starts and closes `engine` with its lifespan. `drain` is for whoever shuts the server down.

    With a store and an embedder it has retrieval; they are the app's from then on.
    """
    drain = drain or Drain()
    models = ServedModels(engine)
    retrieval: RetrievalService | None = None
    if redis is not None and embedder is not None:
        retrieval = RetrievalService(settings.retrieval, redis, embedder, engine, models)
    chat = ChatCompletions(engine, models, ChatRetriever(engine, retrieval), drain, settings.server.max_choices)
    routes: list[HTTPRouteHandler] = [chat_route(chat), *model_routes(models)]
    if retrieval is not None:
        routes += [
            *file_routes(retrieval),
            *vector_store_routes(retrieval),
            *vector_store_search_routes(retrieval, engine, models),
            *vector_store_file_routes(retrieval),
            *vector_store_batch_routes(retrieval),
            *embedding_routes(retrieval),
            *cache_document_routes(retrieval, engine),
        ]
    v1 = Router("/v1", guards=[tenant_guard(tenants)], route_handlers=routes)

    routers = [v1] if operations is None else [v1, *operations.routers(settings, engine, tenants, drain)]

    @asynccontextmanager
    async def engine_connection(_: Litestar) -> AsyncGenerator[None]:
        await engine.start()
        try:
            if retrieval is not None:
                await retrieval.start()
            yield
        finally:
            if retrieval is not None:
                await retrieval.close()
            await engine.close()

    return Litestar(
        route_handlers=[*routers, *health_routes(ReadinessProbe(engine, drain, store_problem))],
        lifespan=[engine_connection] if operations is None else [operations.lifespan, engine_connection],
        exception_handlers=exception_handlers(),
        template_config=template_config(),
        before_send=[add_request_id],
        request_max_body_size=settings.server.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )
