"""What a tier stores payloads in: fixed-size slots, each with a checksum that only its own block passes."""

from __future__ import annotations

from typing import Protocol

import xxhash


class SlabError(Exception):
    """This slab cannot be used; the engine serves without it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SlabReadError(OSError):
    """A slot does not hold what it should: torn, overwritten, damaged, or beyond the end of the file."""


def payload_checksum(payload: memoryview | bytes, key: bytes) -> int:
    """xxh3 over the payload, seeded with the block's key: another block's intact payload fails, too."""
    return xxhash.xxh3_64_intdigest(payload, int.from_bytes(key[:8], "little"))


class Slab(Protocol):
    name: str
    num_slots: int
    block_bytes: int

    def write(self, number: int, payload: memoryview, key: bytes) -> int:
        """Store a payload; returns its checksum. Raises OSError (a full disk, a device error): the content is lost."""
        ...

    def read(self, number: int, into: memoryview, key: bytes, checksum: int) -> None:
        """Fill `into`. Raises OSError; `SlabReadError` when it is not what was written for this key."""
        ...

    def clear(self, number: int) -> None:
        """Overwrite an erased payload. Raises OSError."""
        ...

    def close(self) -> None: ...
