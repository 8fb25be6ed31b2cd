"""The Triton attention kernels against the reference, in Triton's interpreter (right in fp32 and fp16, not in bf16)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.paged_case import SHAPES, Shape, shapes
from tests.kernels.triton import interpreted
from tests.kernels.triton.conftest import Worker
from tests.kernels.triton.split_plan import split_plan

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_equal_the_reference(name: str, dtype: torch.dtype, interpreter: Worker) -> None:
    """Over shuffled blocks, and with NaN in every slot that no token owns."""
    interpreter(interpreted.check_attention, replace(SHAPES[name], dtype=dtype))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes(torch.float32))
def test_any_shape_equals_the_reference_in_fp32(shape: Shape, interpreter: Worker) -> None:
    interpreter(interpreted.check_attention, shape)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes(torch.float16))
def test_any_shape_equals_the_reference_in_fp16(shape: Shape, interpreter: Worker) -> None:
    interpreter(interpreted.check_attention, shape)


@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_block_sizes_above_and_below_a_tile(block_size: int, interpreter: Worker) -> None:
    """A tile inside one block takes one table entry for all its keys; the division must be of the right one."""
    interpreter(
        interpreted.check_attention,
        Shape(lengths=((270, 1), (300, 20), (3, 2)), block_size=block_size, num_kv_heads=1, sliding_window=150),
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int, interpreter: Worker) -> None:
    interpreter(interpreted.check_attention, Shape(lengths=((30, 1), (9, 12)), head_dim=head_dim, dtype=torch.float16))


@pytest.mark.parametrize("cached", [250, 255, 256, 257, 515, 1030])
@pytest.mark.parametrize("new", [1, 8])
def test_keys_are_split_and_merged(cached: int, new: int, interpreter: Worker) -> None:
    """At the edges of a split; with eight new tokens the last split holds keys that the first tokens do not see (-inf).

    -inf - (-inf) is NaN: a split in which a row sees nothing once made the whole row NaN.
    """
    shape = Shape(lengths=((cached, new), (5, 1), (300, new)), num_kv_heads=1, block_size=16, sinks=True)
    interpreter(interpreted.check_attention, shape, interpreted.LARGE_DEVICE)


@pytest.mark.parametrize("window", [256, 530])
def test_a_window_over_splits(window: int, interpreter: Worker) -> None:
    """The first tile begins before the window does: a cut that counts from the window's edge loses the last keys."""
    shape = Shape(lengths=((1000, 8), (700, 1)), num_kv_heads=1, block_size=16, sliding_window=window, soft_cap=4.0)
    interpreter(interpreted.check_attention, shape, interpreted.LARGE_DEVICE)


def test_a_soft_cap_at_large_logits(interpreter: Worker) -> None:
    """tanh by way of exp: its overflow must come out as ±1, not as inf / inf."""
    shape = Shape(lengths=((40, 1), (20, 12)), soft_cap=3.0, score_size=2000.0)
    interpreter(interpreted.check_attention, shape)


@pytest.mark.parametrize("group", [1, 5, 7, 20, 33])
def test_any_group_ratio(group: int, interpreter: Worker) -> None:
    """Rows of a tile end anywhere in a group, in decode (wide groups take several tiles) and in prefill."""
    interpreter(interpreted.check_attention, Shape(lengths=((20, 1), (6, 8), (4, 11)), num_kv_heads=1, group=group))


@pytest.mark.parametrize("new", [63, 64, 65, 129])
def test_prefill_tiles_have_no_seam(new: int, interpreter: Worker) -> None:
    shape = Shape(lengths=((70, new), (0, 30)), num_kv_heads=1, group=2, block_size=16)
    interpreter(interpreted.check_attention, shape)
    interpreter(interpreted.check_attention, replace(shape, sliding_window=50, dtype=torch.float16))


def test_more_sequences_than_one_scan_holds(interpreter: Worker) -> None:
    lengths = [(index % 7, 1 + (index % 3 == 0) * 9) for index in range(40)]
    interpreter(interpreted.check_attention, Shape(lengths=lengths, num_kv_heads=1, group=1))


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_keys_before_the_window_are_not_read(block_size: int, interpreter: Worker) -> None:
    """A block that fell out of the window is another sequence's by now; of one that is half in it, the other half."""
    shape = Shape(lengths=((150, 1), (70, 12), (203, 3)), sliding_window=20, block_size=block_size)
    interpreter(interpreted.check_keys_before_the_window_are_not_read, shape)


def test_a_query_that_is_a_transposed_view(interpreter: Worker) -> None:
    interpreter(interpreted.check_transposed_query, SHAPES["smollm2"])


def test_one_instance_serves_many_steps(interpreter: Worker) -> None:
    """The plan of a step is kept with its metadata: the next step must not be run by it."""
    lengths = [((3, 1),), ((0, 20), (4, 1)), ((9, 8),), ((0, 0), (2, 1))]
    interpreter(interpreted.check_one_instance_over_steps, [Shape(lengths=each) for each in lengths])


def test_offsets_past_32_bits(interpreter: Worker) -> None:
    """Block 65,536 of 32,768 elements is at 2^31: in 32 bits it wraps around to another's block, or to nowhere."""
    interpreter(interpreted.check_offsets_past_32_bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padded_rows_read_and_write_nothing(dtype: torch.dtype, interpreter: Worker) -> None:
    """The rows that fill up a captured batch once wrote through the block table of the step before."""
    interpreter(interpreted.check_padded_rows, dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_keys_and_values(dtype: torch.dtype, interpreter: Worker) -> None:
    shape = Shape(lengths=((20, 1), (9, 14), (300, 1)), head_dim=32, block_size=8, dtype=torch.float16)
    interpreter(interpreted.check_quantized, dtype, shape)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_8_bit_keys_with_every_option(head_dim: int, interpreter: Worker) -> None:
    """Scales apply before the cap and beside the sinks; a head of 80 leaves columns of the tile empty."""
    shape = Shape(
        lengths=((20, 1), (9, 14), (600, 8), (0, 3)),
        head_dim=head_dim,
        block_size=16,
        num_kv_heads=1,
        sliding_window=400,
        soft_cap=5.0,
        sinks=True,
        score_size=4.0,
        dtype=torch.float16,
    )
    interpreter(interpreted.check_quantized, torch.int8, shape, interpreted.LARGE_DEVICE)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(200, 900), st.integers(1, 10)), min_size=1, max_size=2),
    sliding_window=st.none() | st.integers(200, 700),
    sinks=st.booleans(),
    group=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_long_sequence_is_split_and_merged(
    lengths: list[tuple[int, int]],
    sliding_window: int | None,
    sinks: bool,
    group: int,
    seed: int,
    interpreter: Worker,
) -> None:
    """Long enough for two to four parts, wherever they begin and end."""
    shape = Shape(
        lengths=lengths,
        block_size=16,
        num_kv_heads=1,
        group=group,
        sliding_window=sliding_window,
        sinks=sinks,
        seed=seed,
    )
    interpreter(interpreted.check_attention, shape, interpreted.LARGE_DEVICE)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100_000)), min_size=1, max_size=32),
    target=st.integers(1, 300),
)
def test_every_program_gets_about_as_many_keys(
    lengths: list[tuple[int, int]], target: int, interpreter: Worker
) -> None:
    """Whatever the mix of lengths, no item is longer than an even share (or 256 keys), and all fit the grid.

    With one number of splits for all sequences, a long one among many short is left to a few programs.
    """
    query_lens = [query for query, _ in lengths]
    seq_lens = [query + cached for query, cached in lengths]
    chunk, starts, splits = interpreter(split_plan, seq_lens, query_lens, target)
    decoding = [length if 0 < query <= 8 else 0 for query, length in zip(query_lens, seq_lens, strict=True)]
    share = -(-sum(decoding) // target)
    assert chunk - 64 < max(256, share) <= chunk
    assert splits == [-(-length // chunk) for length in decoding]
    assert starts == [sum(splits[:index]) for index in range(len(splits))]
    assert sum(splits) <= target + len(lengths)
