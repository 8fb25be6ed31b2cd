"""Erasures that the engine is told of until it has done them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from engine.errors import EngineUnavailableError
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
        self.failure: EngineUnavailableError | None = None

    async def erase(self, request: Erase) -> Erased:
        self.erased.append(request)
        if self.failure is not None:
            raise self.failure
        await self.rested.wait()
        return Erased(erase_id=request.erase_id, num_blocks=1, num_by_tier={})


@dataclass
class Deleting:
    engine: BusyEngine
    redis: Redis
    erasure: Erasure

    async def begins(self) -> asyncio.Task[int | None]:
        task = asyncio.create_task(self.erasure.erase("alice", ["doc"]))
        await self.until_asked(1)
        return task

    async def until_asked(self, times: int) -> None:
        while len(self.engine.erased) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def deleting(store_url: str) -> AsyncIterator[Deleting]:
    engine, redis = BusyEngine(), connect_store(store_url)
    await redis.flushall()
    yield Deleting(engine, redis, Erasure(engine, RedisCommands(redis)))
    await redis.aclose()


async def test_what_somebody_is_asking_is_left_to_him(deleting: Deleting) -> None:
    """Else its blocks are counted by a task, and who deletes the document is told that there was none."""
    first = await deleting.begins()
    await deleting.erasure.catch_up()
    deleting.engine.rested.set()
    assert await first == 1
    assert len(deleting.engine.erased) == 1
    assert await deleting.redis.exists(KEY) == 0


async def test_what_the_engine_could_not_be_told_is_due_at_once(deleting: Deleting) -> None:
    deleting.engine.failure = EngineUnavailableError("away")
    assert await deleting.erasure.erase("alice", ["doc"]) is None
    deleting.engine.failure = None
    deleting.engine.rested.set()
    await deleting.erasure.catch_up()
    assert [request.document_ids for request in deleting.engine.erased] == [("doc",), ("doc",)]
    assert await deleting.redis.exists(KEY) == 0


async def test_what_was_asked_by_a_gateway_that_died_is_tried_again_under_an_id_of_its_own(
    deleting: Deleting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's answers are found by their ids: of two questions with one id, one was never answered."""
    first = await deleting.begins()
    now = time.time()
    monkeypatch.setattr("gateway.erasure.time.time", lambda: now + 3600)
    again = asyncio.create_task(deleting.erasure.catch_up())
    await deleting.until_asked(2)
    assert len({request.erase_id for request in deleting.engine.erased}) == 2
    deleting.engine.rested.set()
    await first
    await again
    assert await deleting.redis.exists(KEY) == 0
