"""How long a kind of operation took: a histogram of fixed buckets, cheap enough to keep for every block."""

from __future__ import annotations

from bisect import bisect_left

from engine.protocol import LatencyStats

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)  # seconds


class Latencies:
    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def stats(self) -> LatencyStats:
        return LatencyStats(bounds=BOUNDS, counts=tuple(self._counts), seconds=self._seconds)
