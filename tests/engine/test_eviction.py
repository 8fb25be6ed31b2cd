"""Floors, quotas, the ledger, and both policies, on the tree and through the engine."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.eviction import Eviction, Policy
from engine.prefix_index import Node, PrefixIndex
from engine.protocol import TenantPolicy
from engine.scoped_tokens import ScopedTokens
from tests.engine.fake_runner import expected_output
from tests.engine.harness import SCOPE_A, SCOPE_B, VOCAB, Harness

SCOPES = {name: name.encode().ljust(16, b"-") for name in ("acme", "borealis", "cobalt")}
GROUP = b"a cache group---"
BLOCK = 1


def hold(index: PrefixIndex, owner: str, tokens: list[int], first_id: int, scope: bytes | None = None) -> Node:
    sequence = ScopedTokens.of(tokens, scope or SCOPES[owner], BLOCK, owner)
    match = index.match_prefix(sequence, len(tokens))
    node = index.lock(match)
    have = len(match.block_ids)
    keys = index.chain_keys(node.last_key, sequence, have, len(tokens))
    fresh = array("i", range(first_id, first_id + len(tokens) - have))
    return index.insert_prefix(node, sequence, have, keys, fresh).node


def put(index: PrefixIndex, owner: str, tokens: list[int], first_id: int) -> None:
    index.unlock(hold(index, owner, tokens, first_id))


def test_a_floor_protects_from_others_while_they_have_more_than_theirs() -> None:
    index = PrefixIndex(BLOCK)
    index.order.set_limits("acme", 2, None)
    put(index, "acme", [1, 2, 3], 10)
    put(index, "borealis", [1, 2, 3], 20)
    assert list(index.evict(3, "borealis")) == [12, 22, 21]
    assert index.order.ledger == {Eviction("acme", "borealis"): 1, Eviction("borealis", "borealis"): 2}


def test_an_owner_comes_up_to_its_floor_at_the_cost_of_who_has_more_than_theirs() -> None:
    """Its own are the oldest: it gave them for its newest, and nobody else gave anything."""
    index = PrefixIndex(BLOCK)
    index.order.set_limits("acme", 3, None)
    put(index, "acme", [1, 2, 3], 10)
    put(index, "borealis", [1], 20)
    assert list(index.evict(2, "acme")) == [20, 12]


def test_above_its_floor_an_owner_gives_its_own_oldest_down_to_the_floor() -> None:
    index = PrefixIndex(BLOCK)
    index.order.set_limits("acme", 1, None)
    put(index, "acme", [1, 2, 3], 10)
    put(index, "borealis", [1], 20)
    assert list(index.evict(4, "acme")) == [12, 11, 20, 10]


def test_floors_never_refuse_a_request() -> None:
    """When everyone is at the floor, the least recently used goes after all."""
    index = PrefixIndex(BLOCK)
    for owner in ("acme", "borealis"):
        index.order.set_limits(owner, 2, None)
    put(index, "acme", [1, 2], 10)
    put(index, "borealis", [1, 2], 20)
    assert list(index.evict(3, "cobalt")) == [11, 10, 21]


def test_what_lay_on_the_shelf_comes_back_when_its_owner_grows() -> None:
    index = PrefixIndex(BLOCK)
    index.order.set_limits("acme", 2, None)
    put(index, "acme", [1, 2], 10)
    put(index, "borealis", [1], 20)
    assert list(index.evict(1, "cobalt")) == [20]
    put(index, "acme", [5], 30)
    put(index, "borealis", [1], 40)
    assert list(index.evict(1, "cobalt")) == [11]


def test_over_its_quota_an_owner_gives_first_and_not_more_than_the_excess() -> None:
    """Mooncake#3741: own least recently used blocks first, visibly."""
    index = PrefixIndex(BLOCK)
    put(index, "borealis", [1, 2], 20)
    put(index, "acme", [1, 2, 3], 10)
    index.order.set_limits("acme", 0, 2)
    assert list(index.evict(2, "cobalt")) == [12, 21]


def test_trimming_brings_an_owner_back_to_its_quota_but_takes_nothing_that_is_held() -> None:
    index = PrefixIndex(BLOCK)
    index.order.set_limits("acme", 0, 2)
    held = hold(index, "acme", [1, 2, 3], 10)
    put(index, "acme", [7, 8], 20)
    assert list(index.trim("acme")) == [21, 20]
    assert list(index.trim("acme")) == []
    index.unlock(held)
    assert list(index.trim("acme")) == [12]


def test_gdsf_keeps_what_is_hit_often_and_lets_old_popularity_fade() -> None:
    index = PrefixIndex(BLOCK, policy="gdsf")
    for _ in range(4):
        put(index, "acme", [1], 10)
    put(index, "acme", [2], 20)
    put(index, "acme", [3], 30)
    assert list(index.evict(1, "x")) == [20]
    for number in range(40):
        put(index, "acme", [100 + number], 100 + number)
        index.evict(1, "x")
    assert index.match_prefix(ScopedTokens.of([1], SCOPES["acme"], BLOCK, "acme"), 1).num_tokens == 0


@pytest.mark.parametrize(("policy", "first"), [("gdsf", 20), ("lru", 10)])
def test_gdsf_weighs_a_block_by_its_owners_weight(policy: Policy, first: int) -> None:
    """Two prompts asked equally often: the one of the tenant with less weight goes, though it was used later."""
    index = PrefixIndex(BLOCK, policy=policy)
    index.order.set_limits("acme", 0, None, weight=3.0)
    for owner, block in (("acme", 10), ("borealis", 20)):
        for _ in range(2):
            put(index, owner, [1], block)
    assert list(index.evict(1, "x")) == [first]


def test_gdsf_remembers_uses_of_what_had_to_go() -> None:
    """A document that is asked for more often than another, but never twice before it has to go, was always new."""
    index = PrefixIndex(BLOCK, policy="gdsf")
    for _ in range(3):
        put(index, "acme", [1], 10)
        index.evict(1, "x")
    put(index, "acme", [1, 5], 10)  # 1 was used three times before; 5, in the same run, is new
    for _ in range(2):
        put(index, "acme", [2], 20)
    assert index.num_nodes == 3
    assert list(index.evict(2, "x")) == [11, 20]
    assert index.match_prefix(ScopedTokens.of([1], SCOPES["acme"], BLOCK, "acme"), 1).num_tokens == 1


def test_novel_prompts_under_pressure_leave_nothing_behind_in_the_order() -> None:
    """dynamo#4429: the index grew until the host ran out of memory. Here, entries of evicted nodes did."""
    index = PrefixIndex(BLOCK)
    for number in range(3000):
        put(index, "acme", [number, 1, 2], 3 * number)
        if index.num_blocks > 60:
            index.evict(3, "borealis")
    acme = index.order.owner("acme")
    assert index.num_nodes <= 21
    assert len(index.order._heap) <= 2 * index.num_nodes + 64
    assert len(acme.heap) + len(acme.shelf) <= 4 * index.num_nodes + 64


def test_who_began_a_run_pays_for_it_in_a_shared_scope() -> None:
    """A cache group's scope has an owner a member: the run grew by one and was charged to the other."""
    index = PrefixIndex(BLOCK)
    index.unlock(hold(index, "acme", [1, 2], 10, GROUP))
    index.unlock(hold(index, "borealis", [1, 2, 3, 4], 20, GROUP))
    assert {name: owner.num_blocks for name, owner in index.order.owners.items()} == {"acme": 4}
    index.evict(9, "x")
    assert {name: owner.num_blocks for name, owner in index.order.owners.items()} == {"acme": 0}


def test_the_ledger_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.eviction._MAX_LEDGER", 2)
    index = PrefixIndex(BLOCK)
    put(index, "acme", [1, 2, 3, 4], 10)
    for presser in ("a", "b", "c", "d"):
        index.evict(1, presser)
    assert index.order.ledger == {Eviction("acme", "a"): 1, Eviction("acme", "b"): 1, Eviction("other", "other"): 2}


class LimitsMachine(RuleBasedStateMachine):
    """Owners with floors and quotas, holding and letting go; every eviction is judged by what it left behind."""

    policy: Policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(BLOCK, policy=self.policy)
        self.held: list[Node] = []
        self.floors: dict[str, int] = {}
        self.quotas: dict[str, int | None] = {}
        self.next_id = 0

    @rule(owner=st.sampled_from(sorted(SCOPES)), floor=st.integers(0, 4), quota=st.none() | st.integers(0, 6))
    def limit(self, owner: str, floor: int, quota: int | None) -> None:
        self.index.order.set_limits(owner, floor, quota)
        self.floors[owner], self.quotas[owner] = floor, quota

    @rule(
        owner=st.sampled_from(sorted(SCOPES)),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        shared=st.booleans(),
    )
    def compute(self, owner: str, tokens: list[int], shared: bool) -> None:
        """In a scope of its own, or in one that all owners share."""
        self.held.append(hold(self.index, owner, tokens, self.next_id, GROUP if shared else None))
        self.next_id += 8

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.index.unlock(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(pressed_by=st.sampled_from(sorted(SCOPES)))
    def evict_one(self, pressed_by: str) -> None:
        before = {name: owner.num_blocks for name, owner in self.index.order.owners.items()}
        evictable = {leaf.owner.name for leaf in self.index.order.candidates()}
        freed = self.index.evict(1, pressed_by)
        assert len(freed) == (1 if evictable else 0)
        for name, owner in self.index.order.owners.items():
            if owner.num_blocks == before.get(name, 0) or name == pressed_by:
                continue
            assert (
                before[name] > self.floors.get(name, 0)
                or self.is_over(name, before)
                or not any(
                    other == pressed_by or before[other] > self.floors.get(other, 0) or self.is_over(other, before)
                    for other in evictable
                    if other != name
                )
            )

    def is_over(self, name: str, counts: dict[str, int]) -> bool:
        quota = self.quotas.get(name)
        return quota is not None and counts[name] > quota

    @rule(owner=st.sampled_from(sorted(SCOPES)))
    def trim(self, owner: str) -> None:
        self.index.trim(owner)
        if self.is_over(owner, {name: o.num_blocks for name, o in self.index.order.owners.items()}):
            assert all(leaf.owner.name != owner for leaf in self.index.order.candidates())

    @invariant()
    def i4_and_the_owners_accounts_hold(self) -> None:
        locks = {block: node.lock_count for node in self.index.nodes() for block in node.block_ids}
        self.index.check_integrity(locks.__getitem__)


class GdsfLimitsMachine(LimitsMachine):
    policy: Policy = "gdsf"


TestLimits = LimitsMachine.TestCase
TestLimits.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestGdsfLimits = GdsfLimitsMachine.TestCase
TestGdsfLimits.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------------- through the engine


@pytest.mark.parametrize(("floor", "still_cached"), [(40, 39), (0, 0)])
def test_a_flood_of_another_tenant_leaves_what_the_floor_protects(floor: int, still_cached: int) -> None:
    """mlx-serve#378: a batch sweep evicted the live chat. Without the floor it does here, too."""
    harness = Harness(num_blocks=24, block_size=4)
    quiet = list(range(40))
    harness.submit(quiet, tenant="quiet", scope=SCOPE_A, policy=TenantPolicy(kv_floor_tokens=floor))
    harness.run()
    for number in range(20):
        harness.submit([number, *range(100, 130)], tenant="noisy", scope=SCOPE_B)
        harness.run()
    name = harness.submit(quiet, 2, tenant="quiet", scope=SCOPE_A, policy=TenantPolicy(kv_floor_tokens=floor))
    harness.run()
    assert harness.accounts[name].num_cached_tokens == still_cached
    assert harness.tokens_of(name) == expected_output(quiet, 2, VOCAB - 1)
    harness.check()


def test_a_quota_bounds_what_a_tenant_keeps_and_refuses_nothing() -> None:
    harness = Harness(num_blocks=64, block_size=4)
    policy = TenantPolicy(kv_quota_tokens=32)
    for number in range(6):
        prompt = [number, *range(100, 150)]
        name = harness.submit(prompt, 2, tenant="small", policy=policy)
        harness.run()
        harness.engine.idle()
        assert harness.tokens_of(name) == expected_output(prompt, 2, VOCAB - 1)
        harness.check()
        assert harness.manager.counts().cached == 8


def test_a_quota_that_shrinks_holds_from_the_next_request_on_and_is_no_matter_of_others() -> None:
    harness = Harness(num_blocks=64, block_size=4)
    other = list(range(200, 240))
    harness.submit(other, 1, tenant="other", scope=SCOPE_B)
    harness.submit(range(40), 1, tenant="small", policy=TenantPolicy(kv_quota_tokens=40))
    harness.run()
    assert harness.manager.counts().cached == 10 + 10
    harness.submit([250], 1, tenant="small", policy=TenantPolicy(kv_quota_tokens=8))
    harness.step()
    assert harness.manager.counts().cached == 10 + 2
    harness.run()
    name = harness.submit(range(40), 1, tenant="small", policy=TenantPolicy(kv_quota_tokens=8))
    harness.run()
    assert harness.accounts[name].num_cached_tokens == 8
    name = harness.submit(other, 1, tenant="other", scope=SCOPE_B)
    harness.run()
    assert harness.accounts[name].num_cached_tokens == 39
    harness.check()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_burst_of_one_prompt_above_the_quota_is_computed_once(max_tokens: int) -> None:
    """vllm#9643, for a tenant whose prompt is larger than what it may keep: the others are waiting for it."""
    harness = Harness(num_blocks=256, block_size=4, token_budget=64, chunk=16)
    policy = TenantPolicy(kv_quota_tokens=16)
    names = [harness.submit(range(80), max_tokens, policy=policy) for _ in range(6)]
    harness.run()
    assert [harness.accounts[name].num_cached_tokens for name in names] == [0] + [79] * 5
    harness.engine.idle()
    assert harness.manager.counts().cached == 4
    harness.check()


def test_what_is_reserved_from_an_owner_is_what_others_have_of_their_floors() -> None:
    index = PrefixIndex(BLOCK)
    for owner, floor in (("acme", 3), ("borealis", 2), ("cobalt", 4)):
        index.order.set_limits(owner, floor, None)
    put(index, "acme", [1, 2, 3, 4], 10)
    put(index, "borealis", [1], 20)
    reserved = {name: index.order.num_reserved_from(name) for name in ("acme", "borealis", "cobalt", "new")}
    assert reserved == {"acme": 1, "borealis": 3, "cobalt": 4, "new": 4}
    index.evict(1, "new")
    index.order.set_limits("acme", 0, None)
    assert index.order.num_reserved_from("new") == 1


def test_what_a_tenant_holds_of_its_floor_is_not_kept_free_for_it_once_more() -> None:
    """Others had to wait beside free blocks until it had ended."""
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=4)
    harness.submit(range(150), 60, tenant="quiet", policy=TenantPolicy(kv_floor_tokens=160))
    for _ in range(12):
        harness.step()
    assert harness.manager.index.order.owner("quiet").num_held > 30
    other = harness.submit(range(100, 120), 2, tenant="other", scope=SCOPE_B)
    for _ in range(5):
        harness.step()
    assert other in harness.finished
    harness.run()
    harness.check()


def test_one_that_holds_the_device_alone_takes_the_floors_of_others_and_one_beside_them_waits() -> None:
    harness = Harness(num_blocks=24, block_size=4)
    floor = TenantPolicy(kv_floor_tokens=40)
    quiet = list(range(40))
    harness.submit(quiet, 1, tenant="quiet", policy=floor)
    harness.run()
    small = harness.submit(range(100, 120), 30, tenant="noisy", scope=SCOPE_B)
    harness.step()
    large = harness.submit(range(120, 180), 2, tenant="noisy", scope=SCOPE_B)
    while small not in harness.finished:
        assert harness.manager.index.order.owner("quiet").num_blocks == 10
        harness.step()
    harness.run()
    assert harness.tokens_of(large) == expected_output(list(range(120, 180)), 2, VOCAB - 1)
    assert harness.manager.index.order.owner("quiet").num_blocks < 10
    harness.check()
