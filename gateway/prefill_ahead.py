"""Documents prefilled before anybody asks: `[system prompt][document]`, when the engine has nothing better to do.

    ingested, pinned, warmed ──► queue of a tenant, most popular first ──► Submit, when idle, one token
                                              behind the tenant's most used system prompts

Such a request runs only while nobody else is there, and its one token is thrown away; what stays is the KV of its
prompt. The engine's cache order then begins with such a document, and a first question finds it warm. An engine that
is idle is not enough where something else needs its cores (`may_run`): an upload that is still being embedded.
Each tenant has a budget of tokens per minute, so that an upload of a whole library neither keeps the device busy for
an hour nor pushes everybody else's KV out. Nothing is done for a tenant that leaves nothing in the cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import msgspec

from engine.errors import RadixgateError
from engine.protocol import SamplingParams, Segment, Submit
from gateway.engine_port import Engine
from gateway.prompt import Message
from gateway.prompt_scopes import PromptScopes
from gateway.served_model import ServedModels, num_tokens
from retrieval.documents import Document
from retrieval.errors import RetrievalError
from retrieval.library import Library
from retrieval.pins import Pins
from retrieval.popularity import Popularity
from retrieval.records import document_id_of

logger = logging.getLogger(__name__)

_MAX_QUEUE = 2_000  # documents of a tenant
_MAX_PROMPTS = 8  # system prompts that are remembered of a tenant
_PROMPTS_AHEAD = 2  # of them, the most used are prefilled
_REWARM_SECONDS = 60.0


@dataclass(slots=True)
class SystemPrompt:
    messages: tuple[Message, ...]
    scopes: PromptScopes
    uses: int = 0


@dataclass(slots=True)
class _Ahead:
    """What is to be done for one tenant, and what it may cost."""

    tokens_left: float
    refilled_at: float
    queue: OrderedDict[str, bool] = field(default_factory=OrderedDict[str, bool])  # chunk id → is it pinned
    prompts: OrderedDict[tuple[PromptScopes, tuple[Message, ...]], SystemPrompt] = field(
        default_factory=OrderedDict[tuple[PromptScopes, tuple[Message, ...]], SystemPrompt]
    )


class PrefillAhead:
    def __init__(
        self,
        engine: Engine,
        models: ServedModels,
        library: Library,
        popularity: Popularity,
        pins: Pins,
        is_public: Callable[[str, str], Awaitable[bool]],
        tokens_per_minute: int,
        may_store: Callable[[str], bool],
        may_run: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._models = models
        self._library = library
        self._popularity = popularity
        self._pins = pins
        self._is_public = is_public  # a tenant's document
        self._rate = tokens_per_minute / 60
        self._capacity = float(tokens_per_minute)
        self._may_store = may_store
        self._may_run = may_run
        self._clock = clock
        self._tenants: dict[str, _Ahead] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        if self._capacity:
            self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._rewarm_now_and_then())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def saw_prompt(self, tenant: str, system: Sequence[Message], scopes: PromptScopes) -> None:
        """A request with documents was sent behind this system prompt."""
        prompts = self._of(tenant).prompts
        key = (scopes, tuple(system))
        prompt = prompts.get(key) or SystemPrompt(tuple(system), scopes)
        prompt.uses += 1
        prompts[key] = prompt
        prompts.move_to_end(key)
        if len(prompts) > _MAX_PROMPTS:
            prompts.popitem(last=False)
        self._wake.set()

    def offer(self, tenant: str, chunk_ids: Iterable[str], *, pinned: bool = False) -> int:
        """Queues passages; of pinned ones the KV is kept on disk. How many are queued now."""
        if not self._capacity:
            return 0
        queue = self._of(tenant).queue
        for chunk_id in chunk_ids:
            queue[chunk_id] = pinned or queue.get(chunk_id, False)
        while len(queue) > _MAX_QUEUE:
            queue.popitem()
        self._wake.set()
        return len(queue)

    async def run_all(self) -> None:
        """Until nothing is left to do, or to spend."""
        while await self.run_one():
            pass

    async def run_one(self) -> bool:
        """Prefills one document behind the tenant's system prompts. False: nothing to do, or nothing left to spend."""
        if not self._may_run():
            return False
        for tenant, ahead in self._tenants.items():
            self._refill(ahead)
            if not self._may_store(tenant):
                ahead.queue.clear()
            if ahead.queue and ahead.prompts and ahead.tokens_left > 0:
                await self._prefill_next(tenant, ahead)
                return True
        return False

    async def _prefill_next(self, tenant: str, ahead: _Ahead) -> None:
        chunk_id = max(ahead.queue, key=lambda each: self._popularity.rank(tenant, document_id_of(each)))
        pinned = ahead.queue.pop(chunk_id)
        chunks = await self._library.chunks(tenant, [chunk_id])
        prompts = sorted(ahead.prompts.values(), key=lambda each: -each.uses)[:_PROMPTS_AHEAD]
        for chunk in chunks:  # none, if it was deleted meanwhile
            is_public = await self._is_public(tenant, chunk.document_id)
            document = Document(chunk.document_id, chunk.title, chunk.text, is_public=is_public)
            for prompt in prompts:
                ahead.tokens_left -= await self._prefill(tenant, prompt, document, pinned=pinned)

    async def _prefill(self, tenant: str, prompt: SystemPrompt, document: Document, *, pinned: bool) -> int:
        """The tokens that had to be computed."""
        model = await self._models.current()
        segments = await asyncio.to_thread(model.prompts.build_head, prompt.messages, document, prompt.scopes)
        head, last = segments[:-1], segments[-1:]
        kept = tuple(msgspec.structs.replace(segment, pinned=pinned) for segment in last)
        return await prefill(self._engine, tenant, (*head, *kept))

    def _of(self, tenant: str) -> _Ahead:
        ahead = self._tenants.get(tenant)
        if ahead is None:
            ahead = self._tenants[tenant] = _Ahead(tokens_left=self._capacity, refilled_at=self._clock())
        return ahead

    def _refill(self, ahead: _Ahead) -> None:
        now = self._clock()
        ahead.tokens_left = min(self._capacity, ahead.tokens_left + (now - ahead.refilled_at) * self._rate)
        ahead.refilled_at = now

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.run_all()
            except (RadixgateError, RetrievalError) as error:
                logger.info("prefilling ahead waits: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._wake.wait()

    async def _rewarm_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_REWARM_SECONDS)
            with suppress(RetrievalError):
                for tenant in self._tenants:
                    self.offer(tenant, sorted(await self._pins.chunks(tenant)), pinned=True)


async def prefill(engine: Engine, tenant: str, segments: tuple[Segment, ...]) -> int:
    """Leaves the prompt's KV in the cache. The tokens that had to be computed for it. Raises `RadixgateError`."""
    submit = Submit(
        request_id=f"ahead-{uuid.uuid4().hex}",
        tenant_id=tenant,
        segments=segments,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        when_idle=True,
        counted=False,
    )
    computed = num_tokens(segments)
    async with aclosing(engine.generate(submit)) as deltas:
        async for delta in deltas:
            if delta.account is not None:
                computed -= delta.account.num_cached_tokens
    return computed
