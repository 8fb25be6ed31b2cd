"""Times GPU work with events, each run on a cold L2: what a kernel reads in a model was not read just before.

    device    flush · flush · … ────────────────────┤ start │ work │ end │
    host      launch them, record, call work(), record │ has `start` come? │ wait

What the host does inside `work` (a list of 1,000 copies put together, say) must not be measured. It is not as long as
the device still flushes when all is in its queue, which the start event tells. A run where it does not is thrown away
and the flush doubled. Capturing the work in a graph was the alternative: what uploads from pinned memory that it has
just taken cannot be captured.

On a CPU (there only to see that a bench runs) it is the wall clock of one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

_WARMUP = 3
_FLUSH_BYTES = 1 << 30  # far more than any L2
_MAX_FLUSHES = 128  # some 40 ms: work that takes the host longer waits for the device itself


class Event(Protocol):
    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Event, /) -> float: ...


def median_ms(work: Callable[[], object], runs: int = 15, device: torch.device | str = "cuda") -> float:
    if torch.device(device).type == "cpu":
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e3
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    for _ in range(_WARMUP):
        work()
    torch.cuda.synchronize()
    return statistics.median(timed_runs(work, flush.zero_, _cuda_event, runs))


def _cuda_event() -> Event:
    return torch.cuda.Event(enable_timing=True)  # pyright: ignore[reportReturnType]  its parameter is named otherwise


def timed_runs(
    work: Callable[[], object], flush: Callable[[], object], new_event: Callable[[], Event], runs: int
) -> list[float]:
    """Milliseconds of each run. `flush` keeps the device busy for a while and returns at once."""
    times: list[float] = []
    flushes = 1
    while len(times) < runs:
        start, end = new_event(), new_event()
        for _ in range(flushes):
            flush()
        start.record()
        work()
        end.record()
        is_hidden = not start.query()
        end.synchronize()
        if not is_hidden and flushes < _MAX_FLUSHES:
            flushes *= 2
            continue
        if not is_hidden and not times:
            print("  the host's own time is part of the next figure: its work waits for the device", flush=True)
        times.append(start.elapsed_time(end))
    return times
