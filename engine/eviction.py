"""Which cached blocks go first, and at whose cost.

Candidates are the *evictable leaves* of the prefix tree: nodes without locks and without children (I4). Each is in
one heap of all and in one of its owner, ordered by the policy's priority; a leaf that is locked, or grows a child,
just loses its ticket, and its entries are dropped when they come up.

    somebody needs blocks
      1. an owner above its quota gives first, the one that asks before the others
      2. then whoever has the lowest priority, passing over owners at or below their floor (their leaves go on a
         shelf, and come back when the owner has grown above it): also the one that asks, or it would give its own
         oldest for its newest and never come up to its floor, while others have more than theirs
      3. only the shelves are left, everyone is at or below the floor: then the asker's own, then the lowest priority
         after all. This is for requests that cannot wait: others find no room in the floors of others
         (`num_reserved_from`) and wait for each other's end.

    What a queued request is going to need (`num_wanted`) is passed over in step 2 like a floor, and comes back when
    that request has been admitted or is gone.

Priorities:  lru    the moment it was last let go
             gdsf   clock + uses · cost · weight: greedy-dual-size-frequency. All blocks have one size; cost is a
                    block's share in recomputing, which grows with its depth, because attention does; the weight is its
                    owner's. The clock is the priority that was evicted last, so that what was popular once grows old.
                    Uses are remembered for a while after a block has gone (the index's ghosts): what comes again and
                    again is not new each time.

Rejected: one list in order of use (O(1), but it knows neither quotas nor frequencies), and a scan for the oldest leaf.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from engine.protocol import EvictionLine, OwnerUse

Policy = Literal["lru", "gdsf"]

_NO_QUOTA = 1 << 62
_SLACK = 64  # entries without a ticket that are not worth cleaning up
_MAX_LEDGER = 4096  # pairs of owners; what goes beyond is counted under "other"
_DEPTH_OF_DOUBLE_COST = 512  # blocks; at 8k tokens attention costs about as much as the linear layers of a small model


def recompute_cost(depth: int) -> float:
    """Of a block at that depth, in blocks at the head of a prompt."""
    return 1.0 + depth / _DEPTH_OF_DOUBLE_COST


class Leaf(Protocol):
    """What the order needs to know of a node."""

    owner: Owner
    ticket: int  # 0: not a candidate
    priority: float
    num_wanted: int  # queued requests that are going to need it

    @property
    def num_blocks(self) -> int: ...


class Owner:
    """Somebody whose blocks are counted: a tenant, a cache group, or the public."""

    __slots__ = (
        "floor",
        "heap",
        "name",
        "num_blocks",
        "num_held",
        "num_leaves",
        "protected",
        "quota",
        "shelf",
        "weight",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_blocks = 0  # in the index
        self.num_held = 0  # of these, by requests
        self.num_leaves = 0  # evictable ones
        self.floor = 0  # blocks that others may not take while they have more than theirs
        self.protected = 0  # blocks of its floor that nobody holds
        self.quota = _NO_QUOTA  # blocks above which its own go first
        self.weight = 1.0  # of a use of its blocks, under gdsf
        self.heap: list[_Entry] = []
        self.shelf: list[_Entry] = []

    @property
    def quota_blocks(self) -> int | None:
        return None if self.quota == _NO_QUOTA else self.quota

    @property
    def excess(self) -> int:
        """Blocks above the quota."""
        return self.num_blocks - self.quota


class _Entry(NamedTuple):
    priority: float
    ticket: int  # unique, so that leaves are never compared
    leaf: Leaf


class Eviction(NamedTuple):
    """A line of the ledger: whose blocks went, and by whose pressure."""

    owner: str
    pressed_by: str


class EvictionLedger(Counter[Eviction]):
    """Blocks that went from one tier, by whose they were and by whose pressure. Bounded in its lines."""

    def note(self, owner: str, pressed_by: str, blocks: int) -> None:
        line = Eviction(owner, pressed_by)
        if line not in self and len(self) >= _MAX_LEDGER:
            line = Eviction("other", "other")
        self[line] += blocks

    def lines(self, tier: str) -> tuple[EvictionLine, ...]:
        return tuple(
            EvictionLine(owner=line.owner, pressed_by=line.pressed_by, num_blocks=blocks, tier=tier)
            for line, blocks in self.items()
        )


class EvictionOrder:
    """The evictable leaves, their owners, and the ledger of what went."""

    def __init__(self, policy: Policy) -> None:
        self.policy: Policy = policy
        self.owners: dict[str, Owner] = {}
        self.ledger = EvictionLedger()
        self._heap: list[_Entry] = []
        self._num_leaves = 0
        self._tickets = 0
        self._uses = 0
        self._clock = 0.0  # gdsf: the priority that went last
        self._over_quota: dict[str, Owner] = {}
        self._num_protected = 0  # of all owners

    def owner(self, name: str) -> Owner:
        found = self.owners.get(name)
        if found is None:
            found = self.owners[name] = Owner(name)
        return found

    def set_limits(self, name: str, floor: int, quota: int | None, weight: float = 1.0) -> None:
        """In blocks; a quota of None is none. The weight holds from the next use of a block."""
        owner = self.owner(name)
        owner.floor, owner.quota, owner.weight = floor, _NO_QUOTA if quota is None else quota, weight
        self._after_change(owner)

    def count(self, owner: Owner, blocks: int) -> None:
        """The owner has so many blocks more (or fewer) in the index."""
        owner.num_blocks += blocks
        self._after_change(owner)

    def hold(self, owner: Owner, blocks: int) -> None:
        """So many of the owner's blocks more (or fewer) are held by requests."""
        owner.num_held += blocks
        self._after_change(owner)

    def _after_change(self, owner: Owner) -> None:
        protected = max(0, min(owner.floor, owner.num_blocks) - owner.num_held)
        self._num_protected += protected - owner.protected
        owner.protected = protected
        if owner.excess > 0:
            self._over_quota[owner.name] = owner
        else:
            self._over_quota.pop(owner.name, None)
        if owner.shelf and owner.num_blocks > owner.floor:
            for entry in owner.shelf:
                heapq.heappush(self._heap, entry)
            owner.shelf = []

    # ------------------------------------------------------------------ candidates

    @property
    def counts_uses(self) -> bool:
        return self.policy == "gdsf"

    def use_priority(self, owner: Owner, uses: int, depth: int) -> float:
        """The priority of a node that is let go now; called from a leaf upwards, so a parent's is higher."""
        self._uses += 1
        if self.policy == "lru":
            return float(self._uses)
        return self._clock + owner.weight * uses * recompute_cost(depth)

    def add(self, leaf: Leaf) -> None:
        """Has become evictable; its `priority` is set."""
        self._tickets += 1
        leaf.ticket = self._tickets
        entry = _Entry(leaf.priority, self._tickets, leaf)
        self._num_leaves += 1
        heapq.heappush(self._heap, entry)
        owner = leaf.owner
        owner.num_leaves += 1
        heapq.heappush(owner.heap, entry)
        # Entries without a ticket pin nodes that are gone. Each heap is cleaned when most of it is such entries, so
        # at most once for as many additions as it costs.
        if len(self._heap) > 2 * self._num_leaves + _SLACK:
            self._heap = _valid(self._heap)
        if len(owner.heap) + len(owner.shelf) > 4 * owner.num_leaves + _SLACK:
            owner.heap, owner.shelf = _valid(owner.heap), _valid(owner.shelf)

    def discard(self, leaf: Leaf) -> None:
        """Is evictable no longer."""
        if leaf.ticket:
            leaf.ticket = 0
            self._num_leaves -= 1
            leaf.owner.num_leaves -= 1

    def release(self, leaf: Leaf) -> None:
        """Nobody in the queue wants it any longer: back among the victims, where it stood."""
        if leaf.ticket:
            self.discard(leaf)
            self.add(leaf)

    def candidates(self) -> Iterator[Leaf]:
        """Every evictable leaf once, in no order."""
        for owner in self.owners.values():
            yield from (entry.leaf for entry in owner.heap if entry.leaf.ticket == entry.ticket)

    # ------------------------------------------------------------------ choice

    def next_victim(self, pressed_by: str) -> tuple[Leaf, int] | None:
        """The leaf to take blocks from and how many at most (a quota is not undercut); None when there is none."""
        asking = self._over_quota.get(pressed_by)
        for owner in ([asking] if asking else []) + [o for o in self._over_quota.values() if o is not asking]:
            if entry := _first_valid(owner.heap):
                return entry.leaf, min(owner.excess, entry.leaf.num_blocks)
        return self._by_priority(pressed_by) or self._from_the_shelves()

    def num_reserved_from(self, name: str) -> int:
        """Blocks that nobody holds and an owner may not have all the same: of the floors of others."""
        owner = self.owners.get(name)
        return self._num_protected - (owner.protected if owner is not None else 0)

    def over_quota(self) -> list[str]:
        """Owners that have more than their quota: what is in use cannot go."""
        return list(self._over_quota)

    def own_victim(self, owner: Owner) -> Leaf | None:
        """The owner's lowest leaf."""
        entry = _first_valid(owner.heap)
        return entry.leaf if entry else None

    def _by_priority(self, pressed_by: str) -> tuple[Leaf, int] | None:
        while entry := _first_valid(self._heap):
            owner = entry.leaf.owner
            if entry.leaf.num_wanted:
                heapq.heappop(self._heap)  # `release` puts it back; till then only its owner's heap has it
                continue
            if owner.num_blocks > owner.floor:
                return entry.leaf, min(entry.leaf.num_blocks, owner.num_blocks - owner.floor)
            owner.shelf.append(heapq.heappop(self._heap))
        own = self.owners.get(pressed_by)
        entry = _first_valid(own.heap) if own else None
        return (entry.leaf, entry.leaf.num_blocks) if entry else None

    def _from_the_shelves(self) -> tuple[Leaf, int] | None:
        tops = [entry for owner in self.owners.values() if (entry := _first_valid(owner.heap))]
        if not tops:
            return None
        leaf = min(tops).leaf
        return leaf, leaf.num_blocks

    def uses(self) -> tuple[OwnerUse, ...]:
        """What every owner has, for reports."""
        return tuple(
            OwnerUse(
                owner=owner.name,
                num_blocks=owner.num_blocks,
                floor_blocks=owner.floor,
                quota_blocks=None if owner.quota == _NO_QUOTA else owner.quota,
            )
            for owner in self.owners.values()
        )

    def gone(self, leaf: Leaf, blocks: int, pressed_by: str) -> None:
        """So many blocks of a victim have gone."""
        self.ledger.note(leaf.owner.name, pressed_by, blocks)
        self._clock = max(self._clock, leaf.priority) if self.policy == "gdsf" else self._clock
        self.count(leaf.owner, -blocks)


def _valid(heap: list[_Entry]) -> list[_Entry]:
    """A heap of the entries that still hold."""
    entries = [entry for entry in heap if entry.leaf.ticket == entry.ticket]
    heapq.heapify(entries)
    return entries


def _first_valid(heap: list[_Entry]) -> _Entry | None:
    while heap and heap[0].leaf.ticket != heap[0].ticket:
        heapq.heappop(heap)
    return heap[0] if heap else None
