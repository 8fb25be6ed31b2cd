"""POST /v1/chat/completions: from the HTTP request to the prompt."""

from __future__ import annotations

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from msgspec.structs import replace

from engine.errors import ContextLengthExceededError, InvalidRequestError
from engine.protocol import Segment
from gateway.answer import Answer
from gateway.answering import Answering, Call, Prompt
from gateway.cache_report import Diagnosis, Outline, PromptHistory
from gateway.chat_documents import ChatDocuments, ChatRetriever, without_earlier_turns
from gateway.chat_request import ChatRequest, parse_chat_request
from gateway.chat_response import ChatForm
from gateway.http_io import HttpRequest, raw_body
from gateway.prompt import Message
from gateway.prompt_scopes import PromptScopes
from gateway.request_context import request_context
from gateway.served_model import ServedModel


class ChatCompletions:
    def __init__(self, answering: Answering, retriever: ChatRetriever) -> None:
        self._answering = answering
        self._retriever = retriever
        self._history = PromptHistory()

    async def respond(self, call: Call) -> Answer:
        """Raises whatever can be known to be wrong before the engine is asked."""
        answering = self._answering
        answering.check_open()
        request = parse_chat_request(call.raw, call.content_type, answering.max_choices)
        model = await answering.model(request.body)
        request = self._with_published_prompt(request)
        scopes = answering.scopes(request.body, call.caller)
        with call.timing.retrieving():
            documents = await self._retriever.documents(request, call.caller.tenant, scopes, model)
        documents, segments = await _build_prompt(request, documents, scopes, model)
        header = answering.header("chatcmpl", model)
        diagnosis = self._diagnosis(request, documents, segments, call, model)
        form = ChatForm(
            header,
            documents,
            diagnosis,
            include_usage=request.body.include_usage,
            has_logprobs=request.body.num_logprobs is not None,
        )
        prompt = Prompt(segments=segments, document_order=documents.engine_order, pin_top=documents.pin_top)
        return answering.answer(call, request.body, request.max_tokens, model, [prompt], form, header.id)

    def _with_published_prompt(self, request: ChatRequest) -> ChatRequest:
        """`system_prompt_id` stands for a system message at the head."""
        wanted = request.body.system_prompt_id
        if wanted is None:
            return request
        prompt = self._answering.tenants.published.prompts.get(wanted)
        if prompt is None:
            raise InvalidRequestError(f"There is no published prompt `{wanted}`.", param="system_prompt_id")
        return replace(request, messages=(Message("system", prompt.text), *request.messages))

    def _diagnosis(
        self,
        request: ChatRequest,
        documents: ChatDocuments,
        segments: tuple[Segment, ...],
        call: Call,
        model: ServedModel,
    ) -> Diagnosis:
        outline = Outline.of(request, documents.latest, drops_reasoning=model.prompts.drops_reasoning)
        wanted = request.body.cache_report or call.headers.get("x-radixgate-cache-report", "0") == "1"
        return Diagnosis(segments, outline, self._history.note(call.caller.tenant.id, outline), wanted)


def chat_route(chat: ChatCompletions) -> HTTPRouteHandler:
    @post("/chat/completions", status_code=200)
    async def create_chat_completion(request: HttpRequest) -> ASGIApp:
        return await chat.respond(await call_of(request))

    return create_chat_completion


async def call_of(request: HttpRequest) -> Call:
    context = request_context(request.scope)
    assert context.caller is not None, "the route is behind tenant_guard"
    return Call(raw=await raw_body(request), headers=request.headers, caller=context.caller, timing=context.timing)


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
