"""Pictures as numbers, for the templates to write as SVG: the prefix tree, who holds the blocks, the block map.

The tree is an icicle: tokens go from left to right, and a node is as high as it is hot, so a path that many requests
share is a wide band: by the square root of its uses, or one system prompt would leave no room for anything else. Its
color is its owner's, the stronger the more it was used.

    0            512            1,024     ruler
    ┌──────────────┬───────┬───────┐      weight of a node = max(√(its hits + 1), the weights of its children)
    │ acme         │ doc A ╎ doc B │      a node's children share its height
    │ 512 tok 40×  ├───────┼───────┘      a run may hold several documents, one behind the other
    │              │ doc C │
    └──────────────┴───────┘
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import CacheView, PrefixNode

TREE_WIDTH = 960
_TREE_HEIGHTS = (120.0, 460.0)  # with few leaves, and at most
_LEAF_HEIGHT = 24.0
_MIN_HEIGHT = 2.5  # of a box; what would be lower is left out, and counted
_LINE = 13.0  # height of a line of text
_LETTER = 6.1  # width of one, on average
_STEPS = (1, 2, 5)  # times a power of ten: between two marks of the ruler
NUM_HEATS = 5
NUM_COLORS = 6  # owners with a color of their own
BAR_WIDTH = 960
_COLUMNS = (16, 64)
_STATES = {ord("f"): "free", ord("c"): "cached", ord("a"): "active"}


@dataclass(frozen=True, slots=True)
class Label:
    x: float
    text: str


@dataclass(frozen=True, slots=True)
class TreeBox:
    """A node's rectangle. `heat`: 0 for unused, NUM_HEATS - 1 for the most used."""

    node: PrefixNode
    x: float
    y: float
    width: float
    height: float
    color: int
    heat: int
    names: tuple[Label, ...]  # its documents, or its owner; what there is room for
    figure: str  # under the names, if there is room
    cuts: tuple[float, ...]  # where a document begins inside


@dataclass(frozen=True, slots=True)
class Tree:
    boxes: tuple[TreeBox, ...]  # parents first
    height: float
    marks: tuple[Label, ...]  # the ruler's
    num_left_out: int  # too thin to be seen


def draw_tree(nodes: Sequence[PrefixNode], colors: dict[str, int]) -> Tree:
    """`colors` of owners, from `owner_colors`."""
    children: dict[int | None, list[PrefixNode]] = defaultdict(list)
    for node in nodes:
        children[node.parent].append(node)
    weights: dict[int, float] = {}
    for node in reversed(nodes):  # children come after their parents
        weights[node.node] = max(math.sqrt(node.hits + 1), sum(weights[child.node] for child in children[node.node]))
    length = max((node.first_token + node.num_tokens for node in nodes), default=1)
    leaves = sum(1 for node in nodes if not children[node.node])
    height = min(max(_TREE_HEIGHTS[0], leaves * _LEAF_HEIGHT), _TREE_HEIGHTS[1])
    hottest = max((node.hits for node in nodes), default=0)
    boxes: list[TreeBox] = []
    pending: list[tuple[int | None, float, float]] = [(None, 0.0, height)]
    while pending:
        parent, y, room = pending.pop()
        total = sum(weights[child.node] for child in children[parent])
        for child in sorted(children[parent], key=lambda node: -weights[node.node]):
            # A parent that was used more than its children leaves room below them.
            share = weights[child.node] / max(total, weights[parent] if parent is not None else 0.0)
            box_height = room * share
            if box_height >= _MIN_HEIGHT:
                heat = heat_of(child.hits, hottest)
                boxes.append(_box(child, y, box_height, length, colors.get(child.owner, NUM_COLORS), heat))
                pending.append((child.node, y, box_height))
            y += box_height
    return Tree(tuple(boxes), height, _ruler(length), len(nodes) - len(boxes))


def _box(node: PrefixNode, y: float, height: float, length: int, color: int, heat: int) -> TreeBox:
    scale = TREE_WIDTH / length
    x, width = node.first_token * scale, node.num_tokens * scale
    starts = [(start.first_token * scale, start.document_id) for start in node.documents]
    if node.parent is None and (not starts or starts[0][0] > x):
        starts.insert(0, (x, node.owner))
    if height >= _LINE:
        ends = [at for at, _ in starts[1:]] + [x + width]
        names = [Label(at, _fitted(name, end - at)) for (at, name), end in zip(starts, ends, strict=False)]
    else:
        names = []
    figure = f"{node.num_tokens:,} tok · {node.hits:,}×"
    fits = height >= (2 if names else 1) * _LINE + 3 and _fitted(figure, width) == figure
    return TreeBox(
        node=node,
        x=x,
        y=y,
        width=width,
        height=height,
        color=color,
        heat=heat,
        names=tuple(name for name in names if name.text),
        figure=figure if fits else "",
        cuts=tuple(at for at, _ in starts if at > x),
    )


def _fitted(text: str, width: float) -> str:
    """As much of it as has room, or nothing."""
    letters = int((width - 8) / _LETTER)
    if len(text) <= letters:
        return text
    return f"{text[: letters - 1]}…" if letters >= 4 else ""


def heat_of(hits: int, hottest: int) -> int:
    """By the logarithm: the first use changes more than the hundredth."""
    if not hits or not hottest:
        return 0
    return max(1, round((NUM_HEATS - 1) * math.log1p(hits) / math.log1p(hottest)))


def _ruler(length: int) -> tuple[Label, ...]:
    """Four to ten marks at round numbers of tokens."""
    power = 10 ** int(math.log10(max(length / 4, 1)))
    step = max(power * factor for factor in _STEPS if power * factor <= max(length / 4, 1))
    return tuple(Label(TREE_WIDTH * at / length, f"{at:,}") for at in range(0, length, step))


def owner_colors(view: CacheView) -> dict[str, int]:
    """The largest owners have a color of their own, by name: a color that follows their size would change hands."""
    return {name: i for i, name in enumerate(sorted(owner.owner for owner in view.owners[:NUM_COLORS]))}


# ---------------------------------------------------------------- who holds the blocks


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the bar. `color`: an owner's number, `active` or `free`."""

    name: str
    num_blocks: int
    color: str
    x: float
    width: float


def draw_holders(view: CacheView, colors: dict[str, int]) -> list[Segment]:
    """All blocks of the pool as one bar: indexed ones by owner, what requests hold besides, what is free."""
    cells = len(view.block_map)
    if not cells or not view.num_blocks:
        return []
    rows = [(row.owner, row.num_blocks, f"c{colors[row.owner]}") for row in view.owners if row.owner in colors]
    others = sum(row.num_blocks for row in view.owners if row.owner not in colors)
    indexed = sum(owner.num_blocks for owner in view.owners)
    # Of a large pool the map shows every so manieth block: then this is an estimate.
    free = min(round(view.num_blocks * view.block_map.count(b"f") / cells), view.num_blocks - indexed)
    rows += [("others", others, f"c{NUM_COLORS}"), ("in use", view.num_blocks - indexed - free, "active")]
    rows.append(("free", free, "free"))
    segments: list[Segment] = []
    x = 0.0
    for name, count, color in rows:
        if count > 0:
            segments.append(Segment(name, count, color, x, BAR_WIDTH * count / view.num_blocks))
            x += segments[-1].width
    return segments


# ---------------------------------------------------------------- the block map


@dataclass(frozen=True, slots=True)
class BlockCell:
    x: int
    y: int
    state: str


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Cells on a grid of one unit each."""

    cells: tuple[BlockCell, ...]
    columns: int
    rows: int


def draw_blocks(view: CacheView) -> BlockMap:
    """About four times as wide as high."""
    count = len(view.block_map)
    columns = min(max(_COLUMNS[0], math.ceil(math.sqrt(4 * count))), _COLUMNS[1])
    cells = tuple(BlockCell(i % columns, i // columns, _STATES[letter]) for i, letter in enumerate(view.block_map))
    return BlockMap(cells, columns, -(-count // columns))
