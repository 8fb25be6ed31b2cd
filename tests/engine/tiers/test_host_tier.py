"""The engine over a host tier: what leaves the device comes back, and is what it was."""

from __future__ import annotations

import random

from engine.tiers.fetch_gate import FetchGate
from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_A, SCOPE_B, VOCAB, Harness
from tests.engine.tiers.tiered_harness import host_only


def expect(prompt: list[int], count: int) -> list[int]:
    return expected_output(prompt, count, VOCAB - 1)


def small(host_slots: int = 32, num_blocks: int = 8) -> Harness:
    return Harness(num_blocks=num_blocks, block_size=4, tiers=host_only(host_slots))


def test_an_evicted_prompt_comes_back_from_host_memory_and_says_so() -> None:
    harness = small()
    harness.generate(list(range(20)), 1)
    harness.generate(list(range(100, 130)), 1)
    before = harness.runner.num_computed_tokens
    name = harness.submit(list(range(20)), 2)
    harness.run()
    account = harness.accounts[name]
    assert account.host == 19
    assert account.evicted == 0
    assert account.num_prompt_tokens == 20
    assert harness.runner.num_computed_tokens - before == 20 - account.num_cached_tokens + 1
    assert harness.tokens_of(name) == expect(list(range(20)), 2)
    harness.check()


def test_a_prefix_that_is_partly_on_the_device_goes_on_in_host_memory() -> None:
    harness = small()
    prompt = list(range(24))
    harness.generate(prompt, 1)
    harness.generate(list(range(100, 116)), 1)  # takes the tail only
    name = harness.submit([*prompt, 50, 51], 3)
    harness.run()
    account = harness.accounts[name]
    assert account.device > 0
    assert account.host > 0
    assert account.num_cached_tokens == 24
    assert harness.tokens_of(name) == expect([*prompt, 50, 51], 3)


def test_a_prompt_that_parts_inside_a_block_below_shares_its_first_tokens() -> None:
    """LMCache#4667: a block's worth of reuse was lost at every seam that does not fall between two blocks."""
    harness = small()
    prompt = list(range(20))
    harness.generate(prompt, 1)
    harness.generate(list(range(100, 130)), 1)
    other = [*prompt[:14], 70, 71, 72, 73]  # parts from it in the fourth block, after two tokens
    name = harness.submit(other, 3)
    harness.run()
    account = harness.accounts[name]
    assert (account.device, account.host, account.num_prompt_tokens) == (0, 14, 18)
    assert harness.tokens_of(name) == expect(other, 3)
    harness.check()
    again = harness.submit(prompt, 3)  # what the other block holds has not been harmed
    harness.run()
    assert harness.tokens_of(again) == expect(prompt, 3)
    harness.check()


def test_the_last_tokens_of_a_prompt_are_shared_below_too_but_never_all_of_it() -> None:
    harness = small()
    prompt = list(range(20))
    harness.generate(prompt, 1)
    harness.generate(list(range(100, 130)), 1)
    for length in (18, 19, 20):
        name = harness.submit(prompt[:length], 2)
        harness.run()
        assert harness.accounts[name].num_cached_tokens == length - 1
        assert harness.tokens_of(name) == expect(prompt[:length], 2)
        harness.generate(list(range(100, 130)), 1)
    harness.check()


def test_i5_what_is_shared_inside_a_block_below_is_of_the_own_scope_only() -> None:
    harness = small()
    prompt = list(range(20))
    harness.generate(prompt, 1, SCOPE_A, public=8)
    harness.generate(list(range(100, 130)), 1, SCOPE_A)
    other = [*prompt[:10], 70, 71, 72, 73]
    cached: list[int] = []
    for scope in (SCOPE_B, SCOPE_A):
        name = harness.submit(other, 2, scope, public=8)
        harness.run()
        cached.append(harness.accounts[name].num_cached_tokens)
        assert harness.tokens_of(name) == expect(other, 2)
    assert cached == [8, 10]


def test_i5_host_memory_of_one_tenant_is_not_read_by_another() -> None:
    """sglang#26747: the lower tier's key had only tokens. Paired with the owner's own hit."""
    harness = small()
    prompt = list(range(20))
    harness.generate(prompt, 1, SCOPE_A)
    harness.generate(list(range(100, 130)), 1, SCOPE_A)
    foreign = harness.submit(prompt, 2, SCOPE_B)
    harness.run()
    harness.generate(list(range(100, 130)), 1, SCOPE_A)
    own = harness.submit(prompt, 2, SCOPE_A)
    harness.run()
    assert harness.accounts[foreign].num_cached_tokens == 0
    assert harness.accounts[own].host > 0
    assert harness.tokens_of(foreign) == harness.tokens_of(own) == expect(prompt, 2)


def test_a_failed_step_leaves_no_block_below_that_was_never_copied() -> None:
    harness = small()
    prompt = list(range(20))
    harness.generate(prompt, 1)
    harness.submit(list(range(100, 130)), 1, name="evicts")
    harness.runner.fail_next = RuntimeError("before the copies")
    harness.run()
    assert harness.failures["evicts"].code == "engine_step_failed"
    harness.check()
    for tokens in (prompt, list(range(100, 130)), prompt):
        assert harness.generate(tokens, 2) == expect(tokens, 2)
    harness.check()


def test_logits_that_are_no_numbers_come_after_the_copies() -> None:
    harness = small()
    prompt = list(range(20))
    harness.generate(prompt, 1)
    harness.submit(list(range(100, 128)), 1, name="evicts")  # in mid-prefill, so its row is not sampled
    harness.submit([200, 201], 3, name="beside")
    harness.runner.lose_rows = frozenset({1})
    harness.run()
    assert list(harness.failures) == ["beside"]
    assert harness.tokens_of("evicts") == expect(list(range(100, 128)), 1)
    assert harness.generate(prompt, 2) == expect(prompt, 2)
    harness.check()


def test_a_preempted_request_gets_its_own_blocks_back_by_copying() -> None:
    """Swap: the part of a block that nobody else can use would have to be computed again."""
    harness = Harness(num_blocks=12, block_size=4, token_budget=64, chunk=32, tiers=host_only(32))
    rng = random.Random(3)
    lengths = (8, 9, 10, 11, 9, 10)  # so that they do not all fill their blocks in the same step
    prompts = {harness.submit(p, max_tokens=12): p for p in ([rng.randrange(255) for _ in range(n)] for n in lengths)}
    while harness.engine.has_work():
        harness.step()
        harness.check()
    assert harness.engine.stats().num_preemptions > 0
    assert harness.engine.tiers is not None
    counters = harness.engine.tiers.counters
    assert counters.num_swapped_in > 0
    assert harness.engine.tiers.host.counts().private == 0
    for name, prompt in prompts.items():
        assert harness.tokens_of(name) == expect(prompt, 12)
        assert harness.accounts[name].num_cached_tokens == 0


def test_a_preempted_request_that_may_not_be_cached_is_swapped_and_leaves_nothing() -> None:
    """sglang#38069: a request that opted out still left entries. Swapped blocks are its own, and go with it."""
    harness = Harness(num_blocks=12, block_size=4, token_budget=64, chunk=32, tiers=host_only(64))
    prompts = {harness.submit([n] * (8 + n), max_tokens=14, use_cache=False): [n] * (8 + n) for n in range(6)}
    harness.run()
    assert harness.engine.tiers is not None
    assert harness.engine.tiers.counters.num_swapped_in > 0
    assert len(harness.engine.tiers.host) == 0
    assert harness.engine.tiers.host.counts().private == 0
    for name, prompt in prompts.items():
        assert harness.tokens_of(name) == expect(prompt, 14)


def test_an_abort_while_swapped_out_gives_the_slots_back() -> None:
    harness = Harness(num_blocks=12, block_size=4, token_budget=64, chunk=32, tiers=host_only(32))
    names = [harness.submit([n] * (8 + n), max_tokens=14, use_cache=False) for n in range(6)]
    assert harness.engine.tiers is not None
    while harness.engine.has_work() and not harness.engine.tiers.host.counts().private:
        harness.step()
    assert harness.engine.tiers.host.counts().private
    for name in names:
        if name not in harness.finished:
            harness.engine.abort_request(name)
    harness.run()
    harness.engine.idle()
    assert harness.engine.tiers.host.counts().private == 0
    assert harness.manager.counts().active == 0


def test_fetching_that_is_slower_than_computing_is_not_done() -> None:
    """LMCache#914: fetching took 20 s where recomputing took 8."""
    harness = small()
    assert harness.engine.tiers is not None
    gate = harness.engine.tiers.gate = FetchGate(64)
    gate.prefill.observe(1000, 0, 1.0)
    gate.bandwidth["host"].observe(64, 1.0)  # a block a second, where a second computes 250
    prompt = list(range(20))
    harness.generate(prompt, 1)
    harness.generate(list(range(100, 130)), 1)
    name = harness.submit(prompt, 2)
    harness.run()
    assert harness.accounts[name].host == 0
    assert harness.accounts[name].num_prompt_tokens == 20
    assert harness.tokens_of(name) == expect(prompt, 2)
    assert gate.num_refused["host"] > 0


def test_what_a_queued_request_needs_is_not_evicted_for_others() -> None:
    """Look-ahead. Without it the least recently used prefix goes, although somebody waits for it."""
    harness = Harness(num_blocks=14, block_size=4, max_num_seqs=1, token_budget=64, chunk=64)
    wanted, other = list(range(16)), list(range(100, 116))
    harness.generate(wanted, 1)
    harness.generate(other, 1)
    harness.submit(list(range(200, 230)), 1, name="presses")
    harness.submit(wanted, 1, name="waits")
    harness.run()
    assert harness.accounts["waits"].num_cached_tokens == 15
    name = harness.submit(other, 1)
    harness.run()
    assert harness.accounts[name].num_cached_tokens < 15
    harness.check()


def test_everyone_waiting_for_everything_is_no_deadlock() -> None:
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=1, token_budget=64, chunk=64)
    prompts = [[n] * 14 for n in range(2)]
    for prompt in prompts:
        harness.generate(prompt, 1)
    names = [harness.submit(list(range(100, 126)), 1), *(harness.submit(prompt, 1) for prompt in prompts)]
    harness.run()
    assert set(names) <= set(harness.finished)
    harness.check()
