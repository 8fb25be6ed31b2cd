"""One request as the scheduler and the KV cache manager see it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum

from engine.prefix_index import Node
from engine.protocol import PromptAccount, SamplingParams, Submit, unpack_tokens
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

        token_ids     | prompt ................................ | output ...
        KV            | num_computed_tokens ─────────►|
        in the index  | num_indexed_blocks · block_size ──►|
        block_table   [  ][  ][  ][  ][  ][  ][  ][  ][  ]

    `block_table`, `node`, `num_computed_tokens`, `num_indexed_blocks` and the key fields belong to `KVCacheManager`,
    `state` to `Scheduler`.
    """

    __slots__ = (
        "account",
        "arrival",
        "awaited_key",
        "awaited_read",
        "block_table",
        "disk_keys",
        "documents",
        "indexable",
        "node",
        "num_bypasses",
        "num_computed_tokens",
        "num_indexed_blocks",
        "num_pinned_tokens",
        "num_prompt_tokens",
        "num_reads",
        "num_resets",
        "pending_keys",
        "policy",
        "priority",
        "read_deadline",
        "request_id",
        "sampling",
        "seed",
        "state",
        "swapped",
        "tenant_id",
        "token_ids",
        "tokens",
        "wanted_node",
    )

    def __init__(self, submit: Submit, block_size: int, arrival: int, seed: int) -> None:
        """`arrival` orders requests; `seed` is used where the client gave none."""
        self.request_id = submit.request_id
        self.tenant_id = submit.tenant_id
        self.sampling: SamplingParams = submit.sampling
        self.seed = seed if submit.sampling.seed is None else submit.sampling.seed
        self.arrival = arrival
        self.policy = submit.policy
        self.priority = submit.priority
        self.num_bypasses = 0  # times a later request of its tenant went first
        spans = [(segment.tokens, segment.scope, segment.owner or submit.tenant_id) for segment in submit.segments]
        self.documents, self.num_pinned_tokens = _documents(submit)
        self.tokens = ScopedTokens(block_size, spans, self.documents)
        self.token_ids: list[int] = unpack_tokens(bytes(self.tokens.packed))
        self.num_prompt_tokens = len(self.token_ids)
        self.state = RequestState.WAITING
        self.account: PromptAccount | None = None  # set at first admission, never again
        self.num_resets = 0  # times a failed integrity check threw it back

        self.block_table: array[int] = array("i")
        self.num_computed_tokens = 0
        self.indexable = submit.use_cache
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
        self.num_computed_tokens = self.num_indexed_blocks = 0
        self.node = self.wanted_node = None
        self.pending_keys = []
        self.awaited_key = self.awaited_read = None
        self.swapped = None


def document_key(owner: str, document_id: str) -> str:
    """Names a document among all owners'."""
    return f"{owner}\x1f{document_id}"


def _documents(submit: Submit) -> tuple[list[tuple[int, str]], int]:
    """(first token, key) of each document, and how many tokens from the start a pinned document keeps."""
    documents: list[tuple[int, str]] = []
    position = pinned = 0
    for segment in submit.segments:
        if segment.document_id is not None and len(segment):
            documents.append((position, document_key(segment.owner or submit.tenant_id, segment.document_id)))
        position += len(segment)
        if segment.pinned:
            pinned = position
    return documents, pinned
