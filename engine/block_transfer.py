"""Moves whole blocks between the KV tensor and the host slab.

    CPU    a copy is a copy: done when the call returns

    GPU    compute stream   ── step n-1 ──●───────────── wait ──► step n
                                          │ event          ▲ event
           copy stream                    └─► D2H … H2D ───┘         `transfer_report` asks the events, in order

On a GPU nothing on the CPU waits for a copy. The copy stream begins after what was computed before (a block that leaves
is complete), and the step begins after the copies (a block is not written before it was read, nor read before it has
come). Within the copy stream offloads go before fetches. A host slot is not touched by anyone else until the event
after its copy has come (`TieredCache` keeps it pinned until then).

Rejected: letting the step overlap with its own offloads. It needs a second state for blocks between evicted and free,
for a copy that takes 15 µs over PCIe.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import BlockFetch, BlockOffload, TransferReport
from engine.errors import ConfigError

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
MIN_SHARED_BLOCKS = 8  # below, one thread is done before another has begun

ByteRows = NDArray[np.uint8]  # [num_blocks, block_bytes]


class BlockTransfer(Protocol):
    """Called in this order, once a step with transfers; copies within the device come between offloads and fetches."""

    def begin(self) -> None: ...

    def offload(self, offloads: Sequence[BlockOffload]) -> None: ...

    def fetch(self, fetches: Sequence[BlockFetch]) -> None: ...

    def end(self) -> None:
        """Also after a failure: what was begun is counted as done when it has ended."""
        ...

    def report(self) -> TransferReport: ...


class CpuBlockTransfer:
    """Plain copies between two regions of memory.

    By `numpy`, not by torch: torch would split each block over its threads, and wait for all of them each time. Many
    blocks are shared out between a few threads instead, once.
    """

    def __init__(self, kv_cache: torch.Tensor, host: torch.Tensor, threads: int = 1) -> None:
        """`kv_cache` [num_blocks, …], `host` [num_slots, …], of the same block shape."""
        self._blocks = _as_bytes(kv_cache)
        self._slots = _as_bytes(host)
        self._block_bytes = self._blocks.shape[1]
        self._threads = ThreadPoolExecutor(threads - 1, "block-transfer") if threads > 1 else None
        self._shares = threads
        self._num_done = 0
        self._fetched = 0
        self._fetch_seconds = self._offload_seconds = 0.0

    def begin(self) -> None:
        """Nothing runs beside the computation here."""

    def offload(self, offloads: Sequence[BlockOffload]) -> None:
        started = time.perf_counter()
        self._copy(self._slots, self._blocks, [(offload.host_slot, offload.block_id) for offload in offloads])
        if offloads:
            self._offload_seconds += time.perf_counter() - started

    def fetch(self, fetches: Sequence[BlockFetch]) -> None:
        started = time.perf_counter()
        self._copy(self._blocks, self._slots, [(fetch.block_id, fetch.host_slot) for fetch in fetches])
        self._fetched += len(fetches)
        self._fetch_seconds += time.perf_counter() - started

    def _copy(self, target: ByteRows, source: ByteRows, rows: list[tuple[int, int]]) -> None:
        if self._threads is None or len(rows) < MIN_SHARED_BLOCKS:
            _copy_rows(target, source, rows)
            return
        others = [
            self._threads.submit(_copy_rows, target, source, rows[share :: self._shares])
            for share in range(1, self._shares)
        ]
        _copy_rows(target, source, rows[:: self._shares])
        for other in others:
            other.result()

    def end(self) -> None:
        self._num_done += 1

    def report(self) -> TransferReport:
        report = TransferReport(
            self._num_done, self._fetched * self._block_bytes, self._fetch_seconds, self._offload_seconds
        )
        self._fetched, self._fetch_seconds, self._offload_seconds = 0, 0.0, 0.0
        return report


def _as_bytes(blocks: torch.Tensor) -> ByteRows:
    return blocks.view(blocks.shape[0], -1).view(torch.uint8).numpy()


def _copy_rows(target: ByteRows, source: ByteRows, rows: Sequence[tuple[int, int]]) -> None:
    """numpy lets go of the interpreter's lock while it copies."""
    for to, of in rows:
        np.copyto(target[to], source[of])


class CopyEvent(Protocol):
    def query(self) -> bool:
        """Whether everything before it has ended."""
        ...

    def elapsed_since(self, start: CopyEvent) -> float:
        """Seconds between two events that have come."""
        ...


class CopyStream(Protocol):
    """A device's queue of copies beside the computation."""

    def wait_for_compute(self) -> None:
        """What follows here begins after all that was computed so far."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def event(self) -> CopyEvent: ...

    def hold_compute(self) -> None:
        """What is computed from now on begins after all copies so far."""
        ...

    def synchronize(self) -> None: ...


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        return self._event.query()

    def elapsed_since(self, start: CopyEvent) -> float:
        assert isinstance(start, CudaEvent)
        return start._event.elapsed_time(self._event) / 1e3


class CudaCopyStream:
    """A side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def wait_for_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def event(self) -> CopyEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return CudaEvent(event)

    def hold_compute(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


@dataclass(slots=True)
class _InFlight:
    """One step's copies: offloads between `start` and `offloaded`, fetches between `fetching` and `end`."""

    start: CopyEvent
    num_offloaded: int = 0
    offloaded: CopyEvent | None = None
    num_fetched: int = 0
    fetching: CopyEvent | None = None
    end: CopyEvent | None = None


class StreamBlockTransfer:
    """Copies on a stream of their own; `host` must be pinned, or they would not run beside anything."""

    def __init__(self, kv_cache: torch.Tensor, host: torch.Tensor, stream: CopyStream) -> None:
        self._blocks = kv_cache.view(kv_cache.shape[0], -1)
        self._slots = host.view(host.shape[0], -1)
        self._block_bytes = self._blocks[0].nbytes
        self._stream = stream
        self._in_flight: deque[_InFlight] = deque()
        self._num_done = 0

    def begin(self) -> None:
        self._stream.wait_for_compute()
        self._in_flight.append(_InFlight(self._stream.event()))

    def offload(self, offloads: Sequence[BlockOffload]) -> None:
        for block, slot, count in _runs([(offload.block_id, offload.host_slot) for offload in offloads]):
            self._stream.copy(self._slots[slot : slot + count], self._blocks[block : block + count])
        self._in_flight[-1].offloaded, self._in_flight[-1].num_offloaded = self._stream.event(), len(offloads)
        # Copies within the device that follow overwrite blocks that have just been offloaded.
        self._stream.hold_compute()

    def fetch(self, fetches: Sequence[BlockFetch]) -> None:
        self._stream.wait_for_compute()  # the sources of copies within the device may be overwritten from here on
        self._in_flight[-1].fetching, self._in_flight[-1].num_fetched = self._stream.event(), len(fetches)
        for slot, block, count in _runs([(fetch.host_slot, fetch.block_id) for fetch in fetches]):
            self._stream.copy(self._blocks[block : block + count], self._slots[slot : slot + count])

    def end(self) -> None:
        self._in_flight[-1].end = self._stream.event()
        self._stream.hold_compute()

    def report(self) -> TransferReport:
        fetched, fetch_seconds, offload_seconds = 0, 0.0, 0.0
        while self._in_flight and (end := self._in_flight[0].end) is not None and end.query():
            done = self._in_flight.popleft()
            self._num_done += 1
            if done.num_offloaded and done.offloaded is not None:
                offload_seconds += done.offloaded.elapsed_since(done.start)
            if done.num_fetched and done.fetching is not None:
                fetched += done.num_fetched
                fetch_seconds += end.elapsed_since(done.fetching)
        return TransferReport(self._num_done, fetched * self._block_bytes, fetch_seconds, offload_seconds)


def _runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first, first, count) of pairs that go up together: one copy each.

    Blocks are evicted tail first but offloaded head first, so neighbours in a prompt are often neighbours in memory.
    """
    runs: list[tuple[int, int, int]] = []
    for one, other in pairs:
        if runs and runs[-1][0] + runs[-1][2] == one and runs[-1][1] + runs[-1][2] == other:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((one, other, 1))
    return runs


def host_tensor(buffer: memoryview, kv_cache: torch.Tensor) -> torch.Tensor:
    """A host slab's memory, seen as blocks: [num_slots, *block_shape]."""
    return torch.frombuffer(buffer, dtype=kv_cache.dtype).view(-1, *kv_cache.shape[1:])


def allocate_pinned_memory(size: int) -> memoryview:
    """Memory that a GPU copies from and to without the CPU's help, and not a byte more than `size`.

    torch's own allocator of pinned memory rounds up to a power of two (CachingHostAllocator: for reuse). For a slab of
    5 GiB it takes 8 from the machine, which nobody else can have.
    """
    region = _PinnedRegion(-1, size)
    with contextlib.suppress(OSError):  # a kernel without huge pages does it in small ones
        region.madvise(mmap.MADV_HUGEPAGE)
    region.pin()
    return memoryview(region)


class _PinnedRegion(mmap.mmap):
    """Anonymous memory that the driver knows of, until the last view of it is gone."""

    _unpin: Callable[[], object] | None = None

    def pin(self) -> None:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, len(self), _PORTABLE))
        if status:
            raise ConfigError(
                f"the driver does not pin tiers.host_memory = {len(self)} bytes (CUDA error {status}): "
                "make it smaller, or raise the limit of locked memory (ulimit -l)",
                param="tiers.host_memory",
            )
        self._unpin = partial(runtime.cudaHostUnregister, address)

    def __del__(self) -> None:
        """Before it is unmapped: the next region at this address would count as pinned already, and be refused."""
        if self._unpin is not None:
            self._unpin()
