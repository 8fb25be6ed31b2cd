"""Documents along the longest cached path, against an exhaustive search."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.document_order import MAX_LOOKS, DocumentPopularity, order_documents
from engine.prefix_index import KEY_BYTES, Place, PrefixIndex
from engine.protocol import Segment, SegmentKind
from engine.scoped_tokens import ScopedTokens

BLOCK = 4
SCOPE, OTHER = b"s" * 16, b"t" * 16
SYSTEM = Segment.of(SegmentKind.SYSTEM, range(10), SCOPE)
QUESTION = Segment.of(SegmentKind.QUESTION, [900, 901], SCOPE)


def document(number: int, length: int = 9, scope: bytes = SCOPE) -> Segment:
    return Segment.of(SegmentKind.DOCUMENT, range(100 * number, 100 * number + length), scope, f"d{number}")


class Tree:
    """An index into which whole prompts are put."""

    def __init__(self) -> None:
        self.index = PrefixIndex(BLOCK)
        self.popularity = DocumentPopularity()
        self.next_id = 0

    def sequence(self, segments: list[Segment]) -> ScopedTokens:
        return ScopedTokens(BLOCK, [(segment.tokens, segment.scope, "t") for segment in segments])

    def put(self, numbers: list[int], length: int = 9) -> None:
        sequence = self.sequence([SYSTEM, *(document(n, length) for n in numbers), QUESTION])
        match = self.index.match_prefix(sequence, len(sequence))
        node = self.index.lock(match)
        have, blocks = len(match.block_ids), len(sequence) // BLOCK
        keys = self.index.chain_keys(node.last_key, sequence, have, blocks)
        fresh = array("i", range(self.next_id, self.next_id + blocks - have))
        self.next_id += blocks
        self.index.unlock(self.index.insert_prefix(node, sequence, have, keys, fresh).node)

    def cached(self, numbers: tuple[int, ...], length: int = 9) -> int:
        sequence = self.sequence([SYSTEM, *(document(n, length) for n in numbers), QUESTION])
        return self.index.match_prefix(sequence, len(sequence)).num_tokens

    def order(
        self,
        numbers: list[int],
        pin_top: int = 0,
        length: int = 9,
        is_below: Callable[[bytes], bool] | None = None,
    ) -> list[int]:
        segments = [SYSTEM, *(document(n, length) for n in numbers), QUESTION]
        ordered = order_documents(segments, self.index, self.popularity, pin_top, is_below)
        assert ordered.segments == (SYSTEM, *(segments[1 + i] for i in ordered.order), QUESTION)
        return [numbers[i] for i in ordered.order]


def test_the_longest_cached_path_comes_first_then_the_popular_then_by_id() -> None:
    tree = Tree()
    tree.put([2, 4, 7])
    tree.put([4, 2])
    tree.popularity.note([document(9), document(9)])
    tree.popularity.note([document(1, scope=OTHER)] * 5)  # of another tenant: it must not show
    assert tree.order([1, 4, 9, 2]) == [2, 4, 9, 1]
    assert tree.order([7, 4, 2]) == [2, 4, 7]


def test_a_permutation_of_cached_documents_finds_all_of_them() -> None:
    """open-webui#19905: the order by score changed, and everything was prefilled again."""
    tree = Tree()
    tree.put([1, 2, 3, 4])
    for numbers in itertools.permutations([1, 2, 3, 4]):
        assert tree.order(list(numbers)) == [1, 2, 3, 4]


def test_nothing_cached_gives_the_canonical_order_whatever_was_given() -> None:
    orders = {tuple(Tree().order(list(numbers))) for numbers in itertools.permutations([3, 1, 2])}
    assert orders == {(1, 2, 3)}


def test_the_best_documents_may_be_pinned_next_to_the_question() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4])
    assert tree.order([4, 3, 2, 1], pin_top=1) == [2, 3, 4, 1]
    assert tree.order([3, 2, 4, 1], pin_top=2) == [2, 3, 4, 1]
    assert tree.order([2, 1], pin_top=9) == [2, 1]


def test_documents_of_each_scope_are_ordered_among_themselves() -> None:
    """Scopes may only narrow along a prompt: a public document cannot change places with a private one."""
    tree = Tree()
    tree.put([3, 2])
    segments = [SYSTEM, document(2), document(3), document(6, scope=OTHER), document(5, scope=OTHER), QUESTION]
    ordered = order_documents(segments, tree.index, tree.popularity)
    assert ordered.order == (1, 0, 3, 2)
    assert ordered.segments == (SYSTEM, *(segments[1 + i] for i in ordered.order), QUESTION)
    assert order_documents(segments, tree.index, tree.popularity, pin_top=1).order == (1, 0, 2, 3)


def test_a_prompt_without_documents_is_left_alone() -> None:
    tree = Tree()
    assert order_documents([SYSTEM, QUESTION], tree.index, tree.popularity).order == ()


@given(
    st.lists(st.permutations(range(1, 6)), max_size=6),
    st.permutations(range(1, 6)),
    st.integers(2, 5),
    st.sampled_from([4, 5, 8, 9]),
)
@settings(max_examples=150, deadline=None)
def test_no_order_finds_more(past: list[list[int]], numbers: list[int], count: int, length: int) -> None:
    tree = Tree()
    for prompt in past:
        tree.put(list(prompt)[: 1 + prompt[0]], length)
    wanted = list(numbers)[:count]
    best = max(tree.cached(order, length) for order in itertools.permutations(wanted))
    found = tree.cached(tuple(tree.order(wanted, length=length)), length)
    # A few tokens of a neighbour's text (less than a block) may lie beyond the last whole document.
    assert found >= best - BLOCK


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    looks: list[None] = []
    follow = PrefixIndex.follow

    def counted(self: PrefixIndex, place: Place, tokens: bytes, scope: bytes) -> Place:
        looks.append(None)
        return follow(self, place, tokens, scope)

    monkeypatch.setattr(PrefixIndex, "follow", counted)
    return looks


def test_a_path_through_all_documents_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree()
    for order in itertools.permutations(range(5)):
        tree.put(list(order))
    looks = count_looks(monkeypatch)
    order = tree.order(random.Random(1).sample(range(5), 5))
    assert len(looks) == 1 + 5  # the system prompt, and each document once
    assert tree.cached(tuple(order)) == 10 + 5 * 9 + 2 - 1


def test_only_documents_that_the_tree_goes_on_with_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree()
    tree.put([5, 2])
    looks = count_looks(monkeypatch)
    assert tree.order([1, 2, 3, 4, 5, 6]) == [5, 2, 1, 3, 4, 6]
    assert len(looks) == 1 + 2


def test_the_search_is_bounded_where_no_path_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree()
    for order in itertools.permutations(range(1, 7), 4):
        tree.put(list(order))
    looks = count_looks(monkeypatch)
    order = tree.order([1, 2, 3, 4, 5, 6])
    assert len(looks) <= 1 + MAX_LOOKS
    assert tree.cached(tuple(order)) >= 10 + 4 * 9 - BLOCK


def test_a_path_that_lies_in_a_tier_below_is_found_by_its_keys() -> None:
    tree, empty = Tree(), Tree()
    tree.put([3, 1])
    tree.put([2])
    keys = {node.keys[at : at + KEY_BYTES] for node in tree.index.nodes() for at in range(0, len(node.keys), KEY_BYTES)}
    assert empty.order([1, 2, 3], is_below=keys.__contains__) == [3, 1, 2]
    empty.put([2, 1])  # what the device has and what is below count alike
    assert empty.order([1, 2, 3], is_below=keys.__contains__) == [2, 1, 3]
