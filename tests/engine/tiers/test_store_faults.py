"""Redis away, paused, flushed, full: requests go on, and afterwards the index is right again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiers.test_restart import PROMPT, ask, big
from tests.engine.tiers.tiered_harness import TieredEngine, TieredOptions

pytestmark = pytest.mark.redis

OTHERS = [[n, *range(100, 130)] for n in range(4)]


def persist(engine: TieredEngine) -> None:
    engine.harness.engine.persist()
    engine.settle()


def test_a_store_that_is_killed_under_load_costs_no_request_and_catches_up(
    tmp_path: Path, own_store: StoreProcess
) -> None:
    first = TieredEngine(tmp_path, own_store.url, big()).loaded()
    ask(first, PROMPT)
    own_store.kill()
    for prompt in OTHERS:
        ask(first, prompt)
    first.harness.engine.persist()
    first.wait_until(lambda: first.disk.journal_stats().state.value == "away")
    assert first.disk.journal_stats().num_pending > 0
    assert first.disk.journal_stats().lag_seconds > 0
    own_store.start()
    first.settle()
    assert first.disk.journal_stats().state.value == "ok"
    first.die()
    with TieredEngine(tmp_path, own_store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 40
        assert [ask(second, prompt) for prompt in OTHERS] == [30] * 4


def test_a_store_that_is_paused_holds_up_no_request(tmp_path: Path, own_store: StoreProcess) -> None:
    """SIGSTOP: connections stay open and nothing answers, which is worse than a refusal."""
    with TieredEngine(tmp_path, own_store.url, big()).loaded() as engine:
        own_store.pause()
        ask(engine, PROMPT)
        for prompt in OTHERS:
            ask(engine, prompt)
        engine.harness.engine.persist()
        assert ask(engine, PROMPT) == 40
        own_store.resume()
        persist(engine)
        assert engine.disk.directory is not None
        assert len(next(iter(engine.store.groups()))[1]) >= 4 * engine.store.format.size


def test_an_engine_that_starts_without_its_store_serves_and_loads_when_it_comes(
    tmp_path: Path, own_store: StoreProcess
) -> None:
    first = TieredEngine(tmp_path, own_store.url, big()).loaded()
    ask(first, PROMPT)
    first.harness.engine.close()
    own_store.kill()
    options = big("two")
    options.preload = True
    with TieredEngine(tmp_path, own_store.url, options) as second:
        second.wait_until(lambda: not second.harness.engine.is_restoring)  # what is away is not waited for
        other = OTHERS[0]
        assert ask(second, other) == 0
        assert ask(second, other) == 30
        assert second.disk.directory is None
        own_store.start()
        second.loaded()
        assert ask(second, PROMPT) == 40


def test_flushall_while_serving_gives_no_failure_and_the_index_is_written_again(
    tmp_path: Path, store: StoreProcess
) -> None:
    """llm-d-kv-cache#232, aibrix#2287."""
    first = TieredEngine(tmp_path, store.url, big()).loaded()
    ask(first, PROMPT)
    persist(first)
    store.flush()
    ask(first, OTHERS[0])
    persist(first)
    first.wait_until(lambda: first.disk.journal_stats().num_resyncs == 1)
    first.settle()
    first.die()
    with TieredEngine(tmp_path, store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 40
        assert ask(second, OTHERS[0]) == 30


def test_a_journal_past_its_bound_is_written_again_as_a_whole(tmp_path: Path, own_store: StoreProcess) -> None:
    """dynamo#4429: a queue without a bound grows until the host is out of memory."""
    first = TieredEngine(tmp_path, own_store.url, big(max_pending=6)).loaded()
    own_store.pause()
    for prompt in [PROMPT, *OTHERS]:
        ask(first, prompt)
        first.harness.engine.persist()
        first.wait_until(lambda: not first.tiers.is_busy)
        assert first.disk.journal_stats().num_pending <= 6 + 2048
    own_store.resume()
    first.wait_until(lambda: first.disk.journal_stats().num_resyncs > 0)
    first.settle()
    first.die()
    with TieredEngine(tmp_path, own_store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 40


def test_a_store_that_is_out_of_memory_and_evicts_gives_misses_only(tmp_path: Path, own_store: StoreProcess) -> None:
    """LMCache#426: Redis evicted values but kept metadata; here any part of the index may be gone."""
    first = TieredEngine(tmp_path, own_store.url, big()).loaded()
    for prompt in [PROMPT, *OTHERS]:
        ask(first, prompt)
    persist(first)
    with own_store.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "2mb")
        for n in range(400):
            client.set(f"other:{n}", "x" * 16_384)
        assert client.info("stats")["evicted_keys"] > 0
    ask(first, OTHERS[1])
    first.die()
    with TieredEngine(tmp_path, own_store.url, big("two")).loaded() as second:
        for prompt in [PROMPT, *OTHERS]:
            ask(second, prompt)
        assert second.disk.counters.num_read_errors == 0


def test_the_index_takes_at_most_400_bytes_a_block_in_redis(tmp_path: Path, store: StoreProcess) -> None:
    options = TieredOptions(num_blocks=64, block_size=16, host_slots=256, disk_slots=512, chunk=64, token_budget=64)
    with TieredEngine(tmp_path, store.url, options).loaded() as engine:
        for n in range(30):
            engine.harness.submit([n, *range(239)], 1, document=f"handbook {n}")
            engine.harness.run()
            persist(engine)  # a slow disk's queue is bounded, and what finds no place in it is dropped
        assert engine.disk.directory is not None
        blocks = len(engine.disk.directory)
        assert blocks >= 400
        assert engine.store.memory_bytes() / blocks <= 400
