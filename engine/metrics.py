"""Every metric of the engine, declared here and nowhere else; docs/metrics.md tells how to read each.

    step times, queue times     observed as they happen (histograms)
    everything else             read from the engine's own counts when somebody asks: nothing is counted twice

One engine has one registry, and every gateway worker passes the same text on, so there is one truth over all workers.
Owners are as many as there are tenants: the largest keep their name, the rest are summed up as `other`.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.engine import LLMEngine
from engine.eviction import Owner
from engine.protocol import IndexStats, LatencyStats, TierStats
from engine.tiers.journal_state import JournalState

OTHER = "other"
_STEP_BUCKETS = (0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class StepTimes(NamedTuple):
    """Seconds."""

    schedule: float
    execute: float
    postprocess: float


class EngineMetricsRegistry:
    """The engine's registry. Belongs to the engine's thread, like everything it reads."""

    def __init__(self, engine: LLMEngine, owner_labels: int) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._step = Histogram(
            "radixgate_engine_step_seconds",
            "Time of an engine step by phase.",
            ["phase"],
            buckets=_STEP_BUCKETS,
            registry=self._registry,
        )
        self._sequences = Histogram(
            "radixgate_engine_batch_sequences",
            "Sequences in a step.",
            buckets=_SIZE_BUCKETS,
            registry=self._registry,
        )
        self._tokens = Histogram(
            "radixgate_engine_batch_tokens",
            "New tokens in a step by kind.",
            ["kind"],
            buckets=_SIZE_BUCKETS,
            registry=self._registry,
        )
        self._queue = Histogram(
            "radixgate_engine_queue_seconds",
            "Time from a request's arrival at the engine to its first step.",
            buckets=_QUEUE_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_EngineState(engine, owner_labels))
        self._registry.register(_TierState(engine, owner_labels))

    def observe_step(self, times: StepTimes, num_sequences: int, num_prefill: int, num_decode: int) -> None:
        for phase, seconds in times._asdict().items():
            self._step.labels(phase).observe(seconds)
        self._sequences.observe(num_sequences)
        for kind, count in (("prefill", num_prefill), ("decode", num_decode)):
            if count:
                self._tokens.labels(kind).observe(count)

    def observe_queue(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineState(Collector):
    """The engine's counts, in Prometheus' words, at the moment of asking."""

    def __init__(self, engine: LLMEngine, owner_labels: int) -> None:
        self._engine = engine
        self._owner_labels = owner_labels

    def collect(self) -> Iterator[Metric]:
        yield self._info()
        yield from self._counters()
        yield from self._gauges()
        yield from self._owners()
        yield from self._evictions()

    def _info(self) -> Metric:
        info = self._engine.info()
        labels = {
            "model": info.model,
            "device": info.device,
            "dtype": info.dtype,
            "incarnation": info.incarnation,
            "fingerprint": info.fingerprint,
        }
        return InfoMetricFamily("radixgate_engine", "What this engine serves.", value=labels)

    def _counters(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        plain = {
            "steps": ("Steps since the start.", stats.num_steps),
            "preemptions": ("Requests thrown out of the batch for lack of blocks.", stats.num_preemptions),
            "step_failures": ("Steps that failed.", stats.num_step_failures),
            "integrity_failures": (
                "Times a broken invariant cost the cache.",
                stats.num_integrity_failures,
            ),
            "prompt_tokens": ("Prompt tokens of requests that got an answer.", stats.num_prompt_tokens),
            "cached_tokens": ("Of these, tokens whose KV was found.", stats.num_cached_tokens),
            "computed_tokens": ("Tokens run through the model, recomputation included.", stats.num_computed_tokens),
            "output_tokens": ("Tokens generated.", stats.num_output_tokens),
        }
        for name, (meaning, value) in plain.items():
            yield CounterMetricFamily(f"radixgate_engine_{name}", meaning, value=value)
        requests = CounterMetricFamily("radixgate_engine_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome in ("finished", "aborted", "failed"):
            requests.add_metric([outcome], getattr(stats, f"num_requests_{outcome}"))
        yield requests

    def _gauges(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        blocks = GaugeMetricFamily("radixgate_engine_blocks", "KV blocks by state.", labels=["state"])
        for state in ("free", "cached", "active"):
            blocks.add_metric([state], getattr(stats, f"num_{state}_blocks"))
        yield blocks
        requests = GaugeMetricFamily("radixgate_engine_requests_now", "Requests in the engine.", labels=["state"])
        requests.add_metric(["waiting"], stats.num_waiting)
        requests.add_metric(["running"], stats.num_running)
        yield requests
        usage = (stats.num_blocks - stats.num_free_blocks) / stats.num_blocks
        plain = {
            "kv_usage_ratio": ("Part of the KV blocks that is not free.", usage),
            "prefix_nodes": ("Nodes of the prefix tree.", self._engine.scheduler.manager.index.num_nodes),
            "prefill_tokens_per_second": ("Measured prefill speed; 0: unknown.", stats.prefill_tokens_per_second),
        }
        for name, (meaning, value) in plain.items():
            yield GaugeMetricFamily(f"radixgate_engine_{name}", meaning, value=value)

    def _owners(self) -> Iterator[Metric]:
        everyone = self._engine.scheduler.manager.index.order.owners
        named = self._named(everyone)
        blocks = GaugeMetricFamily("radixgate_engine_owner_blocks", "Indexed blocks by owner.", labels=["owner"])
        counts = Tally[str]()
        for owner in everyone.values():
            counts[owner.name if owner.name in named else OTHER] += owner.num_blocks
        for name, count in counts.items():
            blocks.add_metric([name], count)
        yield blocks
        floors = GaugeMetricFamily("radixgate_engine_owner_floor_blocks", "Protected blocks.", labels=["owner"])
        quotas = GaugeMetricFamily("radixgate_engine_owner_quota_blocks", "Blocks it may keep.", labels=["owner"])
        for name in named:
            owner = everyone[name]
            floors.add_metric([name], owner.floor)
            if owner.quota_blocks is not None:
                quotas.add_metric([name], owner.quota_blocks)
        yield from (floors, quotas)

    def _named(self, everyone: dict[str, Owner]) -> list[str]:
        """Those that keep their name: the first ones by age, so that a series does not come and go with its size."""
        return list(islice(everyone, self._owner_labels))

    def _evictions(self) -> Iterator[Metric]:
        named = set(self._named(self._engine.scheduler.manager.index.order.owners))
        evicted = CounterMetricFamily(
            "radixgate_engine_evicted_blocks",
            "Blocks evicted: from which tier, whose, and whether the owner's own pressure or another's did it.",
            labels=["tier", "owner", "cause"],
        )
        pressure = CounterMetricFamily(
            "radixgate_engine_pressure_blocks", "Blocks evicted, by whose need for room.", labels=["tier", "pressed_by"]
        )
        lost, pressed = Tally[tuple[str, str, str]](), Tally[tuple[str, str]]()
        for line in self._engine.stats().ledger:
            cause = "own_pressure" if line.owner == line.pressed_by else "other_pressure"
            lost[line.tier, line.owner if line.owner in named else OTHER, cause] += line.num_blocks
            pressed[line.tier, line.pressed_by if line.pressed_by in named else OTHER] += line.num_blocks
        for labels, count in lost.items():
            evicted.add_metric(labels, count)
        for labels, count in pressed.items():
            pressure.add_metric(labels, count)
        yield from (evicted, pressure)


class _TierState(Collector):
    """The tiers below the device, and the index of the disk. Nothing when there are none."""

    def __init__(self, engine: LLMEngine, owner_labels: int) -> None:
        self._engine = engine
        self._owner_labels = owner_labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        if stats.tiers:
            yield from _tier_gauges(stats.tiers)
            yield from _tier_counters(stats.tiers)
            yield _tier_latencies(stats.tiers)
            yield self._owners(stats.tiers)
        if stats.index is not None:
            yield from _index(stats.index)

    def _owners(self, tiers: Iterable[TierStats]) -> Metric:
        named = set(islice(self._engine.scheduler.manager.index.order.owners, self._owner_labels))
        blocks = GaugeMetricFamily(
            "radixgate_engine_tier_owner_blocks", "Blocks below the device by owner.", labels=["tier", "owner"]
        )
        counts = Tally[tuple[str, str]]()
        for tier in tiers:
            for owner, count in tier.owner_blocks.items():
                counts[tier.name, owner if owner in named else OTHER] += count
        for labels, count in counts.items():
            blocks.add_metric(labels, count)
        return blocks


def _tier_gauges(tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
    gauges = {
        "bytes": ("KV in a tier below the device.", [tier.num_blocks * tier.block_bytes for tier in tiers]),
        "capacity_bytes": ("Room in a tier below the device.", [tier.num_slots * tier.block_bytes for tier in tiers]),
        "ready": ("Whether a tier is in use: the disk after its index was read.", [_is_ready(tier) for tier in tiers]),
        "bandwidth_bytes_per_second": ("Measured when reading; 0: not yet.", [tier.bandwidth for tier in tiers]),
    }
    for name, (meaning, values) in gauges.items():
        gauge = GaugeMetricFamily(f"radixgate_engine_tier_{name}", meaning, labels=["tier"])
        for tier, value in zip(tiers, values, strict=True):
            gauge.add_metric([tier.name], value)
        yield gauge


def _is_ready(tier: TierStats) -> int:
    return int(tier.state == "ready")


def _tier_counters(tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
    """Each with the label `tier`, and one more where it counts several things."""
    rows = {
        "written_bytes": ("KV written into a tier.", "", [("", "bytes_written")]),
        "read_bytes": ("KV read from a tier.", "", [("", "bytes_read")]),
        "errors": (
            "Reads and writes that failed: counted misses.",
            "operation",
            [("read", "num_read_errors"), ("write", "num_write_errors")],
        ),
        "damaged_blocks": ("Blocks whose checksum was not theirs when they were read.", "", [("", "num_damaged")]),
        "dropped_blocks": ("Blocks that found no room in a tier.", "", [("", "num_dropped")]),
        "refused_fetches": ("Times that computing was cheaper than fetching.", "", [("", "num_refused")]),
        "swapped_blocks": (
            "Blocks of preempted requests.",
            "direction",
            [("out", "num_swapped_out"), ("in", "num_swapped_in")],
        ),
        "loaded_entries": (
            "Index entries of an earlier life, by what became of them.",
            "result",
            [("restored", "num_restored"), ("rejected", "num_rejected")],
        ),
    }
    for name, (meaning, label, values) in rows.items():
        counter = CounterMetricFamily(
            f"radixgate_engine_tier_{name}", meaning, labels=["tier", label] if label else ["tier"]
        )
        for tier in tiers:
            for value, field in values:
                counter.add_metric([tier.name, value] if label else [tier.name], getattr(tier, field))
        yield counter


def _tier_latencies(tiers: tuple[TierStats, ...]) -> Metric:
    histogram = HistogramMetricFamily(
        "radixgate_engine_tier_seconds", "Time of a read from, or a write into, a tier.", labels=["tier", "operation"]
    )
    for tier in tiers:
        for operation, latency in (("read", tier.reads), ("write", tier.writes)):
            histogram.add_metric([tier.name, operation], _buckets(latency), latency.seconds)
    return histogram


def _buckets(latency: LatencyStats) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in latency.bounds), "+Inf"]
    return list(zip(bounds, accumulate(latency.counts), strict=True))


def _index(index: IndexStats) -> Iterator[Metric]:
    state = GaugeMetricFamily("radixgate_engine_index_state", "State of the index in Redis.", labels=["state"])
    for each in JournalState:
        state.add_metric([each.value], each.value == index.state)
    yield state
    gauges = {
        "pending_records": ("Index records that are still to be written to Redis.", index.num_pending),
        "lag_seconds": ("Age of the oldest of them.", index.lag_seconds),
    }
    for name, (meaning, value) in gauges.items():
        yield GaugeMetricFamily(f"radixgate_engine_index_{name}", meaning, value=value)
    counters = {
        "published_records": ("Index records written to Redis.", index.num_published),
        "failures": ("Times that Redis could not be written or read.", index.num_failures),
        "resyncs": ("Times that the whole index was written again.", index.num_resyncs),
    }
    for name, (meaning, value) in counters.items():
        yield CounterMetricFamily(f"radixgate_engine_index_{name}", meaning, value=value)
