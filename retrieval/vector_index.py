"""Nearest vectors of one collection: exact while it is small, a graph (usearch) beside the rows when it is not.

    rows    float32 [capacity, dimension], dense: a removed row's place is taken by the last     always, the truth
    graph   usearch HNSW in float16, fed from `backlog` in steps                                  above `exact_below`

One matrix product over 20,000 rows takes about a millisecond, less than the graph's recall is worth. Above that the
graph answers, once its backlog is empty: after a start a large collection is searched exactly (and slower) until
its graph is built. A filter that leaves few rows is always exact: a graph walked under a filter loses its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

EXACT_BELOW = 20_000
_FIRST_CAPACITY = 256
_OVERFETCH = 4

Floats = NDArray[np.float32]


class VectorIndex:
    """Keys are chosen by the caller and never used twice. Not thread-safe."""

    def __init__(self, dimension: int, exact_below: int = EXACT_BELOW) -> None:
        self._exact_below = exact_below
        self._dimension = dimension
        self._rows: Floats = np.zeros((_FIRST_CAPACITY, dimension), np.float32)
        self._keys: NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, np.int64)
        self._row_of: dict[int, int] = {}
        self._graph: Index | None = None
        self._backlog: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def backlog(self) -> int:
        """Rows that the graph still lacks."""
        return len(self._backlog)

    def add(self, keys: Sequence[int], vectors: Floats) -> None:
        """`vectors`: [len(keys), dimension], normalised."""
        start, end = len(self), len(self) + len(keys)
        self._reserve(end)
        self._rows[start:end] = vectors
        self._keys[start:end] = keys
        self._row_of.update(zip(keys, range(start, end), strict=True))
        if self._graph is not None:
            self._backlog.extend(keys)
        elif end > self._exact_below:
            self._graph = Index(ndim=self._dimension, metric="ip", dtype="f16", expansion_add=64, expansion_search=96)
            self._backlog.extend(self._row_of)

    def remove(self, keys: Collection[int]) -> None:
        for key in keys:
            row, last = self._row_of.pop(key), len(self._row_of)
            if row != last:
                moved = int(self._keys[last])
                self._rows[row], self._keys[row] = self._rows[last], moved
                self._row_of[moved] = row
            if self._graph is not None and key in self._graph:
                self._graph.remove(key)

    def advance(self, max_rows: int) -> None:
        """Feeds the graph from its backlog."""
        if self._graph is None:
            return
        keys = [self._backlog.popleft() for _ in range(min(max_rows, len(self._backlog)))]
        rows = [self._row_of[key] for key in keys if key in self._row_of]  # others were removed meanwhile
        if rows:
            self._graph.add(self._keys[rows].astype(np.uint64), self._rows[rows], threads=1)

    def search(self, query: Floats, k: int, allowed: Collection[int] | None = None) -> list[tuple[int, float]]:
        """The `k` nearest keys, best first, with their cosine similarities; of `allowed` only, if given."""
        if allowed is not None and len(allowed) <= self._exact_below:
            return self._exact(query, k, np.fromiter((self._row_of[key] for key in allowed), np.int64, len(allowed)))
        if self._graph is not None and not self._backlog:
            found = self._walk(query, k, allowed)
            if len(found) >= min(k, len(self) if allowed is None else len(allowed)):
                return found
        rows = None if allowed is None else np.fromiter((self._row_of[key] for key in allowed), np.int64, len(allowed))
        return self._exact(query, k, rows)

    def _exact(self, query: Floats, k: int, rows: NDArray[np.int64] | None) -> list[tuple[int, float]]:
        num_rows = len(self) if rows is None else len(rows)
        if num_rows == 0:
            return []
        scores: Floats = (self._rows[: len(self)] if rows is None else self._rows[rows]) @ query
        k = min(k, num_rows)
        best = np.argpartition(-scores, k - 1)[:k]
        best = best[np.lexsort((best, -scores[best]))]
        found = best if rows is None else rows[best]
        return [(int(key), float(score)) for key, score in zip(self._keys[found], scores[best], strict=True)]

    def _walk(self, query: Floats, k: int, allowed: Collection[int] | None) -> list[tuple[int, float]]:
        assert self._graph is not None, "the caller has looked"
        matches = self._graph.search(query, k if allowed is None else k * _OVERFETCH, threads=1)
        # usearch's inner-product distance is 1 - similarity.
        pairs = zip(matches.keys.tolist(), matches.distances.tolist(), strict=True)
        return [(int(key), 1.0 - float(far)) for key, far in pairs if allowed is None or key in allowed][:k]

    def _reserve(self, num_rows: int) -> None:
        capacity = len(self._keys)
        if num_rows <= capacity:
            return
        more = max(num_rows, 2 * capacity) - capacity
        self._rows = np.concatenate([self._rows, np.zeros((more, self._dimension), np.float32)])
        self._keys = np.concatenate([self._keys, np.zeros(more, np.int64)])
