"""The model that the engine serves, as far as the gateway needs it: its limits and its prompt builder.

Tokenizer and chat template come from the engine with `EngineInfo`, so the two share no file system. They are built
once for an engine, outside the event loop (a large tokenizer takes a second), and again when the engine comes back
as another model.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from engine.errors import ContextLengthExceededError, EngineUnavailableError, InvalidRequestError
from engine.protocol import EngineInfo, Segment
from gateway.chat_request import ChatRequest
from gateway.chat_template import ChatTemplate
from gateway.engine_port import Engine
from gateway.prompt import PromptBuilder, PromptDocuments
from gateway.prompt_scopes import PromptScopes
from gateway.prompt_tokenizer import PromptTokenizer

# Above these, a prompt is built in a thread: tokenizing takes about half a microsecond a character, rendering about
# ten a message.
_INLINE_CHARACTERS = 16_384
_INLINE_MESSAGES = 256


class ServedModel:
    def __init__(self, info: EngineInfo, prompts: PromptBuilder) -> None:
        self.info = info
        self.prompts = prompts
        # The chat template has a say in which tokens are special.
        digest = hashlib.blake2b(info.tokenizer_json + info.chat_template.encode(), digest_size=8)
        self.tokenizer_name = digest.hexdigest()

    @classmethod
    def of(cls, info: EngineInfo) -> ServedModel:
        template = ChatTemplate(info.chat_template, info.special_tokens)
        return cls(info, PromptBuilder(template, PromptTokenizer(info.tokenizer_json, template.own_text())))

    def describes(self, info: EngineInfo) -> bool:
        return self.info.tokenizer_json == info.tokenizer_json and self.info.chat_template == info.chat_template

    async def build_prompt(
        self, request: ChatRequest, documents: PromptDocuments, scopes: PromptScopes
    ) -> tuple[Segment, ...]:
        """Raises `ContextLengthExceededError` when the prompt leaves no room for a single token."""
        num_characters = request.num_characters + documents.num_characters
        if num_characters <= _INLINE_CHARACTERS and len(request.messages) <= _INLINE_MESSAGES:
            segments = self.prompts.build(request.messages, documents, scopes)
        else:
            segments = await asyncio.to_thread(self.prompts.build, request.messages, documents, scopes)
        self._check_length(num_tokens(segments))
        return segments

    async def build_raw_prompt(self, prompt: str | tuple[int, ...], scopes: PromptScopes) -> tuple[Segment, ...]:
        """A prompt that no template stands around. Raises as `build_prompt`, and for what is no token."""
        if isinstance(prompt, str) and len(prompt) > _INLINE_CHARACTERS:
            segments = await asyncio.to_thread(self.prompts.build_raw, prompt, scopes)
        else:
            segments = self.prompts.build_raw(prompt, scopes)
        self._check_length(num_tokens(segments), param="prompt")
        if not isinstance(prompt, str) and max(prompt) >= self.info.vocab_size:
            raise InvalidRequestError(
                f"`prompt`: {max(prompt)} is not a token; the vocabulary has {self.info.vocab_size}.", param="prompt"
            )
        return segments

    def max_tokens(self, asked: int | None, num_prompt_tokens: int) -> int:
        """What a client asks for is an upper bound; the model's context is another."""
        room = self.info.max_model_len - num_prompt_tokens
        return room if asked is None else min(asked, room)

    def _check_length(self, num_prompt_tokens: int, param: str = "messages") -> None:
        limit = self.info.max_model_len
        if num_prompt_tokens >= limit:
            raise ContextLengthExceededError(
                f"The prompt has {num_prompt_tokens} tokens, and this model's context length is {limit} tokens, "
                "of which at least one is for the answer. Shorten the messages or the documents.",
                param=param,
            )


class ServedModels:
    """The one place that turns `engine.info` into a `ServedModel`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._current: ServedModel | None = None
        self._lock = asyncio.Lock()

    def info(self) -> EngineInfo:
        info = self._engine.info
        if info is None:
            raise EngineUnavailableError("The engine has not started yet, or cannot be reached.")
        return info

    async def current(self) -> ServedModel:
        info = self.info()
        known = self._current
        if known is not None and known.info is info:
            return known
        async with self._lock:
            known = self._current
            if known is not None and known.describes(info):
                self._current = ServedModel(info, known.prompts)
            else:
                self._current = await asyncio.to_thread(ServedModel.of, info)
            return self._current


def num_tokens(segments: Sequence[Segment]) -> int:
    return sum(len(segment) for segment in segments)
