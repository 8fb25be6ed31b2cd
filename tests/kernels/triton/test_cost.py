"""The bytes that the limits are computed from: of parts that the kernels really make."""

from __future__ import annotations

import pytest

from kernels.compilation import ARCHITECTURES
from kernels.cost import AttentionModel, decode_cost, decode_splits, prefix_splits, reduce_cost, workloads
from kernels.heuristics import target_items
from tests.kernels.triton.conftest import Worker
from tests.kernels.triton.split_plan import split_plan

MODEL = AttentionModel()
HOPPER = ARCHITECTURES[90].device


def test_splits_on_hopper_worked_by_hand() -> None:
    """Of 132 runs (8 · 132 / 8): at 16k fewer than 256 keys for one, 993 for 8 (cut at 1,024), 1,986 for 16."""
    assert [decode_splits(HOPPER, MODEL, count, 16384) for count in (1, 8, 16, 64)] == [64, 16, 8, 3]
    assert decode_splits(HOPPER, MODEL, 32, 4352) == 4
    assert prefix_splits(HOPPER, MODEL, 32, 4096) == 16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("num_seqs", "seq_len"), [(1, 16384), (12, 8000), (32, 4352), (8, 100)])
def test_splits_are_the_kernels_own(architecture: int, num_seqs: int, seq_len: int, interpreter: Worker) -> None:
    device = ARCHITECTURES[architecture].device
    target = target_items(device, MODEL.num_kv_heads, 1)
    _, _, splits = interpreter(split_plan, [seq_len] * num_seqs, [1] * num_seqs, target)
    assert splits == [decode_splits(device, MODEL, num_seqs, seq_len)] * num_seqs


def test_a_device_of_more_processors_moves_more_partial_results() -> None:
    name = "decode, 8 × 16k"
    smaller, larger = (workloads(ARCHITECTURES[number].device)[name].bytes_moved for number in (80, 100))
    assert smaller < larger


def test_what_reduce_reads_is_what_decode_wrote_for_it() -> None:
    """Partial results of 32 heads, 128 numbers and a sum each in fp32; outputs of 32 · 128 in 16 bits."""
    assert reduce_cost(MODEL, 8, 16).bytes_moved == 8 * (16 * 32 * 129 * 4 + 32 * 128 * 2)
    split = decode_cost(MODEL, 8, 16384, 16).bytes_moved - decode_cost(MODEL, 8, 16384).bytes_moved
    assert split == 2 * 8 * 16 * 32 * 129 * 4
