"""Log probabilities against torch's own, and that they are a row's and nobody else's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import TokenLogprobs
from engine.logprobs import read_logprobs
from engine.protocol import SamplingParams
from engine.sampler import FetchedTokens, Sampler
from tests.engine.test_logits_processors import row


def logprobs_of(logits: torch.Tensor, sampling: list[SamplingParams]) -> list[TokenLogprobs | None]:
    rows = [row(params, [1], [0], seed=7) for params in sampling]
    fetched = FetchedTokens(Sampler().sample(logits, rows, ()))
    fetched.wait()
    return list(read_logprobs(fetched.logprobs(), rows))


asked = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    num_logprobs=st.sampled_from([None, 0, 1, 3, 20]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.sampled_from([{}, {0: 5.0}]),
)


@settings(max_examples=200, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 2, 17, 300, 1024]),
    batch=st.lists(asked, min_size=1, max_size=6),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_they_are_those_of_the_model_whatever_else_is_asked_and_a_rows_own_to_the_bit(
    vocab_size: int, batch: list[SamplingParams], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Of the distribution before bias, penalties and temperature; alone and in any batch the same numbers."""
    logits = (torch.randn(len(batch), vocab_size, generator=torch.Generator().manual_seed(seed)) * 5).to(dtype)
    found = logprobs_of(logits, batch)
    expected = logits.double().log_softmax(-1)
    for i, (params, line) in enumerate(zip(batch, found, strict=True)):
        if params.num_logprobs is None:
            assert line is None
            continue
        assert line is not None
        order = sorted(range(vocab_size), key=lambda token: (-float(logits[i, token]), token))
        assert [token for token, _ in line.top] == order[: params.num_logprobs]
        assert [value for _, value in line.top] == pytest.approx(
            [float(expected[i, token]) for token, _ in line.top], abs=1e-5
        )
        assert any(line.logprob == pytest.approx(float(value), abs=1e-5) for value in expected[i])
        assert logprobs_of(logits[i : i + 1], [params]) == [line]
    order = data.draw(st.permutations(range(len(batch))))
    assert logprobs_of(logits[list(order)], [batch[i] for i in order]) == [found[i] for i in order]


def test_the_drawn_token_has_its_own_even_if_a_bias_made_it_win() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]])
    (line,) = logprobs_of(
        logits, [SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=1, logit_bias={2: 100.0})]
    )
    expected = logits.log_softmax(-1)[0].tolist()
    assert line is not None
    assert line.logprob == pytest.approx(expected[2], abs=1e-6)
    assert line.top == ((0, pytest.approx(expected[0], abs=1e-6)),)


def test_a_tie_goes_to_the_lower_id_and_what_cannot_be_drawn_is_a_number_of_json() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0, 2.0]])
    (line,) = logprobs_of(logits, [SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=20)])
    assert line is not None
    assert [token for token, _ in line.top] == [2, 3, 0, 1]
    assert line.top[-1][1] == -9999.0


def test_who_does_not_ask_costs_nothing() -> None:
    rows = [row(SamplingParams(max_tokens=8, temperature=0.0), [1], [])]
    assert Sampler().sample(torch.zeros(1, 8), rows, ()).logprobs is None
