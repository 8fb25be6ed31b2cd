"""Documents that a tenant wants to be warm always: prefilled again when they were evicted."""

from __future__ import annotations

from collections.abc import Sequence

from retrieval import keys
from retrieval.redis_commands import RedisCommands


class Pins:
    """Ids are those of chunks as they are stored, since their text must be found again after a restart."""

    def __init__(self, redis: RedisCommands) -> None:
        self._redis = redis

    async def add(self, tenant: str, chunk_ids: Sequence[str]) -> None:
        await self._redis.run("SADD", keys.pinned(tenant), *chunk_ids)

    async def remove(self, tenant: str, chunk_ids: Sequence[str]) -> None:
        await self._redis.run("SREM", keys.pinned(tenant), *chunk_ids)

    async def of(self, tenant: str) -> set[str]:
        return set(await self._redis.texts("SMEMBERS", keys.pinned(tenant)))
