"""python -m bench.index: what the block manager and the prefix index cost, and that the cost does not grow.

For trees of 1,000 to 1,000,000 nodes, full of other prompts, in a pool that holds them all:

    match      a 2,048-token prompt (128 blocks in 8 runs), fully cached, tokens compared        µs a prompt
    insert     a 2,048-token prompt of which the first half is cached: keys, tree, pool marks    µs a new block
    allocate   a hit of 128 blocks (lock, acquire) or fresh blocks, the slower of the two        µs a block
    free       unlock and release of 128 blocks                                                  µs a block

Each figure is the median over many prompts: as many as the tree holds, or 300. Of a large tree their memory is
not in the CPU's caches; the garbage collector is frozen as in the engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.block_pool import BlockPool
from engine.prefix_index import Node, PrefixIndex, PrefixMatch
from engine.scoped_tokens import ScopedTokens

BLOCK_SIZE = 16
RUNS = 8  # runs on the path of a measured prompt
RUN_BLOCKS = 16
SAMPLES = 300
SCOPE = bytes(range(16))


@dataclass
class Cache:
    """An index and a pool of one mind, without a scheduler around them."""

    index: PrefixIndex
    pool: BlockPool

    def insert(self, sequence: ScopedTokens, blocks: int) -> tuple[Node, array[int]]:
        """Match, compute the rest, index it; returns what is held."""
        match = self.index.match_prefix(sequence, blocks * BLOCK_SIZE)
        node = self.hold(match)
        fresh = self.pool.allocate(blocks - len(match.block_ids))
        return self.index_blocks(node, sequence, len(match.block_ids), fresh), match.block_ids + fresh

    def hold(self, match: PrefixMatch) -> Node:
        node = self.index.lock(match)
        self.pool.acquire(match.block_ids)
        return node

    def index_blocks(self, node: Node, sequence: ScopedTokens, first: int, fresh: array[int]) -> Node:
        keys = self.index.chain_keys(node.last_key, sequence, first, first + len(fresh))
        done = self.index.insert_prefix(node, sequence, first, keys, fresh)
        self.pool.mark_indexed(fresh)
        return done.node

    def free(self, node: Node, block_ids: array[int]) -> None:
        self.index.unlock(node)
        self.pool.release(block_ids)


def _tokens(rng: random.Random, blocks: int) -> list[int]:
    return rng.choices(range(49152), k=blocks * BLOCK_SIZE)


def _measured_prompt(cache: Cache, rng: random.Random) -> ScopedTokens:
    """A cached prompt of RUNS · RUN_BLOCKS blocks whose path branches after every run: 2 · RUNS - 1 nodes."""
    tokens = _tokens(rng, RUNS * RUN_BLOCKS)
    for run in range(1, RUNS):
        branch = tokens[: run * RUN_BLOCKS * BLOCK_SIZE] + _tokens(rng, 1)
        cache.free(*cache.insert(ScopedTokens.of(branch, SCOPE, BLOCK_SIZE), run * RUN_BLOCKS + 1))
    sequence = ScopedTokens.of(tokens, SCOPE, BLOCK_SIZE)
    cache.free(*cache.insert(sequence, RUNS * RUN_BLOCKS))
    return sequence


def _fill(cache: Cache, rng: random.Random, num_nodes: int, progress: Callable[[int], None]) -> None:
    """Other prompts: a tree of small runs, 1 to 3 blocks each, branching at random."""
    trunks: list[list[int]] = [[]]
    while cache.index.num_nodes < num_nodes:
        trunk = rng.choice(trunks)
        tokens = trunk + _tokens(rng, rng.randint(1, 3))
        cache.free(*cache.insert(ScopedTokens.of(tokens, SCOPE, BLOCK_SIZE), len(tokens) // BLOCK_SIZE))
        if len(tokens) < 8 * BLOCK_SIZE and len(trunks) < 4096:
            trunks.append(tokens)
        if cache.index.num_nodes % 50_000 == 0:
            progress(cache.index.num_nodes)


T = TypeVar("T")


def _timed(times: list[float], per: int, action: Callable[..., T], *arguments: object) -> T:
    """Call, and note the time in µs, divided by `per`."""
    start = time.perf_counter_ns()
    result = action(*arguments)
    times.append((time.perf_counter_ns() - start) / 1e3 / per)
    return result


def measure(num_nodes: int, seed: int = 7) -> dict[str, float]:
    """Medians in µs at one size of the tree."""
    rng = random.Random(seed)
    cache = Cache(PrefixIndex(BLOCK_SIZE, ghost_entries=65536), BlockPool(3 * num_nodes + 80_000))
    prompts = [_measured_prompt(cache, rng) for _ in range(max(1, min(SAMPLES, num_nodes // (2 * RUNS))))]
    _fill(cache, rng, num_nodes, lambda done: print(f"  filling: {done:,} nodes", file=sys.stderr))
    gc.collect()
    gc.freeze()
    blocks = RUNS * RUN_BLOCKS
    times: dict[str, list[float]] = {"match": [], "insert": [], "hit": [], "fresh": [], "free": []}
    for _ in range(SAMPLES):
        # As a prompt arrives: new in memory, and therefore in the caches; the tree is not.
        sequence = ScopedTokens(BLOCK_SIZE, [(bytes(prompts[rng.randrange(len(prompts))].packed), SCOPE, "")])
        match = _timed(times["match"], 1, cache.index.match_prefix, sequence, len(sequence))
        assert len(match.block_ids) == blocks
        node = _timed(times["hit"], blocks, cache.hold, match)
        _timed(times["free"], blocks, cache.free, node, match.block_ids)
        _measure_insert(cache, rng, sequence, times)
    cache.index.check_integrity(lambda block_id: cache.pool.block(block_id).ref_count)
    gc.unfreeze()
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "match": median["match"],
        "insert": median["insert"],
        "allocate": max(median["hit"], median["fresh"]),
        "free": median["free"],
    }


def _measure_insert(cache: Cache, rng: random.Random, cached: ScopedTokens, times: dict[str, list[float]]) -> None:
    """Half of a cached prompt and as many new blocks: one node more each time."""
    half = RUNS * RUN_BLOCKS // 2
    sequence = ScopedTokens(
        BLOCK_SIZE,
        [
            (bytes(cached.packed[: half * cached.stride]), SCOPE, ""),
            (array("i", _tokens(rng, half)).tobytes(), SCOPE, ""),
        ],
    )
    match = cache.index.match_prefix(sequence, len(sequence))
    node = cache.hold(match)
    fresh = _timed(times["fresh"], half, cache.pool.allocate, half)
    end = _timed(times["insert"], half, cache.index_blocks, node, sequence, half, fresh)
    cache.free(end, match.block_ids + fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-nodes", type=int, default=1_000_000)
    args = parser.parse_args()
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= args.max_nodes]
    rows = {}
    for size in sizes:
        rows[size] = measure(size)
    names = list(rows[sizes[0]])
    print(f"{'nodes':>10}" + "".join(f"{name:>12}" for name in names) + "    (µs; match a prompt, others a block)")
    for size, row in rows.items():
        print(f"{size:>10,}" + "".join(f"{row[name]:>12.3f}" for name in names))
    last, first = rows[sizes[-1]], rows[sizes[0]]
    worst = {name: max(row[name] for row in rows.values()) for name in names}
    print(
        json.dumps(
            {
                "match_us_2048_tokens": round(worst["match"], 2),
                "insert_us_per_block": round(worst["insert"], 3),
                "allocate_us_per_block": round(worst["allocate"], 3),
                "free_us_per_block": round(worst["free"], 3),
                "growth_1k_to_1m": round(max(last[name] / first[name] for name in names), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
