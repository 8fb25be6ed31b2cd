"""The tiers' metrics: all of them documented, and each one moves when what it tells of happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.measured_engine import MeasuredEngine
from engine.protocol import TenantPolicy
from tests.engine.harness import SCOPE_A, SCOPE_B
from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiers.test_restart import PROMPT, ask, big
from tests.engine.tiers.test_store_faults import OTHERS, persist
from tests.engine.tiers.tiered_harness import TieredEngine, TieredOptions

pytestmark = pytest.mark.redis

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def samples(engine: MeasuredEngine) -> dict[tuple[str, ...], float]:
    """(name without its prefix, label values in the order of the labels' names) → value"""
    return {
        (sample.name.removeprefix("radixgate_engine_"), *(sample.labels[name] for name in sorted(sample.labels))): (
            sample.value
        )
        for family in text_string_to_metric_families(engine.metrics_text().decode())
        for sample in family.samples
    }


def test_every_metric_of_the_engine_is_documented_and_every_documented_one_exists(
    tmp_path: Path, store: StoreProcess
) -> None:
    """A metric that nobody explains is read wrongly; one that is gone makes dashboards empty."""
    with TieredEngine(tmp_path, store.url).loaded() as engine:
        for tokens, tenant in ((range(20), "a"), (range(100, 130), "b")):
            engine.harness.submit(list(tokens), 1, tenant=tenant, policy=TenantPolicy(kv_quota_tokens=64))
            engine.harness.run()
        families = text_string_to_metric_families(MeasuredEngine(engine.harness.engine).metrics_text().decode())
        suffixes = {"counter": "_total", "info": "_info"}
        names = {family.name + suffixes.get(family.type, "") for family in families}
    documented = set(re.findall(r"^\| `(radixgate_engine_\w+)`", DOCS.read_text("utf-8"), re.MULTILINE))
    assert {name for name in names if not name.endswith("_created")} == documented - {"radixgate_engine_up"}


def test_what_is_written_and_what_is_hit_are_both_seen_in_every_tier(tmp_path: Path, store: StoreProcess) -> None:
    """sglang#12092: the disk tier was written and never read, and nothing showed it."""
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        ask(engine, PROMPT)
        persist(engine)
        engine.harness.manager.evict(64)
        engine.settle()
        engine.tiers.evict("host", 64)
        ask(engine, PROMPT)
        found = samples(MeasuredEngine(engine.harness.engine))
        block = engine.slab.block_bytes
        assert found["tier_written_bytes_total", "disk"] == found["tier_read_bytes_total", "disk"] == 10 * block
        assert found["tier_read_bytes_total", "host"] == 10 * block
        assert found["tier_written_bytes_total", "host"] >= 10 * block
        assert found["tier_seconds_count", "read", "disk"] == found["tier_seconds_count", "write", "disk"] == 10
        assert found["tier_seconds_bucket", "+Inf", "read", "disk"] == 10
        assert found["tier_seconds_count", "read", "host"] == 1
        assert found["tier_bytes", "disk"] == 10 * block
        assert found["tier_capacity_bytes", "disk"] == 128 * block
        assert found["tier_owner_blocks", "t", "disk"] == found["tier_owner_blocks", "t", "host"] == 10
        assert found["tier_bandwidth_bytes_per_second", "disk"] > 0


def test_evictions_below_are_told_by_tier_owner_and_pressure(tmp_path: Path, store: StoreProcess) -> None:
    options = TieredOptions(num_blocks=10, host_slots=8, disk_slots=8)
    with TieredEngine(tmp_path, store.url, options).loaded() as engine:
        for n, (tenant, scope) in enumerate([("alice", SCOPE_A), ("bob", SCOPE_B), ("alice", SCOPE_A)]):
            engine.harness.submit([n] * 30, 1, scope, tenant=tenant)
            engine.harness.run()
            persist(engine)
        found = samples(MeasuredEngine(engine.harness.engine))
        for tier in ("device", "host", "disk"):
            assert found["evicted_blocks_total", "other_pressure", "alice", tier] > 0, tier
            assert found["pressure_blocks_total", "bob", tier] > 0, tier
        evicted = sum(n for (name, *labels), n in found.items() if name == "evicted_blocks_total" and "host" in labels)
        assert evicted == engine.tiers.host.num_evicted


def test_a_store_that_is_away_is_seen_in_state_and_lag(tmp_path: Path, own_store: StoreProcess) -> None:
    with TieredEngine(tmp_path, own_store.url, big()).loaded() as engine:
        measured = MeasuredEngine(engine.harness.engine)
        ask(engine, PROMPT)
        persist(engine)
        found = samples(measured)
        assert (found["index_state", "ok"], found["index_lag_seconds",], found["index_pending_records",]) == (1, 0, 0)
        assert found["index_published_records_total",] >= 10
        own_store.kill()
        ask(engine, OTHERS[0])
        engine.harness.engine.persist()
        engine.wait_until(lambda: samples(measured)["index_state", "away"] == 1)
        found = samples(measured)
        assert found["index_lag_seconds",] > 0
        assert found["index_pending_records",] > 0
        assert found["index_failures_total",] > 0
        assert found["index_state", "ok"] == 0
        own_store.start()
        engine.settle()
        assert samples(measured)["index_lag_seconds",] == 0
