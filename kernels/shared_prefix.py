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
from itertools import accumulate

import torch

from kernels.heuristics import KEY_ALIGNMENT
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences whose first `num_keys` keys lie in the same blocks."""

    members: tuple[int, ...]
    num_keys: int

    @property
    def saving(self) -> int:
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
class PrefixPlan:
    """The groups of one step as the kernels read them."""

    items: torch.Tensor  # int32 [num_items, 5], see kernels.triton_shared_prefix
    members: torch.Tensor  # int32
    prefix_lens: torch.Tensor  # int32 [num_seqs], 0 for a sequence of no group
    prefix_partials: torch.Tensor  # int32 [num_seqs, 3]: first, stride, count of its partial results
    num_partials: int


def plan_prefixes(
    groups: Sequence[PrefixGroup],
    num_seqs: int,
    members_per_tile: int,
    target_items: int,
    device: torch.device,
) -> PrefixPlan:
    """Cut the groups' keys so that all items together are about `target_items`."""
    tiles = [-(-len(group.members) // members_per_tile) for group in groups]
    total = sum(count * group.num_keys for count, group in zip(tiles, groups, strict=True))
    chunk = -(-total // target_items)
    chunk = max(2, -(-chunk // KEY_ALIGNMENT)) * KEY_ALIGNMENT

    items: list[tuple[int, int, int, int, int]] = []
    prefix_lens = [0] * num_seqs
    partials = [(0, 0, 0)] * num_seqs
    offsets = list(accumulate((len(group.members) for group in groups), initial=0))
    next_partial = 0
    for group, offset in zip(groups, offsets, strict=False):
        size = len(group.members)
        cuts = range(0, group.num_keys, chunk)
        for place, member in enumerate(group.members):
            prefix_lens[member] = group.num_keys
            partials[member] = (next_partial + place, size, len(cuts))
        for split, begin in enumerate(cuts):
            end = min(begin + chunk, group.num_keys)
            for place in range(0, size, members_per_tile):
                count = min(members_per_tile, size - place)
                items.append((offset + place, count, begin, end, next_partial + split * size + place))
        next_partial += len(cuts) * size

    def on_device(data: Sequence[int] | Sequence[tuple[int, ...]]) -> torch.Tensor:
        return upload(torch.tensor(data, dtype=torch.int32), device)

    return PrefixPlan(
        items=on_device(items),
        members=on_device([member for group in groups for member in group.members]),
        prefix_lens=on_device(prefix_lens),
        prefix_partials=on_device(partials),
        num_partials=next_partial,
    )
