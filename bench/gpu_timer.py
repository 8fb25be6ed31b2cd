"""Times GPU work with events, each run on a cold L2: what a kernel reads in a model was not read just before."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_WARMUP = 3
_FLUSH_BYTES = 1 << 30  # far more than any L2: writing it takes longer than preparing a launch


def median_ms(work: Callable[[], object], runs: int = 15) -> float:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(_WARMUP):
        work()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, end in pairs:
        # The flush also keeps the device busy while the host prepares the launch, so that no launch time is measured.
        flush.zero_()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)
