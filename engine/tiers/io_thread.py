"""The one thread that reads and writes the disk, so that a step never waits for it.

    engine thread ──submit──► reads  ─┐                        ┌─► done ──completed()──► engine thread
                              writes ─┴─► this thread: slab ───┘
                                     reads first: a request waits for them, nobody waits for a write

Every job ends in exactly one `IoDone`, whatever the disk does. The memory that a job reads from or writes into belongs
to it until then: its owner has pinned the slot. Writes keep their order, so a block is on disk after its parent.

Rejected: a pool of threads. One keeps a local disk busy with blocks of this size, and order would have to be restored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum

from engine.tiers.slab import Slab

_WORTH_WAKING = 16  # jobs that have ended


class IoKind(Enum):
    READ = "read"
    WRITE = "write"
    CLEAR = "clear"


@dataclass(slots=True, frozen=True)
class IoJob:
    kind: IoKind
    slot: int  # of the slab
    key: bytes
    memory: memoryview  # read into, or written from
    host_slot: int  # where that memory is; of no meaning for CLEAR
    checksum: int = 0  # expected by a read


@dataclass(slots=True, frozen=True)
class IoDone:
    job: IoJob
    error: OSError | None
    checksum: int  # of what was written
    seconds: float


class IoThread:
    """Runs jobs in order, reads before others. Every method belongs to the engine's thread."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._reads: deque[IoJob] = deque()
        self._others: deque[IoJob] = deque()
        self._done: deque[IoDone] = deque()
        self._work = threading.Condition()
        self._finished = threading.Condition()
        self._stopping = False
        self.num_pending = 0  # submitted and not yet taken back by `completed`
        self.pending_read_bytes = 0
        self.pending_write_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"{slab.name}-io", daemon=True)
        self._thread.start()

    def submit(self, job: IoJob) -> None:
        self.num_pending += 1
        if job.kind is IoKind.READ:
            self.pending_read_bytes += len(job.memory)
        else:
            self.pending_write_bytes += len(job.memory)
        with self._work:
            (self._reads if job.kind is IoKind.READ else self._others).append(job)
            self._work.notify()

    def completed(self) -> list[IoDone]:
        """What has ended since the last call, in order."""
        done: list[IoDone] = []
        while self._done:
            one = self._done.popleft()
            self.num_pending -= 1
            if one.job.kind is IoKind.READ:
                self.pending_read_bytes -= len(one.job.memory)
            else:
                self.pending_write_bytes -= len(one.job.memory)
            done.append(one)
        return done

    def wait(self, seconds: float) -> None:
        """Until the reads are done, or many of them, but not longer than that; at once if something has ended."""
        with self._finished:
            if not self._done and self.num_pending:
                self._finished.wait(seconds)

    def stop(self) -> None:
        """Ends the thread after the job it is at; what has not begun is dropped."""
        with self._work:
            self._stopping = True
            self._reads.clear()
            self._others.clear()
            self._work.notify()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._done.append(self._do(job))
            # Not for every block: the engine's thread would take the interpreter from this one each time.
            if len(self._done) >= _WORTH_WAKING or not self._reads:
                with self._finished:
                    self._finished.notify_all()

    def _next(self) -> IoJob | None:
        with self._work:
            while not (self._reads or self._others or self._stopping):
                self._work.wait()
            if self._stopping:
                return None
            return (self._reads or self._others).popleft()

    def _do(self, job: IoJob) -> IoDone:
        started = time.perf_counter()
        error, checksum = None, 0
        try:
            match job.kind:
                case IoKind.READ:
                    self._slab.read(job.slot, job.memory, job.key, job.checksum)
                case IoKind.WRITE:
                    checksum = self._slab.write(job.slot, job.memory, job.key)
                case IoKind.CLEAR:
                    self._slab.clear(job.slot)
        except OSError as caught:
            error = caught
        return IoDone(job, error, checksum, time.perf_counter() - started)
