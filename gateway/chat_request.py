"""The body of POST /v1/chat/completions: read, checked, and named by path where it is wrong.

    bytes ──► JSON object ──► without what changes nothing ──► typed fields ──► messages, documents
              400             400 unsupported_parameter         400 with path    400 with path

An assistant message may come last: as with OpenAI, it is not continued, a new answer follows it.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError, UnsupportedParameterError
from engine.protocol import MAX_TOP_LOGPROBS
from gateway.generation_fields import GenerationFields, TokenCount, check_min_tokens, read_fields
from gateway.inert_parameters import CHAT, without_inert
from gateway.json_body import as_object, as_string, check_count, json_object, wrong_type
from gateway.prompt import Message, Role
from gateway.retrieval_request import ChatRetrieval, read_tools
from retrieval import documents
from retrieval.documents import Document

# `developer` is the newer name of the same thing; templates know only `system`.
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Fields of a message that clients send along empty, for instance when they return our own answer as history.
_EMPTY_MESSAGE_FIELDS = frozenset({"annotations", "audio", "function_call", "name", "refusal", "tool_calls"})


class ChatBody(GenerationFields, frozen=True, kw_only=True):
    """The fields that are honoured. OpenAI's first, then ours."""

    messages: list[object]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    documents: list[object] = msgspec.field(default_factory=list[object])
    document_order: Literal["given", "canonical", "cache"] = "given"  # of `documents`
    pin_top: Annotated[int, Meta(ge=0, le=4096)] = 0
    retrieval: ChatRetrieval | None = None
    tools: list[object] = msgspec.field(default_factory=list[object])
    system_prompt_id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None  # one the operator has published
    cache_report: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A body that is right in itself; whether model and prompt fit is the engine's matter."""

    body: ChatBody
    messages: tuple[Message, ...]
    documents: tuple[Document, ...]
    retrieval: ChatRetrieval | None
    max_tokens: int | None

    @property
    def num_characters(self) -> int:
        return sum(len(message.text) for message in self.messages)


def parse_chat_request(raw: bytes, content_type: str, max_choices: int) -> ChatRequest:
    """Raises `RequestError` for whatever is wrong with the bytes or what they say."""
    given = json_object(raw, content_type)
    body = read_fields(without_inert(given, CHAT), ChatBody, max_choices)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("`top_logprobs` is for `logprobs: true` only.", param="top_logprobs")
    max_tokens = _max_tokens(body)
    check_min_tokens(body.min_tokens, max_tokens)
    check_count(body.documents, "documents")
    try:
        docs = documents.parse(body.documents)
    except documents.DocumentError as error:
        raise InvalidRequestError(f"{error.path}: {error.message}", param=error.path) from error
    return ChatRequest(
        body=body,
        messages=_messages(body.messages),
        documents=tuple(docs),
        retrieval=_retrieval(body, use_tools=given.get("tool_choice") != "none"),
        max_tokens=max_tokens,
    )


def _retrieval(body: ChatBody, *, use_tools: bool) -> ChatRetrieval | None:
    check_count(body.tools, "tools")
    of_tools = read_tools(body.tools) if use_tools else None
    if of_tools is not None and body.retrieval is not None:
        raise InvalidRequestError("`retrieval` and a `file_search` tool say the same; give one.", param="tools")
    wanted, path = (body.retrieval, "retrieval") if of_tools is None else (of_tools, "tools[0]")
    if wanted is None:
        if not body.documents and (body.document_order != "given" or body.pin_top):
            raise InvalidRequestError(
                "`document_order` and `pin_top` are for `documents`; `retrieval` has its own.", param="document_order"
            )
        return None
    if body.documents:
        raise InvalidRequestError("Give `documents`, or `retrieval`; not both.", param="documents")
    wanted.predicate(path)
    wanted.ranking_options.check(f"{path}.ranking_options")
    return wanted


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError("`max_tokens` and `max_completion_tokens` differ; give one.", param="max_tokens")
    return old if new is None else new


def _messages(raw: list[object]) -> tuple[Message, ...]:
    if not raw:
        raise InvalidRequestError("`messages` is empty.", param="messages")
    check_count(raw, "messages")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(raw))


def _message(raw: object, path: str) -> Message:
    fields = as_object(raw, path)
    for name, value in fields.items():
        if name not in ("role", "content") and not (name in _EMPTY_MESSAGE_FIELDS and value in (None, [])):
            raise UnsupportedParameterError(f"`{path}.{name}` is not supported.", param=f"{path}.{name}")
    role = as_string(fields.get("role"), f"{path}.role")
    if role in ("tool", "function"):
        raise UnsupportedParameterError(f"`{path}.role`: {role} messages are not supported.", param=f"{path}.role")
    if role not in _ROLES:
        raise InvalidRequestError(f"`{path}.role` must be one of {', '.join(_ROLES)}.", param=f"{path}.role")
    return Message(_ROLES[role], _content(fields.get("content"), f"{path}.content"))


def _content(raw: object, path: str) -> str:
    if not isinstance(raw, list):
        return as_string(raw, path, "a string or an array of text parts")
    parts = cast("list[object]", raw)
    if not parts:
        raise wrong_type(path, "a string or a non-empty array of text parts", parts)
    check_count(parts, path)
    return "".join(_text_part(part, f"{path}[{i}]") for i, part in enumerate(parts))


def _text_part(raw: object, path: str) -> str:
    part = as_object(raw, path)
    kind = as_string(part.get("type"), f"{path}.type")
    if kind != "text":
        raise UnsupportedParameterError(f"`{path}.type`: only text parts are supported.", param=f"{path}.type")
    for name in part:
        if name not in ("type", "text"):
            raise UnsupportedParameterError(f"`{path}.{name}` is not supported.", param=f"{path}.{name}")
    return as_string(part.get("text"), f"{path}.text")
