"""Stands between an engine and its store: answers come late, or from another store."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path


class StoreProxy:
    """Listens at `url`; every answer waits for `delay` seconds. `retarget` is a failover: connections break."""

    def __init__(self, target_url: str) -> None:
        self.delay = 0.0
        self._target = target_url.removeprefix("unix://")
        self._directory = tempfile.TemporaryDirectory(prefix="rg-proxy-")  # a socket's path must be short
        path = str(Path(self._directory.name) / "s")
        self.url = f"unix://{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def retarget(self, target_url: str) -> None:
        self._target = target_url.removeprefix("unix://")
        self._drop()

    def _drop(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(self._target)
                except OSError:
                    client.close()
                    server.close()
                    continue
                self._open += [client, server]
                for source, sink, is_answer in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(source, sink, is_answer), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer:
                    time.sleep(self.delay)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._drop()
        self._listener.close()
        self._directory.cleanup()
