"""From the index in Redis to a directory, after a restart. Runs in the journal's thread: nobody waits for it.

    groups ──unpack──► records with a right checksum ──level by level──► those whose path is whole ──► TierDirectory

What comes back is a promise, not a fact: the payload's checksum is compared when it is read, tokens and scopes on every
hit. Here a record must have a right checksum of its own, names that are there, a parent that is whole itself, and the
key that follows from its parent's key, its scope and its tokens: an entry whose parent's slot was given to another
block meanwhile does not pass, and if that block has the same key, its payload will not. What does not pass is dropped,
and with it all below: each a clean miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from engine.tiers.directory import RestoredBlocks, TierDirectory
from engine.tiers.index_store import IndexStore

logger = logging.getLogger(__name__)

NamesByDigest = dict[bytes, str | tuple[str, ...]]


@dataclass(slots=True)
class LoadedIndex:
    """A directory filled with what was found, and the slots whose records are of no use."""

    directory: TierDirectory
    num_records: int
    rejected: list[int]


@dataclass(slots=True)
class _Table:
    """Every record that was found, and whether it is still believed in."""

    slots: NDArray[np.int64]
    records: NDArray[np.void]
    usable: NDArray[np.bool_]


def load_index(
    store: IndexStore, directory: TierDirectory, oldest: int, progress: Callable[[int], None]
) -> LoadedIndex:
    """Fill an empty directory. `oldest`: entries not used since that time (Unix seconds) are left out."""
    names = _names(store)
    table = _read(store, directory.num_slots, progress)
    table.usable &= table.records["last_used"] >= oldest
    _reject_nameless(table, names)
    _reject_doubles(table)
    _reject_orphans(table, directory)
    _restore(table, directory, names)
    rejected: list[int] = table.slots[~table.usable].tolist()
    logger.info("index: %d of %d entries restored", len(directory), len(table.slots))
    return LoadedIndex(directory, len(table.slots), rejected)


def _names(store: IndexStore) -> NamesByDigest:
    found: NamesByDigest = {}
    for digest, packed in store.names().items():
        try:
            found[digest] = msgspec.msgpack.decode(packed, type=str | tuple[str, ...])
        except msgspec.DecodeError:
            logger.warning("index: a name cannot be read; its blocks are dropped")
    return found


def _read(store: IndexStore, num_slots: int, progress: Callable[[int], None]) -> _Table:
    slots, records, usable = [np.empty(0, np.int64)], [np.empty(0, store.format.dtype)], [np.empty(0, np.bool_)]
    num_found = 0
    for first_slot, group in store.groups():
        found, is_blank, is_whole = store.format.unpack(group)
        here = np.flatnonzero(~is_blank)
        here = here[here + first_slot < num_slots]
        slots.append(here + first_slot)
        records.append(found[here])
        usable.append(is_whole[here])
        num_found += len(here)
        progress(num_found)
    return _Table(np.concatenate(slots), np.concatenate(records), np.concatenate(usable))


def _reject_nameless(table: _Table, names: NamesByDigest) -> None:
    owners = {digest for digest, name in names.items() if isinstance(name, str)}
    documents = {digest for digest, name in names.items() if isinstance(name, tuple)}
    for column, known in (("owner", owners), ("documents", documents)):
        table.usable &= np.array([value in known for value in table.records[column].tolist()], dtype=np.bool_)


def _reject_doubles(table: _Table) -> None:
    """Of two records of one block, which a crash may leave, the first."""
    seen: set[bytes] = set()
    for row, key in enumerate(table.records["key"].tolist()):
        if table.usable[row]:
            table.usable[row] = key not in seen
            seen.add(key)


def _reject_orphans(table: _Table, directory: TierDirectory) -> None:
    """Level by level, so that a parent is judged before its children, and its payload's checksum is known when theirs
    are taken out of the combined ones. Lists: numpy is slow at single elements."""
    rows_by_slot = np.full(directory.num_slots, -1, dtype=np.int64)
    rows_by_slot[table.slots[table.usable]] = np.flatnonzero(table.usable)
    above: list[int] = _rows_above(table, rows_by_slot).tolist()
    depths: list[int] = table.records["depth"].tolist()
    usable: list[bool] = table.usable.tolist()
    checksums: list[int] = table.records["payload"].tolist()
    keys, scopes, tokens = (table.records[column].tolist() for column in ("key", "scope", "tokens"))
    digest, root_key = xxhash.xxh3_128_digest, directory.root_key
    for row in np.argsort(table.records["depth"], kind="stable").tolist():
        if not usable[row]:
            continue
        parent = above[row]
        if parent == row:
            usable[row] = not depths[row] and digest(root_key + scopes[row] + tokens[row]) == keys[row]
        else:
            usable[row] = (
                usable[parent]
                and depths[parent] + 1 == depths[row]
                and digest(keys[parent] + scopes[row] + tokens[row]) == keys[row]
            )
            checksums[row] ^= checksums[parent]
    table.usable = np.array(usable, dtype=np.bool_)
    table.records["payload"] = np.array(checksums, dtype=np.uint64)


def _rows_above(table: _Table, rows_by_slot: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row that of its parent; its own for a first block. What names a parent that is not there is unusable."""
    own = np.arange(len(table.slots))
    parents = table.records["parent"].astype(np.int64) - 1
    table.usable &= parents < len(rows_by_slot)
    found = rows_by_slot[np.where(table.usable & (parents >= 0), parents, 0)]
    table.usable &= (parents < 0) | (found >= 0)
    return np.where((parents >= 0) & table.usable, found, own)


def _restore(table: _Table, directory: TierDirectory, names: NamesByDigest) -> None:
    records = table.records[table.usable]
    owners = [names[digest] for digest in records["owner"].tolist()]
    documents = [names[digest] for digest in records["documents"].tolist()]
    directory.restore(
        RestoredBlocks(
            slots=table.slots[table.usable],
            keys=records["key"].tolist(),
            tokens=records["tokens"],
            parents=records["parent"].astype(np.int64) - 1,
            depths=records["depth"],
            hits=records["hits"],
            last_used=records["last_used"],
            checksums=records["payload"],
            scopes=records["scope"].tolist(),
            owners=[owner for owner in owners if isinstance(owner, str)],
            documents=[each for each in documents if isinstance(each, tuple)],
        )
    )
