"""What a store's client does to those who use it, and what is left of that here."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redis.asyncio import Redis

from retrieval.errors import StoreUnavailableError
from retrieval.redis_commands import RedisCommands
from tests.store_server import store_url

__all__ = ["store_url"]


async def test_a_task_that_is_cancelled_while_it_asks_ends(store_url: str) -> None:
    """A stopping gateway waited for ever for a worker whose cancellation had become a connection error."""
    async with Redis.from_url(store_url) as redis:
        commands = RedisCommands(redis)

        async def work() -> None:
            while True:
                with suppress(StoreUnavailableError):
                    await commands.run("GET", "nothing")

        for number in range(100):
            task = asyncio.create_task(work())
            for _ in range(number):  # so that it is hit in many places
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=5)
            assert done
            assert task.cancelled()
