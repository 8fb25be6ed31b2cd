"""Every metric of the gateway, declared here and nowhere else; docs/metrics.md tells how to read each.

    worker 1 ─ counters ─┐
    worker 2 ─ counters ─┼─► files in PROMETHEUS_MULTIPROC_DIR ─► GET /metrics of any worker: the sum over all
    (gone)   ─ counters ─┘     (set by the supervisor; without it a gateway is alone and counts in memory)

Workers agree on which tenants have a label of their own through `LabelTable`, a small file beside the counters:
otherwise each would name the ones that it happened to see first. A worker that is gone leaves its counts: counters
never fall.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from gateway.request_record import RequestRecord, hit_class

OTHER = "other"
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)
_LIVE_FILE = re.compile(r"gauge_live\w*_(\d+)\.db")


class LabelTable:
    """The names that have a label of their own: the first `limit` that any worker saw. The rest is `other`."""

    def __init__(self, path: Path | None, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._names and len(self._names) < self._limit:
            self._claim(name)
        return name if name in self._names else OTHER

    def _claim(self, name: str) -> None:
        if self._path is None:
            self._names.add(name)
            return
        with self._path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            self._names.update(file.read().split())
            if name not in self._names and len(self._names) < self._limit:
                file.write(f"{name}\n")
                self._names.add(name)


class GatewayMetrics:
    """Observes finished requests. Create one a process: in a shared directory, metrics of one name are one metric."""

    def __init__(self, *, shared_dir: Path | None = None, tenant_labels: int = 50) -> None:
        self._shared_dir = shared_dir
        self._tenants = LabelTable(shared_dir / "tenants" if shared_dir else None, tenant_labels)
        self._registry = registry = CollectorRegistry()
        who = ["tenant", "model"]
        self._requests = Counter("radixgate_requests", "Requests to a model.", [*who, "outcome"], registry=registry)
        self._http = Counter(
            "radixgate_http_requests", "All HTTP requests.", ["route", "method", "status"], registry=registry
        )
        self._prompt = Counter(
            "radixgate_prompt_tokens", "Prompt tokens by where they came from.", [*who, "class"], registry=registry
        )
        self._output = Counter("radixgate_output_tokens", "Tokens generated.", who, registry=registry)
        self._saved = Counter(
            "radixgate_prefill_saved_seconds", "Computing that cached tokens made needless.", who, registry=registry
        )
        split = [*who, "hit"]
        self._ttft = Histogram(
            "radixgate_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            split,
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self._itl = Histogram(
            "radixgate_inter_token_seconds", "Between tokens.", split, buckets=_ITL_BUCKETS, registry=registry
        )
        self._queue = Histogram(
            "radixgate_queue_seconds", "Waiting in the engine.", split, buckets=_QUEUE_BUCKETS, registry=registry
        )
        self._dropped = Counter(
            "radixgate_history_dropped_records", "Records that the dashboard's history lost.", registry=registry
        )
        self._active = Gauge(
            "radixgate_active_requests", "Requests being answered.", multiprocess_mode="livesum", registry=registry
        )

    def request_finished(self, record: RequestRecord) -> None:
        self._http.labels(record.route, _method(record.method), str(record.status)).inc()
        if record.tenant_id is None or not record.model:
            return
        who = (self._tenants.label(record.tenant_id), record.model)
        self._requests.labels(*who, record.outcome).inc()
        if (used := record.used) is not None:
            for name, count in msgspec.structs.asdict(used.account).items():
                if count:
                    self._prompt.labels(*who, name).inc(count)
            self._output.labels(*who).inc(used.num_output_tokens)
            self._saved.labels(*who).inc(used.seconds_saved)
        if record.account is not None:
            self._observe_times(record, (*who, hit_class(record.account)))

    def _observe_times(self, record: RequestRecord, labels: tuple[str, str, str]) -> None:
        if record.time_to_first_token is not None:
            self._ttft.labels(*labels).observe(record.time_to_first_token)
        if record.queue_seconds is not None:
            self._queue.labels(*labels).observe(record.queue_seconds)
        intervals = self._itl.labels(*labels)
        for seconds in record.token_intervals:
            intervals.observe(seconds)

    def history_dropped(self, count: int) -> None:
        self._dropped.inc(count)

    def set_active(self, count: int) -> None:
        self._active.set(count)

    def text(self, *, engine_up: bool, store_up: bool) -> bytes:
        """Prometheus' text format: the sum over all workers, and what this one sees of engine and store."""
        registry = self._registry
        if self._shared_dir is not None:
            _forget_dead_workers(self._shared_dir)
            registry = CollectorRegistry()
            MultiProcessCollector(registry, path=str(self._shared_dir))
        own = CollectorRegistry(auto_describe=False)
        own.register(_Neighbours(engine_up=engine_up, store_up=store_up))
        return generate_latest(registry) + generate_latest(own)


class _Neighbours(Collector):
    def __init__(self, *, engine_up: bool, store_up: bool) -> None:
        self._states = {"engine": engine_up, "store": store_up}

    def collect(self) -> Iterator[Metric]:
        for name, up in self._states.items():
            yield GaugeMetricFamily(f"radixgate_{name}_up", f"Whether the {name} answers this gateway.", value=up)


def _forget_dead_workers(directory: Path) -> None:
    """Gauges of a worker that is gone must not count; its counters must."""
    for file in directory.glob("gauge_live*.db"):
        match = _LIVE_FILE.fullmatch(file.name)
        if match is not None and not _alive(int(match[1])):
            file.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _method(method: str) -> str:
    """A method is the client's text, too."""
    return method if method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} else OTHER
