"""The fake device over real tiers: host memory, a slab file, and optionally a real store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine.eviction import Policy
from engine.tiers.directory import TierDirectory
from engine.tiers.disk_slab import DiskSlab, slab_path
from engine.tiers.disk_tier import DiskTier
from engine.tiers.erasures import ErasureLog
from engine.tiers.fetch_gate import FetchGate
from engine.tiers.host_slab import HostSlab
from engine.tiers.index_store import IndexStore, SlabLayout
from engine.tiers.io_thread import IoThread
from engine.tiers.journal import Journal
from engine.tiers.tiered_cache import TieredCache
from tests.engine.fake_runner import SLOT
from tests.engine.harness import Harness

ROOT_KEY = bytes.fromhex("00" * 16)
FINGERPRINT = "00" * 16


@dataclass
class TieredOptions:
    """A small engine with small tiers."""

    num_blocks: int = 8
    block_size: int = 4
    host_slots: int = 16
    disk_slots: int = 64
    write_through_hits: int = 2
    token_budget: int = 32
    chunk: int = 16
    max_num_seqs: int = 8
    policy: Policy = "lru"
    incarnation: str = "one"
    max_pending: int = 65_536
    fingerprint: str = FINGERPRINT
    preload: bool = False
    runs_ahead: bool = False


def host_only(num_slots: int, block_size: int = 4, policy: Policy = "lru") -> TieredCache:
    tiers = TieredCache(HostSlab(num_slots, block_size * SLOT.size), block_size, ROOT_KEY, policy=policy)
    tiers.gate = EagerGate(block_size * SLOT.size)
    return tiers


class EagerGate(FetchGate):
    """The fake device computes faster than any disk reads: here the choice is not left to the machine's speed."""

    def is_cheaper(self, tier: str, blocks: int, tokens: int, queued_bytes: int = 0) -> bool:
        return True


class TiersWithDisk:
    """Of one life of an engine: host memory, and a disk over a data directory and a store."""

    def __init__(
        self,
        data_dir: Path,
        store_url: str,
        options: TieredOptions | None = None,
        *,
        make_slab: Callable[..., DiskSlab] = DiskSlab,
    ) -> None:
        self.options = options = options or TieredOptions()
        block_bytes = options.block_size * SLOT.size
        path = slab_path(data_dir, options.fingerprint)
        self.slab = make_slab(path, options.fingerprint, options.disk_slots, block_bytes)
        layout = SlabLayout(self.slab.slab_id, options.fingerprint, "host", options.disk_slots, options.block_size)
        self.store = IndexStore(store_url, layout, ttl_seconds=3600)
        root_key = bytes.fromhex(options.fingerprint)
        self.journal = Journal(
            self.store,
            options.incarnation,
            lambda: TierDirectory(options.disk_slots, options.block_size, root_key, options.policy),
            max_pending=options.max_pending,
        )
        self.io = IoThread(self.slab)
        self.disk = DiskTier(self.slab, options.block_size, self.journal, self.io)
        self.tiers = TieredCache(
            HostSlab(options.host_slots, block_bytes),
            options.block_size,
            root_key,
            policy=options.policy,
            disk=self.disk,
            write_through_hits=options.write_through_hits,
            erasures=ErasureLog(data_dir / "kv" / "erasures"),
            preload=options.preload,
        )
        self.tiers.gate = EagerGate(block_bytes)


class TieredEngine(TiersWithDisk):
    """One life of an engine over a data directory and a store. `harness` is what is asked."""

    def __init__(
        self,
        data_dir: Path,
        store_url: str,
        options: TieredOptions | None = None,
        *,
        make_slab: Callable[..., DiskSlab] = DiskSlab,
    ) -> None:
        super().__init__(data_dir, store_url, options, make_slab=make_slab)
        options = self.options
        self.harness = Harness(
            options.num_blocks,
            options.block_size,
            options.max_num_seqs,
            options.token_budget,
            options.chunk,
            tiers=self.tiers,
            runs_ahead=options.runs_ahead,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.tiers.close()

    def wait_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Idle until something has come about; what is waited for is bounded, never timed."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come about"
            self.harness.engine.idle()
            time.sleep(0.001)

    def loaded(self) -> Self:
        self.wait_until(lambda: self.disk.directory is not None)
        return self

    def settle(self) -> Self:
        """Everything that moves has arrived, and Redis has been told."""
        self.wait_until(lambda: not self.harness.engine.idle())
        self.wait_until(lambda: self.disk.is_index_written and not self.tiers.is_busy)
        return self

    def die(self) -> None:
        """Like a kill: threads end, nothing is flushed."""
        self.io.stop()
        self.journal.kill()
        self.slab.close()
