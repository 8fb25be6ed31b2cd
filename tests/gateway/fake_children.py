"""Stand-ins for the engine's and the gateway's process, and a supervisor over them.

python -m tests.gateway.fake_children engine|gateway     what the supervisor starts
python -m tests.gateway.fake_children serve              the supervisor itself; prints `ready` and its children's pids

In the data directory the file `NAME.crash` makes the next start of NAME end at once with the exit code that it holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from engine.settings import Settings, load_settings
from gateway.child import LineSink, print_line
from gateway.handover import HAND_OVER, LISTEN_FD, READY_FD
from gateway.supervisor import Supervisor

MODULE = "tests.gateway.fake_children"


def fake_supervisor(settings: Settings, on_ready: list[str], on_line: LineSink = print_line) -> Supervisor:
    return Supervisor(
        settings,
        on_ready=on_ready.append,
        on_line=on_line,
        engine_command=(sys.executable, "-m", MODULE, "engine"),
        gateway_command=(sys.executable, "-m", MODULE, "gateway"),
        embedder_command=(sys.executable, "-m", MODULE, "embedder"),
    )


def run_child(name: str) -> int:
    settings = load_settings(None, os.environ)
    directory = settings.store.data_dir
    print(f"{name} starts as {os.getpid()}", flush=True)
    (directory / f"{name}.environ").write_text(json.dumps(dict(os.environ)))
    crash = directory / f"{name}.crash"
    if crash.exists():
        print(f"{name} cannot go on", flush=True)
        return int(crash.read_text())
    (directory / f"{name}.up").touch()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    signal.signal(HAND_OVER, lambda _number, _frame: stop.set())
    server = _start_http(settings) if name == "gateway" else None
    if (ready_fd := os.environ.get(READY_FD)) is not None:
        os.write(int(ready_fd), b"1")
    stop.wait()
    if server is not None:
        server.shutdown()
    print(f"{name} has drained", flush=True)
    return 0


class _Readyz(BaseHTTPRequestHandler):
    engine_up: ClassVar[Path]

    def do_GET(self) -> None:
        body = b'{"status": "ok", "model": "fake-model"}'
        self.send_response(200 if self.engine_up.exists() else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Quiet."""


def _start_http(settings: Settings) -> ThreadingHTTPServer:
    _Readyz.engine_up = settings.store.data_dir / "engine.up"
    address = (settings.server.host, settings.server.port)
    server = ThreadingHTTPServer(address, _Readyz, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(os.environ[LISTEN_FD]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


async def run_supervisor() -> int:
    names: list[str] = []
    supervisor = fake_supervisor(load_settings(None, os.environ), names)
    serving = asyncio.create_task(supervisor.run())
    while not names and not serving.done():  # noqa: ASYNC110  on_ready is a plain callable
        await asyncio.sleep(0.02)
    print("ready", *(child.pid for child in supervisor.children.values()), flush=True)
    return await serving


def main(argv: Sequence[str]) -> int:
    return asyncio.run(run_supervisor()) if argv[1] == "serve" else run_child(argv[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
