"""In which order the retrieved documents stand in the prompt.

    given       as they came
    relevance   best first
    canonical   most retrieved first, then by id: the same set, the same order, whoever asks
    cache       the engine's choice, when it admits the request: along the longest cached path, then canonical

Another order is another prompt: a causal model reads later documents in the light of earlier ones, and its answer
may differ. `relevance` moves with every question, so only the system prompt is ever shared; `cache` reuses the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

DocumentOrder = Literal["given", "relevance", "canonical", "cache"]

Item = TypeVar("Item")


def arrange(
    ranked: Sequence[Item],
    order: DocumentOrder,
    pin_top: int,
    popularity: Callable[[Item], int],
    identity: Callable[[Item], str],
) -> list[Item]:
    """`ranked`: best first. The best `pin_top` stand last, the very best next to the question.

    For `cache` they come first instead, best first: the engine orders the rest and puts the first `pin_top` behind it,
    reversed.
    """
    pin_top = min(pin_top, len(ranked))
    pinned, rest = list(ranked[:pin_top]), list(ranked[pin_top:])
    if order in ("canonical", "cache"):
        rest.sort(key=lambda item: (-popularity(item), identity(item)))
    return [*pinned, *rest] if order == "cache" else [*rest, *reversed(pinned)]
