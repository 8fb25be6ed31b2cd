"""What chat and text completions look like on the wire: OpenAI's objects.

Ours inside them are `retrieval`, `citations`, `cache_report` and `usage.query_rewrite`, and only where they were asked
for.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.cache_report import CacheReport
from gateway.model_use import ModelUse

FinishReasonText = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, use: ModelUse) -> TokenUsage:
        account = use.account
        return TokenUsage(
            prompt_tokens=account.num_prompt_tokens,
            completion_tokens=use.num_output_tokens,
            total_tokens=account.num_prompt_tokens + use.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(account.num_cached_tokens),
        )


class Usage(TokenUsage, frozen=True, kw_only=True):
    """OpenAI's fields are the answer's, so that they say what clients take them for: the prompt that was answered, and
    the answer. What else the model did for the request stands beside them, and is charged with them."""

    query_rewrite: TokenUsage | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of_request(cls, answer: ModelUse, rewriting: ModelUse | None) -> Usage:
        own = TokenUsage.of(answer)
        return Usage(
            **msgspec.structs.asdict(own),
            query_rewrite=msgspec.UNSET if rewriting is None else TokenUsage.of(rewriting),
        )


class CitedDocument(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    title: str
    snippet: str


class CitationSource(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["document"] = "document"
    id: str
    document: CitedDocument


class CitationObject(msgspec.Struct, frozen=True, kw_only=True):
    """Cohere's. `start` and `end` are characters of the answer."""

    start: int
    end: int
    text: str
    sources: tuple[CitationSource, ...]
    type: Literal["TEXT_CONTENT"] = "TEXT_CONTENT"


class RetrievedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`rank` 0 is the most relevant; `position` is its place among this turn's documents, as the model read them."""

    id: str
    file_id: str
    filename: str
    score: float
    rank: int
    position: int | None


class RetrievalReport(msgspec.Struct, frozen=True, kw_only=True):
    query: str
    document_order: str
    documents: tuple[RetrievedDocument, ...]


class ChatTopToken(msgspec.Struct, frozen=True, kw_only=True):
    """`token` with U+FFFD in it is a part of a character: `bytes` says which."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatToken(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[ChatTopToken, ...]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: tuple[ChatToken, ...]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`citations` is there whenever documents were."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    citations: tuple[CitationObject, ...] | msgspec.UnsetType = msgspec.UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonText


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[Choice, ...]
    usage: Usage
    retrieval: RetrievalReport | msgspec.UnsetType = msgspec.UNSET
    cache_report: CacheReport | msgspec.UnsetType = msgspec.UNSET


class ChunkDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    citations: tuple[CitationObject, ...] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReasonText | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is absent unless the stream was asked for it; then it is null on every chunk but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    retrieval: RetrievalReport | msgspec.UnsetType = msgspec.UNSET  # with a choice's finish reason
    cache_report: CacheReport | msgspec.UnsetType = msgspec.UNSET  # after the last choice


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Columns: one entry a token. `text_offset`: characters of the choice's text before it."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReasonText | None = None


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, and every chunk of a stream. `usage` as in a chat's chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[TextChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "radixgate"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]
