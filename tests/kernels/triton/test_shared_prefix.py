"""Shared prefixes: which sequences form a group, how its keys are cut, and that the merged result is the plain one."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.heuristics import KEY_ALIGNMENT, DeviceModel
from kernels.shared_prefix import PrefixGroup, PrefixPlan, PrefixRoom, find_groups, plan_prefixes
from tests.kernels.triton import interpreted
from tests.kernels.triton.conftest import Worker
from tests.kernels.triton.interpreted import LARGE_DEVICE, SMALL_DEVICE, PrefixShape, Replay

BLOCK_SIZE = 128  # so that a block is what keys are cut to


def _packed(tables: list[list[int]]) -> list[array[int]]:
    return [array("i", table) for table in tables]


def _groups(tables: list[list[int]], min_saving: int = 1) -> list[PrefixGroup]:
    lens = [len(table) * BLOCK_SIZE for table in tables]
    return find_groups(_packed(tables), lens, range(len(tables)), BLOCK_SIZE, min_saving)


def test_the_cut_that_saves_more_is_taken() -> None:
    """Three on two blocks save four blocks; two of them on seven blocks save seven, which is better."""
    assert _groups([[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 7]]) == [PrefixGroup((0, 1, 2), 256)]
    long = list(range(1, 8))
    assert _groups([[*long, 90], [*long, 91], [1, 2, 70]]) == [PrefixGroup((0, 1), 7 * 128)]


def test_groups_are_disjoint_and_each_has_its_own_prefix() -> None:
    assert _groups([[1, 2, 11], [5, 6, 12], [1, 2, 13], [5, 6, 14], [8, 9]]) == [
        PrefixGroup((0, 2), 256),
        PrefixGroup((1, 3), 256),
    ]


def test_a_group_that_does_not_pay_is_none() -> None:
    assert _groups([[1, 2, 3], [1, 2, 4]], min_saving=257) == []
    assert _groups([[1, 2, 3], [1, 2, 4]], min_saving=256) == [PrefixGroup((0, 1), 256)]
    assert _groups([[1, 2], [3, 4]]) == []


def test_a_sequence_keeps_its_own_token() -> None:
    """Beams share even the block that holds the last token, until they write: one key at least stays each one's own."""
    tables = _packed([[1, 2], [1, 2]])
    assert find_groups(tables, [256, 256], [0, 1], BLOCK_SIZE, 1) == [PrefixGroup((0, 1), 128)]
    assert find_groups(tables, [257, 257], [0, 1], 256, 1) == [PrefixGroup((0, 1), 256)]


@given(
    tables=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8),
    min_saving=st.integers(1, 1000),
)
def test_groups_share_what_they_say(tables: list[list[int]], min_saving: int) -> None:
    seen: set[int] = set()
    for group in _groups(tables, min_saving):
        blocks = group.num_keys // BLOCK_SIZE
        assert group.num_keys % KEY_ALIGNMENT == 0
        assert len({tuple(tables[member][:blocks]) for member in group.members}) == 1
        assert all(group.num_keys < len(tables[member]) * BLOCK_SIZE for member in group.members)
        assert group.saving >= min_saving
        assert not seen & set(group.members)
        seen |= set(group.members)


@given(
    sizes=st.lists(st.tuples(st.integers(2, 9), st.integers(1, 9)), min_size=1, max_size=4),
    members_per_tile=st.integers(1, 4),
    target=st.integers(1, 40),
)
def test_the_items_cover_each_member_and_key_once(
    sizes: list[tuple[int, int]], members_per_tile: int, target: int
) -> None:
    """And each (member, split) has a row of the partial results of its own, where its sequence looks for it. The same
    list fits into the room that a captured step of any larger size has, and items that it leaves have no members."""
    groups: list[PrefixGroup] = []
    num_seqs = 0
    for size, blocks in sizes:
        groups.append(PrefixGroup(tuple(range(num_seqs, num_seqs + size)), blocks * KEY_ALIGNMENT))
        num_seqs += size + 1
    lists = plan_prefixes(groups, num_seqs, members_per_tile, target)
    plan = PrefixPlan.of(lists.pack(lists.room), lists.room)
    roomy = PrefixRoom.for_any(num_seqs + 3, members_per_tile, target)
    padded = PrefixPlan.of(lists.pack(roomy), roomy)
    count = len(plan.items)
    assert torch.equal(padded.items[:count], plan.items)
    assert not padded.items[count:].any()
    for ours, theirs in ((padded.prefix_lens, plan.prefix_lens), (padded.prefix_partials, plan.prefix_partials)):
        assert torch.equal(ours[:num_seqs], theirs)
        assert not ours[num_seqs:].any()
    assert all(view.data_ptr() % 16 == padded.buffer.data_ptr() % 16 for view in (padded.members, padded.prefix_lens))
    rows: dict[int, tuple[int, int, int]] = {}
    for first, count, begin, end, partial in plan.items.tolist():
        assert count <= members_per_tile
        for place in range(count):
            assert partial + place not in rows
            rows[partial + place] = (plan.members.tolist()[first + place], begin, end)
    assert sorted(rows) == list(range(plan.num_partials))
    for group in groups:
        for member in group.members:
            start, stride, splits = plan.prefix_partials[member].tolist()
            parts = [rows[start + split * stride] for split in range(splits)]
            assert [part[0] for part in parts] == [member] * splits
            edges = [0, *(part[2] for part in parts)]
            assert [part[1] for part in parts] == edges[:-1]
            assert edges[-1] == group.num_keys == plan.prefix_lens[member]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shared_and_own_parts_merge(dtype: torch.dtype, interpreter: Worker) -> None:
    """With sequences of no group, and one with two new tokens, which never shares, among them."""
    interpreter(
        interpreted.check_shared_prefix,
        PrefixShape(
            owners=((512, 5), (512, 40), (0, 30), (512, 1), (256, 9)),
            new=(1, 1, 1, 1, 2),
            dtype=dtype,
            soft_cap=5.0,
            sinks=True,
        ),
        shared=True,
    )


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_prefixes_have_their_scales_in_both_passes(kv_dtype: torch.dtype, interpreter: Worker) -> None:
    shape = PrefixShape(
        owners=((256, 5), (512, 40), (256, 17), (0, 30)),
        new=(1,) * 4,
        dtype=torch.float16,
        soft_cap=8.0,
        sinks=True,
        kv_dtype=kv_dtype,
    )
    interpreter(interpreted.check_shared_prefix, shape, shared=True)


def test_more_members_than_a_tile_holds(interpreter: Worker) -> None:
    shape = PrefixShape(owners=((256, 3),) * 7, new=(1,) * 7, group=20, dtype=torch.float16)
    interpreter(interpreted.check_shared_prefix, shape, shared=True)


@pytest.mark.parametrize("captured", [False, True])
def test_what_pays_is_a_matter_of_bytes(captured: bool, interpreter: Worker) -> None:
    """8,192 keys are 32 MiB of a layer of 8 heads of 128 in 16 bits. Of 2 heads of 64 in 8 bits they are 2 MiB, which a
    device reads in less time than one more launch takes."""
    for num_kv_heads, head_dim, dtype in ((8, 128, torch.float16), (2, 64, torch.float16), (2, 64, torch.int8)):
        key_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        fewest = interpreter(interpreted.fewest_members_that_share, num_kv_heads, head_dim, dtype, captured)
        assert fewest == 1 + -(-(1 << 20) // (256 * key_bytes))


def test_a_layer_with_a_window_does_not_share(interpreter: Worker) -> None:
    """The step has groups, but in this layer the window ends inside the prefix."""
    shape = PrefixShape(owners=((512, 5), (512, 9)), new=(1, 1), sliding_window=100)
    interpreter(interpreted.check_shared_prefix, shape, shared=True)


def test_what_does_not_pay_is_not_shared(interpreter: Worker) -> None:
    shape = PrefixShape(owners=((128, 5), (128, 9)), new=(1, 1))
    interpreter(interpreted.check_shared_prefix, shape, shared=False)


@pytest.mark.parametrize(
    ("device", "kv_dtype"),
    [(SMALL_DEVICE, None), (LARGE_DEVICE, None), (SMALL_DEVICE, torch.int8)],
    ids=["1 SM", "16 SMs", "1 SM, int8"],
)
def test_a_captured_step_shares_what_each_replay_shares(
    device: DeviceModel, kv_dtype: torch.dtype | None, interpreter: Worker
) -> None:
    """Other groups, other lengths, fewer sequences, and a step that shares nothing in between: no list of an earlier
    replay is left in a later one."""
    replays = (
        Replay(((512, 5), (512, 40), (0, 30), (512, 1), (256, 9)), shared=True),
        Replay(((256, 5), (256, 300), (256, 17), (256, 2), (256, 9), (256, 33)), shared=True),
        Replay(((0, 5), (128, 40), (0, 90)), shared=False),
        Replay(((640, 1), (640, 1)), shared=True),
        Replay(((0, 20), (0, 7), (384, 50), (384, 3)), shared=True),
    )
    interpreter(interpreted.check_captured_prefixes, 6, replays, device, 3, kv_dtype)


def test_a_captured_step_with_more_members_than_a_tile_holds(interpreter: Worker) -> None:
    replays = (Replay(((256, 3),) * 7, shared=True), Replay(((512, 30),) * 3 + ((0, 4),), shared=True))
    interpreter(interpreted.check_captured_prefixes, 8, replays, SMALL_DEVICE, 20, None)


def test_only_a_captured_step_is_staged(interpreter: Worker) -> None:
    interpreter(interpreted.check_only_a_captured_step_is_staged)
