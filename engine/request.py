"""One request as the scheduler and the KV cache manager see it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum

from engine.erasure import Selection, document_key
from engine.prefix_index import Node
from engine.protocol import PromptAccount, SamplingParams, Segment, Submit, unpack_tokens
from engine.scoped_tokens import ScopedTokens


@dataclass(slots=True, frozen=True)
class SwappedBlocks:
    """What a preempted request had for itself, in private slots of the host tier."""

    first_block: int  # of its table
    num_tokens: int  # from the start of the prompt, whose KV was in place
    slots: list[int]


class RequestState(Enum):
    WAITING = "waiting"  # holds no block
    PARKED = "parked"  # neither; the next block it needs is being computed by another request, or read from the disk
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """A prompt, what has come out so far, and the blocks it holds.

        token_ids     | prompt ................................ | output ... | num_pending_tokens, still on the device
        KV            | num_computed_tokens ─────────►|
        in the index  | num_indexed_blocks · block_size ──►|
        block_table   [  ][  ][  ][  ][  ][  ][  ][  ][  ]

    `num_computed_tokens` counts what has been given to the device: for whatever is launched later, that KV is in place.
    In the index, and shared with parallel samples, is only what steps that have ended computed (`num_done_tokens`).

    `block_table`, `node`, `num_indexed_blocks` and the key fields belong to `KVCacheManager`, `state` to `Scheduler`,
    `num_computed_tokens` to both, in turn; `num_pending_tokens` is raised by `Scheduler` and lowered by `LLMEngine`.
    """

    __slots__ = (
        "account",
        "arrival",
        "awaited_key",
        "awaited_read",
        "block_table",
        "cached_hint",
        "chooses_order",
        "counted",
        "disk_keys",
        "document_order",
        "indexable",
        "lacked_room",
        "leader",
        "node",
        "num_bypasses",
        "num_computed_tokens",
        "num_done_tokens",
        "num_indexed_blocks",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_reads",
        "num_resets",
        "pending_keys",
        "pin_top",
        "policy",
        "priority",
        "read_deadline",
        "request_id",
        "sampling",
        "seed",
        "segments",
        "shares_account",
        "state",
        "submitted_segments",
        "swapped",
        "tenant_id",
        "token_ids",
        "tokens",
        "wanted_node",
        "when_idle",
    )

    def __init__(self, submit: Submit, block_size: int, arrival: int, seed: int) -> None:
        """`arrival` orders requests; `seed` is used where the client gave none."""
        self.request_id = submit.request_id
        self.tenant_id = submit.tenant_id
        self.sampling: SamplingParams = submit.sampling
        self.seed = seed if submit.sampling.seed is None else submit.sampling.seed
        self.arrival = arrival
        self.submitted_segments = submit.segments
        self.segments = submit.segments  # as they stand in the prompt
        self.chooses_order = submit.document_order == "cache"
        self.pin_top = submit.pin_top
        self.document_order: tuple[int, ...] | None = None  # given positions, if the order was ours to choose
        self.policy = submit.policy
        self.priority = submit.priority
        self.when_idle = submit.when_idle
        self.num_bypasses = 0  # times a later request of its tenant went first
        self.tokens = ScopedTokens(block_size, self._spans(), self.documents())
        self.token_ids: list[int] = unpack_tokens(bytes(self.tokens.packed))
        self.num_prompt_tokens = len(self.token_ids)
        self.state = RequestState.WAITING
        self.account: PromptAccount | None = None  # set at first admission, never again
        self.leader: Request | None = None  # the first of its parallel samples, whose prompt it shares
        self.shares_account = False  # with its leader: its prompt is counted there
        self.num_resets = 0  # times a failed integrity check threw it back

        self.block_table: array[int] = array("i")
        self.num_computed_tokens = 0
        self.num_done_tokens = 0
        self.num_pending_tokens = 0  # sampled, or being sampled, by steps that have not ended
        self.indexable = submit.use_cache
        self.counted = submit.counted
        self.node: Node | None = None  # the locked end of its path in the index
        self.num_indexed_blocks = 0
        self.pending_keys: list[bytes] = []  # keys of full prompt blocks from num_indexed_blocks on
        self.awaited_key: bytes | None = None  # a block that another request is computing right now
        self.wanted_node: Node | None = None  # what it is going to need, while it waits
        self.awaited_read: bytes | None = None  # a block that is being read from the disk for it
        self.read_deadline = 0.0
        self.num_reads = 0  # times it waited for the disk
        self.disk_keys: set[bytes] = set()  # blocks that came from there for it
        self.swapped: SwappedBlocks | None = None
        self.cached_hint: tuple[int, int] | None = None  # (version of the index, tokens found then)
        self.lacked_room: tuple[int, int] | None = None  # (version of the index, blocks that could be had then)

    def _spans(self) -> list[tuple[bytes, bytes, str]]:
        return [(segment.tokens, segment.scope, segment.owner or self.tenant_id) for segment in self.segments]

    def documents(self) -> list[tuple[int, str]]:
        """(first token, key) of each document, as they stand in the prompt."""
        found: list[tuple[int, str]] = []
        position = 0
        for segment in self.segments:
            if segment.document_id is not None and len(segment):
                found.append((position, document_key(segment.owner or self.tenant_id, segment.document_id)))
            position += len(segment)
        return found

    def is_concerned(self, selection: Selection) -> bool:
        """Whether what this request computes belongs to what is being erased."""
        if selection.document_ids is not None and not any(selection.has_document(key) for _, key in self.documents()):
            return False
        return any(selection.has_block(segment.owner or self.tenant_id, segment.scope) for segment in self.segments)

    @property
    def num_pinned_tokens(self) -> int:
        """Tokens up to the end of the last pinned segment."""
        position = pinned = 0
        for segment in self.segments:
            position += len(segment)
            pinned = position if segment.pinned else pinned
        return pinned

    def arrange(self, segments: tuple[Segment, ...], order: tuple[int, ...]) -> None:
        """The same segments in another order, before anything of the request has been computed."""
        self.segments, self.document_order = segments, order
        self.tokens = ScopedTokens(self.tokens.block_size, self._spans(), self.documents())
        self.token_ids = unpack_tokens(bytes(self.tokens.packed))

    @property
    def shares_prompt(self) -> bool:
        """Whether its leader has come as far as its first token: prompt, order of documents and account are settled."""
        return self.leader is not None and self.leader.num_output_tokens > 0

    @property
    def awaits_leader(self) -> bool:
        """Whether the prompt that it shares is still being computed."""
        return self.leader is not None and self.leader.state is not RequestState.FINISHED and not self.shares_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append_output(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.tokens.append(token_id)

    def forget_blocks(self) -> None:
        """Back to holding nothing, without a word to a cache that no longer exists."""
        self.block_table = array("i")
        self.num_computed_tokens = self.num_done_tokens = self.num_indexed_blocks = self.num_pending_tokens = 0
        self.node = self.wanted_node = None
        self.pending_keys = []
        self.awaited_key = self.awaited_read = None
        self.swapped = None
