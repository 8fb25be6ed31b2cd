"""The engine as a GPU runs it: captured steps, a step in flight, copies beside the computation."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import pytest
import torch

from engine.build import assemble_engine
from engine.engine import LLMEngine
from engine.load_progress import no_progress
from engine.model_loader import load_model
from engine.model_runner import ModelRunner
from engine.protocol import Failure, SamplingParams, Segment, SegmentKind, Submit
from engine.settings import EngineSettings, ModelSettings, Settings, StoreSettings, TierSettings
from tests.engine.test_model_runner import random_prompt
from tests.engine.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (5, 40, 17, 33, 64)
COUNT = 12
SETTINGS = EngineSettings(
    device="cuda", block_size=16, max_num_seqs=8, max_num_batched_tokens=128, prefill_chunk_size=32, max_model_len=512
)
ENGINE_BYTES = 2 << 30  # of the device, for each engine


def engine_of(
    directory: Path, *, host_memory: int = 0, dtype: str = "float32", kv: str = "auto", **changes: object
) -> LLMEngine:
    device = torch.device("cuda")
    model = ModelSettings(path=str(directory), dtype=dtype)
    loaded = load_model(model, device, directory, no_progress, block_size=SETTINGS.block_size, kv_cache_dtype=kv)
    gc.collect()
    torch.cuda.empty_cache()
    # On top of what the process holds: the engine of a comparison's other side counts against the share of this one.
    free, total = torch.cuda.mem_get_info()
    share = (total - free + ENGINE_BYTES) / total
    settings = Settings(
        engine=msgspec.structs.replace(SETTINGS, kv_cache_dtype=kv, gpu_memory_utilization=share, **changes),
        tiers=TierSettings(host_memory=host_memory, disk_size=0),
        store=StoreSettings(data_dir=directory),
    )
    return assemble_engine(loaded, settings, no_progress)


def answers(engine: LLMEngine, sampling: SamplingParams) -> dict[str, str]:
    texts: dict[str, str] = {}
    for index, length in enumerate(LENGTHS):
        segment = Segment.of(SegmentKind.QUESTION, random_prompt(length, index), b"one tenant------")
        engine.add_request(Submit(request_id=f"r{index}", tenant_id="t", segments=(segment,), sampling=sampling))
    while engine.has_work():
        for message in engine.step():
            assert not isinstance(message, Failure), message
            texts[message.request_id] = texts.get(message.request_id, "") + message.text
    assert engine.check_integrity()
    return texts


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_graphs_and_a_step_in_flight_change_no_text(family: str, tmp_path: Path) -> None:
    directory = write_tiny_model(family, tmp_path)
    sampling = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    plain = engine_of(directory, enforce_eager=True, async_scheduling=False)
    expected = answers(plain, sampling)
    engine = engine_of(directory)
    assert isinstance(engine.runner, ModelRunner)
    assert engine.runner.graph_sizes == [1, 2, 4, 8]
    assert answers(engine, sampling) == expected
    assert answers(engine, sampling) == expected  # warm
    assert engine.stats().num_cached_tokens > 0


def test_filters_draw_the_same_with_and_without_graphs(tmp_path: Path) -> None:
    directory = write_tiny_model("llama", tmp_path)
    sampling = SamplingParams(max_tokens=COUNT, temperature=0.9, top_p=0.8, seed=3, ignore_eos=True)
    plain = engine_of(directory, enforce_eager=True, async_scheduling=False)
    assert answers(engine_of(directory), sampling) == answers(plain, sampling)


def test_blocks_come_back_from_host_memory(tmp_path: Path) -> None:
    directory = write_tiny_model("llama", tmp_path)
    sampling = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    engine = engine_of(directory, host_memory=64 << 20)
    expected = answers(engine, sampling)
    while engine.scheduler.manager.evict(1_000):
        engine.idle()
    assert answers(engine, sampling) == expected
    assert engine.tiers is not None
    assert engine.tiers.counters.bytes_written > 0


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_8_bit_kv_is_written_read_and_found_again(kv: str, tmp_path: Path) -> None:
    """The load itself compares the logits with those over 16-bit KV. In 16 bits texts depend on the batch."""
    if kv == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 here")
    sampling = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    engine = engine_of(write_tiny_model("llama", tmp_path), host_memory=64 << 20, dtype="bfloat16", kv=kv)
    assert engine.info().block_bytes == 16 * 3 * 2 * 2 * 16
    assert len(answers(engine, sampling)) == len(LENGTHS)
    while engine.scheduler.manager.evict(1_000):
        engine.idle()
    assert len(answers(engine, sampling)) == len(LENGTHS)
    assert engine.stats().num_cached_tokens > 0
