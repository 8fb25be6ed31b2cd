"""What gateway and engine say to each other: msgspec structs, msgpack on the wire, one struct a message.

    gateway (DEALER) ──► engine (ROUTER)      Hello, Submit, Abort, Probe, GetStats, Erase, GetDocumentStats,
                                              GetMetrics, GetCacheView
    gateway (DEALER) ◄── engine (ROUTER)      EngineInfo, Delta, Failure, ProbeResult, EngineStats, Erased,
                                              DocumentStats, EngineMetrics, CacheView
    operator's command line, over the same    Hello, GetStats, Erase, EvictCache, VerifyCache, Explain
      socket, one answer a question           OperatorAnswer

Every `Submit` is answered by zero or more `Delta`s and ends with exactly one of: a `Delta` with a
`finish_reason`, or a `Failure`. An `Abort` is never answered; the engine drops the request silently.
Token ids travel as packed little-endian int32 (`pack_tokens`): a list of 2,000 Python ints costs 40 times more.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

assert sys.byteorder == "little", "token ids are compared and hashed as little-endian int32"

PROTOCOL_VERSION = 1
MAX_TOP_LOGPROBS = 20  # OpenAI's limit


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32, 4 bytes each."""
    return array("i", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


class SegmentKind(StrEnum):
    TEMPLATE = "template"
    SYSTEM = "system"
    DOCUMENT = "document"
    HISTORY = "history"
    QUESTION = "question"


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-turn token or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client went away; never sent to a client


class Segment(msgspec.Struct, frozen=True):
    """A piece of a prompt that was tokenized on its own.

    `scope` says who may share the KV of these tokens; along a prompt it only narrows (the gateway's duty).
    """

    kind: SegmentKind
    tokens: bytes  # pack_tokens
    scope: bytes
    document_id: str | None = None
    owner: str = ""  # who pays for the blocks of this scope; "": the request's tenant
    pinned: bool = False  # its KV, and what stands before it, is kept on disk as soon as it has been computed

    @classmethod
    def of(cls, kind: SegmentKind, token_ids: Sequence[int], scope: bytes, document_id: str | None = None) -> Segment:
        return cls(kind, pack_tokens(token_ids), scope, document_id)

    def __len__(self) -> int:
        return len(self.tokens) // 4


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Already validated by the gateway; `max_tokens` is always set."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0  # the three penalties: engine/logits_processors.py
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}  # added to the logits of these tokens
    seed: int | None = None  # None: the engine draws one
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None  # of the best tokens beside the drawn one; None: no log probabilities at all
    min_tokens: int = 0  # end-of-turn tokens and stop strings are not honoured before
    ignore_eos: bool = False


class PromptAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Where each prompt token came from; fixed at first admission, so that preemption never counts twice.

    `device`, `host`, `disk`: tokens whose KV was found in that tier. The rest were computed, and say why:
    `cold` nothing under this prefix was ever seen; `diverged` other prompts went another way from here;
    `evicted` it was there and had to go; `partial_block` the tail that fills no whole block, or the last token,
    which is always computed; `disabled` prefix caching is off for this request.
    The fields sum to the prompt's length (I9).
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    cold: int = 0
    diverged: int = 0
    evicted: int = 0
    partial_block: int = 0
    disabled: int = 0

    @property
    def num_cached_tokens(self) -> int:
        return self.device + self.host + self.disk

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_cached_tokens + self.cold + self.diverged + self.evicted + self.partial_block + self.disabled


# ---------------------------------------------------------------- gateway → engine


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a gateway, repeated as a heartbeat; answered by `EngineInfo`."""

    protocol_version: int = PROTOCOL_VERSION


MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6  # beyond, a sum of tokens over a weight loses them, or has no end


class TenantPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may have of the engine; the latest one that came with a request holds."""

    weight: float = 1.0  # its share of the compute, relative to other tenants; under gdsf of the cache, too
    max_running: int | None = None  # requests in the batch at a time
    kv_floor_tokens: int = 0  # cached tokens that others cannot take while they have more than their own floor
    kv_quota_tokens: int | None = None  # cached tokens above which its own least recently used blocks go


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    request_id: str
    tenant_id: str
    segments: tuple[Segment, ...]
    sampling: SamplingParams
    policy: TenantPolicy | None = None  # None: the tenant's last one goes on
    priority: int = 0  # lower goes first, strictly, over all tenants
    document_order: Literal["given", "cache"] = "given"  # cache: the engine orders them along the longest cached path
    pin_top: int = 0  # so many documents at the end of the given order stay there, next to the question
    sibling_of: str = ""  # an earlier request with the same prompt: its KV is shared, and the prompt counted once
    use_cache: bool = True  # False: neither looks a prefix up nor leaves one behind
    counted: bool = (
        True  # False: nobody's usage (a health probe, work ahead of time), left out of `EngineStats`' counts
    )
    when_idle: bool = False  # runs only while no other request is here; yields to the first that comes


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: tuple[str, ...]


class Erase(msgspec.Struct, frozen=True, kw_only=True, tag="erase"):
    """Forget KV, in every tier; answered by `Erased`. All that is given must apply; nothing given: everything.

    A block is a document's if the document's tokens are in it or before it: what follows a document attended to it.
    """

    erase_id: str
    owner: str | None = None
    scopes: tuple[bytes, ...] | None = None
    document_ids: tuple[str, ...] | None = None


class GetDocumentStats(msgspec.Struct, frozen=True, kw_only=True, tag="get_document_stats"):
    """Answered by `DocumentStats`."""

    query_id: str
    scopes: tuple[bytes, ...]  # that the asking tenant may see
    document_ids: tuple[str, ...]


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Asks for one real step of the model; answered by `ProbeResult` once it has been computed."""

    probe_id: str


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Answered by `EngineStats`."""

    query_id: str = ""


class GetMetrics(msgspec.Struct, frozen=True, tag="get_metrics"):
    """Answered by `EngineMetrics`."""

    query_id: str


class GetCacheView(msgspec.Struct, frozen=True, kw_only=True, tag="get_cache_view"):
    """Answered by `CacheView`."""

    query_id: str
    owner: str | None = None  # only KV of this owner; None: everything
    tenant_id: str | None = None  # only requests of this tenant, which may not be the owner of its KV
    max_nodes: int = 200


class EvictCache(msgspec.Struct, frozen=True, kw_only=True, tag="evict_cache"):
    """Let go of cached blocks in the order of eviction, in one tier. → `CacheEvicted`"""

    call_id: str
    tier: Literal["device", "host", "disk"]
    num_blocks: int


class VerifyCache(msgspec.Struct, frozen=True, kw_only=True, tag="verify_cache"):
    """Read every payload on disk again, and compute a sample of blocks anew to compare. → `CacheVerified`"""

    call_id: str
    num_recomputed: int = 4  # paths


class Explain(msgspec.Struct, frozen=True, kw_only=True, tag="explain"):
    """What the cache would give a request now, without running it. → `Explained`, or `Failure`"""

    call_id: str
    submit: Submit


# ---------------------------------------------------------------- engine → gateway


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag="info"):
    """What a gateway has to know; with the tokenizer itself, so that the two need no shared file system."""

    protocol_version: int
    incarnation: str  # new with every start of the engine
    model: str  # served name
    created: int  # Unix seconds
    fingerprint: str
    max_model_len: int  # tokens, prompt + output
    block_size: int
    num_blocks: int
    block_bytes: int  # KV of a block, all layers
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    dtype: str
    device: str
    tokenizer_json: bytes  # the `tokenizers` library's format
    chat_template: str  # Jinja
    special_tokens: dict[str, str]  # bos_token, eos_token, …, as the template sees them


class TokenLogprob(msgspec.Struct, frozen=True):
    token: bytes  # UTF-8, or a part of a character
    logprob: float


class DrawnToken(msgspec.Struct, frozen=True):
    """A token of the output, with the log probabilities that were asked for."""

    token: bytes
    logprob: float
    top: tuple[TokenLogprob, ...]  # the best first


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """New text of a request. The first one carries the account; the last one the finish reason."""

    request_id: str
    text: str
    num_output_tokens: int  # so far
    tokens: tuple[DrawnToken, ...] = ()  # whose text has begun to come out, if log probabilities were asked for
    account: PromptAccount | None = None
    document_order: tuple[int, ...] | None = None  # with the account, if documents were ordered: given positions
    finish_reason: FinishReason | None = None
    queue_seconds: float | None = None  # with the account: from its arrival to its first step
    seconds_saved: float | None = None  # with the account: what computing the cached tokens would have taken here


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """The end of a request that could not be served. `code` is one of `engine.errors`."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True, tag="probe_result"):
    probe_id: str
    ok: bool
    message: str = ""


class Erased(msgspec.Struct, frozen=True, kw_only=True, tag="erased"):
    """Blocks that are gone, by tier. Blocks that a running request still holds go when it ends; they are counted."""

    erase_id: str
    num_blocks: int
    num_by_tier: dict[str, int]


class DocumentUse(msgspec.Struct, frozen=True, kw_only=True):
    """A document as a unit of the cache, added up over the tiers and every prompt that it stands in.

    Its blocks are those from where it starts to the next document, or to where prompts part. Hits are the device's.
    """

    document_id: str
    num_blocks: int
    num_bytes: int
    num_by_tier: dict[str, int]  # blocks; they sum to `num_blocks`
    hits: int
    tokens_saved: int
    last_use: float  # Unix seconds


class DocumentStats(msgspec.Struct, frozen=True, kw_only=True, tag="document_stats"):
    query_id: str
    documents: tuple[DocumentUse, ...]  # those of the asked ones that are in the cache


class CacheEvicted(msgspec.Struct, frozen=True, kw_only=True, tag="cache_evicted"):
    call_id: str
    num_blocks: int


class CacheVerified(msgspec.Struct, frozen=True, kw_only=True, tag="cache_verified"):
    """`num_unreadable` blocks were dropped: counted misses from now on. `num_different` must be 0."""

    call_id: str
    num_read: int
    num_unreadable: int
    num_recomputed: int  # blocks
    num_different: int  # of these, beyond the tolerance of the dtype


class ExplainedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A run of prompt tokens in one place."""

    start: int  # token
    end: int
    place: str  # device, host, disk, or why it has to be computed


class Explained(msgspec.Struct, frozen=True, kw_only=True, tag="explained"):
    call_id: str
    parts: tuple[ExplainedPart, ...]


class LatencyStats(msgspec.Struct, frozen=True, kw_only=True):
    """Operations by how long they took; one count more than bounds, for what took longer than the last."""

    bounds: tuple[float, ...] = ()  # seconds, upper bounds
    counts: tuple[int, ...] = (0,)
    seconds: float = 0.0  # of all of them


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier below the device, since the engine's start and now."""

    name: str
    state: str  # ready, loading
    num_slots: int
    num_blocks: int
    block_bytes: int
    bytes_written: int
    bytes_read: int
    num_evicted: int
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_damaged: int = 0  # of the read errors: blocks whose checksum was not theirs
    num_dropped: int = 0  # blocks that found no room here
    num_refused: int = 0  # fetches that computing was cheaper than
    num_swapped_out: int = 0  # blocks of preempted requests
    num_swapped_in: int = 0
    num_restored: int = 0  # entries of an earlier life that were taken over
    num_rejected: int = 0  # and those that led nowhere
    bandwidth: float = 0.0  # bytes per second, as measured when reading; 0: not yet
    reads: LatencyStats = LatencyStats()  # of the host: a step's copies; of the disk: a block
    writes: LatencyStats = LatencyStats()
    owner_blocks: dict[str, int] = msgspec.field(default_factory=dict[str, int])


class IndexStats(msgspec.Struct, frozen=True, kw_only=True):
    """The journal of the index in Redis."""

    state: str  # loading, ok, away, stale
    num_pending: int
    lag_seconds: float
    num_published: int
    num_failures: int
    num_resyncs: int


class OwnerUse(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner (a tenant, a cache group, the public) has in the cache now."""

    owner: str
    num_blocks: int
    floor_blocks: int
    quota_blocks: int | None


class EvictionLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the eviction ledger: so many blocks of one owner went, from a tier, by another's pressure."""

    owner: str
    pressed_by: str
    num_blocks: int
    tier: str = "device"


def evictions_seen_by(owner: str, ledger: Iterable[EvictionLine]) -> tuple[EvictionLine, ...]:
    """What an owner lost, by tier, but not to whom: that would tell of the others' load."""
    counts = Counter[tuple[str, str]]()
    for line in ledger:
        if line.owner == owner:
            counts[line.tier, owner if line.pressed_by == owner else "others"] += line.num_blocks
    return tuple(
        EvictionLine(owner=owner, pressed_by=by, num_blocks=count, tier=tier) for (tier, by), count in counts.items()
    )


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counts since the engine's start, and its state now."""

    incarnation: str
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int  # unreferenced, in the index
    num_active_blocks: int  # held by block tables; the three sum to num_blocks (I1)
    num_waiting: int
    num_running: int
    num_steps: int
    num_preemptions: int
    num_evicted_blocks: int
    num_step_failures: int
    num_integrity_failures: int
    num_requests_finished: int
    num_requests_aborted: int
    num_requests_failed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int  # prefill + decode, as run on the device, recomputation included
    num_output_tokens: int
    tiers: tuple[TierStats, ...] = ()
    index: IndexStats | None = None  # None: without a disk tier
    query_id: str = ""  # of the question that this answers
    prefill_tokens_per_second: float = 0.0  # measured on this engine, lately; 0: nothing was computed yet
    owners: tuple[OwnerUse, ...] = ()
    ledger: tuple[EvictionLine, ...] = ()


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True, tag="metrics"):
    """The engine's own metrics in Prometheus' text format: one truth, whichever gateway passes it on."""

    query_id: str
    text: bytes


class DocumentStart(msgspec.Struct, frozen=True):
    """Where a document begins in a run of blocks."""

    first_token: int  # of the prefix
    document_id: str


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks of the radix tree. Parents come before their children."""

    node: int  # place in `CacheView.nodes`
    parent: int | None  # None: hangs at the root
    owner: str
    first_token: int  # tokens before it in its prefix
    num_tokens: int
    num_blocks: int
    hits: int
    num_holders: int  # requests that hold it right now
    documents: tuple[DocumentStart, ...] = ()  # the first ones that start in it


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is in the engine now."""

    request_id: str
    tenant_id: str
    state: str
    num_prompt_tokens: int
    num_cached_tokens: int | None  # None: not admitted yet
    num_computed_tokens: int
    num_output_tokens: int


class CacheView(msgspec.Struct, frozen=True, kw_only=True, tag="cache_view"):
    """The cache at one moment, for looking at: bounded, whatever the cache's size."""

    query_id: str
    block_size: int
    num_blocks: int
    nodes: tuple[PrefixNode, ...]  # the most used
    num_nodes: int  # of the whole tree
    block_map: bytes  # one letter a cell, in order of block ids: f(ree), c(ached), a(ctive)
    blocks_per_cell: int
    owners: tuple[OwnerUse, ...]
    evictions: tuple[EvictionLine, ...]  # since the engine's start, most first
    requests: tuple[RequestView, ...]


ClientMessage = (
    Hello
    | Submit
    | Abort
    | Probe
    | GetStats
    | GetDocumentStats
    | Erase
    | EvictCache
    | VerifyCache
    | Explain
    | GetMetrics
    | GetCacheView
)
EngineMessage = (
    EngineInfo | Delta | Failure | ProbeResult | EngineStats | Erased | DocumentStats | EngineMetrics | CacheView
)
OperatorAnswer = EngineInfo | EngineStats | Failure | Erased | CacheEvicted | CacheVerified | Explained
