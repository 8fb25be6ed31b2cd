"""One streamed chat completion, timed at the client, from any OpenAI-compatible server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import aiohttp
import msgspec

TIMEOUT_S = 1800.0


class RequestFailedError(Exception):
    """A request without an answer: the measurement it belongs to is worth nothing."""


@dataclass(frozen=True)
class Target:
    """A server under test."""

    name: str
    base_url: str  # with /v1
    model: str
    api_key: str = ""
    takes_documents: bool = False  # radixgate's `documents` field instead of text in the user's message

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass
class Answer:
    started_s: float
    text_times_s: list[float] = field(default_factory=list)  # when text arrived, on the clock of `started_s`
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    output_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.text_times_s[0] - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.text_times_s, self.text_times_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, averaged over the answer."""
        if self.output_tokens < 2:
            return None
        return (self.text_times_s[-1] - self.text_times_s[0]) / (self.output_tokens - 1)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def client_session() -> aiohttp.ClientSession:
    # One connection a request: some servers close a kept-alive connection just when it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def first_model(session: aiohttp.ClientSession, base_url: str, api_key: str) -> str:
    """The name under which a server serves its (first) model."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with session.get(f"{base_url}/models", headers=headers) as response:
        body = await response.read()
        if response.status != 200:
            raise RequestFailedError(f"{base_url}/models: {response.status} {body[:300]!r}")
    return msgspec.json.decode(body, type=_Models).data[0].id


async def ask(session: aiohttp.ClientSession, target: Target, prompt: dict[str, object], max_tokens: int) -> Answer:
    """Greedy, exactly `max_tokens` long. Raises `RequestFailedError`."""
    body = prompt | {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
    }
    answer = Answer(started_s=time.perf_counter())
    url = f"{target.base_url}/chat/completions"
    async with session.post(url, json=body, headers=target.headers) as response:
        if response.status != 200:
            raise RequestFailedError(f"{target.name}: {response.status} {(await response.text())[:300]}")
        async for line in response.content:
            event = line.strip()
            if event.startswith(b"data:") and not event.endswith(b"[DONE]"):
                _take(answer, msgspec.json.decode(event[5:], type=_Chunk), target.name)
    if not answer.text_times_s:
        raise RequestFailedError(f"{target.name}: an answer without text")
    return answer


def _take(answer: Answer, chunk: _Chunk, name: str) -> None:
    if chunk.error is not None:
        raise RequestFailedError(f"{name}: {chunk.error.message}")
    text = "".join(choice.delta.content or "" for choice in chunk.choices)
    if text:
        answer.text_times_s.append(time.perf_counter())
        answer.text += text
    if (usage := chunk.usage) is not None:
        answer.prompt_tokens = usage.prompt_tokens
        answer.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
