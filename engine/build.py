"""From settings to an engine that is ready to serve: the one place where it is put together."""

from __future__ import annotations

import logging
import time

import torch

from engine.block_transfer import allocate_pinned_memory
from engine.engine import LLMEngine, new_incarnation
from engine.errors import ConfigError
from engine.kv_cache import fit_max_model_len
from engine.load_progress import Progress
from engine.model_loader import LoadedModel, load_model
from engine.model_runner import ModelRunner, build_model_runner, configure_threads
from engine.protocol import PROTOCOL_VERSION, EngineInfo
from engine.ranks import RankGroup, start_ranks
from engine.self_test import bits_are_guaranteed, prove_reuse
from engine.settings import EngineSettings, Settings, settings_environ, store_url
from engine.tiers.directory import TierDirectory
from engine.tiers.disk_slab import DiskSlab, slab_path
from engine.tiers.disk_tier import DiskTier
from engine.tiers.erasures import ErasureLog
from engine.tiers.host_slab import HostSlab, allocate_host_memory
from engine.tiers.io_thread import IoThread
from engine.tiers.slab import SlabError
from engine.tiers.tiered_cache import TieredCache

logger = logging.getLogger(__name__)


def build_engine(settings: Settings, progress: Progress) -> LLMEngine:
    """Load the model, size the KV cache, wire the engine. Raises `ModelLoadError` or `ConfigError`, which say why."""
    size = settings.engine.tensor_parallel_size
    configure_threads(settings.engine.threads, size)
    device = rank_device(settings.engine, 0)
    ranks = start_ranks(size, device, settings_environ(settings))[0] if size > 1 else None
    return assemble_engine(load_share(settings, device, progress, ranks), settings, progress, ranks)


def load_share(settings: Settings, device: torch.device, progress: Progress, ranks: RankGroup | None) -> LoadedModel:
    """The model, or this rank's share of it."""
    return load_model(
        settings.model,
        device,
        settings.store.data_dir,
        progress,
        block_size=settings.engine.block_size,
        kv_cache_dtype=settings.engine.kv_cache_dtype,
        rank=ranks,
    )


def assemble_engine(
    loaded: LoadedModel, settings: Settings, progress: Progress, ranks: RankGroup | None = None
) -> LLMEngine:
    """An engine, and the tiers below it, around a model that has been loaded."""
    runner = build_model_runner(loaded, settings.engine, progress, ranks)
    info = EngineInfo(
        protocol_version=PROTOCOL_VERSION,
        incarnation=new_incarnation(),
        model=loaded.served_name,
        created=int(time.time()),
        fingerprint=loaded.fingerprint,
        max_model_len=fit_max_model_len(settings.engine, loaded.max_model_len, runner.num_blocks),
        block_size=settings.engine.block_size,
        num_blocks=runner.num_blocks,
        block_bytes=runner.kv_cache[0].nbytes,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        tokenizer_json=loaded.tokenizer_json,
        chat_template=loaded.chat_template,
        special_tokens=loaded.special_tokens,
    )
    engine = LLMEngine(info, settings.engine, runner)
    progress("asking a first question twice", 0.0)
    exact = bits_are_guaranteed(loaded.device, loaded.dtype)
    prove_reuse(
        engine,
        caching=settings.engine.enable_prefix_caching,
        tolerance=0.0 if exact else loaded.logit_tolerance,
    )
    if settings.engine.enable_prefix_caching:
        attach_tiers(engine, runner, settings)
    progress("engine ready", 1.0)
    return engine


def attach_tiers(engine: LLMEngine, runner: ModelRunner, settings: Settings) -> None:
    """Host memory and disk below the device, as far as the settings and this machine have them."""
    block_bytes = runner.kv_cache[0].nbytes
    num_slots = settings.tiers.host_memory // block_bytes
    if not num_slots:
        return
    is_gpu = runner.kv_cache.device.type == "cuda"
    host = HostSlab(num_slots, block_bytes, allocate_pinned_memory if is_gpu else allocate_host_memory)
    runner.attach_host_memory(host.buffer)
    info = engine.info()
    disk = open_disk_tier(settings, info, block_bytes)
    engine.attach_tiers(
        TieredCache(
            host,
            info.block_size,
            bytes.fromhex(info.fingerprint),
            policy=settings.engine.eviction_policy,
            disk=disk,
            write_through_hits=settings.tiers.write_through_hits,
            erasures=ErasureLog(slab_path(settings.store.data_dir, info.fingerprint).with_suffix(".erasures")),
            preload=True,
        )
    )


def open_disk_tier(settings: Settings, info: EngineInfo, block_bytes: int) -> DiskTier | None:
    """None when there is none to be had: the engine serves without it, and says so in its log and figures."""
    num_slots = settings.tiers.disk_size // block_bytes
    if not num_slots:
        return None
    try:
        slab = DiskSlab(slab_path(settings.store.data_dir, info.fingerprint), info.fingerprint, num_slots, block_bytes)
    except SlabError as error:
        logger.error("no disk tier: %s", error.message)
        return None
    # Here, because they bring a store's client, which an engine without a disk tier does without.
    from engine.tiers.index_store import IndexStore, SlabLayout
    from engine.tiers.journal import Journal

    layout = SlabLayout(slab.slab_id, info.fingerprint, slab.manifest.host, num_slots, info.block_size)
    ttl_seconds = settings.tiers.ttl_days * 86_400
    root_key, policy = bytes.fromhex(info.fingerprint), settings.engine.eviction_policy
    journal = Journal(
        IndexStore(store_url(settings), layout, ttl_seconds),
        info.incarnation,
        lambda: TierDirectory(num_slots, info.block_size, root_key, policy),
        oldest=int(time.time()) - ttl_seconds,
    )
    return DiskTier(slab, info.block_size, journal, IoThread(slab))


def rank_device(settings: EngineSettings, rank: int) -> torch.device:
    """Where a rank computes, and from now on this thread's current device: Triton launches, graphs are captured and
    events are recorded there, whatever device their tensors are on. Raises ConfigError when there are too few GPUs."""
    device = choose_device(settings.device)
    size = settings.tensor_parallel_size
    if size > 1 and device.type == "cuda":
        if torch.cuda.device_count() < size:
            raise ConfigError(
                f"engine.tensor_parallel_size = {size}, but torch sees {torch.cuda.device_count()} CUDA devices",
                param="engine.tensor_parallel_size",
            )
        device = torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def choose_device(wanted: str) -> torch.device:
    """`auto` takes a GPU when there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"engine.device = {wanted!r}, but torch sees no CUDA device", param="engine.device")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device = {wanted!r}, but torch sees {torch.cuda.device_count()} CUDA devices, from cuda:0 on",
            param="engine.device",
        )
    return device
