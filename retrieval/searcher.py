"""One question over one or several collections: embedded, searched, fused, reranked if asked, cut at a threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from retrieval.collection_index import Found, Weights
from retrieval.embedder_client import Embedder
from retrieval.errors import InvalidValueError, NotFoundError
from retrieval.filters import Predicate
from retrieval.library import Library
from retrieval.search_indexes import Name, SearchIndexes

_RERANK_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    texts: tuple[str, ...]
    max_results: int
    keep: Predicate | None = None
    weights: Weights | None = None
    rerank: bool = False
    score_threshold: float = 0.0


class Searcher:
    def __init__(self, library: Library, indexes: SearchIndexes, embedder: Embedder, operator_tenant: str) -> None:
        self._library = library
        self._indexes = indexes
        self._embedder = embedder
        self._operator = operator_tenant

    async def resolve(self, tenant: str, collection_id: str) -> Name:
        """The collection that this tenant means: its own, or a public one of the operator's. Raises `NotFoundError`."""
        own, public = (tenant, collection_id), (self._operator, collection_id)
        if self._indexes.is_loaded(own):
            return own
        if self._operator and self._indexes.is_loaded(public) and (await self._indexes.current(public)).is_public:
            return public
        try:
            await self._library.collection(*own)
        except NotFoundError:
            if not self._operator or not (await self._library.collection(*public)).public:
                raise
            return public
        return own

    async def check(self, *, rerank: bool) -> None:
        """Whether a search can be made now: for who has to pay for something first. Raises `RetrievalError`."""
        info = await self._embedder.wait_ready()
        if rerank and not info.has_reranker:
            raise InvalidValueError("no reranker is set up on this server", "ranking_options.ranker")

    async def search(
        self, names: Sequence[Name], query: Query, on_candidate: Callable[[Found], None] = lambda best: None
    ) -> list[Found]:
        """Best first. `on_candidate` hears of the best so far before a reranker is asked. Raises `RetrievalError`."""
        await self.check(rerank=query.rerank)
        vectors, _ = await self._embedder.embed(query.texts, urgent=True)
        num_wanted = query.max_results * (_RERANK_FACTOR if query.rerank else 1)
        found: list[Found] = []
        for name in names:
            for vector, text in zip(vectors, query.texts, strict=True):
                found += await self._indexes.search(
                    name, vector, text, num_wanted, keep=query.keep, weights=query.weights
                )
        found = _best_of_each(found)[:num_wanted]
        if query.rerank and found:
            on_candidate(found[0])
            found = await self._reranked(query, found)
        return [each for each in found if each.score >= query.score_threshold][: query.max_results]

    async def _reranked(self, query: Query, found: Sequence[Found]) -> list[Found]:
        scores = await self._embedder.rerank("\n".join(query.texts), [each.passage.text for each in found])
        rescored = [replace(each, score=score) for each, score in zip(found, scores, strict=True)]
        return sorted(rescored, key=lambda each: -each.score)


def _best_of_each(found: Sequence[Found]) -> list[Found]:
    """Each text once, with its best score; best first."""
    best: dict[str, Found] = {}
    for each in found:
        known = best.get(each.passage.text)
        if known is None or each.score > known.score:
            best[each.passage.text] = each
    return sorted(best.values(), key=lambda each: -each.score)
