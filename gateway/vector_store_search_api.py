"""POST /v1/vector_stores/{id}/search."""

from __future__ import annotations

from litestar import Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.engine_port import Engine
from gateway.http_io import HttpRequest, body_of, json_response, tenant_of
from gateway.prompt import Message
from gateway.prompt_scopes import PromptScopes
from gateway.query_rewrite import rewrite_query
from gateway.retrieval_request import compile_filters
from gateway.retrieval_service import RetrievalService
from gateway.retrieval_types import SearchHit, SearchPage
from gateway.served_model import ServedModels
from gateway.tenants import Tenant
from gateway.vector_store_requests import SearchStore
from retrieval.searcher import Query


def vector_store_search_routes(
    retrieval: RetrievalService, engine: Engine, models: ServedModels
) -> list[HTTPRouteHandler]:
    async def rewritten(tenant: Tenant, texts: tuple[str, ...]) -> tuple[str, ...]:
        model = await models.current()
        return tuple(
            [
                await rewrite_query(
                    engine,
                    model,
                    tenant,
                    PromptScopes.only(tenant.scope, tenant.owner),
                    [Message("user", text)],
                    text,
                    use_cache=not tenant.record.policy.no_store,
                )
                for text in texts
            ]
        )

    @post("/vector_stores/{store_id:str}/search", status_code=200)
    async def search_vector_store(request: HttpRequest, store_id: FromPath[str]) -> Response[bytes]:
        tenant, body = tenant_of(request), await body_of(request, SearchStore)
        body.ranking_options.check("ranking_options")
        keep = compile_filters(body.filters, "filters")
        name = await retrieval.searcher.resolve(tenant.id, store_id)
        texts = await rewritten(tenant, body.texts) if body.rewrite_query else body.texts
        query = Query(
            texts=texts,
            max_results=body.max_num_results,
            keep=keep,
            weights=body.ranking_options.weights,
            rerank=body.ranking_options.ranker == "rerank",
            score_threshold=body.ranking_options.score_threshold,
        )
        found = await retrieval.searcher.search([name], query)
        return json_response(SearchPage(search_query=texts, data=tuple(SearchHit.of(each) for each in found)))

    return [search_vector_store]
