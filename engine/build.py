"""From settings to an engine that is ready to serve: the one place where it is put together."""

from __future__ import annotations

import time

import torch

from engine.engine import LLMEngine, new_incarnation
from engine.errors import ConfigError
from engine.kv_cache import fit_max_model_len
from engine.load_progress import Progress
from engine.model_loader import load_model
from engine.model_runner import build_model_runner, configure_threads
from engine.protocol import PROTOCOL_VERSION, EngineInfo
from engine.self_test import prove_reuse
from engine.settings import Settings


def build_engine(settings: Settings, progress: Progress) -> LLMEngine:
    """Load the model, size the KV cache, wire the engine. Raises `ModelLoadError` or `ConfigError`, which say why."""
    configure_threads(settings.engine.threads)
    device = choose_device(settings.engine.device)
    loaded = load_model(
        settings.model, device, settings.store.data_dir, progress, block_size=settings.engine.block_size
    )
    runner = build_model_runner(loaded, settings.engine)
    info = EngineInfo(
        protocol_version=PROTOCOL_VERSION,
        incarnation=new_incarnation(),
        model=loaded.served_name,
        created=int(time.time()),
        fingerprint=loaded.fingerprint,
        max_model_len=fit_max_model_len(settings.engine, loaded.max_model_len, runner.num_blocks),
        block_size=settings.engine.block_size,
        num_blocks=runner.num_blocks,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(device),
        tokenizer_json=loaded.tokenizer_json,
        chat_template=loaded.chat_template,
        special_tokens=loaded.special_tokens,
    )
    engine = LLMEngine(info, settings.engine, runner)
    progress("asking a first question twice", 0.0)
    prove_reuse(engine, caching=settings.engine.enable_prefix_caching)
    progress("engine ready", 1.0)
    return engine


def choose_device(wanted: str) -> torch.device:
    """`auto` takes a GPU when there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device = {wanted!r}, but torch sees no CUDA device", param="engine.device")
    return device
