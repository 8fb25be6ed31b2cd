"""Gives requests their blocks: from the prefix index where it can, from the pool where it must.

                 get_computed_blocks            allocate_slots            cache_blocks              free
    request ──────────────────────────► match ──────────────────► table ───────────────► index ──────────► cached
                 (changes nothing)        lock, acquire, evict,            new full blocks        unlock,
                                          copy-on-write                    become findable        release

The blocks of a request at admission, block size 4, 7 tokens matched of 13:

    tokens         0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12
    block_table    [shared ] [fresh  ] [fresh    ] [..]
    KV in place    ■ ■ ■ ■   ■ ■ ■ □               ■ in the cache, the second block's three by copying slots
                             └── computing starts at token 7: the match is exact to the token

I6: a match never covers the last token, so at least one is computed and there are logits to sample from.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engine.batch import BlockCopy
from engine.block_pool import BlockPool
from engine.document_order import DocumentPopularity, order_documents
from engine.errors import InvariantError
from engine.eviction import Policy
from engine.prefix_index import MissReason, PrefixIndex, PrefixMatch
from engine.protocol import PromptAccount, TenantPolicy
from engine.request import Request


@dataclass(slots=True, frozen=True)
class BlockCounts:
    """The three sum to the pool's size (I1)."""

    free: int
    cached: int
    active: int


class KVCacheManager:
    """Owns the pool and the index, and keeps the two of one mind."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        root_key: bytes,
        *,
        ghost_entries: int = 65536,
        policy: Policy = "lru",
        caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size, root_key, ghost_entries, policy)
        # Blocks that running requests are about to compute, by key: who else wants one waits for it.
        self._computing: dict[bytes, Request] = {}
        self.popularity = DocumentPopularity()

    def set_policy(self, tenant_id: str, policy: TenantPolicy) -> None:
        """A floor is rounded down to whole blocks, a quota, too."""
        quota = None if policy.kv_quota_tokens is None else policy.kv_quota_tokens // self.block_size
        self.index.order.set_limits(tenant_id, policy.kv_floor_tokens // self.block_size, quota)

    # ------------------------------------------------------------------ admission

    def arrange_documents(self, request: Request) -> None:
        """Put documents whose order is ours to choose where they find most; until the request is first admitted."""
        if request.chooses_order and request.account is None and self.caching and request.indexable:
            ordered = order_documents(
                request.submitted_segments, self.index, self.popularity, request.tenant_id, request.pin_top
            )
            request.arrange(ordered.segments, ordered.order)

    def get_computed_blocks(self, request: Request) -> PrefixMatch | None:
        """The longest cached prefix; None when this request does not use the cache."""
        if not (self.caching and request.indexable):
            return None
        return self.index.match_prefix(request.tokens, request.num_tokens - 1)

    def num_cached_tokens(self, request: Request) -> int:
        """How much of a waiting request is in the cache now; looked up again only when the index has changed."""
        if request.cached_hint is None or request.cached_hint[0] != self.index.version:
            match = self.get_computed_blocks(request)
            request.cached_hint = (self.index.version, match.num_tokens if match else 0)
        return request.cached_hint[1]

    def is_awaiting(self, request: Request, match: PrefixMatch | None) -> bool:
        """Whether the next block this request lacks is being computed by another one right now.

        Computing it twice would cost time and a block. The follower is asked again when the last block that both begin
        with is done, not after each chunk of the leader: a burst of a thousand is looked up twice each. A key is only a
        hint here: on a collision the follower waits a little for nothing.
        """
        if match is None:
            return False
        block = len(match.block_ids)
        if (block + 1) * self.block_size >= request.num_tokens:
            return False
        key = self.index.chain_keys(self.index.match_key(match), request.tokens, block, block + 1)[0]
        leader = self._computing.get(key)
        if leader is None or leader is request:
            return False
        common = self.index.common_blocks(leader.tokens, request.tokens)
        last = min(common, (request.num_tokens - 1) // self.block_size, request.tokens.span(block)[1]) - 1
        pending = last - leader.num_indexed_blocks
        request.awaited_key = leader.pending_keys[pending] if 0 <= pending < len(leader.pending_keys) else key
        return True

    def is_still_awaiting(self, request: Request) -> bool:
        if request.awaited_key is not None and request.awaited_key not in self._computing:
            request.awaited_key = None
        return request.awaited_key is not None

    def can_admit(self, request: Request, match: PrefixMatch | None, reserve: int) -> bool:
        """Whether all known tokens of the request fit, `reserve` blocks beside them left for others to grow."""
        shared = match.block_ids if match else array("i")
        # A hit on a cached block takes it out of what can be evicted.
        revived = self.pool.count_unreferenced(shared)
        needed = self._blocks_for(request.num_tokens + 1) - len(shared) + revived + reserve
        available = self.pool.num_free + self.pool.num_cached
        request.lacked_room = None if needed <= available else (self.index.version, available)
        return needed <= available

    def still_lacks_room(self, request: Request) -> bool:
        """Whether nothing has changed for the better since `can_admit` said no: spares a look-up every step."""
        if request.lacked_room is None:
            return False
        version, available = request.lacked_room
        return version == self.index.version and self.pool.num_free + self.pool.num_cached <= available

    def admit(self, request: Request, match: PrefixMatch | None) -> BlockCopy | None:
        """Take hold of the matched prefix. The copy, if any, must be done before the step that follows."""
        if request.block_table:
            raise InvariantError(f"I3: request {request.request_id} was admitted with blocks in its table")
        copy = None
        request.node, request.num_indexed_blocks = self.index.root, 0
        if match is not None:
            request.node = self.index.lock(match)
            self.pool.acquire(match.block_ids)
            request.block_table = match.block_ids[:]
            request.num_indexed_blocks = len(match.block_ids)
            request.num_computed_tokens = request.num_indexed_blocks * self.block_size
            if match.partial_block is not None:
                copy = self._copy_on_write(request, match.partial_block, match.partial_tokens)
            self._announce(request)
        if request.account is None:
            request.account = self._account(request, match)
            self.popularity.note(request.segments)
        return copy

    def _copy_on_write(self, request: Request, source: int, num_slots: int) -> BlockCopy | None:
        """Share a block's first slots by copying them into a fresh one.

        The source is not pinned: should it be evicted while this step is scheduled, its new owner writes only
        after the copies, which run first and in order.
        """
        if not self._make_room(1, request):
            return None
        fresh = self.pool.allocate(1)
        if fresh[0] == source:  # evicted to make this very room: its slots already lie where they should
            request.block_table += fresh
            request.num_computed_tokens += num_slots
            return None
        request.block_table += fresh
        request.num_computed_tokens += num_slots
        return BlockCopy(source, fresh[0], num_slots)

    def _account(self, request: Request, match: PrefixMatch | None) -> PromptAccount:
        """Each prompt token into exactly one class (design: one account of every prompt token)."""
        total = request.num_prompt_tokens
        if match is None:
            return PromptAccount(disabled=total)
        cached = request.num_computed_tokens
        whole = total // self.block_size * self.block_size
        # Nothing but the last block is missing: it is not full, or held back for the token that is always computed.
        missed = 0 if cached >= (total - 1) // self.block_size * self.block_size else whole - cached
        return PromptAccount(
            device=cached,
            cold=missed if match.reason is MissReason.COLD else 0,
            diverged=missed if match.reason is MissReason.DIVERGED else 0,
            evicted=missed if match.reason is MissReason.EVICTED else 0,
            partial_block=total - cached - missed,
        )

    def _announce(self, request: Request) -> None:
        """Say which full blocks this request is going to compute."""
        assert request.node is not None
        first, last = request.num_indexed_blocks, request.num_tokens // self.block_size
        request.pending_keys = self.index.chain_keys(request.node.last_key, request.tokens, first, last)
        for key in request.pending_keys:
            self._computing.setdefault(key, request)

    def _withdraw(self, request: Request, count: int) -> None:
        """The first `count` pending blocks are computed, or will not be."""
        for key in request.pending_keys[:count]:
            if self._computing.get(key) is request:
                del self._computing[key]
        del request.pending_keys[:count]

    # ------------------------------------------------------------------ growth

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Blocks for the next tokens; False, and nothing changed, when there are not enough."""
        needed = self._blocks_for(request.num_computed_tokens + num_new_tokens) - len(request.block_table)
        if needed <= 0:
            return True
        if not self._make_room(needed, request):
            return False
        request.block_table += self.pool.allocate(needed)
        return True

    def _make_room(self, count: int, request: Request) -> bool:
        missing = count - self.pool.num_free
        if missing > self.pool.num_cached:
            return False
        if missing > 0:
            self.pool.evict(self.index.evict(missing, request.tenant_id))
        return True

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------ after the step

    def cache_blocks(self, request: Request) -> None:
        """Make the full blocks that have been computed findable.

        table before   [ A ][ x ][ y ][ z ]      x: computed here, but the index got the same block first
        index          [ A ][ B ]
        table after    [ A ][ B ][ y ][ z ]      x is free again; y (if full) is in the index now (I2)
        """
        first, last = request.num_indexed_blocks, request.num_computed_tokens // self.block_size
        if first >= last or not (self.caching and request.indexable):
            return
        assert request.node is not None
        keys = request.pending_keys[: last - first]
        if len(keys) < last - first:  # output tokens fill blocks, too
            parent_key = keys[-1] if keys else request.node.last_key
            keys += self.index.chain_keys(parent_key, request.tokens, first + len(keys), last)
        block_ids = request.block_table[first:last]
        done = self.index.insert_prefix(request.node, request.tokens, first, keys, block_ids)
        request.node = done.node
        self._adopt(request, first, done.adopted)
        self.pool.mark_indexed(block_ids[len(done.adopted) : done.num_blocks])
        self._withdraw(request, last - first)
        request.num_indexed_blocks = first + done.num_blocks
        self.pool.evict(self.index.trim(request.tenant_id))
        if done.num_blocks < last - first:
            self._withdraw(request, len(request.pending_keys))
            request.indexable = False

    def _adopt(self, request: Request, first: int, adopted: array[int]) -> None:
        if not adopted:
            return
        own = request.block_table[first : first + len(adopted)]
        request.block_table[first : first + len(adopted)] = adopted
        self.pool.acquire(adopted)
        self.pool.release(own)

    def free(self, request: Request) -> None:
        """Let go of every block (finished, aborted, failed or preempted); full ones stay cached (I10)."""
        self._withdraw(request, len(request.pending_keys))
        request.awaited_key = None
        if request.node is not None:
            self.index.unlock(request.node)
            request.node = None
        self.pool.release(request.block_table)
        request.block_table = array("i")
        request.num_computed_tokens = request.num_indexed_blocks = 0

    # ------------------------------------------------------------------ look

    def counts(self) -> BlockCounts:
        return BlockCounts(self.pool.num_free, self.pool.num_cached, self.pool.num_active)

    def check_integrity(self, running: list[Request]) -> None:
        """I1–I4 over pool, index and the tables of every running request."""
        self.pool.check_integrity()
        self.index.check_integrity(lambda block_id: self.pool.block(block_id).ref_count)
        holders = [0] * self.pool.num_blocks
        for request in running:
            for block_id in request.block_table:
                holders[block_id] += 1
        for block_id, held in enumerate(holders):
            if self.pool.block(block_id).ref_count != held:
                raise InvariantError(f"I3: block {block_id} is in {held} tables: {self.pool.block(block_id)}")
        indexed = {block_id for node in self.index.nodes() for block_id in node.block_ids}
        if len(indexed) != self.index.num_blocks or self.pool.num_cached != sum(not holders[b] for b in indexed):
            raise InvariantError("I1: pool and index disagree about what is cached")
        for request in running:
            if request.num_computed_tokens > len(request.block_table) * self.block_size:
                raise InvariantError(f"I3: request {request.request_id} has computed beyond its blocks")
        if any(request not in running for request in self._computing.values()):
            raise InvariantError("I10: a request that is gone is still said to compute a block")
