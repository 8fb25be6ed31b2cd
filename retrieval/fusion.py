"""Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009): one ranking from several, by ranks alone.

Scores of different kinds (a cosine, a BM25) share no scale; ranks do. score(d) = Σ weight / (60 + rank of d), here
divided by the highest possible, so that the first of every list has 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

_K = 60

Key = TypeVar("Key", bound=Hashable)


def fuse(rankings: Sequence[tuple[Sequence[Key], float]]) -> list[tuple[Key, float]]:
    """`rankings`: (keys, best first; weight). Best first; ties in the order of the rankings."""
    total = sum(weight for _, weight in rankings)
    scores: dict[Key, float] = {}
    for ranking, weight in rankings:
        for rank, key in enumerate(ranking, 1):
            scores[key] = scores.get(key, 0.0) + weight / (_K + rank)
    best = total / (_K + 1)
    ordered = sorted(scores.items(), key=lambda item: -item[1])
    return [(key, score / best) for key, score in ordered] if best > 0 else []
