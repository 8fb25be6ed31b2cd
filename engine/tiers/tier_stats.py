"""The tiers' figures, as `EngineStats` carries them."""

from __future__ import annotations

from engine.protocol import IndexStats, TierStats
from engine.tiers.disk_tier import DiskTier
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
        bandwidth=tiers.gate.bandwidth["host"].rate or 0.0,
        owner_blocks=dict(tiers.host.owner_blocks),
    )
    if tiers.disk is None:
        return (host,)
    return host, _disk_stats(tiers.disk, tiers.gate.bandwidth["disk"].rate or 0.0)


def _disk_stats(disk: DiskTier, bandwidth: float) -> TierStats:
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
        num_restored=counters.num_restored,
        num_rejected=counters.num_rejected,
        bandwidth=bandwidth,
        owner_blocks={} if directory is None else dict(directory.owner_blocks),
    )


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
