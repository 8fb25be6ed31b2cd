"""Faults that users of such systems reported in public, on the block manager and the index, and the right behaviour.

Each docstring names the report (repository#thread). What needs HTTP is in test_over_http.py.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable

import pytest

from engine.block_pool import BlockPool
from engine.errors import ContextLengthExceededError, InvariantError
from engine.prefix_index import PrefixIndex, PrefixMatch
from engine.scoped_tokens import ScopedTokens
from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_A, VOCAB, Harness


def expect(prompt: list[int], count: int) -> list[int]:
    return expected_output(prompt, count, VOCAB - 1)


def test_the_same_block_listed_twice_in_one_free() -> None:
    """vllm#42571: the free count grew by two; later one block had two owners."""
    pool = BlockPool(8)
    ids = pool.allocate(3)
    with pytest.raises(InvariantError):
        pool.release([*ids, ids[0]])
    pool.check_integrity()
    assert sorted(pool.allocate(8)) == list(range(8))


@pytest.mark.parametrize("requests", [2, 5, 8])
def test_concurrent_identical_prompts_in_a_tiny_pool_with_freed_blocks_poisoned(requests: int) -> None:
    """mini-sglang#142, #149: duplicates were freed while a block table still pointed to them."""
    prompt = list(range(15))
    # Started in one step, they are all admitted before the first has indexed anything only if none waits for it;
    # so half of them arrive while the first is in the middle of its prompt.
    harness = Harness(num_blocks=10, block_size=4, token_budget=16, chunk=8, max_num_seqs=requests)
    names = [harness.submit(prompt, max_tokens=9) for _ in range(requests // 2)]
    harness.step()
    names += [harness.submit(prompt, max_tokens=9) for _ in range(requests - len(names))]
    while harness.engine.has_work():
        harness.step()
        harness.check()
    assert [harness.tokens_of(name) for name in names] == [expect(prompt, 9)] * requests


def test_a_reused_block_is_not_found_under_its_old_prompt() -> None:
    """nano-vllm#163: fill, evict, ask the old prompt again: a miss, and the right text."""
    harness = Harness(num_blocks=6, block_size=4)
    old = list(range(16))
    harness.generate(old, 1)
    harness.generate(list(range(100, 122)), 1)
    name = harness.submit(old, 3)
    harness.run()
    assert harness.accounts[name].num_cached_tokens == 0
    assert harness.tokens_of(name) == expect(old, 3)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_prompt_of_exactly_whole_blocks_cold_warm_and_after_preemption(blocks: int) -> None:
    """nano-vllm#144, #211, #233: zero query tokens and a crash; a hit after preemption went out of range."""
    prompt = list(range(200, 200 + 4 * blocks))
    harness = Harness(num_blocks=4 * blocks + 2, block_size=4, token_budget=64, chunk=32)
    assert harness.generate(prompt, 5) == expect(prompt, 5)
    assert harness.generate(prompt, 5) == expect(prompt, 5)
    other = list(range(4 * blocks))
    harness.submit(other, 8 * blocks + 4, name="older")
    harness.submit(prompt, 8 * blocks + 4, name="preempted")
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    assert harness.tokens_of("preempted") == expect(prompt, 8 * blocks + 4)
    assert harness.tokens_of("older") == expect(other, 8 * blocks + 4)


def _calls(action: Callable[[], object]) -> int:
    """Function calls that an action makes, in Python and in C: a cost that no machine's noise touches."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def _cost_with_others(others: int) -> dict[str, int]:
    """What one request costs beside `others` cached ones, in a pool to match."""
    index, pool = PrefixIndex(4), BlockPool(others * 2 + 64)

    def insert(sequence: ScopedTokens, blocks: int) -> None:
        match = index.match_prefix(sequence, len(sequence))
        node = index.lock(match)
        fresh = pool.allocate(blocks)
        done = index.insert_prefix(node, sequence, 0, index.chain_keys(node.last_key, sequence, 0, blocks), fresh)
        pool.mark_indexed(fresh)
        index.unlock(done.node)
        pool.release(fresh)

    for number in range(others):
        insert(ScopedTokens.of([number, 7, 7, 7, 8, 8, 8, 8], SCOPE_A, 4), 2)
    prompt = ScopedTokens.of([9999, *range(31)], SCOPE_A, 4)
    costs = {"insert": _calls(lambda: insert(prompt, 8))}
    costs["match"] = _calls(lambda: index.match_prefix(prompt, 32))
    match = index.match_prefix(prompt, 32)
    costs["hit"] = _calls(lambda: (index.lock(match), pool.acquire(match.block_ids)))
    costs["free"] = _calls(lambda: (index.unlock(match.node), pool.release(match.block_ids)))
    costs["evict"] = _calls(lambda: pool.evict(index.evict(2, "x")))
    return costs


def test_a_hit_an_insert_a_free_and_an_eviction_cost_the_same_in_a_pool_of_any_size() -> None:
    """nano-vllm, pool of 65k: a hit cost time in proportion to the pool."""
    small, large = _cost_with_others(20), _cost_with_others(20_000)
    # A thousand times more of everything; a neighbour to compare with, more or less, is all that may differ.
    assert all(abs(large[name] - small[name]) <= 4 for name in small), (small, large)


def test_random_prompts_read_no_hits_under_preemption_too() -> None:
    """vllm#25780, #43736: recomputation counted as hits: 30% "hits" on random prompts."""
    rng = random.Random(11)
    harness = Harness(num_blocks=20, block_size=4, token_budget=64, chunk=16)
    # A first token of its own keeps even one-token coincidences out.
    names = [harness.submit([n, *rng.choices(range(100, 250), k=12)], max_tokens=20) for n in range(20)]
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens == 0
    assert all(harness.accounts[name].num_cached_tokens == 0 for name in names)
    assert stats.num_prompt_tokens == 20 * 13


def test_cached_tokens_stay_below_the_prompt_whatever_happens() -> None:
    """sglang#11900: cached tokens above prompt tokens after a retract."""
    harness = Harness(num_blocks=12, block_size=4, token_budget=32, chunk=8)
    rng = random.Random(5)
    for _ in range(60):
        harness.submit([1, 2, 3, 4, 5, 6, 7, 8, *rng.choices(range(3), k=rng.randrange(1, 8))], rng.randrange(1, 18))
        harness.step()
    harness.run()
    assert harness.engine.stats().num_preemptions > 0
    assert len(harness.accounts) == 60
    for account in harness.accounts.values():
        assert 0 <= account.num_cached_tokens < account.num_prompt_tokens


def test_a_burst_of_one_prompt_is_prefilled_once() -> None:
    """vllm#9643."""
    harness = Harness(num_blocks=256, block_size=4, token_budget=256, chunk=64, max_num_seqs=16)
    for _ in range(16):
        harness.submit(list(range(120)), max_tokens=1)
    harness.run()
    assert harness.runner.num_computed_tokens <= 120 + 15


def test_a_burst_is_looked_up_a_few_times_a_request_not_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The followers of a long prompt were looked up again after each of its chunks, eight for each admission."""
    harness = Harness(num_blocks=512, block_size=4, token_budget=64, chunk=16, max_num_seqs=16)
    lookups = 0
    original = PrefixIndex.match_prefix

    def counted(index: PrefixIndex, sequence: ScopedTokens, limit: int) -> PrefixMatch:
        nonlocal lookups
        lookups += 1
        return original(index, sequence, limit)

    monkeypatch.setattr(PrefixIndex, "match_prefix", counted)
    for _ in range(100):
        harness.submit(list(range(200)), max_tokens=1)
    harness.run()
    assert harness.runner.num_computed_tokens <= 200 + 99
    assert lookups < 100 * 12


def test_the_oldest_request_always_gets_on_and_everything_finishes() -> None:
    """vllm-ascend#16315: a preemption loop with no progress."""
    harness = Harness(num_blocks=9, block_size=4, token_budget=16, chunk=16, max_num_seqs=8)
    prompts = {harness.submit([n, n + 1, n + 2], max_tokens=30): [n, n + 1, n + 2] for n in range(0, 80, 10)}
    while harness.engine.has_work():
        oldest = min(harness.engine.scheduler.running + harness.engine.scheduler.waiting, key=lambda r: r.arrival)
        before = oldest.num_tokens, oldest.num_computed_tokens
        harness.step()
        assert (oldest.num_tokens, oldest.num_computed_tokens) > before or oldest.request_id in harness.finished
    for name, prompt in prompts.items():
        assert harness.tokens_of(name) == expect(prompt, 30)


def test_a_scheduler_that_stalls_is_reported_instead_of_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog to the above: a step without anything to compute while somebody waits is a broken invariant."""
    harness = Harness()
    monkeypatch.setattr("engine.kv_cache_manager.KVCacheManager.can_admit", lambda *args, **options: False)
    name = harness.submit([1, 2, 3])
    harness.run(max_steps=10)
    assert harness.failures[name].code == "engine_step_failed"
    assert harness.engine.stats().num_integrity_failures == 3


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    """mini-sglang: dropped with a log line. ollama#2208: silently truncated."""
    harness = Harness(num_blocks=8, block_size=4)
    with pytest.raises(ContextLengthExceededError, match=r"40 tokens.*32") as caught:
        harness.submit(list(range(40)))
    assert caught.value.code == "context_length_exceeded"


def test_a_drift_on_an_idle_engine_is_repaired_and_it_lives_on() -> None:
    """sglang#35270, #6888: accounting off by some pages ended a healthy idle server."""
    harness = Harness()
    prompt = list(range(20))
    harness.generate(prompt)
    harness.manager.pool.acquire(array("i", [0]))
    assert not harness.engine.check_integrity()
    assert harness.engine.check_integrity()
    assert harness.generate(prompt) == expect(prompt, 4)
