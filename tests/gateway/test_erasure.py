"""Erasures that the engine is told of until it has done them."""

from __future__ import annotations

import asyncio

import pytest

from engine.protocol import Erase, Erased
from gateway.erasure import KEY, Erasure
from retrieval.redis_commands import RedisCommands, connect_store
from tests.gateway.fake_engine import FakeEngine
from tests.store_server import store_url

__all__ = ["store_url"]
pytestmark = pytest.mark.redis


class BusyEngine(FakeEngine):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.rested = asyncio.Event()

    async def erase(self, request: Erase) -> Erased:
        self.erased.append(request)
        await self.rested.wait()
        return Erased(erase_id=request.erase_id, num_blocks=1, num_by_tier={})


async def test_what_is_tried_again_while_the_engine_is_busy_has_an_id_of_its_own(store_url: str) -> None:
    """The engine's answers are found by their ids: of two questions with one id, one was never answered."""
    engine, redis = BusyEngine(), connect_store(store_url)
    await redis.flushall()
    erasure = Erasure(engine, RedisCommands(redis))
    try:
        first = asyncio.create_task(erasure.erase("alice", ["doc"]))
        while not engine.erased:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        again = asyncio.create_task(erasure.catch_up())
        while len(engine.erased) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert len({request.erase_id for request in engine.erased}) == 2
        assert {request.document_ids for request in engine.erased} == {("doc",)}
        engine.rested.set()
        assert await first == 1
        await again
        assert await redis.exists(KEY) == 0
    finally:
        await redis.aclose()
