"""One step on the device: what the scheduler decided, packed into one row, through the model, to the next tokens.

    sequences    A: 5 new      B: 1 new   C: 3 new               (any mix of prefill chunks and decodes)
    input_ids    a a a a a     b          c c c        [1, 9]    no padding
    positions    7 8 9 10 11   42         0 1 2
    logits               ▲     ▲                       [2, V]    only rows that are sampled: C is in mid-prefill

Transfers between the tiers and copies run before the forward pass, because the step writes into their targets
(`engine/batch.py` says in which order). Nothing is kept from step to step but
the KV cache, so a step that failed leaves nothing to clean up here.

One forward pass for prefill and decode together, not two: the linear layers, which are most of the work, then see all
rows at once.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch

from engine.attention import PagedAttention, forward_packed
from engine.batch import ScheduledSequence, SchedulerOutput, TransferReport
from engine.block_transfer import BlockTransfer, CpuBlockTransfer, CudaCopyStream, StreamBlockTransfer, host_tensor
from engine.kv_cache import DeviceMemory, allocate_kv_cache, num_blocks_on_cpu, num_blocks_on_gpu
from engine.model_loader import LoadedModel
from engine.protocol import SamplingParams
from engine.sampler import Sampler
from engine.settings import EngineSettings
from kernels.dispatch import AttentionKernels, select_kernels
from kernels.metadata import AttentionMetadata

# Of the largest value in a block: what rounding leaves between two ways to batch the same tokens.
_KV_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class ModelRunner:
    """Owns the KV tensor (`kv_cache`) and runs steps on it. Which block holds what is the scheduler's knowledge."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_cache: torch.Tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        kernels: AttentionKernels,
        sampler: Sampler,
    ) -> None:
        self.kv_cache = kv_cache
        self._model = loaded.model
        self._device = loaded.device
        self._block_size = loaded.block_size
        self._eos_token_ids = loaded.eos_token_ids
        self._kernels = kernels
        self._sampler = sampler
        self._transfer: BlockTransfer | None = None

    def attach_host_memory(self, buffer: memoryview) -> None:
        """A host slab of blocks of this cache's size; pinned, if this is a GPU."""
        host = host_tensor(buffer, self.kv_cache)
        if self._device.type == "cuda":
            self._transfer = StreamBlockTransfer(self.kv_cache, host, CudaCopyStream(self._device))
        else:
            self._transfer = CpuBlockTransfer(self.kv_cache, host, torch.get_num_threads())

    def transfer_report(self) -> TransferReport:
        return TransferReport(0, 0, 0.0) if self._transfer is None else self._transfer.report()

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        """Whether a block's content and a payload agree as well as two computations of the same KV do."""
        mine = self.kv_cache[block_id].float().cpu()
        theirs = host_tensor(payload, self.kv_cache)[0].float()
        tolerance = _KV_TOLERANCE[self.kv_cache.dtype] * float(mine.abs().max())
        return bool((mine - theirs).abs().max() <= tolerance)

    @property
    def num_blocks(self) -> int:
        return self.kv_cache.shape[0]

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        """Run one step; the sampled token of each sequence, None where it was not to be sampled."""
        with torch.inference_mode():
            self._move_blocks(output)
            if not output.sequences:
                return []
            logits = self.forward_logits(output.sequences)
            rows = [sequence for sequence in output.sequences if sequence.sample]
            tokens = iter(self._sampler.sample(logits, rows, self._eos_token_ids) if rows else [])
        return [next(tokens) if sequence.sample else None for sequence in output.sequences]

    def _move_blocks(self, output: SchedulerOutput) -> None:
        transfer = self._transfer if output.offloads or output.fetches else None
        if transfer is None:
            self._copy_slots(output)
            return
        transfer.begin()
        try:
            transfer.offload(output.offloads)
            self._copy_slots(output)
            transfer.fetch(output.fetches)
        finally:
            transfer.end()

    def _copy_slots(self, output: SchedulerOutput) -> None:
        if output.copies:
            self._kernels.copy_slots(self.kv_cache, output.copies)

    def forward_logits(self, sequences: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Compute the new tokens of `sequences` into the cache; the logits [B, V] of those with `sample`, in order."""
        metadata = AttentionMetadata.build(
            [sequence.block_table for sequence in sequences],
            [sequence.num_computed for sequence in sequences],
            [sequence.num_new for sequence in sequences],
            self._block_size,
            self._device,
        )
        tokens = [row.token_ids[row.num_computed : row.end] for row in sequences]
        positions = [range(row.num_computed, row.end) for row in sequences]
        with torch.inference_mode():
            return forward_packed(
                self._model,
                self._indices(chain.from_iterable(tokens)),
                self._indices(chain.from_iterable(positions)),
                PagedAttention(self.kv_cache, self._kernels, metadata),
                self._indices(_sampled_rows(sequences)),
            )

    def _indices(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self._device)


def build_model_runner(loaded: LoadedModel, settings: EngineSettings) -> ModelRunner:
    """Choose the kernels, size and allocate the KV cache, and put the runner together."""
    assert settings.block_size == loaded.block_size, "the model's fingerprint is for another block size"
    kernels = select_kernels(loaded.device)
    if loaded.device.type == "cuda":
        num_blocks = num_blocks_on_gpu(loaded.kv_layout, settings, _profile_memory(loaded, kernels, settings))
    else:
        num_blocks = num_blocks_on_cpu(loaded.kv_layout, settings)
    kv_cache = allocate_kv_cache(loaded.kv_layout, num_blocks, loaded.device)
    return ModelRunner(loaded, kv_cache, kernels, Sampler())


def configure_threads(threads: int) -> int:
    """Set torch's threads for this process; 0 takes the cores that the process may use. Returns the number set."""
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def _sampled_rows(sequences: Sequence[ScheduledSequence]) -> Iterator[int]:
    """The packed index of each sampled sequence's last new token."""
    end = 0
    for sequence in sequences:
        end += sequence.num_new
        if sequence.sample:
            yield end - 1


def _profile_memory(loaded: LoadedModel, kernels: AttentionKernels, settings: EngineSettings) -> DeviceMemory:
    """Run the largest batch that the settings allow, over a cache of just its size, and see what it took."""
    layout = loaded.kv_layout
    batch = _largest_batch(settings)
    num_blocks = 1 + max(block for sequence in batch.sequences for block in sequence.block_table)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    runner = ModelRunner(loaded, allocate_kv_cache(layout, num_blocks, loaded.device), kernels, Sampler())
    runner.execute(batch)
    peak = torch.cuda.max_memory_allocated(loaded.device) - num_blocks * layout.bytes_per_block
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(loaded.device)
    return DeviceMemory(total, total - free - torch.cuda.memory_reserved(loaded.device), peak)


def _largest_batch(settings: EngineSettings) -> SchedulerOutput:
    """As many sequences and tokens as one step may have, every sequence sampled with all filters and penalties on."""
    num_seqs = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    length, remainder = divmod(settings.max_num_batched_tokens, num_seqs)
    sampling = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, frequency_penalty=0.1, repetition_penalty=1.1
    )
    sequences: list[ScheduledSequence] = []
    next_block = 0
    for index in range(num_seqs):
        num_new = length + (index < remainder)
        end_block = next_block + -(-num_new // settings.block_size)
        sequences.append(
            ScheduledSequence(
                request_id=f"profile-{index}",
                token_ids=[0] * num_new,
                num_computed=0,
                num_new=num_new,
                block_table=array("i", range(next_block, end_block)),
                sampling=sampling,
                seed=index,
                num_prompt_tokens=num_new,
                sample=True,
            )
        )
        next_block = end_block
    return SchedulerOutput(sequences)
