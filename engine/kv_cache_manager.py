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

With tiers below, a match goes on where the device's ends. Blocks in host memory are fetched in the step that admits the
request; blocks on disk are read while it is parked, like a follower, and are then in host memory:

    device        host           disk
    [ b0 ][ b1 ]  [ b2 ][ b3 ]   [ b4 ]        b2, b3: fresh blocks of the table, filled by a copy, indexed after the
     shared        fetched        read first    step like computed ones

Where a prompt parts from another inside a block that lies only below, that block is fetched into one of the request's
own, and computed over from there: exact to the token in every tier.

Parallel samples of one prompt share its blocks by reference count, in the index or not; where they diverge, in the last
block, each has a copy (`engine/request.py`: the first of them is the others' leader):

    leader        [ p0 ][ p1 ][ p2 ■ ■ □ □ ]    p2 is being written: never shared
    sibling       [ p0 ][ p1 ][ p2'■ □ □ □ ]    all but the last prompt token by copying; that one is computed (I6)

What leaves the index is shown to the tiers first (`demote`). Fetch or compute is the gate's choice.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.batch import BlockCopy, BlockFetch
from engine.block_pool import BlockPool
from engine.document_order import DocumentPopularity, order_documents
from engine.erasure import Selection
from engine.errors import InvariantError
from engine.eviction import Policy
from engine.prefix_index import MissReason, Node, PrefixIndex, PrefixMatch
from engine.protocol import ExplainedPart, PromptAccount, TenantPolicy
from engine.request import Request, SwappedBlocks
from engine.scoped_tokens import ScopedTokens
from engine.tiers.tiered_cache import NO_MATCH, READ_PATIENCE, PartialBlock, TieredCache, TierMatch

MAX_READS = 2  # times a request waits for the disk; then it computes what is still not there


@dataclass(slots=True, frozen=True)
class BlockCounts:
    """The three sum to the pool's size (I1)."""

    free: int
    cached: int
    active: int


@dataclass(slots=True, frozen=True)
class CachedPrefix:
    """The longest cached prefix of a sequence over all tiers. Valid until the cache changes."""

    match: PrefixMatch  # on the device
    below: TierMatch  # what continues it
    keys: list[bytes]  # of the blocks after the device's, as far as they were looked for
    block_size: int

    @property
    def num_blocks(self) -> int:
        """On the device or in host memory: what an admission can have at once."""
        return len(self.match.block_ids) + len(self.below.host_slots)

    @property
    def num_tokens(self) -> int:
        if self.below.host_slots or self.below.partial is not None:
            return self.num_blocks * self.block_size + self.below.partial_tokens("host")
        return self.match.num_tokens

    @property
    def disk_keys(self) -> list[bytes]:
        """Of the blocks that have to be read first."""
        keys = self.keys[len(self.below.host_slots) : len(self.below)]
        partial = self.below.partial
        return [*keys, partial.key] if partial is not None and partial.tier == "disk" else keys


@dataclass(slots=True, frozen=True)
class Promotion:
    """A path of host memory on its way to the device, for nobody yet: what `end_promotion` needs."""

    tokens: ScopedTokens
    node: Node  # locked: the end of what the device has of it
    shared: array[int]  # the blocks up to there
    fresh: array[int]
    fetches: list[BlockFetch]


@dataclass(slots=True, frozen=True)
class Admission:
    """What has to be done before the step that follows."""

    copy: BlockCopy | None = None
    fetches: list[BlockFetch] = field(default_factory=list[BlockFetch])


@dataclass(slots=True, frozen=True)
class ErasedBlocks:
    device: int
    host: int
    disk: int


class KVCacheManager:
    """Owns the pool and the index, and keeps the two of one mind; `tiers`, when given, live longer than it does."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        root_key: bytes,
        *,
        ghost_entries: int = 65536,
        policy: Policy = "lru",
        caching: bool = True,
        tiers: TieredCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size, root_key, ghost_entries, policy)
        self.tiers = tiers
        self._clock = clock
        # Blocks that running requests are about to compute, by key: who else wants one waits for it.
        self._computing: dict[bytes, Request] = {}
        self._unpersisted: list[Node] = []  # ends of paths that are to be on disk, the next one last
        self._unpromoted: list[int] = []  # ends of paths that are to be on the device, as host slots, the next one last
        self.popularity = DocumentPopularity()

    def set_policy(self, tenant_id: str, policy: TenantPolicy) -> None:
        """A floor is rounded down to whole blocks, a quota, too."""
        quota = None if policy.kv_quota_tokens is None else policy.kv_quota_tokens // self.block_size
        self.index.order.set_limits(tenant_id, policy.kv_floor_tokens // self.block_size, quota, policy.weight)

    # ------------------------------------------------------------------ admission

    def arrange_documents(self, request: Request) -> None:
        """Put documents whose order is ours to choose where they find most; until the request is first admitted."""
        if request.leader is not None and request.shares_prompt:
            if request.account is None and request.leader.document_order is not None:
                request.arrange(request.leader.segments, request.leader.document_order)
        elif request.chooses_order and request.account is None and self.caching and request.indexable:
            ordered = order_documents(
                request.submitted_segments,
                self.index,
                self.popularity,
                request.pin_top,
                self.tiers.may_have if self.tiers is not None else None,
            )
            request.arrange(ordered.segments, ordered.order)

    def get_computed_blocks(self, request: Request) -> CachedPrefix | None:
        """The longest cached prefix; None when this request does not use the cache."""
        if not (self.caching and request.indexable):
            return None
        match = self.index.match_prefix(request.tokens, request.num_tokens - 1)
        if self.tiers is None:
            return CachedPrefix(match, NO_MATCH, [], self.block_size)
        first, last = len(match.block_ids), (request.num_tokens - 1) // self.block_size
        keys, below = list[bytes](), NO_MATCH
        if first < last:
            keys = self.index.chain_keys(self.index.match_key(match), request.tokens, first, first + 1)
            if self.tiers.may_have(keys[0]):
                keys += self.index.chain_keys(keys[0], request.tokens, first + 1, last)
                below = self.tiers.match(request.tokens, first, keys)
        partial = self._match_partial_below(request, match, below, keys)
        return CachedPrefix(match, below if partial is None else replace(below, partial=partial), keys, self.block_size)

    def _match_partial_below(
        self, request: Request, match: PrefixMatch, below: TierMatch, keys: list[bytes]
    ) -> PartialBlock | None:
        """What the block in which the prompt parts from others gives, if that is more than on the device."""
        assert self.tiers is not None
        block = len(match.block_ids) + len(below)
        on_device = 0 if len(below) else match.partial_tokens
        if not block:
            return None
        parent_key = keys[len(below) - 1] if len(below) else self.index.match_key(match)
        return self.tiers.match_partial(request.tokens, parent_key, block, request.num_tokens - 1, on_device)

    def plan(self, request: Request) -> CachedPrefix | None:
        """As `get_computed_blocks`, without what is computed faster than it is fetched."""
        prefix = self.get_computed_blocks(request)
        if prefix is None or self.tiers is None:
            return prefix
        partial = prefix.below.partial_tokens("host")
        blocks = len(prefix.below.host_slots) + (partial > 0)
        tokens = len(prefix.below.host_slots) * self.block_size + partial - prefix.match.partial_tokens
        if not blocks or self.tiers.is_fetch_cheaper(blocks, tokens):
            return prefix
        return CachedPrefix(prefix.match, NO_MATCH, prefix.keys, self.block_size)

    def num_cached_tokens(self, request: Request) -> int:
        """How much of a waiting request is in the cache now; looked up again only when the index has changed."""
        if request.cached_hint is None or request.cached_hint[0] != self.index.version:
            prefix = self.get_computed_blocks(request)
            request.cached_hint = (self.index.version, prefix.num_tokens if prefix else 0)
        return request.cached_hint[1]

    def is_awaiting(self, request: Request, prefix: CachedPrefix | None) -> bool:
        """Whether the next block this request lacks is being computed by another one, or read from the disk; for one of
        several parallel samples, whether the prompt is still being computed by the first.

        Computing it twice would cost time and a block. The follower is asked again when the last block that both begin
        with is done, not after each chunk of the leader: a burst of a thousand is looked up twice each. The key is only
        a hint here: nobody waits for what another prompt has under it.
        """
        if request.awaits_leader:
            return True
        if prefix is None:
            return False
        if self._start_reads(request, prefix):
            return True
        block = prefix.num_blocks
        if (block + 1) * self.block_size >= request.num_tokens:
            return False
        key = self._key_at(request, prefix, block)
        leader = self._computing.get(key)
        if leader is None or leader is request:
            return False
        common = self.index.common_blocks(leader.tokens, request.tokens)
        if common <= block or leader.tokens.span(block)[0] != request.tokens.span(block)[0]:
            return False
        last = min(common, (request.num_tokens - 1) // self.block_size, request.tokens.span(block)[1]) - 1
        pending = last - leader.num_indexed_blocks
        request.awaited_key = leader.pending_keys[pending] if 0 <= pending < len(leader.pending_keys) else key
        return True

    def _key_at(self, request: Request, prefix: CachedPrefix, block: int) -> bytes:
        """The key of the first block after what `prefix` can give at once."""
        above = len(prefix.below.host_slots)
        if above < len(prefix.keys):
            return prefix.keys[above]
        parent = prefix.keys[above - 1] if above else self.index.match_key(prefix.match)
        return self.index.chain_keys(parent, request.tokens, block, block + 1)[0]

    def _start_reads(self, request: Request, prefix: CachedPrefix) -> bool:
        tiers, below = self.tiers, prefix.below
        if tiers is None or not below.num_disk_blocks or request.num_reads >= MAX_READS:
            return False
        if not tiers.is_read_cheaper(below) or (key := tiers.start_reads(below)) is None:
            return False
        request.num_reads += 1
        request.awaited_read, request.read_deadline = key, self._clock() + READ_PATIENCE
        request.disk_keys.update(prefix.disk_keys)
        return True

    def is_still_awaiting(self, request: Request) -> bool:
        if request.awaits_leader:
            return True
        if request.awaited_key is not None and request.awaited_key not in self._computing:
            request.awaited_key = None
        if request.awaited_read is not None and not self._is_reading(request, request.awaited_read):
            request.awaited_read = None
        return request.awaited_key is not None or request.awaited_read is not None

    def _is_reading(self, request: Request, key: bytes) -> bool:
        return self.tiers is not None and self.tiers.is_reading(key) and self._clock() < request.read_deadline

    def look_ahead(self, request: Request) -> None:
        """A request begins to wait: what it needs is not a victim, and what is on disk begins to come."""
        self._look_away(request)
        prefix = self.get_computed_blocks(request)
        if prefix is None:
            return
        request.wanted_node = self.index.want(prefix.match)
        if self.tiers is not None and prefix.below.num_disk_blocks and self.tiers.is_read_cheaper(prefix.below):
            request.disk_keys.update(prefix.disk_keys)
            self.tiers.start_reads(prefix.below)

    def _look_away(self, request: Request) -> None:
        if request.wanted_node is not None:
            self.index.unwant(request.wanted_node)
            request.wanted_node = None

    def can_admit(self, request: Request, prefix: CachedPrefix | None, reserve: int) -> bool:
        """Whether all known tokens of the request fit, `reserve` blocks beside them left for others to grow."""
        shared = prefix.match.block_ids if prefix else array("i")
        # A hit on a cached block takes it out of what can be evicted.
        revived = self.pool.count_unreferenced(shared)
        of_leader = len(self._blocks_of_leader(request, len(shared)))
        needed = self._blocks_for(request.num_tokens + 1) - len(shared) - of_leader + revived + reserve
        available = self._num_available(request)
        request.lacked_room = None if needed <= available else (self.index.version, available)
        return needed <= available

    def still_lacks_room(self, request: Request) -> bool:
        """Whether nothing has changed for the better since `can_admit` said no: spares a look-up every step."""
        if request.lacked_room is None:
            return False
        version, available = request.lacked_room
        return version == self.index.version and self._num_available(request) <= available

    def admit(self, request: Request, prefix: CachedPrefix | None) -> Admission:
        """Take hold of the matched prefix, on the device and below."""
        if request.block_table:
            raise InvariantError(f"I3: request {request.request_id} was admitted with blocks in its table")
        self._look_away(request)
        admission = Admission()
        request.node, request.num_indexed_blocks = self.index.root, 0
        if prefix is not None:
            self._pin_below(prefix)
            match = prefix.match
            request.node = self.index.lock(match)
            self.pool.acquire(match.block_ids)
            request.block_table = match.block_ids[:]
            request.num_indexed_blocks = len(match.block_ids)
            request.num_computed_tokens = request.num_indexed_blocks * self.block_size
            if request.num_pinned_tokens:
                self.persist(request.node)
            self._write_through_hot(request.node)
        shares = self._share_with_leader(request)
        if prefix is not None:
            self._fetch(request, prefix.below.host_slots, admission, wanted=not shares)
        has_swapped = self._swap_in(request, admission)
        partial = None
        if prefix is not None:
            partial = self._fetch_partial(request, prefix, admission, wanted=not has_swapped)
        if not admission.fetches:
            admission = Admission(self._copy_last_block(request, prefix))
        if prefix is not None and request.indexable:
            self._announce(request)
        if request.account is None:
            self._set_account(request, prefix, partial)
        return admission

    # ------------------------------------------------------------------ parallel samples

    def num_ready_tokens(self, request: Request, prefix: CachedPrefix | None) -> int:
        """Tokens that an admission finds computed, if there is room for a copy."""
        first = len(prefix.match.block_ids) if prefix else 0
        blocks = first + len(self._blocks_of_leader(request, first))
        if self._may_copy_from_leader(request, blocks):
            return request.num_prompt_tokens - 1
        return max(prefix.num_tokens if prefix else 0, blocks * self.block_size)

    def _blocks_of_leader(self, request: Request, first: int) -> array[int]:
        """The leader's full blocks of their prompt from block `first` on, without the last token's (I6).

        What the index holds is found there, or not shared: only a locked node keeps it from being evicted.
        """
        leader = request.leader
        if leader is None or not _has_prompt(leader) or first < leader.num_indexed_blocks:
            return array("i")
        return leader.block_table[first : (request.num_prompt_tokens - 1) // self.block_size]

    def _may_copy_from_leader(self, request: Request, num_blocks: int) -> bool:
        """Whether the leader has the block that comes after these `num_blocks`, and it is the last of their prompt."""
        is_last = num_blocks == (request.num_prompt_tokens - 1) // self.block_size
        return is_last and request.leader is not None and _has_prompt(request.leader)

    def _share_with_leader(self, request: Request) -> bool:
        """Hold the leader's blocks after those that were found in the index; whether there are any."""
        shared = self._blocks_of_leader(request, len(request.block_table))
        if not shared:
            return False
        self.pool.acquire(shared)
        request.block_table += shared
        request.num_computed_tokens = len(request.block_table) * self.block_size
        request.indexable = False  # what follows blocks that are not in the index is not either
        return True

    def _copy_last_block(self, request: Request, prefix: CachedPrefix | None) -> BlockCopy | None:
        """The slots of a block that is shared in part: the leader's last of their prompt, or one of the index."""
        block, slots = divmod(request.num_prompt_tokens - 1, self.block_size)
        held = len(request.block_table)
        match = prefix.match if prefix is not None and held == len(prefix.match.block_ids) else None
        found = match.partial_tokens if match is not None else 0
        if request.leader is not None and slots > found and self._may_copy_from_leader(request, held):
            return self._copy_on_write(request, request.leader.block_table[block], slots)
        if match is None or match.partial_block is None:
            return None
        return self._copy_on_write(request, match.partial_block, match.partial_tokens)

    def _set_account(self, request: Request, prefix: CachedPrefix | None, partial: PartialBlock | None) -> None:
        """Once a request; parallel samples have one prompt, and one account."""
        if request.leader is not None and request.shares_prompt:
            request.account, request.shares_account = request.leader.account, True
            return
        request.account = self._account(request, prefix, partial)
        self.popularity.note(request.segments)

    # ------------------------------------------------------------------ the tiers below

    def _pin_below(self, prefix: CachedPrefix) -> None:
        """What is going to be fetched stays where it is: writing through and making room may evict below."""
        if self.tiers is not None:
            self.tiers.pin(prefix.below.host_slots)
            if prefix.below.partial is not None and prefix.below.partial.tier == "host":
                self.tiers.pin([prefix.below.partial.slot])

    def _fetch(self, request: Request, host_slots: list[int], admission: Admission, *, wanted: bool) -> None:
        """Fresh blocks behind the shared ones, to be filled from host memory. The slots are pinned."""
        if not host_slots or self.tiers is None:
            return
        if not (wanted and self._make_room(len(host_slots), request)):
            self.tiers.unpin(host_slots)
            return
        self.tiers.note_fetch(host_slots)
        self._append_fetched(request, host_slots, admission)
        request.num_computed_tokens = len(request.block_table) * self.block_size

    def _fetch_partial(
        self, request: Request, prefix: CachedPrefix, admission: Admission, *, wanted: bool
    ) -> PartialBlock | None:
        """The block below in which the prompt parts from another, into a block of the request's own.

        What it does not share is computed over. Its slot is pinned.
        """
        partial = prefix.below.partial
        if self.tiers is None or partial is None or partial.tier != "host":
            return None
        has_all_before = len(request.block_table) == prefix.num_blocks
        if not (wanted and has_all_before and self._make_room(1, request)):
            self.tiers.unpin([partial.slot])
            return None
        self.tiers.note_fetch([partial.slot])
        self._append_fetched(request, [partial.slot], admission)
        request.num_computed_tokens += partial.num_tokens
        return partial

    def _append_fetched(self, request: Request, host_slots: list[int], admission: Admission) -> None:
        fresh = self.pool.allocate(len(host_slots))
        request.block_table += fresh
        admission.fetches.extend(BlockFetch(slot, block) for slot, block in zip(host_slots, fresh, strict=True))

    def _swap_in(self, request: Request, admission: Admission) -> bool:
        """A request that was swapped out gets its own blocks back, if what stood before them is there again."""
        swapped, request.swapped = request.swapped, None
        if swapped is None or self.tiers is None:
            return False
        skipped = len(request.block_table) - swapped.first_block
        wanted = swapped.slots[skipped:] if skipped >= 0 else []
        if not wanted or not self._make_room(len(wanted), request):
            self.tiers.swap_drop(swapped.slots)
            return False
        self.tiers.swap_in(swapped.slots)
        self._append_fetched(request, wanted, admission)
        request.num_computed_tokens = swapped.num_tokens
        return True

    def _write_through_hot(self, node: Node) -> None:
        """Of a path that is used again and again, what the disk lacks."""
        if self.tiers is None:
            return
        at: Node | None = node
        while at is not None and at is not self.index.root and at.hits < self.tiers.write_through_hits:
            at = at.parent
        if at is not None and at is not self.index.root and not at.doomed:
            self.tiers.write_through(self.index.path(at))

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

    def _account(self, request: Request, prefix: CachedPrefix | None, partial: PartialBlock | None) -> PromptAccount:
        """Each prompt token into exactly one class (design: one account of every prompt token).

        `partial`: the block from below that gives its first tokens.
        """
        total = request.num_prompt_tokens
        if prefix is None:
            return PromptAccount(disabled=total)
        cached = request.num_computed_tokens
        first = request.num_indexed_blocks
        fetched = prefix.keys[: (cached // self.block_size - first) if prefix.below.host_slots else 0]
        shared = partial.num_tokens if partial is not None else 0
        disk = sum(key in request.disk_keys for key in fetched) * self.block_size
        if partial is not None and partial.key in request.disk_keys:
            disk += shared
        host = len(fetched) * self.block_size + shared - disk
        whole = total // self.block_size * self.block_size
        # Nothing but the last block is missing: it is not full, or held back for the token that is always computed.
        missed = 0 if cached >= (total - 1) // self.block_size * self.block_size else whole - cached
        reason = self._miss_reason(request, prefix) if missed else MissReason.COLD
        return PromptAccount(
            device=cached - host - disk,
            host=host,
            disk=disk,
            cold=missed if reason is MissReason.COLD else 0,
            diverged=missed if reason is MissReason.DIVERGED else 0,
            evicted=missed if reason is MissReason.EVICTED else 0,
            partial_block=total - cached - missed,
        )

    def _miss_reason(self, request: Request, prefix: CachedPrefix) -> MissReason:
        """Why what follows was not there. What is only on disk, and was not waited for, has been evicted to there."""
        if prefix.below.disk_slots:
            return MissReason.EVICTED
        if not prefix.below.host_slots and prefix.below.partial is None:
            return prefix.match.reason
        if prefix.below.partial is not None:
            return self.index.miss_reason(self._key_at(request, prefix, prefix.num_blocks), diverged=True)
        return self.index.miss_reason(self._key_at(request, prefix, prefix.num_blocks), prefix.below.goes_on)

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

    def allocate_slots(self, request: Request, num_new_tokens: int, *, over_floors: bool = False) -> bool:
        """Blocks for the next tokens; False, and nothing changed, when there are not enough.

        `over_floors`: those that are in the floors of others, too.
        """
        needed = self._blocks_for(request.num_computed_tokens + num_new_tokens) - len(request.block_table)
        if needed <= 0:
            return True
        if not self._make_room(needed, request, over_floors=over_floors):
            return False
        request.block_table += self.pool.allocate(needed)
        return True

    def _num_available(self, request: Request, *, over_floors: bool = False) -> int:
        """Blocks that nobody holds, without the floors of others as long as anybody else holds some."""
        available = self.pool.num_free + self.pool.num_cached
        if over_floors or self.pool.num_active <= len(request.block_table):
            return available
        return available - self.index.order.num_reserved_from(request.tenant_id)

    def _make_room(self, count: int, request: Request, *, over_floors: bool = False) -> bool:
        if count > self._num_available(request, over_floors=over_floors):
            return False
        missing = count - self.pool.num_free
        if missing > 0:
            self.pool.evict(self.index.evict(missing, request.tenant_id, self._demotion))
        return True

    def keep_quotas(self) -> None:
        """What owners have above their quotas goes, as far as nobody holds it.

        For when everybody who waits for a block has had a chance to take hold of it: a burst of one prompt, larger than
        its tenant's quota, would be computed anew for each else.
        """
        for owner in self.index.order.over_quota():
            self.pool.evict(self.index.trim(owner, self._demotion))

    @property
    def _demotion(self) -> Callable[[Node, int], None] | None:
        return None if self.tiers is None else self._demote

    def _demote(self, node: Node, count: int) -> None:
        """The last `count` blocks of a node are about to leave the device."""
        assert self.tiers is not None
        self.tiers.demote(self.index.path(node))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------ after the step

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens`, whose KV is known to be in place, findable.

        table before   [ A ][ x ][ y ][ z ]      x: computed here, but the index got the same block first
        index          [ A ][ B ]
        table after    [ A ][ B ][ y ][ z ]      x is free again; y (if full) is in the index now (I2)
        """
        request.num_done_tokens = num_tokens
        first, last = request.num_indexed_blocks, num_tokens // self.block_size
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
        if first * self.block_size < request.num_pinned_tokens:
            self.persist(request.node)
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

    def persist(self, node: Node) -> bool:
        """Write a path to the disk, as far as it is not there; False when the rest has to wait for its turn."""
        if self.tiers is None or node.doomed or node.parent is None:
            return True
        return self.tiers.write_through(self.index.path(node))

    def begin_to_persist(self) -> None:
        """Bring everything that the index holds now to the disk, each path once: a disk that is too small for all of
        it ends with what was used last, and is not written for ever."""
        if self.tiers is not None and self.tiers.disk is not None:
            self._unpersisted = sorted(self.index.leaves(), key=lambda node: node.last_use, reverse=True)

    def continue_to_persist(self) -> None:
        while self._unpersisted and self.persist(self._unpersisted[-1]):
            self._unpersisted.pop()

    def begin_promotion(self) -> Promotion | None:
        """After a restart: blocks for the next of the paths that were used last, so that they are back on the device
        before they are asked for. Only free blocks, and no more than half of all; None when there is no more to do."""
        assert self.tiers is not None
        if leaves := self.tiers.take_preloaded():
            self._unpromoted = self._that_fit(leaves)
        while self._unpromoted:
            slots = self.tiers.host.slots_to(self._unpromoted.pop())
            if not self.caching or not all(map(self.tiers.host.is_ready, slots)):
                continue  # other payloads have taken their place
            tokens = self.tiers.host.sequence_of(slots)
            match = self.index.match_prefix(tokens, len(tokens))
            missing = slots[len(match.block_ids) :]
            if not missing or len(missing) > self._room_for_promotions:
                continue
            node = self.index.lock(match)
            self.pool.acquire(match.block_ids)
            fresh = self.pool.allocate(len(missing))
            self.tiers.note_promotion(missing)
            fetches = [BlockFetch(slot, block) for slot, block in zip(missing, fresh, strict=True)]
            return Promotion(tokens, node, match.block_ids, fresh, fetches)
        return None

    def _that_fit(self, leaves: list[int]) -> list[int]:
        """Of the ends of paths, the one used last first, those that there is room for. They are taken from the end: the
        path used last comes last, and so is the last to be evicted."""
        assert self.tiers is not None
        room, fit = self._room_for_promotions, list[int]()
        for leaf in leaves:
            room -= (
                self.tiers.host.depth(leaf) + 1
            )  # what paths share is counted for each: there is more room, not less
            if room < 0:
                break
            fit.append(leaf)
        return fit

    @property
    def _room_for_promotions(self) -> int:
        return self.pool.num_free - self.pool.num_blocks // 2

    def end_promotion(self, promotion: Promotion, *, arrived: bool) -> None:
        """Its blocks are findable, or free again."""
        node, first = promotion.node, len(promotion.shared)
        if arrived:
            keys = self.index.chain_keys(node.last_key, promotion.tokens, first, first + len(promotion.fresh))
            done = self.index.insert_prefix(node, promotion.tokens, first, keys, promotion.fresh)
            self.pool.mark_indexed(promotion.fresh[: done.num_blocks])
            node = done.node
        self.index.unlock(node)
        self.pool.release(promotion.shared + promotion.fresh)

    @property
    def is_promoting(self) -> bool:
        return bool(self._unpromoted)

    @property
    def is_persisting(self) -> bool:
        return bool(self._unpersisted)

    # ------------------------------------------------------------------ the end

    def free(self, request: Request) -> None:
        """Let go of everything (finished, aborted or failed); full blocks stay cached (I10)."""
        self.back_out(request)
        self._look_away(request)
        self.drop_swapped(request)

    def preempt(self, request: Request) -> None:
        """Give the blocks back for now; what nobody else can keep is swapped out, if that is cheaper than computing."""
        swapped = self._swap_out(request)
        self.back_out(request)
        request.swapped = swapped

    def back_out(self, request: Request) -> None:
        """Give the blocks back; full ones stay in the index."""
        self._withdraw(request, len(request.pending_keys))
        request.awaited_key = request.awaited_read = None
        if request.node is not None:
            self.index.unlock(request.node)
            request.node = None
        self.pool.release(request.block_table)
        self.pool.evict(self.index.reap())
        request.block_table = array("i")
        request.num_computed_tokens = request.num_done_tokens = request.num_indexed_blocks = 0

    def _swap_out(self, request: Request) -> SwappedBlocks | None:
        first, num_tokens = request.num_indexed_blocks, request.num_computed_tokens
        block_ids = list(request.block_table[first : self._blocks_for(num_tokens)])
        if self.tiers is None or not block_ids:
            return None
        if not self.tiers.is_fetch_cheaper(len(block_ids), num_tokens - first * self.block_size):
            return None
        slots = self.tiers.swap_out(block_ids, request.tenant_id)
        return None if slots is None else SwappedBlocks(first, num_tokens, slots)

    def drop_swapped(self, request: Request) -> None:
        """What was kept for a request's return is not needed any more."""
        if request.swapped is not None and self.tiers is not None:
            self.tiers.swap_drop(request.swapped.slots)
        request.swapped = None

    def borrow_blocks(self, count: int) -> array[int] | None:
        """Blocks outside any request and the index, until `return_blocks`; None when there is no room."""
        missing = count - self.pool.num_free
        if missing > self.pool.num_cached:
            return None
        if missing > 0:
            self.evict(missing)
        return self.pool.allocate(count)

    def return_blocks(self, block_ids: array[int]) -> None:
        self.pool.release(block_ids)

    def evict(self, count: int) -> int:
        """Let go of up to `count` cached blocks, to the tiers below where there are any."""
        freed = self.index.evict(count, "operator", self._demotion)
        self.pool.evict(freed)
        return len(freed)

    def erase(self, selection: Selection) -> ErasedBlocks:
        """Take blocks out of every tier. Nothing is demoted.

        What running requests hold goes when they let go; from now on nobody finds it.
        """
        done = self.index.erase(selection)
        self.pool.evict(done.freed)
        host, disk = (0, 0) if self.tiers is None else self.tiers.erase(selection)
        return ErasedBlocks(done.num_blocks, host, disk)

    def stop_indexing(self, request: Request) -> None:
        """What this request still computes is for itself alone."""
        self._withdraw(request, len(request.pending_keys))
        request.indexable = False

    # ------------------------------------------------------------------ look

    def explain(self, request: Request) -> list[ExplainedPart]:
        """Where each part of a prompt would come from now. Changes nothing."""
        prefix, total = self.get_computed_blocks(request), request.num_prompt_tokens
        if prefix is None:
            return [ExplainedPart(start=0, end=total, place="disabled")]
        device = len(prefix.match.block_ids) * self.block_size
        host = device + len(prefix.below.host_slots) * self.block_size
        disk = host + len(prefix.below.disk_slots) * self.block_size
        if prefix.below.partial is not None:
            host += prefix.below.partial_tokens("host")
            disk = max(disk, host) + prefix.below.partial_tokens("disk")
        elif not len(prefix.below):
            device = host = disk = prefix.match.num_tokens
        whole = max(disk, total // self.block_size * self.block_size)
        if disk >= (total - 1) // self.block_size * self.block_size:
            whole = disk
        reason = prefix.match.reason
        if prefix.below.partial is not None:
            reason = MissReason.DIVERGED
        elif len(prefix.below) and whole > disk:
            reason = MissReason.DIVERGED if prefix.below.goes_on else MissReason.COLD
        ends = [("device", device), ("host", host), ("disk", disk), (reason.value, whole), ("partial_block", total)]
        parts, start = list[ExplainedPart](), 0
        for place, end in ends:
            if end > start:
                parts.append(ExplainedPart(start=start, end=end, place=place))
                start = end
        return parts

    def counts(self) -> BlockCounts:
        return BlockCounts(self.pool.num_free, self.pool.num_cached, self.pool.num_active)

    def check_integrity(self, running: list[Request]) -> None:
        """I1–I4 over pool, index and the tables of every running request."""
        if self.tiers is not None:
            self.tiers.check_integrity()
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


def _has_prompt(leader: Request) -> bool:
    """Whether it holds the blocks of its prompt now, all of it known to be computed."""
    return leader.num_done_tokens >= leader.num_prompt_tokens
