"""`store_kv` and `copy_slots` of every set of kernels: they write what they say, and not one slot more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels.dispatch import AttentionKernels, select_kernels
from kernels.metadata import AttentionMetadata

NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 7, 3, 4, 2, 5


@dataclass(frozen=True)
class Copy:
    src: int
    dst: int
    num_slots: int


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> AttentionKernels:
    return select_kernels(torch.device("cpu"), request.param)


def _cache() -> torch.Tensor:
    """Every element different, so that a write to a wrong place cannot go unseen."""
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_store_writes_its_slots_of_its_layer_only(kernels: AttentionKernels) -> None:
    kv_cache, expected = _cache(), _cache()
    # Positions 3..6 of a sequence in blocks 5, 2: the end of one block and the start of the other.
    metadata = AttentionMetadata.build([[5, 2]], [3], [4], BLOCK_SIZE, "cpu")
    key = -1 - torch.arange(4 * NUM_KV_HEADS * HEAD_DIM, dtype=torch.float32).view(4, NUM_KV_HEADS, HEAD_DIM)
    value = key - 1000
    for row, (block, offset) in enumerate([(5, 3), (2, 0), (2, 1), (2, 2)]):
        expected[block, 1, 0, offset] = key[row]
        expected[block, 1, 1, offset] = value[row]
    # As the model hands them over: views whose memory is in another order.
    kernels.store_kv(key.transpose(0, 1).contiguous().transpose(0, 1), value, kv_cache, 1, metadata.slot_mapping)
    assert torch.equal(kv_cache, expected)


def test_a_padded_row_is_not_written() -> None:
    """-1 would be the last slot of the last block. (A step on the CPU has none: its kernels do not look.)"""
    kv_cache, expected = _cache(), _cache()
    rows = torch.full((3, NUM_KV_HEADS, HEAD_DIM), -1.0)
    expected[5, 1, :, 3] = -1.0
    slots = torch.tensor([-1, 5 * BLOCK_SIZE + 3, -1])
    select_kernels(torch.device("cpu"), "reference").store_kv(rows, rows, kv_cache, 1, slots)
    assert torch.equal(kv_cache, expected)


def test_store_of_nothing_writes_nothing(kernels: AttentionKernels) -> None:
    kv_cache = _cache()
    metadata = AttentionMetadata.build([[5, 2]], [6], [0], BLOCK_SIZE, "cpu")
    empty = torch.empty(0, NUM_KV_HEADS, HEAD_DIM)
    kernels.store_kv(empty, empty, kv_cache, 0, metadata.slot_mapping)
    assert torch.equal(kv_cache, _cache())


def test_store_rounds_to_the_dtype_of_the_cache(kernels: AttentionKernels) -> None:
    kv_cache = torch.zeros(2, 1, 2, BLOCK_SIZE, 1, 3, dtype=torch.bfloat16)
    key = torch.tensor([[[1.0, 1.00390625, 3.0]]])
    kernels.store_kv(key, key * 2, kv_cache, 0, torch.tensor([BLOCK_SIZE + 2]))
    assert torch.equal(kv_cache[1, 0, 0, 2], key[0].bfloat16())
    assert torch.equal(kv_cache[1, 0, 1, 2], (key[0] * 2).bfloat16())


@pytest.mark.parametrize("num_slots", [1, 3, BLOCK_SIZE])
def test_copy_writes_the_first_slots_of_the_destination_only(kernels: AttentionKernels, num_slots: int) -> None:
    """Copy-on-write in the middle of a block: one slot too few loses a token, one too many overwrites a newer one."""
    kv_cache, expected = _cache(), _cache()
    for layer in range(NUM_LAYERS):
        for slot in range(num_slots):
            expected[6, layer, :, slot] = expected[1, layer, :, slot]
    kernels.copy_slots(kv_cache, [Copy(src=1, dst=6, num_slots=num_slots)])
    assert torch.equal(kv_cache, expected)


def test_copies_are_done_in_their_order(kernels: AttentionKernels) -> None:
    """A block that was just copied to may be the next copy's source."""
    kv_cache, expected = _cache(), _cache()
    expected[3, :, :, :2] = expected[0, :, :, :2]
    expected[4, :, :, :1] = expected[0, :, :, :1]
    kernels.copy_slots(kv_cache, [Copy(0, 3, 2), Copy(3, 4, 1), Copy(5, 5, 4)])
    assert torch.equal(kv_cache, expected)


def test_no_copies_and_empty_copies_change_nothing(kernels: AttentionKernels) -> None:
    kv_cache = _cache()
    kernels.copy_slots(kv_cache, [])
    kernels.copy_slots(kv_cache, [Copy(1, 2, 0)])
    assert torch.equal(kv_cache, _cache())
