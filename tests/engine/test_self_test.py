"""production-stack#1045: never a hit, silently. An engine proves one before it serves."""

from __future__ import annotations

import pytest

from engine.batch import SchedulerOutput, StepResult
from engine.errors import ModelLoadError
from engine.prefix_index import PrefixIndex, PrefixMatch
from engine.scoped_tokens import ScopedTokens
from engine.self_test import prove_reuse
from tests.engine.fake_runner import FakeStep
from tests.engine.harness import Harness


@pytest.mark.parametrize("caching", [True, False])
def test_it_passes_and_leaves_an_empty_engine_behind(caching: bool) -> None:
    harness = Harness(caching=caching)
    prove_reuse(harness.engine, caching=caching)
    stats = harness.engine.stats()
    assert (stats.num_free_blocks, stats.num_steps, stats.num_prompt_tokens) == (stats.num_blocks, 0, 0)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(5, 4), (6, 5), (3, 16), (2, 300), (4, 1)])
def test_it_knows_what_can_be_found_whatever_the_sizes(num_blocks: int, block_size: int) -> None:
    """A context that ends inside the second block, and blocks longer than the prompt, were refused."""
    budget = 2 * block_size + 16
    prove_reuse(Harness(num_blocks, block_size, token_budget=budget, chunk=block_size).engine, caching=True)


def test_a_cache_that_never_hits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    empty = harness.manager.index.match_prefix(ScopedTokens.of([1], bytes(16), 4), 0)

    def never(self: PrefixIndex, sequence: ScopedTokens, limit: int) -> PrefixMatch:
        return empty

    monkeypatch.setattr(PrefixIndex, "match_prefix", never)
    with pytest.raises(ModelLoadError, match="0 of 9 tokens were found, not 8"):
        prove_reuse(harness.engine, caching=True)


def test_a_cache_that_changes_the_answer_is_noticed() -> None:
    harness = Harness()
    original = harness.runner.launch

    def spoiled(output: SchedulerOutput) -> FakeStep:
        step = original(output)
        if output.sequences[0].num_computed not in (0, 9) and step.result is not None:
            others = [token if token is None else (token + 1) % 255 for token in step.result.token_ids]
            step.result = StepResult(others)
        return step

    harness.runner.launch = spoiled
    with pytest.raises(ModelLoadError, match="answered"):
        prove_reuse(harness.engine, caching=True)
