"""An index entry as it lies in Redis: a fixed-size record at its slot's place in a string.

    group g   [ slot 512·g ][ slot 512·g + 1 ] …        a record that is all zeros, or fails its checksum, is none

    record    key 16 · scope 16 · owner 16 · documents 16 · parent 4 · depth 4 · hits 4 · last use 4 ·
              payload checksum 8 · tokens 4·block_size · checksum 8                     160 bytes at 16 tokens a block

Owner and documents are digests of names, which are in a hash beside the groups. The parent is the slot it lies in, plus
one; 0: a first block. The payload's checksum is combined (xor) with that of the parent's payload: what is read here
does not pass when the parent's slot has been given to another block, of whatever key.

Mirroring the slots, instead of a hash a block: one block costs its 160 bytes and nothing else (a hash of ten fields
costs 400 to 600), many are read at a time, and a write is idempotent: the last one holds.
"""

from __future__ import annotations

import struct
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine.prefix_index import KEY_BYTES
from engine.scoped_tokens import SCOPE_BYTES, TOKEN_BYTES
from engine.tiers.directory import TierDirectory
from engine.tiers.names import DIGEST_BYTES, Name, pack_name

RECORD_FORMAT = 2
GROUP_SLOTS = 512


class RecordFormat:
    """Packs and unpacks the records of one block size."""

    def __init__(self, block_size: int) -> None:
        stride = block_size * TOKEN_BYTES
        self._fields = struct.Struct(f"<{KEY_BYTES}s{SCOPE_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}sIIIIQ{stride}s")
        self._check = struct.Struct("<Q")
        self.size = self._fields.size + self._check.size
        self.dtype = np.dtype(
            [
                *(("key", f"V{KEY_BYTES}"), ("scope", f"V{SCOPE_BYTES}")),
                *(("owner", f"V{DIGEST_BYTES}"), ("documents", f"V{DIGEST_BYTES}")),
                *(("parent", "<u4"), ("depth", "<u4"), ("hits", "<u4"), ("last_used", "<u4")),
                *(("payload", "<u8"), ("tokens", f"V{stride}"), ("check", "<u8")),
            ]
        )

    @cached_property
    def blank(self) -> bytes:
        """No entry."""
        return bytes(self.size)

    def pack(self, directory: TierDirectory, slot: int) -> bytes:
        """A ready slot as it is now."""
        _, owner, documents = directory.name_ids(slot)
        parent = directory.parent_of(slot)
        body = self._fields.pack(
            directory.key(slot),
            directory.scope(slot),
            directory.names.digest(owner),
            directory.names.digest(documents),
            0 if parent is None else parent + 1,
            directory.depth(slot),
            directory.hits(slot),
            directory.last_used[slot],
            directory.checksum[slot] ^ (0 if parent is None else directory.checksum[parent]),
            directory.tokens(slot),
        )
        return body + self._check.pack(xxhash.xxh3_64_intdigest(body))

    def unpack(self, group: bytes) -> tuple[NDArray[np.void], NDArray[np.bool_], NDArray[np.bool_]]:
        """The records of a group as a structured array; which of them are none, and which are whole."""
        count = len(group) // self.size
        view = memoryview(group)
        records = np.frombuffer(group, dtype=self.dtype, count=count)
        body, size, digest = self._fields.size, self.size, xxhash.xxh3_64_intdigest
        sums = [digest(view[start : start + body]) for start in range(0, count * size, size)]
        words = np.frombuffer(group, dtype="<u4", count=count * size // 4).reshape(count, -1)
        whole = np.equal(records["check"], np.array(sums, dtype=np.uint64)).astype(np.bool_)
        return records, np.logical_not(words.any(axis=1)).astype(np.bool_), whole


def names_of(directory: TierDirectory, slot: int) -> list[tuple[bytes, Name, bytes]]:
    """(digest, name, packed) of the names that a slot's record refers to."""
    _, owner, documents = directory.name_ids(slot)
    names = directory.names
    return [(names.digest(number), names[number], pack_name(names[number])) for number in (owner, documents)]
