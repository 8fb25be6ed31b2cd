"""Copies beside the computation, on a stream that takes its time: what is computed is what no offload would compute.

TensorRT-LLM#8813: with offload to the host, answers had tokens of other prompts, because copies and computation raced.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.batch import BlockFetch, BlockOffload, SchedulerOutput, TransferReport
from engine.block_transfer import (
    CopyEvent,
    CpuBlockTransfer,
    StreamBlockTransfer,
    allocate_pinned_memory,
    host_tensor,
)
from engine.errors import ConfigError
from tests.engine.fake_runner import FakeRunner, expected_output
from tests.engine.harness import VOCAB, Harness
from tests.engine.tiers.tiered_harness import host_only

MASK = (1 << 64) - 1


class LateEvent:
    """Comes when everything before it has run, and is seen a few questions later."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._place = stream.num_enqueued
        self._questions = stream.patience

    def query(self) -> bool:
        if self._stream.num_run < self._place:
            self._stream.run_one()  # a device goes on by itself
            return False
        self._questions -= 1
        return self._questions < 0

    def elapsed_since(self, start: CopyEvent) -> float:
        return 1e-6


class LateStream:
    """Nothing runs until it must: when the computation waits for it, or somebody has asked often enough."""

    def __init__(self, patience: int, *, holds: bool = True) -> None:
        self.patience = patience
        self.num_enqueued = self.num_run = 0
        self.most_late = 0
        self._holds = holds
        self._queue: list[Callable[[], object]] = []

    def wait_for_compute(self) -> None:
        """The fake computation is over when its call returns."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_enqueued += 1
        self._queue.append(lambda: target.copy_(source))

    def event(self) -> LateEvent:
        return LateEvent(self)

    def hold_compute(self) -> None:
        self.most_late = max(self.most_late, len(self._queue))
        while self._queue and self._holds:
            self.run_one()

    def synchronize(self) -> None:
        while self._queue:
            self.run_one()

    def run_one(self) -> None:
        if self._queue:
            self._queue.pop(0)()
            self.num_run += 1


class TensorSlots:
    """The fake device's slots in a tensor [num_slots, 2], so that real transfers can move them."""

    def __init__(self, num_slots: int) -> None:
        self.tensor = torch.zeros((num_slots, 2), dtype=torch.int64)

    def __getitem__(self, place: int | slice) -> int | list[int | None] | None:
        rows = self.tensor[place].reshape(-1, 2).tolist()
        values = [state & MASK if written else None for written, state in rows]
        return values if isinstance(place, slice) else values[0]

    def __setitem__(self, place: int | slice, value: int | list[int | None] | None) -> None:
        values = value if isinstance(value, list) else [value]
        rows = [[0, 0] if state is None else [1, state - (1 << 64) if state >> 63 else state] for state in values]
        self.tensor[place] = torch.tensor(rows if isinstance(place, slice) else rows[0], dtype=torch.int64)


class StreamedRunner(FakeRunner):
    """The fake device with transfers on a stream of their own."""

    def use(self, stream: LateStream) -> None:
        assert self.host is not None
        slots = TensorSlots(len(self.slots))
        self.slots = slots  # type: ignore[assignment]
        self.stream = stream
        kv_cache = slots.tensor.view(-1, self.block_size * 2)
        self.transfer = StreamBlockTransfer(kv_cache, host_tensor(self.host.buffer, kv_cache), stream)

    def _transfer(self, output: SchedulerOutput) -> None:
        if not output.offloads and not output.fetches:
            self._copy(output)
            return
        self.transfer.begin()
        self.transfer.offload(output.offloads)
        self._copy(output)
        self.transfer.fetch(output.fetches)
        self.transfer.end()

    def transfer_report(self) -> TransferReport:
        return self.transfer.report()


def streamed_harness(stream: LateStream, num_blocks: int = 12, host_slots: int = 24) -> Harness:
    harness = Harness(num_blocks, 4, token_budget=24, chunk=8, max_num_seqs=4, tiers=host_only(host_slots))
    runner = StreamedRunner(num_blocks, 4, VOCAB - 1)
    runner.host = harness.runner.host
    runner.use(stream)
    harness.runner = harness.engine.runner = runner
    return harness


def traffic(harness: Harness, seed: int) -> tuple[int, int]:
    """(requests that failed or answered wrongly, tokens from host memory)"""
    rng = random.Random(seed)
    heads = [rng.choices(range(250), k=12) for _ in range(4)]
    wrong = hits = 0
    for _ in range(12):
        prompts: dict[str, list[int]] = {}
        for _ in range(4):
            prompt = [*rng.choice(heads), *rng.choices(range(250), k=rng.randrange(1, 9))]
            prompts[harness.submit(prompt, rng.randrange(1, 8))] = prompt
        harness.run()
        for name, prompt in prompts.items():
            tokens = [] if name in harness.failures else harness.tokens_of(name)
            wrong += not tokens or tokens != expected_output(prompt, len(tokens), VOCAB - 1)
            hits += harness.accounts[name].host if name in harness.accounts else 0
    return wrong, hits


@pytest.mark.parametrize("patience", [0, 1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_offload_and_reload_with_late_copies_change_no_text(patience: int, seed: int) -> None:
    stream = LateStream(patience)
    harness = streamed_harness(stream)
    wrong, hits = traffic(harness, seed)
    assert wrong == 0
    assert hits > 0
    assert stream.most_late > 1, "copies were late at all"
    harness.check()


def test_the_fake_stream_shows_the_race_when_nothing_waits_for_copies() -> None:
    """The test above can fail: with a computation that does not wait, the same traffic goes wrong."""
    wrong = sum(traffic(streamed_harness(LateStream(0, holds=False)), seed)[0] for seed in range(4))
    assert wrong > 0


def test_a_host_slot_is_not_ready_before_its_copy_has_ended() -> None:
    stream = LateStream(patience=3)
    harness = streamed_harness(stream)
    tiers = harness.engine.tiers
    assert tiers is not None
    harness.generate(list(range(20)), 1)
    harness.submit(list(range(100, 136)), 1)
    while harness.engine.has_work() and not tiers.host.counts().filling:
        harness.step()
    assert tiers.host.counts().filling > 0
    harness.run()
    for _ in range(40):
        harness.engine.idle()
    counts = tiers.host.counts()
    assert (counts.filling, counts.gone) == (0, 0)
    assert counts.ready > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_blocks_move_whole_and_neighbours_stay(dtype: torch.dtype) -> None:
    kv_cache = torch.randn(6, 2, 2, 4, 1, 8).to(dtype)
    before = kv_cache.clone()
    memory = memoryview(bytearray(4 * kv_cache[0].nbytes))
    host = host_tensor(memory, kv_cache)
    transfer = CpuBlockTransfer(kv_cache, host)
    transfer.offload([BlockOffload(1, 2), BlockOffload(2, 3), BlockOffload(5, 0)])
    transfer.end()
    kv_cache.zero_()
    transfer.fetch([BlockFetch(0, 3), BlockFetch(2, 0), BlockFetch(3, 1)])
    transfer.end()
    assert torch.equal(kv_cache[3], before[5])
    assert torch.equal(kv_cache[:2], before[1:3])
    assert not kv_cache[[2, 4, 5]].any()
    report = transfer.report()
    assert (report.num_done, report.fetched_bytes) == (2, 3 * kv_cache[0].nbytes)
    assert transfer.report().fetched_bytes == 0


class FakeDriver:
    """What of CUDA's runtime pins memory."""

    def __init__(self, status: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._status = status

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address not in self.pinned
        assert flags == 1
        if not self._status:
            self.pinned[address] = size
        return self._status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("size", [5 << 20, 4096 * 3 + 17])
def test_a_slab_pins_no_more_than_its_size_and_only_while_it_lives(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator rounds up to a power of two: a host tier of 5 GiB would take 8."""
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    buffer = allocate_pinned_memory(size)
    slots = torch.frombuffer(buffer, dtype=torch.uint8)
    assert driver.pinned == {slots.data_ptr(): size}
    assert len(buffer) == size
    buffer[size - 1] = 7
    del buffer
    assert slots[size - 1] == 7
    assert driver.pinned
    del slots
    assert not driver.pinned


def test_memory_that_the_driver_does_not_pin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(ConfigError, match=r"tiers\.host_memory = 8192 bytes \(CUDA error 2\)"):
        allocate_pinned_memory(8192)
