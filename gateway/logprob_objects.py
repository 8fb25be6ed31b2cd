"""Log probabilities on the wire: a chat completion's list of tokens, and the four columns of a text completion."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.protocol import DrawnToken, TokenLogprob
from gateway.openai_types import ChatLogprobs, ChatToken, ChatTopToken, TextLogprobs


def chat_logprobs(tokens: Sequence[DrawnToken]) -> ChatLogprobs:
    return ChatLogprobs(content=tuple(_chat_token(token) for token in tokens))


def _chat_token(token: DrawnToken) -> ChatToken:
    return ChatToken(
        token=_text(token.token),
        logprob=token.logprob,
        bytes=tuple(token.token),
        top_logprobs=tuple(_chat_top_token(each) for each in token.top),
    )


def _chat_top_token(token: TokenLogprob) -> ChatTopToken:
    return ChatTopToken(token=_text(token.token), logprob=token.logprob, bytes=tuple(token.token))


class TextColumns:
    """Of one choice: knows where its next token's text begins."""

    def __init__(self) -> None:
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, tokens: Sequence[DrawnToken]) -> TextLogprobs:
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(token.token))
        return TextLogprobs(
            tokens=tuple(_text(token.token) for token in tokens),
            token_logprobs=tuple(token.logprob for token in tokens),
            # Tokens that are no text by themselves may look alike; the best of them stands.
            top_logprobs=tuple({_text(each.token): each.logprob for each in reversed(token.top)} for token in tokens),
            text_offset=tuple(offsets),
        )


def _text(token: bytes) -> str:
    return token.decode(errors="replace")
