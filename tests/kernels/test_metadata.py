from __future__ import annotations

from array import array

import pytest
import torch

from kernels.metadata import AttentionMetadata


def test_the_worked_example() -> None:
    """The drawing at the top of `kernels/metadata.py`."""
    metadata = AttentionMetadata.build([[7, 2], [4, 9], [1, 0]], [3, 5, 4], [2, 1, 0], 4, "cpu")
    assert metadata.block_table.tolist() == [[7, 2], [4, 9], [1, 0]]
    assert metadata.slot_mapping.tolist() == [31, 8, 37]
    assert metadata.cu_seqlens_q.tolist() == [0, 2, 3, 3]
    assert metadata.seq_lens.tolist() == [5, 6, 4]
    assert [list(table) for table in metadata.host_block_tables] == [[7, 2], [4, 9], [1]]
    assert metadata.host_query_lens == [2, 1, 0]
    assert metadata.host_seq_lens == [5, 6, 4]


def test_dtypes_are_those_that_kernels_read() -> None:
    metadata = AttentionMetadata.build([[0]], [0], [1], 1, "cpu")
    assert metadata.block_table.dtype == metadata.cu_seqlens_q.dtype == metadata.seq_lens.dtype == torch.int32
    assert metadata.slot_mapping.dtype == torch.int64


def test_shorter_rows_are_padded_and_blocks_without_keys_left_out() -> None:
    """A block that is allocated ahead holds no key: in the table it could be gathered, and its NaN with it."""
    metadata = AttentionMetadata.build([[3, 1, 8, 6], [5, 2]], [0, 1], [9, 1], 4, "cpu")
    assert metadata.block_table.tolist() == [[3, 1, 8], [5, 0, 0]]
    assert [list(table) for table in metadata.host_block_tables] == [[3, 1, 8], [5]]
    assert metadata.slot_mapping.tolist() == [12, 13, 14, 15, 4, 5, 6, 7, 32, 21]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_slots_are_the_positions_seen_through_the_block_table(block_size: int) -> None:
    table = [9, 4, 7, 1, 0, 3, 8, 2, 6, 5] * 2
    for start in range(8):
        for new in range(8):
            metadata = AttentionMetadata.build([table], [start], [new], block_size, "cpu")
            expected = [table[p // block_size] * block_size + p % block_size for p in range(start, start + new)]
            assert metadata.slot_mapping.tolist() == expected


def test_block_tables_stay_packed() -> None:
    """As lists, the blocks of 32 long sequences were 16,000 Python objects in every step: 3 ms."""
    table = array("i", [9, 4, 7, 1])
    metadata = AttentionMetadata.build([table, array("i", [5])], [0, 0], [4, 2], 2, "cpu")
    assert metadata.host_block_tables == [array("i", [9, 4]), array("i", [5])]
    table[0] = 3  # the request's own table goes on changing
    assert metadata.host_block_tables[0][0] == 9
    assert metadata.block_table.tolist() == [[9, 4], [5, 0]]


def test_a_table_that_is_too_short_is_our_own_mistake() -> None:
    """Else a kernel would read the padding: block 0, another request's KV."""
    with pytest.raises(AssertionError, match="2 blocks of 4 slots for 9 tokens"):
        AttentionMetadata.build([[1, 2]], [8], [1], 4, "cpu")


def test_one_length_for_each_sequence() -> None:
    with pytest.raises(ValueError, match="zip"):
        AttentionMetadata.build([[1], [2]], [0, 0], [1], 4, "cpu")


def test_no_sequences() -> None:
    metadata = AttentionMetadata.build([], [], [], 4, "cpu")
    assert metadata.block_table.shape == (0, 0)
    assert metadata.slot_mapping.tolist() == []
    assert metadata.cu_seqlens_q.tolist() == [0]
