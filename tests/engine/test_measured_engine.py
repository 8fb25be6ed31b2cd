"""The clock around the engine, its metrics, and the view of the cache."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from engine.engine import LLMEngine
from engine.measured_engine import MeasuredEngine
from engine.prefill_speed import PrefillSpeed
from engine.protocol import (
    Delta,
    GetCacheView,
    SamplingParams,
    Segment,
    SegmentKind,
    Submit,
    TenantPolicy,
    pack_tokens,
)
from engine.settings import EngineSettings
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import PUBLIC, SCOPE_A, VOCAB, engine_info

BLOCK = 4


class Ticks:
    """A clock that moves by one second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def measured(num_blocks: int = 64, **options: int) -> MeasuredEngine:
    settings = EngineSettings(block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=128, prefill_chunk_size=64)
    runner = FakeRunner(num_blocks, BLOCK, VOCAB - 1)
    engine = LLMEngine(engine_info(num_blocks, BLOCK, num_blocks * BLOCK), settings, runner, Ticks())
    return MeasuredEngine(engine, Ticks(), **options)


def submit(name: str, prompt: range, tenant: str = "alice", policy: TenantPolicy | None = None) -> Submit:
    return Submit(
        request_id=name,
        tenant_id=tenant,
        segments=(Segment.of(SegmentKind.QUESTION, list(prompt), tenant.ljust(len(SCOPE_A), "-").encode()),),
        sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        policy=policy or TenantPolicy(),
    )


def run(engine: MeasuredEngine) -> list[Delta]:
    deltas: list[Delta] = []
    while engine.has_work():
        deltas += [output for output in engine.step() if isinstance(output, Delta)]
    return deltas


def samples(engine: MeasuredEngine) -> dict[tuple[str, ...], float]:
    return dict(_samples(engine.metrics_text()))


def _samples(text: bytes) -> Iterator[tuple[tuple[str, ...], float]]:
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            yield (sample.name.removeprefix("radixgate_engine_"), *sample.labels.values()), sample.value


def test_the_delta_with_the_account_says_how_long_the_request_waited_and_what_the_hit_saved() -> None:
    engine = measured()
    engine.add_request(submit("first", range(40)))
    first = run(engine)[0]
    engine.add_request(submit("second", range(40)))
    second = run(engine)[0]
    assert first.queue_seconds is not None
    assert first.queue_seconds > 0
    assert first.seconds_saved == 0
    assert second.account is not None
    # One tick for the 40 tokens of the first prompt: what the second found cost 39/40 of it.
    assert second.seconds_saved == second.account.num_cached_tokens / 40


def test_only_the_delta_with_the_account_carries_them() -> None:
    """A value on every delta would be added up once a token."""
    engine = measured()
    engine.add_request(submit("r", range(20)))
    assert [delta.queue_seconds is not None for delta in run(engine)] == [True, False]


def test_aborted_and_refused_requests_leave_nothing_behind() -> None:
    """A request that never reaches a step must not stay in the table of arrivals for ever."""
    engine = measured()
    engine.add_request(submit("gone", range(20)))
    engine.abort_request("gone")
    assert engine.metrics_text()
    engine.add_request(submit("gone", range(20)))
    assert run(engine)[0].queue_seconds is not None
    assert samples(engine)["requests_total", "aborted"] == 1
    assert samples(engine)["queue_seconds_count",] == 1


def test_step_phases_and_batches_are_counted_once_a_step() -> None:
    engine = measured()
    engine.add_request(submit("r", range(20)))
    run(engine)
    found = samples(engine)
    for phase in ("schedule", "execute", "postprocess"):
        assert found["step_seconds_count", phase] == found["steps_total",] == 2
        assert found["step_seconds_sum", phase] == 2
    assert found["batch_tokens_sum", "prefill"] == 20
    assert found["batch_tokens_sum", "decode"] == 1


def test_blocks_by_state_sum_to_the_pool() -> None:
    engine = measured(num_blocks=32)
    engine.add_request(submit("r", range(20)))
    engine.step()
    found = samples(engine)
    assert sum(found["blocks", state] for state in ("free", "cached", "active")) == 32
    assert found["blocks", "active"] == 5 + 1 * (20 % BLOCK != 0)
    run(engine)


def test_evictions_name_owner_cause_and_pressure() -> None:
    engine = measured(num_blocks=16)
    engine.add_request(submit("a", range(40), "alice"))
    run(engine)
    engine.add_request(submit("b", range(100, 140), "bob"))
    run(engine)
    found = samples(engine)
    lost = found["evicted_blocks_total", "other_pressure", "alice", "device"]
    assert lost > 0
    assert found["pressure_blocks_total", "bob", "device"] == lost
    view = engine.cache_view(GetCacheView(query_id="q", owner="alice"))
    assert [(row.pressed_by, row.num_blocks) for row in view.evictions] == [("others", lost)]


def test_owners_beyond_the_bound_are_summed_up_as_other() -> None:
    """A series a tenant without a bound lets tenants fill the monitoring system's memory."""
    engine = measured(num_blocks=64, owner_labels=2)
    for number in range(5):
        engine.add_request(submit(f"r{number}", range(number, number + 8), f"tenant-{number}"))
        run(engine)
    found = {key: value for key, value in samples(engine).items() if key[0] == "owner_blocks"}
    assert {key[1] for key in found} == {"tenant-0", "tenant-1", "other"}
    assert sum(found.values()) == sum(row.num_blocks for row in engine.cache_view(GetCacheView(query_id="q")).owners)


def test_quota_and_floor_are_shown_in_blocks() -> None:
    engine = measured()
    engine.add_request(submit("r", range(20), policy=TenantPolicy(kv_floor_tokens=8, kv_quota_tokens=40)))
    run(engine)
    assert samples(engine)["owner_floor_blocks", "alice"] == 2
    assert samples(engine)["owner_quota_blocks", "alice"] == 10


def test_a_small_or_decoding_step_does_not_count_as_prefill_speed() -> None:
    speed = PrefillSpeed()
    speed.observe(num_prefill=8, num_decode=0, seconds=1.0)
    speed.observe(num_prefill=64, num_decode=32, seconds=1.0)
    assert speed.seconds_for(100) == 0.0
    speed.observe(num_prefill=200, num_decode=0, seconds=2.0)
    assert speed.seconds_for(100) == 1.0


def test_the_view_of_one_owner_holds_nothing_of_another() -> None:
    engine = measured()
    for tenant, start in (("alice", 0), ("bob", 100)):
        engine.add_request(submit(tenant, range(start, start + 20), tenant))
        run(engine)
    engine.add_request(submit("live", range(50), "bob"))
    everything = engine.cache_view(GetCacheView(query_id="q"))
    mine = engine.cache_view(GetCacheView(query_id="q", owner="alice", tenant_id="alice"))
    assert {node.owner for node in everything.nodes} == {"alice", "bob"}
    assert {node.owner for node in mine.nodes} == {owner.owner for owner in mine.owners} == {"alice"}
    assert (mine.block_map, mine.requests) == (b"", ())
    assert [request.tenant_id for request in everything.requests] == ["bob"]


def test_the_view_of_one_owner_shows_what_hangs_below_a_public_prompt_and_not_the_prompt() -> None:
    """A tenant that asks behind a published prompt saw an empty tree."""
    engine = measured()
    public = Segment(SegmentKind.SYSTEM, pack_tokens(range(16)), b"p" * 16, owner="public")
    for tenant, start in (("alice", 100), ("bob", 200)):
        request = submit(tenant, range(start, start + 20), tenant)
        engine.add_request(msgspec.structs.replace(request, segments=(public, *request.segments)))
        run(engine)
    mine = engine.cache_view(GetCacheView(query_id="q", owner="alice", tenant_id="alice"))
    assert [(node.owner, node.parent, node.first_token) for node in mine.nodes] == [("alice", None, 16)]


def test_a_node_says_which_documents_begin_in_it() -> None:
    engine = measured()
    scope = b"alice".ljust(len(SCOPE_A), b"-")
    segments = (
        Segment(SegmentKind.SYSTEM, pack_tokens(range(8)), PUBLIC, owner="public"),
        Segment(SegmentKind.DOCUMENT, pack_tokens(range(100, 112)), scope, document_id="handbook"),
        Segment(SegmentKind.QUESTION, pack_tokens(range(50, 60)), scope),
    )
    engine.add_request(msgspec.structs.replace(submit("r", range(1)), segments=segments))
    run(engine)
    mine = engine.cache_view(GetCacheView(query_id="q", owner="alice")).nodes
    assert [(node.parent, node.first_token, node.owner) for node in mine] == [(None, 8, "alice")]
    assert [(start.first_token, start.document_id) for start in mine[0].documents] == [(8, "handbook")]


def test_the_tree_comes_parents_first_and_bounded() -> None:
    engine = measured()
    for name, prompt in (("a", range(20)), ("b", range(20)), ("c", range(12))):
        engine.add_request(submit(name, prompt))
        run(engine)
    nodes = engine.cache_view(GetCacheView(query_id="q")).nodes
    assert len(nodes) > 1
    assert [node.node for node in nodes] == list(range(len(nodes)))
    assert all(node.parent is None or node.parent < node.node for node in nodes)
    assert len(engine.cache_view(GetCacheView(query_id="q", max_nodes=1)).nodes) == 1
