"""Every metric of the engine, declared here and nowhere else; docs/metrics.md tells how to read each.

    step times, queue times     observed as they happen (histograms)
    everything else             read from the engine's own counts when somebody asks: nothing is counted twice

One engine has one registry, and every gateway worker passes the same text on, so there is one truth over all workers.
Owners are as many as there are tenants: the largest keep their name, the rest are summed up as `other`.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.engine import LLMEngine
from engine.eviction import Owner

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
        order = self._engine.scheduler.manager.index.order
        named = set(self._named(order.owners))
        evicted = CounterMetricFamily(
            "radixgate_engine_evicted_blocks",
            "Blocks evicted: from which tier, whose, and whether the owner's own pressure or another's did it.",
            labels=["tier", "owner", "cause"],
        )
        pressure = CounterMetricFamily(
            "radixgate_engine_pressure_blocks", "Blocks evicted, by whose need for room.", labels=["pressed_by"]
        )
        lost, pressed = Tally[tuple[str, str]](), Tally[str]()
        for line, count in order.ledger.items():
            cause = "own_pressure" if line.owner == line.pressed_by else "other_pressure"
            lost[line.owner if line.owner in named else OTHER, cause] += count
            pressed[line.pressed_by if line.pressed_by in named else OTHER] += count
        for (owner, cause), count in lost.items():
            evicted.add_metric(["device", owner, cause], count)
        for name, count in pressed.items():
            pressure.add_metric([name], count)
        yield from (evicted, pressure)
