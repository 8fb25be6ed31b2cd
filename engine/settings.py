"""The settings tree. Read once, at start (`load_settings`), then frozen. No torch here: the gateway reads it too.

    defaults  ◄──  TOML file  ◄──  RADIXGATE_SECTION__KEY  ◄──  command line          (the later wins, key by key)

Every layer is flattened to `section.key`, so one table of known keys checks and converts all of them: an unknown key is
an error that names the nearest known one, a wrong type or range is an error that names the key and where it was set.
`settings_environ` is the inverse: the supervisor hands its children exactly what it read itself.
Secrets are masked when the settings are printed.

Rejected: a settings library. It would bring another validator beside msgspec, and merge by section, not by key.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, cast, get_type_hints
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Meta

from engine.errors import ConfigError
from engine.protocol import MAX_WEIGHT, MIN_WEIGHT

Bytes = Annotated[int, Meta(ge=1, title="bytes")]  # may be written "1GiB", "512MiB", "64KiB"
Size = Annotated[int, Meta(ge=0, title="bytes")]  # the same, or 0
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Weight = Annotated[float, Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)]

_KV_BYTES_ON_CPU = 1 << 30


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    max_body_bytes: Bytes = 8 << 20
    max_choices: Positive = 8  # largest `n`
    drain_seconds: Annotated[float, Meta(ge=0)] = 30.0  # after SIGTERM, how long running requests may go on
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    workers: Positive = 1  # gateway processes that share the port
    tenant_labels: NotNegative = 50  # tenants with metrics of their own; the rest is "other"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    path: str = "embedded"  # "embedded", a local directory, a .gguf file, or a hub id
    served_name: str = ""  # "": the directory's or hub's own name
    revision: str = ""
    dtype: str = "auto"  # auto, float32, bfloat16, float16


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str = ""  # "": ipc:// in the data directory
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    block_size: Positive = 16  # token slots in a block
    kv_cache_memory: Size = (
        0  # bytes of KV; 0: 1 GiB on CPU, on a GPU all that the next one leaves. TOML may say "1GiB"
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"] = "auto"  # auto: the model's own
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9  # of the device, for weights + activations + KV
    enforce_eager: bool = False  # on a GPU: decode without captured graphs
    async_scheduling: bool = True  # on a GPU: the next step is prepared while one runs
    max_model_len: NotNegative = 0  # tokens; 0: the model's own, as far as the KV cache holds it
    max_num_seqs: Positive = 32  # sequences in a step
    max_num_batched_tokens: Positive = 1024  # token_budget of a step
    prefill_chunk_size: Positive = 512  # prefill is cut at absolute multiples of this
    max_waiting: Positive = 1024  # requests; beyond, 503
    enable_prefix_caching: bool = True
    eviction_policy: Literal["lru", "gdsf"] = "lru"  # least recently used, or frequency · cost with ageing
    cached_token_weight: Annotated[float, Meta(ge=0)] = 0.1  # of a cached token in a tenant's fair share; computed: 1
    output_token_weight: Annotated[float, Meta(ge=0)] = 2.0
    fair_step_ms: NotNegative = 60  # of others' prompts in a step, while a tenant is about that uses little; 0: any
    ghost_entries: NotNegative = 65536  # evicted keys that are remembered
    threads: NotNegative = 0  # torch's; 0: the machine's cores
    tensor_parallel_size: Positive = 1  # processes, each with a device and a share of every layer

    @property
    def kv_bytes_on_cpu(self) -> int:
        return self.kv_cache_memory or _KV_BYTES_ON_CPU


class TierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where blocks go that leave the device. Nothing below a device without a prefix cache."""

    host_memory: Size = 512 << 20  # bytes of RAM; 0: no tier below the device
    disk_size: Size = 2 << 30  # bytes of a file in the data directory; 0: no disk tier
    write_through_hits: Positive = 2  # used again that often, a block goes to disk while it is still on the device
    ttl_days: Positive = 14  # what was not used for so long is not restored at a start
    persist_when_idle: bool = True  # bring everything to the disk when the engine rests


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    data_dir: Path = Path(".radixgate")
    url: str = ""  # "": the embedded store; else redis://…
    port: Port = 0  # the embedded store's TCP port; 0: a Unix socket only
    timeout_ms: Positive = 50  # of a request's question to the store; after it the request is served from memory


class SecuritySettings(msgspec.Struct, frozen=True, kw_only=True):
    secret: str = ""  # "": made once and kept in the data directory, mode 0600
    metrics_token: str = ""  # for GET /metrics; "": made once and kept in the data directory, mode 0600
    operator_password_hash: str = ""  # argon2, by `radixgate password`; "": no login by password


class RetrievalSettings(msgspec.Struct, frozen=True, kw_only=True):
    embedder_endpoint: str = ""  # "": ipc:// in the data directory
    embedder_model: str = ""  # a sentence-transformers directory; "": the one that comes along
    reranker: str = ""  # a cross-encoder's directory; "": results are not reranked
    embedder_threads: NotNegative = 0  # micro-batches computed at a time, one core each; 0: the machine's cores
    embedder_batch_size: Positive = 16  # texts in all micro-batches under way; a query waits for one of them at most
    max_file_bytes: Bytes = 64 << 20
    parse_seconds: Annotated[float, Meta(gt=0)] = 60.0  # for a file; then it has failed
    parse_memory: Bytes = 2 << 30  # of the parser's process
    chunk_tokens: Positive = 256  # of the served model, for the `auto` strategy
    chunk_overlap_tokens: NotNegative = 0
    operator_tenant: str = ""  # whose collections may be public: readable, and only readable, by every tenant
    prefill_tokens_per_minute: NotNegative = 20_000  # ahead of time, for a tenant; 0: off


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant that is made in the store if it is not there; from then on the admin API and the CLI change it."""

    id: str
    name: str = ""
    key_hashes: tuple[str, ...] = ()  # HMAC-SHA256(secret, API key), hex: `radixgate key`
    admin_key_hashes: tuple[str, ...] = ()  # may manage this tenant
    operator_key_hashes: tuple[str, ...] = ()  # may manage everything
    cache_group: str = ""  # tenants of one group share KV; "": a scope of its own
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    tokens_per_day: Positive | None = None
    concurrent_requests: Positive | None = None
    weight: Weight = 1.0  # share of the compute, relative to other tenants; under gdsf of the cache, too
    priority: int = 0  # lower goes first, strictly
    max_running: Positive | None = None  # requests in the engine's batch at a time
    kv_floor_tokens: NotNegative = 0  # cached tokens that others cannot take while they have more than their floor
    kv_quota_tokens: NotNegative | None = None  # cached tokens above which its own go first
    no_store: bool = False  # its requests leave nothing in the cache, and find nothing there

    @property
    def all_key_hashes(self) -> tuple[str, ...]:
        return (*self.key_hashes, *self.admin_key_hashes, *self.operator_key_hashes)


class UsageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How usage is counted against limits, kept, and priced."""

    cached_token_factor: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of a cached token, against the token limits
    retention_days: Positive = 35
    price_per_million_tokens: Annotated[float, Meta(ge=0)] = 0.0  # of prompt tokens that were not cached
    price_per_million_cached_tokens: Annotated[float, Meta(ge=0)] = 0.0
    currency: str = "USD"


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """OpenTelemetry, off by default. Needs the extra `radixgate[tracing]`."""

    endpoint: str = ""  # OTLP over HTTP, such as http://localhost:4318; "": no spans
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of requests that no caller has decided on


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    tiers: TierSettings = TierSettings()
    store: StoreSettings = StoreSettings()
    security: SecuritySettings = SecuritySettings()
    usage: UsageSettings = UsageSettings()
    tracing: TracingSettings = TracingSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    tenants: tuple[TenantSettings, ...] = ()


# ---------------------------------------------------------------- reading

PREFIX = "RADIXGATE_"
TEST_PREFIX = "RADIXGATE_TEST_"  # read by the test suite, no settings
_UNITS = MappingProxyType({"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30})
_CHOICES = MappingProxyType(
    {
        "server.log_level": ("debug", "info", "warning", "error"),
        "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    }
)


def _known_keys() -> Mapping[str, object]:
    """`section.key` → its type, `Annotated` included; `tenants` is the one key without a section."""
    keys: dict[str, object] = {}
    for section, section_type in get_type_hints(Settings, include_extras=True).items():
        if isinstance(section_type, type) and issubclass(section_type, msgspec.Struct):
            for name, hint in get_type_hints(section_type, include_extras=True).items():
                keys[f"{section}.{name}"] = hint
        else:
            keys[section] = section_type
    return MappingProxyType(keys)


KNOWN_KEYS = _known_keys()


def load_settings(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object] = MappingProxyType({})
) -> Settings:
    """The settings of this process. `overrides` are `section.key` → value or text, from the command line.

    Raises ConfigError, which names the key and where it was set.
    """
    values: dict[str, object] = {}
    layers = [
        *([(str(path), _read_toml(path), True)] if path else []),
        ("environment", _read_environ(environ), False),
        ("command line", {key: _from_text(key, value) for key, value in overrides.items()}, False),
    ]
    for source, layer, strict in layers:
        for key, value in layer.items():
            values[key] = _convert(key, value, source, strict=strict)
    settings = _build(values)
    _check(settings)
    return settings


def _read_toml(path: Path) -> dict[str, object]:
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    flat: dict[str, object] = {}
    for section, value in cast(dict[str, object], tree).items():
        if isinstance(value, dict):
            flat.update({f"{section}.{key}": leaf for key, leaf in cast(dict[str, object], value).items()})
        else:
            flat[section] = value
    return flat


def _read_environ(environ: Mapping[str, str]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or name.startswith(TEST_PREFIX):
            continue
        key = name.removeprefix(PREFIX).lower().replace("__", ".", 1)
        if "." in key or key in KNOWN_KEYS:
            flat[key] = _from_text(key, text)
        else:
            _refuse_single_underscore(name, text)
    return flat


def _refuse_single_underscore(name: str, text: str) -> None:
    """RADIXGATE_ENGINE_THREADS is a slip; RADIXGATE_STORE_PORT=tcp://… is how Kubernetes tells of a service."""
    if text.startswith("tcp://"):
        return
    for key in KNOWN_KEYS:
        if environ_name(key).replace("__", "_") == name:
            raise ConfigError(f"{name} has no effect: did you mean {environ_name(key)}?", param=key)


def environ_name(key: str) -> str:
    return PREFIX + key.replace(".", "__").upper()


def _from_text(key: str, text: object) -> object:
    """An environment variable's value. Lists and tables are JSON; a plain word stays text and is converted by type."""
    if not isinstance(text, str) or KNOWN_KEYS.get(key) in (str, Path, Bytes, Size):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _convert(key: str, value: object, source: str, *, strict: bool) -> object:
    _refuse_unknown(key, value, source)
    if KNOWN_KEYS[key] in (Bytes, Size) and isinstance(value, str):
        value = _parse_size(key, value, source)
    try:
        return msgspec.convert(value, type=KNOWN_KEYS[key], strict=strict, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise ConfigError(f"{key}{where.rstrip('`')}: {message} (set in {source})", param=key) from error


def _decode_path(expected: type, value: object) -> object:
    if expected is Path and isinstance(value, (str, Path)):
        return Path(value).expanduser()
    raise msgspec.ValidationError(f"Expected `{expected.__name__}`, got `{type(value).__name__}`")


def _refuse_unknown(key: str, value: object, source: str) -> None:
    if key not in KNOWN_KEYS:
        if any(known.startswith(f"{key}.") for known in KNOWN_KEYS):
            raise ConfigError(f"{key} must be a table of settings (set in {source})", param=key)
        raise ConfigError(f"unknown setting {key} in {source}{_nearest(key, KNOWN_KEYS)}", param=key)
    if key == "tenants" and isinstance(value, list):
        for index, tenant in enumerate(cast(list[object], value)):
            for name in _foreign_names(tenant):
                hint = _nearest(name, TenantSettings.__struct_fields__)
                raise ConfigError(f"unknown setting tenants[{index}].{name} in {source}{hint}", param=key)


def _foreign_names(tenant: object) -> list[str]:
    names = cast(dict[str, object], tenant) if isinstance(tenant, dict) else {}
    return [name for name in names if name not in TenantSettings.__struct_fields__]


def _nearest(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {matches[0]}?" if matches else f" (known: {', '.join(known)})"


def _parse_size(key: str, text: str, source: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f'{key}: {text!r} is no size; write bytes, or "512MiB" (set in {source})', param=key)
    number, unit = match.groups()
    return int(float(number) * _UNITS[unit.upper()]) if unit else int(float(number))


def _build(values: Mapping[str, object]) -> Settings:
    tree: dict[str, object] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            cast(dict[str, object], tree.setdefault(section, {}))[name] = value
        else:
            tree[section] = value
    return msgspec.convert(tree, Settings, dec_hook=_decode_path)


# ---------------------------------------------------------------- what one key's type cannot say


def _check(settings: Settings) -> None:
    for key in KNOWN_KEYS:
        if isinstance(value := _value_of(settings, key), float) and not math.isfinite(value):
            raise ConfigError(f"{key}: must be a finite number", param=key)
    for key, choices in _CHOICES.items():
        if (value := _value_of(settings, key)) not in choices:
            raise ConfigError(f"{key}: {value!r} is not one of {', '.join(choices)}", param=key)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", settings.engine.device):
        raise ConfigError(
            f"engine.device: {settings.engine.device!r} is not one of auto, cpu, cuda, cuda:N", param="engine.device"
        )
    if settings.tiers.disk_size and not settings.tiers.host_memory:
        raise ConfigError(
            "tiers.disk_size: blocks reach the disk through host memory; set tiers.host_memory, or this to 0",
            param="tiers.disk_size",
        )
    _check_ranks(settings)
    _check_budget(settings.engine)
    _check_chunks(settings.retrieval)
    _check_urls(settings)
    check_tenants(settings.tenants)


def _check_ranks(settings: Settings) -> None:
    if settings.engine.tensor_parallel_size == 1:
        return
    if settings.tiers.host_memory:
        raise ConfigError(
            "engine.tensor_parallel_size above 1 keeps no blocks below the device, since each rank has only its own "
            "heads' part of a block: set tiers.host_memory and tiers.disk_size to 0",
            param="tiers.host_memory",
        )
    if ":" in settings.engine.device:
        raise ConfigError(
            f"engine.device = {settings.engine.device!r} names one device, for "
            f"engine.tensor_parallel_size = {settings.engine.tensor_parallel_size} of them: say cuda",
            param="engine.device",
        )


def _check_budget(engine: EngineSettings) -> None:
    """Beside everyone else's decoding a chunk must fit, or a prompt would wait as long as others stream."""
    needed = engine.prefill_chunk_size + engine.max_num_seqs - 1
    if engine.max_num_batched_tokens < needed:
        raise ConfigError(
            f"engine.max_num_batched_tokens ({engine.max_num_batched_tokens}) must hold a chunk beside the decoding of "
            f"everyone else: engine.prefill_chunk_size ({engine.prefill_chunk_size}) + engine.max_num_seqs "
            f"({engine.max_num_seqs}) - 1 = {needed}",
            param="engine.max_num_batched_tokens",
        )


def _check_chunks(retrieval: RetrievalSettings) -> None:
    if retrieval.chunk_overlap_tokens > retrieval.chunk_tokens // 2:
        raise ConfigError(
            f"retrieval.chunk_overlap_tokens ({retrieval.chunk_overlap_tokens}) must not be above half of "
            f"retrieval.chunk_tokens ({retrieval.chunk_tokens})",
            param="retrieval.chunk_overlap_tokens",
        )


def _check_urls(settings: Settings) -> None:
    if settings.engine.endpoint and not re.match(r"(ipc|tcp)://.", settings.engine.endpoint):
        raise ConfigError("engine.endpoint must begin with ipc:// or tcp://", param="engine.endpoint")
    if settings.retrieval.embedder_endpoint and not re.match(r"(ipc|tcp)://.", settings.retrieval.embedder_endpoint):
        raise ConfigError(
            "retrieval.embedder_endpoint must begin with ipc:// or tcp://", param="retrieval.embedder_endpoint"
        )
    if settings.store.url and not re.match(r"(rediss?|valkeys?|unix)://.", settings.store.url):
        raise ConfigError("store.url must begin with redis://, rediss:// or unix://", param="store.url")
    if not settings.server.host:
        raise ConfigError("server.host must not be empty", param="server.host")


# Names in the engine's accounts that are no tenant's: what the operator has published, the rest of a full ledger, and
# whoever pressed a tenant.
PUBLIC_OWNER = "public"
RESERVED_OWNERS = (PUBLIC_OWNER, "other", "others")

_TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_HASH = re.compile(r"[0-9a-f]{64}")


def check_tenants(tenants: Sequence[TenantSettings]) -> None:
    """Ids are ids, and a key belongs to one tenant. Raises `ConfigError`, which never shows what stands for a hash."""
    owners: dict[str, str] = {}
    seen: set[str] = set()
    for index, tenant in enumerate(tenants):
        where = f"tenants[{index}]"
        for name, value in (("id", tenant.id), ("cache_group", tenant.cache_group or "none")):
            if not _TENANT_ID.fullmatch(value):
                raise ConfigError(
                    f"{where}.{name}: {value!r} must be 1 to 64 of A-Z a-z 0-9 . _ -", param=f"{where}.{name}"
                )
        if tenant.id in seen:
            raise ConfigError(f"{where}.id: {tenant.id!r} is used twice", param=f"{where}.id")
        seen.add(tenant.id)
        if tenant.id in RESERVED_OWNERS:
            raise ConfigError(f"{where}.id: {tenant.id!r} is a reserved name", param=f"{where}.id")
        _check_key_hashes(tenant, f"{where}.key_hashes", owners)


def _check_key_hashes(tenant: TenantSettings, where: str, owners: dict[str, str]) -> None:
    for index, key_hash in enumerate(tenant.all_key_hashes):
        at = f"{where}[{index}]"
        if not _KEY_HASH.fullmatch(key_hash):
            raise ConfigError(f"{at}: not a hash of `radixgate key` (64 hex digits); never the key itself", param=at)
        if (other := owners.setdefault(key_hash, tenant.id)) != tenant.id:
            raise ConfigError(f"{at}: this key already belongs to tenant {other!r}", param=at)


def _value_of(settings: Settings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


# ---------------------------------------------------------------- handing on, printing


def settings_environ(settings: Settings) -> dict[str, str]:
    """Environment variables from which `load_settings(None, …)` makes equal settings."""
    return {environ_name(key): _to_text(_value_of(settings, key)) for key in KNOWN_KEYS}


def _to_text(value: object) -> str:
    return (
        value
        if isinstance(value, str)
        else str(value)
        if isinstance(value, Path)
        else msgspec.json.encode(value).decode()
    )


def masked(settings: Settings) -> dict[str, object]:
    """`section.key` → value, fit for a log: no secret, no key hash, no password in the store's URL."""
    return dict(_masked_items(settings))


def _masked_items(settings: Settings) -> Iterator[tuple[str, object]]:
    for key in KNOWN_KEYS:
        value = _value_of(settings, key)
        if key in ("security.secret", "security.metrics_token", "security.operator_password_hash"):
            yield key, "***" if value else ""
        elif key == "store.url":
            yield key, _mask_password(str(value))
        elif key == "tenants":
            yield key, [f"{tenant.id} ({len(tenant.all_key_hashes)} keys)" for tenant in settings.tenants]
        else:
            yield key, str(value) if isinstance(value, Path) else value


def _mask_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    location = parts.netloc.replace(f":{parts.password}@", ":***@")
    return urlunsplit(parts._replace(netloc=location))


# ---------------------------------------------------------------- where the processes meet

_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 with the final zero; zmq and Redis want some room


def runtime_dir(data_dir: Path) -> Path:
    """The directory of this instance's Unix sockets, made with mode 0700.

    Inside the data directory, unless that lies so deep that a socket's path would be too long for the kernel.
    """
    directory = data_dir.resolve() / "run"
    if len(os.fsencode(directory)) + len("/engine.sock") > _MAX_SOCKET_PATH:
        digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
        directory = Path(tempfile.gettempdir()) / f"radixgate-{os.getuid()}-{digest}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise ConfigError(f"{directory} belongs to another user: its sockets cannot be trusted", param="store.data_dir")
    return directory


def embedder_endpoint(settings: Settings) -> str:
    """Where the embedder listens: `retrieval.embedder_endpoint`, else a Unix socket of this instance."""
    directory = runtime_dir(settings.store.data_dir)
    return settings.retrieval.embedder_endpoint or f"ipc://{directory / 'embedder.sock'}"


def store_url(settings: Settings) -> str:
    """Where the store is reached: `store.url`, else the embedded store of this instance."""
    return settings.store.url or f"unix://{runtime_dir(settings.store.data_dir) / 'store.sock'}"


def engine_endpoint(settings: Settings) -> str:
    """Where the engine listens: `engine.endpoint`, else a Unix socket of this instance."""
    return settings.engine.endpoint or f"ipc://{runtime_dir(settings.store.data_dir) / 'engine.sock'}"
