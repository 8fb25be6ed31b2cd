"""POST /v1/chat/completions: from the HTTP request to the engine requests of its choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from engine.errors import ContextLengthExceededError, InvalidRequestError, ModelNotFoundError, ShuttingDownError
from engine.protocol import SamplingParams, Segment, Submit
from gateway.chat_documents import ChatDocuments, ChatRetriever, without_earlier_turns
from gateway.chat_request import ChatRequest, parse_chat_request
from gateway.chat_response import ChatCompletionResponse, CompletionHeader
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.http_io import HttpRequest, raw_body, tenant_of
from gateway.request_context import request_context
from gateway.request_timing import RequestTiming
from gateway.served_model import ServedModel, ServedModels, num_tokens
from gateway.tenants import Tenant, narrow_scope

# Spreads the seeds of parallel choices; any odd number with well-mixed bits does.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_LIMIT = 1 << 63


class ChatCompletions:
    def __init__(
        self, engine: Engine, models: ServedModels, retriever: ChatRetriever, drain: Drain, max_choices: int
    ) -> None:
        self._engine = engine
        self._models = models
        self._retriever = retriever
        self._drain = drain
        self._max_choices = max_choices

    async def respond(
        self, raw: bytes, content_type: str, tenant: Tenant, timing: RequestTiming
    ) -> ChatCompletionResponse:
        """Raises whatever can be known to be wrong before the engine is asked."""
        if self._drain.draining:
            raise ShuttingDownError("The server is shutting down.")
        request = parse_chat_request(raw, content_type, self._max_choices)
        model = await self._models.current()
        if request.body.model != model.info.model:
            raise ModelNotFoundError(f"The model `{request.body.model[:200]}` does not exist.", param="model")
        scope = narrow_scope(tenant.scope, request.narrowing)
        with timing.retrieving():
            documents = await self._retriever.documents(request, tenant, scope, model)
        documents, segments = await _build_prompt(request, documents, scope, model)
        max_tokens = model.max_tokens(request, num_tokens(segments))
        if request.body.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"`min_tokens` is {request.body.min_tokens}, and there is room for {max_tokens}.", param="min_tokens"
            )
        header = CompletionHeader(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model.info.model,
            system_fingerprint=f"fp_{model.info.fingerprint[:16]}",
        )
        return ChatCompletionResponse(
            header,
            _submits(request, segments, documents, tenant, header.id, max_tokens),
            documents,
            self._engine,
            self._drain,
            stream=request.body.stream,
            include_usage=request.include_usage,
        )


def chat_route(chat: ChatCompletions) -> HTTPRouteHandler:
    @post("/chat/completions", status_code=200)
    async def create_chat_completion(request: HttpRequest) -> ASGIApp:
        tenant = tenant_of(request)
        timing = request_context(request.scope).timing
        return await chat.respond(await raw_body(request), request.headers.get("content-type", ""), tenant, timing)

    return create_chat_completion


async def _build_prompt(
    request: ChatRequest, documents: ChatDocuments, scope: bytes, model: ServedModel
) -> tuple[ChatDocuments, tuple[Segment, ...]]:
    try:
        return documents, await model.build_prompt(request, documents.prompt, scope)
    except ContextLengthExceededError:
        fewer = without_earlier_turns(documents)
        if fewer is None:
            raise
        return fewer, await model.build_prompt(request, fewer.prompt, scope)


def _submits(
    request: ChatRequest,
    segments: tuple[Segment, ...],
    documents: ChatDocuments,
    tenant: Tenant,
    completion_id: str,
    max_tokens: int,
) -> Sequence[Submit]:
    return [
        Submit(
            request_id=f"{completion_id}-{choice}",
            tenant_id=tenant.id,
            segments=segments,
            sampling=_sampling(request, max_tokens, choice),
            document_order=documents.engine_order,
            pin_top=documents.pin_top,
            use_cache=request.body.use_cache,
        )
        for choice in range(request.body.n)
    ]


def _sampling(request: ChatRequest, max_tokens: int, choice: int) -> SamplingParams:
    body = request.body
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        # Choice 0 has the seed itself: it is what the same request with n=1 gives.
        seed=None if body.seed is None else (body.seed + choice * _SEED_STEP) % _SEED_LIMIT,
        stop=request.stop,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
    )
