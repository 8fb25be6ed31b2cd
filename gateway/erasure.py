"""Documents that were deleted, erased from the engine's cache in every tier; told to the engine until it has done so.

    delete ──► noted in Redis ──► Erase ──► Erased: count, note removed
                                   └ engine away: the note falls due, and a task of some gateway tries again

A note is due when nobody is asking any more, so that the blocks are counted by who deletes them, and not by a task that
came in between: else a document that was there would be answered as unknown.

Which tenant's KV is meant is said by its id, not by scopes: what a client narrowed has scopes that only it can name.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from engine.errors import RadixgateError
from engine.protocol import Erase
from gateway.engine_port import Engine
from retrieval.errors import StoreUnavailableError
from retrieval.redis_commands import RedisCommands

logger = logging.getLogger(__name__)

KEY = "rg:retrieval:erasures_due"  # a sorted set of notes, by when they are due, in Unix seconds
_RETRY_SECONDS = 5.0
_ASKING_SECONDS = 60.0  # longer than the engine is waited for; then who asked has died


class Erasure:
    def __init__(self, engine: Engine, redis: RedisCommands) -> None:
        self._engine = engine
        self._redis = redis
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._catch_up_now_and_then())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def erase(self, owner: str | None, document_ids: Sequence[str]) -> int | None:
        """The number of blocks; None: the engine is away, and will be told later. `owner` None: whoever's they are."""
        if not document_ids:
            return 0
        request = Erase(erase_id=uuid.uuid4().hex, owner=owner, document_ids=tuple(document_ids))
        note = msgspec.json.encode(request)
        await self._redis.run("ZADD", KEY, time.time() + _ASKING_SECONDS, note)
        return await self._ask(request, note)

    async def _ask(self, request: Erase, note: bytes) -> int | None:
        try:
            erased = await self._engine.erase(request)
        except RadixgateError as error:
            logger.warning("the KV of %d deleted documents is still to be erased: %s", _count(request), error)
            await self._redis.run("ZADD", KEY, "XX", 0, note)
            return None
        await self._redis.run("ZREM", KEY, note)
        return erased.num_blocks

    async def catch_up(self) -> None:
        """Tries again what is due, each time under an id of its own: other gateways may be trying it, too."""
        for note in await self._redis.texts("ZRANGEBYSCORE", KEY, "-inf", time.time()):
            noted = msgspec.json.decode(note, type=Erase)
            await self._ask(msgspec.structs.replace(noted, erase_id=uuid.uuid4().hex), note.encode())

    async def _catch_up_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            with suppress(StoreUnavailableError):
                await self.catch_up()


def _count(request: Erase) -> int:
    return len(request.document_ids or ())
