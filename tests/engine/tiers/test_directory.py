"""The directory of a tier against a dumb model: I1, I4, I5, I8, eviction order, erasure, and its memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.erasure import Selection, document_key
from engine.errors import InvariantError
from engine.eviction import Policy
from engine.protocol import pack_tokens
from engine.scoped_tokens import ScopedTokens
from engine.tiers.directory import BlockIdentity, TierDirectory

BLOCK = 2
ROOT = bytes(16)
A, B = b"a" * 16, b"b" * 16


def path_of(tokens: list[int], scope: bytes = A, document: str | None = None) -> list[BlockIdentity]:
    """The identities of a prompt's full blocks; `document` starts in the first."""
    blocks: list[BlockIdentity] = []
    parent = ROOT
    for depth in range(len(tokens) // BLOCK):
        packed = pack_tokens(tokens[depth * BLOCK : (depth + 1) * BLOCK])
        key = xxhash.xxh3_128_digest(parent + scope + packed)
        documents = (document_key(scope.decode(), document),) if document is not None and not depth else ()
        blocks.append(BlockIdentity(key, parent, scope, scope.decode(), packed, documents, depth))
        parent = key
    return blocks


def fill(directory: TierDirectory, tokens: list[int], scope: bytes = A, document: str | None = None) -> list[int]:
    slots: list[int] = []
    for block in path_of(tokens, scope, document):
        slot = directory.find(block.key)
        if slot is None:
            slot = directory.add(block)
            if slot is None:
                break
            assert directory.ready(slot)
        slots.append(slot)
    return slots


def match(directory: TierDirectory, tokens: list[int], scope: bytes = A, first: int = 0) -> list[int]:
    sequence = ScopedTokens.of(tokens, scope, BLOCK)
    return directory.match(sequence, first, [block.key for block in path_of(tokens, scope)[first:]])


def test_a_path_is_found_from_any_block_on_and_only_when_it_is_ready() -> None:
    directory = TierDirectory(8, BLOCK, ROOT)
    blocks = path_of([1, 2, 3, 4, 5, 6])
    slots = [directory.add(block) for block in blocks]
    assert match(directory, [1, 2, 3, 4, 5, 6]) == []
    for slot in slots[:2]:
        assert slot is not None
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
    keys = [block.key for block in path_of([1, 2, 3, 4])]
    for forged in ([9, 9, 3, 4], [1, 2, 9, 9]):
        found = directory.match(ScopedTokens.of(forged, A, BLOCK), 1, keys[1:])
        assert found == []
    assert len(directory.match(ScopedTokens.of([1, 2, 3, 4], A, BLOCK), 1, keys[1:])) == 1
    # The same under another scope, and under the right tokens at another depth.
    assert directory.match(ScopedTokens.of([1, 2, 3, 4], B, BLOCK), 1, keys[1:]) == []
    assert directory.match(ScopedTokens.of([1, 2, 1, 2, 3, 4], A, BLOCK), 2, keys[1:]) == []


def test_i4_nothing_is_added_without_its_parent_and_a_full_tier_evicts_leaves_only() -> None:
    directory = TierDirectory(3, BLOCK, ROOT)
    orphan = path_of([1, 2, 3, 4])[1]
    assert directory.add(orphan) is None
    first = fill(directory, [1, 2, 3, 4])
    assert fill(directory, [5, 6]) == [2]
    assert fill(directory, [7, 8]) == [first[1]]
    assert len(match(directory, [1, 2, 3, 4])) == 1
    assert directory.num_evicted == 1


def test_making_room_for_a_child_does_not_take_its_parent() -> None:
    directory = TierDirectory(1, BLOCK, ROOT)
    blocks = path_of([1, 2, 3, 4])
    slot = directory.add(blocks[0])
    assert slot is not None
    directory.ready(slot)
    assert directory.add(blocks[1]) is None
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
    assert directory.add(path_of([5, 6])[0]) is None
    directory.unpin(slot)
    assert directory.add(path_of([5, 6])[0]) == slot
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

    def __init__(self) -> None:
        super().__init__()
        self.directory = TierDirectory(6, BLOCK, ROOT)
        self.entries: dict[tuple[tuple[int, ...], bytes], Entry] = {}
        self.zombies: list[Entry] = []  # removed, but pinned
        self.private: list[int] = []

    def _forget_evicted(self) -> None:
        for name, entry in list(self.entries.items()):
            key = path_of(list(entry.tokens), entry.scope)[-1].key
            if self.directory.find(key) != entry.slot:
                assert entry.ready, "something that was being filled was evicted"
                assert not entry.pins, "something pinned was evicted"
                del self.entries[name]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8), scope=st.sampled_from([A, B]))
    def add(self, tokens: list[int], scope: bytes) -> None:
        for block in path_of(tokens, scope):
            name = tuple(tokens[: (block.depth + 1) * BLOCK]), scope
            if name in self.entries:
                continue
            slot = self.directory.add(block)
            self._forget_evicted()
            if slot is None:
                return
            assert slot not in {entry.slot for entry in [*self.entries.values(), *self.zombies]}
            assert slot not in self.private
            self.entries[name] = Entry(name[0], scope, slot, pins=1)

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
            names = [(tokens[:end], scope) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
            expected: list[int] = []
            for name in names:
                if not self.entries[name].ready:
                    break
                expected.append(self.entries[name].slot)
            assert match(self.directory, list(tokens), scope) == expected

    @invariant()
    def i1_integrity(self) -> None:
        self.directory.check_integrity()
        counts = self.directory.counts()
        assert (counts.gone, counts.private) == (len(self.zombies), len(self.private))


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
