"""The settings tree. Read once, at start (`load_settings`), then frozen. No torch here: the gateway reads it too.

One TOML file, then `RADIXGATE_SECTION__KEY` environment variables over it. An unknown key is an error that
names the nearest known one; secrets are masked when the settings are printed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 << 20
    max_choices: int = 8  # largest `n`
    drain_seconds: float = 30.0  # after SIGTERM, how long running requests may go on
    log_level: str = "info"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    path: str = "embedded"  # "embedded", a local directory, a .gguf file, or a hub id
    served_name: str = ""  # "": the directory's or hub's own name
    revision: str = ""
    dtype: str = "auto"  # auto, float32, bfloat16, float16


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str = ""  # "": ipc:// in the data directory
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    block_size: int = 16  # token slots in a block
    kv_cache_memory: int = 1 << 30  # bytes of KV on CPU; TOML may say "1GiB"
    gpu_memory_utilization: float = 0.9  # fraction of the device for weights + activations + KV
    max_model_len: int = 0  # tokens; 0: the model's own, as far as the KV cache holds it
    max_num_seqs: int = 32  # sequences in a step
    max_num_batched_tokens: int = 1024  # token_budget of a step
    prefill_chunk_size: int = 512  # prefill is cut at absolute multiples of this
    max_waiting: int = 1024  # requests; beyond, 503
    enable_prefix_caching: bool = True
    ghost_entries: int = 65536  # evicted keys that are remembered
    threads: int = 0  # torch's; 0: the machine's cores


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    data_dir: Path = Path(".radixgate")
    url: str = ""  # "": the embedded store; else redis://…
    port: int = 0  # the embedded store's TCP port; 0: a Unix socket only


class SecuritySettings(msgspec.Struct, frozen=True, kw_only=True):
    secret: str = ""  # "": made once and kept in the data directory, mode 0600


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str = ""
    key_hashes: tuple[str, ...] = ()  # HMAC-SHA256(secret, API key), hex: `radixgate key`
    cache_group: str = ""  # tenants of one group share KV; "": a scope of its own


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    store: StoreSettings = StoreSettings()
    security: SecuritySettings = SecuritySettings()
    tenants: tuple[TenantSettings, ...] = ()
