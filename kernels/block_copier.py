"""Moves KV blocks on the device: within the cache, to and from a contiguous staging buffer, and to other positions.

    copy_slots, copy_blocks      cache ─► cache
    gather_blocks                cache ─► staging [n, *block]     one piece, ready for one transfer to the host
    scatter_blocks               staging ─► cache
    rerotate_blocks              cache ─► cache, keys turned to other positions (nothing in the engine asks for it yet)

Copies are done as if one after the other. The device does those of one launch in any order, so a copy that reads or
writes what an earlier one of the launch wrote, or writes what it reads, begins a new launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton

from kernels.launch import launch
from kernels.reference import SlotCopy
from kernels.rerotation import RotationTable
from kernels.triton_copy import copy_planes
from kernels.triton_rerotate import rerotate_blocks
from kernels.upload import upload

_WORDS = 4096  # of a program: 16 KB in words of 4 bytes, 8 loads of 16 bytes of each thread in flight
_ROTATED_ELEMENTS = 4096
_MAX_COPIES = 65535  # the third axis of a grid


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Block `src`'s tokens, for `delta` positions later, into block `dst`. `delta` is the row in a `RotationTable`."""

    src: int
    dst: int
    row: int


class BlockCopier:
    def copy_slots(self, kv_cache: torch.Tensor, copies: Iterable[SlotCopy]) -> None:
        """The first `num_slots` slots of each copy, all layers; the destination's other slots stay as they are."""
        for run in independent_runs(copies):
            rows = [(copy.src, copy.dst, copy.num_slots) for copy in run]
            self._launch(kv_cache, kv_cache, rows)

    def copy_blocks(self, kv_cache: torch.Tensor, pairs: Iterable[tuple[int, int]]) -> None:
        """Whole blocks, (source, destination)."""
        block_size = kv_cache.shape[3]
        self.copy_slots(kv_cache, (_WholeBlock(src, dst, block_size) for src, dst in pairs))

    def gather_blocks(self, kv_cache: torch.Tensor, block_ids: Sequence[int], staging: torch.Tensor) -> None:
        """staging[i] = kv_cache[block_ids[i]]."""
        self._check_staging(kv_cache, block_ids, staging)
        self._launch(kv_cache, staging, [(block, row, kv_cache.shape[3]) for row, block in enumerate(block_ids)])

    def scatter_blocks(self, staging: torch.Tensor, kv_cache: torch.Tensor, block_ids: Sequence[int]) -> None:
        """kv_cache[block_ids[i]] = staging[i]. A block may be named once."""
        self._check_staging(kv_cache, block_ids, staging)
        assert len(set(block_ids)) == len(block_ids), "two rows for one block: which one stays is not defined"
        self._launch(staging, kv_cache, [(row, block, kv_cache.shape[3]) for row, block in enumerate(block_ids)])

    def rerotate_blocks(self, kv_cache: torch.Tensor, moves: Sequence[BlockMove], table: RotationTable) -> None:
        """Destinations must be no sources: a turned key is never turned again."""
        if not moves:
            return
        assert kv_cache.is_contiguous()
        if kv_cache.dtype.itemsize == 1:
            raise ValueError("keys in 8 bits cannot be turned: a turn may leave the range, and rounds too coarsely")
        sources, targets = {move.src for move in moves}, {move.dst for move in moves}
        assert not sources & targets, "a block that is turned from and to"
        assert len(targets) == len(moves), "two moves into one block"
        _, num_layers, _, block_size, num_kv_heads, head_dim = kv_cache.shape
        half = table.cosines.shape[2]
        block_h = max(2, triton.next_power_of_2(half))
        block_d = triton.next_power_of_2(head_dim)
        block_r = max(1, _ROTATED_ELEMENTS // block_d)
        rows = _upload([(move.src, move.dst, move.row) for move in moves], kv_cache.device)
        for start in range(0, len(moves), _MAX_COPIES):
            part = rows[start : start + _MAX_COPIES]
            launch(
                rerotate_blocks,
                (triton.cdiv(block_size * num_kv_heads, block_r), num_layers, part.shape[0]),
                kv_cache,
                part,
                table.cosines,
                table.sines,
                NUM_LAYERS=num_layers,
                BLOCK_ROWS=block_size * num_kv_heads,
                HEAD_DIM=head_dim,
                HALF=half,
                BLOCK_R=block_r,
                BLOCK_H=block_h,
                BLOCK_D=block_d,
                num_warps=4,
            )

    def _check_staging(self, kv_cache: torch.Tensor, block_ids: Sequence[int], staging: torch.Tensor) -> None:
        assert staging.shape == (len(block_ids), *kv_cache.shape[1:]), f"a staging buffer of {tuple(staging.shape)}"
        assert staging.dtype == kv_cache.dtype
        assert staging.is_contiguous()

    def _launch(self, source: torch.Tensor, destination: torch.Tensor, rows: list[tuple[int, int, int]]) -> None:
        """rows: (source row, destination row, slots), none of which depends on another."""
        if not rows:
            return
        assert source.is_contiguous()
        assert destination.is_contiguous()
        _, num_layers, _, block_size, num_kv_heads, head_dim = source.shape
        word = word_dtype(num_kv_heads * head_dim * source.dtype.itemsize)
        slot_words = num_kv_heads * head_dim * source.dtype.itemsize // word.itemsize
        copies = _upload(rows, source.device)
        block = min(_WORDS, triton.next_power_of_2(block_size * slot_words))
        for start in range(0, len(rows), _MAX_COPIES):
            part = copies[start : start + _MAX_COPIES]
            grid = (triton.cdiv(block_size * slot_words, block), num_layers * 2, part.shape[0])
            launch(
                copy_planes,
                grid,
                _as_words(source, word),
                _as_words(destination, word),
                part,
                PLANES=num_layers * 2,
                BLOCK_SIZE=block_size,
                SLOT_WORDS=slot_words,
                BLOCK=block,
                num_warps=4,
            )


@dataclass(frozen=True, slots=True)
class _WholeBlock:
    src: int
    dst: int
    num_slots: int


def independent_runs(copies: Iterable[SlotCopy]) -> Iterator[list[SlotCopy]]:
    """The copies in their order, cut wherever one depends on an earlier one of its run."""
    run: list[SlotCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if copy.src in written or copy.dst in written or copy.dst in read:
            yield run
            run, read, written = [], set(), set()
        run.append(copy)
        read.add(copy.src)
        written.add(copy.dst)
    if run:
        yield run


def word_dtype(slot_bytes: int) -> torch.dtype:
    """The widest integer that a slot is a whole number of. Threads join neighbouring words to loads of 16 bytes."""
    return next(dtype for dtype in (torch.int32, torch.int16, torch.int8) if slot_bytes % dtype.itemsize == 0)


def _as_words(tensor: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """The same memory. Flat, since the last axis alone need not be a whole number of words."""
    return tensor.view(-1).view(word)


def _upload(rows: list[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    return upload(torch.tensor(rows, dtype=torch.int64), device)
