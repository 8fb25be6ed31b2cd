"""The vector index against a dumb one: every operation, any order, exact and with a graph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.vector_index import Floats, VectorIndex

DIMENSION = 8


def unit(seed: int) -> Floats:
    vector = np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def dumb_search(vectors: dict[int, Floats], query: Floats, k: int, allowed: set[int] | None) -> list[int]:
    keys = [key for key in vectors if allowed is None or key in allowed]
    return sorted(keys, key=lambda key: -float(vectors[key] @ query))[:k]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40), st.data())
@settings(deadline=None, max_examples=60)
def test_adding_and_removing_leave_the_same_as_a_dictionary(steps: list[tuple[bool, int]], data: st.DataObject) -> None:
    """A removed row's place is taken by the last row: get that wrong, and another passage's text is found."""
    index, dumb, next_key = VectorIndex(DIMENSION), dict[int, Floats](), 0
    files: dict[int, set[int]] = {}
    for adds, count in steps:
        if adds or not dumb:
            keys = list(range(next_key, next_key + count))
            next_key += count
            file = keys[0]
            index.add(keys, np.stack([unit(key) for key in keys]), file)
            files[file] = set(keys)
            dumb.update({key: unit(key) for key in keys})
        else:
            gone = data.draw(st.sets(st.sampled_from(sorted(dumb)), max_size=count))
            index.remove(gone)
            for key in gone:
                del dumb[key]
        files[next_key] = set()  # a file without rows
        wanted = data.draw(st.none() | st.sets(st.sampled_from(sorted(files))))
        allowed = None if wanted is None else {key for file in wanted for key in files[file]}
        found = index.search(unit(-1 & 0xFFFF), 4, None if wanted is None else sorted(wanted))
        assert [key for key, _ in found] == dumb_search(dumb, unit(-1 & 0xFFFF), 4, allowed)
        assert len(index) == len(dumb)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.01])
def test_the_graph_finds_what_exact_search_finds(share: float) -> None:
    index = VectorIndex(DIMENSION, exact_below=100)
    keys = list(range(2000))
    vectors = {key: unit(key) for key in keys}
    step = int(1 / share)
    for file in range(step):
        part = keys[file::step]
        index.add(part, np.stack([vectors[key] for key in part]), file)
    exact = [key for key, _ in index.search(unit(9999), 10)]
    assert index.backlog == len(keys), "until the graph is built, the search is exact"
    while index.backlog:
        index.advance(500)
    assert exact == dumb_search(vectors, unit(9999), 10, None)
    gone = set(exact[:3])
    index.remove(gone)
    allowed = None if share == 1.0 else set(keys[::step]) - gone
    found = [key for key, _ in index.search(unit(9999), 10, None if share == 1.0 else [0])]
    expected = dumb_search({key: vector for key, vector in vectors.items() if key not in gone}, unit(9999), 10, allowed)
    assert len(set(found) & set(expected)) >= 9
    assert not gone.intersection(found)


def test_scores_are_similarities_with_and_without_the_graph() -> None:
    index = VectorIndex(DIMENSION, exact_below=1)
    index.add([1, 2], np.stack([unit(1), unit(2)]), 0)
    exact = index.search(unit(1), 2)
    index.advance(10)
    walked = index.search(unit(1), 2)
    assert [key for key, _ in walked] == [key for key, _ in exact]
    assert np.allclose([score for _, score in walked], [score for _, score in exact], atol=1e-2)
