"""The CPU kernels against the reference (which has its own proof): same contract, other arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.cpu import CpuAttention
from kernels.metadata import AttentionMetadata
from tests.kernels.paged_case import SHAPES, PagedCase, Shape, build_case, shapes


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """A few threads, whatever the machine: enough to split the work, not enough to fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _check(shape: Shape, kernels: CpuAttention | None = None) -> None:
    case = build_case(shape)
    output = case.run((kernels or CpuAttention()).paged_attention)
    assert output.dtype == shape.dtype
    expected = case.run(reference.paged_attention)
    # Of the largest value. fp32: two orders of summation, scores of size s. bf16: the weights are rounded to bf16
    # (2^-8 of each) before they meet the values, and both results are rounded (2^-8 each). fp16: computed in fp32, so
    # only the rounding of both results.
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 4e-6 * max(1.0, shape.score_size),
        torch.float16: 2.0**-10,
        torch.bfloat16: 3 * 2.0**-8,
    }[shape.dtype]
    torch.testing.assert_close(
        output.double(), expected.double(), rtol=0.0, atol=tolerance * case.largest_value, equal_nan=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    """Over shuffled blocks, and with NaN in every slot that no token owns."""
    _check(replace(SHAPES[name], dtype=dtype))


@settings(max_examples=60, deadline=None)
@given(shape=shapes(torch.float32))
def test_any_shape_equals_the_reference_in_fp32(shape: Shape) -> None:
    _check(shape)


@settings(max_examples=60, deadline=None)
@given(shape=shapes(torch.bfloat16))
def test_any_shape_equals_the_reference_in_bf16(shape: Shape) -> None:
    _check(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cached", [0, 1, 37, 600])
@pytest.mark.parametrize("new", [2, 63, 64, 65, 130])
def test_prefill_in_runs_has_no_seam(new: int, cached: int, dtype: torch.dtype) -> None:
    """Rows are taken 64 at a time: a run's mask that is off by one shows only at 64, or only behind a cached part."""
    shape = Shape(lengths=((cached, new),), block_size=16, group=3, head_dim=64, dtype=dtype)
    _check(shape)
    _check(replace(shape, sliding_window=50))
    _check(replace(shape, soft_cap=5.0, sinks=True))


@pytest.mark.parametrize("name", ["large_scores", "soft_cap_large_scores"])
def test_scores_of_bf16_are_not_rounded_to_bf16(name: str) -> None:
    """A score of 30 rounded to bf16 is off by up to 1/16, its weight by 6%: greedy tokens flip between the paths."""
    shape = replace(SHAPES[name], dtype=torch.bfloat16, lengths=((200, 1), (90, 7)), head_dim=64, block_size=16)
    for seed in range(10):
        _check(replace(shape, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cached", "new"), [(70, 1), (3, 66), (0, 9)])
def test_a_sequence_is_computed_alike_alone_and_in_a_batch(cached: int, new: int, dtype: torch.dtype) -> None:
    """Bit for bit: batched attention that depends on its neighbours makes a user's text depend on other users' load."""
    shape = Shape(lengths=((100, 1), (cached, new), (2, 80)), head_dim=64, block_size=16, dtype=dtype)
    case = build_case(shape)
    together = case.run(CpuAttention().paged_attention)[1 : 1 + new]

    alone = build_case(shape)
    table = alone.metadata.host_block_tables[1]
    alone.metadata = type(alone.metadata).build([table], [cached], [new], shape.block_size, "cpu")
    alone.query = alone.query[1 : 1 + new]
    assert torch.equal(alone.run(CpuAttention().paged_attention), together)


@st.composite
def exact_shapes(draw: st.DrawFn) -> Shape:
    """One sequence with the head sizes of real models; long enough for several tiles, sometimes for torch's 512."""
    kv_heads, group, head_dim = draw(st.sampled_from(HEADS))
    return Shape(
        lengths=((0, draw(st.integers(1, 200) | st.integers(500, 700))),),
        block_size=draw(st.sampled_from([1, 5, 16, 64])),
        num_kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        sliding_window=draw(st.none() | st.integers(1, 100) | st.integers(500, 600)),
        soft_cap=draw(st.none() | st.none() | st.just(20.0)),
        sinks=draw(st.sampled_from([False, False, True])),
        score_size=draw(st.sampled_from([1.0, 8.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 1000)),
    )


# (KV heads, group, head size). One KV head is the case in which torch would split one product between threads.
HEADS = [(3, 3, 64), (2, 4, 128), (1, 8, 64), (1, 1, 64), (1, 4, 256), (4, 1, 96)]
on_avx512 = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="established on AVX-512")


@on_avx512
@settings(max_examples=60, deadline=None)
@given(shape=exact_shapes(), data=st.data())
def test_i7_a_row_has_the_same_bits_however_its_sequence_is_cut(shape: Shape, data: st.DataObject) -> None:
    """Tiles that began with the chunk gave a row another number of masked keys, one row alone another kernel."""
    ((_, length),) = shape.lengths
    case = build_case(shape)
    whole = case.run(CpuAttention().paged_attention)
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=6), label="cuts") | {0, length})
    for start, end in pairwise(cuts):
        assert torch.equal(_part(case, start, end), whole[start:end]), f"a chunk [{start}, {end})"
    for position in data.draw(st.sets(st.integers(0, length - 1), max_size=6), label="decodes"):
        assert torch.equal(_part(case, position, position + 1), whole[position : position + 1]), f"a decode, {position}"


@on_avx512
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_i7_every_position_has_the_same_bits_in_prefill_and_decode(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Every place in a tile, and the edges of tiles."""
    kv_heads, group, head_dim = heads
    lengths = ((0, 135),)
    shape = Shape(lengths, 16, num_kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    case = build_case(shape)
    whole = case.run(CpuAttention().paged_attention)
    decoded = torch.cat([_part(case, position, position + 1) for position in range(135)])
    assert torch.equal(decoded, whole)


@on_avx512
@settings(max_examples=30, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_i7_a_row_has_the_same_bits_in_any_batch(data: st.DataObject, dtype: torch.dtype) -> None:
    """A workspace that a longer neighbour has filled, or a batched product, made a text depend on the load."""
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(1, 70) | st.just(1)), min_size=2, max_size=4)
    )
    case = build_case(Shape(lengths=lengths, num_kv_heads=3, head_dim=64, block_size=16, dtype=dtype))
    together = case.run(CpuAttention().paged_attention)
    row = 0
    for table, (cached, new) in zip(case.metadata.host_block_tables, lengths, strict=True):
        metadata = AttentionMetadata.build([table], [cached], [new], 16, "cpu")
        alone = replace(case, metadata=metadata, query=case.query[row : row + new])
        assert torch.equal(alone.run(CpuAttention().paged_attention), together[row : row + new])
        row += new


def _part(case: PagedCase, start: int, end: int) -> torch.Tensor:
    """Rows [start, end) of a case with one sequence, as a step of their own; the keys that follow are NaN."""
    ((_, length),) = case.shape.lengths
    (table,) = case.metadata.host_block_tables
    kv_cache, block_size = case.kv_cache.clone(), case.shape.block_size
    for position in range(end, length):
        kv_cache[table[position // block_size], :, :, position % block_size] = torch.nan
    metadata = AttentionMetadata.build([table], [start], [end - start], block_size, "cpu")
    return replace(case, kv_cache=kv_cache, metadata=metadata, query=case.query[start:end]).run(
        CpuAttention().paged_attention
    )


def test_the_workspace_is_good_for_other_sizes_and_dtypes() -> None:
    """One instance serves every layer and step: what a longer sequence left behind must not show in a shorter one."""
    kernels = CpuAttention()
    for lengths in [((90, 3),), ((2, 1),), ((300, 1), (1, 1)), ((0, 4),)]:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            _check(Shape(lengths=lengths, dtype=dtype), kernels)


def test_inference_mode_and_ordinary_mode_share_an_instance() -> None:
    """A workspace made in inference mode could not be written to outside of it."""
    kernels = CpuAttention()
    with torch.inference_mode():
        _check(Shape(lengths=((50, 1),)), kernels)
    _check(Shape(lengths=((50, 1),)), kernels)
    with torch.inference_mode():
        _check(Shape(lengths=((500, 1),)), kernels)


@pytest.mark.parametrize("name", ["smollm2", "sinks"])
def test_a_query_that_is_a_transposed_view_is_fine(name: str) -> None:
    """transformers hands over [heads, tokens, head_dim], transposed: its memory is not in token order."""
    case = build_case(SHAPES[name])
    expected = case.run(CpuAttention().paged_attention)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(case.run(CpuAttention().paged_attention), expected)
    assert torch.equal(case.run(reference.paged_attention), build_case(SHAPES[name]).run(reference.paged_attention))


def test_the_cache_is_only_read() -> None:
    case = build_case(SHAPES["sinks_cap_window"])
    before = case.kv_cache.clone()
    case.run(CpuAttention().paged_attention)
    assert torch.equal(case.kv_cache.nan_to_num(7.0), before.nan_to_num(7.0))
