"""POST /v1/chat/completions: from the HTTP request to the engine requests of its choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from msgspec.structs import replace

from engine.errors import ContextLengthExceededError, InvalidRequestError, ModelNotFoundError, ShuttingDownError
from engine.protocol import SamplingParams, Segment, Submit
from gateway.cache_report import Outline, PromptHistory, ReportRequest
from gateway.chat_documents import ChatDocuments, ChatRetriever, without_earlier_turns
from gateway.chat_request import ChatRequest, parse_chat_request
from gateway.chat_response import ChatCompletionResponse, CompletionHeader
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.http_io import HttpRequest, raw_body
from gateway.metering import Attempt, Metering
from gateway.prompt import Message
from gateway.prompt_scopes import PromptScopes
from gateway.request_context import request_context
from gateway.request_timing import RequestTiming
from gateway.served_model import ServedModel, ServedModels, num_tokens
from gateway.tenants import Caller, Tenant, TenantDirectory

# Spreads the seeds of parallel choices; any odd number with well-mixed bits does.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_LIMIT = 1 << 63


class ChatCompletions:
    def __init__(
        self,
        engine: Engine,
        models: ServedModels,
        retriever: ChatRetriever,
        drain: Drain,
        tenants: TenantDirectory,
        metering: Metering,
        max_choices: int,
    ) -> None:
        self._engine = engine
        self._models = models
        self._retriever = retriever
        self._drain = drain
        self._tenants = tenants
        self._metering = metering
        self._max_choices = max_choices
        self._history = PromptHistory()

    async def respond(
        self, raw: bytes, headers: Mapping[str, str], caller: Caller, timing: RequestTiming
    ) -> ChatCompletionResponse:
        """Raises whatever can be known to be wrong before the engine is asked."""
        if self._drain.draining:
            raise ShuttingDownError("The server is shutting down.")
        request = parse_chat_request(raw, headers.get("content-type", ""), self._max_choices)
        model = await self._models.current()
        if request.body.model != model.info.model:
            raise ModelNotFoundError(f"The model `{request.body.model[:200]}` does not exist.", param="model")
        _check_logit_bias(request, model.info.vocab_size)
        tenant, request = caller.tenant, self._with_published_prompt(request)
        scopes = PromptScopes.of_request(self._tenants.secret, tenant, request.narrowing, self._tenants.published)
        with timing.retrieving():
            documents = await self._retriever.documents(request, tenant, scopes, model)
        documents, segments = await _build_prompt(request, documents, scopes, model)
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
        attempt = Attempt(
            caller=caller,
            request_id=header.id,
            model=header.model,
            num_prompt_tokens=num_tokens(segments),
            max_output_tokens=max_tokens * request.body.n,
            is_retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
            digest=Attempt.digest_of(raw),
        )
        return ChatCompletionResponse(
            header,
            _submits(request, segments, documents, tenant, header.id, max_tokens),
            documents,
            self._engine,
            self._drain,
            self._metering,
            attempt,
            stream=request.body.stream,
            include_usage=request.include_usage,
            report=self._report(request, documents, segments, headers, tenant),
        )

    def _with_published_prompt(self, request: ChatRequest) -> ChatRequest:
        """`system_prompt_id` stands for a system message at the head."""
        wanted = request.body.system_prompt_id
        if wanted is None:
            return request
        prompt = self._tenants.published.prompts.get(wanted)
        if prompt is None:
            raise InvalidRequestError(f"There is no published prompt `{wanted}`.", param="system_prompt_id")
        return replace(request, messages=(Message("system", prompt.text), *request.messages))

    def _report(
        self,
        request: ChatRequest,
        documents: ChatDocuments,
        segments: tuple[Segment, ...],
        headers: Mapping[str, str],
        tenant: Tenant,
    ) -> ReportRequest | None:
        outline = Outline.of(request, documents.latest)
        earlier = self._history.note(tenant.id, outline)
        if not request.body.cache_report and headers.get("x-radixgate-cache-report", "0") != "1":
            return None
        return ReportRequest(segments, outline, earlier)


def chat_route(chat: ChatCompletions) -> HTTPRouteHandler:
    @post("/chat/completions", status_code=200)
    async def create_chat_completion(request: HttpRequest) -> ASGIApp:
        context = request_context(request.scope)
        assert context.caller is not None, "the route is behind tenant_guard"
        return await chat.respond(await raw_body(request), request.headers, context.caller, context.timing)

    return create_chat_completion


def _check_logit_bias(request: ChatRequest, vocab_size: int) -> None:
    for token_id in request.logit_bias:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"`logit_bias`: {token_id} is not a token; the vocabulary has {vocab_size}.", param="logit_bias"
            )


async def _build_prompt(
    request: ChatRequest, documents: ChatDocuments, scopes: PromptScopes, model: ServedModel
) -> tuple[ChatDocuments, tuple[Segment, ...]]:
    try:
        return documents, await model.build_prompt(request, documents.prompt, scopes)
    except ContextLengthExceededError:
        fewer = without_earlier_turns(documents)
        if fewer is None:
            raise
        return fewer, await model.build_prompt(request, fewer.prompt, scopes)


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
            policy=tenant.record.policy.for_engine(),
            priority=tenant.record.policy.priority,
            use_cache=request.body.use_cache and not tenant.record.policy.no_store,
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
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=request.logit_bias,
        # Choice 0 has the seed itself: it is what the same request with n=1 gives.
        seed=None if body.seed is None else (body.seed + choice * _SEED_STEP) % _SEED_LIMIT,
        stop=request.stop,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
    )
