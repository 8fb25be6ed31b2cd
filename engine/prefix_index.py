"""Which prefixes have their KV in the cache: a radix tree whose edges are runs of full blocks.

Three prompts of one tenant, block size 4, letters are blocks:

        A B C D E                    root ── [A B C] ──┬── [D E]        ← children, by label: the scope and
        A B C F                                        └── [F]            the tokens of their first block
        G                            root ── [G]

    path      = the runs from the root to a node
    block key = xxh3_128(parent_key, scope, token_ids)        chained: a key stands for its whole prefix

Within the tree nothing is found by a hash alone: a label is the scope and the tokens themselves, and a hit compares
the tokens of the whole path (one memcmp a run), so no collision, found or crafted, returns another prompt's KV (I5).
Block keys are made when blocks are put in. They name the blocks outside the tree: in the tiers below, in the store
and among the ghosts.

Finding   1. Look the next block up among the children of the current node.
          2. Compare the child's run. Whole run equal: go on from the child.
          3. Equal for some blocks only: the path ends inside the run.
          4. Where the path ends, the block that shares most of the next tokens may still be copied (copy-on-write):
             inside a run it is the run's next block; at a node, a neighbour of the wanted tokens among the
             children's labels in sorted order. (The longest common prefix is always with a neighbour.)

Locks     A request locks the path to the last block it holds: `lock_count` of a node counts the requests that hold
          it, all the way up. A path that ends inside a run splits the run first, so every block of a node is held
          by the same requests, and its `ref_count` in the pool equals the node's `lock_count` (I3).

Eviction  A node without locks and without children is evictable; `engine/eviction.py` says which goes first. Blocks
          go from its tail, and only then its parent's turn comes: I4, no child without its parent. Whole runs stand in
          the order, not blocks: letting go of a long prompt is one entry, not one a block.

Erasure   `erase` takes a subtree out of sight at once. What running requests still hold of it is `doomed`: never
          matched, never joined by a later insertion, and gone when the last of them lets go (`reap`).

Below     Before blocks go, `evict` and `trim` show them, with everything that is above them, to the tier below.

Nothing here scans: match, lock, insert and evict touch only the path (and a heap's logarithm). Only the rare `erase`
of an owner walks the tree. Not one tensor, either.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import xxhash

from engine.erasure import Selection
from engine.errors import InvariantError
from engine.eviction import EvictionOrder, Leaf, Owner, Policy
from engine.scoped_tokens import SCOPE_BYTES, TOKEN_BYTES, ScopedTokens

KEY_BYTES = 16
_ROOT_SCOPE = b""


class MissReason(Enum):
    """Why the block after the matched prefix was not there."""

    COLD = "cold"
    DIVERGED = "diverged"
    EVICTED = "evicted"


class Node:
    """A run of full blocks. Hold one only through `lock`; its fields are the index's business."""

    __slots__ = (
        "block_ids",
        "children",
        "documents",
        "doomed",
        "first_block",
        "former_uses",
        "hits",
        "keys",
        "labels",
        "last_use",
        "lock_count",
        "num_wanted",
        "owner",
        "parent",
        "priority",
        "scope",
        "ticket",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, scope: bytes, owner: Owner, tokens: bytes, keys: bytes, block_ids: array[int]
    ) -> None:
        self.parent = parent
        self.first_block = parent.end_block if parent else 0
        self.scope = scope
        self.owner = owner  # who pays for it: the owner of the scope
        self.tokens = tokens  # of the run, packed
        self.keys = keys  # of the run's blocks, KEY_BYTES each
        self.block_ids = block_ids
        self.children: dict[bytes, Node] | None = None  # by label
        self.labels: dict[bytes, list[bytes]] | None = None  # scope → the children's labels, sorted
        self.documents: list[tuple[int, str]] = []  # (block from the root, document key) of those that start here
        self.doomed = False  # erased, but still held
        self.lock_count = 0
        self.num_wanted = 0  # queued requests that are going to need it
        self.hits = 0  # times it was locked again after it was made
        self.former_uses = 0  # before it was evicted and made anew, if the policy counts them
        self.last_use = time.time()
        self.priority = 0.0  # in the order of eviction, since it was last let go
        self.ticket = 0  # of the eviction order; 0: not evictable

    @property
    def last_key(self) -> bytes:
        return self.keys[-KEY_BYTES:]

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def uses(self) -> int:
        return self.former_uses + 1 + self.hits

    @property
    def end_block(self) -> int:
        """Blocks from the root to the run's end."""
        return self.first_block + len(self.block_ids)


class BlockIdentity(NamedTuple):
    """What a block is, wherever it lies, behind the one before it."""

    key: bytes
    scope: bytes
    owner: str
    tokens: bytes
    documents: tuple[str, ...]  # keys of the documents that start in it


@dataclass(slots=True, frozen=True)
class BlockPath:
    """Blocks from a first one on. The keys find them in a tier; the tokens and scopes prove what was found."""

    packed: bytes  # tokens
    spans: list[tuple[bytes, int]]  # scope, and the first block beyond it
    keys: bytes  # KEY_BYTES each

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def key(self, block: int) -> bytes:
        return self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]


@dataclass(slots=True, frozen=True)
class CachedPath(BlockPath):
    """A path of the tree, as the tiers below need it. Valid until the index changes.

    nodes      [ a b c ] ── [ d ] ── [ e f ]
    packed     a b c d e f
    """

    nodes: list[Node]

    def block_id(self, block: int) -> int:
        node = self._node(block)
        return node.block_ids[block - node.first_block]

    def identity(self, block: int) -> BlockIdentity:
        node, stride = self._node(block), len(self.packed) // len(self)
        return BlockIdentity(
            key=self.key(block),
            scope=node.scope,
            owner=node.owner.name,
            tokens=self.packed[block * stride : (block + 1) * stride],
            documents=tuple(key for start, key in node.documents if start == block),
        )

    def _node(self, block: int) -> Node:
        return self.nodes[bisect_right(self.nodes, block, key=lambda node: node.first_block) - 1]


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    """The longest cached prefix of a sequence. Valid until the index changes; `lock` keeps it.

    block_ids      [ b0 ][ b1 ][ b2 ]
    partial                          [ src: first `partial_tokens` slots ]
    num_tokens     ───────────────────────────────►
    """

    block_ids: array[int]  # full blocks, ready to be shared
    node: Node  # where the path ends
    node_blocks: int  # how many of the node's blocks belong to it
    num_tokens: int  # full blocks and the partial one
    partial_block: int | None  # a block to copy from
    partial_tokens: int
    reason: MissReason  # why it ends here


class Place(NamedTuple):
    """A position behind a prefix, from which many ways on are tried: a match without what only its holder needs.

    node's run     [ b0 ][ b1 ][ b2 ]
    blocks         ────────────►
    rest                        t t t      packed tokens of the prefix behind its last whole cached block
    """

    node: Node
    blocks: int  # how many of the node's blocks belong to it
    rest: bytes


@dataclass(slots=True, frozen=True)
class DocumentRun:
    """A document in one prompt's path: its blocks up to the next document, or to the end of the run."""

    document_id: str
    num_blocks: int
    hits: int
    last_use: float  # Unix seconds


class PrefixIndex:
    """The radix tree of one model fingerprint. The scope is part of every key and compared on every hit."""

    def __init__(
        self,
        block_size: int,
        root_key: bytes = bytes(KEY_BYTES),
        ghost_entries: int = 65536,
        policy: Policy = "lru",
        digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest,
    ) -> None:
        """`root_key` is derived from the model fingerprint: another model's keys can never meet ours."""
        self.block_size = block_size
        self.order = EvictionOrder(policy)
        self.root = Node(None, _ROOT_SCOPE, Owner("nobody"), b"", root_key, array("i"))
        self.num_blocks = 0
        self.num_nodes = 0
        self.num_inserted_blocks = 0  # since the start
        self.num_evicted_blocks = 0
        self.num_erased_blocks = 0
        self.stride = block_size * TOKEN_BYTES  # bytes of a block's tokens
        self._digest = digest
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # key → uses
        self._max_ghosts = ghost_entries
        self._by_document: dict[str, set[Node]] = {}
        self._doomed: list[Node] = []  # erased leaves that nobody holds any more

    @property
    def version(self) -> int:
        """Grows with every block that comes or goes: what was found at one version is found again at the same."""
        return self.num_inserted_blocks + self.num_evicted_blocks + self.num_erased_blocks

    # ------------------------------------------------------------------ find

    def match_prefix(self, sequence: ScopedTokens, limit: int) -> PrefixMatch:
        """The longest cached prefix of the first `limit` tokens. Changes nothing, not even recency."""
        return self._match_below(self.root, array("i"), sequence, limit)

    def follow(self, place: Place, tokens: bytes, scope: bytes) -> Place:
        """Go on with packed tokens of one scope, as far as whole blocks of them are cached. Changes nothing."""
        packed, stride = place.rest + tokens, self.stride
        node, blocks = place.node, place.blocks
        if len(place.rest) >= stride:  # it ended before this: with other tokens, or the same ones of a wider scope
            return Place(node, blocks, packed)
        pos, end = 0, len(packed) // stride * stride
        while pos < end:
            if blocks == node.num_blocks:
                child = node.children.get(scope + packed[pos : pos + stride]) if node.children else None
                if child is None or child.doomed:
                    break
                node, blocks = child, 0
            elif node.scope != scope:
                break
            last = min(pos + (node.num_blocks - blocks) * stride, end)
            shared = self._common_blocks(node.tokens, packed, pos, last, blocks * stride)
            pos += shared * stride
            blocks += shared
            if blocks < node.num_blocks:
                break
        return Place(node, blocks, packed[pos:])

    def is_cached(self, place: Place, scopes: Sequence[bytes]) -> bool:
        """Whether the rest is there, too, in the first slots of a block of one of these scopes."""
        node, blocks, rest = place
        if len(rest) >= self.stride:
            return False
        if blocks < node.num_blocks:
            return node.tokens.startswith(rest, blocks * self.stride)
        return self._closest_child(node, scopes, rest)[1] * TOKEN_BYTES == len(rest)

    def _match_below(self, node: Node, block_ids: array[int], sequence: ScopedTokens, limit: int) -> PrefixMatch:
        """`block_ids`, which this extends, lead to the end of `node`."""
        packed, stride = sequence.packed, self.stride
        pos = len(block_ids) * stride
        end = limit // self.block_size * stride  # bytes of whole blocks that may be matched
        scope, scope_end = sequence.span(pos // stride)
        scope_end *= stride
        while pos < end and (children := node.children):
            if pos >= scope_end:
                scope, scope_end = sequence.span(pos // stride)
                scope_end *= stride
            child = children.get(scope + packed[pos : pos + stride])
            if child is None or child.doomed:
                break
            tokens = child.tokens
            stop = pos + len(tokens)
            if stop > end or stop > scope_end or not packed.startswith(tokens, pos):
                shared = self._common_blocks(tokens, packed, pos, min(stop, end, scope_end))
                block_ids += child.block_ids[:shared]
                return self._match_inside(sequence, limit, child, shared, block_ids)
            block_ids += child.block_ids
            pos, node = stop, child
        return self._match_at(sequence, limit, node, block_ids)

    def _common_blocks(self, run: bytes, packed: bytes | bytearray, start: int, stop: int, run_start: int = 0) -> int:
        """In how many whole blocks run[run_start:] begins like packed[start:stop]."""
        stride = self.stride
        low, high = 0, (stop - start) // stride  # that many are equal, that many are not
        if run.startswith(packed[start:stop], run_start):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if run.startswith(packed[start + low * stride : start + middle * stride], run_start + low * stride):
                low = middle
            else:
                high = middle
        return low

    def common_blocks(self, one: ScopedTokens, other: ScopedTokens) -> int:
        """Whole blocks in which two sequences begin alike, by tokens alone."""
        last = min(len(one), len(other)) // self.block_size
        return self._common_blocks(bytes(one.packed), other.packed, 0, last * self.stride)

    def _match_inside(
        self, sequence: ScopedTokens, limit: int, node: Node, blocks: int, block_ids: array[int]
    ) -> PrefixMatch:
        """The path ends inside a run; the run's next block may still share tokens."""
        num_tokens = len(block_ids) * self.block_size
        wanted = tokens_between(sequence, num_tokens, min(limit, num_tokens + self.block_size))
        candidate = node.tokens[blocks * self.stride : (blocks + 1) * self.stride]
        shared = common_tokens(candidate, wanted)
        source = node.block_ids[blocks] if shared else None
        reason = self._miss_reason(node, blocks, sequence, len(block_ids), diverged=True)
        return PrefixMatch(block_ids, node, blocks, num_tokens + shared, source, shared, reason)

    def _match_at(self, sequence: ScopedTokens, limit: int, node: Node, block_ids: array[int]) -> PrefixMatch:
        """The path ends at a node; a child's first block may still share tokens."""
        num_tokens = len(block_ids) * self.block_size
        wanted = tokens_between(sequence, num_tokens, min(limit, num_tokens + self.block_size))
        scopes = sequence.scopes_up_to(len(block_ids))
        source, shared = self._closest_child(node, scopes, wanted)
        # Only what this sequence may read: that somebody else went on from here is none of its business (I5).
        others = node is not self.root and any(scope in (node.labels or ()) for scope in scopes)
        diverged = shared > 0 or others
        reason = self._miss_reason(node, node.num_blocks, sequence, len(block_ids), diverged)
        return PrefixMatch(block_ids, node, node.num_blocks, num_tokens + shared, source, shared, reason)

    def _closest_child(self, node: Node, scopes: Sequence[bytes], wanted: bytes) -> tuple[int | None, int]:
        """(block, tokens) of the child's first block that shares most of `wanted`, among the readable scopes."""
        best_source: int | None = None
        best_shared = 0
        if not wanted or node.labels is None or node.children is None:
            return best_source, best_shared
        for scope in scopes:
            label, siblings = scope + wanted, node.labels.get(scope, [])
            place = bisect_left(siblings, label)
            for neighbour in siblings[max(place - 1, 0) : place + 1]:
                shared = common_tokens(neighbour[SCOPE_BYTES:], wanted)
                if shared > best_shared and not (child := node.children[neighbour]).doomed:
                    best_source, best_shared = child.block_ids[0], shared
        return best_source, best_shared

    def _miss_reason(
        self, node: Node, node_blocks: int, sequence: ScopedTokens, block: int, diverged: bool
    ) -> MissReason:
        if self._ghosts and len(sequence.packed) >= (block + 1) * self.stride:
            parent_key = _key_before(node, node_blocks)
            return self.miss_reason(self.chain_keys(parent_key, sequence, block, block + 1)[0], diverged)
        return MissReason.DIVERGED if diverged else MissReason.COLD

    def miss_reason(self, key: bytes, diverged: bool) -> MissReason:
        """Why the block of this key is not here."""
        if key in self._ghosts:
            return MissReason.EVICTED
        return MissReason.DIVERGED if diverged else MissReason.COLD

    def chain_keys(self, parent_key: bytes, sequence: ScopedTokens, first: int, last: int) -> list[bytes]:
        """Keys of blocks [first, last), where `parent_key` is the key of the block before `first`."""
        keys: list[bytes] = []
        packed, stride, digest = sequence.packed, self.stride, self._digest
        scope, span_end = sequence.span(first)
        key = parent_key
        for block in range(first, last):
            if block >= span_end:
                scope, span_end = sequence.span(block)
            key = digest(key + scope + packed[block * stride : (block + 1) * stride])
            keys.append(key)
        return keys

    def child_key(self, parent_key: bytes, scope: bytes, tokens: bytes) -> bytes:
        """The key of a block of these packed tokens."""
        return self._digest(parent_key + scope + tokens)

    def place_key(self, place: Place) -> bytes:
        """The key of the last whole block before it."""
        return _key_before(place.node, place.blocks)

    def goes_on(self, place: Place, scope: bytes, block_tokens: bytes) -> bool:
        """Whether this block, its first bytes the place's rest, follows on the last whole block before it."""
        node, blocks, _ = place
        if blocks < node.num_blocks:
            return node.scope == scope and node.tokens.startswith(block_tokens, blocks * self.stride)
        return bool(node.children) and scope + block_tokens in node.children

    def match_key(self, match: PrefixMatch) -> bytes:
        """The key of the last matched block: the parent key of the first missing one."""
        return _key_before(match.node, match.node_blocks)

    # ------------------------------------------------------------------ hold

    def lock(self, match: PrefixMatch) -> Node:
        """Pin the matched path, splitting the run it ends in; the result goes to `unlock` or `insert_prefix`."""
        node = match.node
        if match.node_blocks < node.num_blocks:
            node = self._split(node, match.node_blocks)
        self._add_lock(node)
        return node

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. What nobody holds any more may go, most recently used last, leaf before parent."""
        at: Node | None = node
        while at is not None and at is not self.root:
            at.lock_count -= 1
            if at.lock_count < 0:
                raise InvariantError("I3: a prefix was unlocked more often than it was locked")
            if not at.lock_count:
                self.order.hold(at.owner, -at.num_blocks)
            if not at.lock_count and at.doomed:
                self._doomed.append(at)
            elif not at.lock_count:
                at.priority = self.order.use_priority(at.owner, at.uses, at.end_block)
                self._offer(at)
            at = at.parent

    def _offer(self, node: Node) -> None:
        if not node.lock_count and not node.children and node is not self.root and not node.doomed:
            self.order.add(node)

    def want(self, match: PrefixMatch) -> Node:
        """A queued request is going to need this path: others go first. The result goes to `unwant`."""
        at: Node | None = match.node
        while at is not None:
            at.num_wanted += 1
            at = at.parent
        return match.node

    def unwant(self, node: Node) -> None:
        """Undo one `want`."""
        at: Node | None = node
        while at is not None:
            at.num_wanted -= 1
            if at.num_wanted < 0:
                raise InvariantError("I3: a prefix was wanted less often than it was let go")
            if not at.num_wanted:
                self.order.release(at)
            at = at.parent

    def _add_lock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None and at is not self.root:
            self._hold(at)
            at = at.parent

    def _hold(self, node: Node) -> None:
        self.order.discard(node)
        if not node.lock_count:
            self.order.hold(node.owner, node.num_blocks)
        node.lock_count += 1
        node.hits += 1
        node.last_use = time.time()

    def _split(self, lower: Node, blocks: int) -> Node:
        """
            parent ── [a b c d] lower         →      parent ── [a b] upper ── [c d] lower

        `lower` keeps its identity, its holders and its place in the order of eviction. The new upper part is held by
        the same requests; when that is none, the caller locks it at once.
        """
        parent = _parent(lower)
        cut, keys = blocks * self.stride, blocks * KEY_BYTES
        upper = Node(parent, lower.scope, lower.owner, lower.tokens[:cut], lower.keys[:keys], lower.block_ids[:blocks])
        assert parent.children is not None
        parent.children[self._label(upper)] = upper  # the same label as before: their sorted list stays as it is
        lower.parent, lower.tokens, lower.keys = upper, lower.tokens[cut:], lower.keys[keys:]
        lower.block_ids = lower.block_ids[blocks:]
        lower.first_block += blocks
        upper.lock_count, upper.hits, upper.former_uses = lower.lock_count, lower.hits, lower.former_uses
        upper.num_wanted, upper.doomed, upper.priority = lower.num_wanted, lower.doomed, lower.priority
        self._split_documents(upper, lower)
        self._attach(upper, lower)
        self.num_nodes += 1
        return upper

    # ------------------------------------------------------------------ change

    def insert_prefix(
        self, node: Node, sequence: ScopedTokens, first: int, keys: list[bytes], block_ids: array[int]
    ) -> Insertion:
        """Put the full blocks [first, first + len(keys)) below `node`, which the caller has locked.

            node ── [first, first + 1, …]     a part that is there already is not put in twice: the caller gets the
                                              index's own blocks for it and must use them instead of his (`adopted`)

        The caller's lock moves to `Insertion.node`, the end of the new path. Nothing is put in behind an erased
        block (`num_blocks` tells how far it went).
        """
        done, adopted = 0, array("i")
        at = node
        while done < len(keys):
            scope, span_end = sequence.span(first + done)
            count = min(len(keys) - done, span_end - first - done)
            start = (first + done) * self.stride
            existing = at.children.get(scope + sequence.packed[start : start + self.stride]) if at.children else None
            if existing is None:
                former_uses, count = self._former_uses(keys, done, count)
                fresh = block_ids[done : done + count]
                at = self._append(at, scope, sequence, first + done, keys[done : done + count], fresh, former_uses)
                done += count
                continue
            if existing.doomed:
                break  # erased, but still held: the later one stays outside
            stop = start + min(count, existing.num_blocks) * self.stride
            shared = self._common_blocks(existing.tokens, sequence.packed, start, stop)
            if shared < existing.num_blocks:
                existing = self._split(existing, shared)
            self._hold(existing)
            # Not just an optimisation: what follows would otherwise hang below blocks that nobody's table holds.
            adopted += existing.block_ids
            at, done = existing, done + shared
        return Insertion(at, done, adopted)

    def _append(
        self,
        at: Node,
        scope: bytes,
        sequence: ScopedTokens,
        first: int,
        keys: list[bytes],
        block_ids: array[int],
        former_uses: int,
    ) -> Node:
        """New blocks below `at`: its own run grows if only the caller holds it, else a child is made."""
        count = len(keys)
        self.num_inserted_blocks += count
        tokens = bytes(sequence.packed[first * self.stride : (first + count) * self.stride])
        self.num_blocks += count
        documents = sequence.documents_between(first, first + count)
        alike = not self.order.counts_uses or at.uses == former_uses + 1
        if at.lock_count == 1 and not at.children and at.scope == scope and alike:
            self.order.count(at.owner, count)  # of tenants that share a scope, who began a run pays for it
            self.order.hold(at.owner, count)
            at.tokens += tokens
            at.keys += b"".join(keys)
            at.block_ids += block_ids
            self._note_documents(at, documents)
            return at
        owner = self.order.owner(sequence.owner(scope))
        self.order.count(owner, count)
        self.order.hold(owner, count)
        child = Node(at, scope, owner, tokens, b"".join(keys), block_ids)
        child.lock_count, child.doomed, child.former_uses = 1, at.doomed, former_uses
        self._note_documents(child, documents)
        self._attach(at, child)
        self.num_nodes += 1
        return child

    def _former_uses(self, keys: list[bytes], first: int, most: int) -> tuple[int, int]:
        """Uses of the block of keys[first] before it had to go; for how many from there on it is the same."""
        if not self.order.counts_uses or not self._ghosts:
            return 0, most
        uses, count = self._ghosts.get(keys[first], 0), 1
        while count < most and self._ghosts.get(keys[first + count], 0) == uses:
            count += 1
        return uses, count

    def _note_documents(self, node: Node, documents: list[tuple[int, str]]) -> None:
        node.documents += documents
        for _, document in documents:
            self._by_document.setdefault(document, set()).add(node)

    def _split_documents(self, upper: Node, lower: Node) -> None:
        if not lower.documents:
            return
        all_documents, lower.documents = lower.documents, []
        self._drop_documents(lower, all_documents)
        cut = lower.first_block
        self._note_documents(upper, [entry for entry in all_documents if entry[0] < cut])
        self._note_documents(lower, [entry for entry in all_documents if entry[0] >= cut])

    def _drop_documents(self, node: Node, documents: list[tuple[int, str]]) -> None:
        for _, document in documents:
            nodes = self._by_document.get(document)
            if nodes is not None:
                nodes.discard(node)
                if not nodes:
                    del self._by_document[document]

    def _attach(self, parent: Node, child: Node) -> None:
        if parent.children is None or parent.labels is None:
            parent.children, parent.labels = {}, {}
        label = self._label(child)
        parent.children[label] = child
        insort(parent.labels.setdefault(child.scope, []), label)

    def _label(self, node: Node) -> bytes:
        """What tells a node from its siblings: the scope and the tokens of its first block."""
        return node.scope + node.tokens[: self.stride]

    def evict(self, count: int, pressed_by: str, demote: Demotion | None = None) -> array[int]:
        """Let go of up to `count` blocks that nobody holds, because `pressed_by` needs room: tails before heads.

        `demote` sees each run before it is cut: its node, and how many blocks at its end are about to go.
        """
        freed = array("i")
        while len(freed) < count and (victim := self.order.next_victim(pressed_by)):
            leaf, most = victim
            freed += self._cut_tail(_as_node(leaf), min(count - len(freed), most), pressed_by, demote)
        return freed

    def trim(self, owner_name: str, demote: Demotion | None = None) -> array[int]:
        """Bring an owner back to its quota, as far as nobody holds its blocks."""
        owner, freed = self.order.owner(owner_name), array("i")
        while owner.excess > 0 and (leaf := self.order.own_victim(owner)):
            freed += self._cut_tail(_as_node(leaf), min(owner.excess, leaf.num_blocks), owner_name, demote)
        return freed

    def _cut_tail(
        self, node: Node, count: int, pressed_by: str, demote: Demotion | None = None, *, erased: bool = False
    ) -> array[int]:
        if node.children or node.lock_count:
            raise InvariantError("I4: a node was to be evicted before its children, or while it is held")
        if demote is not None:
            demote(node, count)
        freed = node.block_ids[: -count - 1 : -1]
        if not erased:
            self._remember(node.keys[-count * KEY_BYTES :], node.uses)
        gone = [entry for entry in node.documents if entry[0] >= node.end_block - count]
        if gone:
            node.documents = node.documents[: -len(gone)]
            self._drop_documents(node, gone)
        if count == node.num_blocks:
            self._remove_leaf(node)
        else:
            node.tokens = node.tokens[: -count * self.stride]
            node.keys = node.keys[: -count * KEY_BYTES]
            del node.block_ids[-count:]
        self.num_blocks -= count
        if erased:
            self.order.count(node.owner, -count)
            self.num_erased_blocks += count
        else:
            self.order.gone(node, count, pressed_by)
            self.num_evicted_blocks += count
        return freed

    def _remove_leaf(self, node: Node) -> None:
        self.order.discard(node)
        parent = _parent(node)
        assert parent.children is not None
        assert parent.labels is not None
        label = self._label(node)
        del parent.children[label]
        siblings = parent.labels[node.scope]
        del siblings[bisect_left(siblings, label)]
        if not siblings:
            del parent.labels[node.scope]
        self._forget_wants(node)
        node.parent = None  # no cycles: the node is freed here, not by a collector that walks the whole tree
        self.num_nodes -= 1
        self._offer(parent)

    def _forget_wants(self, leaf: Node) -> None:
        """Who wanted a leaf that goes all the same lets go of that leaf alone: its ancestors are let go here."""
        at = leaf.parent
        while leaf.num_wanted and at is not None:
            at.num_wanted -= leaf.num_wanted
            at = at.parent

    # ------------------------------------------------------------------ documents

    def document_runs(self, selection: Selection) -> Iterator[DocumentRun]:
        """Where the selected documents stand in the tree. Walks the list of documents."""
        for key in [key for key in self._by_document if selection.has_document(key)]:
            for node in self._by_document[key]:
                if not selection.has_block(node.owner.name, node.scope):
                    continue
                starts = sorted({block for block, _ in node.documents} | {node.end_block})
                for start in (block for block, found in node.documents if found == key):
                    stop = starts[starts.index(start) + 1]
                    yield DocumentRun(key.rpartition("\x1f")[2], stop - start, node.hits, node.last_use)

    # ------------------------------------------------------------------ erase

    def erase(self, selection: Selection) -> Erasure:
        """Take the selected blocks out, and what hangs below them. Walks the tree, or the list of documents."""
        done = Erasure()
        for node in self._selected_nodes(selection) if selection.document_ids is None else ():
            if node.parent is not None and not node.doomed:
                self._erase_subtree(node, done)
        if selection.document_ids is not None:
            for document in [key for key in self._by_document if selection.has_document(key)]:
                self._erase_document(document, selection, done)
        return done

    def _selected_nodes(self, selection: Selection) -> list[Node]:
        return [node for node in self.nodes() if selection.has_block(node.owner.name, node.scope)]

    def _erase_document(self, document: str, selection: Selection, done: Erasure) -> None:
        for node in list(self._by_document.get(document, ())):
            starts = [block for block, found in node.documents if found == document]
            if not starts or not selection.has_block(node.owner.name, node.scope):
                continue  # nothing is left of a node that stood below one of the others
            start = min(starts)
            if start > node.first_block:
                self._split(node, start - node.first_block)  # `node` keeps the lower part
            self._erase_subtree(node, done)

    def _erase_subtree(self, top: Node, done: Erasure) -> None:
        """Children first. What somebody holds becomes `doomed`, and so do its ancestors up to `top`: they hold it."""
        subtree = [top]
        for node in subtree:  # grows while it is walked: parents before children
            subtree.extend((node.children or {}).values())
        for node in reversed(subtree):
            if node.doomed:
                continue
            if node.lock_count or node.children:
                done.num_held += node.num_blocks
                self._doom(node)
            else:
                done.freed += self._cut_tail(node, node.num_blocks, node.owner.name, erased=True)

    def _doom(self, node: Node) -> None:
        node.doomed = True
        self.order.discard(node)
        self._drop_documents(node, node.documents)
        node.documents = []

    def reap(self) -> array[int]:
        """The blocks of erased runs that nobody holds any more; the pool may have them back."""
        freed = array("i")
        while self._doomed:
            node = self._doomed.pop(0)  # pushed from the leaf upwards
            if node.parent is not None and not node.lock_count and not node.children:
                freed += self._cut_tail(node, node.num_blocks, node.owner.name, erased=True)
        return freed

    # ------------------------------------------------------------------ below

    def path(self, node: Node) -> CachedPath:
        """From the root to a node's last block."""
        nodes: list[Node] = []
        while node is not self.root:
            nodes.append(node)
            node = _parent(node)
        nodes.reverse()
        spans: list[tuple[bytes, int]] = []
        for node in nodes:
            if spans and spans[-1][0] == node.scope:
                spans.pop()
            spans.append((node.scope, node.end_block))
        tokens, keys = b"".join(node.tokens for node in nodes), b"".join(node.keys for node in nodes)
        return CachedPath(tokens, spans, keys, nodes)

    def leaves(self) -> Iterator[Node]:
        """Every node without children: each path ends in one."""
        return (node for node in self.nodes() if not node.children)

    # ------------------------------------------------------------------ ghosts

    def _remember(self, keys: bytes, uses: int) -> None:
        """Ghosts: keys that were here, so that a later miss can say so, and how often they were used."""
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            self._ghosts.pop(key, None)
            self._ghosts[key] = uses
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    # ------------------------------------------------------------------ check

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list((self.root.children or {}).values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend((node.children or {}).values())

    def check_integrity(self, ref_count: Callable[[int], int]) -> None:
        """Walk everything: keys, tokens, locks, order, counts. `ref_count` is the pool's."""
        seen: set[int] = set()
        evictable = set(map(_as_node, self.order.candidates()))
        owned: Counter[str] = Counter()
        held: Counter[str] = Counter()
        num_nodes = 0
        for node in self.nodes():
            num_nodes += 1
            owned[node.owner.name] += node.num_blocks
            held[node.owner.name] += node.num_blocks if node.lock_count else 0
            self._check_node(node, ref_count, evictable)
            if not seen.isdisjoint(node.block_ids):
                raise InvariantError("I1: a block stands in the index twice")
            seen.update(node.block_ids)
        if (num_nodes, len(seen)) != (self.num_nodes, self.num_blocks):
            raise InvariantError(
                f"I1: {num_nodes} nodes, {len(seen)} blocks; counted {self.num_nodes}, {self.num_blocks}"
            )
        if any(node.parent is None for node in evictable):
            raise InvariantError("I4: the eviction order holds a node that is not in the tree")
        if owned != Counter({name: owner.num_blocks for name, owner in self.order.owners.items()}):
            raise InvariantError("I9: what the owners are charged for is not what they have in the tree")
        if held != Counter({name: owner.num_held for name, owner in self.order.owners.items()}):
            raise InvariantError("I3: what requests hold of an owner's blocks is not what is locked in the tree")

    def _check_node(self, node: Node, ref_count: Callable[[int], int], evictable: set[Node]) -> None:
        parent = _parent(node)
        count = node.num_blocks
        if not count or len(node.tokens) != count * self.stride or len(node.keys) != count * KEY_BYTES:
            raise InvariantError("I2: a node's blocks, tokens and keys do not fit each other")
        key = parent.last_key
        for block in range(count):
            tokens = node.tokens[block * self.stride : (block + 1) * self.stride]
            key = self._digest(key + node.scope + tokens)
            if key != node.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]:
                raise InvariantError("I8: a block's key is not that of its prefix")
        if any(ref_count(block_id) != node.lock_count for block_id in node.block_ids):
            raise InvariantError("I3: a node's locks and its blocks' ref_counts differ")
        if (node in evictable) != (node.lock_count == 0 and not node.children and not node.doomed):
            raise InvariantError("I4: a node is evictable without being a leaf that nobody holds, or the reverse")
        if node.first_block != parent.end_block:
            raise InvariantError("I4: a node does not begin where its parent ends")
        if node.num_wanted < sum(child.num_wanted for child in (node.children or {}).values()):
            raise InvariantError("I4: a node is wanted, its parent is not")
        if any(node not in self._by_document.get(document, ()) for _, document in node.documents):
            raise InvariantError("I8: a document does not know where it is in the tree")
        if parent is not self.root and parent.lock_count < node.lock_count:
            raise InvariantError("I4: a node is held, its parent is not")
        labels = sorted(map(self._label, (node.children or {}).values()))
        listed = [label for _, siblings in sorted((node.labels or {}).items()) for label in siblings]
        if not labels == sorted(node.children or ()) == listed:
            raise InvariantError("I8: the children's labels are not those listed")


Demotion = Callable[[Node, int], None]


@dataclass(slots=True, frozen=True)
class Insertion:
    """What became of the blocks given to `insert_prefix`."""

    node: Node  # the end of the path, locked in place of the one that was passed in
    num_blocks: int  # how many of the given blocks the path now covers
    adopted: array[int]  # the index's own blocks for the first len(adopted) of them


@dataclass(slots=True)
class Erasure:
    """What an erasure has taken out of sight."""

    freed: array[int] = field(default_factory=lambda: array("i"))  # nobody held them: the pool may have them back
    num_held: int = 0  # blocks that go when those who hold them let go

    @property
    def num_blocks(self) -> int:
        return len(self.freed) + self.num_held


def _as_node(leaf: Leaf) -> Node:
    assert isinstance(leaf, Node)
    return leaf


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise InvariantError("I4: a node without a parent is in use")
    return node.parent


def _key_before(node: Node, blocks: int) -> bytes:
    """The key of the `blocks`-th block of a node's run; of the block before the run when that is 0."""
    if blocks:
        return node.keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]
    return node.last_key if node.parent is None else node.parent.last_key


def tokens_between(sequence: ScopedTokens, start: int, stop: int) -> bytes:
    return bytes(sequence.packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])


def common_tokens(one: bytes, other: bytes) -> int:
    """Tokens in the longest common prefix of two packed blocks."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * TOKEN_BYTES : middle * TOKEN_BYTES] == other[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
