"""What an engine launches at its start and afterwards, recorded in a process that does not interpret."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.batch import BlockCopy, ScheduledSequence, SchedulerOutput
from engine.kv_cache import allocate_kv_cache
from engine.load_progress import no_progress
from engine.model_loader import load_model
from engine.model_runner import ModelRunner
from engine.protocol import SamplingParams
from engine.sampler import Sampler
from engine.settings import EngineSettings, ModelSettings
from engine.trial_steps import warm_up_steps
from kernels.compilation import recording, variant
from kernels.dispatch import AttentionKernels
from kernels.heuristics import DeviceModel
from kernels.triton_attention import TritonAttention
from tests.engine.tiny_models import write_tiny_model

HOPPER = DeviceModel(num_sms=132, capability=(9, 0))
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 64, 512
MIN_SAVING = 1 << 18  # bytes: with the table's a tiny model's KV never pays
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Variants:
    at_start: frozenset[str]
    later: frozenset[str]


def variants(directory: Path, family: str, settings: EngineSettings) -> Variants:
    """Of the warm-up alone, and of steps as serving has them."""
    path = write_tiny_model(family, directory, num_attention_heads=8, num_key_value_heads=2)
    model = ModelSettings(path=str(path), dtype="float32")
    loaded = load_model(model, torch.device("cpu"), directory, no_progress, block_size=BLOCK_SIZE)
    kv_cache = allocate_kv_cache(loaded.kv_layout, NUM_BLOCKS, torch.device("cpu"))
    triton = TritonAttention(HOPPER, min_shared_saving=MIN_SAVING)
    kernels = AttentionKernels("triton", triton.store_kv, triton.paged_attention, triton.copy_slots)
    runner = ModelRunner(loaded, kv_cache, kernels, Sampler(), settings.max_num_seqs)
    found: list[frozenset[str]] = []
    for steps in (warm_up_steps(settings, NUM_BLOCKS, MAX_LEN), _served(settings)):
        with recording() as launches:
            for step in steps:
                runner.warm_up(step)
        found.append(frozenset(variant(launch, HOPPER.architecture) for launch in launches))
    return Variants(*found)


def _served(settings: EngineSettings) -> list[SchedulerOutput]:
    """Any mix of decodes, ends of chunks and chunks; some of the decoding ones over one prompt."""
    steps = [SchedulerOutput([], [BlockCopy(3, 7, 5), BlockCopy(4, 8, 16)])]
    source = random.Random(0)
    prefix = list(range(MAX_LEN // BLOCK_SIZE))
    for kinds in ([1], [1, 8], [1, 40], [1, 3, 40], [8], [40], [2, 5], [1, 1, 1, 8, 40]):
        for count in {1, 2, 20, 33, 150} | {settings.max_num_seqs}:
            for shares in (False, True):
                if count > settings.max_num_seqs:
                    continue
                budget = settings.max_num_batched_tokens - count
                rows: list[ScheduledSequence] = []
                for index in range(count):
                    num_new = min(source.choice(kinds), 1 + budget)
                    budget -= num_new - 1
                    cached = MAX_LEN - 40 if shares and num_new == 1 else source.randrange(30)
                    table = prefix if shares else source.sample(range(NUM_BLOCKS), 8)
                    rows.append(_row(index, cached, num_new, table))
                steps.append(SchedulerOutput(rows))
    return steps


def _row(index: int, cached: int, num_new: int, table: list[int]) -> ScheduledSequence:
    tokens = [0] * (cached + num_new)
    return ScheduledSequence(
        f"r{index}", tokens, cached, num_new, array("i", table), _SAMPLING, 0, len(tokens), True
    )  # fmt: skip
