from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels.heuristics import HEAD_DIMS, KEY_ALIGNMENT, DeviceModel, scan_size, select_tile, target_items
from kernels.tile_table import TILES

HOPPER = DeviceModel(num_sms=132, capability=(9, 0))


def test_the_table_has_a_tile_for_everything() -> None:
    kernels = ("decode", "decode_wide", "prefill", "shared_prefix")
    assert set(TILES) == set(product((80, 90, 100), kernels, HEAD_DIMS, (1, 2, 4)))


def test_tiles_are_what_the_kernels_and_the_device_take() -> None:
    """`tl.dot` under 16 is refused by a GPU only; keys are cut at multiples of KEY_ALIGNMENT, whatever the tile."""
    for block_m, block_n, num_warps, num_stages in TILES.values():
        assert block_m >= 16
        assert block_n >= 16
        assert KEY_ALIGNMENT % block_n == 0
        assert num_warps in (4, 8)
        assert num_stages >= 3


@pytest.mark.parametrize(
    ("capability", "architecture"), [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((12, 0), 80)]
)
def test_every_device_has_a_row(capability: tuple[int, int], architecture: int) -> None:
    """A consumer Blackwell has neither Hopper's shared memory nor the tensor memory of the large one."""
    device = DeviceModel(num_sms=100, capability=capability)
    assert device.architecture == architecture
    assert select_tile(device, "decode", 80, torch.bfloat16) == select_tile(device, "decode", 128, torch.float16)


def test_a_head_that_no_tile_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="512"):
        select_tile(HOPPER, "decode", 512, torch.bfloat16)


@pytest.mark.parametrize("num_seqs", [8, 12, 16])
def test_a_dozen_sequences_are_still_split(num_seqs: int) -> None:
    """One split each just fills the device at about this size, and leaves it idle for half of the time."""
    splits = target_items(HOPPER, num_kv_heads=8, num_row_tiles=1) / num_seqs
    assert splits >= 4
    assert num_seqs * splits * 8 >= 4 * HOPPER.num_sms


def test_few_sizes_of_scan() -> None:
    assert [scan_size(n) for n in (1, 32, 33, 256, 257)] == [32, 32, 256, 256, 2048]
