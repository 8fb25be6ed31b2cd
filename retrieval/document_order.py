"""In which order the retrieved documents stand in the prompt.

    given       as they came
    relevance   best first
    canonical   public ones first, then most retrieved first, then by id: the same set, the same order, whoever asks
    cache       the engine's choice, when it admits the request: along the longest cached path, then canonical; public
                ones first, for behind a private one they are not shared with other tenants

Another order is another prompt: a causal model reads later documents in the light of earlier ones, and its answer
may differ. `relevance` moves with every question, so only the system prompt is ever shared; `cache` reuses the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

DocumentOrder = Literal["given", "relevance", "canonical", "cache"]

Item = TypeVar("Item")


def arrange(
    ranked: Sequence[Item], order: DocumentOrder, pin_top: int, canonical: Callable[[Item], tuple[int | str, ...]]
) -> list[Item]:
    """`ranked`: best first. The best `pin_top` stand last, the very best next to the question; they stay there when
    the engine orders the rest. `canonical`: what the rest is sorted by.
    """
    pin_top = min(pin_top, len(ranked))
    pinned, rest = list(ranked[:pin_top]), list(ranked[pin_top:])
    if order in ("canonical", "cache"):
        rest.sort(key=canonical)
    return [*rest, *reversed(pinned)]
