"""The directory of a tier against a dumb model: I1, I4, I5, I8, eviction order, erasure, and its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.erasure import Selection, document_key
from engine.errors import InvariantError
from engine.eviction import Policy
from engine.prefix_index import BlockIdentity, BlockPath
from engine.protocol import pack_tokens, unpack_tokens
from engine.scoped_tokens import ScopedTokens
from engine.tiers.directory import TierDirectory

BLOCK = 2
ROOT = bytes(16)
A, B = b"a" * 16, b"b" * 16


Digest = Callable[[bytes, bytes, bytes], bytes]  # of the parent's key, the scope and the tokens


def honest(parent: bytes, scope: bytes, packed: bytes) -> bytes:
    return xxhash.xxh3_128_digest(parent + scope + packed)


def blunt(parent: bytes, scope: bytes, packed: bytes) -> bytes:
    """Every scope is the same to it, and token 2n the same as 2n + 1."""
    return xxhash.xxh3_128_digest(parent + pack_tokens([token // 2 for token in unpack_tokens(packed)]))


def blocks_of(
    tokens: list[int], scope: bytes = A, document: str | None = None, digest: Digest = honest
) -> list[BlockIdentity]:
    """The identities of a prompt's full blocks; `document` starts in the first."""
    blocks: list[BlockIdentity] = []
    key = ROOT
    for depth in range(len(tokens) // BLOCK):
        packed = pack_tokens(tokens[depth * BLOCK : (depth + 1) * BLOCK])
        key = digest(key, scope, packed)
        documents = (document_key(scope.decode(), document),) if document is not None and not depth else ()
        blocks.append(BlockIdentity(key, scope, scope.decode(), packed, documents))
    return blocks


def path_of(blocks: list[BlockIdentity]) -> BlockPath:
    spans = [(block.scope, end) for end, block in enumerate(blocks, 1)]
    return BlockPath(b"".join(block.tokens for block in blocks), spans, b"".join(block.key for block in blocks))


def fill(directory: TierDirectory, tokens: list[int], scope: bytes = A, document: str | None = None) -> list[int]:
    blocks = blocks_of(tokens, scope, document)
    slots = directory.find_path(path_of(blocks))
    for block in blocks[len(slots) :]:
        slot = directory.add(block, slots[-1] if slots else None)
        if slot is None:
            break
        assert directory.ready(slot)
        slots.append(slot)
    return slots


def match(
    directory: TierDirectory, tokens: list[int], scope: bytes = A, first: int = 0, digest: Digest = honest
) -> list[int]:
    sequence = ScopedTokens.of(tokens, scope, BLOCK)
    return directory.match(sequence, first, [block.key for block in blocks_of(tokens, scope, None, digest)[first:]])


def test_a_path_is_found_from_any_block_on_and_only_when_it_is_ready() -> None:
    directory = TierDirectory(8, BLOCK, ROOT)
    slots: list[int] = []
    for block in blocks_of([1, 2, 3, 4, 5, 6]):
        slot = directory.add(block, slots[-1] if slots else None)
        assert slot is not None
        slots.append(slot)
    assert match(directory, [1, 2, 3, 4, 5, 6]) == []
    for slot in slots[:2]:
        directory.ready(slot)
    assert match(directory, [1, 2, 3, 4, 5, 6]) == slots[:2]
    assert match(directory, [1, 2, 3, 4, 5, 6], first=1) == slots[1:2]


def test_i5_the_same_tokens_in_another_scope_are_not_found() -> None:
    directory = TierDirectory(8, BLOCK, ROOT)
    fill(directory, [1, 2, 3, 4], A)
    assert match(directory, [1, 2, 3, 4], B) == []
    assert len(match(directory, [1, 2, 3, 4], A)) == 2


def test_i8_a_key_that_collides_leads_to_no_payload_of_another_prefix() -> None:
    """A crafted second prefix with the key of the first: the tokens of the whole path are compared."""
    directory = TierDirectory(8, BLOCK, ROOT)
    fill(directory, [1, 2, 3, 4])
    keys = [block.key for block in blocks_of([1, 2, 3, 4])]
    for forged in ([9, 9, 3, 4], [1, 2, 9, 9]):
        found = directory.match(ScopedTokens.of(forged, A, BLOCK), 1, keys[1:])
        assert found == []
    assert len(directory.match(ScopedTokens.of([1, 2, 3, 4], A, BLOCK), 1, keys[1:])) == 1
    # The same under another scope, and under the right tokens at another depth.
    assert directory.match(ScopedTokens.of([1, 2, 3, 4], B, BLOCK), 1, keys[1:]) == []
    assert directory.match(ScopedTokens.of([1, 2, 1, 2, 3, 4], A, BLOCK), 2, keys[1:]) == []


def test_a_key_that_is_anothers_keeps_nothing_out_that_stands_before_it() -> None:
    """The path's end is found by its key, and is another's: what is really here is found all the same, and no more."""
    directory = TierDirectory(8, BLOCK, ROOT)
    head, own, last = blocks_of([1, 2, 3, 4, 5, 6])
    other = fill(directory, [7, 8, 9, 9])
    forged = own._replace(key=blocks_of([7, 8, 9, 9])[1].key)
    assert directory.find_path(path_of([head, forged, last])) == []
    slot = directory.add(head, None)
    assert directory.find_path(path_of([head, forged, last])) == [slot]
    assert directory.find_path(path_of([head, forged])) == [slot]
    assert directory.add(forged, slot) is None
    assert match(directory, [7, 8, 9, 9]) == other
    directory.check_integrity()


def test_i4_nothing_is_added_without_its_parent_and_a_full_tier_evicts_leaves_only() -> None:
    directory = TierDirectory(3, BLOCK, ROOT)
    with pytest.raises(InvariantError, match="I4"):
        directory.add(blocks_of([1, 2, 3, 4])[1], 0)
    first = fill(directory, [1, 2, 3, 4])
    assert fill(directory, [5, 6]) == [2]
    assert fill(directory, [7, 8]) == [first[1]]
    assert len(match(directory, [1, 2, 3, 4])) == 1
    assert directory.num_evicted == 1


def test_making_room_for_a_child_does_not_take_its_parent() -> None:
    directory = TierDirectory(1, BLOCK, ROOT)
    blocks = blocks_of([1, 2, 3, 4])
    slot = directory.add(blocks[0], None)
    assert slot is not None
    directory.ready(slot)
    assert directory.add(blocks[1], slot) is None
    assert directory.find(blocks[0].key) == slot


@pytest.mark.parametrize(("policy", "victim"), [("lru", [3, 4]), ("gdsf", [5, 6])])
def test_policies_differ_where_frequency_and_recency_do(policy: Policy, victim: list[int]) -> None:
    directory = TierDirectory(3, BLOCK, ROOT, policy)
    slots = {tokens[0]: fill(directory, tokens)[0] for tokens in ([1, 2], [3, 4], [5, 6])}
    for _ in range(4):
        directory.touch(slots[3], hit=True)  # popular once
    directory.touch(slots[1], hit=True)
    directory.touch(slots[5])
    fill(directory, [7, 8])
    gone = [tokens for tokens in ([1, 2], [3, 4], [5, 6]) if not match(directory, tokens)]
    assert gone == [victim]


def test_a_pinned_slot_is_not_handed_out_again_even_when_its_block_is_erased() -> None:
    directory = TierDirectory(1, BLOCK, ROOT)
    (slot,) = fill(directory, [1, 2])
    directory.pin(slot)
    assert directory.erase(Selection()) == [slot]
    assert directory.add(blocks_of([5, 6])[0], None) is None
    directory.unpin(slot)
    assert directory.add(blocks_of([5, 6])[0], None) == slot
    directory.unpin(slot)
    with pytest.raises(InvariantError, match="I8"):
        directory.unpin(slot)


def test_erasing_a_document_takes_what_has_attended_to_it_and_nothing_else() -> None:
    directory = TierDirectory(16, BLOCK, ROOT)
    fill(directory, [1, 2, 3, 4, 5, 6], A, "one")
    fill(directory, [1, 2, 3, 4, 7, 8], A, "one")
    fill(directory, [9, 9, 3, 4], A, "two")
    fill(directory, [1, 2, 3, 4], B, "one")
    assert len(directory.erase(Selection(owner=A.decode(), document_ids=frozenset({"one"})))) == 4
    assert match(directory, [1, 2, 3, 4, 5, 6]) == []
    assert len(match(directory, [9, 9, 3, 4])) == 2
    assert len(match(directory, [1, 2, 3, 4], B)) == 2
    assert len(directory.erase(Selection(scopes=frozenset({B})))) == 2
    assert len(directory.erase(Selection(owner=A.decode()))) == 2
    directory.check_integrity()


def test_the_index_takes_at_most_300_bytes_a_block_beside_its_tokens() -> None:
    """Runs of 16 blocks, as prompts make them. Counted from the structures, not from the process."""
    num_slots = 65_536
    directory = TierDirectory(num_slots, BLOCK, ROOT)
    for prompt in range(num_slots // 16):
        fill(directory, [prompt, *range(31)])
    assert len(directory) == num_slots
    assert directory.memory_bytes() / num_slots <= 300
    assert sys.getsizeof(directory.key(0)) == 49  # what `memory_bytes` takes for a key


@dataclass
class Entry:
    tokens: tuple[int, ...]  # of the whole prefix
    scope: bytes
    slot: int
    ready: bool = False
    pins: int = 0


class DirectoryMachine(RuleBasedStateMachine):
    """Adds, completions, failures, pins, removals and erasures in any order over a few slots."""

    digest: Digest = staticmethod(honest)

    def __init__(self) -> None:
        super().__init__()
        self.directory = TierDirectory(6, BLOCK, ROOT)
        self.entries: dict[tuple[tuple[int, ...], bytes], Entry] = {}
        self.zombies: list[Entry] = []  # removed, but pinned
        self.private: list[int] = []

    def _forget_evicted(self) -> None:
        for name, entry in list(self.entries.items()):
            key = blocks_of(list(entry.tokens), entry.scope, None, self.digest)[-1].key
            if self.directory.find(key) != entry.slot:
                assert entry.ready, "something that was being filled was evicted"
                assert not entry.pins, "something pinned was evicted"
                del self.entries[name]

    def _here(self, tokens: list[int], scope: bytes) -> list[Entry]:
        """Of a path's first blocks, those that are here."""
        names = [(tuple(tokens[:end]), scope) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        return [self.entries[name] for name in takewhile(self.entries.__contains__, names)]

    @rule(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=8), scope=st.sampled_from([A, B]))
    def add(self, tokens: list[int], scope: bytes) -> None:
        blocks = blocks_of(tokens, scope, None, self.digest)
        slots = self.directory.find_path(path_of(blocks))
        assert slots == [entry.slot for entry in self._here(tokens, scope)]
        for depth, block in enumerate(blocks[len(slots) :], len(slots)):
            is_taken = self.directory.find(block.key) is not None
            slot = self.directory.add(block, slots[-1] if slots else None)
            self._forget_evicted()
            if slot is None:
                return
            assert not is_taken
            assert slot not in {entry.slot for entry in [*self.entries.values(), *self.zombies]}
            assert slot not in self.private
            name = tuple(tokens[: (depth + 1) * BLOCK]), scope
            self.entries[name] = Entry(name[0], scope, slot, pins=1)
            slots.append(slot)

    def _pick(self, data: st.DataObject, **wanted: bool) -> Entry | None:
        found = [entry for entry in self.entries.values() if entry.ready == wanted.get("ready", entry.ready)]
        return data.draw(st.sampled_from(sorted(found, key=lambda e: e.slot))) if found else None

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        if entry := self._pick(data, ready=False):
            assert self.directory.ready(entry.slot, checksum=7)
            entry.ready, entry.pins = True, entry.pins - 1

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if entry := self._pick(data, ready=True):
            self.directory.pin(entry.slot)
            entry.pins += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = self._pick(data, ready=True)
        if entry and entry.pins:
            self.directory.unpin(entry.slot)
            entry.pins -= 1

    @precondition(lambda self: self.zombies)
    @rule()
    def end_of_a_zombie(self) -> None:
        entry = self.zombies[0]
        if entry.ready:
            self.directory.unpin(entry.slot)
        else:
            assert not self.directory.ready(entry.slot)
            entry.ready = True
        entry.pins -= 1
        if not entry.pins:
            self.zombies.pop(0)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if entry := self._pick(data):
            self._gone(self.directory.remove(entry.slot))

    @rule(scope=st.sampled_from([A, B]))
    def erase(self, scope: bytes) -> None:
        self._gone(self.directory.erase(Selection(owner=scope.decode())))
        assert not any(entry.scope == scope for entry in self.entries.values())

    def _gone(self, slots: list[int]) -> None:
        for name, entry in list(self.entries.items()):
            if entry.slot in slots:
                del self.entries[name]
                if entry.pins:
                    self.zombies.append(entry)

    @rule()
    def take(self) -> None:
        slot = self.directory.take("t")
        self._forget_evicted()
        if slot is not None:
            self.private.append(slot)

    @precondition(lambda self: self.private)
    @rule()
    def give(self) -> None:
        self.directory.give(self.private.pop())

    @invariant()
    def i4_every_parent_is_there(self) -> None:
        for tokens, scope in self.entries:
            assert len(tokens) == BLOCK or (tokens[:-BLOCK], scope) in self.entries

    @invariant()
    def i5_and_i8_only_what_is_ready_is_found_in_its_own_scope(self) -> None:
        for tokens, scope in self.entries:
            twin = [*tokens]
            twin[0] ^= 1
            for asked, who in ((list(tokens), A), (list(tokens), B), (twin, scope)):
                expected = [entry.slot for entry in takewhile(lambda entry: entry.ready, self._here(asked, who))]
                assert match(self.directory, asked, who, digest=self.digest) == expected

    @invariant()
    def i1_integrity(self) -> None:
        self.directory.check_integrity()
        counts = self.directory.counts()
        assert (counts.gone, counts.private) == (len(self.zombies), len(self.private))


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class CollidingDirectoryMachine(DirectoryMachine):
    """The same with paths of the same keys: the first to come is here, and the others are not."""

    digest = staticmethod(blunt)


TestCollidingDirectoryMachine = CollidingDirectoryMachine.TestCase
TestCollidingDirectoryMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
