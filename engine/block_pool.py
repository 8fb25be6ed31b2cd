"""Who owns each KV block.

                allocate                    release (not in the index)
      free  ───────────────►  active  ───────────────────────────────►  free
                               ▲  │ release (in the index)
                      acquire  │  ▼
                              cached  ──────── evict ────────────────►  free

`free`: in the free list, content meaningless. `active`: held by `ref_count` block tables. `cached`: held by none,
in the prefix index, content waits for the next request. Every block is in exactly one of them (I1).

The pool keeps counts and the order of free blocks, nothing else: which cached block goes first is the index's
business, because it has to take tails before heads (I4), and it knows the tree. (One list of free and cached
blocks in eviction order, as others keep it, needs a linked list over all blocks and cannot see the tree.)

State lies in flat arrays, not in an object per block: with a million blocks a list of objects no longer fits
the CPU's caches, and each operation waits for memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from engine.errors import InvariantError


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    ACTIVE = "active"


class KVBlock(NamedTuple):
    """A block as it is at one moment."""

    block_id: int
    ref_count: int
    state: BlockState


class BlockPool:
    """Reference counts and the free list of `num_blocks` blocks. Every operation is O(1) a block."""

    __slots__ = ("_cached", "_free", "_indexed", "_ref_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._ref_counts: list[int] = [0] * num_blocks
        self._indexed = bytearray(num_blocks)  # 1: the prefix index holds it
        self._cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._cached

    @property
    def num_active(self) -> int:
        return self.num_blocks - len(self._free) - self._cached

    @property
    def free_list(self) -> list[int]:
        """Free block ids in the order in which they will be handed out."""
        return list(self._free)

    def block(self, block_id: int) -> KVBlock:
        ref_count = self._ref_counts[block_id]
        unheld = BlockState.CACHED if self._indexed[block_id] else BlockState.FREE
        return KVBlock(block_id, ref_count, BlockState.ACTIVE if ref_count else unheld)

    def count_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of these no block table holds."""
        ref_counts = self._ref_counts
        return sum(not ref_counts[block_id] for block_id in block_ids)

    def allocate(self, count: int) -> array[int]:
        """Free → active, oldest free first. The caller has made sure that there are enough."""
        free = self._free
        if count > len(free):
            raise InvariantError(f"I1: {count} blocks wanted, {len(free)} free")
        popleft = free.popleft
        ids = array("i", [popleft() for _ in range(count)])
        ref_counts = self._ref_counts
        for block_id in ids:
            ref_counts[block_id] = 1
        return ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more block table holds these (active or cached) blocks."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            ref_count = ref_counts[block_id]
            if not ref_count:
                if not self._indexed[block_id]:
                    raise InvariantError(f"I1: free block {block_id} acquired")
                self._cached -= 1
            ref_counts[block_id] = ref_count + 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One block table fewer holds these blocks; a block listed twice must be held twice."""
        ref_counts, indexed, append = self._ref_counts, self._indexed, self._free.append
        for block_id in block_ids:
            ref_count = ref_counts[block_id] - 1
            if ref_count < 0:
                raise InvariantError(f"I3: block {block_id} released more often than it was held")
            ref_counts[block_id] = ref_count
            if not ref_count:
                if indexed[block_id]:
                    self._cached += 1
                else:
                    append(block_id)

    def mark_indexed(self, block_ids: Iterable[int]) -> None:
        """The index now holds these active blocks."""
        indexed = self._indexed
        for block_id in block_ids:
            indexed[block_id] = 1

    def evict(self, block_ids: Iterable[int]) -> None:
        """Cached → free: the index has let these go."""
        for block_id in block_ids:
            if self._ref_counts[block_id] or not self._indexed[block_id]:
                raise InvariantError(f"I1: block {block_id} evicted, but it is not cached")
            self._indexed[block_id] = 0
            self._cached -= 1
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """I1 and the signs of I3, by walking every block."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("I1: a block is in the free list twice")
        cached = 0
        for block_id in range(self.num_blocks):
            ref_count, indexed = self._ref_counts[block_id], self._indexed[block_id]
            if ref_count < 0:
                raise InvariantError(f"I3: block {block_id} has ref_count {ref_count}")
            if (block_id in free) != (ref_count == 0 and not indexed):
                raise InvariantError(f"I1: block {block_id} is in the wrong state ({self.block(block_id)})")
            cached += indexed and not ref_count
        if cached != self._cached:
            raise InvariantError(f"I1: {cached} blocks are cached, the count says {self._cached}")
