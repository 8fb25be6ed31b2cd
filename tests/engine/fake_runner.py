"""A device that is honest about its cache: what comes out depends on what really lies in the slots that are read.

The "KV" of a position is a hash of the KV before it (read through the block table) and the position's token; the next
token is drawn from the KV of the last position. A block that is shared wrongly, copied too late, reused too early or
left unwritten therefore changes the text, and a poisoned slot is noticed where it is read.

Blocks that move between the tiers move as bytes, so that a payload that is torn or another's changes the text, too.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

import xxhash

from engine.batch import ScheduledSequence, SchedulerOutput, TransferReport
from engine.sampler import NonFiniteLogitsError
from engine.tiers.host_slab import HostSlab

POISON: int | None = None  # what a slot holds that nobody may read


def expected_output(prompt: Sequence[int], count: int, vocab_size: int, seed: int | None = None) -> list[int]:
    """The greedy text, or the one that a seed draws, computed without any cache."""
    state = 0
    for token in prompt:
        state = _advance(state, token)
    out: list[int] = []
    for _ in range(count):
        out.append((state if seed is None else _advance(state, seed)) % vocab_size)
        state = _advance(state, out[-1])
    return out


def _advance(state: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{state}:{token}".encode())


class PoisonedSlotError(Exception):
    """A slot was read that nobody had written, or whose block had been given back."""


SLOT = struct.Struct("<QQ")  # 1 and the state; 0 and anything: nobody wrote it


class FakeRunner:
    """Keeps one integer a slot. `fail_next`, when set, is raised by the next step; `step_seconds` makes it slow."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: list[int | None] = [POISON] * (num_blocks * block_size)
        self.fail_next: Exception | None = None
        self.step_seconds = 0.0
        self.num_computed_tokens = 0
        self.outputs: list[SchedulerOutput] = []
        self.host: HostSlab | None = None
        self.fetch_seconds = 1e-6  # what a copy is said to take, a block
        self._num_transfers = 0
        self._fetched = self._offloaded = 0

    @property
    def block_bytes(self) -> int:
        return self.block_size * SLOT.size

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        time.sleep(self.step_seconds)
        self.outputs.append(output)
        self._num_transfers += bool(output.offloads or output.fetches)
        if self.fail_next is not None and not isinstance(self.fail_next, NonFiniteLogitsError):
            error, self.fail_next = self.fail_next, None
            raise error
        self._transfer(output)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return [self._run(sequence) for sequence in output.sequences]

    def _transfer(self, output: SchedulerOutput) -> None:
        for offload in output.offloads:
            assert self.host is not None
            self.host.slot(offload.host_slot)[:] = self.pack(offload.block_id)
        self._copy(output)
        for fetch in output.fetches:
            assert self.host is not None
            self.unpack(bytes(self.host.slot(fetch.host_slot)), fetch.block_id)
        self._fetched += len(output.fetches)
        self._offloaded += len(output.offloads)

    def _copy(self, output: SchedulerOutput) -> None:
        for copy in output.copies:
            src, dst = copy.src * self.block_size, copy.dst * self.block_size
            self.slots[dst : dst + copy.num_slots] = self.slots[src : src + copy.num_slots]

    def transfer_report(self) -> TransferReport:
        fetched, self._fetched = self._fetched, 0
        offloaded, self._offloaded = self._offloaded, 0
        return TransferReport(
            self._num_transfers,
            fetched * self.block_bytes,
            fetched * self.fetch_seconds,
            offloaded * self.fetch_seconds,
        )

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        return self.pack(block_id) == bytes(payload)

    def pack(self, block_id: int) -> bytes:
        start = block_id * self.block_size
        states = self.slots[start : start + self.block_size]
        return b"".join(SLOT.pack(state is not None, state or 0) for state in states)

    def unpack(self, payload: bytes, block_id: int) -> None:
        start = block_id * self.block_size
        states = [state if written == 1 else POISON for written, state in SLOT.iter_unpack(payload)]
        self.slots[start : start + self.block_size] = states

    def _run(self, sequence: ScheduledSequence) -> int | None:
        # Attention reads every earlier position, so each of them must be alive.
        state = 0
        for position in range(sequence.num_computed):
            state = self._read(sequence, position)
        for position in range(sequence.num_computed, sequence.end):
            state = _advance(state, sequence.token_ids[position])
            self.slots[self._slot(sequence, position)] = state
        self.num_computed_tokens += sequence.num_new
        if not sequence.sample:
            return None
        drawn = _advance(state, sequence.seed) if sequence.sampling.temperature > 0 else state
        return drawn % self.vocab_size

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
