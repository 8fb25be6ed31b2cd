"""Erasure: out of every tier and the index at once, resumed when something was away."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.protocol import Erase, GetDocumentStats, SamplingParams, Segment, SegmentKind, Submit, pack_tokens
from tests.engine.fake_runner import expected_output
from tests.engine.harness import PUBLIC, SCOPE_A, SCOPE_B, VOCAB
from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiers.test_restart import big
from tests.engine.tiers.test_store_faults import persist
from tests.engine.tiers.tiered_harness import TieredEngine, TieredOptions

pytestmark = pytest.mark.redis

SYSTEM = list(range(200, 212))
HANDBOOK = list(range(20))
OTHER = list(range(50, 70))


def ask(engine: TieredEngine, prompt: list[int], document: str, tenant: str = "acme", scope: bytes = SCOPE_A) -> int:
    name = engine.harness.submit([*SYSTEM, *prompt], 2, scope, public=len(SYSTEM), document=document, tenant=tenant)
    engine.harness.run()
    assert engine.harness.tokens_of(name) == expected_output([*SYSTEM, *prompt], 2, VOCAB - 1)
    engine.harness.check()
    return engine.harness.accounts[name].num_cached_tokens


def erase(engine: TieredEngine, **what: object) -> dict[str, int]:
    done = engine.harness.engine.erase(Erase(erase_id="e", **what))  # type: ignore[arg-type]
    engine.harness.check()
    return done.num_by_tier


def test_a_document_goes_from_every_tier_and_what_stood_before_it_stays(tmp_path: Path, store: StoreProcess) -> None:
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        ask(engine, HANDBOOK, "handbook")
        ask(engine, OTHER, "other")
        persist(engine)
        engine.harness.engine.scheduler.manager.evict(3)  # some of it to host memory
        engine.settle()
        counts = erase(engine, owner="acme", document_ids=("handbook",))
        assert counts["disk"] == 5
        assert counts["device"] + counts["host"] >= 5
        assert ask(engine, OTHER, "other") > len(SYSTEM)
        assert ask(engine, HANDBOOK, "handbook") == len(SYSTEM)


def test_another_tenants_document_of_the_same_id_stays(tmp_path: Path, store: StoreProcess) -> None:
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        ask(engine, HANDBOOK, "handbook", "acme", SCOPE_A)
        ask(engine, HANDBOOK, "handbook", "borealis", SCOPE_B)
        erase(engine, owner="acme", document_ids=("handbook",))
        assert ask(engine, HANDBOOK, "handbook", "borealis", SCOPE_B) == 31
        assert ask(engine, HANDBOOK, "handbook", "acme", SCOPE_A) == len(SYSTEM)
        erase(engine, document_ids=("handbook",))
        assert ask(engine, HANDBOOK, "handbook", "borealis", SCOPE_B) == len(SYSTEM)


def blocks_of(engine: TieredEngine, *scopes: bytes) -> dict[str, int]:
    query = GetDocumentStats(query_id="q", scopes=scopes, document_ids=("handbook",))
    for use in engine.harness.engine.document_stats(query).documents:
        assert use.num_blocks == sum(use.num_by_tier.values())
        assert use.num_bytes == use.num_blocks * engine.harness.engine.info().block_bytes
        return use.num_by_tier
    return {}


def test_a_document_is_counted_in_every_tier_and_only_in_the_scopes_asked_for(
    tmp_path: Path, store: StoreProcess
) -> None:
    """It was counted on the device alone: a document that lay on disk seemed to be gone before it was erased."""
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        ask(engine, HANDBOOK, "handbook", "acme", SCOPE_A)
        ask(engine, HANDBOOK, "handbook", "borealis", SCOPE_B)
        ask(engine, [*HANDBOOK, *OTHER], "handbook", "acme", SCOPE_A)
        persist(engine)
        before = blocks_of(engine, SCOPE_A)
        assert before == {"device": 10, "disk": 10}
        assert blocks_of(engine, SCOPE_B) == {"device": 5, "disk": 5}
        assert blocks_of(engine, SCOPE_A, SCOPE_B) == {"device": 15, "disk": 15}
        assert blocks_of(engine, PUBLIC) == {}
        engine.harness.manager.evict(64)
        engine.settle()
        assert blocks_of(engine, SCOPE_A) == {"host": 10, "disk": 10}
        assert erase(engine, owner="acme", document_ids=("handbook",)) == {"device": 0, "host": 10, "disk": 10}
        assert blocks_of(engine, SCOPE_A) == {}
        assert blocks_of(engine, SCOPE_B) == {"host": 5, "disk": 5}


def test_a_documents_blocks_end_where_the_next_one_starts_in_every_tier(tmp_path: Path, store: StoreProcess) -> None:
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        segments = [
            Segment(SegmentKind.DOCUMENT, pack_tokens(tokens), SCOPE_A, name)
            for name, tokens in (("handbook", HANDBOOK), ("other", OTHER))
        ]
        engine.harness.engine.add_request(
            Submit(
                request_id="r",
                tenant_id="acme",
                segments=tuple(segments),
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
            )
        )
        engine.harness.run()
        persist(engine)
        assert blocks_of(engine, SCOPE_A) == {"device": 5, "disk": 5}


def test_a_tenant_goes_and_the_public_part_stays(tmp_path: Path, store: StoreProcess) -> None:
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        ask(engine, HANDBOOK, "handbook")
        ask(engine, OTHER, "other", "borealis", SCOPE_B)
        persist(engine)
        assert erase(engine, owner="acme") == {"device": 5, "host": 0, "disk": 5}
        assert ask(engine, OTHER, "other", "borealis", SCOPE_B) == 31
        assert ask(engine, HANDBOOK, "handbook") == len(SYSTEM)


def test_everything_goes(tmp_path: Path, store: StoreProcess) -> None:
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        ask(engine, HANDBOOK, "handbook")
        persist(engine)
        erase(engine)
        assert engine.harness.manager.counts().cached == 0
        assert ask(engine, HANDBOOK, "handbook") == 0


def test_what_a_running_request_holds_is_found_by_nobody_and_goes_with_it(tmp_path: Path, store: StoreProcess) -> None:
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        harness = engine.harness
        name = harness.submit([*SYSTEM, *HANDBOOK], 12, public=len(SYSTEM), document="handbook", tenant="acme")
        for _ in range(4):
            harness.step()
        counts = erase(engine, owner="acme", document_ids=("handbook",))
        assert counts["device"] == 5
        assert ask(engine, HANDBOOK, "handbook") <= len(SYSTEM)
        harness.run()
        assert harness.tokens_of(name) == expected_output([*SYSTEM, *HANDBOOK], 12, VOCAB - 1)
        harness.check()


def test_a_request_that_computes_the_document_right_now_leaves_nothing(tmp_path: Path, store: StoreProcess) -> None:
    """Erased in mid-prefill: what it computes afterwards must not become findable."""
    with TieredEngine(tmp_path, store.url, big()).loaded() as engine:
        harness = engine.harness
        harness.submit([*SYSTEM, *HANDBOOK], 3, public=len(SYSTEM), document="handbook", tenant="acme")
        harness.step()
        erase(engine, owner="acme", document_ids=("handbook",))
        harness.run()
        harness.check()
        assert ask(engine, HANDBOOK, "handbook") == len(SYSTEM)


def test_payloads_are_overwritten_and_the_index_forgets_their_tokens(tmp_path: Path, store: StoreProcess) -> None:
    engine = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(engine, HANDBOOK, "handbook")
    persist(engine)
    erase(engine)
    engine.settle()
    engine.harness.engine.idle()
    assert not engine.tiers.has_pending_erasures
    content = engine.slab.path.read_bytes()[4096:]
    assert content.strip(b"\0") == b""
    groups = b"".join(group for _, group in engine.store.groups())
    assert groups.strip(b"\0") == b""
    engine.die()


def test_an_erasure_while_the_store_is_away_is_done_when_it_is_back(tmp_path: Path, own_store: StoreProcess) -> None:
    """Even if the process ends in between: the store still has the entries then, and must not bring them back."""
    first = TieredEngine(tmp_path, own_store.url, big()).loaded()
    ask(first, HANDBOOK, "handbook")
    ask(first, OTHER, "other")
    persist(first)
    own_store.kill()
    erase(first, owner="acme", document_ids=("handbook",))
    assert first.tiers.has_pending_erasures
    first.die()
    own_store.start()
    second = TieredEngine(tmp_path, own_store.url, big("two")).loaded()
    assert ask(second, OTHER, "other") == 31
    assert ask(second, HANDBOOK, "handbook") == len(SYSTEM)
    second.settle()
    second.harness.engine.idle()
    assert not second.tiers.has_pending_erasures
    second.die()


def test_an_erasure_before_the_index_was_read_takes_effect_when_it_is(tmp_path: Path, own_store: StoreProcess) -> None:
    first = TieredEngine(tmp_path, own_store.url, big()).loaded()
    ask(first, HANDBOOK, "handbook")
    first.harness.engine.close()
    own_store.kill()
    second = TieredEngine(tmp_path, own_store.url, big("two"))
    assert erase(second, owner="acme")["disk"] == 0
    own_store.start()
    second.loaded()
    assert ask(second, HANDBOOK, "handbook") == len(SYSTEM)
    second.die()


@pytest.mark.parametrize("host_slots", [16, 64])
def test_a_request_that_opted_out_leaves_nothing_in_any_tier(
    tmp_path: Path, store: StoreProcess, host_slots: int
) -> None:
    """sglang#38069: a tenant that opted out still left entries and evicted others."""
    options = TieredOptions(num_blocks=12, host_slots=host_slots, disk_slots=64)
    with TieredEngine(tmp_path, store.url, options).loaded() as engine:
        for n in range(6):
            engine.harness.submit([n] * (9 + n), 10, use_cache=False)
        engine.harness.run()
        persist(engine)
        assert engine.disk.directory is not None
        assert (len(engine.tiers.host), len(engine.disk.directory)) == (0, 0)
        assert engine.harness.manager.counts().cached == 0
        assert engine.slab.path.stat().st_size <= 4096
