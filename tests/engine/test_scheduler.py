"""Scheduling and block tables with exact block ids, over the fake device."""

from __future__ import annotations

import pytest

from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerLimits
from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_B, Harness


def tables(harness: Harness) -> dict[str, list[int]]:
    return {request.request_id: list(request.block_table) for request in harness.engine.scheduler.running}


def kv_slots(request: Request) -> int:
    return request.num_computed_tokens


def test_the_paged_attention_paper_example_block_for_block() -> None:
    """100 blocks of 10 slots, prompts of 8, 5, 12 and 9 tokens, then decode step by step."""
    harness = Harness(num_blocks=100, block_size=10, token_budget=64, chunk=64)
    for name, length in (("A", 8), ("B", 5), ("C", 12), ("D", 9)):
        harness.submit([ord(name)] * length, max_tokens=20, name=name)
    harness.step()
    assert tables(harness) == {"A": [0], "B": [1], "C": [2, 3], "D": [4]}
    assert harness.manager.pool.free_list == list(range(5, 100))
    harness.step()
    assert tables(harness) == {"A": [0], "B": [1], "C": [2, 3], "D": [4]}
    harness.step()
    assert tables(harness) == {"A": [0], "B": [1], "C": [2, 3], "D": [4, 5]}
    harness.step()
    assert tables(harness) == {"A": [0, 6], "B": [1], "C": [2, 3], "D": [4, 5]}
    for _ in range(12):
        harness.step()
        for request in harness.engine.scheduler.running:
            waste = len(request.block_table) * 10 - request.num_computed_tokens
            assert 0 <= waste <= 9
    harness.check()


def test_a_long_prompt_is_cut_at_absolute_multiples_of_the_chunk_whatever_was_cached() -> None:
    """The cached part ends at token 20 of 70; the cuts are at 32 and 64 all the same."""
    harness = Harness(num_blocks=64, block_size=4, token_budget=64, chunk=32)
    harness.generate(list(range(20)), max_tokens=1)
    harness.runner.outputs.clear()
    harness.generate([*range(20), *range(100, 150)], max_tokens=1)
    cuts = [(s.num_computed, s.end) for output in harness.runner.outputs for s in output.sequences]
    assert cuts == [(20, 32), (32, 64), (64, 70)]


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    harness = Harness(num_blocks=64, block_size=4, token_budget=17, chunk=16)
    harness.submit([1, 2, 3], max_tokens=30, name="stream")
    harness.step()
    harness.submit(list(range(100, 180)), max_tokens=1, name="long")
    for _ in range(5):
        before = len(harness.tokens_of("stream"))
        harness.step()
        assert len(harness.tokens_of("stream")) == before + 1
    assert "long" in harness.finished


def test_no_step_exceeds_the_token_budget_or_the_sequence_limit() -> None:
    harness = Harness(num_blocks=256, block_size=4, max_num_seqs=3, token_budget=20, chunk=16)
    for number in range(8):
        harness.submit(list(range(number * 20, number * 20 + 18)), max_tokens=6)
    harness.run()
    for output in harness.runner.outputs:
        assert sum(sequence.num_new for sequence in output.sequences) <= 20
        assert len(output.sequences) <= 3
    assert len(harness.finished) == 8


def test_a_burst_of_one_prompt_is_prefilled_once() -> None:
    """vllm#9643: followers wait for the leader; the prompt is computed about once."""
    harness = Harness(num_blocks=256, block_size=4, token_budget=256, chunk=64, max_num_seqs=8)
    prompt = list(range(100))
    names = [harness.submit(prompt, max_tokens=1) for _ in range(8)]
    harness.run()
    assert harness.runner.num_computed_tokens == 100 + 7
    assert [harness.accounts[name].num_cached_tokens for name in names] == [0] + [99] * 7
    assert len({tuple(harness.tokens_of(name)) for name in names}) == 1


def test_a_follower_starts_as_soon_as_the_shared_part_is_there() -> None:
    harness = Harness(num_blocks=256, block_size=4, token_budget=64, chunk=16, max_num_seqs=8)
    harness.submit(list(range(100)), max_tokens=1, name="leader")
    harness.step()
    harness.submit([*range(24), *range(200, 220)], max_tokens=1, name="follower")
    harness.step()
    assert "follower" not in tables(harness)
    harness.step()
    assert "follower" in {**tables(harness), **harness.finished}
    harness.run()
    assert harness.accounts["follower"].num_cached_tokens == 24


def test_a_follower_goes_its_own_way_when_the_leader_is_aborted() -> None:
    harness = Harness(num_blocks=256, block_size=4, token_budget=64, chunk=16)
    harness.submit(list(range(100)), max_tokens=1, name="leader")
    harness.step()
    harness.submit(list(range(100)), max_tokens=2, name="follower")
    harness.step()
    assert harness.engine.abort_request("leader")
    harness.run()
    assert harness.tokens_of("follower") == expected_output(range(100), 2, 255)
    harness.check()


def test_the_request_that_arrived_last_is_preempted_and_waits_at_its_old_place() -> None:
    harness = Harness(num_blocks=8, block_size=4, token_budget=64, chunk=32, max_num_seqs=4)
    prompts = {name: [base, base + 1, base + 2, base + 3, base + 4, base + 5] for name, base in (("a", 0), ("b", 50))}
    for name, prompt in prompts.items():
        harness.submit(prompt, max_tokens=14, name=name)
    harness.submit([90, 91], max_tokens=1, name="c")
    order: list[str] = []
    while harness.engine.has_work():
        harness.step()
        order += [name for name in harness.finished if name not in order]
    assert harness.engine.stats().num_preemptions > 0
    assert order.index("a") < order.index("b")
    for name, prompt in prompts.items():
        assert harness.tokens_of(name) == expected_output(prompt, 14, 255)
    harness.check()


def test_a_quiet_tenants_question_does_not_wait_for_prompts_that_others_have_begun() -> None:
    """Running prompts had the budget before anybody was admitted: a question waited for each of them to its end."""
    harness = Harness(num_blocks=256, block_size=4, token_budget=16, chunk=16, max_num_seqs=1 + 4)
    for number in range(4):
        harness.submit([number, *range(100, 220)], max_tokens=1, tenant="noisy")
    for _ in range(3):
        harness.step()
    harness.submit(list(range(1, 9)), max_tokens=1, name="quiet", scope=SCOPE_B, tenant="quiet")
    harness.step()
    assert "quiet" in harness.finished
    harness.run()
    harness.check()


def test_a_flood_is_preempted_and_not_the_quiet_tenant_that_came_last() -> None:
    """Each request of a quiet tenant arrives behind a flood: as the latest it would be thrown out again and again."""
    harness = Harness(num_blocks=16, block_size=4, token_budget=64, chunk=32, max_num_seqs=8)
    flood = [harness.submit([base, base + 1, base + 2], max_tokens=24, tenant="noisy") for base in (0, 20, 40, 60)]
    harness.step()
    harness.submit([100, 101], max_tokens=20, name="quiet", scope=SCOPE_B, tenant="quiet")
    was_running: list[bool] = []
    while "quiet" not in harness.finished:
        harness.step()
        was_running.append("quiet" in tables(harness) or "quiet" in harness.finished)
    assert harness.engine.stats().num_preemptions > 0
    assert was_running == [True] * 20  # admitted at once, and not interrupted once
    harness.run()
    assert all(
        harness.tokens_of(name) == expected_output([b, b + 1, b + 2], 24, 255)
        for name, b in zip(flood, (0, 20, 40, 60), strict=True)
    )
    harness.check()


def steps_of(harness: Harness, name: str) -> list[tuple[int, int]]:
    """(first, end) of what each step computed of a request."""
    sequences = [s for output in harness.runner.outputs for s in output.sequences]
    return [(s.num_computed, s.end) for s in sequences if s.request_id == name]


def test_idle_work_yields_to_the_first_who_comes_and_goes_on_where_it_was() -> None:
    """Prefilling ahead must not slow anybody's stream, nor keep a block or a place from anybody."""
    harness = Harness(num_blocks=64, block_size=4, token_budget=64, chunk=16, max_num_seqs=1)
    prompt = list(range(100, 180))
    harness.submit(prompt, max_tokens=1, name="ahead", when_idle=True)
    harness.step()
    harness.step()
    assert steps_of(harness, "ahead") == [(0, 16), (16, 32)]
    harness.submit([1, 2, 3], max_tokens=5, name="stream")
    while "stream" not in harness.finished:
        harness.step()
        assert [s.request_id for s in harness.runner.outputs[-1].sequences] == ["stream"]
        harness.check()
    assert harness.engine.stats().num_preemptions == 0
    harness.run()
    assert steps_of(harness, "ahead")[2:] == [(32, 48), (48, 64), (64, 80)]
    assert harness.tokens_of("ahead") == expected_output(prompt, 1, 255)
    assert harness.accounts["ahead"].num_cached_tokens == 0


def test_idle_work_waits_while_anybody_is_here() -> None:
    harness = Harness(num_blocks=64, block_size=4, token_budget=64, chunk=16)
    harness.submit([1, 2, 3], max_tokens=8, name="stream")
    harness.submit(list(range(100, 120)), max_tokens=1, name="ahead", priority=-5, when_idle=True)
    while "stream" not in harness.finished:
        harness.step()
        assert steps_of(harness, "ahead") == []
    harness.run()
    assert steps_of(harness, "ahead") == [(0, 16), (16, 20)]


def test_a_question_does_not_wait_for_the_same_prompt_ahead_of_time() -> None:
    """Who asks for what idle work is computing takes what is there and computes the rest itself."""
    harness = Harness(num_blocks=64, block_size=4, token_budget=64, chunk=16)
    prompt = list(range(100, 180))
    harness.submit(prompt, max_tokens=1, name="ahead", when_idle=True)
    harness.step()
    harness.submit([*prompt, 7], max_tokens=1, name="question")
    harness.run()
    assert harness.accounts["question"].num_cached_tokens == 16
    assert harness.tokens_of("question") == expected_output([*prompt, 7], 1, 255)
    assert sum(end - first for first, end in steps_of(harness, "ahead")) == 16 + 1


def test_a_budget_below_the_chunk_is_refused_because_such_a_prompt_would_never_start() -> None:
    with pytest.raises(ValueError, match="chunk"):
        Scheduler(SchedulerLimits(4, 18, 16), KVCacheManager(4, 4, bytes(16)))
