"""One request as the scheduler and the KV cache manager see it."""

from __future__ import annotations

from array import array
from enum import Enum

from engine.prefix_index import Node
from engine.protocol import PromptAccount, SamplingParams, Segment, Submit, unpack_tokens
from engine.scoped_tokens import ScopedTokens


class RequestState(Enum):
    WAITING = "waiting"  # holds no block
    PARKED = "parked"  # neither; another request is computing the next block it needs
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
        "block_table",
        "cached_hint",
        "chooses_order",
        "document_order",
        "indexable",
        "lacked_room",
        "node",
        "num_bypasses",
        "num_computed_tokens",
        "num_indexed_blocks",
        "num_prompt_tokens",
        "num_resets",
        "pending_keys",
        "pin_top",
        "policy",
        "priority",
        "request_id",
        "sampling",
        "seed",
        "segments",
        "state",
        "submitted_segments",
        "tenant_id",
        "token_ids",
        "tokens",
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
        self.num_bypasses = 0  # times a later request of its tenant went first
        self.tokens = ScopedTokens(block_size, self._spans())
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
        self.cached_hint: tuple[int, int] | None = None  # (version of the index, tokens found then)
        self.lacked_room: tuple[int, int] | None = None  # (version of the index, blocks that could be had then)

    def _spans(self) -> list[tuple[bytes, bytes, str]]:
        return [(segment.tokens, segment.scope, segment.owner or self.tenant_id) for segment in self.segments]

    def arrange(self, segments: tuple[Segment, ...], order: tuple[int, ...]) -> None:
        """The same segments in another order, before anything of the request has been computed."""
        self.segments, self.document_order = segments, order
        self.tokens = ScopedTokens(self.tokens.block_size, self._spans())
        self.token_ids = unpack_tokens(bytes(self.tokens.packed))

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
        self.node = None
        self.pending_keys = []
        self.awaited_key = None
