"""Documents that a tenant wants to be warm always: prefilled again when they were evicted, and kept on disk.

An id is a chunk's as it is stored, since its text must be found again after a restart, or a collection's: then whatever
the collection holds when it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrieval import keys
from retrieval.library import COLLECTION_PREFIX, Library
from retrieval.redis_commands import RedisCommands


class Pins:
    def __init__(self, redis: RedisCommands, library: Library) -> None:
        self._redis = redis
        self._library = library

    async def add(self, tenant: str, ids: Sequence[str]) -> None:
        await self._redis.run("SADD", keys.pinned(tenant), *ids)

    async def remove(self, tenant: str, ids: Sequence[str]) -> None:
        await self._redis.run("SREM", keys.pinned(tenant), *ids)

    async def chunks(self, tenant: str) -> set[str]:
        """All that is pinned now. What was deleted holds nothing."""
        found: set[str] = set()
        for each in await self._redis.texts("SMEMBERS", keys.pinned(tenant)):
            if each.startswith(COLLECTION_PREFIX):
                members = await self._library.members(tenant, each)
                found.update(chunk_id for member in members for chunk_id in member.chunk_ids)
            else:
                found.add(each)
        return found
