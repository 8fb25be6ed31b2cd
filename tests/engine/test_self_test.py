"""production-stack#1045: never a hit, silently. An engine proves one before it serves."""

from __future__ import annotations

import pytest
import torch

from engine.batch import SchedulerOutput, StepResult, TokenLogprobs
from engine.errors import ModelLoadError
from engine.prefix_index import PrefixIndex, PrefixMatch
from engine.scoped_tokens import ScopedTokens
from engine.self_test import bits_are_guaranteed, prove_reuse
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


def spoil_cached_steps(harness: Harness, lead: float | None = None) -> None:
    """Steps of the warm run draw another token, of which the logits say that it is `lead` from the right one."""
    original = harness.runner.launch

    def spoiled(output: SchedulerOutput) -> FakeStep:
        step = original(output)
        if step.result is None:
            return step
        drawn, logprobs = list(step.result.token_ids), dict(step.result.logprobs)
        for index, token in enumerate(drawn):
            if token is None:
                continue
            other = (token + 1) % 255
            if lead is not None:
                logprobs[index] = TokenLogprobs(-1.0, ((token, -1.0), (other, -1.0 - lead), (7, -9.0)))
            if output.sequences[0].num_computed not in (0, 9):
                drawn[index] = other
                if lead is not None:
                    logprobs[index] = TokenLogprobs(-1.0, ((other, -1.0), (token, -1.0 - lead), (7, -9.0)))
        step.result = StepResult(drawn, logprobs=logprobs)
        return step

    harness.runner.launch = spoiled


def test_a_cache_that_changes_the_answer_is_noticed() -> None:
    harness = Harness()
    spoil_cached_steps(harness)
    with pytest.raises(ModelLoadError, match="answered"):
        prove_reuse(harness.engine, caching=True)


def test_a_near_tie_may_go_the_other_way_where_bits_are_not_guaranteed() -> None:
    """On a GPU a prompt that is found is computed by other kernels: an engine refused to start for a tie's low bits."""
    harness = Harness()
    spoil_cached_steps(harness, lead=0.03)
    prove_reuse(harness.engine, caching=True, tolerance=0.05)


@pytest.mark.parametrize(
    ("lead", "tolerance"),
    [(0.03, 0.0), (0.08, 0.05), (None, 0.05)],
    ids=["bits are guaranteed", "more than rounding explains", "nothing is known of its logits"],
)
def test_no_other_difference_passes(lead: float | None, tolerance: float) -> None:
    harness = Harness()
    spoil_cached_steps(harness, lead)
    with pytest.raises(ModelLoadError, match="answered"):
        prove_reuse(harness.engine, caching=True, tolerance=tolerance)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "amx", "expected"),
    [
        ("cpu", torch.bfloat16, "AVX512", False, True),
        ("cpu", torch.float32, "AVX512", False, True),
        ("cpu", torch.float16, "AVX512", False, False),
        ("cpu", torch.bfloat16, "AVX2", False, False),
        ("cpu", torch.bfloat16, "AVX512", True, False),
        ("cuda", torch.bfloat16, "AVX512", False, False),
    ],
)
def test_bits_are_guaranteed_where_that_was_established(
    device: str, dtype: torch.dtype, capability: str, amx: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert bits_are_guaranteed(torch.device(device), dtype) == expected
