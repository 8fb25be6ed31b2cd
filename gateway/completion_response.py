"""A text completion on the wire: the whole object, or its chunks, which are objects of the same shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from engine.protocol import DrawnToken, PromptAccount
from gateway.answer import CompletionHeader, GeneratedText
from gateway.logprob_objects import TextColumns
from gateway.openai_types import TextChoice, TextCompletion, TextLogprobs, Usage

_JSON = msgspec.json.Encoder()


class CompletionForm:
    """An `AnswerForm`."""

    def __init__(self, header: CompletionHeader, *, include_usage: bool, has_logprobs: bool) -> None:
        self._header = header
        self._include_usage = include_usage
        self._has_logprobs = has_logprobs
        self._columns: defaultdict[int, TextColumns] = defaultdict(TextColumns)

    async def begin(self, account: PromptAccount, document_order: tuple[int, ...] | None) -> tuple[str, ...]:
        """Nothing of it depends on where the prompt came from, and what it is made of is not known."""
        return ()

    def whole(self, choices: Sequence[GeneratedText], usage: Usage) -> bytes:
        return self._encode(
            [
                TextChoice(
                    index=index,
                    text=generated.text,
                    logprobs=self._logprobs(index, generated.tokens),
                    finish_reason=generated.finish_reason,
                )
                for index, generated in enumerate(choices)
            ],
            usage,
        )

    def opening(self, choice: int) -> None:
        """A choice begins with its first text."""

    def piece(self, choice: int, text: str, tokens: tuple[DrawnToken, ...]) -> bytes:
        return self._chunk(TextChoice(index=choice, text=text, logprobs=self._logprobs(choice, tokens)))

    def _logprobs(self, choice: int, tokens: tuple[DrawnToken, ...]) -> TextLogprobs | None:
        return self._columns[choice].next(tokens) if self._has_logprobs else None

    def ending(self, choice: int, generated: GeneratedText) -> bytes:
        return self._chunk(TextChoice(index=choice, text="", finish_reason=generated.finish_reason))

    def closing(self, usage: Usage) -> bytes | None:
        return self._encode((), usage) if self._include_usage else None

    def _chunk(self, choice: TextChoice) -> bytes:
        return self._encode((choice,), None if self._include_usage else msgspec.UNSET)

    def _encode(self, choices: Sequence[TextChoice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        header = self._header
        return _JSON.encode(
            TextCompletion(
                id=header.id,
                created=header.created,
                model=header.model,
                system_fingerprint=header.system_fingerprint,
                choices=tuple(choices),
                usage=usage,
            )
        )
