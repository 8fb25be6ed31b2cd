"""Small random models of every supported family, written to disk like real ones: config, safetensors, tokenizer.

The tokenizer is one token a byte, plus three special tokens, so any text round-trips. The weights are drawn wider than
transformers would, so that attention decides the logits: with its own 0.02 every model answers nearly uniformly, and a
wrong window or a missing soft cap would pass any comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + 3
EOS_TOKEN_ID = NUM_BYTES + 1
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": NUM_BYTES,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": NUM_BYTES + 2,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# Every window is shorter than the prompts of the proof at load; every soft cap is low enough to bite.
FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **extra: LlamaConfig(**{**_COMMON, **extra}),
    "qwen2": lambda **extra: Qwen2Config(**{**_COMMON, **extra}),
    "qwen3": lambda **extra: Qwen3Config(**{**_COMMON, "head_dim": 32, **extra}),
    "mistral": lambda **extra: MistralConfig(**{**_COMMON, "sliding_window": 9, **extra}),
    "gemma2": lambda **extra: Gemma2Config(
        **{
            **_COMMON,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "layer_types": _ALTERNATING,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
            **extra,
        }
    ),
    "gemma3": lambda **extra: Gemma3TextConfig(
        **{
            **_COMMON,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "layer_types": _ALTERNATING,
            **extra,
        }
    ),
    "phi3": lambda **extra: Phi3Config(
        **{**_COMMON, "hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, **extra}
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; ids 0 to 255 in the order of the byte-level alphabet, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (IM_START, IM_END, PAD)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=IM_START, eos_token=IM_END, pad_token=PAD)
    wrapped.chat_template = CHATML
    return wrapped


def write_model(
    config: PreTrainedConfig, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """A random causal LM of `config`, saved into `directory` with its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def write_tiny_model(
    family: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **extra: object
) -> Path:
    """A tiny model of one of `FAMILIES`; `extra` overrides configuration fields."""
    return write_model(FAMILIES[family](**extra), directory, seed=seed, dtype=dtype)
