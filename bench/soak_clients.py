"""The clients of `bench.soak`: each does one thing after the other until its round is over, and checks what it is told.

repeat, stream, uncached   one of a few questions, greedily: the same text as ever (I7), cached or not
novel, parallel            a prompt never seen before; two samples at once
stranger                   one tenant's own prompt, asked by the other: nothing of it is found (I5)
document                   asked over, erased from the cache, asked again: nothing of it is found
file                       uploaded, found by a search, deleted, found by no search
abort, retry               leave in mid-stream; leave and ask the same again
bad                        a body that has to be refused
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import aiohttp

STORE_SECONDS = 120.0  # for which what lives in the store may be away
INGEST_SECONDS = 300.0
MAX_TOKENS = 24
_SYSTEMS = ("The quick brown fox jumps over the lazy dog. ", "A cache keeps what may be asked again. ", "Water boils. ")

Json = dict[str, object]


class BrokenPromiseError(Exception):
    """Something that must hold did not."""


@dataclass
class Tally:
    """What the clients were told; tokens by tenant."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    prompt: Counter[str] = field(default_factory=Counter[str])
    cached: Counter[str] = field(default_factory=Counter[str])
    output: Counter[str] = field(default_factory=Counter[str])
    aborted: Counter[str] = field(default_factory=Counter[str])
    waited_for_store: int = 0


@dataclass(frozen=True)
class Answer:
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Credentials:
    """Two tenants of the server. Only the first one's clients leave, so that the other's sums are known exactly."""

    base_url: str  # with /v1
    own: str
    neighbour: str

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.own if tenant == 'own' else self.neighbour}"}


class Clients:
    """`retrieval`: whether the server has an embedder; without one there are no `document` and no `file`."""

    def __init__(
        self, session: aiohttp.ClientSession, credentials: Credentials, model: str, seed: int, *, retrieval: bool
    ) -> None:
        self.tally = Tally()
        self._session = session
        self._credentials = credentials
        self._model = model
        self._dice = random.Random(seed)
        self._texts: dict[str, str] = {}  # of each question, the longest answer so far
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "repeat": (4, self._repeat),
            "stream": (4, self._stream),
            "uncached": (1, self._uncached),
            "novel": (2, self._novel),
            "parallel": (1, self._parallel),
            "stranger": (1, self._stranger),
            "abort": (2, self._abort),
            "retry": (1, self._retry),
            "bad": (1, self._bad),
        }
        if retrieval:
            self._kinds |= {"document": (1, self._document), "file": (1, self._file)}

    async def work(self, deadline: float) -> None:
        """Until then, by the monotonic clock. Raises BrokenPromiseError."""
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        while time.monotonic() < deadline:
            (kind,) = self._dice.choices(names, weights)
            await self._kinds[kind][1]()
            self.tally.kinds[kind] += 1

    # ------------------------------------------------------------ kinds

    async def _repeat(self) -> None:
        await self._ask_again({})

    async def _stream(self) -> None:
        await self._ask_again({"stream": True, "stream_options": {"include_usage": True}})

    async def _uncached(self) -> None:
        await self._ask_again({"use_cache": False})

    async def _novel(self) -> None:
        await self._ask(self._tenant(), self._body(f"{self._novel_words()} {self._system()}", "What is this?"))

    async def _parallel(self) -> None:
        await self._ask(self._tenant(), self._body(self._system(), "Say it.") | {"n": 2, "temperature": 1})

    async def _stranger(self) -> None:
        body = self._body(f"{self._novel_words()} {self._system()}", "What is this?")
        first = await self._ask("own", body)
        found = (await self._ask("neighbour", body)).num_cached_tokens
        if found > _begins_alike(first):
            raise BrokenPromiseError(f"I5: a tenant found {found} tokens of a prompt that only another had asked")

    async def _document(self) -> None:
        tenant, name = self._tenant(), f"note-{self._dice.randrange(10**12)}"
        text = self._novel_words()
        body = self._body(self._system(), "What is in it?") | {"documents": [{"id": name, "text": text}]}
        await self._ask(tenant, body)
        await self._ask(tenant, body)
        await self._in_store("DELETE", f"/cache/documents/{name}", tenant)
        again = await self._ask(tenant, body)
        before_it = again.num_prompt_tokens - len(text.split())
        if again.num_cached_tokens > before_it:
            raise BrokenPromiseError(
                f"an erased document was found: {again.num_cached_tokens} tokens cached, {before_it} without it"
            )

    async def _file(self) -> None:
        tenant, words = self._tenant(), self._novel_words()
        form = [("purpose", "assistants"), ("file", words)]
        file = await self._in_store("POST", "/files", tenant, form=form)
        collection = await self._in_store("POST", "/vector_stores", tenant, {"name": "soak", "file_ids": [file["id"]]})
        place = f"/vector_stores/{collection['id']}"
        await self._ingested(place, tenant)
        search: Json = {"query": words}
        found = await self._in_store("POST", f"{place}/search", tenant, search)
        if not found["data"]:
            raise BrokenPromiseError("a file that was ingested is not found")
        retrieval: Json = {"retrieval": {"vector_store_ids": [collection["id"]]}}
        await self._ask(tenant, self._body(self._system(), words[:80]) | retrieval)
        await self._in_store("DELETE", f"/files/{file['id']}", tenant)
        if (await self._in_store("POST", f"{place}/search", tenant, search))["data"]:
            raise BrokenPromiseError("a file that was deleted is still found")
        await self._in_store("DELETE", place, tenant)

    async def _ingested(self, place: str, tenant: str) -> None:
        deadline = time.monotonic() + INGEST_SECONDS
        while True:
            collection = await self._in_store("GET", place, tenant)
            if collection["status"] == "completed":
                return
            if time.monotonic() > deadline:
                raise BrokenPromiseError(f"a file was not ingested: {collection['file_counts']}")
            await asyncio.sleep(0.5)

    async def _abort(self) -> None:
        await self._leave(self._body(self._system(), "Tell me more.") | {"max_tokens": 200})

    async def _retry(self) -> None:
        """As the SDKs do it, who count their attempts in a header."""
        body = self._body(self._system(), f"Tell me about {self._dice.randrange(4)}.")
        await self._leave(body)
        await self._ask("own", body, {"x-stainless-retry-count": "1"})

    async def _bad(self) -> None:
        body = self._body(self._system(), "?") | {"temperature": -1}
        async with self._chat("own", body) as answer:
            if answer.status != 400:
                raise BrokenPromiseError(f"a bad body: {answer.status} {await answer.text()}")

    # ------------------------------------------------------------ requests

    def _tenant(self) -> str:
        return self._dice.choice(("own", "neighbour"))

    def _system(self) -> str:
        return self._dice.choice(_SYSTEMS) * 8

    def _novel_words(self) -> str:
        return " ".join(f"{self._dice.randrange(10**6)}" for _ in range(24))

    def _body(self, system: str, question: str) -> Json:
        return {
            "model": self._model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "max_tokens": self._dice.randint(1, MAX_TOKENS),
            "temperature": 0,
        }

    async def _ask_again(self, how: Json) -> None:
        body = self._body(self._system(), f"Question {self._dice.randrange(4)}?")
        asked = json.dumps(body["messages"])
        text = (await self._ask(self._tenant(), body | how)).text.rstrip("\ufffd")  # a token may end within a letter
        known = self._texts.get(asked, "")
        longer, shorter = (text, known) if len(text) > len(known) else (known, text)
        if not longer.startswith(shorter):
            raise BrokenPromiseError(f"I7: one question, two answers: {known!r} and, with {how}, {text!r}")
        self._texts[asked] = longer

    async def _ask(self, tenant: str, body: Json, headers: dict[str, str] | None = None) -> Answer:
        async with self._chat(tenant, body, headers) as response:
            text = await response.text()
            if response.status != 200:
                raise BrokenPromiseError(f"{response.status} {text}")
        answer = _streamed(text) if body.get("stream") else _whole(text)
        if not 0 <= answer.num_cached_tokens < answer.num_prompt_tokens:
            raise BrokenPromiseError(f"I6: {answer.num_cached_tokens} of {answer.num_prompt_tokens} tokens cached")
        self.tally.prompt[tenant] += answer.num_prompt_tokens
        self.tally.cached[tenant] += answer.num_cached_tokens
        self.tally.output[tenant] += answer.num_output_tokens
        return answer

    async def _leave(self, body: Json) -> None:
        async with self._chat("own", body | {"stream": True}) as answer:
            if answer.status != 200:
                raise BrokenPromiseError(f"{answer.status} {await answer.text()}")
            await answer.content.readline()
            self.tally.aborted["own"] += 1
            answer.close()

    def _chat(
        self, tenant: str, body: Json, headers: dict[str, str] | None = None
    ) -> aiohttp.client._RequestContextManager:
        url = f"{self._credentials.base_url}/chat/completions"
        return self._session.post(url, json=body, headers=self._credentials.headers(tenant) | (headers or {}))

    async def _in_store(
        self, method: str, path: str, tenant: str, body: Json | None = None, form: list[tuple[str, str]] | None = None
    ) -> Json:
        """What lives in the store is 503 while the store is away: asked again, as every client does."""
        deadline = time.monotonic() + STORE_SECONDS
        again = False
        while True:
            status, text = await self._once(method, path, tenant, body, form)
            if status == 200:
                return cast("Json", json.loads(text))
            if again and (method, status) == ("DELETE", 404):  # the store went away between the deed and the answer
                return {}
            again = True
            if status != 503 or time.monotonic() > deadline:
                raise BrokenPromiseError(f"{method} {path}: {status} {text}")
            self.tally.waited_for_store += 1
            await asyncio.sleep(1.0)

    async def _once(
        self, method: str, path: str, tenant: str, body: Json | None, form: list[tuple[str, str]] | None
    ) -> tuple[int, str]:
        data = None
        if form is not None:
            data = aiohttp.FormData()
            for name, value in form:
                data.add_field(name, value, filename="soak.txt" if name == "file" else None)
        url, headers = f"{self._credentials.base_url}{path}", self._credentials.headers(tenant)
        async with self._session.request(method, url, json=body, data=data, headers=headers) as answer:
            return answer.status, await answer.text()


def _begins_alike(answer: Answer) -> int:
    """Tokens that two prompts with nothing in common share all the same: the template's own, and a digit or two."""
    return min(16, answer.num_prompt_tokens // 4)


def _whole(text: str) -> Answer:
    document = cast("dict[str, object]", json.loads(text))
    choices = cast("list[dict[str, dict[str, str]]]", document["choices"])
    return _answer(choices[0]["message"]["content"], document)


def _streamed(text: str) -> Answer:
    events = [part.removeprefix("data: ") for part in text.strip().split("\n\n")]
    if events[-1] != "[DONE]":
        raise BrokenPromiseError(f"a stream without an end: {events[-1]}")
    chunks = [cast("dict[str, object]", json.loads(event)) for event in events[:-1]]
    for chunk in chunks:
        if "error" in chunk:
            raise BrokenPromiseError(f"an error in mid-stream: {chunk['error']}")
    choices = [each for chunk in chunks for each in cast("list[dict[str, dict[str, str]]]", chunk["choices"])]
    return _answer("".join(choice["delta"].get("content") or "" for choice in choices), chunks[-1])


def _answer(text: str, document: dict[str, object]) -> Answer:
    usage = cast("dict[str, int]", document["usage"])
    details = cast("dict[str, dict[str, int]]", document["usage"])["prompt_tokens_details"]
    return Answer(text, usage["prompt_tokens"], details["cached_tokens"], usage["completion_tokens"])
