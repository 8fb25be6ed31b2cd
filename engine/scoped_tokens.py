"""A sequence's tokens together with who may share them.

    tokens   | system prompt ........ | document ........ | question .. | output ...
    spans    | public               12| tenant A                          (open end)
    blocks   [ 0  ][ 1  ][ 2  ][ 3  ][ 4  ] ...
                            └── holds the first private token: its scope is tenant A

A block's scope is that of its last token. Scopes only narrow along a prompt, so that is the narrowest of every
token up to the block's end. Output takes the prompt's last scope.

A document is remembered where it starts: everything from that block on has attended to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from engine.errors import InvalidRequestError
from engine.protocol import pack_tokens

SCOPE_BYTES = 16
TOKEN_BYTES = 4


class ScopedTokens:
    """Token ids, packed, and the scope of each block. Grows at its end only."""

    __slots__ = ("_documents", "_end_blocks", "_owners", "_scopes", "block_size", "packed", "stride")

    def __init__(
        self,
        block_size: int,
        spans: Iterable[tuple[bytes, bytes, str]],
        documents: Iterable[tuple[int, str]] = (),
    ) -> None:
        """`spans`: (packed tokens, scope, owner), in prompt order; adjacent spans of one scope are joined.

        The owner is who pays for the scope's blocks; one scope has one owner. `documents`: (first token, document
        key), in prompt order.
        """
        self.block_size = block_size
        self.stride = block_size * TOKEN_BYTES  # bytes of tokens in a block
        self.packed = bytearray()
        self._scopes: list[bytes] = []
        self._end_blocks: list[int] = []  # [i]: the first block beyond span i
        self._owners: dict[bytes, str] = {}
        self._documents = [(token // block_size, key) for token, key in documents]
        for tokens, scope, owner in spans:
            if len(scope) != SCOPE_BYTES:
                raise InvalidRequestError(f"a scope must have {SCOPE_BYTES} bytes, not {len(scope)}", param="segments")
            if len(tokens) % TOKEN_BYTES:
                raise InvalidRequestError("packed tokens must be whole int32", param="segments")
            self.packed += tokens
            self._close_span(scope, owner)
        if not self.packed:
            raise InvalidRequestError("the prompt has no tokens", param="messages")

    @classmethod
    def of(cls, token_ids: Sequence[int], scope: bytes, block_size: int, owner: str = "") -> ScopedTokens:
        """All tokens under one scope."""
        return cls(block_size, [(pack_tokens(token_ids), scope, owner)])

    def _close_span(self, scope: bytes, owner: str) -> None:
        """The tokens that were appended last belong to this scope."""
        if self._scopes and self._scopes[-1] == scope:
            self._end_blocks.pop()
        elif scope in self._scopes:
            raise InvalidRequestError("a prompt's scopes may only narrow; one came back", param="segments")
        else:
            self._scopes.append(scope)
        self._end_blocks.append(len(self.packed) // self.stride)
        if self._owners.setdefault(scope, owner) != owner:
            raise InvalidRequestError("a scope has two owners", param="segments")

    def __len__(self) -> int:
        """Tokens."""
        return len(self.packed) // TOKEN_BYTES

    def append(self, token_id: int) -> None:
        self.packed += token_id.to_bytes(TOKEN_BYTES, "little")

    def span(self, block: int) -> tuple[bytes, int]:
        """The scope of a block, and the first block beyond it that has another scope (or lies past any end)."""
        for scope, end in zip(self._scopes[:-1], self._end_blocks, strict=False):
            if block < end:
                return scope, end
        return self._scopes[-1], _NO_END

    def spans(self) -> list[tuple[bytes, int]]:
        """Each scope, and the first block beyond it."""
        return list(zip(self._scopes, (*self._end_blocks[:-1], _NO_END), strict=True))

    def scopes_up_to(self, block: int) -> list[bytes]:
        """The scopes this sequence may read at a block: its own there, and every wider one before."""
        last = self.span(block)[0]
        return self._scopes[: self._scopes.index(last) + 1]

    def owner(self, scope: bytes) -> str:
        """Who pays for blocks of this scope."""
        return self._owners[scope]

    def documents_between(self, first: int, last: int) -> list[tuple[int, str]]:
        """(block, document key) of the documents that start in the blocks [first, last)."""
        if not self._documents:
            return []
        return self._documents[bisect_left(self._documents, (first,)) : bisect_left(self._documents, (last,))]

    def block_tokens(self, block: int) -> bytes:
        return bytes(self.packed[block * self.stride : (block + 1) * self.stride])


_NO_END = 1 << 62
