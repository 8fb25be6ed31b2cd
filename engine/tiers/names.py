"""Values that many slots share (scopes, owners, lists of documents), each kept once under a small number.

The numbers are this process's own. In Redis a name goes by its digest: a number that an earlier life has given out, or
that was given away anew, must not come to mean another tenant or document there.
"""

from __future__ import annotations

import hashlib

import msgspec

from engine.errors import InvariantError

Name = bytes | str | tuple[str, ...]
DIGEST_BYTES = 16


def pack_name(name: Name) -> bytes:
    return msgspec.msgpack.encode(name)


def digest_name(packed: bytes) -> bytes:
    """Cryptographic, unlike the blocks' keys: clients choose document ids, and nothing is compared after it."""
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()


class Names:
    """Reference-counted, both ways: value → number and number → value."""

    __slots__ = ("_counts", "_digests", "_next", "_numbers", "_values")

    def __init__(self) -> None:
        self._numbers: dict[Name, int] = {}
        self._values: dict[int, Name] = {}
        self._counts: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._next = 1

    def __getitem__(self, number: int) -> Name:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)

    def number(self, value: Name) -> int:
        """0 when no slot has it."""
        return self._numbers.get(value, 0)

    def __contains__(self, value: Name) -> bool:
        return value in self._numbers

    def add(self, value: Name, slots: int = 1) -> int:
        """So many more slots have this value."""
        number = self._numbers.get(value)
        if number is None:
            number = self._next
            self._next += 1
            self._numbers[value], self._values[number], self._counts[number] = number, value, 0
        self._counts[number] += slots
        return number

    def drop(self, number: int) -> None:
        """One slot fewer."""
        count = self._counts[number] - 1
        if count < 0:
            raise InvariantError(f"I3: name {number} was dropped more often than it was added")
        if count:
            self._counts[number] = count
            return
        del self._numbers[self._values[number]], self._values[number], self._counts[number]
        self._digests.pop(number, None)

    def digest(self, number: int) -> bytes:
        found = self._digests.get(number)
        if found is None:
            found = self._digests[number] = digest_name(pack_name(self._values[number]))
        return found
