"""One child process: its output passed on line by line, its last lines kept, its end certain.

    supervisor ──fork──► child (a session of its own: Ctrl-C in the terminal reaches the supervisor alone, which drains)
               ◄─pipe──  stdout + stderr ─► prefixed lines on our stderr, the last ones kept for the report of its death

When the supervisor is killed without a chance to stop its children, the kernel signals them (PR_SET_PDEATHSIG,
Linux): no orphan keeps the port, the device or the data directory.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import platform
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

TAIL_LINES = 20
MAX_LINE = 1 << 16  # bytes; a longer line is cut into pieces
_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec nothing may be imported.
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if platform.system() == "Linux" else None

LineSink = Callable[[str, str], None]
"""Called with the child's name and a line of its output."""


def print_line(name: str, line: str) -> None:
    print(f"{name:<8}| {line}", file=sys.stderr, flush=True)


def print_json_line(name: str, line: str) -> None:
    """For a log that a machine reads: the child's own object with its name in it, or an object around its words."""
    own = _json_object(line)
    if own is None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        own = {"time": now, "level": "info", "message": line}
    print(json.dumps({"process": name, **own}, ensure_ascii=False), file=sys.stderr, flush=True)


def _json_object(line: str) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


class ChildProcess:
    """Started once. `returncode` is None while it runs."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        on_line: LineSink = print_line,
        death_signal: signal.Signals = signal.SIGKILL,
        inherited: Sequence[int] = (),
    ) -> None:
        """`inherited`: file descriptors that the child gets under the same numbers."""
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._argv = argv
        self._environ = environ
        self._on_line = on_line
        self._death_signal = death_signal
        self._inherited = tuple(inherited)
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        return self._started().returncode

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            env=dict(self._environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=self._inherited,
            preexec_fn=_die_with_parent(os.getpid(), self._death_signal),
        )
        assert self._process.stdout is not None, "stdout is a pipe"
        self._pump = asyncio.create_task(self._pass_lines_on(self._process.stdout), name=f"{self.name}-output")

    async def wait(self) -> int:
        """Its exit code, once its last line has been read."""
        code = await self._started().wait()
        if self._pump is not None:
            # A grandchild may hold the pipe open for longer than its parent lived.
            await asyncio.wait([self._pump], timeout=1.0)
            self._pump.cancel()
        return code

    def signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            self._started().send_signal(number)

    async def stop(self, seconds: float) -> int:
        """SIGTERM; after `seconds` without an end SIGKILL, to all of its process group."""
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), seconds)
        except TimeoutError:
            self._on_line(self.name, f"did not stop within {seconds:.0f} s: killed")
            self.kill()
            return await self.wait()

    def kill(self) -> None:
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)  # start_new_session made it the leader of its group

    def report(self) -> str:
        """How it ended, with its last lines: what a user needs to see of a death."""
        code = self.returncode
        how = (
            "is running"
            if code is None
            else f"was ended by {signal_name(-code)}"
            if code < 0
            else f"exited with {code}"
        )
        lines = "".join(f"\n    {line}" for line in self.tail)
        return f"{self.name} {how}" + (f"; its last lines:{lines}" if lines else "")

    def _started(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was started"
        return self._process

    async def _pass_lines_on(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(MAX_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._line(line)
        if rest:
            self._line(rest)

    def _line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        self.tail.append(line)
        self._on_line(self.name, line)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _die_with_parent(parent: int, death_signal: signal.Signals) -> Callable[[], None] | None:
    libc = _LIBC
    if libc is None:
        return None

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(death_signal))
        if os.getppid() != parent:  # it died before the call: no signal will come
            os._exit(1)

    return in_child
