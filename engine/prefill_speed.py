"""How fast this engine computes prompts, measured on its own steps: what a cached token is worth.

An exponential average over steps that were mostly prefill; a step of one long chunk beside thirty decodes would say
more about decoding. Weighed by tokens, so that many small steps do not outvote a large one.
"""

from __future__ import annotations

from engine.batch import SchedulerOutput

_MIN_SHARE = 0.8  # of the step's tokens that belong to prompts
_MEMORY_TOKENS = 20_000.0  # about so many of the last tokens count


class PrefillSpeed:
    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        """0 until a prompt has been computed."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def note(self, output: SchedulerOutput, seconds: float) -> None:
        total = sum(sequence.num_new for sequence in output.sequences)
        prefill = sum(s.num_new for s in output.sequences if s.num_computed < s.num_prompt_tokens)
        if not total or prefill < _MIN_SHARE * total:
            return
        fade = max(0.0, 1.0 - prefill / _MEMORY_TOKENS)
        self._tokens = self._tokens * fade + prefill
        self._seconds = self._seconds * fade + seconds
