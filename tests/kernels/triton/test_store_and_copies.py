"""The kernels that move KV: they write what they say, and not one slot more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.block_copier import independent_runs
from tests.kernels.triton import interpreted
from tests.kernels.triton.conftest import Worker
from tests.kernels.triton.interpreted import Copy

SHAPES = {"odd": (4, 2, 5), "llama": (16, 2, 64), "one_byte_slots": (3, 1, 1), "phi3": (5, 3, 96)}
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_store_writes_its_slots_of_its_layer_only(name: str, dtype: torch.dtype, interpreter: Worker) -> None:
    interpreter(interpreted.check_store, SHAPES[name], dtype)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_8_bit_store_rounds_and_saturates(dtype: torch.dtype, interpreter: Worker) -> None:
    """fp8 e4m3 has no infinity: a key past its range that is not limited is stored as NaN, and spoils its sequence."""
    interpreter(interpreted.check_quantized_store, dtype)


@pytest.mark.parametrize(
    ("kv_dtype", "with_scales", "capability", "reason"),
    [
        (torch.int8, False, (9, 0), "8-bit elements"),
        (torch.float16, True, (9, 0), "8-bit elements"),
        (torch.float8_e4m3fn, True, (8, 0), "compute capability"),
    ],
)
def test_a_cache_without_its_scales_is_refused(
    kv_dtype: torch.dtype, with_scales: bool, capability: tuple[int, int], reason: str, interpreter: Worker
) -> None:
    assert reason in interpreter(interpreted.check_scales_are_refused, kv_dtype, with_scales, capability)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_copies_are_done_in_their_order(name: str, dtype: torch.dtype, interpreter: Worker) -> None:
    """A copy that reads what an earlier one wrote, in one launch, reads the old or the new, as it happens."""
    size = SHAPES[name][0]
    copies = [Copy(0, 1, 2), Copy(1, 2, size), Copy(3, 1, 1), Copy(4, 5, 0), Copy(5, 6, size), Copy(6, 5, 1)]
    interpreter(interpreted.check_copies, SHAPES[name], dtype, copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_gather_and_scatter_move_every_bit(name: str, dtype: torch.dtype, interpreter: Worker) -> None:
    interpreter(interpreted.check_gather_and_scatter, SHAPES[name], dtype)


@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1])))
def test_no_copy_of_a_launch_depends_on_another(pairs: list[tuple[int, int]]) -> None:
    copies = [Copy(src, dst, 1) for src, dst in pairs]
    runs = list(independent_runs(copies))
    assert [copy for run in runs for copy in run] == copies
    for run in runs:
        written = [copy.dst for copy in run]
        assert len(set(written)) == len(written)
        assert not {copy.src for copy in run} & set(written)


def test_independent_copies_are_one_launch() -> None:
    assert len(list(independent_runs([Copy(0, 1, 4), Copy(0, 2, 4), Copy(3, 4, 1)]))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "half"), [(16, 8), (20, 6), (96, 48), (7, 3)])
def test_rerotate_equals_plain_torch(head_dim: int, half: int, dtype: torch.dtype, interpreter: Worker) -> None:
    interpreter(interpreted.check_rerotate, head_dim, half, dtype)


def test_rerotated_keys_are_the_keys_of_the_new_position(interpreter: Worker) -> None:
    """delta · inv_freq in fp32 is off by 0.004 at 100,000 positions: the table is made in float64."""
    interpreter(interpreted.check_rerotated_keys_are_the_keys_of_the_new_position)
