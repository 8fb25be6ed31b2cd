"""A real store for tests: on a Unix socket, in a directory of its own, without persistence; it can be killed."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import redis

from gateway.store import find_store_binary

_START_SECONDS = 20.0


class StoreServer:
    def __init__(self, directory: Path) -> None:
        self._socket = directory / "s.sock"
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._socket.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([str(find_store_binary()), *options], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.command("PING")
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Alive, connected, and answering nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *arguments: str | int) -> object:
        client = redis.Redis(unix_socket_path=str(self._socket))
        try:
            answer: object = client.execute_command(*arguments)
            return answer
        finally:
            client.close()
