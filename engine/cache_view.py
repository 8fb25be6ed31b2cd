"""The cache drawn for a reader: the most used part of the tree, a map of the blocks, owners, evictions, requests.

    root ── hottest child first ──► at most `max_nodes`      a heap of candidates, so that a child is taken only after
                                                            its parent, and the most used candidate always next

Taken between two steps, so everything in it is of one moment. Bounded: at most `EXAMINED` nodes are looked at, and the
block map has at most `MAP_CELLS` cells, whatever the size of the cache.
"""

from __future__ import annotations

import heapq
from itertools import islice

from engine.block_pool import BlockPool, BlockState
from engine.engine import LLMEngine
from engine.erasure import document_id_of
from engine.eviction import EvictionOrder
from engine.prefix_index import Node, PrefixIndex
from engine.protocol import (
    CacheView,
    DocumentStart,
    EvictionLine,
    GetCacheView,
    OwnerUse,
    PrefixNode,
    RequestView,
    evictions_seen_by,
)
from engine.request import Request
from engine.scheduler import Scheduler
from engine.settings import PUBLIC_OWNER

EXAMINED = 20_000  # nodes
MAP_CELLS = 1_024
MAX_NODES = 1_000
MAX_NODE_DOCUMENTS = 16
MAX_ROWS = 200  # owners, lines of the ledger, requests

_LETTERS = {BlockState.FREE: b"f", BlockState.CACHED: b"c", BlockState.ACTIVE: b"a"}


def build_cache_view(engine: LLMEngine, query: GetCacheView) -> CacheView:
    """What `query` asks for; with an owner, nothing of anybody else. Below what is public hangs what is an owner's."""
    manager = engine.scheduler.manager
    cells, blocks_per_cell = _block_map(manager.pool)
    index = manager.index
    return CacheView(
        query_id=query.query_id,
        block_size=manager.block_size,
        num_blocks=manager.pool.num_blocks,
        nodes=_hottest(index, min(query.max_nodes, MAX_NODES), manager.block_size, query.owner),
        num_nodes=index.num_nodes if query.owner is None else 0,
        block_map=cells if query.owner is None else b"",
        blocks_per_cell=blocks_per_cell,
        owners=_largest(index.order, query.owner),
        evictions=_evictions(engine, query.owner),
        requests=_requests(engine.scheduler, query.tenant_id),
    )


def _hottest(index: PrefixIndex, count: int, block_size: int, owner: str | None) -> tuple[PrefixNode, ...]:
    places: dict[Node, int] = {}
    views: list[PrefixNode] = []
    candidates: list[tuple[int, int, Node]] = []  # (-hits, order of discovery, node)
    examined = 0

    def discover(parent: Node) -> None:
        nonlocal examined
        for child in islice((parent.children or {}).values(), EXAMINED - examined):
            examined += 1
            if owner in (None, child.owner.name):
                heapq.heappush(candidates, (-child.hits, examined, child))
            elif child.owner.name == PUBLIC_OWNER:
                discover(child)

    discover(index.root)
    while candidates and len(views) < count:
        node = heapq.heappop(candidates)[2]
        places[node] = len(views)
        views.append(_view(node, places, block_size))
        discover(node)
    return tuple(views)


def _view(node: Node, places: dict[Node, int], block_size: int) -> PrefixNode:
    return PrefixNode(
        node=places[node],
        parent=None if node.parent is None else places.get(node.parent),
        owner=node.owner.name,
        first_token=node.first_block * block_size,
        num_tokens=node.num_blocks * block_size,
        num_blocks=node.num_blocks,
        hits=node.hits,
        num_holders=node.lock_count,
        documents=tuple(
            DocumentStart(block * block_size, document_id_of(key)) for block, key in node.documents[:MAX_NODE_DOCUMENTS]
        ),
    )


def _block_map(pool: BlockPool) -> tuple[bytes, int]:
    """One block a cell stands for its neighbours when there are more blocks than cells."""
    stride = -(-pool.num_blocks // MAP_CELLS)
    return b"".join(_LETTERS[pool.block(block_id).state] for block_id in range(0, pool.num_blocks, stride)), stride


def _largest(order: EvictionOrder, wanted: str | None) -> tuple[OwnerUse, ...]:
    owners = (use for use in order.uses() if wanted in (None, use.owner))
    return tuple(heapq.nlargest(MAX_ROWS, owners, key=lambda use: use.num_blocks))


def _evictions(engine: LLMEngine, wanted: str | None) -> tuple[EvictionLine, ...]:
    ledger = engine.stats().ledger
    if wanted is not None:
        return evictions_seen_by(wanted, ledger)
    return tuple(heapq.nlargest(MAX_ROWS, ledger, key=lambda line: line.num_blocks))


def _requests(scheduler: Scheduler, wanted: str | None) -> tuple[RequestView, ...]:
    everyone = (*scheduler.running, *scheduler.waiting)
    return tuple(islice((_request(request) for request in everyone if wanted in (None, request.tenant_id)), MAX_ROWS))


def _request(request: Request) -> RequestView:
    return RequestView(
        request_id=request.request_id.partition("/")[2] or request.request_id,  # without the client's number
        tenant_id=request.tenant_id,
        state=request.state.value,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=None if request.account is None else request.account.num_cached_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
    )
