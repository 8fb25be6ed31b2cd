"""The disk tier: a directory, its slab's file, the thread that moves payloads, and the journal of its index.

    write  add (pinned, filling) ──IoThread──► ready ──journal──► Redis         payload first, entry after
    read   pin ──IoThread: read, checksum──► the host slot is ready             or a counted miss: the block and all
                                                                                below it are dropped, here and in Redis

Until the journal has read the index of the earlier life there is no directory: nothing is found and nothing is written,
because a slot that looks free may hold a block. That may take as long as Redis is away; requests do not notice.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.erasure import Selection
from engine.errors import InvariantError
from engine.prefix_index import BlockIdentity
from engine.tiers.directory import TierDirectory
from engine.tiers.disk_slab import DiskSlab
from engine.tiers.index_record import RecordFormat, names_of
from engine.tiers.io_thread import IoDone, IoJob, IoKind, IoThread
from engine.tiers.journal_state import JournalState, JournalStats
from engine.tiers.latencies import Latencies
from engine.tiers.names import Name
from engine.tiers.slab import SlabReadError

if TYPE_CHECKING:  # it brings a store's client, which an engine without a disk tier does without
    from engine.tiers.journal import Journal

logger = logging.getLogger(__name__)

RESYNC_CHUNK = 1_024  # records handed to the journal between two steps
_STALE_NAMES = 1_024  # beyond as many as are in use, names in Redis are cleaned up
_NOTHING = memoryview(b"")


@dataclass(slots=True)
class DiskCounters:
    """Since the start."""

    bytes_written: int = 0
    bytes_read: int = 0
    num_write_errors: int = 0
    num_read_errors: int = 0
    num_damaged: int = 0  # of the read errors: what lay there was not what was promised
    num_dropped: int = 0  # blocks that found no room, or no place in the queue of writes
    num_restored: int = 0
    num_rejected: int = 0  # index entries of the earlier life that led nowhere
    reads: Latencies = field(default_factory=Latencies)  # a block
    writes: Latencies = field(default_factory=Latencies)


class DiskTier:
    """Every method belongs to the engine's thread, and none of them waits for the disk or for Redis."""

    def __init__(self, slab: DiskSlab, block_size: int, journal: Journal, io: IoThread) -> None:
        self.slab = slab
        self.counters = DiskCounters()
        self.directory: TierDirectory | None = None  # None: the earlier life's index is not read yet
        self._format = RecordFormat(block_size)
        self._journal = journal
        self._io = io
        self._resync: list[int] = []
        self._names: dict[bytes, Name] = {}  # that Redis has, as far as we know

    def __contains__(self, key: bytes) -> bool:
        return self.directory is not None and key in self.directory

    @property
    def pending_read_bytes(self) -> int:
        return self._io.pending_read_bytes

    @property
    def pending_write_bytes(self) -> int:
        return self._io.pending_write_bytes

    @property
    def is_busy(self) -> bool:
        return bool(self._io.num_pending or self._resync)

    # ------------------------------------------------------------------ payloads

    def add(self, block: BlockIdentity, parent: int | None) -> int | None:
        """A slot for a block whose payload is going to be written, behind `parent`; None when it cannot be had."""
        assert self.directory is not None
        slot = self.directory.add(block, parent)
        self.counters.num_dropped += slot is None
        self._forget_removed()
        return slot

    def write(self, slot: int, payload: memoryview, host_slot: int) -> None:
        """Begin to write what `add` has made room for."""
        assert self.directory is not None
        self._io.submit(IoJob(IoKind.WRITE, slot, self.directory.key(slot), payload, host_slot))

    def is_awaited(self, slot: int) -> bool:
        """Whether a payload is still expected in a slot that `add` has given out."""
        return self.directory is not None and self.directory.is_awaited(slot)

    def cancel(self, slot: int) -> None:
        """What `add` has made room for will not come; nor will what hangs below it."""
        assert self.directory is not None
        if self.directory.ready(slot):
            self.directory.remove(slot)
        self._forget_removed()

    def read(self, slot: int, into: memoryview, host_slot: int) -> None:
        """Begin to read a ready slot; it is pinned until then."""
        assert self.directory is not None
        self.directory.pin(slot)
        job = IoJob(IoKind.READ, slot, self.directory.key(slot), into, host_slot, self.directory.checksum[slot])
        self._io.submit(job)

    def completed(self) -> list[IoDone]:
        """Reads and writes that have ended; their effects on this tier have taken place."""
        done = self._io.completed()
        for one in done:
            match one.job.kind:
                case IoKind.WRITE:
                    self._written(one)
                case IoKind.READ:
                    self._read(one)
                case IoKind.CLEAR:
                    self.counters.num_write_errors += one.error is not None
        self._forget_removed()
        return done

    def _written(self, done: IoDone) -> None:
        assert self.directory is not None
        slot = done.job.slot
        if done.error is not None:
            self.counters.num_write_errors += 1
            logger.warning("disk tier: a block could not be written: %s", done.error)
            self.cancel(slot)
            return
        self.counters.bytes_written += len(done.job.memory)
        self.counters.writes.observe(done.seconds)
        self.directory.last_used[slot] = int(time.time())
        if self.directory.ready(slot, done.checksum):
            self._publish(slot)

    def _read(self, done: IoDone) -> None:
        assert self.directory is not None
        slot = done.job.slot
        if done.error is None:
            self.counters.bytes_read += len(done.job.memory)
            self.counters.reads.observe(done.seconds)
        else:
            self.counters.num_read_errors += 1
            self.counters.num_damaged += isinstance(done.error, SlabReadError)
            logger.warning("disk tier: a block could not be read, and is dropped: %s", done.error)
            if self.directory.find(done.job.key) == slot:
                self.directory.remove(slot)
        self.directory.unpin(slot)

    def touch(self, slot: int) -> None:
        """The path that ends in this slot has been used."""
        assert self.directory is not None
        self.directory.touch(slot, int(time.time()), hit=True)
        if self.directory.is_ready(slot):
            self._publish(slot)

    def erase(self, selection: Selection) -> int:
        """Take blocks out of the index at once; their payloads are overwritten behind."""
        if self.directory is None:
            raise InvariantError("I8: an erasure before the index was read")
        removed = self.directory.erase(selection)
        for slot in removed:
            # In the thread's order this comes after a write that is under way, and before one of a later owner.
            self._io.submit(IoJob(IoKind.CLEAR, slot, b"", _NOTHING, 0))
        self._forget_removed()
        return len(removed)

    def evict(self, count: int) -> int:
        """Let go of up to `count` blocks in the order of eviction."""
        gone = 0 if self.directory is None else self.directory.evict(count, "operator")
        self._forget_removed()
        return gone

    # ------------------------------------------------------------------ verification

    def verify_payloads(self) -> tuple[int, int]:
        """Read every ready block: (read, unreadable). The latter are dropped, with what hangs below them."""
        if self.directory is None:
            return 0, 0
        slots = list(self.directory.ready_slots())
        unreadable = [slot for slot in slots if self.directory.is_ready(slot) and self.payload(slot) is None]
        for slot in unreadable:
            if self.directory.is_ready(slot):
                self.directory.remove(slot)
        self.counters.num_read_errors += len(unreadable)
        self._forget_removed()
        return len(slots), len(unreadable)

    def payload(self, slot: int) -> memoryview | None:
        """What lies in a ready slot; None when it cannot be read, or is not its block. Waits for the disk."""
        assert self.directory is not None
        into = memoryview(bytearray(self.slab.block_bytes))
        try:
            self.slab.read(slot, into, self.directory.key(slot), self.directory.checksum[slot])
        except OSError:
            return None
        return into

    def tokens(self, slot: int) -> bytes:
        assert self.directory is not None
        return self.directory.tokens(slot)

    def sample_paths(self, count: int) -> list[list[int]]:
        """Whole paths of ready slots, first block first, drawn at random."""
        directory = self.directory
        if directory is None:
            return []
        leaves = [slot for slot in directory.ready_slots() if not directory.has_children(slot)]
        return [directory.slots_to(leaf) for leaf in random.sample(leaves, min(count, len(leaves)))]

    def leaves_by_last_use(self) -> list[int]:
        """The ends of all paths, the one used last at the end."""
        directory = self.directory
        if directory is None:
            return []
        leaves = (slot for slot in directory.ready_slots() if not directory.has_children(slot))
        return sorted(leaves, key=lambda slot: directory.last_used[slot])

    # ------------------------------------------------------------------ index

    def poll(self) -> bool:
        """Take over the loaded index, and hand a resync's next records in; True when the index has just arrived."""
        arrived = False
        if self.directory is None and (loaded := self._journal.take_loaded()) is not None:
            self.directory = loaded.directory
            self.counters.num_restored = len(loaded.directory)
            self.counters.num_rejected = len(loaded.rejected)
            self._note_names(loaded.directory)
            for slot in loaded.rejected:
                if not loaded.directory.is_ready(slot):
                    self._journal.put(slot, self._format.blank)
            arrived = True
        if self.directory is not None and self._journal.take_resync():
            self._names.clear()
            self._resync = sorted(self.directory.ready_slots(), reverse=True)
        self._continue_resync()
        return arrived

    def _note_names(self, directory: TierDirectory) -> None:
        for slot in directory.ready_slots():
            for number in directory.name_ids(slot)[1:]:
                self._names[directory.names.digest(number)] = directory.names[number]

    def _continue_resync(self) -> None:
        if not self._resync or self.directory is None:
            return
        for _ in range(min(RESYNC_CHUNK, self._journal.room, len(self._resync))):
            slot = self._resync.pop()
            if self.directory.is_ready(slot):
                self._publish(slot)

    def _publish(self, slot: int) -> None:
        assert self.directory is not None
        for digest, name, packed in names_of(self.directory, slot):
            if digest not in self._names:
                self._names[digest] = name
                self._journal.name(digest, packed)
        self._journal.put(slot, self._format.pack(self.directory, slot))
        if len(self._names) > 2 * len(self.directory.names) + _STALE_NAMES:
            self._drop_stale_names()

    def _drop_stale_names(self) -> None:
        assert self.directory is not None
        stale = [digest for digest, name in self._names.items() if name not in self.directory.names]
        for digest in stale:
            del self._names[digest]
            self._journal.name(digest, b"")

    def _forget_removed(self) -> None:
        if self.directory is None:
            return
        for slot in self.directory.take_removed():
            if not self.directory.is_ready(slot):
                self._journal.put(slot, self._format.blank)

    # ------------------------------------------------------------------ life

    @property
    def is_index_written(self) -> bool:
        """Whether Redis has everything."""
        stats = self._journal.stats()
        return stats.state is JournalState.OK and not stats.num_pending

    @property
    def is_loading(self) -> bool:
        """Whether the index of an earlier life is being read; not while Redis is away, which may be for long."""
        return self.directory is None and not self._journal.stats().num_failures

    def journal_stats(self) -> JournalStats:
        return self._journal.stats()

    def wait(self, seconds: float) -> None:
        """Until a read or write has ended, but not longer."""
        self._io.wait(seconds)

    def close(self) -> None:
        self._io.stop()
        self._journal.close()
        self.slab.close()
