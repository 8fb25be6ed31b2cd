"""Parallel samples (`n`) share their prompt's blocks by reference count, and copy the last one where they diverge.

Each sample draws by its own seed and its KV depends on what it drew: a last block that two of them wrote to would
change a text.
"""

from __future__ import annotations

from collections import Counter

import pytest

from engine.errors import InvalidRequestError
from engine.protocol import Erase
from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_A, SCOPE_B, VOCAB, Harness

COUNT = 4  # samples
TOKENS = 7  # of each


def submit(harness: Harness, prompt: list[int], count: int = COUNT, **options: object) -> list[str]:
    names: list[str] = []
    for seed in range(count):
        leader = names[0] if names else ""
        names.append(harness.submit(prompt, TOKENS, seed=seed, sibling_of=leader, **options))  # type: ignore[arg-type]
    return names


def check_texts(harness: Harness, prompt: list[int], names: list[str]) -> None:
    for seed, name in enumerate(names):
        assert harness.tokens_of(name) == expected_output(prompt, TOKENS, VOCAB - 1, seed)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13, 16, 37, 40])
@pytest.mark.parametrize("how", ["cached", "warm", "caching off", "no store"])
def test_the_prompt_is_computed_once_and_every_sample_has_its_own_text(length: int, how: str) -> None:
    """The prompt was computed n times wherever the cache was off, and its last block n times even where it was on."""
    harness = Harness(num_blocks=80, caching=how != "caching off")
    prompt = list(range(length))
    if how == "warm":
        harness.generate(prompt, 1)
    before = harness.runner.num_computed_tokens
    names = submit(harness, prompt, use_cache=how != "no store")
    harness.run()
    check_texts(harness, prompt, names)
    prefilled = harness.runner.num_computed_tokens - before - COUNT * (TOKENS - 1)
    found = min(length // 4 * 4, length - 1) if how == "warm" else 0
    assert prefilled == length - found + COUNT - 1  # one more for each: its logits
    assert harness.manager.counts().active == 0
    harness.check()


def test_full_blocks_are_held_n_times_and_the_last_one_by_each_alone() -> None:
    """Block size 4, ten tokens: two full blocks and a half one."""
    harness = Harness(caching=False)
    names = submit(harness, list(range(10)), 3)
    while len(harness.engine.scheduler.running) < 3:
        harness.step()
    tables = [list(request.block_table) for request in harness.engine.scheduler.running]
    assert [table[:2] for table in tables] == [[0, 1]] * 3
    assert sorted(table[2] for table in tables) == [2, 3, 4]
    pool = harness.manager.pool
    assert [pool.block(block).ref_count for block in range(5)] == [3, 3, 1, 1, 1]
    harness.check()
    harness.run()
    assert len(harness.finished) == len(names)


def test_the_prompt_is_in_every_count_once() -> None:
    """Random prompts with n=4 read as three quarters of hits; the sum of all usage is what the engine counted (I9)."""
    harness = Harness(num_blocks=80)
    names = submit(harness, list(range(30)))
    harness.run()
    stats = harness.engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (30, 0)
    assert stats.num_output_tokens == COUNT * TOKENS
    assert stats.num_requests_finished == COUNT
    assert {harness.accounts[name] for name in names} == {harness.accounts[names[0]]}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("caching", [True, False])
def test_a_leader_that_leaves_at_any_phase_takes_nobody_along(steps: int, caching: bool) -> None:
    harness = Harness(num_blocks=80, chunk=8, caching=caching)
    prompt = list(range(21))
    names = submit(harness, prompt)
    for _ in range(steps):
        harness.step()
        harness.check()
    harness.engine.abort_request(names[0])
    harness.check()
    harness.run()
    for seed, name in enumerate(names[1:], 1):
        assert harness.tokens_of(name) == expected_output(prompt, TOKENS, VOCAB - 1, seed)
    assert harness.manager.counts().active == 0
    # Its first token is out after three chunks: then the prompt has been counted.
    assert harness.engine.stats().num_prompt_tokens == 21 * (1 if steps >= 3 else COUNT - 1)


@pytest.mark.parametrize("steps", range(6))
def test_all_samples_leave_and_every_count_is_where_it_was(steps: int) -> None:
    """I10."""
    harness = Harness(num_blocks=40, chunk=8, caching=False)
    names = submit(harness, list(range(21)))
    for _ in range(steps):
        harness.step()
    for name in names:
        harness.engine.abort_request(name)
    assert harness.manager.counts().free == 40
    assert not harness.engine.has_work()
    assert harness.generate([1, 2]) == expected_output([1, 2], 4, VOCAB - 1)


@pytest.mark.parametrize("caching", [True, False])
def test_samples_that_preempt_each_other_finish_with_the_texts_they_have_alone(caching: bool) -> None:
    """Nine blocks for four samples of five each: shared they just begin, and then run out of room."""
    harness = Harness(num_blocks=9, caching=caching)
    prompt = list(range(10))
    names = submit(harness, prompt)
    while harness.engine.has_work():
        harness.step()
        harness.check()
    check_texts(harness, prompt, names)
    assert harness.engine.stats().num_preemptions > 0
    assert harness.engine.stats().num_prompt_tokens == 10


def test_a_sibling_that_comes_when_its_leader_has_gone_is_a_request_like_any_other() -> None:
    harness = Harness()
    leader = harness.submit(list(range(10)), TOKENS, seed=0)
    harness.run()
    name = harness.submit(list(range(10)), TOKENS, seed=1, sibling_of=leader)
    harness.run()
    assert harness.tokens_of(name) == expected_output(list(range(10)), TOKENS, VOCAB - 1, 1)


@pytest.mark.parametrize(
    "change", [{"prompt": [1, 2, 4]}, {"scope": SCOPE_B}, {"tenant": "u"}, {"document_order": "cache"}]
)
def test_a_sibling_of_another_prompt_scope_or_tenant_is_refused(change: dict[str, object]) -> None:
    """I5: to name another's request must not give its KV."""
    harness = Harness()
    leader = harness.submit([1, 2, 3])
    with pytest.raises(InvalidRequestError) as caught:
        harness.submit(**{"prompt": [1, 2, 3], "scope": SCOPE_A, "sibling_of": leader, **change})
    assert caught.value.param == "sibling_of"


def test_what_is_erased_while_samples_run_is_shared_by_none_that_comes_later() -> None:
    """A block that the index has given up goes when its holders let go; one that is shared without a lock would be
    given to the next owner under a sample that still reads it."""
    harness = Harness(num_blocks=80)
    prompt = list(range(30))
    names = submit(harness, prompt, 2)
    while not harness.accounts:
        harness.step()
    harness.engine.erase(Erase(erase_id="e"))
    harness.check()
    others = [harness.submit(list(range(100 + 10 * i, 130 + 10 * i)), 5) for i in range(4)]
    while harness.engine.has_work():
        harness.step()
        harness.check()
    check_texts(harness, prompt, names)
    assert Counter(harness.finished[name] for name in others) == {"length": 4}
