"""What an erasure is about: the same question asked of blocks in every tier.

A document is known in the cache by its owner and its id, at the block where it starts. Erasing that block takes
everything below it: all that has attended to the document.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import Erase

_SEPARATOR = "\x1f"


def document_key(owner: str, document_id: str) -> str:
    """Names a document among all owners'."""
    return f"{owner}{_SEPARATOR}{document_id}"


def document_id_of(key: str) -> str:
    """As its owner calls it."""
    return key.rpartition(_SEPARATOR)[2]


@dataclass(frozen=True, slots=True)
class Selection:
    """All that is given must apply; what is None applies to everything."""

    owner: str | None = None
    scopes: frozenset[bytes] | None = None
    document_ids: frozenset[str] | None = None

    @classmethod
    def of(cls, erase: Erase) -> Selection:
        scopes = None if erase.scopes is None else frozenset(erase.scopes)
        return cls(erase.owner, scopes, None if erase.document_ids is None else frozenset(erase.document_ids))

    def has_document(self, key: str) -> bool:
        """Whether a document of this key is among the given ones."""
        owner, _, document_id = key.rpartition(_SEPARATOR)
        if self.document_ids is None or document_id not in self.document_ids:
            return False
        return self.owner is None or owner == self.owner

    def has_block(self, owner: str, scope: bytes) -> bool:
        """Whether a block is meant, as far as that does not depend on documents."""
        if self.scopes is not None and scope not in self.scopes:
            return False
        return self.document_ids is not None or self.owner is None or owner == self.owner
