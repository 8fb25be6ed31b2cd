"""Fetch or compute again: whichever is expected to be faster, by what this engine has measured of itself.

    fetch    (bytes + bytes already in the queue) / bandwidth of the tier
    compute  tokens / prefill speed

All are moving averages of the running engine, not figures of a data sheet. Until both sides have been seen, fetching is
tried: that is how its speed is learned. And since a tier that is never read is never measured again, one fetch in
`RETRY_EVERY` refused ones is tried all the same.
"""

from __future__ import annotations

from engine.prefill_speed import PrefillSpeed

RETRY_EVERY = 32


class Ewma:
    """A moving average of a rate: amounts over seconds, both aged by the same weight."""

    __slots__ = ("_amount", "_seconds", "_weight")

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        self._amount += self._weight * (amount - self._amount)
        self._seconds += self._weight * (seconds - self._seconds)

    @property
    def rate(self) -> float | None:
        """Per second; None before anything was observed."""
        return self._amount / self._seconds if self._seconds else None


class FetchGate:
    """The measurements, and the decision. `host` and `disk` name the tier that is read."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.prefill = PrefillSpeed()  # the engine's own, once it has this gate
        self.bandwidth = {"host": Ewma(), "disk": Ewma()}  # bytes
        self.num_refused = {"host": 0, "disk": 0}

    def is_cheaper(self, tier: str, blocks: int, tokens: int, queued_bytes: int = 0) -> bool:
        """Whether to fetch `blocks` blocks from a tier instead of computing `tokens` tokens."""
        fetch, compute = self.fetch_seconds(tier, blocks, queued_bytes), self.compute_seconds(tokens)
        if fetch is None or compute is None or fetch <= compute:
            return True
        self.num_refused[tier] += 1
        return self.num_refused[tier] % RETRY_EVERY == 0

    def fetch_seconds(self, tier: str, blocks: int, queued_bytes: int = 0) -> float | None:
        rate = self.bandwidth[tier].rate
        return None if rate is None else (blocks * self._block_bytes + queued_bytes) / rate

    def compute_seconds(self, tokens: int) -> float | None:
        return self.prefill.seconds_for(tokens) or None
