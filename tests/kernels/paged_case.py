"""A small paged cache whose answer is known: the same keys and values, dense, through a softmax written out.

Written without the kernels' own helpers. Every slot that no token of the case owns is NaN, so that a kernel which
lets an unseen slot into its arithmetic shows it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from kernels.dispatch import PagedAttentionKernel
from kernels.metadata import AttentionMetadata

NUM_LAYERS = 3
LAYER = 1


@dataclass(frozen=True)
class Shape:
    """What a case looks like. `lengths`: (tokens already cached, new tokens) of each sequence."""

    lengths: Sequence[tuple[int, int]] = ((0, 5), (7, 1), (3, 4))
    block_size: int = 4
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    score_size: float = 1.0  # about the standard deviation of the scores before the cap
    shuffled: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass
class PagedCase:
    shape: Shape
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    keys: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # of each sequence, dense
    values: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    sinks: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        return self.shape.score_size / math.sqrt(self.shape.head_dim)

    @property
    def largest_value(self) -> float:
        """The size of an output is at most this: an average of values."""
        return max(float(value.abs().max()) for value in self.values if value.numel())

    def run(self, kernel: PagedAttentionKernel) -> torch.Tensor:
        return kernel(
            self.query,
            self.kv_cache,
            LAYER,
            self.metadata,
            scale=self.scale,
            sliding_window=self.shape.sliding_window,
            soft_cap=self.shape.soft_cap,
            sinks=self.sinks,
        )

    def dense(self) -> torch.Tensor:
        """The right answer in float64, one row and one head at a time."""
        queries = iter(self.query.double())
        rows: list[torch.Tensor] = []
        for (cached, new), key, value in zip(self.shape.lengths, self.keys, self.values, strict=True):
            for position in range(cached, cached + new):
                query = next(queries)
                heads = [self._dense_head(query[h], h, position, key, value) for h in range(query.shape[0])]
                rows.append(torch.stack(heads))
        return torch.stack(rows)

    def _dense_head(
        self, query: torch.Tensor, head: int, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        window, cap, kv_head = self.shape.sliding_window, self.shape.soft_cap, head // self.shape.group
        seen = [j for j in range(position + 1) if window is None or j > position - window]
        scores = [float(query @ keys[j, kv_head].double()) * self.scale for j in seen]
        if cap is not None:
            scores = [cap * math.tanh(score / cap) for score in scores]
        sink = [] if self.sinks is None else [float(self.sinks[head])]
        largest = max(scores + sink)
        powers = [math.exp(score - largest) for score in scores]
        total = math.fsum(powers + [math.exp(score - largest) for score in sink])
        weights = torch.tensor(powers, dtype=torch.float64) / total
        return weights @ values[seen, kv_head].double()


def build_case(shape: Shape) -> PagedCase:
    generator = torch.Generator().manual_seed(shape.seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(shape.dtype)

    tables = _block_tables(shape)
    num_blocks = sum(map(len, tables)) + 3
    kv_shape = (shape.num_kv_heads, shape.head_dim)
    kv_cache = torch.full((num_blocks, NUM_LAYERS, 2, shape.block_size, *kv_shape), torch.nan, dtype=shape.dtype)
    keys, values = ([normal(cached + new, *kv_shape) for cached, new in shape.lengths] for _ in range(2))
    for table, key, value in zip(tables, keys, values, strict=True):
        for position in range(len(key)):
            block, offset = table[position // shape.block_size], position % shape.block_size
            kv_cache[block, LAYER, 0, offset] = key[position]
            kv_cache[block, LAYER, 1, offset] = value[position]
    num_heads = shape.num_kv_heads * shape.group
    return PagedCase(
        shape=shape,
        kv_cache=kv_cache,
        metadata=AttentionMetadata.build(
            tables, [cached for cached, _ in shape.lengths], [new for _, new in shape.lengths], shape.block_size, "cpu"
        ),
        query=normal(sum(new for _, new in shape.lengths), num_heads, shape.head_dim),
        keys=keys,
        values=values,
        sinks=normal(num_heads) if shape.sinks else None,
    )


def _block_tables(shape: Shape) -> list[list[int]]:
    """Disjoint block tables that leave three blocks, 0 among them, to nobody: 0 is what padding points to."""
    counts = [-(-(cached + new) // shape.block_size) for cached, new in shape.lengths]
    ids = list(range(1, sum(counts) + 3))
    if shape.shuffled:
        random.Random(shape.seed).shuffle(ids)
    tables: list[list[int]] = []
    for count in counts:
        tables.append(ids[:count])
        ids = ids[count:]
    return tables


# Every family that the engine runs, and the edges of each option. Names are the tests' ids.
SHAPES: dict[str, Shape] = {
    "smollm2": Shape(num_kv_heads=3, group=3, head_dim=64, block_size=16, lengths=((20, 13), (40, 1), (0, 17))),
    "llama_group_4": Shape(num_kv_heads=2, group=4, head_dim=128),
    "one_head": Shape(num_kv_heads=1, group=1, head_dim=8),
    "no_grouping": Shape(num_kv_heads=4, group=1, head_dim=32),
    "one_kv_head": Shape(num_kv_heads=1, group=8, head_dim=16),
    "head_dim_80": Shape(head_dim=80),
    "phi3_head_dim_96": Shape(head_dim=96, group=1, num_kv_heads=4),
    "gemma_head_dim_256": Shape(head_dim=256, num_kv_heads=1, group=4, soft_cap=50.0, sliding_window=4),
    "odd_head_dim": Shape(head_dim=7),
    "block_size_1": Shape(block_size=1),
    "block_size_5": Shape(block_size=5),
    "block_size_64": Shape(block_size=64),
    "exactly_full_blocks": Shape(lengths=((4, 4), (7, 1), (0, 8))),
    "one_token": Shape(lengths=((0, 1),)),
    "only_decode": Shape(lengths=((1, 1), (9, 1), (30, 1))),
    "only_prefill": Shape(lengths=((0, 9), (0, 2))),
    "empty_rows": Shape(lengths=((6, 0), (3, 2), (0, 0), (5, 1), (4, 0))),
    "consecutive_blocks": Shape(shuffled=False),
    "window_1": Shape(sliding_window=1),
    "window_2_at_a_block_edge": Shape(sliding_window=2, lengths=((8, 1), (7, 1), (3, 6))),
    "window_is_length": Shape(sliding_window=8, lengths=((7, 1), (0, 8))),
    "window_past_length": Shape(sliding_window=100),
    "window_skips_blocks": Shape(sliding_window=5, lengths=((41, 1), (30, 9))),
    "soft_cap": Shape(soft_cap=30.0),
    "soft_cap_large_scores": Shape(soft_cap=20.0, score_size=60.0),
    "large_scores": Shape(score_size=30.0),
    "sinks": Shape(sinks=True),
    "sinks_and_window": Shape(sinks=True, sliding_window=3),
    "sinks_cap_window": Shape(sinks=True, sliding_window=6, soft_cap=10.0, score_size=10.0),
}


def shapes(dtype: torch.dtype) -> st.SearchStrategy[Shape]:
    """Any shape small enough for the dense answer."""
    lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=4)
    return st.builds(
        Shape,
        lengths=lengths.filter(lambda pairs: any(new for _, new in pairs)),
        block_size=st.sampled_from([1, 2, 3, 8, 16, 64]),
        num_kv_heads=st.integers(1, 3),
        group=st.integers(1, 4),
        head_dim=st.sampled_from([1, 5, 16, 40]),
        sliding_window=st.none() | st.integers(1, 60),
        soft_cap=st.none() | st.floats(1.0, 50.0),
        sinks=st.booleans(),
        score_size=st.sampled_from([0.1, 1.0, 8.0]),
        shuffled=st.booleans(),
        dtype=st.just(dtype),
        seed=st.integers(0, 1000),
    )
