"""Decode steps as captured graphs: one launch instead of some hundred.

    captured at start, largest first, one memory pool          sizes   1  2  4  8  16  24  32
    a step of 11 sequences, one new token each       ───►      padded to 16
    a prefill in the step, or more sequences than the largest  ───►      not captured: the runner's own way

        step's buffer  ──upload──►  fresh  ──copy──►  the graph's own inputs  ──replay──►  the graph's logits[:11]

A graph reads its inputs where they were when it was captured, and repeats the grids of then. Both hold for the decode
kernels: what they do follows from tensors, lengths included (`kernels/triton_attention.py`). A padded row writes to
slot -1, which is nowhere, and its sequence has no new token, so that attention skips it; its logits are not looked at.

Block tables are as wide as the longest sequence that the engine accepts. Only the columns that this step fills are
copied: behind a sequence's end no table is read, so what an earlier step left there does not matter.

What several sequences share is read once for all of them where that pays (`kernels/shared_prefix.py`). Each size has a
second graph for such steps, over the same inputs: it has room for any work list, and the kernels put a step's own there
before the replay. In one graph for both, steps that share nothing would pay for the pass as well. Launching such a step
kernel by kernel, which was the first form, costs the host milliseconds, more than most prefixes save the device.

Rejected: capturing prefill. Its grids follow from the lengths, and its launches are hidden behind its kernels.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import ScheduledSequence
from engine.load_progress import Progress
from engine.step_inputs import PackedStep, StepInputs, StepShape, aligned, decode_shape, pack_step, tables_of
from kernels.dispatch import AttentionKernels
from kernels.metadata import StepPlan
from kernels.upload import upload

logger = logging.getLogger(__name__)

_DENSE_UP_TO, _STEP, _COARSE_STEP = 256, 8, 32


@dataclass(frozen=True, slots=True)
class CapturedWork:
    replay: Callable[[], None]
    output: torch.Tensor  # where each replay leaves it


class Capturer(Protocol):
    def __call__(self, work: Callable[[], torch.Tensor]) -> CapturedWork:
        """Record what `work` puts into the device's queue. Raises RuntimeError if it waits for the device."""
        ...


class CudaCapturer:
    """Graphs of one device that share a memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> CapturedWork:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and takes workspaces
            with _waiting_forbidden():
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (the watchdog of torch.distributed) may go on asking the device.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()
        return CapturedWork(graph.replay, output)


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """A model that waits for the device in mid-step is noticed here, where the error does no harm."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """A capture that reads shared prefixes once, and the kernels that know where it looks for them."""

    kernels: AttentionKernels
    captured: CapturedWork


@dataclass(frozen=True, slots=True)
class _Graph:
    buffer: torch.Tensor
    shape: StepShape
    inputs: StepInputs
    plain: CapturedWork
    sharing: _Sharing | None  # over the same inputs

    def run(self, step: PackedStep, block_size: int, num_seqs: int) -> torch.Tensor:
        """`step`: of this graph's shape but for the width of its tables."""
        shape, fixed = step.shape, step.shape.num_bytes_before_tables
        sharing = self.sharing
        if sharing is not None and not sharing.kernels.stage_prefixes(step.plan, block_size):
            sharing = None
        fresh = upload(step.buffer, self.buffer.device)
        self.buffer[:fixed].copy_(fresh[:fixed])
        if shape.table_width:
            self.inputs.metadata.block_table[:, : shape.table_width].copy_(tables_of(fresh[fixed:], shape))
        captured = self.plain if sharing is None else sharing.captured
        captured.replay()
        return captured.output[:num_seqs]


class DecodeGraphs:
    """The captured steps of one runner."""

    def __init__(
        self,
        # Reads nothing but the inputs' tensors; logits [num_rows, V].
        forward: Callable[[StepInputs, AttentionKernels], torch.Tensor],
        plain: AttentionKernels,
        sharing: Callable[[], AttentionKernels] | None,  # a set for one captured step; None: no step shares
        block_size: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._plain = plain
        self._sharing = sharing
        self._block_size = block_size
        self._device = device
        self._graphs: dict[int, _Graph] = {}

    @property
    def sizes(self) -> list[int]:
        return sorted(self._graphs)

    def capture(self, sizes: Sequence[int], table_width: int, capturer: Capturer, progress: Progress) -> None:
        """Largest first: the smaller ones then find their memory in the pool. Raises RuntimeError (`Capturer`)."""
        with torch.inference_mode():
            for done, size in enumerate(sorted(sizes, reverse=True)):
                progress("capturing decode graphs", done / len(sizes))
                self._graphs[size] = self._captured(size, table_width, capturer)
        progress("capturing decode graphs", 1.0)

    def _captured(self, size: int, table_width: int, capturer: Capturer) -> _Graph:
        shape = decode_shape(size, aligned(table_width))
        # All rows padded: nothing is written while this is captured.
        packed = pack_step([], self._block_size, {}, pad_to=size)
        buffer = torch.zeros(shape.num_bytes, dtype=torch.uint8, device=self._device)
        buffer[: packed.shape.num_bytes].copy_(upload(packed.buffer, self._device))
        # The host's numbers say what all steps of this graph have in common: one new token for each sequence.
        plan = StepPlan([array("i", [0])] * size, [1] * size, [1] * size, [])
        inputs = StepInputs.of(buffer, shape, plan, self._block_size)
        plain = capturer(lambda: self._forward(inputs, self._plain))
        if self._sharing is None or size == 1:
            return _Graph(buffer, shape, inputs, plain, None)
        kernels = self._sharing()
        sharing = _Sharing(kernels, capturer(lambda: self._forward(inputs, kernels)))
        return _Graph(buffer, shape, inputs, plain, sharing)

    def run(self, sequences: Sequence[ScheduledSequence], rows_before: Mapping[str, int]) -> torch.Tensor | None:
        """Logits, one row a sequence; None for a step that no graph was captured for."""
        size = self._size_for(sequences)
        if size is None:
            return None
        packed = pack_step(sequences, self._block_size, rows_before, pad_to=size)
        return self._graphs[size].run(packed, self._block_size, len(sequences))

    def _size_for(self, sequences: Sequence[ScheduledSequence]) -> int | None:
        if not all(row.num_new == 1 and row.sample for row in sequences):
            return None
        return min((size for size in self._graphs if size >= len(sequences)), default=None)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Powers of two at first, then steps that waste an eighth of a large batch at most."""
    dense = range(_STEP, min(max_num_seqs, _DENSE_UP_TO) + 1, _STEP)
    coarse = range(_DENSE_UP_TO + _COARSE_STEP, max_num_seqs + 1, _COARSE_STEP)
    sizes = {1, 2, 4, *dense, *coarse, max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)
