"""The pool alone: I1 and I3, exact ids where order is the contract, and a state machine against a dumb model."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, BlockState
from engine.errors import InvariantError


def test_blocks_are_handed_out_in_order_and_come_back_at_the_end() -> None:
    pool = BlockPool(5)
    assert list(pool.allocate(3)) == [0, 1, 2]
    pool.release([1])
    assert pool.free_list == [3, 4, 1]
    assert list(pool.allocate(3)) == [3, 4, 1]


def test_a_block_listed_twice_in_one_release_is_enqueued_once() -> None:
    """vllm#42571: the free count grew by two, and later one block had two owners."""
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    with pytest.raises(InvariantError, match="I3"):
        pool.release([block, block])
    pool.check_integrity()
    assert pool.free_list.count(block) == 1
    assert (pool.num_free, pool.num_cached, pool.num_active) == (4, 0, 0)


def test_a_block_held_twice_may_be_released_twice_and_is_enqueued_once() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.release([block, block])
    pool.check_integrity()
    assert pool.free_list.count(block) == 1


def test_an_indexed_block_is_cached_when_nobody_holds_it_and_free_only_after_eviction() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.mark_indexed([block])
    assert pool.block(block).state is BlockState.ACTIVE
    pool.release([block])
    assert pool.block(block) == (block, 0, BlockState.CACHED)
    pool.acquire([block])
    with pytest.raises(InvariantError, match="I1"):
        pool.evict([block])
    pool.release([block])
    pool.evict([block])
    assert pool.free_list == [1, block]


def test_a_free_block_cannot_be_acquired_and_more_than_all_cannot_be_allocated() -> None:
    pool = BlockPool(2)
    with pytest.raises(InvariantError, match="I1"):
        pool.acquire([0])
    with pytest.raises(InvariantError, match="I1"):
        pool.allocate(3)
    assert pool.num_free == 2


class PoolMachine(RuleBasedStateMachine):
    """The pool against a dictionary of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.tables: list[list[int]] = []
        self.indexed: set[int] = set()

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        ids = list(self.pool.allocate(count))
        assert len(set(ids)) == count
        assert all(not self.holders(block) and block not in self.indexed for block in ids)
        self.tables.append(ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(array("i", table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def index_some(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        part = table[: data.draw(st.integers(0, len(table)))]
        self.pool.mark_indexed(part)
        self.indexed.update(part)

    @precondition(lambda self: self.indexed)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.indexed)), unique=True))
        self.pool.acquire(blocks)
        self.tables.append(blocks)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        cached = [block for block in sorted(self.indexed) if not self.holders(block)]
        if cached:
            gone = data.draw(st.lists(st.sampled_from(cached), unique=True))
            self.pool.evict(gone)
            self.indexed.difference_update(gone)

    @invariant()
    def i1_every_block_is_in_exactly_one_state_and_i3_ref_counts_are_tables(self) -> None:
        self.pool.check_integrity()
        states = dict.fromkeys(BlockState, 0)
        for block in range(self.pool.num_blocks):
            entry = self.pool.block(block)
            assert entry.ref_count == self.holders(block)
            states[entry.state] += 1
        assert states[BlockState.FREE] == self.pool.num_free
        assert states[BlockState.CACHED] == self.pool.num_cached
        assert states[BlockState.ACTIVE] == self.pool.num_active
        assert sum(states.values()) == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
