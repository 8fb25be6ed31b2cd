"""KV in another type than the model's: the scales, the refusals, the fingerprint, and what it does to the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from tokenizers import Tokenizer

from engine import kv_quantization
from engine.attention import PagedAttention, forward_packed
from engine.build import assemble_engine
from engine.engine import LLMEngine
from engine.errors import ConfigError, ModelLoadError
from engine.kv_cache import allocate_kv_cache
from engine.kv_quantization import KV_DTYPES, check_kv_dtype, choose_kv_dtype, measure_scales, scales_for
from engine.load_progress import no_progress
from engine.model_checks import trace_attention
from engine.model_loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.protocol import Failure, SamplingParams, Segment, SegmentKind, Submit
from engine.sampler import Sampler
from engine.settings import EngineSettings, ModelSettings, Settings, TierSettings
from kernels.dispatch import select_kernels
from kernels.metadata import AttentionMetadata
from tests.engine.test_model_runner import advance, random_prompt, sequence
from tests.engine.tiny_models import FAMILIES, write_tiny_model

CPU = torch.device("cpu")
EightBits = Literal["fp8", "int8"]
EIGHT_BITS: tuple[EightBits, ...] = ("fp8", "int8")


def load(directory: Path, kv_cache_dtype: str, dtype: str = "float32", block_size: int = 4) -> LoadedModel:
    settings = ModelSettings(path=str(directory), dtype=dtype)
    return load_model(settings, CPU, directory, no_progress, block_size=block_size, kv_cache_dtype=kv_cache_dtype)


# ---------------------------------------------------------------- scales


def test_fp8_scales_leave_room_and_are_powers_of_two() -> None:
    sizes = torch.tensor([[[224.0, 225.0], [1.0, 0.0]]])
    assert scales_for(sizes, torch.float8_e4m3fn).tolist() == [[[1.0, 2.0], [0.0078125, 1.0]]]


def test_int8_scales_hold_the_largest_and_are_less_than_a_tenth_too_large() -> None:
    sizes = torch.rand(5, 2, 3, generator=torch.Generator().manual_seed(0)) * 100
    scales = scales_for(sizes, torch.int8)
    assert bool((scales * 127 >= sizes * 0.99999).all())
    assert bool((scales * 127 <= sizes * 2.0**0.125).all())
    assert torch.equal(scales.bfloat16().float(), scales)  # what multiplies in bf16 has the same scale
    # What another order of summation changes in the last bits changes none of these thirty.
    assert torch.equal(scales_for(sizes * (1 + 1e-6), torch.int8), scales)


@pytest.mark.parametrize("kv", EIGHT_BITS)
def test_each_layer_part_and_head_has_the_scale_of_its_own_largest(kv: EightBits, tmp_path: Path) -> None:
    """Seen in what is stored of a text that the scales were not made for: near the type's largest, seldom beyond."""
    loaded = load(write_tiny_model("llama", tmp_path), kv)
    assert loaded.kv_scales is not None
    assert loaded.kv_scales.shape == (3, 2, 2)
    runner = quantized_runner(loaded, 64)
    runner.forward_logits([advance(sequence("a", list(b"A text of its own. " * 10), list(range(48))), 190)])
    stored = runner.kv_cache[:47].float().abs().amax((0, 3, 5))
    largest = {"fp8": 448.0, "int8": 127.0}[kv]
    assert bool((stored > largest / 16).all())
    assert bool((stored <= largest).all())


def test_a_model_whose_keys_are_not_finite_has_no_scales(tmp_path: Path) -> None:
    loaded = load(write_tiny_model("llama", tmp_path), "auto")
    facts = trace_attention(loaded.model)
    loaded.model.get_parameter("model.layers.1.input_layernorm.weight").data[0] = torch.inf
    with pytest.raises(ModelLoadError, match="not finite"):
        measure_scales(loaded.model, facts, select_kernels(CPU), tokenizer_of(loaded), torch.int8)


# ---------------------------------------------------------------- what is refused


def test_a_type_that_the_device_cannot_keep_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_quantization, "why_not_kv_dtype", lambda *arguments: "not on this one")
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_dtype = 'fp8': not on this one") as refused:
        choose_kv_dtype("fp8", torch.bfloat16, CPU)
    assert refused.value.param == "engine.kv_cache_dtype"


@pytest.mark.parametrize(("wrong", "kv"), [(1e-3, torch.int8), (1e3, torch.int8), (1e3, torch.float8_e4m3fn)])
def test_scales_that_make_another_model_are_refused(wrong: float, kv: torch.dtype, tmp_path: Path) -> None:
    """Everything cut to the largest element, or everything rounded to nothing."""
    loaded = load(write_tiny_model("llama", tmp_path), "int8")
    assert loaded.kv_scales is not None
    facts, kernels, tokenizer = trace_attention(loaded.model), select_kernels(CPU), tokenizer_of(loaded)
    scales = loaded.kv_scales if kv == torch.int8 else torch.full((3, 2, 2), 1.0)
    assert check_kv_dtype(loaded.model, facts, kernels, tokenizer, kv, scales) < 0.2
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_dtype: .* is not the same model"):
        check_kv_dtype(loaded.model, facts, kernels, tokenizer, kv, scales * wrong)


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    return Tokenizer.from_str(loaded.tokenizer_json.decode())


# ---------------------------------------------------------------- what is kept apart


def test_every_type_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    """KV of another type under one fingerprint would be read as numbers that it is not."""
    directory = write_tiny_model("llama", tmp_path)
    fingerprints = {kv: load(directory, kv).fingerprint for kv in KV_DTYPES}
    assert len(set(fingerprints.values())) == len(KV_DTYPES)
    assert load(directory, "auto").fingerprint == fingerprints["fp32"]
    assert load(directory, "auto", "bfloat16").fingerprint == load(directory, "bf16", "bfloat16").fingerprint


@pytest.mark.parametrize("kv", EIGHT_BITS)
def test_the_same_model_has_the_same_scales_and_other_scales_are_another_model(
    kv: EightBits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model("llama", tmp_path)
    first, second = load(directory, kv), load(directory, kv)
    assert first.kv_scales is not None
    assert second.kv_scales is not None
    assert torch.equal(first.kv_scales, second.kv_scales)
    assert first.fingerprint == second.fingerprint
    monkeypatch.setattr(kv_quantization, "_FP8_ROOM", 4.0)
    monkeypatch.setattr(kv_quantization, "_INT8_STEPS", 1)
    assert load(directory, kv).fingerprint != first.fingerprint


def test_a_block_takes_a_byte_an_element(tmp_path: Path) -> None:
    loaded = load(write_tiny_model("llama", tmp_path), "fp8")
    assert loaded.kv_layout.bytes_per_block == 4 * 3 * 2 * 2 * 16
    assert engine_of(loaded).info().block_bytes == 4 * 3 * 2 * 2 * 16


# ---------------------------------------------------------------- what comes out


def quantized_runner(loaded: LoadedModel, num_blocks: int) -> ModelRunner:
    kv_cache = allocate_kv_cache(loaded.kv_layout, num_blocks, CPU)
    return ModelRunner(loaded, kv_cache, select_kernels(CPU, kv_scales=loaded.kv_scales), Sampler(), max_num_seqs=8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", EIGHT_BITS)
def test_every_family_stays_close_to_itself(kv: EightBits, family: str, tmp_path: Path) -> None:
    """Windows, soft caps, heads of 24: over two chunks, the second of which reads what the first one stored."""
    directory = write_tiny_model(family, tmp_path)
    logits: list[torch.Tensor] = []
    for name in ("auto", kv):
        loaded = load(directory, name)
        runner = quantized_runner(loaded, 20)
        row = sequence("a", list(b"Two chunks of one and the same text."), list(range(19, 9, -1)))
        runner.forward_logits([row := advance(row, 20)])
        logits.append(runner.forward_logits([advance(row, len(row.token_ids) - 20)]))
    difference = (logits[1] - logits[0]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    assert 0 < float(difference) < 0.5


def engine_of(loaded: LoadedModel, *, caching: bool = True, num_blocks: int = 60) -> LLMEngine:
    settings = Settings(
        engine=EngineSettings(
            device="cpu",
            block_size=4,
            kv_cache_memory=num_blocks * loaded.kv_layout.bytes_per_block,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            prefill_chunk_size=16,
            enable_prefix_caching=caching,
        ),
        tiers=TierSettings(host_memory=0 if num_blocks > 30 else 1 << 20, disk_size=0),
    )
    return assemble_engine(loaded, settings, no_progress)


def answers(engine: LLMEngine, prompts: list[list[int]]) -> tuple[list[str], int]:
    """The texts, and how many prompt tokens were found."""
    texts, cached = [""] * len(prompts), 0
    for index, prompt in enumerate(prompts):
        segment = Segment.of(SegmentKind.QUESTION, prompt, b"one tenant------")
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        engine.add_request(Submit(request_id=str(index), tenant_id="t", segments=(segment,), sampling=sampling))
    while engine.has_work():
        for message in engine.step():
            assert not isinstance(message, Failure), message
            texts[int(message.request_id)] += message.text
            cached += message.account.num_cached_tokens if message.account else 0
    assert engine.check_integrity()
    return texts, cached


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("kv", EIGHT_BITS)
def test_i7_a_prefix_that_is_found_changes_no_text(kv: EightBits, family: str, tmp_path: Path) -> None:
    """On the device, out of host memory after an eviction, and copied where two prompts part inside a block."""
    loaded = load(write_tiny_model(family, tmp_path), kv)
    trunk = random_prompt(30, 1)
    prompts = [trunk + random_prompt(9 + number, 2 + number) for number in range(6)]
    plain, _ = answers(engine_of(loaded, caching=False), prompts)
    for num_blocks in (200, 24):
        engine = engine_of(loaded, num_blocks=num_blocks)
        first, again = ([answers(engine, [prompt]) for prompt in prompts] for _ in range(2))
        assert [text for (text,), _ in first] == plain
        assert [text for (text,), _ in again] == plain
        assert sum(cached for _, cached in again) >= 6 * 28
        stats = engine.stats()
        assert (stats.num_evicted_blocks > 0) == (num_blocks < 30)
        assert bool(stats.tiers) == (num_blocks < 30)
        if stats.tiers:
            assert stats.tiers[0].bytes_read > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv", EIGHT_BITS)
def test_the_real_model_reads_the_same_text_almost_alike(kv: EightBits, embedded_model: Path) -> None:
    """Greedy agreement, KL divergence and perplexity over 600 tokens of prose that the scales have not seen."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")[3000:6000]
    rows: list[torch.Tensor] = []
    for name in ("auto", kv):
        loaded = load(embedded_model, name, block_size=16)
        token_ids = tokenizer_of(loaded).encode(text, add_special_tokens=False).ids[:600]
        rows.append(torch.log_softmax(all_logits(loaded, token_ids), dim=-1))
    own, other = rows
    divergence = (own.exp() * (own - other)).sum(-1).mean()
    agreement = (own.argmax(-1) == other.argmax(-1)).float().mean()
    losses = [-row[:-1].gather(1, torch.tensor(token_ids[1:])[:, None]).mean() for row in rows]
    assert float(divergence) < 0.03
    assert float(agreement) > 0.9
    assert abs(float(losses[1] - losses[0])) < 0.03


def all_logits(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    """Of every token, in chunks of 128: all but the first read what others stored."""
    num_blocks = -(-len(token_ids) // 16)
    kv_cache = allocate_kv_cache(loaded.kv_layout, num_blocks, CPU)
    kernels = select_kernels(CPU, kv_scales=loaded.kv_scales)
    parts: list[torch.Tensor] = []
    for start in range(0, len(token_ids), 128):
        chunk = token_ids[start : start + 128]
        metadata = AttentionMetadata.build([range(num_blocks)], [start], [len(chunk)], 16, CPU)
        positions = torch.arange(start, start + len(chunk))
        context = PagedAttention(kv_cache, kernels, metadata)
        with torch.inference_mode():
            rows = torch.arange(len(chunk))
            parts.append(forward_packed(loaded.model, torch.tensor(chunk), positions, context, rows).float())
    return torch.cat(parts)
