"""The body of POST /v1/completions: one prompt or several, as text or as token ids.

    "text" · ["text", …] · [token, …] · [[token, …], …]

The text is a client's, all of it: what reads like a special token in it stays text, as in a chat. Who wants special
tokens sends token ids.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError, UnsupportedParameterError
from engine.protocol import MAX_TOP_LOGPROBS
from gateway.generation_fields import GenerationFields, TokenId, check_min_tokens, read_fields
from gateway.inert_parameters import COMPLETION, without_inert
from gateway.json_body import json_object

MAX_PROMPTS = 32
_DEFAULT_MAX_TOKENS = 16  # OpenAI's

TextPrompt = Annotated[str, Meta(min_length=1)]
PromptField = TextPrompt | list[TextPrompt | TokenId | list[TokenId]]


class CompletionBody(GenerationFields, frozen=True, kw_only=True):
    prompt: PromptField
    best_of: int | None = None  # accepted as `n`, which asks for nothing else
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    body: CompletionBody
    prompts: tuple[str | tuple[int, ...], ...]
    max_tokens: int


def parse_completion_request(raw: bytes, content_type: str, max_choices: int) -> CompletionRequest:
    """Raises `RequestError` for whatever is wrong with the bytes or what they say."""
    body = read_fields(without_inert(json_object(raw, content_type), COMPLETION), CompletionBody, max_choices)
    if body.best_of not in (None, body.n):
        raise UnsupportedParameterError("`best_of` is not supported, except as the same as `n`.", param="best_of")
    max_tokens = body.max_tokens or _DEFAULT_MAX_TOKENS
    check_min_tokens(body.min_tokens, max_tokens)
    return CompletionRequest(body=body, prompts=_prompts(body.prompt), max_tokens=max_tokens)


def _prompts(given: PromptField) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str):
        return (given,)
    token_ids = tuple(item for item in given if isinstance(item, int))
    if token_ids and len(token_ids) == len(given):
        return (token_ids,)
    if len(given) > MAX_PROMPTS:
        raise InvalidRequestError(f"`prompt` has {len(given)} prompts; the most is {MAX_PROMPTS}.", param="prompt")
    prompts = tuple(tuple(item) if isinstance(item, list) else item for item in given if not isinstance(item, int))
    if token_ids or not prompts or not all(prompts):
        raise InvalidRequestError(
            "`prompt` must be a text, token ids, or a list of such that are not empty.", param="prompt"
        )
    return prompts
