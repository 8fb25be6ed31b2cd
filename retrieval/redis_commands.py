"""Redis as this package uses it: raw commands, scripts by name, one kind of error.

A thin wrapper instead of the client's own methods for two reasons: what the client returns is typed as *anything,
or an awaitable of it*, which would leak through the whole package; and each way in which a connection can fail has
to come out as `StoreUnavailableError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Protocol, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from retrieval.errors import StoreUnavailableError

Value = str | bytes | int | float
_SCRIPTS = ("attach_file", "claim_job", "put_chunks", "remove_file", "settle_file", "update_file")


class _Connecting(Protocol):
    def from_url(self, url: str) -> Redis: ...


class _Commands(Protocol):
    async def execute_command(self, *args: Value) -> object: ...
    async def evalsha(self, sha: str, numkeys: int, *keys_and_args: Value) -> object: ...


class _Pipeline(Protocol):
    def execute_command(self, *args: Value) -> object: ...
    async def execute(self) -> list[object]: ...


def connect_store(url: str) -> Redis:
    """Connects when first used, and again whenever it has to."""
    return cast("_Connecting", Redis).from_url(url)


class RedisCommands:
    """Values come back as bytes, integers, and lists and dicts of them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._commands = cast("_Commands", redis)
        self._sources = {name: (files("retrieval") / "scripts" / f"{name}.lua").read_text() for name in _SCRIPTS}
        self._digests: dict[str, str] = {}

    async def run(self, *command: Value) -> object:
        async with _one_kind_of_error():
            return await self._commands.execute_command(*command)

    async def run_all(self, commands: Sequence[Sequence[Value]], *, atomic: bool = False) -> list[object]:
        """Many commands in one round trip; `atomic`: all or none, and nothing of others in between."""
        if not commands:
            return []
        async with _one_kind_of_error():
            pipeline = cast("_Pipeline", self._redis.pipeline(transaction=atomic))
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute()

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Value]) -> object:
        digest = self._digests.get(name) or await self._load(name)
        async with _one_kind_of_error():
            try:
                return await self._commands.evalsha(digest, len(keys), *keys, *args)
            except NoScriptError:  # the store was restarted, or its scripts were flushed
                return await self._commands.evalsha(await self._load(name), len(keys), *keys, *args)

    async def get(self, key: str) -> bytes | None:
        return cast("bytes | None", await self.run("GET", key))

    async def hash_get(self, key: str, field: str) -> bytes | None:
        return cast("bytes | None", await self.run("HGET", key, field))

    async def hash_all(self, key: str) -> Mapping[bytes, bytes]:
        return cast("Mapping[bytes, bytes]", await self.run("HGETALL", key))

    async def texts(self, *command: Value) -> list[str]:
        """The reply of a command that returns a list or a set of names."""
        return [name.decode() for name in cast("Sequence[bytes]", await self.run(*command))]

    async def _load(self, name: str) -> str:
        loaded = await self.run("SCRIPT LOAD", self._sources[name])
        digest = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        self._digests[name] = digest
        return digest


@asynccontextmanager
async def _one_kind_of_error() -> AsyncGenerator[None, None]:
    """Around one command. A cancellation stays one: the client makes a connection error of it, or tries once more and
    answers, and a background task that does not end when it is cancelled is waited for without end."""
    task = asyncio.current_task()
    cancelled_before = 0 if task is None else task.cancelling()
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreUnavailableError(f"The store cannot be reached: {error}") from error
    finally:
        if task is not None and task.cancelling() > cancelled_before:
            raise asyncio.CancelledError
