"""A radixgate of the bench's own, on a free port, from `radixgate serve`."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway.supervisor import ready_model

READY_SECONDS = 300.0  # the first start converts the default model
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class RunningServer:
    base_url: str  # with /v1
    api_key: str
    pid: int


@contextlib.contextmanager
def running_server(data_dir: Path, *extra_args: str) -> Iterator[RunningServer]:
    """Starts the server, waits until it is ready, and ends it by SIGTERM. Its log goes to this process's stderr.

    From now on SIGTERM unwinds this process like Ctrl-C, so that the server is stopped with it.
    """
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", "--port", str(port), "--data-dir", str(data_dir), *extra_args]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/readyz")
            api_key = (data_dir / "demo.key").read_text().strip()
            yield RunningServer(f"http://127.0.0.1:{port}/v1", api_key, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended while starting, with exit code {process.returncode}")
        if ready_model(url) is not None:
            return
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {READY_SECONDS:.0f} s")
