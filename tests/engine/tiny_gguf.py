"""A tiny Llama written as a GGUF file, in the layout that llama.cpp's converter gives it."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from tests.engine.tiny_models import CHATML, IM_END, IM_START, PAD, byte_tokenizer

_LAYER_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_tiny_gguf(model_dir: Path, path: Path, *, pre_tokenizer: str = "default") -> Path:
    """The Llama in `model_dir`, as fp32 GGUF. Its vocabulary must be one larger than the byte tokenizer's."""
    config = LlamaConfig.from_pretrained(model_dir)
    assert config.num_key_value_heads is not None
    assert config.rope_parameters is not None
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters.get("rope_theta") or 0.0))
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(writer, pre_tokenizer)
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        writer.add_tensor(
            _gguf_name(name), _permuted(name, tensor, config.num_attention_heads, config.num_key_value_heads).numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: gguf.GGUFWriter, pre_tokenizer: str) -> None:
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {IM_START, IM_END, PAD}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    types = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    # GGUF cannot store an empty list of merges: one more token, merged from two bytes that no test text holds.
    writer.add_token_list([*tokens, tokens[0] + tokens[1]])
    writer.add_token_types([*types, gguf.TokenType.NORMAL])
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(vocabulary[IM_START])
    writer.add_eos_token_id(vocabulary[IM_END])
    writer.add_pad_token_id(vocabulary[PAD])
    writer.add_chat_template(CHATML)


def _gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in fixed:
        return fixed[name] + ".weight"
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{_LAYER_TENSORS['.'.join(rest)]}.weight"


def _permuted(name: str, tensor: torch.Tensor, query_heads: int, kv_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours where transformers rotates halves, so its query and key rows are interleaved."""
    if "q_proj" in name:
        num_heads = query_heads
    elif "k_proj" in name:
        num_heads = kv_heads
    else:
        return tensor
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
