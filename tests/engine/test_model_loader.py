from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    T5Config,
)

from engine import model_loader
from engine.errors import ConfigError, ModelLoadError
from engine.fingerprint import fingerprint
from engine.load_progress import no_progress
from engine.model_checks import check_config, own_logits, trace_attention, verify_paged
from engine.model_loader import LoadedModel, choose_dtype, load_model
from engine.settings import ModelSettings
from kernels.dispatch import AttentionKernels, select_kernels
from tests.engine.tiny_gguf import write_tiny_gguf
from tests.engine.tiny_models import CHATML, EOS_TOKEN_ID, FAMILIES, VOCAB_SIZE, write_model, write_tiny_model

CPU = torch.device("cpu")


def load(path: Path, *, dtype: str = "float32", served_name: str = "", block_size: int = 4) -> LoadedModel:
    settings = ModelSettings(path=str(path), dtype=dtype, served_name=served_name)
    return load_model(settings, CPU, path.parent / "data", no_progress, block_size=block_size)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_model("llama", tmp_path / "tiny-llama")


# ---------------------------------------------------------------- what is loaded


def test_facts_of_a_directory(llama: Path) -> None:
    loaded = load(llama)
    assert loaded.served_name == "tiny-llama"
    assert (loaded.num_layers, loaded.num_heads, loaded.num_kv_heads, loaded.head_dim) == (3, 4, 2, 16)
    assert (loaded.max_model_len, loaded.vocab_size, loaded.dtype) == (512, VOCAB_SIZE, torch.float32)
    assert loaded.eos_token_ids == (EOS_TOKEN_ID,)
    assert loaded.chat_template == CHATML
    assert loaded.special_tokens["eos_token"] == "<|im_end|>"
    assert not loaded.model.training
    assert load(llama, served_name="mine").served_name == "mine"


def test_every_named_end_token_ends_a_turn(llama: Path) -> None:
    """Chat models end turns with a token that only generation_config.json names: their answers would run on."""
    edit_json(llama / "generation_config.json", eos_token_id=[7, 9])
    assert load(llama).eos_token_ids == (7, 9, EOS_TOKEN_ID)


def test_tokenizer_never_truncates(llama: Path) -> None:
    """A truncation setting left in tokenizer.json would cut prompts silently."""
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.save(str(llama / "tokenizer.json"))
    loaded = Tokenizer.from_str(load(llama).tokenizer_json.decode())
    assert len(loaded.encode("a longer text").ids) == len("a longer text")


def test_progress_reports_each_stage_to_its_end(llama: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_model(ModelSettings(path=str(llama)), CPU, llama, lambda *call: seen.append(call), block_size=4)
    assert seen[-1] == ("model ready", 1.0)
    assert ("loading weights", 1.0) in seen
    assert ("digesting the weights", 1.0) in seen
    assert all(0.0 <= fraction <= 1.0 for _, fraction in seen)


def test_transformers_draws_no_bars(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its bars on stderr would break our own line, and show where nothing was to be shown."""
    load(llama)
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def gguf_llama(tmp_path: Path) -> Path:
    return write_tiny_model("llama", tmp_path / "gguf-llama", vocab_size=VOCAB_SIZE + 1)


def test_gguf_gives_the_same_model(gguf_llama: Path, tmp_path: Path) -> None:
    """A GGUF file stores query and key rows in another order; loaded without undoing it, attention is noise."""
    path = write_tiny_gguf(gguf_llama, tmp_path / "tiny.gguf")
    from_gguf, from_directory = load(path), load(gguf_llama)
    assert from_gguf.served_name == "tiny"
    assert from_gguf.chat_template == CHATML
    torch.testing.assert_close(own_logits(from_gguf.model), own_logits(from_directory.model), rtol=0, atol=0)
    assert from_gguf.fingerprint != from_directory.fingerprint


def test_gguf_digit_splitting_is_put_back(gguf_llama: Path, tmp_path: Path) -> None:
    """The conversion of a GGUF tokenizer loses its pre-tokenizer; numbers would be cut wrongly."""
    path = write_tiny_gguf(gguf_llama, tmp_path / "tiny.gguf", pre_tokenizer="smollm")
    assert "Digits" in load(path).tokenizer_json.decode()


def test_dtype_auto_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on a CPU without instructions for it is many times slower than float32."""
    config = FAMILIES["llama"](dtype=torch.float16)
    monkeypatch.setattr(model_loader, "_cpu_flags", lambda: {"avx2"})
    assert choose_dtype("auto", config, CPU) == torch.float32
    monkeypatch.setattr(model_loader, "_cpu_flags", lambda: {"avx2", "avx512_bf16"})
    assert choose_dtype("auto", config, CPU) == torch.bfloat16
    assert choose_dtype("auto", config, torch.device("cuda")) == torch.float16
    assert choose_dtype("float32", config, torch.device("cuda")) == torch.float32
    with pytest.raises(ConfigError, match=r"model\.dtype = 'int8'"):
        choose_dtype("int8", config, CPU)


# ---------------------------------------------------------------- the fingerprint


def test_fingerprint_ignores_where_the_files_lie(llama: Path, tmp_path: Path) -> None:
    """The same model copied elsewhere keeps its cache."""
    shutil.copytree(llama, tmp_path / "copy")
    assert load(llama).fingerprint == load(tmp_path / "copy").fingerprint


def _change_rope(directory: Path) -> None:
    edit_json(directory / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})


def _change_config(directory: Path) -> None:
    edit_json(directory / "config.json", rms_norm_eps=1e-3)


def _change_one_weight(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _change_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|tool|>"])
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("change", [_change_rope, _change_config, _change_one_weight, _change_tokenizer])
def test_fingerprint_sees_a_changed_model(llama: Path, change: Callable[[Path], None]) -> None:
    """KV written by another model of the same name would be read as this one's."""
    before = load(llama).fingerprint
    change(llama)
    assert load(llama).fingerprint != before


def test_fingerprint_sees_how_the_model_is_served(llama: Path) -> None:
    served = [load(llama), load(llama, dtype="bfloat16"), load(llama, block_size=8)]
    assert len({loaded.fingerprint for loaded in served}) == 3


def test_fingerprint_sees_every_part() -> None:
    """Each part on its own; and two parts whose bytes would run together are told apart."""
    parts: dict[str, Any] = {
        "weights_digest": "aa",
        "config": {"model_type": "llama", "hidden_size": 64},
        "rope_parameters": {"rope_theta": 1.0},
        "dtype": "float32",
        "tokenizer_json": b"{}",
        "kv_layout": "layout",
        "kv_scales": b"",
        "format_version": 1,
    }
    changed: dict[str, Any] = {
        "weights_digest": "ab",
        "config": {"model_type": "llama", "hidden_size": 65},
        "rope_parameters": {"rope_theta": 2.0},
        "dtype": "bfloat16",
        "tokenizer_json": b"{ }",
        "kv_layout": "layout2",
        "kv_scales": b"1234",
        "format_version": 2,
    }
    variants = [parts, *({**parts, name: value} for name, value in changed.items())]
    assert len({fingerprint(**variant) for variant in variants}) == len(variants)
    assert fingerprint(**parts) == fingerprint(**{**parts, "config": {**parts["config"], "_name_or_path": "elsewhere"}})


# ---------------------------------------------------------------- refused: the files


def test_missing_files_are_named(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no file .*absent\.gguf"):
        load(tmp_path / "absent.gguf")
    with pytest.raises(ModelLoadError, match="no directory"):
        load(tmp_path / "absent")
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        load(llama)
    (llama / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load(llama)


def test_absent_weights_are_not_made_up(llama: Path) -> None:
    """transformers fills what a checkpoint lacks with random numbers and goes on."""
    edit_json(llama / "config.json", num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"absent or of another shape: model\.layers\.3"):
        load(llama)


def test_no_chat_template_is_refused(llama: Path) -> None:
    (llama / "chat_template.jinja").unlink()
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        load(llama)


def test_hub_model_that_is_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the sentence says what to do instead of showing a connection error."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = ModelSettings(path="radixgate-tests/no-such-model")
    with pytest.raises(ModelLoadError, match="not in the Hugging Face cache"):
        load_model(settings, CPU, tmp_path, no_progress, block_size=4)
    with pytest.raises(ModelLoadError, match="neither a file here nor a model's id"):
        load_model(ModelSettings(path="no--good..name"), CPU, tmp_path, no_progress, block_size=4)


# ---------------------------------------------------------------- refused: what cannot be paged


def _tiny(**extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        **extra,
    }


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (LlamaConfig(**_tiny(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})), "dynamic"),
        (Llama4TextConfig(**_tiny(attention_chunk_size=8)), "chunked"),
        (Gemma3TextConfig(**_tiny(use_bidirectional_attention=True)), "later tokens"),
        (FAMILIES["qwen3"](layer_types=["full_attention", "linear_attention", "full_attention"]), "linear_attention"),
    ],
)
def test_config_refusals(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        check_config(config)


def test_kv_shared_layers_are_refused() -> None:
    config = FAMILIES["gemma3"]()
    config.num_kv_shared_layers = 1
    with pytest.raises(ModelLoadError, match="shares keys and values between layers"):
        check_config(config)


def test_state_space_model_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=EOS_TOKEN_ID
    )
    config.max_position_embeddings = 256
    with pytest.raises(ModelLoadError, match=r"recurrent state|linear_attention"):
        load(write_model(config, tmp_path / "mamba"))


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    """DeepSeek's keys are wider than its values; the block layout has one size."""
    config = DeepseekV3Config(
        **_tiny(
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            num_key_value_heads=2,
            head_dim=8,
            first_k_dense_replace=2,
        )
    )
    with pytest.raises(ModelLoadError, match="paged blocks need them alike"):
        load(write_model(config, tmp_path / "mla"))


def test_longrope_ends_where_its_factor_switches(tmp_path: Path) -> None:
    """Beyond the original length Phi-3 rotates every key by other factors: cached keys would be wrong."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    config = Phi3Config(**_tiny(rope_parameters=rope, original_max_position_embeddings=64))
    assert load(write_model(config, tmp_path / "longrope")).max_model_len == 64


def test_attention_sinks_are_handed_on(tmp_path: Path) -> None:
    """gpt-oss adds a learned logit to every softmax; the proof at load compares with its own attention."""
    config = GptOssConfig(
        **_tiny(
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    )
    assert load(write_model(config, tmp_path / "sinks")).num_layers == 2


def test_unknown_attention_argument_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that we do not know may change the result: ignoring it is the one wrong answer."""
    model = load(llama).model
    attention = model.get_submodule("model.layers.1.self_attn")
    own_forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **kwargs: own_forward(*args, position_bias=1.0, **kwargs))
    with pytest.raises(ModelLoadError, match="layer 1 of LlamaForCausalLM passes 'position_bias'"):
        trace_attention(model)


def test_window_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    """A window longer than the proof's prompts could not be seen by it."""
    model = load(write_tiny_model("gemma2", tmp_path)).model
    attention = model.get_submodule("model.layers.0.self_attn")
    object.__setattr__(attention, "sliding_window", None)
    with pytest.raises(ModelLoadError, match="asks for a window of None tokens, its configuration says 9"):
        trace_attention(model)


# ---------------------------------------------------------------- the proof


class _BrokenKernels:
    """Kernels that change one thing of each call before they do it."""

    def __init__(self, kernels: AttentionKernels, **changes: object) -> None:
        self._kernels = kernels
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def paged_attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._kernels.paged_attention(*args, **{**kwargs, **self._changes})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"scale": 0.1}),
        ("llama", {"sliding_window": 24}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 10}),
        ("gemma2", {"soft_cap": None}),
        ("gemma2", {"sliding_window": 9}),
        ("gemma3", {"scale": 24**-0.5}),
    ],
)
def test_proof_refuses_wrong_attention(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    """The proof must see each single thing that a kernel or a model can get wrong."""
    model = load(write_tiny_model(family, tmp_path)).model
    broken: Any = _BrokenKernels(select_kernels(CPU), **changes)
    with pytest.raises(ModelLoadError, match="logits over KV blocks differ"):
        verify_paged(model, trace_attention(model), broken, 4, own_logits(model))


class _Convolution(torch.nn.Module):
    """Mixes each token with the one before it in the row, as a short convolution does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + 0.5 * hidden.roll(1, dims=1))


def test_a_loaded_model_knows_what_rounding_leaves_of_a_logit(llama: Path) -> None:
    """In the logits' own unit: of their size, as the proof has it, a near tie could not be told from a wrong answer."""
    loaded = load(llama)
    size = own_logits(loaded.model).square().mean().sqrt().item()
    assert loaded.logit_tolerance == pytest.approx(1e-3 * size, rel=1e-3)


def test_proof_refuses_tokens_that_meet_outside_attention(llama: Path) -> None:
    """A state that no configuration field tells of: packed sequences would leak into each other."""
    model = load(llama).model
    layer = model.get_submodule("model.layers.1")
    layer.mlp = _Convolution(model.get_submodule("model.layers.1.mlp"))
    with pytest.raises(ModelLoadError, match="cannot be paged exactly"):
        verify_paged(model, trace_attention(model), select_kernels(CPU), 4, own_logits(model))


def test_heads_that_the_kernels_cannot_hold_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a head of 512 fails in its first step otherwise, with a sentence about tiles."""
    kernels = replace(select_kernels(torch.device("cpu")), name="narrow", max_head_dim=8)
    monkeypatch.setattr(model_loader, "select_kernels", lambda device: kernels)
    with pytest.raises(ModelLoadError, match="heads of 16 elements; the narrow kernels hold up to 8"):
        load(llama)


def test_proof_leaves_the_model_paged(llama: Path) -> None:
    """After the comparison the model must not be left on its own attention."""
    model = load(llama).model
    assert model.config._attn_implementation == "radixgate_paged"
    with pytest.raises(ModelLoadError, match="does not hand keyword arguments on"):
        model(input_ids=torch.tensor([[1]]))
