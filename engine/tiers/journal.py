"""Keeps the index in Redis up to date, behind the engine's back, and reads it at the start.

    engine thread                         journal thread
      put(slot, record) ──► pending ──►   take a batch ──► publish.lua ──► Redis
      name(digest, …)       (by slot: the     │ away: put back under what came meanwhile, try again later
                             last holds)      │ "gone": everything has to be written again (resync)
      poll: loaded, resync ◄─────────────     │ "stale": another incarnation has taken over; writes end

Payload first, entry after: `put` is called for what is on disk. A crash in between leaves a slot without an entry, or
an entry whose payload fails its checksum; never a wrong hit. Entries are keyed by slot, so writing one twice, late or
after a newer one of another slot is harmless, and `pending` cannot hold more than one record a slot. Past `max_pending`
it is dropped and marked for a resync: the engine then hands everything in anew.

Redis is never waited for by the engine: `put` takes a lock that this thread holds only to swap a dictionary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

from engine.tiers.directory import TierDirectory
from engine.tiers.index_loader import LoadedIndex, load_index
from engine.tiers.index_store import IndexStore
from engine.tiers.journal_state import JournalState, JournalStats

logger = logging.getLogger(__name__)

BATCH = 2_048  # records
MAX_PENDING = 65_536  # records
RETRY_SECONDS = (0.05, 2.0)  # first, and at most


class Journal:
    """Every method belongs to the engine's thread."""

    def __init__(
        self,
        store: IndexStore,
        incarnation: str,
        new_directory: Callable[[], TierDirectory],
        *,
        oldest: int = 0,
        max_pending: int = MAX_PENDING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`new_directory` makes the empty one that the index is read into; `oldest` as in `load_index`."""
        self._store = store
        self._incarnation = incarnation
        self._new_directory = new_directory
        self._oldest = oldest
        self._max_pending = max_pending
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._records: dict[int, bytes] = {}
        self._names: dict[bytes, bytes] = {}
        self._oldest_pending: float | None = None
        self._loaded: LoadedIndex | None = None
        self._resync_wanted = False  # the engine has to hand everything in again
        self._wipe = False  # before that, what Redis has is dropped
        self._in_flight = 0
        self._state = JournalState.LOADING
        self._num_published = self._num_failures = self._num_resyncs = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="index-journal", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the engine's side

    def put(self, slot: int, record: bytes) -> None:
        """This slot's record from now on; a blank one when there is none."""
        with self._lock:
            if len(self._records) >= self._max_pending and slot not in self._records:
                self._overflow()
                return
            self._records[slot] = record
            if self._oldest_pending is None:
                self._oldest_pending = self._clock()
        self._wake.set()

    @property
    def room(self) -> int:
        """Records that a resync may hand in now: half of the bound is left to what happens meanwhile."""
        with self._lock:
            return max(self._max_pending // 2 - len(self._records), 0)

    def name(self, digest: bytes, packed: bytes) -> None:
        """A name that records refer to; an empty one goes."""
        with self._lock:
            self._names[digest] = packed

    def _overflow(self) -> None:
        self._records.clear()
        self._names.clear()
        self._oldest_pending = None
        self._resync_wanted = self._wipe = True

    def take_loaded(self) -> LoadedIndex | None:
        """The index of the earlier life, once."""
        loaded, self._loaded = self._loaded, None
        return loaded

    def take_resync(self) -> bool:
        """Whether everything has to be handed in again; asked once for each time."""
        with self._lock:
            wanted, self._resync_wanted = self._resync_wanted, False
        self._num_resyncs += wanted
        return wanted

    def stats(self) -> JournalStats:
        with self._lock:
            lag = 0.0 if self._oldest_pending is None else self._clock() - self._oldest_pending
            pending = len(self._records) + self._in_flight
        return JournalStats(self._state, pending, lag, self._num_published, self._num_failures, self._num_resyncs)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written; False when it was not within that time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.stats().num_pending and self._state is JournalState.OK:
                return True
            time.sleep(0.002)
        return False

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits, if the store lets it within that time, and end the thread."""
        if self._state is JournalState.OK:
            self.flush(seconds)
        self.kill()

    def kill(self) -> None:
        """End the thread; what waits is lost, as if the process had ended."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._store.close()
        self._state = JournalState.CLOSED

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        pause = RETRY_SECONDS[0]
        while not self._stopping:
            try:
                self._work()
                pause = RETRY_SECONDS[0]
            except (redis.RedisError, OSError) as error:
                self._num_failures += 1
                if self._state is JournalState.OK:
                    self._state = JournalState.AWAY
                    logger.warning("the index in Redis cannot be written: %s", error)
                self._wait(pause)
                pause = min(pause * 2, RETRY_SECONDS[1])

    def _work(self) -> None:
        if self._state is JournalState.LOADING:
            self._load()
            return
        if self._wipe:
            self._store.claim(self._incarnation, wipe=True)
            with self._lock:
                self._wipe = False
        if not self._publish():
            self._wake.wait(0.5)
            self._wake.clear()

    def _load(self) -> None:
        directory = self._new_directory()
        if self._store.claim(self._incarnation, wipe=False):
            self._loaded = load_index(
                self._store, directory, self._oldest, lambda count: logger.info("index: %d entries read", count)
            )
        else:
            self._loaded = LoadedIndex(directory, 0, [])
        self._state = JournalState.OK

    def _publish(self) -> bool:
        """Send one batch; False when there was none."""
        names, records = self._take()
        if not records and not names:
            if self._state is JournalState.AWAY:
                self._publish_to_store({}, {})
            return False
        try:
            self._publish_to_store(names, records)
        except (redis.RedisError, OSError):
            self._put_back(names, records)
            raise
        finally:
            self._in_flight = 0
        return True

    def _publish_to_store(self, names: dict[bytes, bytes], records: dict[int, bytes]) -> None:
        answer = self._store.publish(self._incarnation, names, records)
        if answer == "ok":
            self._num_published += len(records)
            self._state = JournalState.OK
        elif answer == "gone":
            logger.warning("the index in Redis is gone; it is written again")
            self._store.claim(self._incarnation, wipe=True)
            with self._lock:
                self._resync_wanted = True
            self._state = JournalState.OK
        else:
            logger.error("another engine has taken this slab's index over; it is no longer written here")
            self._state = JournalState.STALE
            self._stopping = True

    def _take(self) -> tuple[dict[bytes, bytes], dict[int, bytes]]:
        with self._lock:
            names, self._names = self._names, {}
            if len(self._records) <= BATCH:
                records, self._records = self._records, {}
                self._oldest_pending = None
            else:
                records = {slot: self._records.pop(slot) for slot in list(self._records)[:BATCH]}
            self._in_flight = len(records)
        return names, records

    def _put_back(self, names: dict[bytes, bytes], records: dict[int, bytes]) -> None:
        with self._lock:
            self._names = {**names, **self._names}
            self._records = {**records, **self._records}
            if self._oldest_pending is None:
                self._oldest_pending = self._clock()
            if len(self._records) > self._max_pending:
                self._overflow()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < deadline:
            time.sleep(min(0.05, seconds))
