"""How often each document was retrieved, by tenant: what the canonical order and prefilling ahead go by.

A tenant's counts come from its own requests alone, also for public collections: else the order of one tenant's
documents, and with it its hits, would tell of what others ask. Counts live in memory, are added to Redis now and then
(increments commute, so gateways need not agree), and are read back when a tenant is first seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from retrieval import keys
from retrieval.errors import StoreUnavailableError
from retrieval.redis_commands import RedisCommands, Value

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 5.0
_MAX_DOCUMENTS = 100_000  # of a tenant; beyond, the rarest are forgotten


class Popularity:
    def __init__(self, redis: RedisCommands) -> None:
        self._redis = redis
        self._counts: dict[str, dict[str, int]] = {}
        self._unsaved: dict[str, dict[str, int]] = {}
        self._flusher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._flusher = asyncio.create_task(self._flush_now_and_then())

    async def close(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            with suppress(asyncio.CancelledError):
                await self._flusher
        with suppress(StoreUnavailableError):
            await self.flush()

    async def load(self, tenant: str) -> None:
        """Reads what was saved, if this tenant has not been seen yet. Without Redis its counts start anew."""
        if tenant in self._counts:
            return
        self._counts[tenant] = {}
        with suppress(StoreUnavailableError):
            saved = await self._redis.hash_all(keys.popularity(tenant))
            counts = self._counts[tenant]
            for document_id, count in saved.items():
                counts[document_id.decode()] = counts.get(document_id.decode(), 0) + int(count)

    def count(self, tenant: str, document_ids: Iterable[str]) -> None:
        counts, unsaved = self._counts.setdefault(tenant, {}), self._unsaved.setdefault(tenant, {})
        for document_id in document_ids:
            counts[document_id] = counts.get(document_id, 0) + 1
            unsaved[document_id] = unsaved.get(document_id, 0) + 1
        if len(counts) > _MAX_DOCUMENTS:
            for document_id in sorted(counts, key=lambda each: counts[each])[: _MAX_DOCUMENTS // 10]:
                del counts[document_id]

    def rank(self, tenant: str, document_id: str) -> int:
        """Of magnitudes, not of counts: an order that changes with every request would be none."""
        return self._counts.get(tenant, {}).get(document_id, 0).bit_length()

    async def flush(self) -> None:
        unsaved, self._unsaved = self._unsaved, {}
        commands: list[tuple[Value, ...]] = [
            ("HINCRBY", keys.popularity(tenant), document_id, count)
            for tenant, counts in unsaved.items()
            for document_id, count in counts.items()
        ]
        await self._redis.run_all(commands)

    async def _flush_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            try:
                await self.flush()
            except StoreUnavailableError as error:
                logger.warning("counts of retrieved documents are lost: %s", error)
