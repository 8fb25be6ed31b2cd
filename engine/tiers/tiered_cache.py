"""The tiers below the device, as the KV cache manager sees them: host memory, and a disk below that.

                    demote (evicted from the device)
      device ────────────────────────────────────────►  host ─────────►  disk ──journal──► Redis
        │  └───── write_through (hit often, pinned) ──► a slot of transit ──►┘
        │◄──────────── fetch (in the step) ────────────  host ◄── read ── disk      while the request is parked
        └───── swap_out ──► private slots ── swap_in ──►  the same request

Offloads are only noted here; the next step carries them out before anything else (`engine/batch.py`), and `settle`
hears when they have ended. Until then a slot is filling and pinned. No payload passes through this module.

Who comes first: a path is added parents first and removed children first, in each tier by itself (I4, see
`engine/tiers/directory.py`), so demoting a leaf also copies those blocks above it that the tier lacks. What a tier has
of a path is proven by tokens and scopes, once for each path that moves. Where a key is another path's, the block and
those behind it stay out of that tier.

What a request waits for is bounded: reads that do not come within `READ_PATIENCE`, an unreadable block, or a host tier
without room: then the request computes what it could not have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from engine.batch import BlockOffload, SchedulerOutput, TransferReport
from engine.erasure import Selection
from engine.errors import InvariantError
from engine.eviction import Policy
from engine.prefix_index import CachedPath, DocumentRun, tokens_between
from engine.scoped_tokens import ScopedTokens
from engine.tiers.directory import TierDirectory
from engine.tiers.disk_tier import DiskTier
from engine.tiers.erasures import ErasureLog
from engine.tiers.fetch_gate import FetchGate
from engine.tiers.host_slab import HostSlab
from engine.tiers.io_thread import IoDone, IoKind
from engine.tiers.latencies import Latencies

READ_PATIENCE = 10.0  # seconds that a request waits for the disk
_MAX_READ_SHARE = 2  # reads of one path take at most 1/2 of the host tier
_PRELOAD_DEPTH = 8  # blocks that are being read ahead of any request
_MAX_WRITE_SHARE = 4  # slots pinned by writes that wait: at most 1/4


@dataclass(slots=True, frozen=True)
class PartialBlock:
    """The block below in which a prompt parts from another: its first tokens are shared."""

    tier: Literal["host", "disk"]
    slot: int
    key: bytes
    num_tokens: int


@dataclass(slots=True, frozen=True)
class TierMatch:
    """The blocks below that continue a device match: first those in host slots, then those in disk slots.

    `partial` comes after them, and gives more tokens than what the device could have in its place.
    """

    host_slots: list[int] = field(default_factory=list[int])
    disk_slots: list[int] = field(default_factory=list[int])
    goes_on: bool = False  # other prompts went on from where this one ends
    partial: PartialBlock | None = None

    def __len__(self) -> int:
        """Whole blocks."""
        return len(self.host_slots) + len(self.disk_slots)

    @property
    def num_disk_blocks(self) -> int:
        """Blocks that a request has to wait for."""
        return len(self.disk_slots) + (self.partial is not None and self.partial.tier == "disk")

    def partial_tokens(self, tier: str) -> int:
        return self.partial.num_tokens if self.partial is not None and self.partial.tier == tier else 0


NO_MATCH = TierMatch()


@dataclass(slots=True)
class TierCounters:
    """Of the host tier, since the start."""

    bytes_written: int = 0
    bytes_read: int = 0
    num_swapped_out: int = 0  # blocks
    num_swapped_in: int = 0
    num_dropped: int = 0  # blocks that found no room
    reads: Latencies = field(default_factory=Latencies)  # a step's fetches
    writes: Latencies = field(default_factory=Latencies)  # a step's offloads


@dataclass(slots=True)
class _Batch:
    """The transfers of one step."""

    number: int
    offloads: list[BlockOffload]
    pinned: list[int]  # host slots that are fetched from
    private: list[int]  # host slots to give back after
    failed: bool = False


class TieredCache:
    """One thread owns it, like the manager. Payloads move in the runner and in the disk's thread."""

    def __init__(
        self,
        host: HostSlab,
        block_size: int,
        root_key: bytes,
        *,
        policy: Policy = "lru",
        disk: DiskTier | None = None,
        write_through_hits: int = 2,
        erasures: ErasureLog | None = None,
        preload: bool = False,
    ) -> None:
        """`preload`: after a restart, what was used last is brought from disk to host memory before it is asked for.
        `take_preloaded` tells what that is."""
        self.host_slab = host
        self.block_size = block_size
        self.host = TierDirectory(host.num_slots, block_size, root_key, policy)
        self.disk = disk
        self.gate = FetchGate(host.block_bytes)
        self.counters = TierCounters()
        self.write_through_hits = write_through_hits
        self._erasures = erasures
        self._restores = preload and disk is not None  # until what was used last has been brought to host memory
        self._preload: list[int] = []  # disk slots of leaves, the next one last
        self._brought: list[bytes] = []  # keys of those whose turn was, the one used last first
        self._is_preloaded = False  # all are there, and `take_preloaded` has not said so yet
        self._offloads: list[BlockOffload] = []
        self._writes: dict[int, int] = {}  # host slot whose offload is awaited → disk slot to write it to
        self._transit: set[int] = set()  # private host slots on their way to the disk
        self._pinned: list[int] = []  # of the batch that is being put together
        self._private: list[int] = []
        self._batches: deque[_Batch] = deque()
        self._num_batches = 0

    # ------------------------------------------------------------------ find

    def match(self, sequence: ScopedTokens, first: int, keys: list[bytes]) -> TierMatch:
        """The blocks from `first` on that are below; `keys` are theirs. Changes nothing."""
        host = self.host.match(sequence, first, keys)
        disk: list[int] = []
        if self.disk is not None and self.disk.directory is not None and len(host) < len(keys):
            disk = self.disk.directory.match(sequence, first + len(host), keys[len(host) :])
        if disk and self.disk is not None and self.disk.directory is not None:
            return TierMatch(host, disk, self.disk.directory.has_children(disk[-1]))
        return TierMatch(host, disk, bool(host) and self.host.has_children(host[-1]))

    def match_partial(
        self, sequence: ScopedTokens, parent_key: bytes, block: int, limit: int, more_than: int
    ) -> PartialBlock | None:
        """The block under `parent_key` that shares most of the tokens from `block` on, up to `limit`, if with more than
        so many of them. Fetched into a block of the request's own, it is as good as copied on write."""
        first = block * self.block_size
        wanted = tokens_between(sequence, first, min(limit, first + self.block_size))
        found: PartialBlock | None = None
        if child := self.host.closest_child(parent_key, sequence, block, wanted, more_than):
            found = PartialBlock("host", child[0], self.host.key(child[0]), child[1])
            more_than = child[1]
        directory = self.disk.directory if self.disk is not None else None
        if directory is not None and (child := directory.closest_child(parent_key, sequence, block, wanted, more_than)):
            found = PartialBlock("disk", child[0], directory.key(child[0]), child[1])
        return found

    def may_have(self, key: bytes) -> bool:
        """Whether it is worth while to match: a key is here, or it is not."""
        return key in self.host or (self.disk is not None and key in self.disk)

    # ------------------------------------------------------------------ down

    def demote(self, path: CachedPath) -> None:
        """The deepest blocks of a path are about to leave the device."""
        in_host = self.host.find_path(path)
        directory = self.disk.directory if self.disk is not None else None
        on_disk = directory.find_path(path) if directory is not None else None
        if in_host:
            self.host.touch(in_host[-1])
        first = len(in_host) if on_disk is None else min(len(in_host), len(on_disk))
        for block in range(first, len(path)):
            if block == len(in_host) and not self._add_to_host(path, in_host):
                self.counters.num_dropped += 1
                return
            if on_disk is not None and block >= len(on_disk):
                self._demote_to_disk(path, block, in_host[block], on_disk)

    def _demote_to_disk(self, path: CachedPath, block: int, host_slot: int, on_disk: list[int]) -> None:
        assert self.disk is not None
        if block == len(on_disk) and self._may_write():
            self._add_to_disk(path, host_slot, on_disk)
        else:
            self.disk.counters.num_dropped += 1

    def _may_write(self) -> bool:
        assert self.disk is not None
        waiting = self.disk.pending_write_bytes // self.host_slab.block_bytes + len(self._writes)
        return waiting < max(self.host_slab.num_slots // _MAX_WRITE_SHARE, 1)

    def _add_to_host(self, path: CachedPath, in_host: list[int]) -> bool:
        """The path's next block behind those that are there."""
        block = len(in_host)
        slot = self.host.add(path.identity(block), in_host[-1] if in_host else None)
        if slot is None:
            return False
        in_host.append(slot)
        self._offload(path.block_id(block), slot)
        return True

    def _offload(self, block_id: int, slot: int) -> None:
        self._offloads.append(BlockOffload(block_id, slot))
        self.counters.bytes_written += self.host_slab.block_bytes

    def _add_to_disk(self, path: CachedPath, host_slot: int, on_disk: list[int]) -> bool:
        """The path's next block behind those that are there; its payload is, or is going to be, in this host slot."""
        assert self.disk is not None
        disk_slot = self.disk.add(path.identity(len(on_disk)), on_disk[-1] if on_disk else None)
        if disk_slot is None:
            return False
        on_disk.append(disk_slot)
        if host_slot in self._transit or not self.host.is_ready(host_slot):
            self._writes[host_slot] = disk_slot
        else:
            self._write(host_slot, disk_slot)
        return True

    def _write(self, host_slot: int, disk_slot: int) -> None:
        assert self.disk is not None
        if host_slot not in self._transit:
            self.host.pin(host_slot)
        self.disk.write(disk_slot, self.host_slab.slot(host_slot), host_slot)

    def write_through(self, path: CachedPath) -> bool:
        """Make a path safe against the end of this process while it stays on the device.

        False when the rest of it has to wait until what moves now has arrived.
        """
        if self.disk is None or self.disk.directory is None:
            return True
        on_disk = self.disk.directory.find_path(path)
        if len(on_disk) == len(path):
            self.disk.touch(on_disk[-1])
            return True
        in_host = self.host.find_path(path)
        while len(on_disk) < len(path):
            if not self._may_write() or not self._write_through(path, in_host, on_disk):
                return not self.is_busy
        return True

    def _write_through(self, path: CachedPath, in_host: list[int], on_disk: list[int]) -> bool:
        """The path's next block, out of the host slot that has it, or through one of transit."""
        block = len(on_disk)
        if block < len(in_host):
            return self._add_to_disk(path, in_host[block], on_disk)
        transit = self.host.take(path.identity(block).owner)
        if transit is None:
            return False
        self._transit.add(transit)
        if not self._add_to_disk(path, transit, on_disk):
            self._end_transit(transit)
            return False
        self._offload(path.block_id(block), transit)
        return True

    # ------------------------------------------------------------------ up

    def start_reads(self, match: TierMatch, *, used: bool = True) -> bytes | None:
        """Bring a match's disk blocks into the host tier; the key to wait for, None when nothing can come.

        The host tier takes a path from the root on, so what it lacks above them is read, too.
        """
        if not match.num_disk_blocks or self.disk is None or self.disk.directory is None:
            return None
        directory, partial = self.disk.directory, match.partial
        end = partial.slot if partial is not None and partial.tier == "disk" else match.disk_slots[-1]
        slots = directory.slots_to(end)
        in_host = self.host.find_path(directory.path_of(slots))
        first = len(in_host)
        while first and not self.host.is_ready(in_host[first - 1]):
            first -= 1
        last: int | None = None
        for block, slot in enumerate(slots[first : first + self.host_slab.num_slots // _MAX_READ_SHARE], first):
            if block == len(in_host):
                host_slot = self.host.add(directory.identity(slot), in_host[-1] if in_host else None)
                if host_slot is None:
                    break
                in_host.append(host_slot)
                self.disk.read(slot, self.host_slab.slot(host_slot), host_slot)
            last = slot
        if last is None:
            return None
        if used:
            self.disk.touch(last)
        return directory.key(last)

    def is_reading(self, key: bytes) -> bool:
        return self.host.is_filling(key)

    def is_read_cheaper(self, match: TierMatch) -> bool:
        """Whether to read a match's disk blocks instead of computing them."""
        assert self.disk is not None
        tokens = len(match.disk_slots) * self.block_size + match.partial_tokens("disk")
        return self.gate.is_cheaper("disk", match.num_disk_blocks, tokens, self.disk.pending_read_bytes)

    def is_fetch_cheaper(self, blocks: int, tokens: int) -> bool:
        return self.gate.is_cheaper("host", blocks, tokens)

    def pin(self, host_slots: Iterable[int]) -> None:
        for slot in host_slots:
            self.host.pin(slot)

    def unpin(self, host_slots: Iterable[int]) -> None:
        for slot in host_slots:
            self.host.unpin(slot)

    def note_fetch(self, host_slots: list[int]) -> None:
        """These pinned slots are fetched by the step that is being put together: pinned until it has ended."""
        self._note_pinned(host_slots)
        if host_slots:
            self.host.touch(host_slots[-1], hit=True)

    def note_promotion(self, host_slots: list[int]) -> None:
        """These are fetched before anybody asks for them, which is no use of them: pinned as by `note_fetch`."""
        self.pin(host_slots)
        self._note_pinned(host_slots)

    def _note_pinned(self, host_slots: list[int]) -> None:
        self._pinned += host_slots
        self.counters.bytes_read += len(host_slots) * self.host_slab.block_bytes

    # ------------------------------------------------------------------ swap

    def swap_out(self, block_ids: list[int], owner: str) -> list[int] | None:
        """Keep blocks that nobody but their request can use; the slots, None when there is no room for all."""
        slots: list[int] = []
        for _ in block_ids:
            slot = self.host.take(owner)
            if slot is None:
                self.swap_drop(slots)
                return None
            slots.append(slot)
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._offload(block_id, slot)
        self.counters.num_swapped_out += len(slots)
        return slots

    def swap_in(self, slots: list[int]) -> None:
        """They are fetched by the step that is being put together, and given back after it."""
        self._private += slots
        self.counters.num_swapped_in += len(slots)
        self.counters.bytes_read += len(slots) * self.host_slab.block_bytes

    def swap_drop(self, slots: list[int]) -> None:
        """They are not needed any more."""
        for slot in slots:
            if any(offload.host_slot == slot for batch in self._batches for offload in batch.offloads):
                self._batches[-1].private.append(slot)  # still being written: given back after that
            else:
                self._offloads = [offload for offload in self._offloads if offload.host_slot != slot]
                self.host.give(slot)

    # ------------------------------------------------------------------ steps

    @property
    def has_offloads(self) -> bool:
        return bool(self._offloads)

    def begin_step(self, output: SchedulerOutput) -> None:
        """Put what has been noted into a step. Without transfers it is none of our business."""
        output.offloads, self._offloads = self._offloads, []
        if not output.offloads and not output.fetches:
            self._drop_unused()
            return
        self._num_batches += 1
        self._batches.append(_Batch(self._num_batches, output.offloads, self._pinned, self._private))
        self._pinned, self._private = [], []

    def _drop_unused(self) -> None:
        """What was held for a step that has no use for it."""
        self.unpin(self._pinned)
        self.swap_drop(self._private)
        self._pinned, self._private = [], []

    def fail_step(self, output: SchedulerOutput) -> None:
        """This step has failed; nobody knows which of its transfers took place."""
        for batch in self._batches:
            if batch.offloads is output.offloads:
                batch.failed = True

    def settle(self, report: TransferReport) -> None:
        """Transfers have ended: their slots are ready, or free."""
        self.gate.bandwidth["host"].observe(report.fetched_bytes, report.fetch_seconds)
        if report.fetch_seconds:
            self.counters.reads.observe(report.fetch_seconds)
        if report.offload_seconds:
            self.counters.writes.observe(report.offload_seconds)
        while self._batches and self._batches[0].number <= report.num_done:
            batch = self._batches.popleft()
            for offload in batch.offloads:
                self._offloaded(offload.host_slot, failed=batch.failed)
            self.unpin(batch.pinned)
            self.swap_drop(batch.private)

    def _offloaded(self, slot: int, *, failed: bool) -> None:
        """One offload has ended: what was waiting for it goes on, or is called off."""
        disk_slot = self._writes.pop(slot, None)
        alive = not failed and disk_slot is not None
        if slot not in self._transit:
            if self.host.is_private(slot):
                return  # swapped out: its request knows
            ready = self.host.ready(slot)
            if ready and failed:
                self.host.remove(slot)
            alive = alive and ready
        if disk_slot is not None and self.disk is not None:
            if alive and self.disk.is_awaited(disk_slot):
                self._write(slot, disk_slot)
                return
            self.disk.cancel(disk_slot)
        if slot in self._transit:
            self._end_transit(slot)

    def _end_transit(self, slot: int) -> None:
        self._transit.remove(slot)
        self.host.give(slot)

    def poll(self) -> None:
        """What the disk's thread and the journal have done meanwhile."""
        if self.disk is None:
            return
        if self.disk.poll():
            self._resume_erasures()
            if self._restores:
                self._preload = self.disk.leaves_by_last_use()
        for done in self.disk.completed():
            match done.job.kind:
                case IoKind.READ:
                    self._read(done)
                case IoKind.WRITE if done.job.host_slot in self._transit:
                    self._end_transit(done.job.host_slot)
                case IoKind.WRITE:
                    self.host.unpin(done.job.host_slot)
                case IoKind.CLEAR:
                    pass
        self._continue_preload()

    def _continue_preload(self) -> None:
        """A few blocks at a time, so that a request that needs the disk does not wait behind them."""
        assert self.disk is not None
        is_idle = self.disk.directory is not None and not self._preload and not self.disk.pending_read_bytes
        if is_idle and self._restores:
            self._restores, self._is_preloaded = False, True
        while self._preload and self.disk is not None and self.disk.directory is not None:
            if self.disk.pending_read_bytes >= _PRELOAD_DEPTH * self.host_slab.block_bytes:
                return
            if self.host.num_free <= self.host_slab.num_slots // _MAX_READ_SHARE:
                self._preload.clear()
                return
            leaf = self._preload.pop()
            if self.disk.directory.is_ready(leaf):
                self.start_reads(TierMatch(disk_slots=[leaf]), used=False)  # that nobody asked for is no use of it
                self._brought.append(self.disk.directory.key(leaf))

    def take_preloaded(self) -> list[int]:
        """Once all are there, and only once: the ends of the paths that an earlier life left, as host slots, the one
        used last first."""
        if not self._is_preloaded:
            return []
        keys, self._brought, self._is_preloaded = self._brought, [], False
        leaves = [slot for key in keys if (slot := self.host.find(key)) is not None]
        for slot in reversed(leaves):  # read in the reverse of the order in which they are to go
            self.host.touch(slot)
        return leaves

    def _read(self, done: IoDone) -> None:
        slot = done.job.host_slot
        if done.error is None:
            self.gate.bandwidth["disk"].observe(len(done.job.memory), done.seconds)
            self.host.ready(slot)
        elif self.host.ready(slot):
            self.host.remove(slot)

    @property
    def is_restoring(self) -> bool:
        """Whether what an earlier life left is still coming back: a request now may find less, and wait longer."""
        if self._is_preloaded:
            return True
        return self._restores and self.disk is not None and (self.disk.directory is not None or self.disk.is_loading)

    @property
    def is_busy(self) -> bool:
        """Whether something moves, or waits for a step to carry it out."""
        return bool(self._offloads or self._batches) or (self.disk is not None and self.disk.is_busy)

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
        self.host_slab.close()

    def wait(self, seconds: float) -> None:
        if self.disk is not None:
            self.disk.wait(seconds)

    # ------------------------------------------------------------------ erase

    def erase(self, selection: Selection) -> tuple[int, int]:
        """(host, disk) blocks taken out. What a disk tier holds is only known when its index has been read."""
        if self._erasures is not None:
            self._erasures.add(selection)
        removed = self.host.erase(selection)
        for slot in removed:
            if self.host.is_free(slot):
                self.host_slab.clear(slot)
        num_disk = self.disk.erase(selection) if self.disk is not None and self.can_erase else 0
        return len(removed), num_disk

    def _resume_erasures(self) -> None:
        """The index of the earlier life has been read: what was erased since, or then, goes from it, too."""
        assert self.disk is not None
        for selection in self._erasures.pending if self._erasures is not None else []:
            self.disk.erase(selection)

    def finish_erasures(self) -> None:
        """Forget those that are done everywhere: payloads overwritten, and Redis told."""
        if self._erasures is None or not self._erasures.pending:
            return
        if self.disk is None or (self.can_erase and not self.disk.is_busy and self.disk.is_index_written):
            self._erasures.finish()

    @property
    def has_pending_erasures(self) -> bool:
        return self._erasures is not None and bool(self._erasures.pending)

    @property
    def can_erase(self) -> bool:
        return self.disk is None or self.disk.directory is not None

    def distrust(self) -> None:
        """Our bookkeeping was found wrong, so what it has written is not trusted: everything below goes, too."""
        offloads, self._offloads = self._offloads, []
        for offload in offloads:
            self._offloaded(offload.host_slot, failed=True)
        for batch in self._batches:
            batch.failed = True
        self._drop_unused()
        self.host.erase(Selection())
        if self.disk is not None and self.disk.directory is not None:
            self.disk.erase(Selection())

    def evict(self, tier: str, count: int) -> int:
        """Let go of up to `count` blocks of a tier in the order of eviction; how many went."""
        if tier == "disk":
            return 0 if self.disk is None else self.disk.evict(count)
        return self.host.evict(count, "operator")

    # ------------------------------------------------------------------ look

    def document_runs(self, selection: Selection) -> dict[str, Iterator[DocumentRun]]:
        """Where the selected documents stand, by tier."""
        runs = {"host": self.host.document_runs(selection)}
        if self.disk is not None and self.disk.directory is not None:
            runs["disk"] = self.disk.directory.document_runs(selection)
        return runs

    def check_integrity(self) -> None:
        self.host.check_integrity()
        if self.disk is not None and self.disk.directory is not None:
            self.disk.directory.check_integrity()
        if any(not self.host.is_private(slot) for slot in self._transit):
            raise InvariantError("I8: a slot of transit is in the tree as well")
