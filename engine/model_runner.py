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
from collections.abc import Sequence

import torch

from engine.attention import PagedAttention, forward_packed
from engine.batch import ScheduledSequence, SchedulerOutput, StepResult, TransferReport
from engine.block_transfer import BlockTransfer, CpuBlockTransfer, CudaCopyStream, StreamBlockTransfer, host_tensor
from engine.decode_graphs import CudaCapturer, DecodeGraphs, graph_sizes
from engine.errors import ConfigError
from engine.kv_cache import (
    DeviceMemory,
    allocate_kv_cache,
    fit_max_model_len,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
)
from engine.load_progress import Progress
from engine.logits_processors import is_penalised
from engine.logprobs import read_logprobs
from engine.model_loader import LoadedModel
from engine.ranks import RankGroup
from engine.sampler import FetchedTokens, Sampler
from engine.settings import EngineSettings
from engine.step_inputs import StepInputs, pack_step, resolve_tokens
from engine.trial_steps import largest_step, num_blocks_of, warm_up_steps
from kernels.dispatch import AttentionKernels, select_kernels
from kernels.upload import upload

logger = logging.getLogger(__name__)

# Of the largest value in a block: what rounding leaves between two ways to batch the same tokens.
# In 8 bits a rounding may have gone the other way: fp8's numbers are an eighth apart, int8's a 127th of the largest.
_KV_TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float8_e4m3fn: 2e-1,
    torch.int8: 7e-2,
}


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
        ranks: RankGroup | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self._model = loaded.model
        self._device = loaded.device
        self._block_size = loaded.block_size
        self._eos_token_ids = loaded.eos_token_ids
        self._kernels = kernels
        self._sampler = sampler
        self._ranks = ranks
        self._transfer: BlockTransfer | None = None
        self._graphs: DecodeGraphs | None = None
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=loaded.device)
        self._last_rows: dict[str, int] = {}  # request id → its row there

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is done."""
        return self._device.type == "cuda"

    @property
    def graph_sizes(self) -> list[int]:
        """Sequences of the decode steps that are replayed; empty: none is."""
        return [] if self._graphs is None else self._graphs.sizes

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
        return TransferReport(0, 0, 0.0, 0.0) if self._transfer is None else self._transfer.report()

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
        if self._ranks is None:
            return self._launch(output)
        return self._ranks.together(output, self._launch)

    def _launch(self, output: SchedulerOutput) -> PendingStep:
        with torch.inference_mode():
            self._move_blocks(output)
            rows = [sequence for sequence in output.sequences if sequence.sample]
            fetched = None
            if output.sequences:
                logits = self.forward_logits(output.sequences)
                if rows:
                    fetched = self._sample(logits, rows)
        return PendingStep(output.sequences, fetched)

    def _sample(self, logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> FetchedTokens | None:
        """Draw the rows' tokens, and keep them for the next step, which may be put together before they are known on
        the host. None on a rank that only hears of them."""
        newest = self._newest_tokens(rows)
        self._last_rows = {row.request_id: index for index, row in enumerate(rows)}
        if self._ranks is not None and self._ranks.rank:
            self._ranks.share_tokens(self._last_tokens)
            return None
        sampled = self._sampler.sample(logits, rows, self._eos_token_ids, newest)
        self._last_tokens[: len(rows)].copy_(sampled.token_ids)
        if self._ranks is not None:
            self._ranks.share_tokens(self._last_tokens)
        return FetchedTokens(sampled)

    def _newest_tokens(self, rows: Sequence[ScheduledSequence]) -> torch.Tensor | None:
        """What the step before drew for each row, int64 [B], if penalties ask for it; of use with `takes_last` only."""
        if not any(row.takes_last and is_penalised(row.sampling) for row in rows):
            return None
        sources = [self._last_rows[row.request_id] if row.takes_last else 0 for row in rows]
        return self._last_tokens[upload(torch.tensor(sources), self._device)]

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
            return self._forward_eagerly(sequences)

    def warm_up(self, step: SchedulerOutput) -> None:
        """Run a trial step for the kernels that it has compiled, kernel by kernel whatever was captured. Each rank does
        so by itself."""
        with torch.inference_mode():
            self._copy_slots(step)
            if step.sequences:
                self._forward_eagerly(step.sequences)

    def _forward_eagerly(self, sequences: Sequence[ScheduledSequence]) -> torch.Tensor:
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


def build_model_runner(
    loaded: LoadedModel, settings: EngineSettings, progress: Progress, ranks: RankGroup | None = None
) -> ModelRunner:
    """Choose the kernels, size and allocate the KV cache, and put the runner together."""
    assert settings.block_size == loaded.block_size, "the model's fingerprint is for another block size"
    kernels = select_kernels(loaded.device, kv_scales=loaded.kv_scales)
    if loaded.device.type == "cuda":
        memory = _profile_memory(loaded, kernels, settings, progress)
        num_blocks = num_blocks_on_gpu(loaded.kv_layout, settings, memory)
    else:
        num_blocks = num_blocks_on_cpu(loaded.kv_layout, settings)
    if ranks is not None:
        num_blocks = ranks.smallest(num_blocks)
    kv_cache = allocate_kv_cache(loaded.kv_layout, num_blocks, loaded.device)
    runner = ModelRunner(loaded, kv_cache, kernels, _sampler(loaded), settings.max_num_seqs, ranks)
    if loaded.device.type == "cuda":
        _prepare(runner, loaded, settings, progress)
    return runner


def _prepare(runner: ModelRunner, loaded: LoadedModel, settings: EngineSettings, progress: Progress) -> None:
    """Graphs captured and kernels compiled, so that no request waits for either."""
    max_model_len = fit_max_model_len(settings, loaded.max_model_len, runner.num_blocks)
    if not settings.enforce_eager:
        _capture_graphs(runner, loaded, settings, max_model_len, progress)
    progress("compiling kernels", 0.0)
    for step in warm_up_steps(settings, runner.num_blocks, max_model_len):
        runner.warm_up(step)
    progress("compiling kernels", 1.0)


def _sampler(loaded: LoadedModel) -> Sampler:
    return Sampler(may_wait=loaded.device.type == "cpu")


def _capture_graphs(
    runner: ModelRunner, loaded: LoadedModel, settings: EngineSettings, max_model_len: int, progress: Progress
) -> None:
    """Decode goes on without graphs when the model cannot be captured: a log line says why."""
    plain = select_kernels(loaded.device, shares_prefixes=False, kv_scales=loaded.kv_scales)

    def sharing() -> AttentionKernels:
        return select_kernels(loaded.device, captured=True, kv_scales=loaded.kv_scales)

    # Layers with a window do not share: a model of such layers alone has no use for the second graphs.
    graphs = DecodeGraphs(
        runner.forward, plain, sharing if loaded.has_full_attention else None, loaded.block_size, loaded.device
    )
    try:
        table_width = -(-max_model_len // loaded.block_size)
        graphs.capture(graph_sizes(settings.max_num_seqs), table_width, CudaCapturer(loaded.device), progress)
    except RuntimeError as error:
        logger.warning("decode runs without graphs, since a step of this model cannot be captured: %s", error)
        return
    runner.attach_graphs(graphs)


def configure_threads(threads: int, processes: int = 1) -> int:
    """Set torch's threads for this process; 0 takes its part of the cores that it may use. Returns the number set."""
    count = threads or max(1, len(os.sched_getaffinity(0)) // processes)
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
    step = largest_step(settings)
    num_blocks = num_blocks_of(step)
    torch.cuda.reset_peak_memory_stats(device)
    kv_cache = allocate_kv_cache(layout, num_blocks, device)
    runner = ModelRunner(loaded, kv_cache, kernels, _sampler(loaded), settings.max_num_seqs)
    progress("running the largest batch", 0.0)
    try:
        runner.execute(step)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of engine.max_num_batched_tokens = {settings.max_num_batched_tokens} tokens does not fit beside "
            f"the model into the memory of {device}: make it smaller, or take a smaller model",
            param="engine.max_num_batched_tokens",
        ) from error
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
