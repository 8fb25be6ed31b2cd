"""POST /v1/vector_stores/{id}/search.

A search asks the model for nothing, unless its query is to be rewritten: then it is a request to the model like any
other, under the tenant's limits and in its usage.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

import msgspec
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Send

from gateway.admission import Admission, Admissions
from gateway.call import Call, call_of
from gateway.engine_port import Engine
from gateway.http_io import HttpRequest, send_json
from gateway.json_body import read_body
from gateway.model_use import ModelUse
from gateway.openai_types import TokenUsage
from gateway.prompt import Message
from gateway.prompt_scopes import PromptScopes
from gateway.query_rewrite import Asked, rewrite, rewriting_of
from gateway.retrieval_request import compile_filters
from gateway.retrieval_service import RetrievalService
from gateway.retrieval_types import SearchHit, SearchPage
from gateway.served_model import ServedModels
from gateway.tenants import Tenant
from gateway.vector_store_requests import SearchStore
from retrieval.search_indexes import Name
from retrieval.searcher import Query


class VectorStoreSearch:
    def __init__(
        self, retrieval: RetrievalService, engine: Engine, models: ServedModels, admissions: Admissions
    ) -> None:
        self._retrieval = retrieval
        self._engine = engine
        self._models = models
        self._admissions = admissions

    async def respond(self, call: Call, store_id: str) -> ASGIApp:
        """Raises whatever can be known to be wrong before the model is asked."""
        body, tenant = read_body(call.raw, call.content_type, SearchStore), call.caller.tenant
        body.ranking_options.check("ranking_options")
        query = Query(
            texts=body.texts,
            max_results=body.max_num_results,
            keep=compile_filters(body.filters, "filters"),
            weights=body.ranking_options.weights,
            rerank=body.ranking_options.reranks,
            score_threshold=body.ranking_options.score_threshold,
        )
        name = await self._retrieval.searcher.resolve(tenant.id, store_id)
        if body.rewrite_query:
            await self._retrieval.searcher.check(rerank=query.rerank)
            admitted = await self._with_rewritten_queries(call, tenant, name, query)
            if admitted is not None:
                return admitted
        return ASGIResponse(body=await self._page(name, query), media_type="application/json", status_code=200)

    async def _with_rewritten_queries(self, call: Call, tenant: Tenant, name: Name, query: Query) -> ASGIApp | None:
        model = await self._models.current()
        scopes = PromptScopes.only(tenant.scope, tenant.owner)
        asked = [Asked([Message("user", text)], text) for text in query.texts]
        use_cache = not tenant.record.policy.no_store
        rewriting = await rewriting_of(asked, model, tenant, scopes, use_cache=use_cache)
        if rewriting is None:
            return None

        async def reply(admission: Admission, send: Send) -> None:
            texts = await rewrite(self._engine, rewriting, admission)
            admission.interruption.check()
            page = await self._page(name, replace(query, texts=texts), admission.meter.rewriting)
            admission.interruption.check()
            await admission.settle()
            await send_json(send, page)

        return self._admissions.admitted(
            call,
            reply,
            request_id=f"search-{uuid.uuid4().hex}",
            model=model.info.model,
            num_tokens=rewriting.num_tokens,
        )

    async def _page(self, name: Name, query: Query, rewriting: ModelUse | None = None) -> bytes:
        found = await self._retrieval.searcher.search([name], query)
        page = SearchPage(
            search_query=query.texts,
            data=tuple(SearchHit.of(each) for each in found),
            usage=msgspec.UNSET if rewriting is None else TokenUsage.of(rewriting),
        )
        return msgspec.json.encode(page)


def vector_store_search_route(search: VectorStoreSearch) -> HTTPRouteHandler:
    @post("/vector_stores/{store_id:str}/search", status_code=200)
    async def search_vector_store(request: HttpRequest, store_id: FromPath[str]) -> ASGIApp:
        return await search.respond(await call_of(request), store_id)

    return search_vector_store
