"""gateway/cli.py: commands, flags, exit codes; and what a first run makes for itself."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.settings import Settings, StoreSettings, TenantSettings
from gateway.auth import hash_api_key
from gateway.cli import _parser, main, settings_of
from gateway.demo import STEPS, demo_documents
from gateway.first_run import demo_key_path, with_demo_tenant
from retrieval.documents import parse
from tests.gateway.conftest import RunningGateway

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No radixgate.toml of the developer's, and a data directory of the test's own."""
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- flags and settings


def test_unknown_setting_ends_with_2_and_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--set", "engine.blok_size=16"]) == 2
    assert "engine.block_size" in capsys.readouterr().err


def test_wrong_value_names_flag_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "eighty"]) == 2
    assert capsys.readouterr().err == "radixgate: server.port: Expected `int`, got `str` (set in command line)\n"


def test_flags_go_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """./radixgate.toml is read without being named, and each later layer wins."""
    (tmp_path / "radixgate.toml").write_text("[server]\nport = 1\nhost = '127.0.0.1'\n")
    assert "127.0.0.1:1" in doctor_line("port", capsys)
    monkeypatch.setenv("RADIXGATE_SERVER__PORT", "2")
    assert "127.0.0.1:2" in doctor_line("port", capsys)
    assert "127.0.0.1:3" in doctor_line("port", capsys, "--port", "3")


def test_flags_that_only_turn_something_on_are_settings_too() -> None:
    flags = ("--enforce-eager", "--tensor-parallel-size", "2", "--set", "tiers.disk_size=0")
    arguments = _parser().parse_args(["serve", *flags])
    with pytest.raises(ConfigError, match=r"tiers\.host_memory"):  # two processes, and what does not go with them
        settings_of(arguments)
    arguments.settings.append("tiers.host_memory=0")
    assert settings_of(arguments).engine.enforce_eager
    assert settings_of(arguments).engine.tensor_parallel_size == 2
    assert not settings_of(_parser().parse_args(["serve"])).engine.enforce_eager


def test_the_kv_type_is_a_flag_and_a_wrong_one_names_the_setting() -> None:
    serve = _parser()
    assert settings_of(serve.parse_args(["serve"])).engine.kv_cache_dtype == "auto"
    assert settings_of(serve.parse_args(["serve", "--kv-cache-dtype", "fp8"])).engine.kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_dtype.*'fp4'"):
        settings_of(serve.parse_args(["serve", "--kv-cache-dtype", "fp4"]))


def test_missing_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("radixgate ")


# ---------------------------------------------------------------- key, first run


def test_key_prints_a_key_and_the_hash_that_authenticates_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A hash made with another secret than the server's never let anybody in."""
    assert main(["key", "--data-dir", "data"]) == 0
    printed = capsys.readouterr().out
    key = re.search(r"^key\s+(rg-\S+)", printed, re.M)
    key_hash = re.search(r"^hash\s+([0-9a-f]{64})", printed, re.M)
    assert key is not None
    assert key_hash is not None
    secret = Path("data/secret").read_text().strip().encode()
    assert hash_api_key(secret, key[1]) == key_hash[1]


def test_first_run_makes_a_demo_tenant_whose_key_stays(tmp_path: Path) -> None:
    """A new key at each start would break every client at each restart."""
    settings = Settings(store=StoreSettings(data_dir=tmp_path))
    first = with_demo_tenant(settings)
    key_file = demo_key_path(tmp_path)
    key = key_file.read_text().strip()
    secret = (tmp_path / "secret").read_text().strip().encode()
    assert [tenant.key_hashes for tenant in first.tenants] == [(hash_api_key(secret, key),)]
    assert with_demo_tenant(settings) == first
    for path in (key_file, tmp_path / "secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_configured_tenants_get_no_demo_key(tmp_path: Path) -> None:
    """A key that nobody asked for is a door that nobody watches."""
    settings = Settings(store=StoreSettings(data_dir=tmp_path), tenants=(TenantSettings(id="a"),))
    assert with_demo_tenant(settings) is settings
    assert not demo_key_path(tmp_path).exists()


# ---------------------------------------------------------------- doctor


def doctor_checks(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json", *flags])
    return code, {check["name"]: check for check in json.loads(capsys.readouterr().out)}


def doctor_line(name: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    return doctor_checks(capsys, *flags)[1][name]["detail"]


def test_doctor_passes_a_sound_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = doctor_checks(capsys, "--port", "0", "--set", "engine.kv_cache_memory=1MiB")
    assert {name: check["detail"] for name, check in checks.items() if check["status"] == "fail"} == {}
    assert code == 0
    assert set(checks) == {"python", "config", "data dir", "model", "device", "memory", "store", "port", "server"}


def test_doctor_says_what_to_do(gateway: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fail` without a way out sends the user to the source."""
    (tmp_path / "file").touch()
    code, checks = doctor_checks(
        capsys, "--port", str(gateway.port), "--model", "./none.gguf", "--device", "cuda:9", "--data-dir", "file/data",
        "--set", "engine.kv_cache_memory=900000GiB",
    )  # fmt: skip
    assert code == 1
    assert {name for name, check in checks.items() if check["status"] == "fail"} >= {"port", "model", "data dir"}
    assert checks["memory"]["status"] == "warn"
    assert all(check["advice"] for check in checks.values() if check["status"] != "ok")


# ---------------------------------------------------------------- demo


def test_demo_prints_one_object_a_request(gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", f"{gateway.url}/v1", "--api-key", gateway.keys["alice"]]
    assert main(["demo", "--json", *flags]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [outcome["step"] for outcome in objects] == [1, 2, 3]
    for outcome in objects:
        assert set(outcome) == {"step", "prompt_tokens", "cached_tokens", "ttft_s", "text"}
        assert 0 <= outcome["cached_tokens"] < outcome["prompt_tokens"]
        assert outcome["text"]


def test_demo_names_a_refusal(gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong key ended in a traceback."""
    assert main(["demo", "--base-url", f"{gateway.url}/v1", "--api-key", "rg-wrong"]) == 1
    assert "401" in capsys.readouterr().err


def test_demo_without_a_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--base-url", "http://127.0.0.1:9/v1", "--api-key", "rg-x"]) == 1
    assert "127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_demo_documents_are_packaged_and_repeat_exactly() -> None:
    """The demo shows reuse only if its requests share their documents, byte for byte, and are long enough to matter."""
    documents = parse(demo_documents())
    assert demo_documents() == demo_documents()
    assert len(documents) == 3
    assert all(200 < len(document.text.split()) < 400 for document in documents)
    assert all(document.title and document.id for document in documents)
    assert STEPS[0][2] == STEPS[1][2] != STEPS[2][2]
