"""The index against a dumb model: a list of blocks, each with its whole prefix written out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.erasure import Selection, document_key
from engine.errors import InvalidRequestError
from engine.prefix_index import MissReason, Node, Place, PrefixIndex, PrefixMatch
from engine.protocol import pack_tokens, unpack_tokens
from engine.scoped_tokens import ScopedTokens

BLOCK = 2
A, B, PUBLIC = b"a" * 16, b"b" * 16, b"p" * 16

Spans = Sequence[tuple[Sequence[int], bytes]]


def sequence_of(*spans: tuple[Sequence[int], bytes]) -> ScopedTokens:
    return ScopedTokens(BLOCK, [(pack_tokens(tokens), scope, scope.decode()) for tokens, scope in spans])


class Holder:
    """A request's part in the game: matches, computes the rest, indexes it, lets go."""

    def __init__(self, index: PrefixIndex, sequence: ScopedTokens, next_id: int) -> None:
        self.index = index
        self.sequence = sequence
        match = index.match_prefix(sequence, len(sequence))
        self.node: Node = index.lock(match)
        self.block_ids: array[int] = match.block_ids[:]
        blocks = len(sequence) // BLOCK
        have = len(match.block_ids)
        self.fresh = array("i", range(next_id, next_id + blocks - have))
        self.wasted: list[int] = []
        if self.fresh:
            keys = index.chain_keys(self.node.last_key, sequence, have, blocks)
            done = index.insert_prefix(self.node, sequence, have, keys, self.fresh)
            self.node = done.node
            self.wasted = list(self.fresh[: len(done.adopted)]) + list(self.fresh[done.num_blocks :])
            self.block_ids += done.adopted + self.fresh[len(done.adopted) : done.num_blocks]

    def release(self) -> None:
        self.index.unlock(self.node)


def insert(index: PrefixIndex, *spans: tuple[Sequence[int], bytes], first_id: int = 0) -> list[int]:
    holder = Holder(index, sequence_of(*spans), first_id)
    holder.release()
    return list(holder.block_ids)


def match(index: PrefixIndex, *spans: tuple[Sequence[int], bytes], limit: int | None = None) -> PrefixMatch:
    sequence = sequence_of(*spans)
    return index.match_prefix(sequence, len(sequence) if limit is None else limit)


def test_a_hit_returns_the_blocks_of_the_longest_cached_prefix() -> None:
    index = PrefixIndex(BLOCK)
    assert insert(index, ([1, 2, 3, 4, 5, 6], A), first_id=10) == [10, 11, 12]
    assert list(match(index, ([1, 2, 3, 4, 5, 6], A)).block_ids) == [10, 11, 12]
    assert list(match(index, ([1, 2, 3, 4, 9, 9], A)).block_ids) == [10, 11]
    assert list(match(index, ([9, 2, 3, 4], A)).block_ids) == []


def test_the_limit_leaves_the_last_token_to_be_computed_and_copies_up_to_it() -> None:
    """I6, and reuse that is exact to the token."""
    index = PrefixIndex(BLOCK)
    insert(index, ([1, 2, 3, 4], A), first_id=10)
    found = match(index, ([1, 2, 3, 4], A), limit=3)
    assert (list(found.block_ids), found.partial_block, found.partial_tokens, found.num_tokens) == ([10], 11, 1, 3)


@pytest.mark.parametrize("wanted", [[1, 2, 3, 7], [1, 2, 3]])
def test_a_prompt_that_diverges_inside_a_block_may_copy_its_first_slots(wanted: list[int]) -> None:
    index = PrefixIndex(BLOCK)
    insert(index, ([1, 2, 3, 4, 5, 6], A), first_id=10)
    found = match(index, (wanted, A))
    assert (found.partial_block, found.partial_tokens, found.num_tokens) == (11, 1, 3)


def test_the_copy_comes_from_the_child_that_shares_most() -> None:
    index = PrefixIndex(4)
    for first, tail in ((0, [5, 1, 1, 1]), (10, [5, 6, 7, 1]), (20, [5, 6, 1, 1]), (30, [4, 6, 7, 8])):
        sequence = ScopedTokens.of([1, 2, 3, 4, *tail], A, 4)
        found = index.match_prefix(sequence, 8)
        node = index.lock(found)
        have = len(found.block_ids)
        keys = index.chain_keys(node.last_key, sequence, have, 2)
        index.unlock(index.insert_prefix(node, sequence, have, keys, array("i", range(first + have, first + 2))).node)
    found = index.match_prefix(ScopedTokens.of([1, 2, 3, 4, 5, 6, 7, 8, 9], A, 4), 9)
    assert (found.partial_block, found.partial_tokens) == (11, 3)


def test_i5_the_same_tokens_in_another_scope_are_a_miss_and_in_the_same_scope_a_hit() -> None:
    index = PrefixIndex(BLOCK)
    insert(index, ([1, 2, 3, 4], A), first_id=10)
    foreign = match(index, ([1, 2, 3, 4], B))
    assert (foreign.num_tokens, foreign.partial_block, foreign.reason) == (0, None, MissReason.COLD)
    assert match(index, ([1, 2, 3, 4], A)).num_tokens == 4


def test_i5_tenants_share_the_public_part_and_nothing_behind_a_private_token() -> None:
    """The block that holds the first private token is private as a whole."""
    index = PrefixIndex(BLOCK)
    insert(index, ([1, 2, 3], PUBLIC), ([4, 5, 6], A), first_id=10)
    assert list(match(index, ([1, 2, 3], PUBLIC), ([4, 5, 6], A)).block_ids) == [10, 11, 12]
    other = match(index, ([1, 2, 3], PUBLIC), ([4, 5, 6], B))
    assert (list(other.block_ids), other.partial_block) == ([10], None)


def test_a_private_block_may_copy_from_a_public_one() -> None:
    index = PrefixIndex(BLOCK)
    insert(index, ([1, 2, 3, 4], PUBLIC), first_id=10)
    found = match(index, ([1, 2, 3], PUBLIC), ([9], A))
    assert (list(found.block_ids), found.partial_block, found.partial_tokens) == ([10], 11, 1)


def test_scopes_that_widen_again_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="narrow"):
        sequence_of(([1, 2], A), ([3], B), ([4], A))


@pytest.mark.parametrize("scope", [A, B])
def test_i5_crafted_collisions_find_nothing_that_is_not_theirs(scope: bytes) -> None:
    """CVE-2025-25183: with a hash that always collides, only equal tokens in an equal scope may hit."""
    index = PrefixIndex(BLOCK, digest=lambda data: b"same key for all")
    insert(index, ([1, 2], A), first_id=10)
    found = match(index, ([3, 4], scope))
    assert (list(found.block_ids), found.num_tokens) == ([], 0)
    assert (list(match(index, ([1, 2], A)).block_ids)) == [10]


def test_i5_a_collision_of_two_scopes_over_the_same_tokens_is_no_hit() -> None:
    """The scope is compared as such, not only hashed."""
    index = PrefixIndex(BLOCK, digest=lambda data: b"same key for all")
    insert(index, ([1, 2], A), first_id=10)
    foreign = match(index, ([1, 2], B))
    assert (list(foreign.block_ids), foreign.num_tokens) == ([], 0)
    assert insert(index, ([1, 2], B), first_id=20) == [20]
    assert [list(match(index, ([1, 2], scope)).block_ids) for scope in (A, B)] == [[10], [20]]


def test_prefixes_with_one_key_stand_side_by_side_and_each_finds_its_own() -> None:
    """Nothing in the tree is found by a hash alone, so a collision costs not even a hit."""
    index = PrefixIndex(BLOCK, digest=lambda data: b"same key for all")
    insert(index, ([1, 2, 7, 8], A), first_id=10)
    insert(index, ([3, 4, 7, 8], A), first_id=20)
    assert list(match(index, ([1, 2, 7, 8], A)).block_ids) == [10, 11]
    assert list(match(index, ([3, 4, 7, 8], A)).block_ids) == [20, 21]


def test_eviction_takes_tails_before_heads_and_the_least_recently_used_first() -> None:
    """I4, in exact order."""
    index = PrefixIndex(BLOCK)
    insert(index, ([1, 1, 2, 2, 3, 3], A), first_id=10)
    insert(index, ([1, 1, 2, 2, 4, 4], A), first_id=20)
    insert(index, ([9, 9], A), first_id=30)
    assert list(index.evict(1, "x")) == [12]
    index.unlock(index.lock(match(index, ([1, 1, 2, 2, 4, 4], A))))
    assert list(index.evict(9, "x")) == [30, 20, 11, 10]
    assert (index.num_blocks, index.num_nodes) == (0, 0)


def test_a_miss_says_why() -> None:
    index = PrefixIndex(BLOCK)
    assert match(index, ([1, 1, 2, 2], A)).reason is MissReason.COLD
    insert(index, ([1, 1, 2, 2], A), first_id=10)
    assert match(index, ([1, 1, 3, 3], A)).reason is MissReason.DIVERGED
    assert match(index, ([5, 5], A)).reason is MissReason.COLD
    index.evict(1, "x")
    assert match(index, ([1, 1, 2, 2], A)).reason is MissReason.EVICTED
    assert match(index, ([1, 1, 2, 2], B)).reason is MissReason.COLD


def test_the_ghost_list_is_bounded() -> None:
    index = PrefixIndex(BLOCK, ghost_entries=1)
    insert(index, ([1, 1], A), first_id=10)
    insert(index, ([2, 2], A), first_id=20)
    index.evict(2, "x")
    assert match(index, ([1, 1], A)).reason is MissReason.COLD
    assert match(index, ([2, 2], A)).reason is MissReason.EVICTED


def test_an_evicted_and_reused_block_is_never_found_under_its_old_prompt() -> None:
    """nano-vllm#163: an old hash still led to a reused block, and unrelated KV was served."""
    index = PrefixIndex(BLOCK)
    (block,) = insert(index, ([1, 1], A), first_id=7)
    assert list(index.evict(1, "x")) == [block]
    insert(index, ([2, 2], A), first_id=7)
    assert match(index, ([1, 1], A)).num_tokens == 0
    assert list(match(index, ([2, 2], A)).block_ids) == [7]


def test_match_changes_nothing_not_even_recency() -> None:
    index = PrefixIndex(BLOCK)
    insert(index, ([1, 1], A), first_id=10)
    insert(index, ([2, 2], A), first_id=20)
    match(index, ([1, 1], A))
    assert list(index.evict(1, "x")) == [10]


@dataclass
class ModelBlock:
    """One cached block of the dumb model: everything that identifies it, written out."""

    block_id: int
    tokens: tuple[int, ...]  # from the prompt's beginning to the block's end
    scopes: tuple[bytes, ...]  # of every block of that prefix
    locks: int = 0
    stamp: tuple[int, int] = (0, 0)  # (when it was last let go, minus its depth)


SHORT_TOKENS = st.lists(st.integers(0, 2), max_size=9)


class IndexMachine(RuleBasedStateMachine):
    """Keys from a three-token alphabet, so that prefixes meet, split and merge all the time; eviction order exact."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(BLOCK, ghost_entries=8)
        self.model: list[ModelBlock] = []
        self.holders: list[Holder] = []
        self.next_id = 0
        self.clock = 0

    def identity(
        self, sequence: ScopedTokens, tokens: Sequence[int], block: int
    ) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        return tuple(tokens[: (block + 1) * BLOCK]), tuple(sequence.span(b)[0] for b in range(block + 1))

    def find(self, tokens: tuple[int, ...], scopes: tuple[bytes, ...]) -> ModelBlock | None:
        return next((entry for entry in self.model if (entry.tokens, entry.scopes) == (tokens, scopes)), None)

    def draw_sequence(self, data: st.DataObject) -> tuple[ScopedTokens, list[int]]:
        public, private = data.draw(SHORT_TOKENS), data.draw(SHORT_TOKENS)
        who = data.draw(st.sampled_from([A, B]))
        spans = [(public, PUBLIC), (private or [0], who)]
        return sequence_of(*[span for span in spans if span[0]]), public + (private or [0])

    @rule(data=st.data())
    def match_is_the_longest_prefix_to_the_token(self, data: st.DataObject) -> None:
        sequence, tokens = self.draw_sequence(data)
        limit = data.draw(st.integers(0, len(tokens)))
        found = self.index.match_prefix(sequence, limit)
        expected: list[int] = []
        while (len(expected) + 1) * BLOCK <= limit:
            entry = self.find(*self.identity(sequence, tokens, len(expected)))
            if entry is None:
                break
            expected.append(entry.block_id)
        assert list(found.block_ids) == expected
        assert found.partial_tokens == self.best_partial(sequence, tokens, limit, len(expected))
        if found.partial_block is not None:
            source = next(entry for entry in self.model if entry.block_id == found.partial_block)
            start = len(expected) * BLOCK
            assert source.tokens[: start + found.partial_tokens] == tuple(tokens[: start + found.partial_tokens])
            assert source.scopes[-1] in sequence.scopes_up_to(len(expected))

    @rule(data=st.data())
    def a_place_that_is_followed_part_by_part_ends_where_the_match_does(self, data: st.DataObject) -> None:
        private, cut = data.draw(SHORT_TOKENS), data.draw(st.integers(0, 9))
        parts = [(data.draw(SHORT_TOKENS), PUBLIC), (private[:cut], A), (private[cut:], A)]
        sequence = sequence_of(*parts, ([0], A))
        length = len(sequence) - 1
        found = self.index.match_prefix(sequence, length)
        place = Place(self.index.root, 0, b"")
        for tokens, scope in parts:
            place = self.index.follow(place, pack_tokens(tokens), scope)
        assert (place.node, place.blocks) == (found.node, found.node_blocks)
        assert place.rest == pack_tokens(unpack_tokens(bytes(sequence.packed))[len(found.block_ids) * BLOCK : length])
        # A whole block of a wider scope can be copied, but a place ends before it.
        is_short = len(place.rest) < self.index.stride
        assert self.index.is_cached(place, (PUBLIC, A)) == (is_short and found.num_tokens == length)
        missing = len(found.block_ids)
        if missing < length // BLOCK:
            assert not self.index.goes_on(place, sequence.span(missing)[0], sequence.block_tokens(missing))
        if missing:
            start = Place(self.index.root, 0, b"")
            assert self.index.goes_on(start, sequence.span(0)[0], sequence.block_tokens(0))

    def best_partial(self, sequence: ScopedTokens, tokens: list[int], limit: int, block: int) -> int:
        if limit <= block * BLOCK:
            return 0
        prefix, readable, best = tuple(tokens[: block * BLOCK]), sequence.scopes_up_to(block), 0
        scopes = tuple(sequence.span(b)[0] for b in range(block))
        for entry in self.model:
            head = entry.tokens[: block * BLOCK]
            if len(entry.tokens) != (block + 1) * BLOCK or head != prefix or entry.scopes[:-1] != scopes:
                continue
            if entry.scopes[-1] in readable:
                tail, wanted = entry.tokens[block * BLOCK :], tokens[block * BLOCK : limit]
                shared = next((i for i, (x, y) in enumerate(zip(tail, wanted, strict=False)) if x != y), None)
                best = max(best, min(len(tail), len(wanted)) if shared is None else shared)
        return best

    @rule(data=st.data())
    def compute_and_hold(self, data: st.DataObject) -> None:
        sequence, tokens = self.draw_sequence(data)
        holder = Holder(self.index, sequence, self.next_id)
        self.next_id += 16
        assert not holder.wasted
        for block, block_id in enumerate(holder.block_ids):
            identity = self.identity(sequence, tokens, block)
            entry = self.find(*identity)
            if entry is None:
                entry = ModelBlock(block_id, *identity)
                self.model.append(entry)
            assert entry.block_id == block_id
            entry.locks += 1
        self.holders.append(holder)

    @rule(data=st.data())
    def compute_what_somebody_indexed_meanwhile(self, data: st.DataObject) -> None:
        """mini-sglang#142: the later one must get the index's blocks, and only its own duplicates back."""
        sequence, tokens = self.draw_sequence(data)
        blocks = len(sequence) // BLOCK
        if not blocks:
            return
        keys = self.index.chain_keys(self.index.root.last_key, sequence, 0, blocks)
        own = array("i", range(self.next_id, self.next_id + blocks))
        self.next_id += 16
        done = self.index.insert_prefix(self.index.root, sequence, 0, keys, own)
        self.clock += 1
        for block in range(blocks):
            identity = self.identity(sequence, tokens, block)
            entry = self.find(*identity)
            assert (entry is not None) == (block < len(done.adopted))
            if entry is None:
                entry = ModelBlock(own[block], *identity)
                self.model.append(entry)
            else:
                assert entry.block_id == done.adopted[block]
            if not entry.locks:
                entry.stamp = (self.clock, -block)
        self.index.unlock(done.node)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.clock += 1
        held = set(holder.block_ids)
        for entry in self.model:
            if entry.block_id in held:
                entry.locks -= 1
                if not entry.locks:
                    entry.stamp = (self.clock, -len(entry.scopes) + 1)
        holder.release()

    @rule(count=st.integers(1, 6))
    def evict_in_exact_order(self, count: int) -> None:
        evictable = sorted((entry for entry in self.model if not entry.locks), key=lambda entry: entry.stamp)
        assert list(self.index.evict(count, "x")) == [entry.block_id for entry in evictable[:count]]
        for entry in evictable[:count]:
            self.model.remove(entry)

    @invariant()
    def i1_to_i4_and_i8_hold(self) -> None:
        locks = {entry.block_id: entry.locks for entry in self.model}
        self.index.check_integrity(locks.__getitem__)
        assert self.index.num_blocks == len(self.model)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("attempt", range(8))
def test_a_document_that_stands_twice_on_a_path_is_erased_with_all_behind_it(attempt: int) -> None:
    """The part below went with the part above, and was then looked at again; which came first was chance."""
    index = PrefixIndex(BLOCK)
    tokens = [1, 1, 2, 2, 3, 3, 2, 2, 4, 4]  # the document is 2, 2
    document = document_key("t", f"d{attempt}")
    for n, prompt in enumerate((tokens, [*tokens[:6], 9, 9])):  # the other one forks between the two
        sequence = ScopedTokens(BLOCK, [(pack_tokens(prompt), A, "t")], [(2, document), (6, document)][: 2 - n])
        Holder(index, sequence, 10 * (n + 1)).release()
    freed = index.erase(Selection(document_ids=frozenset({f"d{attempt}"}))).freed
    assert sorted(freed) == [11, 12, 13, 14, 20]
    assert index.num_blocks == 1
    index.check_integrity(lambda block_id: 0)
