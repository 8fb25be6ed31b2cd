"""Pictures as numbers, for the templates to write as SVG: the prefix tree and the block map.

The tree is an icicle: tokens go from left to right, and a node is as high as it is hot, so a path that many requests
share is a wide band.

    ┌──────────────┬───────────────┐   weight of a node = max(its hits + 1, the weights of its children)
    │ system       │ document A    │   a node's children share its height
    │ 40 hits      ├───────────────┤
    │              │ document B    │
    └──────────────┴───────────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import CacheView, PrefixNode

TREE_WIDTH = 960
TREE_HEIGHT = 360
_MIN_LABEL = 13.0  # pixels of height in which a line of text can be read
MAP_COLUMNS = 64
CELL = 12
_STATES = {ord("f"): "free", ord("c"): "cached", ord("a"): "active"}
NUM_COLORS = 6


@dataclass(frozen=True, slots=True)
class TreeBox:
    """A node's rectangle."""

    node: PrefixNode
    x: float
    y: float
    width: float
    height: float
    color: int

    @property
    def label(self) -> str:
        fits = self.height >= _MIN_LABEL and self.width >= 60
        return f"{self.node.num_tokens} tok · {self.node.hits}×" if fits else ""


def draw_tree(nodes: Sequence[PrefixNode]) -> list[TreeBox]:
    """Parents first; nothing for an empty cache."""
    children: dict[int | None, list[PrefixNode]] = defaultdict(list)
    for node in nodes:
        children[node.parent].append(node)
    weights: dict[int, float] = {}
    for node in reversed(nodes):  # children come after their parents
        weights[node.node] = max(node.hits + 1.0, sum(weights[child.node] for child in children[node.node]))
    length = max((node.first_token + node.num_tokens for node in nodes), default=0)
    owners = {owner: i % NUM_COLORS for i, owner in enumerate(dict.fromkeys(node.owner for node in nodes))}
    boxes: list[TreeBox] = []
    pending: list[tuple[int | None, float, float]] = [(None, 0.0, float(TREE_HEIGHT))]
    while pending:
        parent, y, height = pending.pop()
        total = sum(weights[child.node] for child in children[parent])
        for child in children[parent]:
            # A parent that was used more than its children leaves room below them.
            share = weights[child.node] / max(total, weights[parent] if parent is not None else 0.0)
            x = TREE_WIDTH * child.first_token / length
            box = TreeBox(child, x, y, TREE_WIDTH * child.num_tokens / length, height * share, owners[child.owner])
            boxes.append(box)
            pending.append((child.node, y, box.height))
            y += box.height
    return boxes


@dataclass(frozen=True, slots=True)
class BlockCell:
    x: int
    y: int
    state: str


def draw_blocks(view: CacheView) -> list[BlockCell]:
    return [
        BlockCell(i % MAP_COLUMNS * CELL, i // MAP_COLUMNS * CELL, _STATES[letter])
        for i, letter in enumerate(view.block_map)
    ]
