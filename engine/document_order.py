"""In which order a request's documents stand, when that is ours to choose.

    prompt    [template][system][ documents, in any order ][question]
    tree      system ──┬── d2 ── d4 ──┬── d1
                       │              └── d7
                       └── d4 ── d2

    retrieved d1 d2 d4 d9   →   d2 d4 d1 d9      the longest cached path through the set; then what is left,
                                                 most popular first, then by id

Documents that many requests ask for come to stand at the front in one order, and the tree grows along it: the more
often the order is chosen, the better it is to choose it again. Another order is another prompt: its answer may
differ, which is why a client has to ask for this (or leave the retrieval to the server).

The search is depth first, the most popular document first, over documents that are cached whole. A branch that could
not beat the best path even if all of its documents were cached is not entered, so a path that has them all ends the
search; and it takes at most `MAX_LOOKS` looks at the tree. A look touches only the way on from one place: the size of
the tree does not matter. Where the device's path ends, keys alone say how the tiers below go on, so that after a
restart documents stand as they stood before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from engine.prefix_index import Place, PrefixIndex
from engine.protocol import Segment, SegmentKind

MAX_LOOKS = 64

_MAX_POPULAR = 65536


class DocumentPopularity:
    """How often each document was asked for lately, in each scope: what one tenant asks for must not order another's.

    Halved when it grows too large, so that old fame fades.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[bytes, str]] = Counter()

    def note(self, segments: Iterable[Segment]) -> None:
        self._counts.update((s.scope, s.document_id) for s in segments if s.document_id is not None)
        if len(self._counts) > _MAX_POPULAR:
            self._counts = Counter({name: count // 2 for name, count in self._counts.items() if count > 1})

    def of(self, document: Segment) -> int:
        return self._counts[document.scope, document.document_id or ""]


@dataclass(frozen=True, slots=True)
class OrderedDocuments:
    """The segments as they shall stand, and for each document its place in the given order."""

    segments: tuple[Segment, ...]
    order: tuple[int, ...]


def order_documents(
    segments: Sequence[Segment],
    index: PrefixIndex,
    popularity: DocumentPopularity,
    pin_top: int = 0,
    is_below: Callable[[bytes], bool] | None = None,
) -> OrderedDocuments:
    """Put the documents into the order that finds most in the cache. Changes nothing.

    The last `pin_top` documents of the given order stay where they are. So does each run of documents of one scope,
    ordered in itself: scopes may only narrow along a prompt. `is_below` says whether a tier below the device may have
    the block of a key.
    """
    places = [i for i, segment in enumerate(segments) if segment.kind is SegmentKind.DOCUMENT]
    documents = [segments[i] for i in places]
    contiguous = bool(places) and places == list(range(places[0], places[-1] + 1))
    if not contiguous:
        return OrderedDocuments(tuple(segments), tuple(range(len(documents))))
    num_free = max(0, len(documents) - pin_top)
    arranged, order = [*segments[: places[0]]], list[int]()
    for _, run in groupby(range(num_free), key=lambda i: (documents[i].scope, documents[i].owner)):
        canonical = sorted(run, key=lambda i: _rank(documents[i], i, popularity))
        chosen = _Search(index, is_below, arranged, documents).longest(canonical)
        in_order = [*chosen, *(i for i in canonical if i not in chosen)]
        arranged += [documents[i] for i in in_order]
        order += in_order
    arranged += segments[places[0] + num_free :]
    return OrderedDocuments(tuple(arranged), (*order, *range(num_free, len(documents))))


def _rank(document: Segment, given: int, popularity: DocumentPopularity) -> tuple[int, str, int]:
    return (-popularity.of(document), document.document_id or "", given)


class _PlaceBelow(NamedTuple):
    """A `Place` where a lower tier's path goes on after the device's has ended."""

    key: bytes  # of the last whole block
    rest: bytes


class _Search:
    """The longest cached path through a set of documents behind one head."""

    def __init__(
        self,
        index: PrefixIndex,
        is_below: Callable[[bytes], bool] | None,
        head: Sequence[Segment],
        documents: Sequence[Segment],
    ) -> None:
        self._index = index
        self._is_below = is_below
        self._head = head
        self._documents = documents
        self._scopes: list[bytes] = []  # that may be read where the search stands
        self._looks = 0
        self._best: tuple[int, list[int]] = (0, [])  # bytes cached behind the head, documents

    def longest(self, canonical: list[int]) -> list[int]:
        """The documents on the path, in its order; empty when the head itself is not cached."""
        at: Place | _PlaceBelow = Place(self._index.root, 0, b"")
        for segment in self._head:
            self._scopes.append(segment.scope)
            at = self._follow(at, segment.tokens)
            if len(at.rest) >= self._index.stride:
                return []
        if self._is_whole(at):
            self._scopes += [self._documents[i].scope for i in canonical[:1]]
            self._descend(at, 0, [], canonical)
        return self._best[1]

    def _descend(self, at: Place | _PlaceBelow, cached: int, chosen: list[int], left: list[int]) -> None:
        """Before `at` stand `chosen`: `cached` bytes in whole blocks behind the head. Go on with each of `left`."""
        stride = self._index.stride
        possible = cached + (len(at.rest) + sum(len(self._documents[i].tokens) for i in left)) // stride * stride
        for i in self._ways_on(at, left):
            if self._looks >= MAX_LOOKS or possible <= self._best[0]:
                return
            self._looks += 1
            tokens = self._documents[i].tokens
            reached = self._follow(at, tokens)
            found = cached + len(at.rest) + len(tokens) - len(reached.rest)
            # Strictly better only: on a tie the canonical order, which is tried first, stands.
            if found > self._best[0]:
                self._best = (found, [*chosen, i])
            # A rest that is not cached shows at the next step. A document without a whole block has to show it here.
            if len(reached.rest) < stride and (found > cached or self._is_whole(reached)):
                self._descend(reached, found, [*chosen, i], [j for j in left if j != i])

    def _ways_on(self, at: Place | _PlaceBelow, left: list[int]) -> list[int]:
        """The documents whose first block is somewhere behind `at`, and those that fill no block."""
        missing = self._index.stride - len(at.rest)
        ways: list[int] = []
        for i in left:
            head = self._documents[i].tokens[:missing]
            if len(head) < missing or self._goes_on(at, at.rest + head):
                ways.append(i)
        return ways

    def _goes_on(self, at: Place | _PlaceBelow, block_tokens: bytes) -> bool:
        """Whether this block follows on the last whole one, here or below."""
        scope = self._scopes[-1]
        if isinstance(at, Place) and self._index.goes_on(at, scope, block_tokens):
            return True
        if self._is_below is None:
            return False
        key = self._index.place_key(at) if isinstance(at, Place) else at.key
        return self._is_below(self._index.child_key(key, scope, block_tokens))

    def _follow(self, at: Place | _PlaceBelow, tokens: bytes) -> Place | _PlaceBelow:
        """As far as whole blocks are cached."""
        stride = self._index.stride
        if isinstance(at, Place):
            at = self._index.follow(at, tokens, self._scopes[-1])
            if self._is_below is None or len(at.rest) < stride:
                return at
            at, tokens = _PlaceBelow(self._index.place_key(at), at.rest), b""
        packed, key, position = at.rest + tokens, at.key, 0
        while len(packed) - position >= stride:
            longer = self._index.child_key(key, self._scopes[-1], packed[position : position + stride])
            if self._is_below is None or not self._is_below(longer):
                break
            key, position = longer, position + stride
        return _PlaceBelow(key, packed[position:])

    def _is_whole(self, at: Place | _PlaceBelow) -> bool:
        """Whether what is left of the last document is cached, too. Below, the next whole block will tell."""
        if isinstance(at, Place):
            return self._index.is_cached(at, self._scopes)
        return len(at.rest) < self._index.stride
