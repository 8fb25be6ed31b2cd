"""engine/settings.py: layers, conversions, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.settings import (
    EngineSettings,
    ServerSettings,
    Settings,
    StoreSettings,
    TenantSettings,
    engine_endpoint,
    load_settings,
    masked,
    runtime_dir,
    settings_environ,
)

KEY_HASH = "ab" * 32


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "radixgate.toml"
    path.write_text(text, "utf-8")
    return path


def error_of(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, environ)
    return caught.value.message


def test_no_file_and_no_environment_are_the_defaults() -> None:
    assert load_settings(None, {"PATH": "/usr/bin"}) == Settings()


def test_later_layers_win_key_by_key(tmp_path: Path) -> None:
    """A section in the environment must not wipe out the file's other keys of that section."""
    path = write(tmp_path, "[server]\nport = 1\nhost = 'a'\n[engine]\nblock_size = 32\n")
    environ = {"RADIXGATE_SERVER__PORT": "2", "RADIXGATE_ENGINE__THREADS": "3"}
    settings = load_settings(path, environ, {"server.port": 4})
    assert settings.server == ServerSettings(host="a", port=4)
    assert settings.engine == EngineSettings(block_size=32, threads=3)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("512 MiB", 512 << 20), ("1.5gib", 3 << 29), ("64KB", 64_000), ("4096", 4096)],
)
def test_byte_sizes_with_units(tmp_path: Path, text: str, size: int) -> None:
    path = write(tmp_path, f'[engine]\nkv_cache_memory = "{text}"\n')
    assert load_settings(path, {}).engine.kv_cache_memory == size
    assert load_settings(None, {"RADIXGATE_ENGINE__KV_CACHE_MEMORY": text}).engine.kv_cache_memory == size


def test_environment_values_are_converted_by_the_keys_type() -> None:
    """A served name of digits stays text, and a tenant list is JSON."""
    settings = load_settings(
        None,
        {
            "RADIXGATE_MODEL__SERVED_NAME": "123",
            "RADIXGATE_ENGINE__ENABLE_PREFIX_CACHING": "false",
            "RADIXGATE_ENGINE__GPU_MEMORY_UTILIZATION": "0.5",
            "RADIXGATE_STORE__DATA_DIR": "/data",
            "RADIXGATE_TENANTS": f'[{{"id": "a", "key_hashes": ["{KEY_HASH}"]}}]',
        },
    )
    assert settings.model.served_name == "123"
    assert settings.engine.enable_prefix_caching is False
    assert settings.engine.gpu_memory_utilization == 0.5
    assert settings.store.data_dir == Path("/data")
    assert settings.tenants == (TenantSettings(id="a", key_hashes=(KEY_HASH,)),)


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        ("[engine]\nblok_size = 1", ("engine.blok_size", "engine.block_size", "radixgate.toml")),
        ("[engin]\nblock_size = 1", ("engin.block_size", "engine.block_size")),
        ("[[tenants]]\nid = 'a'\nkey_hash = []", ("tenants[0].key_hash", "key_hashes")),
        ("[engine]\nblock_size = 0", ("engine.block_size", ">= 1")),
        ("[engine]\nblock_size = '16'", ("engine.block_size", "int")),
        ("[engine]\nblock_size = true", ("engine.block_size", "int")),
        ("[engine]\nkv_cache_memory = '1 apple'", ("engine.kv_cache_memory", "512MiB")),
        ("[engine]\nprefill_chunk_size = 2048", ("engine.prefill_chunk_size", "engine.max_num_batched_tokens")),
        ("[server]\ndrain_seconds = inf", ("server.drain_seconds", "finite")),
        ("[engine]\ndevice = 'tpu'", ("engine.device", "cuda")),
        ("[server]\nport = 70000", ("server.port", "65535")),
        ("[server]\nlog_level = 'loud'", ("server.log_level", "debug")),
        ("[model]\ndtype = 'int3'", ("model.dtype", "bfloat16")),
        ("[store]\nurl = 'localhost:6379'", ("store.url", "redis://")),
        ("engine = 3", ("engine", "table")),
        ("[[tenants]]\nid = 3", ("tenants[0].id", "str")),
        ("[[tenants]]\nid = 'a b'", ("tenants[0].id",)),
        ("[[tenants]]\nid = 'a'\ncache_group = 'a:b'", ("tenants[0].cache_group",)),
        ("[[tenants]]\nid = 'others'", ("tenants[0].id", "reserved")),
        ("[[tenants]]\nid = 'a'\nweight = inf", ("tenants[0].weight",)),
        ("[[tenants]]\nid = 'a'\n[[tenants]]\nid = 'a'", ("tenants[1].id", "twice")),
        ("[[tenants]]\nid = 'a'\nkey_hashes = ['rg-secret']", ("tenants[0].key_hashes", "64 hex")),
        ("[server\n", ("radixgate.toml", "TOML")),
    ],
)
def test_errors_name_the_key(tmp_path: Path, toml: str, parts: tuple[str, ...]) -> None:
    """A setting that is wrong must say which one, or a typo costs its user an afternoon."""
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path, toml), {})
    for part in parts:
        assert part in caught.value.message


def test_a_pasted_api_key_is_not_echoed(tmp_path: Path) -> None:
    """An API key put where its hash belongs must not travel into the log by way of the error."""
    path = write(tmp_path, "[[tenants]]\nid = 'a'\nkey_hashes = ['rg-very-secret']")
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})
    assert "very-secret" not in str(caught.value)


def test_one_key_of_two_tenants_is_refused() -> None:
    """Whose request would it be?"""
    tenants = f'[{{"id": "a", "key_hashes": ["{KEY_HASH}"]}}, {{"id": "b", "key_hashes": ["{KEY_HASH}"]}}]'
    assert "already belongs to tenant 'a'" in error_of({"RADIXGATE_TENANTS": tenants})


def test_single_underscore_is_a_slip_and_service_links_are_not() -> None:
    """RADIXGATE_ENGINE_THREADS was ignored silently; but Kubernetes itself sets RADIXGATE_STORE_PORT=tcp://…"""
    assert "RADIXGATE_ENGINE__THREADS" in error_of({"RADIXGATE_ENGINE_THREADS": "2"})
    links = {"RADIXGATE_STORE_PORT": "tcp://10.0.0.1:6379", "RADIXGATE_SERVICE_HOST": "10.0.0.1"}
    assert load_settings(None, links) == Settings()


def test_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_settings(tmp_path / "absent.toml", {})


@given(
    host=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1),
    port=st.integers(0, 65535),
    seconds=st.floats(0, 1e6),
    memory=st.integers(1, 1 << 40),
    caching=st.booleans(),
    ids=st.lists(st.from_regex(r"[A-Za-z0-9]{1,8}", fullmatch=True), unique=True, max_size=3),
)
def test_settings_environ_is_the_inverse_of_load(
    host: str, port: int, seconds: float, memory: int, caching: bool, ids: list[str]
) -> None:
    """Children get their settings by environment: anything lost or bent on the way runs them with other settings."""
    settings = Settings(
        server=ServerSettings(host=host, port=port, drain_seconds=seconds),
        engine=EngineSettings(kv_cache_memory=memory, enable_prefix_caching=caching),
        store=StoreSettings(data_dir=Path("some where")),
        tenants=tuple(TenantSettings(id=tenant_id, name="Zoë “q”", key_hashes=()) for tenant_id in ids),
    )
    assert load_settings(None, settings_environ(settings)) == settings


def test_masked_shows_no_secret() -> None:
    environ = {
        "RADIXGATE_SECURITY__SECRET": "s3cret",
        "RADIXGATE_STORE__URL": "redis://user:pa55@host:6379/1",
        "RADIXGATE_TENANTS": f'[{{"id": "a", "key_hashes": ["{KEY_HASH}"]}}]',
    }
    shown = str(masked(load_settings(None, environ)))
    assert "redis://user:***@host:6379/1" in shown
    for hidden in ("s3cret", "pa55", KEY_HASH):
        assert hidden not in shown


def test_socket_paths_fit_the_kernel_limit(tmp_path: Path) -> None:
    """A data directory deep in the file system gave `path too long` at the first bind."""
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    for data_dir in (tmp_path, deep):
        endpoint = engine_endpoint(Settings(store=StoreSettings(data_dir=data_dir)))
        assert len(endpoint.removeprefix("ipc://")) < 108
        assert runtime_dir(data_dir).stat().st_mode & 0o777 == 0o700
    other = runtime_dir(deep / "other")
    assert other != runtime_dir(deep)
    for outside in (other, runtime_dir(deep)):
        outside.rmdir()
