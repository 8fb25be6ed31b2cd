"""The reference against attention written out: it is the specification, so nothing else may have defined it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from transformers.masking_utils import sliding_window_causal_mask_function

from kernels.reference import first_visible_key, paged_attention
from tests.kernels.paged_case import SHAPES, Shape, build_case, shapes

# The result's own rounding, as a fraction of its size, and what the arithmetic inside adds.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def _check(shape: Shape) -> None:
    case = build_case(shape)
    output = case.run(paged_attention)
    assert output.dtype == shape.dtype
    # fp32 sums of scores of size s are off by some s · 2^-24, and a weight by as much, relatively.
    arithmetic = 1e-12 if shape.dtype == torch.float64 else 4e-6 * max(1.0, shape.score_size)
    torch.testing.assert_close(
        output.double(), case.dense(), rtol=ROUNDING[shape.dtype], atol=arithmetic * case.largest_value
    )


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_equal_dense_attention(name: str) -> None:
    """Every head size, group, window, cap and sink of the supported families, over shuffled blocks and NaN."""
    _check(SHAPES[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["smollm2", "gemma_head_dim_256", "sinks_cap_window", "large_scores"])
def test_half_and_double_precision_round_only_the_result(name: str, dtype: torch.dtype) -> None:
    """Scores or weights kept in the query's dtype would be off by far more than the result's own rounding."""
    _check(replace(SHAPES[name], dtype=dtype))


@settings(max_examples=100, deadline=None)
@given(shape=shapes(torch.float64))
def test_any_shape_equals_dense_attention(shape: Shape) -> None:
    _check(shape)


def test_window_convention_is_the_one_of_transformers() -> None:
    """A window of w counts the query's own key: off by one, every sliding layer sees one key too many or too few."""
    for window in range(1, 6):
        visible = sliding_window_causal_mask_function(window)
        for position in range(9):
            theirs = [j for j in range(9) if bool(visible(0, 0, torch.tensor(position), torch.tensor(j)))]
            assert theirs == list(range(first_visible_key(position, window), position + 1))


def test_a_window_without_keys_is_refused() -> None:
    """A softmax over nothing is NaN; a model with such a window is broken and must not run."""
    with pytest.raises(AssertionError, match="own key"):
        first_visible_key(3, 0)


def test_a_case_notices_keys_that_must_not_be_seen() -> None:
    """The tests' own poison works: one NaN inside the visible keys reaches the output."""
    case = build_case(SHAPES["only_decode"])
    block = case.metadata.host_block_tables[0][0]
    case.kv_cache[block, 1, 1, 0] = torch.nan
    assert case.run(paged_attention)[0].isnan().all()
    assert not case.run(paged_attention)[1:].isnan().any()
