"""A store of the bench's own: the server that `radixgate serve` would embed, on a Unix socket, without persistence."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.settings import runtime_dir
from gateway.store import find_store_binary


@dataclass(frozen=True)
class RunningStore:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running_store(directory: Path) -> Iterator[RunningStore]:
    socket = runtime_dir(directory) / "bench.sock"
    options = {"port": "0", "unixsocket": str(socket), "save": "", "appendonly": "no", "loglevel": "warning"}
    command = [str(find_store_binary()), *(part for name, value in options.items() for part in (f"--{name}", value))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=directory) as process:
        try:
            while not socket.exists():
                time.sleep(0.01)
            yield RunningStore(f"unix://{socket}", process)
        finally:
            process.kill()
