"""Redis away, paused, slow, flushed, full, replaced: requests go on, and afterwards the index is right again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiers.test_restart import PROMPT, ask, big
from tests.engine.tiers.tiered_harness import TieredEngine, TieredOptions
from tests.store_proxy import StoreProxy

pytestmark = pytest.mark.redis

OTHERS = [[n, *range(100, 130)] for n in range(4)]


@pytest.fixture
def proxy(own_store: StoreProcess) -> Iterator[StoreProxy]:
    proxy = StoreProxy(own_store.url)
    yield proxy
    proxy.close()


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


def test_a_store_that_is_slow_holds_up_no_request(tmp_path: Path, own_store: StoreProcess, proxy: StoreProxy) -> None:
    """Every answer of the store comes late: the journal lags, the requests do not, and nothing is lost."""
    first = TieredEngine(tmp_path, proxy.url, big()).loaded()
    proxy.delay = 0.2
    lagged = False
    for prompt in [PROMPT, *OTHERS]:
        ask(first, prompt)
        first.harness.engine.persist()
        first.wait_until(lambda: not first.harness.engine.idle())
        lagged = lagged or first.disk.journal_stats().num_pending > 0
    assert lagged, "the store was slow at all"
    assert first.disk.journal_stats().num_failures == 0
    first.settle()
    first.die()
    with TieredEngine(tmp_path, proxy.url, big("two")) as second:
        assert ask(second, [200, *PROMPT]) == 0  # served while the index is still on its way
        second.loaded()
        assert ask(second, PROMPT) == 40
        assert [ask(second, prompt) for prompt in OTHERS] == [30] * 4


def test_a_failover_to_an_empty_store_gives_no_failure_and_the_index_is_written_again(
    tmp_path: Path, own_store: StoreProcess, proxy: StoreProxy
) -> None:
    first = TieredEngine(tmp_path, proxy.url, big()).loaded()
    ask(first, PROMPT)
    persist(first)
    other = StoreProcess(tmp_path / "other")
    try:
        proxy.retarget(other.url)
        ask(first, OTHERS[0])
        persist(first)
        first.wait_until(lambda: first.disk.journal_stats().num_resyncs == 1)
        first.settle()
        first.die()
        own_store.kill()
        with TieredEngine(tmp_path, proxy.url, big("two")).loaded() as second:
            assert ask(second, PROMPT) == 40
            assert ask(second, OTHERS[0]) == 30
    finally:
        other.close()


def test_a_store_that_only_reads_gives_no_failure_and_is_told_when_it_is_promoted(
    tmp_path: Path, own_store: StoreProcess
) -> None:
    """In the middle of a failover a replica answers, and refuses every write."""
    first = TieredEngine(tmp_path, own_store.url, big()).loaded()
    with own_store.client() as client:
        client.replicaof("127.0.0.1", "1")  # nobody is there
    ask(first, PROMPT)
    first.harness.engine.persist()
    first.wait_until(lambda: first.disk.journal_stats().state.value == "away")
    assert ask(first, PROMPT) == 40
    with own_store.client() as client:
        client.replicaof("NO", "ONE")
    first.settle()
    first.die()
    with TieredEngine(tmp_path, own_store.url, big("two")).loaded() as second:
        assert ask(second, PROMPT) == 40


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


def test_prompts_that_are_never_asked_again_fill_nothing_beyond_its_bound(tmp_path: Path, store: StoreProcess) -> None:
    """dynamo#4429, production-stack#711: the index grew until the host ran out of memory."""
    options = TieredOptions(num_blocks=16, host_slots=12, disk_slots=24, write_through_hits=1)
    with TieredEngine(tmp_path, store.url, options).loaded() as engine:
        sizes: list[tuple[int, ...]] = []
        for n in range(240):
            prompt = [n % 250, n // 250, *range(14)]
            engine.harness.submit(prompt, 1, f"user {n:011}".encode(), document=f"d{n}", tenant=f"t{n % 7}")
            engine.harness.run()
            engine.settle()
            directory = engine.disk.directory
            assert directory is not None
            sizes.append((len(engine.tiers.host), len(directory), len(directory.names), len(engine.tiers.host.names)))
        assert max(size[0] for size in sizes) <= 12
        assert max(size[1] for size in sizes) <= 24
        assert max(max(size[2:]) for size in sizes) <= 3 * 24  # scope, owner and documents of a block
        assert max(sizes[:120]) >= max(sizes[120:]), "what the first half needed is enough for the second"
        assert engine.disk.directory is not None
        assert engine.disk.directory.num_evicted > 200
        engine.harness.check()


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
