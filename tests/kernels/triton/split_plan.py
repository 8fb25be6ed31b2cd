"""How decode cuts the keys of a batch, read out of the device function that does it."""

# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.launch import launch
from kernels.triton_decode import find_split


@triton.jit
def _write_plan(cu_seqlens_q: tl.tensor, seq_lens: tl.tensor, plan: tl.tensor, num_seqs: tl.tensor, target: tl.tensor):
    chunk, starts, splits = find_split(0, cu_seqlens_q, seq_lens, None, num_seqs, target, 8, 0, False, False, 64, 32)
    seqs = tl.arange(0, 32)
    tl.store(plan, chunk)
    tl.store(plan + 1 + seqs, starts)
    tl.store(plan + 33 + seqs, splits)


def split_plan(seq_lens: Sequence[int], query_lens: Sequence[int], target: int) -> tuple[int, list[int], list[int]]:
    """(chunk, first item of each sequence, items of each sequence), of at most 32 sequences."""
    plan = torch.zeros(65, dtype=torch.int32)
    ends = torch.tensor([0, *query_lens]).cumsum(0).int()
    launch(_write_plan, (1,), ends, torch.tensor(seq_lens).int(), plan, len(seq_lens), target)
    chunk, starts, splits = plan[:1], plan[1:33], plan[33:]
    return int(chunk), starts[: len(seq_lens)].tolist(), splits[: len(seq_lens)].tolist()
