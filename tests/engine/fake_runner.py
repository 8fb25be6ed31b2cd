"""A device that is honest about its cache: what comes out depends on what really lies in the slots that are read.

The "KV" of a position is a hash of the KV before it (read through the block table) and the position's token; the next
token is drawn from the KV of the last position. A block that is shared wrongly, copied too late, reused too early or
left unwritten therefore changes the text, and a poisoned slot is noticed where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from engine.batch import ScheduledSequence, SchedulerOutput

POISON: int | None = None  # what a slot holds that nobody may read


def expected_output(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The greedy text, computed without any cache."""
    state = 0
    for token in prompt:
        state = _advance(state, token)
    out: list[int] = []
    for _ in range(count):
        out.append(state % vocab_size)
        state = _advance(state, out[-1])
    return out


def _advance(state: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{state}:{token}".encode())


class PoisonedSlotError(Exception):
    """A slot was read that nobody had written, or whose block had been given back."""


class FakeRunner:
    """Keeps one integer a slot. `fail_next`, when set, is raised by the next step."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: list[int | None] = [POISON] * (num_blocks * block_size)
        self.fail_next: Exception | None = None
        self.num_computed_tokens = 0
        self.outputs: list[SchedulerOutput] = []

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        self.outputs.append(output)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        for copy in output.copies:
            src, dst = copy.src * self.block_size, copy.dst * self.block_size
            self.slots[dst : dst + copy.num_slots] = self.slots[src : src + copy.num_slots]
        return [self._run(sequence) for sequence in output.sequences]

    def _run(self, sequence: ScheduledSequence) -> int | None:
        # Attention reads every earlier position, so each of them must be alive.
        state = 0
        for position in range(sequence.num_computed):
            state = self._read(sequence, position)
        for position in range(sequence.num_computed, sequence.end):
            state = _advance(state, sequence.token_ids[position])
            self.slots[self._slot(sequence, position)] = state
        self.num_computed_tokens += sequence.num_new
        return state % self.vocab_size if sequence.sample else None

    def _slot(self, sequence: ScheduledSequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, sequence: ScheduledSequence, position: int) -> int:
        state = self.slots[self._slot(sequence, position)]
        if state is None:
            raise PoisonedSlotError(f"{sequence.request_id} reads position {position}")
        return state

    def poison(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            start = block_id * self.block_size
            self.slots[start : start + self.block_size] = [POISON] * self.block_size
