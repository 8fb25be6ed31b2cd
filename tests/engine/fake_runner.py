"""A device that is honest about its cache: what comes out depends on what really lies in the slots that are read.

The "KV" of a position is a hash of the KV before it (read through the block table) and the position's token; the next
token is drawn from the KV of the last position. A block that is shared wrongly, copied too late, reused too early or
left unwritten therefore changes the text, and a poisoned slot is noticed where it is read.

Blocks that move between the tiers move as bytes, so that a payload that is torn or another's changes the text, too.

With `runs_ahead` it is a device with a queue, as lazy as can be: a step is carried out when somebody waits for it, in
the order in which steps were launched, over what the slots, the host's memory and the last tokens hold then.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import xxhash

from engine.batch import ScheduledSequence, SchedulerOutput, StepResult, TransferReport
from engine.tiers.host_slab import HostSlab

POISON: int | None = None  # what a slot holds that nobody may read
FOREIGN = -1  # a token that no prompt has


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


class FakeStep:
    """A step that was launched: what it says about its sequences is what held then."""

    def __init__(
        self, runner: FakeRunner, output: SchedulerOutput, error: Exception | None, lost: frozenset[int]
    ) -> None:
        self.output = replace(output, sequences=[_snapshot(sequence) for sequence in output.sequences])
        self.error = error
        self.lost = lost  # sequences that are to have no finite logits
        self.garbage: frozenset[str] = frozenset()  # requests whose KV a failed step was to compute
        self.result: StepResult | None = None
        self.is_done = False
        self._runner = runner

    def wait(self) -> StepResult:
        while not self.is_done:
            self._runner.run_next()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def _snapshot(sequence: ScheduledSequence) -> ScheduledSequence:
    return replace(sequence, token_ids=sequence.token_ids[:], block_table=array("i", sequence.block_table))


class FakeRunner:
    """Keeps one integer a slot. `fail_next`, when set, is raised by the next step; `lose_rows` are then its sequences
    without finite logits; `step_seconds` makes it slow."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, *, runs_ahead: bool = False) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.runs_ahead = runs_ahead
        self.slots: list[int | None] = [POISON] * (num_blocks * block_size)
        self.fail_next: Exception | None = None
        self.lose_rows: frozenset[int] = frozenset()
        self.step_seconds = 0.0
        self.num_computed_tokens = 0
        self.outputs: list[SchedulerOutput] = []
        self.host: HostSlab | None = None
        self.fetch_seconds = 1e-6  # what a copy is said to take, a block
        self._num_transfers = 0
        self._fetched = self._offloaded = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._last_tokens: dict[str, int] = {}
        self._steps: deque[FakeStep] = deque()  # that were launched and are not done

    @property
    def block_bytes(self) -> int:
        return self.block_size * SLOT.size

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self.launch(output).wait()

    def launch(self, output: SchedulerOutput) -> FakeStep:
        time.sleep(self.step_seconds)
        self.outputs.append(output)
        error, lost = (self.fail_next, self.lose_rows) if output.sequences else (None, frozenset[int]())
        step = FakeStep(self, output, error, lost)
        if output.sequences:
            self.fail_next, self.lose_rows = None, frozenset()
        self._steps.append(step)
        self._enqueue(self._run_step)
        if step.error is not None and not self.runs_ahead:
            raise step.error
        return step

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        if not self.runs_ahead:
            self.run_next()

    def run_next(self) -> None:
        self._queue.popleft()()

    def _run_step(self) -> None:
        step = self._steps.popleft()
        step.is_done = True
        try:
            self._compute(step)
        except Exception as error:  # noqa: BLE001  the host hears of it when it waits for the step
            step.error = error
            names = frozenset(sequence.request_id for sequence in step.output.sequences)
            for later in self._steps:
                later.garbage |= names

    def _compute(self, step: FakeStep) -> None:
        output = step.output
        self._num_transfers += bool(output.offloads or output.fetches)
        if step.error is not None:
            raise step.error
        self._transfer(output)
        token_ids = [0 if s.request_id in step.garbage else self._run(s) for s in output.sequences]
        if any(sequence.sample for sequence in output.sequences):
            self._last_tokens = {
                sequence.request_id: token_id
                for sequence, token_id in zip(output.sequences, token_ids, strict=True)
                if token_id is not None
            }
        step.result = StepResult([None if i in step.lost else t for i, t in enumerate(token_ids)], step.lost)

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
        if self._queue:
            self.run_next()  # a device goes on by itself
        fetched, self._fetched = self._fetched, 0
        offloaded, self._offloaded = self._offloaded, 0
        return TransferReport(
            self._num_transfers,
            fetched * self.block_bytes,
            fetched * self.fetch_seconds,
            offloaded * self.fetch_seconds,
        )

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        while self._queue:
            self.run_next()
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
        # Attention reads every earlier position, so each of them must be alive, and one of another prompt shows.
        state, is_own = 0, True
        for position in range(sequence.num_computed):
            expected = _advance(state, sequence.token_ids[position])
            state = self._read(sequence, position)
            is_own = is_own and state == expected
        if not is_own:
            state = _advance(state, FOREIGN)
        for position in range(sequence.num_computed, sequence.end):
            state = _advance(state, self._token(sequence, position))
            self.slots[self._slot(sequence, position)] = state
        self.num_computed_tokens += sequence.num_new
        if not sequence.sample:
            return None
        drawn = _advance(state, sequence.seed) if sequence.sampling.temperature > 0 else state
        return drawn % self.vocab_size

    def _token(self, sequence: ScheduledSequence, position: int) -> int:
        if sequence.takes_last and position == sequence.end - 1:
            return self._last_tokens[sequence.request_id]
        return sequence.token_ids[position]

    def _slot(self, sequence: ScheduledSequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, sequence: ScheduledSequence, position: int) -> int:
        state = self.slots[self._slot(sequence, position)]
        if state is None:
            raise PoisonedSlotError(f"{sequence.request_id} reads position {position}")
        return state

    def poison(self, block_ids: Sequence[int]) -> None:
        free = list(block_ids)
        self._enqueue(lambda: self._poison(free))

    def _poison(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            start = block_id * self.block_size
            self.slots[start : start + self.block_size] = [POISON] * self.block_size
