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

The search is depth first over documents that are cached whole, and takes at most `MAX_TRIES` looks at the tree;
with k documents a single path takes k(k+1)/2. What is looked at is only the path itself, so the size of the tree
does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from engine.prefix_index import PrefixIndex, PrefixMatch
from engine.protocol import Segment, SegmentKind
from engine.scoped_tokens import ScopedTokens

MAX_TRIES = 128

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
    tenant_id: str,
    pin_top: int = 0,
) -> OrderedDocuments:
    """Put the documents into the order that finds most in the cache. Changes nothing.

    The last `pin_top` documents of the given order stay where they are. So does each run of documents of one scope,
    ordered in itself: scopes may only narrow along a prompt.
    """
    places = [i for i, segment in enumerate(segments) if segment.kind is SegmentKind.DOCUMENT]
    documents = [segments[i] for i in places]
    contiguous = bool(places) and places == list(range(places[0], places[-1] + 1))
    if not contiguous:
        return OrderedDocuments(tuple(segments), tuple(range(len(documents))))
    num_free = max(0, len(documents) - pin_top)
    arranged, order = [*segments[: places[0]]], list[int]()
    for _, run in groupby(range(num_free), key=lambda i: (documents[i].scope, documents[i].owner)):
        chosen = _Search(index, documents, tenant_id, popularity).best(arranged, list(run))
        arranged += [documents[i] for i in chosen]
        order += chosen
    arranged += segments[places[0] + num_free :]
    return OrderedDocuments(tuple(arranged), (*order, *range(num_free, len(documents))))


class _Search:
    def __init__(
        self, index: PrefixIndex, documents: Sequence[Segment], tenant_id: str, popularity: DocumentPopularity
    ) -> None:
        self._index = index
        self._documents = documents
        self._tenant_id = tenant_id
        self._popularity = popularity
        self._tries = 0
        self._best: tuple[int, list[int]] = (0, [])  # cached tokens, documents

    def best(self, head: Sequence[Segment], free: list[int]) -> list[int]:
        canonical = sorted(free, key=self._rank)
        if head:
            start = ScopedTokens(self._index.block_size, [(s.tokens, s.scope, self._owner(s)) for s in head])
            match = self._index.match_prefix(start, len(start))
            if match.num_tokens == len(start):
                self._descend(start, match, [], canonical)
        chosen = self._best[1]
        return chosen + [i for i in canonical if i not in chosen]

    def _rank(self, i: int) -> tuple[int, str, int]:
        document = self._documents[i]
        return (-self._popularity.of(document), document.document_id or "", i)

    def _owner(self, segment: Segment) -> str:
        return segment.owner or self._tenant_id

    def _descend(self, prefix: ScopedTokens, reached: PrefixMatch, chosen: list[int], left: list[int]) -> None:
        """`prefix`, all of it cached up to `reached`, holds the documents `chosen`; go on with each of `left`."""
        for i in left:
            if self._tries >= MAX_TRIES:
                return
            self._tries += 1
            document = self._documents[i]
            longer = prefix.extended(document.tokens, document.scope, self._owner(document))
            match = self._index.extend_match(reached, longer, len(longer))
            # Strictly better only: on a tie the canonical order, which is tried first, stands.
            if match.num_tokens > max(self._best[0], len(prefix)):
                self._best = (match.num_tokens, [*chosen, i])
            if match.num_tokens == len(longer):
                self._descend(longer, match, [*chosen, i], [j for j in left if j != i])
