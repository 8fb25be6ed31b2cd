"""Which decoding sequences read a prefix together, and the work list of that pass (`kernels.triton_shared_prefix`).

    block tables   A [7 2 9 4 | 5]          a prefix is a run of equal block ids: blocks are shared by id, so
                   B [7 2 9 4 | 1 8]        the tables show the same tree as the prefix index
                   C [7 2 | 6]
                                            saving of a group = (members - 1) · keys: what is not read again
    {A, B, C} at 2 blocks saves 4 blocks     {A, B} at 4 blocks saves 4      the better is kept, in a tie the larger

Groups do not nest: a sequence reads one shared run and its own rest. Nested runs save at most the difference of the two
and cost a launch and a merge each.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.heuristics import KEY_ALIGNMENT


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences whose first `num_keys` keys lie in the same blocks."""

    members: tuple[int, ...]
    num_keys: int

    @property
    def saving(self) -> int:
        """Keys."""
        return (len(self.members) - 1) * self.num_keys


def find_groups(
    block_tables: Sequence[array[int]],
    seq_lens: Sequence[int],
    candidates: Sequence[int],  # the sequences that may share: those with one new token
    block_size: int,
    min_saving: int,
) -> list[PrefixGroup]:
    """The groups that save at least `min_saving` keys each. Cost: the candidates' tables, once a level of sharing."""

    def best(members: list[int], depth: int) -> list[PrefixGroup]:
        if len(members) < 2:
            return []
        tables = [block_tables[member] for member in members]
        # What the smallest and the largest have in common, all have.
        shared = _common_length(min(tables), max(tables), depth)
        # A sequence's own token is never part of the prefix.
        limit = min(seq_lens[member] for member in members) - 1
        keys = min(shared * block_size, limit) // KEY_ALIGNMENT * KEY_ALIGNMENT
        whole = PrefixGroup(tuple(members), keys)
        parts = [group for part in _split(block_tables, members, shared) for group in best(part, shared)]
        if whole.saving >= max(min_saving, sum(part.saving for part in parts)):
            return [whole]
        return parts

    return [group for part in _split(block_tables, candidates, 0) for group in best(part, 0)]


def _split(block_tables: Sequence[array[int]], members: Sequence[int], depth: int) -> list[list[int]]:
    """Members by their block at `depth`; those that end before have nothing to share there."""
    parts: defaultdict[int, list[int]] = defaultdict(list)
    for member in members:
        table = block_tables[member]
        if len(table) > depth:
            parts[table[depth]].append(member)
    return [part for part in parts.values() if len(part) > 1]


def _common_length(left: Sequence[int], right: Sequence[int], known: int) -> int:
    """How many leading blocks are equal; `known` are. By halves: comparing slices is far faster than a loop."""
    low, high = known, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class PrefixRoom:
    """How much a work list may hold."""

    num_seqs: int
    num_items: int
    num_partials: int

    @classmethod
    def for_any(cls, num_seqs: int, members_per_tile: int, target_items: int) -> PrefixRoom:
        """For whatever groups `num_seqs` sequences form: the last part of a group's keys may be a short one, for each
        tile of its members, and there are no more tiles than sequences."""
        num_items = target_items + num_seqs
        return cls(num_seqs, num_items, num_items * min(members_per_tile, num_seqs))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of each array, in their order, up to where the next one begins: at a multiple of 16 bytes."""
        items, seqs, partials = (-(-count // 4) * 4 for count in (5 * self.num_items, self.num_seqs, 3 * self.num_seqs))
        return items, seqs, seqs, partials


@dataclass(frozen=True, slots=True)
class PrefixLists:
    """The groups of one step as the kernels read them, on the host."""

    items: array[int]  # 'i', 5 each, see kernels.triton_shared_prefix
    members: array[int]
    prefix_lens: array[int]  # of each sequence, 0 for one of no group
    prefix_partials: array[int]  # 3 of each sequence: first, stride, count of its partial results
    num_partials: int

    @property
    def room(self) -> PrefixRoom:
        return PrefixRoom(len(self.prefix_lens), len(self.items) // 5, self.num_partials)

    def pack(self, room: PrefixRoom) -> torch.Tensor:
        """int32 [sum(room.sizes)]. What is left is zero: items of no member, sequences of no group."""
        assert len(self.prefix_lens) <= room.num_seqs
        assert len(self.items) <= 5 * room.num_items
        assert self.num_partials <= room.num_partials
        parts = (self.items, self.members, self.prefix_lens, self.prefix_partials)
        packed = b"".join(part.tobytes().ljust(4 * size, b"\0") for part, size in zip(parts, room.sizes, strict=True))
        return torch.frombuffer(bytearray(packed), dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The same on the device: views of one buffer."""

    buffer: torch.Tensor  # int32
    items: torch.Tensor  # [num_items, 5]
    members: torch.Tensor  # [num_seqs], the first of them in use
    prefix_lens: torch.Tensor  # [num_seqs]
    prefix_partials: torch.Tensor  # [num_seqs, 3]
    num_partials: int

    @classmethod
    def of(cls, buffer: torch.Tensor, room: PrefixRoom) -> PrefixPlan:
        """`buffer` may be filled later, by `PrefixLists.pack` for the same room."""
        items, members, lens, partials = buffer.split(room.sizes)
        return cls(
            buffer,
            items[: 5 * room.num_items].view(-1, 5),
            members[: room.num_seqs],
            lens[: room.num_seqs],
            partials[: 3 * room.num_seqs].view(-1, 3),
            room.num_partials,
        )


def plan_prefixes(
    groups: Sequence[PrefixGroup], num_seqs: int, members_per_tile: int, target_items: int
) -> PrefixLists:
    """Cut the groups' keys so that all items together are about `target_items`."""
    tiles = [-(-len(group.members) // members_per_tile) for group in groups]
    total = sum(count * group.num_keys for count, group in zip(tiles, groups, strict=True))
    chunk = -(-total // target_items)
    chunk = max(2, -(-chunk // KEY_ALIGNMENT)) * KEY_ALIGNMENT

    items, members = array("i"), array("i")
    prefix_lens, partials = array("i", bytes(4 * num_seqs)), array("i", bytes(12 * num_seqs))
    next_partial = 0
    for group in groups:
        size, offset = len(group.members), len(members)
        members.extend(group.members)
        cuts = range(0, group.num_keys, chunk)
        for place, member in enumerate(group.members):
            prefix_lens[member] = group.num_keys
            partials[3 * member : 3 * member + 3] = array("i", (next_partial + place, size, len(cuts)))
        for split, begin in enumerate(cuts):
            end = min(begin + chunk, group.num_keys)
            for place in range(0, size, members_per_tile):
                count = min(members_per_tile, size - place)
                items.extend((offset + place, count, begin, end, next_partial + split * size + place))
        next_partial += len(cuts) * size
    return PrefixLists(items, members, prefix_lens, partials, next_partial)
