"""A chat completion on the wire: the whole object, or its chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.protocol import DrawnToken, PromptAccount
from gateway.answer import CompletionHeader, GeneratedText
from gateway.cache_report import CacheReport, Diagnosis
from gateway.chat_documents import ChatDocuments
from gateway.logprob_objects import chat_logprobs
from gateway.openai_types import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Choice,
    ChunkChoice,
    ChunkDelta,
    CitationObject,
    Usage,
)

_JSON = msgspec.json.Encoder()


class ChatForm:
    """An `AnswerForm`."""

    def __init__(
        self,
        header: CompletionHeader,
        documents: ChatDocuments,
        diagnosis: Diagnosis,
        *,
        include_usage: bool,
        has_logprobs: bool,
    ) -> None:
        self._header = header
        self._documents = documents
        self._diagnosis = diagnosis
        self._report: CacheReport | None = None
        self._include_usage = include_usage
        self._has_logprobs = has_logprobs

    async def begin(self, account: PromptAccount, document_order: tuple[int, ...] | None) -> tuple[str, ...]:
        self._documents.settle(document_order)
        hints = self._diagnosis.hints(account)
        self._report = self._diagnosis.report(account, document_order, hints)
        await self._documents.remember()
        return tuple(hint.code for hint in hints)

    def whole(self, choices: Sequence[GeneratedText], usage: Usage) -> bytes:
        header = self._header
        completion = ChatCompletion(
            id=header.id,
            created=header.created,
            model=header.model,
            system_fingerprint=header.system_fingerprint,
            choices=tuple(self._choice(i, generated) for i, generated in enumerate(choices)),
            usage=usage,
            retrieval=self._documents.report() or msgspec.UNSET,
            cache_report=self._report or msgspec.UNSET,
        )
        return _JSON.encode(completion)

    def _choice(self, index: int, generated: GeneratedText) -> Choice:
        message = AssistantMessage(content=generated.text, citations=self._citations(generated.text))
        return Choice(
            index=index,
            message=message,
            logprobs=self._logprobs(generated.tokens),
            finish_reason=generated.finish_reason,
        )

    def _logprobs(self, tokens: tuple[DrawnToken, ...]) -> ChatLogprobs | None:
        return chat_logprobs(tokens) if self._has_logprobs else None

    def _citations(self, text: str) -> tuple[CitationObject, ...] | msgspec.UnsetType:
        return self._documents.citations(text) if self._documents.all else msgspec.UNSET

    # ------------------------------------------------------------ stream

    def opening(self, choice: int) -> bytes:
        return self._chunk(ChunkChoice(index=choice, delta=ChunkDelta(role="assistant", content="")))

    def piece(self, choice: int, text: str, tokens: tuple[DrawnToken, ...]) -> bytes:
        delta = ChunkDelta(content=text)
        return self._chunk(ChunkChoice(index=choice, delta=delta, logprobs=self._logprobs(tokens)))

    def ending(self, choice: int, generated: GeneratedText) -> bytes:
        delta = ChunkDelta(citations=self._citations(generated.text))
        return self._chunk(ChunkChoice(index=choice, delta=delta, finish_reason=generated.finish_reason))

    def closing(self, usage: Usage) -> bytes | None:
        if not self._include_usage and self._report is None:
            return None
        return self._encode((), usage if self._include_usage else msgspec.UNSET, self._report)

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return self._encode((choice,), None if self._include_usage else msgspec.UNSET)

    def _encode(
        self,
        choices: tuple[ChunkChoice, ...],
        usage: Usage | msgspec.UnsetType | None,
        report: CacheReport | None = None,
    ) -> bytes:
        header = self._header
        ends = bool(choices) and choices[0].finish_reason is not None
        return _JSON.encode(
            ChatCompletionChunk(
                id=header.id,
                created=header.created,
                model=header.model,
                system_fingerprint=header.system_fingerprint,
                choices=choices,
                usage=usage,
                retrieval=(self._documents.report() if ends else None) or msgspec.UNSET,
                cache_report=report or msgspec.UNSET,
            )
        )
