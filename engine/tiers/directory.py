"""Which block lies in which slot of one tier: a tree over a fixed number of slots, kept in flat arrays.

    slots         0      1      2      3      4            key → slot    a dict
    parent        -      0      1      1      -            tokens        compared on every hit, of the whole path
    first_child   1      2      ·      ·      ·
    state         ready  ready  ready  filling free

    free ──add──► filling (pinned) ──ready──► ready ──evict or erase──► free
                        │                                      ▲
                        └── removed while pinned: not findable, and free when the last pin goes

Invariants
I4 a slot's parent is in the same tier: only leaves are evicted, and nothing is added without its parent. So a path is
   either here from the root on, or not at all, and each tier can be lost, restarted or read without the others.
I5 the scope is part of the key, and compared like the tokens.
I8 only `ready` slots are found; a pinned slot is never handed out again.

The key finds, the tokens prove: nothing is taken for a block of a path before the tokens and scopes of all of it, up to
the root, have been compared with those of the slots. That holds for `match`, and as well for what is put in: a block is
here, or has its parent here, only if `find_path` says so. So a key that collides with another prefix's never leads to
that prefix's payload; of two paths of the same keys, the first to come is here, and the other is not.

Eviction: leaves without pins stand in a heap by the policy's priority (`engine/eviction.py` has the same two). Touching
a path touches its deepest block; a parent inherits that when its last child goes, so it never goes before its time.

Rejected: an object a block. At 3 million slots (1 TiB of a small model's blocks) objects with ten fields are 1 GB;
the arrays are 100 bytes a slot and 170 more for the key and its place in the dict, beside the tokens.
"""

from __future__ import annotations

import heapq
import mmap
import sys
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from engine.erasure import Selection
from engine.errors import InvariantError
from engine.eviction import EvictionLedger, Policy, recompute_cost
from engine.prefix_index import KEY_BYTES, BlockIdentity, BlockPath, DocumentRun, common_tokens
from engine.scoped_tokens import TOKEN_BYTES, ScopedTokens
from engine.tiers.names import Name, Names

_MAX_SIBLINGS = 32  # children that are looked at for the one that shares most
_KEY_OBJECT, _INT_OBJECT, _HEAP_ENTRY = 64, 32, 64 + 24 + 32 + 32  # as CPython allocates them
_FREE, _FILLING, _READY, _GONE = range(4)


@dataclass(slots=True)
class RestoredBlocks:
    """Blocks of an earlier life, as columns of one length."""

    slots: NDArray[np.int64]
    keys: list[bytes]
    tokens: NDArray[np.void]
    parents: NDArray[np.int64]  # slots; -1: a first block
    depths: NDArray[np.uint32]
    hits: NDArray[np.uint32]
    last_used: NDArray[np.uint32]
    checksums: NDArray[np.uint64]
    scopes: list[bytes]
    owners: list[str]
    documents: list[tuple[str, ...]]


@dataclass(slots=True)
class DirectoryCounts:
    """Slots by state; they sum to `num_slots`."""

    free: int = 0
    filling: int = 0
    ready: int = 0
    gone: int = 0  # removed, but still pinned
    private: int = 0  # lent out, not in the tree


class TierDirectory:
    """The tree of one tier. One thread owns it."""

    def __init__(self, num_slots: int, block_size: int, root_key: bytes, policy: Policy = "lru") -> None:
        self.num_slots = num_slots
        self.policy: Policy = policy
        self.root_key = root_key
        self.names = Names()  # of scopes, owners and documents
        self.owner_blocks: dict[str, int] = {}
        self.ledger = EvictionLedger()
        self._stride = block_size * TOKEN_BYTES
        self._block = np.dtype(f"V{self._stride}")
        self._slots: dict[bytes, int] = {}  # key → slot, of those that are filling or ready
        self._free = array("i", range(num_slots - 1, -1, -1))  # the lowest slots are handed out first
        self._private: set[int] = set()
        # Anonymous memory: pages that no slot has used yet cost nothing.
        self._keys = mmap.mmap(-1, max(num_slots * KEY_BYTES, 1))
        self._tokens = mmap.mmap(-1, max(num_slots * self._stride, 1))
        self._state = bytearray(num_slots)
        self._pins = array("H", bytes(2 * num_slots))
        links = array("i", [-1]) * num_slots
        self._parent, self._first_child, self._next, self._previous = (array("i", links) for _ in range(4))
        self._depth = array("I", bytes(4 * num_slots))
        self._scope, self._owner, self._documents = (array("I", bytes(4 * num_slots)) for _ in range(3))
        self._hits = array("I", bytes(4 * num_slots))
        self._priority = array("d", bytes(8 * num_slots))
        self._ticket = array("Q", bytes(8 * num_slots))  # 0: not evictable
        self.checksum = array("Q", bytes(8 * num_slots))
        self.last_used = array("I", bytes(4 * num_slots))  # Unix seconds
        self._by_document: dict[str, set[int]] = {}
        self._removed: list[int] = []  # slots that have lost their block since `take_removed`
        self._heap: list[tuple[float, int, int]] = []  # (priority, ticket, slot)
        self._num_leaves = 0
        self._tickets = 0
        self._uses = 0
        self._clock = 0.0

    def __len__(self) -> int:
        """Blocks that are here or on their way."""
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evicted(self) -> int:
        """Blocks, since the start."""
        return self.ledger.total()

    # ------------------------------------------------------------------ find

    def find(self, key: bytes) -> int | None:
        """The slot of a key, ready or still filling. Proves nothing: `match` does."""
        return self._slots.get(key)

    def is_ready(self, slot: int) -> bool:
        return self._state[slot] == _READY

    def is_free(self, slot: int) -> bool:
        return self._state[slot] == _FREE and slot not in self._private

    def is_private(self, slot: int) -> bool:
        return slot in self._private

    def is_awaited(self, slot: int) -> bool:
        """Whether a payload is still expected: not when its block was removed meanwhile."""
        return self._state[slot] == _FILLING

    def is_filling(self, key: bytes) -> bool:
        slot = self._slots.get(key)
        return slot is not None and self._state[slot] == _FILLING

    def match(self, sequence: ScopedTokens, first: int, keys: Iterable[bytes]) -> list[int]:
        """The ready slots of the blocks from `first` on, whose keys are given; proven up to the root."""
        found: list[int] = []
        parent: int | None = None
        for block, key in enumerate(keys, first):
            slot = self._slots.get(key)
            if slot is None or self._state[slot] != _READY:
                break
            if parent is None:
                if self._proven_path(slot, block, sequence.packed, sequence.spans()) is None:
                    break
            elif self._parent[slot] != parent or not self._holds(slot, sequence, block):
                break
            found.append(slot)
            parent = slot
        return found

    def closest_child(
        self, key: bytes, sequence: ScopedTokens, block: int, wanted: bytes, more_than: int
    ) -> tuple[int, int] | None:
        """(slot, tokens) of the ready block under `key` that begins most like `wanted`, if with more tokens than that.

        `block`: its place in the sequence. Only children that the sequence may read, and only the last few that came:
        a system prompt has thousands.
        """
        parent = self._slots.get(key)
        best: tuple[int, int] | None = None
        if parent is None or self._first_child[parent] < 0:
            return None
        scopes = sequence.scopes_up_to(block)
        child = self._first_child[parent]
        for _ in range(_MAX_SIBLINGS):
            if child < 0:
                break
            shared = common_tokens(self.tokens(child), wanted)
            if shared > more_than and self._state[child] == _READY and self.scope(child) in scopes:
                best, more_than = (child, shared), shared
            child = self._next[child]
        if best is None or self._proven_path(parent, block - 1, sequence.packed, sequence.spans()) is None:
            return None
        return best

    def find_path(self, path: BlockPath) -> list[int]:
        """The slots of a path's first blocks, as far as they are here, ready or still filling; proven.

        By I4 those that are here come first, so their end is found by bisection. It is proven at once; only when its
        key leads to another path's block, block by block.
        """
        count = bisect_left(range(len(path)), True, key=lambda block: path.key(block) not in self._slots)
        if not count:
            return []
        found = self._proven_path(self._slots[path.key(count - 1)], count - 1, path.packed, path.spans)
        return self._walk_down(path) if found is None else found

    def _walk_down(self, path: BlockPath) -> list[int]:
        found: list[int] = []
        parent = -1
        for scope, end in path.spans:
            number = self.names.number(scope)
            for block in range(len(found), end):
                slot = self._slots.get(path.key(block))
                if slot is None or self._parent[slot] != parent or self._scope[slot] != number:
                    return found
                if self.tokens(slot) != path.packed[block * self._stride : (block + 1) * self._stride]:
                    return found
                found.append(slot)
                parent = slot
        return found

    def _holds(self, slot: int, sequence: ScopedTokens, block: int) -> bool:
        return (
            self.tokens(slot) == sequence.block_tokens(block)
            and self.names[self._scope[slot]] == sequence.span(block)[0]
        )

    def _proven_path(
        self, slot: int, block: int, packed: bytes | bytearray, spans: Iterable[tuple[bytes, int]]
    ) -> list[int] | None:
        """The slots from the root to this one, if they hold the blocks of these tokens and scopes up to this block.

        Compared all at once, which takes a quarter of what a comparison each would.
        """
        if self._depth[slot] != block:
            return None
        path = self.slots_to(slot)
        rows = np.array(path)
        if not packed.startswith(np.frombuffer(self._tokens, dtype=self._block)[rows].tobytes()):
            return None
        scopes, start = np.frombuffer(self._scope, dtype=self._scope.typecode)[rows], 0
        for scope, end in spans:
            if (scopes[start:end] != self.names.number(scope)).any():
                return None
            start = end
        return path

    # ------------------------------------------------------------------ change

    def add(self, block: BlockIdentity, parent: int | None) -> int | None:
        """A slot for a block, pinned and filling; None when nothing can make room, or the block's key is another's.

        `parent`: the slot of the block before, from `find_path` or just added; None: it is a first block.
        """
        if parent is not None and self._state[parent] not in (_FILLING, _READY):
            raise InvariantError(f"I4: a block was to be added behind slot {parent}, which has none")
        if block.key in self._slots:
            return None
        above = -1 if parent is None else parent
        slot = self._allocate(block.owner, keep=above)
        if slot is None:
            return None
        self._write(slot, block, above)
        self._state[slot] = _FILLING
        self._pins[slot] = 1
        self.touch(slot)
        return slot

    def _write(self, slot: int, block: BlockIdentity, parent: int) -> None:
        self._slots[block.key] = slot
        self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = block.key
        self._tokens[slot * self._stride : (slot + 1) * self._stride] = block.tokens
        self._depth[slot] = self._depth[parent] + 1 if parent >= 0 else 0
        self._scope[slot] = self.names.add(block.scope)
        self._owner[slot] = self.names.add(block.owner)
        self._documents[slot] = self.names.add(block.documents)
        self._hits[slot] = 0
        self.owner_blocks[block.owner] = self.owner_blocks.get(block.owner, 0) + 1
        for document in block.documents:
            self._by_document.setdefault(document, set()).add(slot)
        self._link(slot, parent)

    def _link(self, slot: int, parent: int) -> None:
        self._parent[slot], self._first_child[slot] = parent, -1
        self._previous[slot] = self._next[slot] = -1
        if parent < 0:
            return
        sibling = self._first_child[parent]
        if sibling >= 0:
            self._previous[sibling] = slot
        self._next[slot], self._first_child[parent] = sibling, slot
        self._withdraw(parent)

    def ready(self, slot: int, checksum: int = 0) -> bool:
        """The payload is in place: findable from now on. False when it was removed meanwhile. Undoes `add`'s pin."""
        alive = self._state[slot] == _FILLING
        if alive:
            self._state[slot] = _READY
            self.checksum[slot] = checksum
        self.unpin(slot)
        return alive

    def touch(self, slot: int, now: int = 0, *, hit: bool = False) -> None:
        """Has been used: the deepest block of a path stands for all of it."""
        self._uses += 1
        self._hits[slot] += hit
        if now:
            self.last_used[slot] = now
        self._priority[slot] = self._value(slot)
        if self._ticket[slot]:
            self._withdraw(slot)
        self._offer(slot)

    def _value(self, slot: int) -> float:
        if self.policy == "lru":
            return float(self._uses)
        return self._clock + (1 + self._hits[slot]) * recompute_cost(self._depth[slot])

    def pin(self, slot: int) -> None:
        """Its payload is being read or written: neither evicted nor handed out again until `unpin`."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        if not self._pins[slot]:
            raise InvariantError(f"I8: slot {slot} was unpinned more often than it was pinned")
        self._pins[slot] -= 1
        if not self._pins[slot]:
            if self._state[slot] == _GONE:
                self._give_back(slot)
            else:
                self._offer(slot)

    # ------------------------------------------------------------------ private slots

    def take(self, pressed_by: str) -> int | None:
        """A slot outside the tree, for as long as the caller wants it; None when nothing can make room."""
        slot = self._allocate(pressed_by, keep=-1)
        if slot is not None:
            self._private.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """Undo `take`."""
        self._private.remove(slot)
        self._free.append(slot)

    # ------------------------------------------------------------------ room

    def _allocate(self, pressed_by: str, keep: int) -> int | None:
        """A free slot, evicting a leaf if there must be; never `keep`, the parent of what is to come."""
        if not self._free:
            if keep >= 0:
                self.pin(keep)
            self.evict(1, pressed_by)
            if keep >= 0:
                self.unpin(keep)
        return self._free.pop() if self._free else None

    def evict(self, count: int, pressed_by: str) -> int:
        """Let go of up to `count` blocks in the order of eviction; how many went."""
        for gone in range(count):
            victim = self._next_victim()
            if victim is None:
                return gone
            self._clock = max(self._clock, self._priority[victim]) if self.policy == "gdsf" else self._clock
            self.ledger.note(self.owner(victim), pressed_by, 1)
            self.remove(victim)
        return count

    def _next_victim(self) -> int | None:
        """The slot that goes next; None when nothing may."""
        while self._heap:
            _, ticket, slot = self._heap[0]
            if self._ticket[slot] != ticket:
                heapq.heappop(self._heap)
            elif self._pins[slot]:
                heapq.heappop(self._heap)
                self._withdraw(slot)  # `unpin` offers it again
            else:
                return slot
        return None

    def _offer(self, slot: int) -> None:
        """A candidate for eviction, if it is a ready leaf without pins."""
        if self._state[slot] != _READY or self._first_child[slot] >= 0 or self._pins[slot] or self._ticket[slot]:
            return
        self._tickets += 1
        self._ticket[slot] = self._tickets
        self._num_leaves += 1
        heapq.heappush(self._heap, (self._priority[slot], self._tickets, slot))
        if len(self._heap) > 2 * self._num_leaves + 64:
            self._heap = [entry for entry in self._heap if self._ticket[entry[2]] == entry[1]]
            heapq.heapify(self._heap)

    def _withdraw(self, slot: int) -> None:
        if self._ticket[slot]:
            self._ticket[slot] = 0
            self._num_leaves -= 1

    def remove(self, slot: int) -> list[int]:
        """Take a block and everything below it out of the tree; the slots, children first."""
        subtree = [slot]
        for at in subtree:
            child = self._first_child[at]
            while child >= 0:
                subtree.append(child)
                child = self._next[child]
        subtree.reverse()
        for at in subtree:
            self._remove_leaf(at)
        return subtree

    def _remove_leaf(self, slot: int) -> None:
        self._withdraw(slot)
        self._unlink(slot)
        del self._slots[self.key(slot)]
        owner = self.owner(slot)
        self.owner_blocks[owner] -= 1
        if not self.owner_blocks[owner]:
            del self.owner_blocks[owner]
        for document in self.documents(slot):
            slots = self._by_document[document]
            slots.discard(slot)
            if not slots:
                del self._by_document[document]
        for name in (self._scope[slot], self._owner[slot], self._documents[slot]):
            self.names.drop(name)
        self._removed.append(slot)
        self._state[slot] = _GONE
        if not self._pins[slot]:
            self._give_back(slot)

    def take_removed(self) -> list[int]:
        """The slots that have lost their block since the last call: evicted, erased, or found unreadable."""
        removed, self._removed = self._removed, []
        return removed

    def _unlink(self, slot: int) -> None:
        parent, before, after = self._parent[slot], self._previous[slot], self._next[slot]
        if after >= 0:
            self._previous[after] = before
        if before >= 0:
            self._next[before] = after
        elif parent >= 0:
            self._first_child[parent] = after
        if parent >= 0:
            self._priority[parent] = max(self._priority[parent], self._priority[slot])
            self._hits[parent] = max(self._hits[parent], self._hits[slot])
            self.last_used[parent] = max(self.last_used[parent], self.last_used[slot])
            self._offer(parent)

    def _give_back(self, slot: int) -> None:
        self._state[slot] = _FREE
        self._free.append(slot)

    def erase(self, selection: Selection) -> list[int]:
        """Remove the selected blocks, and what hangs below them; the slots, children first."""
        removed: list[int] = []
        for slot in self._selected(selection):
            if self._state[slot] in (_FILLING, _READY):  # else an earlier one was above it
                removed += self.remove(slot)
        return removed

    def document_runs(self, selection: Selection) -> Iterator[DocumentRun]:
        """Where the selected documents stand: from their start on as long as the path neither forks nor changes."""
        for document in [key for key in self._by_document if selection.has_document(key)]:
            for slot in self._by_document[document]:
                if self._state[slot] == _READY and selection.has_block(self.owner(slot), self.scope(slot)):
                    run = self._run_from(slot)
                    last_use = max(self.last_used[at] for at in run)
                    yield DocumentRun(document.rpartition("\x1f")[2], len(run), 0, float(last_use))

    def _run_from(self, slot: int) -> list[int]:
        run = [slot]
        while (child := self._first_child[run[-1]]) >= 0 and self._next[child] < 0:
            starts_another = self.documents(child)
            if starts_another or self._scope[child] != self._scope[slot] or self._state[child] != _READY:
                break
            run.append(child)
        return run

    def _selected(self, selection: Selection) -> list[int]:
        if selection.document_ids is None:
            slots = list(self._slots.values())
        else:
            documents = [key for key in self._by_document if selection.has_document(key)]
            slots = [slot for document in documents for slot in self._by_document[document]]
        return [slot for slot in slots if selection.has_block(self.owner(slot), self.scope(slot))]

    # ------------------------------------------------------------------ look

    def key(self, slot: int) -> bytes:
        return self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES]

    def parent_of(self, slot: int) -> int | None:
        parent = self._parent[slot]
        return parent if parent >= 0 else None

    def slots_to(self, slot: int) -> list[int]:
        """From the path's first block to this one."""
        slots, above = [slot], self._parent
        while (slot := above[slot]) >= 0:
            slots.append(slot)
        slots.reverse()
        return slots

    def sequence_of(self, slots: list[int]) -> ScopedTokens:
        """What a request over the blocks of these slots, from a first block on, would have brought.

        Where tenants share a scope, its blocks may have several owners; a request has one, here that of the last block.
        """
        owners = {self.scope(slot): self.owner(slot) for slot in slots}
        blocks = [(self.tokens(slot), self.scope(slot), owners[self.scope(slot)]) for slot in slots]
        size = self._stride // TOKEN_BYTES
        documents = [(block * size, key) for block, slot in enumerate(slots) for key in self.documents(slot)]
        return ScopedTokens(size, blocks, documents)

    def path_of(self, slots: list[int]) -> BlockPath:
        """Of slots from a first block on."""
        spans, end = list[tuple[bytes, int]](), 0
        for _, run in groupby(slots, self._scope.__getitem__):
            first, *others = run
            end += 1 + len(others)
            spans.append((self.scope(first), end))
        return BlockPath(b"".join(map(self.tokens, slots)), spans, b"".join(map(self.key, slots)))

    def has_children(self, slot: int) -> bool:
        return self._first_child[slot] >= 0

    def tokens(self, slot: int) -> bytes:
        return self._tokens[slot * self._stride : (slot + 1) * self._stride]

    def scope(self, slot: int) -> bytes:
        scope = self.names[self._scope[slot]]
        assert isinstance(scope, bytes)
        return scope

    def owner(self, slot: int) -> str:
        owner = self.names[self._owner[slot]]
        assert isinstance(owner, str)
        return owner

    def documents(self, slot: int) -> tuple[str, ...]:
        documents = self.names[self._documents[slot]]
        assert isinstance(documents, tuple)
        return documents

    def name_ids(self, slot: int) -> tuple[int, int, int]:
        """The ids of scope, owner and documents in `names`."""
        return self._scope[slot], self._owner[slot], self._documents[slot]

    def hits(self, slot: int) -> int:
        return self._hits[slot]

    def depth(self, slot: int) -> int:
        return self._depth[slot]

    def identity(self, slot: int) -> BlockIdentity:
        return BlockIdentity(
            self.key(slot), self.scope(slot), self.owner(slot), self.tokens(slot), self.documents(slot)
        )

    def memory_bytes(self) -> int:
        """What the index takes, beside the tokens: arrays, dict, keys, and the order of eviction."""
        slots = self.num_slots
        arrays = sum(
            values.itemsize * slots
            for values in (
                *(self._pins, self._parent, self._first_child, self._next, self._previous, self._depth, self._scope),
                *(self._owner, self._documents, self._hits, self._priority, self._ticket),
                *(self.checksum, self.last_used, self._free),
            )
        )
        entries = sys.getsizeof(self._slots) + len(self._slots) * (_KEY_OBJECT + _INT_OBJECT)
        heap = sys.getsizeof(self._heap) + len(self._heap) * _HEAP_ENTRY
        return arrays + slots * (KEY_BYTES + 1) + entries + heap

    def ready_slots(self) -> Iterator[int]:
        """Every findable slot, in no order."""
        return (slot for slot in self._slots.values() if self._state[slot] == _READY)

    def counts(self) -> DirectoryCounts:
        states = self._state
        free = len(self._free)
        filling, ready, gone = states.count(_FILLING), states.count(_READY), states.count(_GONE)
        return DirectoryCounts(free, filling, ready, gone, len(self._private))

    # ------------------------------------------------------------------ restore

    def restore(self, blocks: RestoredBlocks) -> None:
        """Put blocks back into the slots that they had in an earlier life. Only into an empty directory.

        Column by column: a million blocks one by one would take ten seconds of the interpreter. The caller has made
        sure that keys and slots are unique, and that every block's parent is among them (I4).
        """
        if self._slots or not len(blocks.slots):
            return
        slots = blocks.slots
        self._slots = dict(zip(blocks.keys, slots.tolist(), strict=True))
        np.frombuffer(self._keys, dtype=f"V{KEY_BYTES}")[slots] = np.array(blocks.keys, dtype=f"V{KEY_BYTES}")
        np.frombuffer(self._tokens, dtype=self._block)[slots] = blocks.tokens
        np.frombuffer(self._state, dtype=np.uint8)[slots] = _READY
        for target, values in (
            (self._depth, blocks.depths),
            (self._hits, blocks.hits),
            (self.last_used, blocks.last_used),
            (self.checksum, blocks.checksums),
            (self._parent, blocks.parents),
            (self._scope, self._restore_names(blocks.scopes)),
            (self._owner, self._restore_names(blocks.owners)),
            (self._documents, self._restore_names(blocks.documents)),
        ):
            np.frombuffer(target, dtype=target.typecode)[slots] = values
        self.owner_blocks = dict(Counter(blocks.owners))
        for slot, documents in zip(slots.tolist(), blocks.documents, strict=True):
            for document in documents:
                self._by_document.setdefault(document, set()).add(slot)
        self._restore_links(slots, blocks.parents)
        self._restore_order(slots)
        self._free = array("i", (s for s in range(self.num_slots - 1, -1, -1) if self._state[s] == _FREE))

    def _restore_names(self, values: Sequence[Name]) -> list[int]:
        numbers = {value: self.names.add(value, count) for value, count in Counter(values).items()}
        return [numbers[value] for value in values]

    def _restore_links(self, slots: NDArray[np.int64], parents: NDArray[np.int64]) -> None:
        """Siblings, in any order: neighbours in an order by parent are each other's."""
        order = np.argsort(parents, kind="stable")
        order = order[parents[order] >= 0]
        children, above = slots[order], parents[order]
        follows = np.flatnonzero(above[1:] == above[:-1]) if len(above) else np.array([], dtype=np.int64)
        firsts = np.flatnonzero(np.diff(above, prepend=-1)) if len(above) else np.array([], dtype=np.int64)
        np.frombuffer(self._next, dtype="i")[children[follows]] = children[follows + 1]
        np.frombuffer(self._previous, dtype="i")[children[follows + 1]] = children[follows]
        np.frombuffer(self._first_child, dtype="i")[above[firsts]] = children[firsts]

    def _restore_order(self, slots: NDArray[np.int64]) -> None:
        """Least recently used first."""
        last_used = np.frombuffer(self.last_used, dtype="I")
        for slot in slots[np.argsort(last_used[slots], kind="stable")].tolist():
            self._uses += 1
            self._priority[slot] = self._value(slot)
            if self._first_child[slot] < 0:
                self._offer(slot)

    # ------------------------------------------------------------------ check

    def check_integrity(self) -> None:
        """Walk every slot: states, links, I4, owners, documents, and the order of eviction."""
        counts = self.counts()
        in_use = counts.free + counts.filling + counts.ready + counts.gone + counts.private
        if in_use != self.num_slots or len(self._slots) != counts.filling + counts.ready:
            raise InvariantError(f"I1: {counts} of {self.num_slots} slots, {len(self._slots)} keys")
        if len(set(self._free)) != len(self._free) or any(self._state[slot] != _FREE for slot in self._free):
            raise InvariantError("I1: a slot is in the free list twice, or in use as well")
        owned: dict[str, int] = {}
        candidates = {slot for _, ticket, slot in self._heap if self._ticket[slot] == ticket}
        for key, slot in self._slots.items():
            owned[self.owner(slot)] = owned.get(self.owner(slot), 0) + 1
            self._check_slot(key, slot, slot in candidates)
        if owned != self.owner_blocks:
            raise InvariantError("I9: what the owners are charged for is not what they have in the tier")

    def _check_slot(self, key: bytes, slot: int, candidate: bool) -> None:
        parent = self._parent[slot]
        if self.key(slot) != key or self._state[slot] not in (_FILLING, _READY):
            raise InvariantError(f"I8: slot {slot} is not that of its key")
        if (parent >= 0) != (self._depth[slot] > 0):
            raise InvariantError(f"I4: slot {slot} at depth {self._depth[slot]} has parent {parent}")
        above = self._depth[parent] + 1 if parent >= 0 else 0
        if above != self._depth[slot] or (parent >= 0 and self._slots.get(self.key(parent)) != parent):
            raise InvariantError(f"I4: the parent of slot {slot} is not in the tier")
        if parent >= 0 and slot not in self._children(parent):
            raise InvariantError(f"I4: slot {slot} is no child of its parent")
        evictable = self._state[slot] == _READY and self._first_child[slot] < 0 and not self._pins[slot]
        if evictable and not candidate:
            raise InvariantError(f"I4: slot {slot} could go, but does not stand in the order of eviction")
        if candidate and (self._first_child[slot] >= 0 or self._state[slot] != _READY):
            raise InvariantError(f"I4: slot {slot} stands in the order of eviction, but has children")
        if any(slot not in self._by_document.get(document, ()) for document in self.documents(slot)):
            raise InvariantError(f"I8: a document does not know of slot {slot}")

    def _children(self, slot: int) -> Iterator[int]:
        child = self._first_child[slot]
        while child >= 0:
            yield child
            child = self._next[child]
