"""Stands between an engine and its store: answers come late, or from another store."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path


class StoreProxy:
    """Listens at `url`; every answer waits for `delay` seconds. `retarget` is a failover: connections break.

    What is asked while `holds` is set arrives only at `deliver`, whatever has become of who asked.
    """

    def __init__(self, target_url: str) -> None:
        self.delay = 0.0
        self.holds = False
        self.delivered = threading.Event()
        self._target = target_url.removeprefix("unix://")
        self._directory = tempfile.TemporaryDirectory(prefix="rg-proxy-")  # a socket's path must be short
        path = str(Path(self._directory.name) / "s")
        self.url = f"unix://{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._pairs: list[_Pair] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def retarget(self, target_url: str) -> None:
        self._target = target_url.removeprefix("unix://")
        self._drop()

    def deliver(self) -> None:
        self.delivered.set()

    def _drop(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self._pairs.append(_Pair(self, client, self._target))

    def close(self) -> None:
        self.deliver()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self._drop()
        self._directory.cleanup()


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: StoreProxy, client: socket.socket, target: str) -> None:
        self._proxy = proxy
        self._client, self._server = client, socket.socket(socket.AF_UNIX)
        self._threads: list[threading.Thread] = []
        with suppress(OSError):  # nobody is there: the client finds its connection closed
            self._server.connect(target)
            pumps = ((client, self._server, False), (self._server, client, True))
            self._threads = [threading.Thread(target=self._pump, args=pump, daemon=True) for pump in pumps]
        for thread in self._threads:
            thread.start()
        if not self._threads:
            self.close()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer:
                    time.sleep(self._proxy.delay)
                elif self._proxy.holds:
                    self._proxy.delivered.wait()
                sink.sendall(data)
        self._shut()

    def _shut(self) -> None:
        for one in (self._client, self._server):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._shut()
        for thread in self._threads:
            thread.join()
        self._client.close()
        self._server.close()
