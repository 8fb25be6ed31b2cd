"""One step on the device: what the scheduler decided, packed into one row, through the model, to the next tokens.

    sequences    A: 5 new      B: 1 new   C: 3 new               (any mix of prefill chunks and decodes)
    input_ids    a a a a a     b          c c c        [1, 9]    no padding
    positions    7 8 9 10 11   42         0 1 2
    logits               ▲     ▲                       [2, V]    only rows that are sampled: C is in mid-prefill

Transfers between the tiers and copies run before the forward pass, because the step writes into their targets
(`engine/batch.py` says in which order). Nothing is kept from step to step but the KV cache and the tokens that were
sampled last, so a step that failed leaves nothing to clean up here.

`launch` puts a step into the device's queue and returns. On a GPU nothing in it waits for the device: the next step may
be launched before this one is done, and takes its sequences' last tokens from `_last_tokens`, where this one will have
put them. `PendingStep.wait` is where the host meets the device, once a step. A step that only decodes, as most do, runs
as a captured graph (`engine/decode_graphs.py`).

One forward pass for prefill and decode together, not two: the linear layers, which are most of the work, then see all
rows at once.
"""

from __future__ import annotations

import gc
import logging
import os
from array import array
from collections.abc import Sequence

import torch

from engine.attention import PagedAttention, forward_packed
from engine.batch import ScheduledSequence, SchedulerOutput, StepResult, TransferReport
from engine.block_transfer import BlockTransfer, CpuBlockTransfer, CudaCopyStream, StreamBlockTransfer, host_tensor
from engine.decode_graphs import CudaCapturer, DecodeGraphs, graph_sizes
from engine.kv_cache import (
    DeviceMemory,
    allocate_kv_cache,
    fit_max_model_len,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
)
from engine.load_progress import Progress
from engine.logprobs import read_logprobs
from engine.model_loader import LoadedModel
from engine.protocol import SamplingParams
from engine.sampler import FetchedTokens, SampledTokens, Sampler
from engine.settings import EngineSettings
from engine.step_inputs import StepInputs, pack_step, resolve_tokens
from kernels.dispatch import AttentionKernels, select_kernels
from kernels.upload import upload

logger = logging.getLogger(__name__)

# Of the largest value in a block: what rounding leaves between two ways to batch the same tokens.
_KV_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class PendingStep:
    """A step in the device's queue."""

    def __init__(self, sequences: Sequence[ScheduledSequence], fetched: FetchedTokens | None) -> None:
        self._sequences = sequences
        self._fetched = fetched

    def wait(self) -> StepResult:
        """Returns when the device is done with the step."""
        token_ids: list[int | None] = [None] * len(self._sequences)
        if self._fetched is None:
            return StepResult(token_ids)
        sampled = [index for index, sequence in enumerate(self._sequences) if sequence.sample]
        for index, token_id in zip(sampled, self._fetched.wait(), strict=True):
            token_ids[index] = token_id
        logprobs = read_logprobs(self._fetched.logprobs(), [self._sequences[index] for index in sampled])
        return StepResult(
            token_ids,
            frozenset(index for index in sampled if token_ids[index] is None),
            {index: found for index, found in zip(sampled, logprobs, strict=True) if found is not None},
        )


class ModelRunner:
    """Owns the KV tensor (`kv_cache`) and runs steps on it. Which block holds what is the scheduler's knowledge."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_cache: torch.Tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        kernels: AttentionKernels,
        sampler: Sampler,
        max_num_seqs: int,
    ) -> None:
        self.kv_cache = kv_cache
        self._model = loaded.model
        self._device = loaded.device
        self._block_size = loaded.block_size
        self._eos_token_ids = loaded.eos_token_ids
        self._kernels = kernels
        self._sampler = sampler
        self._transfer: BlockTransfer | None = None
        self._graphs: DecodeGraphs | None = None
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=loaded.device)
        self._last_rows: dict[str, int] = {}  # request id → its row there

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is done."""
        return self._device.type == "cuda"

    def attach_graphs(self, graphs: DecodeGraphs) -> None:
        self._graphs = graphs

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

    # ------------------------------------------------------------------ a step

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step to its end."""
        return self.launch(output).wait()

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Begin a step; it runs after those that were launched before."""
        with torch.inference_mode():
            self._move_blocks(output)
            rows = [sequence for sequence in output.sequences if sequence.sample]
            fetched = None
            if output.sequences:
                logits = self.forward_logits(output.sequences)
                if rows:
                    sampled = self._sampler.sample(logits, rows, self._eos_token_ids)
                    self._keep_tokens(sampled, rows)
                    fetched = FetchedTokens(sampled)
        return PendingStep(output.sequences, fetched)

    def _keep_tokens(self, sampled: SampledTokens, rows: Sequence[ScheduledSequence]) -> None:
        """For the next step, which may be put together before these tokens are known on the host."""
        self._last_tokens[: len(rows)].copy_(sampled.token_ids)
        self._last_rows = {row.request_id: index for index, row in enumerate(rows)}

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
        with torch.inference_mode():
            if self._graphs is not None and (logits := self._graphs.run(sequences, self._last_rows)) is not None:
                return logits
            packed = pack_step(sequences, self._block_size, self._last_rows)
            buffer = upload(packed.buffer, self._device)
            return self.forward(StepInputs.of(buffer, packed.shape, packed.plan, self._block_size), self._kernels)

    def forward(self, inputs: StepInputs, kernels: AttentionKernels) -> torch.Tensor:
        """The model over inputs on the device; logits [num_rows, V]. Reads nothing of the host but `inputs`' plan."""
        return forward_packed(
            self._model,
            resolve_tokens(inputs, self._last_tokens),
            inputs.positions,
            PagedAttention(self.kv_cache, kernels, inputs.metadata),
            inputs.logits_rows,
        )


def build_model_runner(loaded: LoadedModel, settings: EngineSettings, progress: Progress) -> ModelRunner:
    """Choose the kernels, size and allocate the KV cache, and put the runner together."""
    assert settings.block_size == loaded.block_size, "the model's fingerprint is for another block size"
    kernels = select_kernels(loaded.device)
    if loaded.device.type == "cuda":
        memory = _profile_memory(loaded, kernels, settings, progress)
        num_blocks = num_blocks_on_gpu(loaded.kv_layout, settings, memory)
    else:
        num_blocks = num_blocks_on_cpu(loaded.kv_layout, settings)
    kv_cache = allocate_kv_cache(loaded.kv_layout, num_blocks, loaded.device)
    runner = ModelRunner(loaded, kv_cache, kernels, _sampler(loaded), settings.max_num_seqs)
    if loaded.device.type == "cuda" and not settings.enforce_eager:
        max_model_len = fit_max_model_len(settings, loaded.max_model_len, num_blocks)
        _capture_graphs(runner, loaded, settings, max_model_len, progress)
    return runner


def _sampler(loaded: LoadedModel) -> Sampler:
    return Sampler(may_wait=loaded.device.type == "cpu")


def _capture_graphs(
    runner: ModelRunner, loaded: LoadedModel, settings: EngineSettings, max_model_len: int, progress: Progress
) -> None:
    """Decode goes on without graphs when the model cannot be captured: a log line says why."""
    captured = select_kernels(loaded.device, shares_prefixes=False)
    shared = select_kernels(loaded.device) if loaded.has_full_attention else captured
    graphs = DecodeGraphs(
        lambda inputs: runner.forward(inputs, captured), shared.pays_to_share, loaded.block_size, loaded.device
    )
    try:
        table_width = -(-max_model_len // loaded.block_size)
        graphs.capture(graph_sizes(settings.max_num_seqs), table_width, CudaCapturer(loaded.device), progress)
    except RuntimeError as error:
        logger.warning("decode runs without graphs, since a step of this model cannot be captured: %s", error)
        return
    runner.attach_graphs(graphs)


def configure_threads(threads: int) -> int:
    """Set torch's threads for this process; 0 takes the cores that the process may use. Returns the number set."""
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def _profile_memory(
    loaded: LoadedModel, kernels: AttentionKernels, settings: EngineSettings, progress: Progress
) -> DeviceMemory:
    """Run the largest batch that the settings allow, over a cache of just its size, and see what it took.

    Graphs are captured as well, and thrown away: their memory has to be known before the cache takes the rest, and
    they have to be captured over the cache that they will read.
    """
    device, layout = loaded.device, loaded.kv_layout
    batch = _largest_batch(settings)
    num_blocks = 1 + max(block for sequence in batch.sequences for block in sequence.block_table)
    torch.cuda.reset_peak_memory_stats(device)
    kv_cache = allocate_kv_cache(layout, num_blocks, device)
    runner = ModelRunner(loaded, kv_cache, kernels, _sampler(loaded), settings.max_num_seqs)
    progress("running the largest batch", 0.0)
    runner.execute(batch)
    peak = torch.cuda.max_memory_allocated(device) - num_blocks * layout.bytes_per_block
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(device)
    if not settings.enforce_eager:
        max_model_len = min(settings.max_model_len or loaded.max_model_len, loaded.max_model_len)
        _capture_graphs(runner, loaded, settings, max_model_len, progress)
    after, total = torch.cuda.mem_get_info(device)
    graphs = max(before - after, 0)
    del runner, kv_cache
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, total - free - torch.cuda.memory_reserved(device), peak, graphs)


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
