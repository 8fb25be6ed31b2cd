"""Bias and penalties against a dumb model, and that a row gets its own and nothing of its neighbours."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ScheduledSequence
from engine.logits_processors import process_logits
from engine.protocol import SamplingParams
from engine.sampler import Sampler
from tests.engine.drawn_tokens import sampled

VOCAB = 11
NOTHING = SamplingParams(max_tokens=8, temperature=0.0)


def row(sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int = 0) -> ScheduledSequence:
    token_ids = [*prompt, *output]
    return ScheduledSequence(
        request_id="r",
        token_ids=token_ids,
        num_computed=len(token_ids) - 1,
        num_new=1,
        block_table=array("i", [0]),
        sampling=sampling,
        seed=seed,
        num_prompt_tokens=len(prompt),
        sample=True,
    )


def dumb(logits: Sequence[float], row: ScheduledSequence) -> list[float]:
    sampling, output = row.sampling, row.token_ids[row.num_prompt_tokens :]
    found: list[float] = []
    for token, logit in enumerate(logits):
        value = logit + sampling.logit_bias.get(token, 0.0)
        if token in row.token_ids:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        times = output.count(token)
        found.append(value - sampling.frequency_penalty * times - (sampling.presence_penalty if times else 0.0))
    return found


tokens = st.integers(0, VOCAB - 1)
asked = st.builds(
    SamplingParams,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.25, -1.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 100.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.0, 3.0, 100.0]), max_size=4),
)
rows_of_a_batch = st.lists(
    st.builds(
        row,
        asked | st.just(NOTHING),
        prompt=st.lists(tokens, min_size=1, max_size=9),
        output=st.lists(tokens, max_size=9),
        seed=st.integers(0, 99),
    ),
    min_size=1,
    max_size=7,
)


def logits_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@settings(max_examples=300, deadline=None)
@given(rows=rows_of_a_batch, seed=st.integers(0, 50))
def test_any_mixture_in_any_batch_equals_the_dumb_model(rows: list[ScheduledSequence], seed: int) -> None:
    logits = logits_of(len(rows), seed)
    before = logits.clone()
    processed = process_logits(logits, rows)
    expected = torch.tensor([dumb(line, row) for line, row in zip(logits.tolist(), rows, strict=True)])
    torch.testing.assert_close(processed, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)  # the caller's logits are not touched


@settings(max_examples=150, deadline=None)
@given(rows=rows_of_a_batch, data=st.data())
def test_a_row_has_the_same_bits_and_draws_the_same_alone_and_in_any_batch(
    rows: list[ScheduledSequence], data: st.DataObject
) -> None:
    """Counts that are padded to the longest row, or kept by place in the batch, would reach a neighbour's draw."""
    logits = logits_of(len(rows)).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    together = process_logits(logits, rows)
    for i in range(len(rows)):
        alone = process_logits(logits[i : i + 1], [rows[i]])
        assert torch.equal(alone[0].float(), together[i].float())
    order = data.draw(st.permutations(range(len(rows))))
    drawn = sampled(Sampler(), logits, rows, ())
    assert sampled(Sampler(), logits[list(order)], [rows[i] for i in order], ()) == [drawn[i] for i in order]
    assert [sampled(Sampler(), logits[i : i + 1], [rows[i]], ())[0] for i in range(len(rows))] == drawn


def test_rows_that_ask_for_nothing_cost_no_copy() -> None:
    logits = logits_of(2)
    assert process_logits(logits, [row(NOTHING, [1], []), row(NOTHING, [2], [3])]) is logits


def test_the_prompt_is_penalised_by_repetition_only() -> None:
    """OpenAI's two penalties are of what was said in the answer; documents that are quoted must not be punished."""
    penalised = SamplingParams(max_tokens=8, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    repeated = SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=2.0)
    logits = torch.tensor([[5.0, 4.5, 0.0]])
    assert sampled(Sampler(), logits, [row(penalised, [0, 0], [])], ()) == [0]
    assert sampled(Sampler(), logits, [row(penalised, [1], [0])], ()) == [1]
    assert sampled(Sampler(), logits, [row(repeated, [0, 0], [])], ()) == [1]


def test_a_preempted_request_is_penalised_as_before() -> None:
    """After preemption prompt and output are computed as one prefill; counts kept from step to step would be gone."""
    sampling = SamplingParams(max_tokens=8, frequency_penalty=1.0, repetition_penalty=1.5)
    decoding, again = row(sampling, [1, 2], [3, 3, 4]), row(sampling, [1, 2], [3, 3, 4])
    again.num_computed, again.num_new = 0, 5
    logits = logits_of(1)
    assert torch.equal(process_logits(logits, [decoding]), process_logits(logits, [again]))


def test_tokens_that_are_not_known_yet_are_missed_aloud() -> None:
    """A step that is prepared before the last token is known would penalise the wrong tokens in silence."""
    early = row(SamplingParams(max_tokens=8, presence_penalty=1.0), [1], [2])
    early.num_new = 2
    with pytest.raises(AssertionError, match="every token before"):
        process_logits(logits_of(1), [early])


def test_a_bias_bans_and_forces_but_never_undoes_a_mask() -> None:
    """A banned end-of-turn token stays masked until min_tokens, whatever its bias."""
    logits = torch.tensor([[0.0, 9.0, 5.0]])
    for bias, expected in (({1: -100.0}, 2), ({0: 100.0}, 0)):
        sampling = SamplingParams(max_tokens=8, temperature=0.0, logit_bias=bias)
        assert sampled(Sampler(), logits, [row(sampling, [1], [])], ()) == [expected]
    forced = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={1: 100.0}, min_tokens=1)
    assert sampled(Sampler(), logits, [row(forced, [0], [])], (1,)) == [2]
    padded = torch.tensor([[-math.inf, 1.0]])
    sampling = SamplingParams(max_tokens=8, logit_bias={0: 100.0}, repetition_penalty=1.5)
    assert sampled(Sampler(), padded, [row(sampling, [0], [])], ()) == [1]


def test_a_token_that_is_still_on_the_device_is_penalised_too() -> None:
    """The step before has drawn it, and nobody has read it yet: left out, it would be drawn twice."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.3)
    logits = logits_of(3)
    biased = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={2: 1.0})
    known = [row(sampling, [1, 2], [4, 4, 7]), row(biased, [5], [6]), row(sampling, [3], [3])]
    late = [replace(known[0], token_ids=[1, 2, 4, 4], takes_last=True), replace(known[1], takes_last=True), known[2]]
    newest = torch.tensor([7, 6, 0])
    expected = process_logits(logits, known)
    assert torch.equal(process_logits(logits, late, newest), expected)
    assert torch.equal(process_logits(logits[1:], late[1:]), expected[1:])  # nobody's count needs one
