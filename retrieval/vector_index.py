"""Nearest vectors of one collection: exact while it is small, a graph (usearch) beside the rows when it is not.

    rows    float32 [capacity, dimension], dense: a removed row's place is taken by the last     always, the truth
    files   int64 [capacity]: whose row it is; a filter names files
    graph   usearch HNSW in float16, fed from `backlog` in steps                                  above `exact_below`

One matrix product over 20,000 rows takes about a millisecond, less than the graph's recall is worth. Above that the
graph answers, once its backlog is empty: after a start a large collection is searched exactly (and slower) until
its graph is built. A filter that leaves few rows is always exact: a graph walked under a filter loses its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice

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
        self._files: NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, np.int64)
        self._row_of: dict[int, int] = {}
        self._graph: Index | None = None
        self._backlog: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def backlog(self) -> int:
        """Rows that the graph still lacks."""
        return len(self._backlog)

    def add(self, keys: Sequence[int], vectors: Floats, file: int) -> None:
        """`vectors`: [len(keys), dimension], normalised; all of one file, whose number is not negative."""
        start, end = len(self), len(self) + len(keys)
        self._reserve(end)
        self._rows[start:end] = vectors
        self._keys[start:end], self._files[start:end] = keys, file
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
                self._rows[row], self._keys[row], self._files[row] = self._rows[last], moved, self._files[last]
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

    def search(self, query: Floats, k: int, files: Sequence[int] | None = None) -> list[tuple[int, float]]:
        """The `k` nearest keys, best first, with their cosine similarities; of `files` only, if given."""
        is_wanted = None if files is None else self._wanted(files)  # by row
        num_wanted = len(self) if is_wanted is None else int(np.count_nonzero(is_wanted))
        if self._graph is not None and not self._backlog and num_wanted > self._exact_below:
            found = self._walk(query, k, is_wanted)
            if len(found) >= min(k, num_wanted):
                return found
        return self._exact(query, k, None if is_wanted is None else np.flatnonzero(is_wanted))

    def _wanted(self, files: Sequence[int]) -> NDArray[np.bool_]:
        """Of each row, whether it belongs to one of these files."""
        highest = max(int(self._files.max()), max(files, default=0))  # a file may have no rows
        chosen: NDArray[np.bool_] = np.zeros(highest + 1, np.bool_)
        chosen[np.asarray(files, np.int64)] = True
        return chosen[self._files[: len(self)]]

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

    def _walk(self, query: Floats, k: int, is_wanted: NDArray[np.bool_] | None) -> list[tuple[int, float]]:
        assert self._graph is not None, "the caller has looked"
        matches = self._graph.search(query, k if is_wanted is None else k * _OVERFETCH, threads=1)
        # usearch's inner-product distance is 1 - similarity.
        pairs = zip(matches.keys.tolist(), matches.distances.tolist(), strict=True)
        wanted = (pair for pair in pairs if is_wanted is None or is_wanted[self._row_of[pair[0]]])
        return [(int(key), 1.0 - float(far)) for key, far in islice(wanted, k)]

    def _reserve(self, num_rows: int) -> None:
        capacity = len(self._keys)
        if num_rows <= capacity:
            return
        more = max(num_rows, 2 * capacity) - capacity
        self._rows = np.concatenate([self._rows, np.zeros((more, self._dimension), np.float32)])
        self._keys = np.concatenate([self._keys, np.zeros(more, np.int64)])
        self._files = np.concatenate([self._files, np.zeros(more, np.int64)])
