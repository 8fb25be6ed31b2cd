"""Sampler: filters against a dumb model, the distribution, and draws that no batch, window or preemption changes."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.batch import ScheduledSequence
from engine.protocol import SamplingParams
from engine.sampler import FetchedTokens, Sampler, uniform
from tests.engine.drawn_tokens import sampled

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PLAIN = SamplingParams(max_tokens=8)


def row(
    sampling: SamplingParams, *, seed: int = 0, position: int = 10, num_prompt_tokens: int = 10
) -> ScheduledSequence:
    """A sequence whose next token stands at `position`."""
    return ScheduledSequence(
        request_id=f"r{seed}",
        token_ids=[0] * position,
        num_computed=position - 1,
        num_new=1,
        block_table=array("i", [0]),
        sampling=sampling,
        seed=seed,
        num_prompt_tokens=num_prompt_tokens,
        sample=True,
    )


def counted(tokens: Sequence[int | None]) -> Counter[int]:
    return Counter(token for token in tokens if token is not None)


def draw_many(weights: Sequence[float], sampling: SamplingParams, count: int, *, seed: int = 7) -> Counter[int]:
    logits = torch.tensor(weights, dtype=torch.float32).log().expand(count, -1)
    rows = [row(sampling, seed=seed, position=position) for position in range(10, 10 + count)]
    return counted(sampled(Sampler(), logits, rows, ()))


def chi_square(counts: Counter[int], probabilities: Sequence[float]) -> float:
    total = counts.total()
    return sum((counts[token] - total * p) ** 2 / (total * p) for token, p in enumerate(probabilities) if p > 0)


def dumb_kept(probabilities: Sequence[float], sampling: SamplingParams) -> list[int]:
    """The ids that the filters keep, best first, in plain Python floats; skips inputs at the very edge of a filter."""
    ranked = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    top_k = ranked[: sampling.top_k or len(ranked)]
    goal = sampling.top_p * sum(probabilities[token] for token in top_k)
    nucleus: list[int] = []
    mass = 0.0
    for token in top_k:
        nucleus.append(token)
        mass += probabilities[token]
        assume(abs(mass - goal) > 1e-6 or sampling.top_p == 1.0)
        if mass >= goal:
            break
    threshold = sampling.min_p * probabilities[ranked[0]]
    assume(all(p == probabilities[ranked[0]] or abs(p - threshold) > 1e-6 for p in probabilities))
    return [token for token in nucleus if probabilities[token] >= threshold]


def dumb_sample(weights: Sequence[int], sampling: SamplingParams, seed: int, position: int) -> int:
    scaled = [weight ** (1 / sampling.temperature) for weight in weights]
    probabilities = [weight / sum(scaled) for weight in scaled]
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    kept = dumb_kept(probabilities, sampling) if filtered else list(range(len(weights)))
    goal = uniform(seed, position) * sum(probabilities[token] for token in kept)
    mass = 0.0
    for token in kept:
        mass += probabilities[token]
        assume(abs(mass - goal) > 1e-6)
        if mass > goal:
            return token
    return kept[-1]


params = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 7, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.01, 0.3, 0.51, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.33, 0.7, 1.0]),
)
any_params = params | st.just(GREEDY) | st.just(PLAIN)
seeds = st.integers(0, 2**64 - 1)


@settings(max_examples=400, deadline=None)
@given(
    weights=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    sampling=params,
    seed=seeds,
    window=st.integers(1, 50),
)
def test_every_mixture_of_filters_equals_the_dumb_model(
    weights: list[int], sampling: SamplingParams, seed: int, window: int
) -> None:
    """Temperature, top-k, top-p on what top-k left, then min-p; and no window is too narrow to get it right."""
    expected = dumb_sample(weights, sampling, seed, 10)
    logits = torch.tensor([weights], dtype=torch.float32).log()
    assert sampled(Sampler(window), logits, [row(sampling, seed=seed)], ()) == [expected]


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    vocab_size=st.sampled_from([1, 2, 17, 300, 1001]),
    batch=st.lists(any_params, min_size=1, max_size=9),
)
def test_a_row_draws_the_same_alone_and_in_any_batch(
    data: st.DataObject, vocab_size: int, batch: list[SamplingParams]
) -> None:
    """The neighbours of a row and its place among them must not reach its draw (a shared generator's state would)."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(batch), vocab_size, generator=generator) * data.draw(
        st.sampled_from([0.0, 0.1, 3.0, 30.0])
    )
    rows = [row(sampling, seed=data.draw(seeds), position=11 + i) for i, sampling in enumerate(batch)]
    together = sampled(Sampler(64), logits, rows, ())
    alone = [sampled(Sampler(64), logits[i : i + 1], [rows[i]], ())[0] for i in range(len(rows))]
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sampled(Sampler(64), logits[list(order)], [rows[i] for i in order], ())
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_a_full_size_vocabulary_draws_the_same_at_every_batch_size_window_and_thread_count() -> None:
    """Sums over 256k weights in another order have other low bits: fixed-point weights have not."""
    logits = torch.randn(6, 262_144, generator=torch.Generator().manual_seed(3))
    sampling = [
        PLAIN,
        SamplingParams(max_tokens=8, top_p=0.99),  # flat: the nucleus is wider than any window but the last
        SamplingParams(max_tokens=8, top_k=5000, top_p=0.7),
        SamplingParams(max_tokens=8, top_k=40),
        SamplingParams(max_tokens=8, min_p=0.02, temperature=1.3),
        GREEDY,
    ]
    rows = [row(params, seed=seed) for seed, params in enumerate(sampling)]
    together = sampled(Sampler(), logits, rows, ())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert sampled(Sampler(window=262_144), logits, rows, ()) == together
    finally:
        torch.set_num_threads(threads)
    assert [sampled(Sampler(window=8), logits[i : i + 1], [rows[i]], ())[0] for i in range(6)] == together


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (PLAIN, [0.4, 0.3, 0.2, 0.1]),
        (SamplingParams(max_tokens=8, temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (SamplingParams(max_tokens=8, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(max_tokens=8, top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(max_tokens=8, top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(max_tokens=8, min_p=0.45), [4 / 9, 3 / 9, 2 / 9, 0]),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling: SamplingParams, expected: list[float]) -> None:
    """Filtered probabilities are renormalised: nothing of a dropped token's mass goes to one survivor alone."""
    counts = draw_many([4, 3, 2, 1], sampling, 8000)
    assert set(counts) == {token for token, p in enumerate(expected) if p > 0}
    assert chi_square(counts, expected) < 16.3  # p = 0.001 at three degrees of freedom


def test_seeds_and_positions_give_independent_uniforms() -> None:
    """Neighbouring seeds or positions (n=8 choices of one request) must not draw alike."""
    by_position = Counter(int(uniform(5, position) * 16) for position in range(4000))
    by_seed = Counter(int(uniform(seed, 5) * 16) for seed in range(4000))
    pairs = Counter(int(uniform(s, 9) * 4) * 4 + int(uniform(s + 1, 9) * 4) for s in range(4000))
    for counts in (by_position, by_seed, pairs):
        assert chi_square(counts, [1 / 16] * 16) < 37.7  # p = 0.001 at fifteen degrees of freedom
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert uniform(1, 2) != uniform(2, 1)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """After preemption the same position is computed from another chunk: the draw must come out again."""
    logits = torch.zeros(1, 1000)
    after_preemption = row(PLAIN, seed=3, position=40)
    after_preemption.num_computed, after_preemption.num_new = 0, 40
    first = sampled(Sampler(), logits, [row(PLAIN, seed=3, position=40)], ())
    assert sampled(Sampler(), logits, [after_preemption], ()) == first
    assert sampled(Sampler(), logits, [row(PLAIN, seed=4, position=40)], ()) != first
    assert sampled(Sampler(), logits, [row(PLAIN, seed=3, position=41)], ()) != first


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.bfloat16)
    assert sampled(Sampler(), logits, [row(GREEDY), row(GREEDY)], ()) == [1, 0]


def test_top_k_keeps_exactly_k_of_equal_logits_and_the_lowest_ids() -> None:
    """A threshold test (logit ≥ the k-th) would keep every tie."""
    counts = draw_many([1, 2, 2, 2, 2], SamplingParams(max_tokens=8, top_k=2), 200)
    assert set(counts) == {1, 2}


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
def test_top_p_is_measured_on_what_top_k_left_when_the_window_is_narrower_than_both(window: int) -> None:
    """Half of five equal tokens are three; half of the whole vocabulary of eight would be four."""
    sampling = SamplingParams(max_tokens=8, top_k=5, top_p=0.5)
    rows = [row(sampling, position=10 + i) for i in range(200)]
    assert set(sampled(Sampler(window), torch.zeros(200, 8), rows, ())) == {0, 1, 2}


@pytest.mark.parametrize("sampling", [PLAIN, SamplingParams(max_tokens=8, min_p=1e-9)])
@pytest.mark.parametrize(("extreme", "expected"), [(0.0, 2), (1 - 2.0**-53, 3)])
def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token_with_weight(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, extreme: float, expected: int
) -> None:
    """u = 0 must not hit a masked token in front, u → 1 must not round past the last one."""
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, position: extreme)
    logits = torch.tensor([[-math.inf, -math.inf, 0.5, 0.4, -math.inf]])
    assert sampled(Sampler(), logits, [row(sampling)], ()) == [expected]


@pytest.mark.parametrize("top_p", [0.0, 1e-12, 0.1])
def test_a_tiny_top_p_keeps_the_best_token(top_p: float) -> None:
    assert set(draw_many([1, 2, 3], SamplingParams(max_tokens=8, top_p=top_p), 100)) == {2}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-4])
def test_a_temperature_close_to_zero_is_greedy_but_draws_among_ties(temperature: float) -> None:
    """Dividing by an underflown temperature gave 0/0: NaN in every weight."""
    assert set(draw_many([1, 3, 2, 3], SamplingParams(max_tokens=8, temperature=temperature), 100)) == {1, 3}


@pytest.mark.parametrize("temperature", [1e6, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_not_masked(temperature: float) -> None:
    logits = torch.tensor([[100.0, -math.inf, -100.0, 0.0]]).expand(4000, -1)
    sampling = SamplingParams(max_tokens=8, temperature=temperature)
    tokens = sampled(Sampler(), logits, [row(sampling, position=10 + i) for i in range(4000)], ())
    assert set(tokens) == {0, 2, 3}
    assert chi_square(counted(tokens), [1 / 3, 0, 1 / 3, 1 / 3]) < 13.8


@pytest.mark.parametrize(
    "sampling", [PLAIN, SamplingParams(max_tokens=8, top_k=4), SamplingParams(max_tokens=8, top_p=0.999)]
)
def test_masked_tokens_are_never_drawn(sampling: SamplingParams) -> None:
    """The rows of a padded vocabulary are −inf; a filter that reaches over them must not hand one out."""
    logits = torch.full((500, 64), -math.inf)
    logits[:, 5] = 1.0
    logits[:, 40] = 0.5
    rows = [row(sampling, position=10 + i) for i in range(500)]
    assert set(sampled(Sampler(), logits, rows, ())) == {5, 40}


def test_min_tokens_masks_every_eos_until_it_is_reached() -> None:
    """Off by one, the answer is a token short or a token long."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, min_tokens=2)
    logits = torch.tensor([[0.0, 9.0, 1.0, 8.0]]).expand(4, -1)
    rows = [row(sampling, position=10 + n, num_prompt_tokens=10) for n in range(3)] + [row(GREEDY)]
    assert sampled(Sampler(), logits, rows, (1, 3)) == [2, 2, 1, 1]
    assert logits[0].tolist() == [0.0, 9.0, 1.0, 8.0]  # the caller's logits are not touched


def test_ignore_eos_does_not_mask() -> None:
    """The token is drawn as ever; that it ends nothing is the engine's business."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    assert sampled(Sampler(), torch.tensor([[0.0, 9.0]]), [row(sampling)], (1,)) == [1]


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, SamplingParams(max_tokens=8, top_k=3, top_p=0.5, min_p=0.1)])
@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_rows_without_a_distribution_are_named_and_the_others_are_drawn(
    sampling: SamplingParams, bad: list[float]
) -> None:
    """One poisoned row must neither end its neighbours nor come out as a token."""
    logits = torch.tensor([[0.0, 1.0, 9.0], bad, [9.0, 1.0, 0.0], bad])
    rows = [row(GREEDY), row(sampling), row(GREEDY), row(sampling)]
    for sampler in (Sampler(), Sampler(may_wait=False)):
        drawn = sampler.sample(logits, rows, ())
        assert drawn.is_finite.tolist() == [True, False, True, False]
        assert FetchedTokens(drawn).wait() == [2, None, 0, None]
        # What a poisoned row draws goes into the next step before anyone has seen it: it must be a token at least.
        assert bool(((drawn.token_ids >= 0) & (drawn.token_ids < 3)).all())


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([1, 2, 17, 300]),
    batch=st.lists(any_params, min_size=1, max_size=6),
    window=st.sampled_from([1, 4, 64]),
)
def test_a_sampler_that_looks_at_no_value_draws_the_same(
    seed: int, vocab_size: int, batch: list[SamplingParams], window: int
) -> None:
    logits = torch.randn(len(batch), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [row(sampling, seed=index, position=11 + index) for index, sampling in enumerate(batch)]
    assert sampled(Sampler(window, may_wait=False), logits, rows, ()) == sampled(Sampler(window), logits, rows, ())


def test_nothing_waits_for_the_device() -> None:
    """On the meta device there are no values: whoever looks at one, or chooses a path by one, fails."""
    early = SamplingParams(max_tokens=8, min_tokens=4)
    penalised = SamplingParams(max_tokens=8, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={3: 1.0})
    filtered = [SamplingParams(max_tokens=8, top_k=3), SamplingParams(max_tokens=8, top_p=0.7)]
    cases = [GREEDY, PLAIN, *filtered, early, SamplingParams(max_tokens=8, num_logprobs=3), penalised]
    logits = torch.empty(len(cases), 1000, dtype=torch.bfloat16, device="meta")
    rows = [row(sampling) for sampling in cases]
    rows[-1].takes_last = True
    newest = torch.empty(len(cases), dtype=torch.int64, device="meta")
    drawn = Sampler(may_wait=False).sample(logits, rows, (1, 3), newest)
    assert (drawn.token_ids.shape, drawn.token_ids.device.type) == ((len(cases),), "meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        Sampler().sample(logits, rows, (1, 3), newest)
