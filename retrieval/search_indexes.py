"""The indexes of all collections in this process, kept in step with Redis and with other gateways.

    change (any gateway) ──► version + 1, event ──► follower: look again ─┐
    search ──► version asked ──► another one: look again ─────────────────┴─► reconcile: members of now ─► index

`reconcile` compares what Redis has with what the index has and makes them alike, so it does not matter how often, in
which order, or for which reason it runs. A search asks for the version first (a fraction of a millisecond), so a
deletion that was answered anywhere is seen everywhere; with Redis gone the search goes on with what is in memory.

One thread owns all indexes. It is fed in small steps, so that a search waits for one of them at most.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar, cast

from retrieval import keys
from retrieval.collection_index import CollectionIndex, Found, Weights
from retrieval.embedder_client import Embedder, Floats
from retrieval.errors import NotFoundError, StoreUnavailableError, UnavailableError
from retrieval.filters import Predicate
from retrieval.library import Library
from retrieval.records import CollectionFile, FileStatus
from retrieval.redis_commands import RedisCommands

logger = logging.getLogger(__name__)

_VERSION_SECONDS = 0.25  # longer than that, the store counts as gone for this search
_GRAPH_STEP = 32  # rows, about 20 ms
_BLOCK_MILLISECONDS = 1000
_RETRY_SECONDS = 1.0

Name = tuple[str, str]  # tenant, collection
P = ParamSpec("P")
T = TypeVar("T")


class SearchIndexes:
    def __init__(self, library: Library, redis: RedisCommands, embedder: Embedder) -> None:
        self._library = library
        self._embedder = embedder
        self._redis = redis
        self._indexes: dict[Name, CollectionIndex] = {}
        self._locks: dict[Name, asyncio.Lock] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Follows the changes of others from here on, and fills the indexes of all there is, in the background."""
        self._tasks = [asyncio.create_task(self._follow())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown()

    async def search(
        self,
        name: Name,
        vector: Floats,
        text: str,
        k: int,
        *,
        keep: Predicate | None = None,
        weights: Weights | None = None,
    ) -> list[Found]:
        """Raises `NotFoundError` when there is no such collection."""
        index = await self.current(name)
        return await self._on_thread(index.search, vector, text, k, keep, weights)

    def is_loaded(self, name: Name) -> bool:
        return name in self._indexes

    def find(self, names: Sequence[Name], document_id: str) -> Found | None:
        """A passage that one of these collections has now."""
        for name in names:
            index = self._indexes.get(name)
            if index is not None and (found := index.find(document_id)) is not None:
                return found
        return None

    def num_passages(self, name: Name) -> int:
        """As far as this collection is loaded."""
        return len(self._indexes.get(name, ()))

    async def current(self, name: Name) -> CollectionIndex:
        """The index, with every change that was answered before this call, as far as Redis can be asked."""
        index = self._indexes.get(name)
        try:
            async with asyncio.timeout(_VERSION_SECONDS if index is not None else None):
                version = await self._library.version(*name)
        except (StoreUnavailableError, TimeoutError):
            if index is None:
                raise StoreUnavailableError("The store cannot be reached, and this collection is not loaded.") from None
            return index
        # A deleted collection has no version any more: 0, which no index that holds something has.
        if index is None or index.version != version:
            index = await self.reconcile(name)
        return index

    async def reconcile(self, name: Name) -> CollectionIndex:
        info = await self._embedder.wait_ready()
        async with self._locks.setdefault(name, asyncio.Lock()):
            version = await self._library.version(*name)
            index = self._indexes.get(name)
            if index is not None and index.version == version:
                return index
            try:
                record = await self._library.collection(*name)
            except NotFoundError:
                self._indexes.pop(name, None)
                raise
            if index is None:
                index = self._indexes[name] = await self._on_thread(CollectionIndex, info.dimension)
            index.is_public = record.public
            await self._make_alike(name, index, info.tag)
            # Read before the members were: a change in between is seen again, never missed.
            index.version = version
        self._build_graph(index)
        return index

    async def _make_alike(self, name: Name, index: CollectionIndex, embedder_tag: str) -> None:
        members = {
            member.file_id: member
            for member in await self._library.members(*name)
            if member.status is FileStatus.COMPLETED and member.is_of_embedder(embedder_tag)
        }
        known = index.generations()
        for file_id in known.keys() - members.keys():
            await self._on_thread(index.remove_file, file_id)
        for file_id, member in members.items():
            if known.get(file_id) != member.generation:
                await self._add(name, index, member)
            elif not index.has_attributes(file_id, member.attributes):
                await self._on_thread(index.set_attributes, file_id, member.attributes)

    async def _add(self, name: Name, index: CollectionIndex, member: CollectionFile) -> None:
        chunks = await self._library.chunks(name[0], member.chunk_ids)
        if len(chunks) < len(member.chunk_ids):
            logger.warning("%d chunks of %s are lost", len(member.chunk_ids) - len(chunks), member.file_id)
        await self._on_thread(index.add_file, member, chunks)

    def _build_graph(self, index: CollectionIndex) -> None:
        if index.graph_backlog:
            task = asyncio.create_task(self._advance(index))
            self._tasks = [other for other in self._tasks if not other.done()] + [task]

    async def _advance(self, index: CollectionIndex) -> None:
        while index.graph_backlog:
            await self._on_thread(index.advance_graph, _GRAPH_STEP)

    async def _follow(self) -> None:
        last = "$"
        loaded = said = False
        while True:
            try:
                if last == "$":
                    last = await self._last_event()
                if not loaded:
                    await self._load_all()
                    loaded = True
                last = await self._take_in_events(last)
                said = False
            except UnavailableError as error:
                if not said:  # once an outage, not once a second
                    logger.warning("cannot follow the changes of collections: %s", error)
                said = True
                await asyncio.sleep(_RETRY_SECONDS)

    async def _last_event(self) -> str:
        reply = await self._redis.run("XREVRANGE", keys.EVENTS, "+", "-", "COUNT", 1)
        events = cast("list[tuple[bytes, object]]", reply)
        return events[0][0].decode() if events else "0"

    async def _take_in_events(self, last: str) -> str:
        wait = ("COUNT", 1000, "BLOCK", _BLOCK_MILLISECONDS)
        reply = await self._redis.run("XREAD", *wait, "STREAMS", keys.EVENTS, last)
        names: dict[Name, None] = {}
        for event_id, fields in _events(reply):
            last = event_id
            names[fields[b"tenant"].decode(), fields[b"collection"].decode()] = None
        for name in names:
            if name in self._indexes:
                await self._look_again(name)
        return last

    async def _load_all(self) -> None:
        for name in await self._library.all_collections():
            await self._look_again(name)

    async def _look_again(self, name: Name) -> None:
        with suppress(NotFoundError):
            await self.reconcile(name)

    async def _on_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(call, *args, **kwargs))


def _events(reply: object) -> list[tuple[str, dict[bytes, bytes]]]:
    """Of XREAD on one stream, in either of the client's shapes."""
    if not reply:
        return []
    streams = cast("dict[bytes, list[object]] | list[list[object]]", reply)
    entries = next(iter(streams.values()))[0] if isinstance(streams, dict) else streams[0][1]
    return [(event_id.decode(), fields) for event_id, fields in cast("list[tuple[bytes, dict[bytes, bytes]]]", entries)]
