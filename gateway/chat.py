"""POST /v1/chat/completions: from the HTTP request to the prompt.

body ─► search (checked) ─► documents ─► prompt ─► admission ─► answer
              └─ with a query to be rewritten ─► admission ─► query ─► documents ─► prompt ─► answer
"""

from __future__ import annotations

from dataclasses import dataclass

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Send
from msgspec.structs import replace

from engine.errors import ContextLengthExceededError, InvalidRequestError
from engine.protocol import Segment
from gateway.admission import Admission, Admitted
from gateway.answer import Answer, CompletionHeader
from gateway.answering import Answering, Prompt
from gateway.cache_report import Diagnosis, Outline, PromptHistory
from gateway.call import Call, call_of
from gateway.chat_documents import (
    ChatDocuments,
    ChatRetriever,
    ChatSearch,
    clients_own,
    without_earlier_turns,
)
from gateway.chat_request import ChatRequest, parse_chat_request
from gateway.chat_response import ChatForm
from gateway.engine_port import Engine
from gateway.http_io import HttpRequest
from gateway.prompt import Message
from gateway.prompt_scopes import PromptScopes
from gateway.query_rewrite import Rewriting, rewrite
from gateway.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class _Chat:
    """What is asked, by whom, of what."""

    call: Call
    request: ChatRequest
    scopes: PromptScopes
    model: ServedModel
    header: CompletionHeader


class ChatCompletions:
    def __init__(self, engine: Engine, answering: Answering, retriever: ChatRetriever) -> None:
        self._engine = engine
        self._answering = answering
        self._retriever = retriever
        self._history = PromptHistory()

    async def respond(self, call: Call) -> Admitted:
        """Raises whatever can be known to be wrong before the engine is asked."""
        answering = self._answering
        answering.check_open()
        request = parse_chat_request(call.raw, call.content_type, answering.max_choices)
        model = await answering.model(request.body)
        request = self._with_published_prompt(request)
        scopes = answering.scopes(request.body, call.caller)
        chat = _Chat(call, request, scopes, model, answering.header("chatcmpl", model))
        search = await self._retriever.search_of(request, call.caller.tenant, scopes, model)
        rewriting = None if search is None else await search.rewriting()
        if search is not None and rewriting is not None:
            return self._with_rewritten_query(chat, search, rewriting)
        with call.timing.retrieving():
            documents = await self._documents(chat, search)
        return answering.admitted(call, request.body, await self._answer(chat, documents), chat.header)

    def _with_rewritten_query(self, chat: _Chat, search: ChatSearch, rewriting: Rewriting) -> Admitted:
        """The prompt depends on what the model says first, so the request is admitted before there is one."""

        async def reply(admission: Admission, send: Send) -> None:
            with chat.call.timing.retrieving():
                (query,) = await rewrite(self._engine, rewriting, admission)
                documents = await self._documents(chat, search.rewritten(query))
            answer = await self._answer(chat, documents)
            await admission.reserve_answer(answer.num_tokens)
            await answer.give(admission, send)

        return self._answering.admissions.admitted(
            chat.call,
            reply,
            request_id=chat.header.id,
            model=chat.header.model,
            num_tokens=rewriting.num_tokens,
            stream=chat.request.body.stream,
        )

    async def _documents(self, chat: _Chat, search: ChatSearch | None) -> ChatDocuments:
        if search is None:
            return clients_own(chat.request, chat.scopes.published)
        return await self._retriever.documents(search)

    async def _answer(self, chat: _Chat, documents: ChatDocuments) -> Answer:
        request, model = chat.request, chat.model
        documents, segments = await _build_prompt(request, documents, chat.scopes, model)
        diagnosis = self._diagnosis(request, documents, segments, chat.call, model)
        form = ChatForm(
            chat.header,
            documents,
            diagnosis,
            include_usage=request.body.include_usage,
            has_logprobs=request.body.num_logprobs is not None,
        )
        prompt = Prompt(segments=segments, document_order=documents.engine_order, pin_top=documents.pin_top)
        tenant = chat.call.caller.tenant
        return self._answering.answer(tenant, request.body, request.max_tokens, model, [prompt], form, chat.header.id)

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
