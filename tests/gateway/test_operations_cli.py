"""The operator's commands: settings, backup and restore, the support bundle, a look at a running server."""

from __future__ import annotations

import asyncio
import fcntl
import io
import re
import socket
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.errors import ConfigError, StoreUnavailableError
from engine.settings import SecuritySettings, ServerSettings, Settings, StoreSettings, TenantSettings
from gateway import backup
from gateway.cli import main
from gateway.dashboard.login import Login
from gateway.doctor import check_port, check_server
from gateway.first_run import operator_password_path, with_operator_password
from gateway.store import EmbeddedStore
from gateway.store_client import StoreClient
from gateway.supervisor import free_port, running_supervisor
from gateway.support_bundle import run_support_bundle
from gateway.tenants import TenantDirectory
from gateway.top import run_top
from tests.gateway.operated import METRICS_TOKEN, ask, run_operated

SECRET = "the-servers-secret-for-tests"
KEY_HASH = "ab" * 32


@pytest.fixture(autouse=True)
def no_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings_in(data_dir: Path) -> Settings:
    return Settings(
        store=StoreSettings(data_dir=data_dir, url=""),
        security=SecuritySettings(secret=SECRET, metrics_token=METRICS_TOKEN, operator_password_hash="$argon2$secret"),
        tenants=(TenantSettings(id="acme", key_hashes=(KEY_HASH,)),),
    )


def test_config_show_masks_secrets_and_shows_what_was_set(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = {"security.secret": SECRET, "security.metrics_token": METRICS_TOKEN, "store.url": "redis://u:pass@h:1"}
    sets = [part for key, value in secrets.items() for part in ("--set", f"{key}={value}")]
    assert main(["config", "show", "--port", "9", *sets]) == 0
    shown = capsys.readouterr().out
    assert "server.port = 9" in shown
    assert "server.host" not in shown, "only what was set"
    assert not any(secret in shown for secret in (SECRET, METRICS_TOKEN, "pass@"))
    assert main(["config", "show", "--effective"]) == 0
    assert 'server.host = "127.0.0.1"' in capsys.readouterr().out


def test_config_check_names_the_key_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 0
    assert main(["config", "check", "--set", "server.workres=2"]) == 2
    assert "server.workers" in capsys.readouterr().err


def test_reload_without_a_server_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A stale pid in a file left behind must not be signalled: it may be anybody's by now."""
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "serve.lock").write_text("1")
    assert running_supervisor(tmp_path) is None
    assert main(["reload", "--data-dir", str(tmp_path)]) == 2
    assert "no `radixgate serve` runs" in capsys.readouterr().err


@pytest.mark.redis
def test_a_backup_brings_everything_back_on_a_new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup that was never restored is none. Uploaded files are in it; keys with a time limit keep it."""
    old, new = settings_in(tmp_path / "old"), settings_in(tmp_path / "new")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "secret").write_text("a stored secret\n")

    async def fill(store: StoreClient) -> None:
        commands = [("SET", f"radixgate:key:{i}", bytes([i % 256, 0, 255])) for i in range(1200)]
        await store.fetch(*commands, ("HSET", "radixgate:hash", "a", 1), ("SET", "radixgate:short", "x", "PX", 600_000))
        await store.fetch(("SET", "rg:acme:file:F:bytes", b"\x00an uploaded file"), ("SET", "foreign", "not ours"))
        await store.fetch(("HSET", "radixgate:kv:{slab}:blocks", "where", "blocks lie on this machine"))

    with_store(old, fill)
    file = tmp_path / "backup.tar.gz"
    monkeypatch.setattr(backup, "_PART_BYTES", 4096)
    assert backup.run_backup(old, file) == 0
    with tarfile.open(file) as archive:
        assert sum(name.startswith("store/") for name in archive.getnames()) > 1, "in parts"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert backup.run_restore(new, file) == 0

    async def look(store: StoreClient) -> None:
        values = await store.fetch(*(("GET", f"radixgate:key:{i}") for i in range(1200)))
        assert values == [bytes([i % 256, 0, 255]) for i in range(1200)]
        answers = await store.fetch(("HGETALL", "radixgate:hash"), ("PTTL", "radixgate:short"), ("EXISTS", "foreign"))
        assert answers[0] in ([b"a", b"1"], {b"a": b"1"})
        assert isinstance(answers[1], int)
        assert 0 < answers[1] <= 600_000
        assert answers[2] == 0
        answers = await store.fetch(("GET", "rg:acme:file:F:bytes"), ("EXISTS", "radixgate:kv:{slab}:blocks"))
        assert answers == [b"\x00an uploaded file", 0]

    with_store(new, look)
    assert (tmp_path / "new" / "secret").read_text() == "a stored secret\n"


def with_store(settings: Settings, work: Callable[[StoreClient], object]) -> None:
    async def run() -> None:
        embedded = EmbeddedStore(settings.store.data_dir, on_line=lambda _name, _line: None)
        await embedded.start()
        client = StoreClient(embedded.url)
        try:
            await work(client)  # type: ignore[misc]
        finally:
            await client.close()
            await embedded.stop()

    asyncio.run(run())


def test_what_is_no_backup_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("something"), io.BytesIO())
    with pytest.raises(ConfigError, match="no backup"):
        backup.run_restore(settings_in(tmp_path), file)
    header = msgspec.json.encode(backup.Header(99, 0.0))
    with tarfile.open(file, "w:gz") as archive:
        member = tarfile.TarInfo("backup.json")
        member.size = len(header)
        archive.addfile(member, io.BytesIO(header))
    with pytest.raises(ConfigError, match="format 99"):
        backup.run_restore(settings_in(tmp_path), file)
    for other in (tmp_path / "missing.tar.gz", Path(__file__)):
        with pytest.raises(ConfigError, match="cannot be read as a backup"):
            backup.run_restore(settings_in(tmp_path), other)


@pytest.mark.redis
def test_a_backup_of_nothing_is_refused_and_leaves_the_last_one(tmp_path: Path) -> None:
    """A misspelt data directory gave an empty backup, in the place of the good one."""
    file = tmp_path / "backup.tar.gz"
    file.write_text("the last good one")
    with pytest.raises(ConfigError, match="no store in"):
        backup.run_backup(settings_in(tmp_path / "mispelt"), file)
    assert not (tmp_path / "mispelt").exists()
    away = msgspec.structs.replace(settings_in(tmp_path), store=StoreSettings(url=f"unix://{tmp_path}/nobody.sock"))
    with pytest.raises(StoreUnavailableError):
        backup.run_backup(away, file)
    assert [path.name for path in tmp_path.iterdir()] == ["backup.tar.gz"]
    assert file.read_text() == "the last good one"


def test_bench_without_a_name_lists_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "come with the source" in capsys.readouterr().err
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^soak +mixed load with trouble", shown, re.MULTILINE)
    assert "chat_client" not in shown
    assert main(["bench", "saok"]) == 2
    assert "soak" in capsys.readouterr().err


def test_the_support_bundle_holds_metrics_and_no_secret(tmp_path: Path) -> None:
    with run_operated(tmp_path, "") as gateway:
        ask(gateway, "a private question")
        settings = msgspec.structs.replace(settings_in(tmp_path), server=ServerSettings(port=gateway.port))
        assert run_support_bundle(settings, tmp_path / "bundle.tar.gz") == 0
        keys = list(gateway.keys.values())
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        parts = {name: archive.extractfile(name) for name in archive.getnames()}
        texts = {name: file.read().decode() for name, file in parts.items() if file is not None}
    assert "radixgate_requests_total" in texts["metrics/gateway.txt"]
    assert "radixgate_engine_steps_total" in texts["metrics/engine.txt"]
    everything = "".join(texts.values())
    secrets = (SECRET, METRICS_TOKEN, KEY_HASH, "$argon2$secret", "a private question", *keys)
    assert not [secret for secret in secrets if secret in everything]


def test_the_support_bundle_of_a_dead_server_says_so(tmp_path: Path) -> None:
    """It is needed most when nothing answers."""
    settings = msgspec.structs.replace(settings_in(tmp_path), server=ServerSettings(port=9))
    assert run_support_bundle(settings, tmp_path / "bundle.tar.gz") == 0
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        assert "metrics/engine.txt.error" in archive.getnames()


def test_top_shows_tenants_by_their_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_operated(tmp_path, "") as gateway:
        for tenant, count in (("alice", 1), ("bob", 3)):
            for _ in range(count):
                ask(gateway, "the same question of some length, again", tenant)
        gateway.engine.metrics = (
            b'radixgate_engine_requests_now{state="running"} 2\nradixgate_engine_requests_now{state="waiting"} 0\n'
            b'radixgate_engine_blocks{state="active"} 3\nradixgate_engine_blocks{state="cached"} 4\n'
            b'radixgate_engine_blocks{state="free"} 5\nradixgate_engine_prefill_tokens_per_second 900\n'
        )
        settings = msgspec.structs.replace(settings_in(tmp_path), server=ServerSettings(port=gateway.port))
        assert run_top(settings, once=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "engine    2 running, 0 waiting, prefill 900 tokens/s" in lines
    rows = [line.split()[0] for line in lines if line.startswith(("alice", "bob"))]
    assert rows == ["bob", "alice"]


async def test_the_first_runs_password_opens_the_dashboard_and_survives_a_restart(tmp_path: Path) -> None:
    """A hash that changes with each start would log every operator out at each reload."""
    base = Settings(store=StoreSettings(data_dir=tmp_path), security=SecuritySettings(secret=SECRET))
    first, second = with_operator_password(base), with_operator_password(base)
    assert first.security == second.security
    path = operator_password_path(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    login = Login(TenantDirectory(SECRET.encode(), ()), first.security.operator_password_hash)
    session = await login.log_in(path.read_text().strip())
    assert session is not None
    assert session.role == "operator"
    assert await login.log_in("a guess") is None
    assert with_operator_password(settings_in(tmp_path)).security.operator_password_hash == "$argon2$secret"


@pytest.mark.redis
def test_doctor_knows_its_own_server(tmp_path: Path) -> None:
    """A port that our own server has is no fault; one that does not answer is."""
    settings = msgspec.structs.replace(settings_in(tmp_path), server=ServerSettings(port=free_port()))
    assert (check_server(settings).status, check_server(settings).detail) == ("ok", "none runs on this data directory")
    (tmp_path / "run").mkdir(mode=0o700, exist_ok=True)
    with (tmp_path / "run" / "serve.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("1")
        lock.flush()
        assert check_server(settings).status == "fail"
        with run_operated(tmp_path, "") as gateway:
            running = msgspec.structs.replace(settings, server=ServerSettings(port=gateway.port))
            assert check_port(running).status == "ok"
            assert "our own server" in check_port(running).detail
            assert check_server(running).status == "ok"
            gateway.on_loop(gateway.drain.begin)
            assert (check_server(running).status, check_server(running).detail) == (
                "fail",
                "unavailable: shutting down",
            )
        with socket.create_server(("127.0.0.1", settings.server.port)):
            assert check_port(settings).status == "fail", "somebody else's"
