"""After a restart, what was used last goes from disk through host memory back to the device before it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from engine.batch import SchedulerOutput
from engine.erasure import Selection
from engine.in_flight import PendingStep
from engine.protocol import Erase, TenantPolicy, pack_tokens
from tests.engine.harness import SCOPE_A, SCOPE_B, Harness
from tests.engine.tiers.store_process import StoreProcess
from tests.engine.tiers.test_restart import PROMPT, ask, big, expect
from tests.engine.tiers.tiered_harness import TieredEngine

pytestmark = pytest.mark.redis

Restart = Callable[[], TieredEngine]


@pytest.fixture
def first(tmp_path: Path, store: StoreProcess) -> TieredEngine:
    return TieredEngine(tmp_path, store.url, big()).loaded()


@pytest.fixture(params=[False, True], ids=["in-step", "ahead"])
def restart(tmp_path: Path, store: StoreProcess, first: TieredEngine, request: pytest.FixtureRequest) -> Restart:
    """Ends the first life, and begins a second one that has not restored anything yet."""

    def begin() -> TieredEngine:
        first.harness.engine.close()
        options = big("two")
        options.preload, options.runs_ahead = True, bool(request.param)
        return TieredEngine(tmp_path, store.url, options)

    return begin


def restored(engine: TieredEngine) -> TieredEngine:
    assert engine.harness.engine.is_restoring
    engine.wait_until(lambda: not engine.harness.engine.is_restoring)
    engine.harness.check()
    return engine


def cached_by_tier(harness: Harness, prompt: list[int], scope: bytes = SCOPE_A) -> tuple[int, int, int]:
    name = harness.submit(prompt, 3, scope)
    harness.run()
    assert harness.tokens_of(name) == expect(prompt, 3)
    harness.check()
    account = harness.accounts[name]
    return account.device, account.host, account.disk


def test_the_first_request_finds_everything_on_the_device(first: TieredEngine, restart: Restart) -> None:
    ask(first, PROMPT)
    with restart() as second:
        restored(second)
        assert second.harness.engine.stats().num_active_blocks == 0
        assert cached_by_tier(second.harness, PROMPT) == (40, 0, 0)


def test_i5_what_comes_back_is_found_by_its_own_tenant_only(first: TieredEngine, restart: Restart) -> None:
    ask(first, PROMPT)
    with restart() as second:
        restored(second)
        assert cached_by_tier(second.harness, PROMPT, SCOPE_B) == (0, 0, 0)
        assert cached_by_tier(second.harness, PROMPT, SCOPE_A) == (40, 0, 0)


def test_half_of_the_device_stays_free_and_what_was_used_last_is_evicted_last(
    first: TieredEngine, restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(int(time.time()))
    monkeypatch.setattr("engine.tiers.disk_tier.time.time", lambda: next(clock))  # last use is kept in seconds
    prompts = [[n, *range(40)] for n in range(5)]  # ten blocks each
    for prompt in prompts:
        ask(first, prompt)
    with restart() as second:
        restored(second)
        manager = second.harness.engine.scheduler.manager
        assert manager.pool.num_cached == 30
        manager.evict(20)
        found = [cached_by_tier(second.harness, prompt)[0] for prompt in prompts]
        assert found == [0, 0, 0, 0, 40]


def test_what_nobody_asked_for_is_not_used_by_coming_back(
    first: TieredEngine, restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each restart reversed who goes first, and nothing that it brings back was ever too old."""
    clock = count(int(time.time()))
    monkeypatch.setattr("engine.tiers.disk_tier.time.time", lambda: next(clock))
    prompts = [[n, *range(40)] for n in range(3)]
    for prompt in prompts:
        ask(first, prompt)
    with restart() as second:
        restored(second)
        assert last_uses(second) == last_uses(first)
        second.tiers.host.evict(20, "x")
        left = [second.tiers.host.tokens(slot) for slot in second.tiers.host.ready_slots()]
        assert pack_tokens([2, 0, 1, 2]) in left
        assert not {pack_tokens([0, 0, 1, 2]), pack_tokens([1, 0, 1, 2])} & set(left)


def last_uses(engine: TieredEngine) -> dict[bytes, tuple[int, int]]:
    directory = engine.disk.directory
    assert directory is not None
    return {directory.key(slot): (directory.last_used[slot], directory.hits(slot)) for slot in directory.ready_slots()}


@pytest.mark.parametrize("known", [False, True], ids=["asked-later", "asked-before"])
def test_a_quota_holds_for_what_came_back(first: TieredEngine, restart: Restart, known: bool) -> None:
    """Above it nothing stays on the device: not what came back before the quota was known, nor what comes after."""
    ask(first, PROMPT)
    policy = TenantPolicy(kv_quota_tokens=12)
    with restart() as second:
        harness = second.harness
        if known:
            second.wait_until(lambda: second.disk.directory is not None)
            harness.submit([200], 1, policy=policy)
            harness.run()
        restored(second)
        if not known:
            assert harness.manager.counts().cached == 10
            harness.submit([200], 1, policy=policy)
            harness.run()
        assert harness.manager.counts().cached == 3
        assert cached_by_tier(harness, PROMPT) == (12, 28, 0)


def test_erasing_a_document_reaches_what_came_back_of_it(first: TieredEngine, restart: Restart) -> None:
    first.harness.submit(PROMPT, 3, public=9, document="d1")
    first.harness.run()
    with restart() as second:
        restored(second)
        done = second.harness.engine.erase(Erase(erase_id="e", owner="t", document_ids=("d1",)))
        assert done.num_by_tier["device"] > 0
        index = second.harness.engine.scheduler.manager.index
        assert not list(index.document_runs(Selection(document_ids=frozenset({"d1"}))))
        second.harness.check()


def test_what_is_erased_before_its_turn_does_not_come_back(first: TieredEngine, restart: Restart) -> None:
    ask(first, PROMPT)
    with restart() as second:
        second.wait_until(lambda: len(second.tiers.host) == 10)
        second.harness.engine.erase(Erase(erase_id="e", owner="t"))
        second.wait_until(lambda: not second.harness.engine.is_restoring)
        assert cached_by_tier(second.harness, PROMPT) == (0, 0, 0)


def test_a_device_that_fails_leaves_the_path_where_it_is(
    first: TieredEngine, restart: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(first, PROMPT)
    with restart() as second:
        launch = second.harness.runner.launch

        def fail(output: SchedulerOutput) -> PendingStep:
            if output.fetches:
                raise RuntimeError("the device is gone")
            return launch(output)

        with monkeypatch.context() as patched:
            patched.setattr(second.harness.runner, "launch", fail)
            restored(second)
        assert second.harness.engine.scheduler.manager.pool.num_free == 64
        assert cached_by_tier(second.harness, PROMPT) == (0, 40, 0)


def test_work_that_comes_meanwhile_goes_first(first: TieredEngine, restart: Restart) -> None:
    ask(first, PROMPT)
    with restart() as second:
        second.wait_until(lambda: second.disk.directory is not None)
        assert cached_by_tier(second.harness, [77, *PROMPT]) == (0, 0, 0)
        second.wait_until(lambda: not second.harness.engine.is_restoring)
        assert sum(cached_by_tier(second.harness, PROMPT)) == 40
