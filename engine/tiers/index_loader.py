"""From the index in Redis to a directory, after a restart. Runs in the journal's thread: nobody waits for it.

    groups ──unpack──► records with a right checksum ──by depth──► parents first ──restore──► TierDirectory

What comes back is a promise, not a fact: the payload's checksum is compared when it is read, tokens and scopes on every
hit. A record whose parent is missing (evicted by Redis, damaged, too old) is dropped, and with it all below: each a
clean miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.tiers.directory import BlockIdentity, TierDirectory
from engine.tiers.index_record import IndexRecord
from engine.tiers.index_store import IndexStore

logger = logging.getLogger(__name__)

PROGRESS_EVERY = 100_000  # entries


@dataclass(slots=True)
class LoadedIndex:
    """A directory filled with what was found, and the slots whose records are of no use."""

    directory: TierDirectory
    num_records: int
    rejected: list[int]


def load_index(
    store: IndexStore, directory: TierDirectory, oldest: int, progress: Callable[[int], None]
) -> LoadedIndex:
    """Fill an empty directory. `oldest`: entries not used since that time (Unix seconds) are left out."""
    names = _names(store)
    records = _records(store, progress)
    rejected = [slot for slot, record in records if record is None]
    found = sorted(((slot, record) for slot, record in records if record is not None), key=lambda entry: entry[1].depth)
    for slot, record in found:
        if record.last_used < oldest or not _restore(directory, slot, record, names):
            rejected.append(slot)
    directory.restored()
    logger.info("index: %d of %d entries restored", len(directory), len(records))
    return LoadedIndex(directory, len(records), rejected)


def _names(store: IndexStore) -> dict[bytes, str | tuple[str, ...]]:
    found: dict[bytes, str | tuple[str, ...]] = {}
    for digest, packed in store.names().items():
        try:
            found[digest] = msgspec.msgpack.decode(packed, type=str | tuple[str, ...])
        except msgspec.DecodeError:
            logger.warning("index: a name cannot be read; its blocks are dropped")
    return found


def _records(store: IndexStore, progress: Callable[[int], None]) -> list[tuple[int, IndexRecord | None]]:
    """Every slot that has a record; None where it is damaged."""
    found: list[tuple[int, IndexRecord | None]] = []
    size, blank, unpack = store.format.size, store.format.blank, store.format.unpack
    for first_slot, group in store.groups():
        for number, offset in enumerate(range(0, len(group), size)):
            if group.startswith(blank, offset):
                continue
            found.append((first_slot + number, unpack(group, offset)))
        if len(found) % PROGRESS_EVERY < len(group) // size:
            progress(len(found))
    return found


def _restore(
    directory: TierDirectory, slot: int, record: IndexRecord, names: dict[bytes, str | tuple[str, ...]]
) -> bool:
    owner, documents = names.get(record.owner), names.get(record.documents)
    if not isinstance(owner, str) or not isinstance(documents, tuple) or slot >= directory.num_slots:
        return False
    parent_key = directory.root_key
    if record.parent_slot is not None:
        if record.parent_slot >= directory.num_slots:
            return False
        parent_key = directory.key(record.parent_slot)
    block = BlockIdentity(record.key, parent_key, record.scope, owner, record.tokens, documents, record.depth)
    return directory.restore(slot, block, record.payload_checksum, record.hits, record.last_used)
