"""The tiers' figures, as `EngineStats` carries them."""

from __future__ import annotations

from engine.protocol import EvictionLine, IndexStats, TierStats
from engine.tiers.disk_tier import DiskTier
from engine.tiers.fetch_gate import FetchGate
from engine.tiers.tiered_cache import TieredCache


def tier_stats(tiers: TieredCache) -> tuple[TierStats, ...]:
    """From the fastest to the slowest."""
    host = TierStats(
        name="host",
        state="ready",
        num_slots=tiers.host.num_slots,
        num_blocks=len(tiers.host),
        block_bytes=tiers.host_slab.block_bytes,
        bytes_written=tiers.counters.bytes_written,
        bytes_read=tiers.counters.bytes_read,
        num_evicted=tiers.host.num_evicted,
        num_dropped=tiers.counters.num_dropped,
        num_refused=tiers.gate.num_refused["host"],
        num_swapped_out=tiers.counters.num_swapped_out,
        num_swapped_in=tiers.counters.num_swapped_in,
        bandwidth=tiers.gate.bandwidth["host"].rate or 0.0,
        reads=tiers.counters.reads.stats(),
        writes=tiers.counters.writes.stats(),
        owner_blocks=dict(tiers.host.owner_blocks),
    )
    if tiers.disk is None:
        return (host,)
    return host, _disk_stats(tiers.disk, tiers.gate)


def _disk_stats(disk: DiskTier, gate: FetchGate) -> TierStats:
    directory, counters = disk.directory, disk.counters
    return TierStats(
        name="disk",
        state="loading" if directory is None else "ready",
        num_slots=disk.slab.num_slots,
        num_blocks=0 if directory is None else len(directory),
        block_bytes=disk.slab.block_bytes,
        bytes_written=counters.bytes_written,
        bytes_read=counters.bytes_read,
        num_evicted=0 if directory is None else directory.num_evicted,
        num_read_errors=counters.num_read_errors,
        num_write_errors=counters.num_write_errors,
        num_damaged=counters.num_damaged,
        num_dropped=counters.num_dropped,
        num_refused=gate.num_refused["disk"],
        num_restored=counters.num_restored,
        num_rejected=counters.num_rejected,
        bandwidth=gate.bandwidth["disk"].rate or 0.0,
        reads=counters.reads.stats(),
        writes=counters.writes.stats(),
        owner_blocks={} if directory is None else dict(directory.owner_blocks),
    )


def tier_evictions(tiers: TieredCache) -> tuple[EvictionLine, ...]:
    """What went from the tiers below, by owner and pressure."""
    disk = tiers.disk.directory if tiers.disk is not None else None
    return tiers.host.ledger.lines("host") + (() if disk is None else disk.ledger.lines("disk"))


def index_stats(tiers: TieredCache) -> IndexStats | None:
    if tiers.disk is None:
        return None
    stats = tiers.disk.journal_stats()
    return IndexStats(
        state=stats.state.value,
        num_pending=stats.num_pending,
        lag_seconds=stats.lag_seconds,
        num_published=stats.num_published,
        num_failures=stats.num_failures,
        num_resyncs=stats.num_resyncs,
    )
