"""The host tier's memory: one region, cut into slots of one block each.

    buffer   [ slot 0 ][ slot 1 ] …      [num_slots, block_bytes]

On a GPU machine the region is pinned (its maker hands it in), so that copies can run beside the computation. Without
one it is anonymous memory in huge pages where the kernel has them: a block of 360 KiB is 90 small pages, and their
faults would cost more than the copy.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

from engine.tiers.slab import SlabReadError, payload_checksum


def allocate_host_memory(size: int) -> memoryview:
    """`size` bytes that cost nothing until they are written."""
    region = mmap.mmap(-1, size)
    with contextlib.suppress(OSError):  # a kernel without huge pages does it in small ones
        region.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(region)


class HostSlab:
    """Payloads in RAM. `slot` is a view: the device's copies go straight into it."""

    name = "host"

    def __init__(
        self, num_slots: int, block_bytes: int, allocate: Callable[[int], memoryview] = allocate_host_memory
    ) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.buffer = allocate(num_slots * block_bytes)

    def slot(self, number: int) -> memoryview:
        return self.buffer[number * self.block_bytes : (number + 1) * self.block_bytes]

    def write(self, number: int, payload: memoryview, key: bytes) -> int:
        """Returns the checksum with which it can be read again."""
        self.slot(number)[:] = payload
        return payload_checksum(payload, key)

    def read(self, number: int, into: memoryview, key: bytes, checksum: int) -> None:
        """Raises `SlabReadError` when what lies there is not what was written for this key."""
        into[:] = self.slot(number)
        if payload_checksum(into, key) != checksum:
            raise SlabReadError(f"host slot {number} does not hold its block")

    def clear(self, number: int) -> None:
        """Overwrite an erased block."""
        self.slot(number)[:] = bytes(self.block_bytes)

    def close(self) -> None:
        """The memory goes when the last view of it does."""
