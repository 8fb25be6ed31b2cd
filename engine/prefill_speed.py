"""How fast this engine computes prompts, measured on its own steps: what a cached token is worth.

An exponential average over steps that were mostly prefill; a step of one long chunk beside thirty decodes would say
more about decoding. Weighed by tokens, so that many small steps do not outvote a large one.

The engine has one of these, and everybody reads it: usage and savings, the metrics, and the choice between fetching a
block and computing it.
"""

from __future__ import annotations

_MIN_PREFILL = 32  # tokens; a smaller step says more about overhead than about speed
_PREFILL_TO_DECODE = 8  # tokens of prompts for one of output, at least
_MEMORY_TOKENS = 20_000.0  # about so many of the last tokens count


class PrefillSpeed:
    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, num_prefill: int, num_decode: int, seconds: float) -> None:
        """A step, in tokens of prompts and of output."""
        if num_prefill < _MIN_PREFILL or num_prefill < _PREFILL_TO_DECODE * num_decode:
            return
        fade = max(0.0, 1.0 - num_prefill / _MEMORY_TOKENS)
        self._tokens = self._tokens * fade + num_prefill
        self._seconds = self._seconds * fade + seconds

    @property
    def tokens_per_second(self) -> float:
        """0 until a prompt has been computed."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def seconds_for(self, num_tokens: int) -> float:
        """0 until a prompt has been computed."""
        return num_tokens * self._seconds / self._tokens if self._tokens else 0.0
