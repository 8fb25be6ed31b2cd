"""gateway/supervisor.py over a real store and stand-ins for engine and gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from engine.errors import ConfigError
from engine.settings import (
    SecuritySettings,
    ServerSettings,
    Settings,
    StoreSettings,
    TenantSettings,
    load_settings,
    settings_environ,
)
from gateway import supervisor as supervisor_module
from gateway.child import ChildProcess
from gateway.server_client import ServerClient
from gateway.store import answers
from gateway.supervisor import Supervisor, child_environ, free_port, local_url, ready_model, require_free_port
from tests.gateway.fake_children import MODULE, fake_supervisor

pytestmark = pytest.mark.redis
LIMIT = 30.0  # seconds that anything may take before a test fails
ROOT = Path(__file__).parents[2]


def settings_in(data_dir: Path) -> Settings:
    return Settings(
        server=ServerSettings(port=free_port(), drain_seconds=5.0),
        store=StoreSettings(data_dir=data_dir),
        security=SecuritySettings(secret="very secret"),
        tenants=(TenantSettings(id="acme", key_hashes=("ab" * 32,)),),
    )


@dataclass
class Run:
    """A supervisor under way, with all that its children said."""

    settings: Settings
    lines: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    models: list[str] = field(default_factory=list[str])
    supervisor: Supervisor = field(init=False)
    serving: asyncio.Task[int] = field(init=False)

    def __post_init__(self) -> None:
        self.supervisor = fake_supervisor(self.settings, self.models, self._on_line)
        self.serving = asyncio.create_task(self.supervisor.run())

    def _on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def said(self, name: str, part: str) -> bool:
        return any(who == name and part in line for who, line in self.lines)

    def pids(self, name: str) -> list[int]:
        return [int(line.rsplit(" ", 1)[1]) for who, line in self.lines if who == name and " starts as " in line]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                assert not self.serving.done(), f"it ended: {self.lines}"
                await asyncio.sleep(0.01)

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.serving, LIMIT)


@asynccontextmanager
async def serving(data_dir: Path) -> AsyncIterator[Run]:
    run = Run(settings_in(data_dir))
    try:
        yield run
    finally:
        if not run.serving.done():
            run.supervisor.stop()
            await run.exit_code()


async def test_serves_until_stopped_then_ends_in_the_requests_order(tmp_path: Path) -> None:
    """The store stopped first takes the usage of the last requests with it; the engine stopped first cuts them off."""
    async with serving(tmp_path) as run:
        await run.until(lambda: bool(run.models))
        assert run.models == ["fake-model"]
        store_url = load_settings(None, environ_of(tmp_path, "gateway")).store.url
        assert await answers(store_url)
        run.supervisor.stop()
        assert await run.exit_code() == 0
        ends = [(name, line) for name, line in run.lines if "drained" in line or "ready to exit" in line]
        assert [name for name, _ in ends] == ["gateway", "engine", "embedder", "store"]
        assert not await answers(store_url)


def environ_of(data_dir: Path, name: str) -> dict[str, str]:
    return json.loads((data_dir / f"{name}.environ").read_text())


async def test_engine_that_is_killed_is_reported_and_restarted(tmp_path: Path) -> None:
    """One death of the engine must not need a person, and must not pass unseen."""
    async with serving(tmp_path) as run:
        await run.until(lambda: bool(run.models))
        os.kill(run.pids("engine")[0], signal.SIGKILL)
        await run.until(lambda: len(run.pids("engine")) == 2)
        assert run.said("serve", "engine was ended by SIGKILL")
        assert run.said("serve", f"    engine starts as {run.pids('engine')[0]}")  # its last line
        assert len(run.pids("gateway")) == 1


async def test_store_that_is_killed_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as run:
        await run.until(lambda: bool(run.models))
        first = run.supervisor.children["store"].pid
        os.kill(first, signal.SIGKILL)
        await run.until(lambda: run.supervisor.children["store"].pid != first)
        store_url = load_settings(None, environ_of(tmp_path, "gateway")).store.url
        assert await answers(store_url)


async def test_child_that_cannot_start_ends_everything_with_its_code(tmp_path: Path) -> None:
    """A model that cannot be loaded was tried again for ever, its reason scrolled away."""
    (tmp_path / "engine.crash").write_text("2")
    async with serving(tmp_path) as run:
        assert await run.exit_code() == 2
        assert run.said("serve", "engine exited with 2")
        assert run.said("serve", "    engine cannot go on")
        assert (run.models, len(run.pids("engine"))) == ([], 1)
        assert all(child.returncode is not None for child in run.supervisor.children.values())


async def test_crash_loop_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarting a broken engine for ever hides it from the service manager above."""
    monkeypatch.setattr(supervisor_module, "BACKOFF", (0.0,))
    async with serving(tmp_path) as run:
        await run.until(lambda: bool(run.models))
        (tmp_path / "engine.crash").write_text("3")
        os.kill(run.pids("engine")[0], signal.SIGKILL)
        assert await run.exit_code() == 1
        assert run.said("serve", f"engine died {supervisor_module.MAX_DEATHS} times")
        assert len(run.pids("engine")) == supervisor_module.MAX_DEATHS
        assert run.said("gateway", "drained")


async def test_children_get_the_settings_and_the_engine_no_secret(tmp_path: Path) -> None:
    """The engine needs neither keys nor tenants; what it does not have it cannot leak."""
    async with serving(tmp_path) as run:
        await run.until(lambda: bool(run.models))
        gateway = load_settings(None, environ_of(tmp_path, "gateway"))
        engine = load_settings(None, environ_of(tmp_path, "engine"))
        assert (gateway.security, gateway.tenants) == (run.settings.security, run.settings.tenants)
        assert gateway.server == engine.server == run.settings.server
        assert (engine.security, engine.tenants) == (SecuritySettings(), ())
        assert "very secret" not in str(environ_of(tmp_path, "engine"))


async def test_second_serve_on_one_data_directory_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as run:
        await run.until(lambda: bool(run.models))
        with pytest.raises(ConfigError, match="another `radixgate serve`"):
            await fake_supervisor(settings_in(tmp_path), []).run()


async def test_port_in_use_is_found_before_anything_starts(tmp_path: Path) -> None:
    """The model loaded for a minute, and then the gateway could not listen."""
    run = Run(settings := settings_in(tmp_path))
    await run.until(lambda: bool(run.models))
    try:
        with pytest.raises(ConfigError, match="--port"):
            require_free_port(settings.server.host, settings.server.port)
    finally:
        run.supervisor.stop()
        assert await run.exit_code() == 0
    require_free_port(settings.server.host, settings.server.port)


# ---------------------------------------------------------------- as a process of its own


@dataclass
class Process:
    process: subprocess.Popen[str]
    child_pids: list[int]


def all_gone(pids: list[int]) -> bool:
    """Ended, or ended and not collected yet by whoever inherited it."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=LIMIT)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def start_process(data_dir: Path) -> Process:
    environ = child_environ(os.environ, settings_in(data_dir))
    command = [sys.executable, "-m", MODULE, "serve"]
    process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    word, *pids = process.stdout.readline().split()
    assert word == "ready"
    return Process(process, [int(pid) for pid in pids])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_in_exit_code_0(tmp_path: Path, number: signal.Signals) -> None:
    """A clean stop that looks like a crash makes service managers restart it, and people look for a fault."""
    started = start_process(tmp_path)
    with started.process:
        started.process.send_signal(number)
        assert started.process.wait(LIMIT) == 0
    assert len(started.child_pids) == 4
    assert all_gone(started.child_pids)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_kill_of_the_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    """Orphans kept the port, the device's memory and the data directory."""
    started = start_process(tmp_path)
    with started.process:
        started.process.kill()
        assert started.process.wait(LIMIT) == -signal.SIGKILL
    assert all_gone(started.child_pids)


# ---------------------------------------------------------------- what it stands on


def test_child_environ_drops_foreign_settings_and_keeps_the_rest(tmp_path: Path) -> None:
    """A variable that the command line overrode must not come back in the child."""
    settings = settings_in(tmp_path)
    environ = child_environ({"HOME": "/home/x", "RADIXGATE_SERVER__PORT": "1", "RADIXGATE_TYPO__X": "1"}, settings)
    assert environ["HOME"] == "/home/x"
    assert {name: text for name, text in environ.items() if name.startswith("RADIXGATE_")} == settings_environ(settings)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:9"), ("::", "http://[::1]:9"), ("10.0.0.1", "http://10.0.0.1:9")],
)
def test_local_url_of_a_wildcard_address(host: str, url: str) -> None:
    """`curl http://0.0.0.0:8000` works on some systems only."""
    assert local_url(Settings(server=ServerSettings(host=host, port=9))) == url


class ReadyHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"model": "here"}')

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's
        """Nothing on stderr."""


def test_a_server_on_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Behind an `http_proxy` the proxy was asked for 127.0.0.1: its own. The server never became ready."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(urllib.request, "_opener", None)  # urllib keeps the proxies that it saw first
    with ThreadingHTTPServer(("127.0.0.1", 0), ReadyHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert ready_model(f"http://127.0.0.1:{server.server_port}/readyz") == "here"
            settings = Settings(server=ServerSettings(port=server.server_port), store=StoreSettings(data_dir=tmp_path))
            assert b"here" in ServerClient(settings).get("/readyz")
        finally:
            server.shutdown()
            thread.join()


async def test_child_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    """A grandchild that outlives the deadline kept the pipe, and the supervisor, open."""
    program = "trap '' TERM; sleep 1000 & echo grandchild $!; wait; wait"
    said: list[str] = []
    child = ChildProcess(
        "stubborn", ["sh", "-c", program], {"PATH": os.defpath}, on_line=lambda _, line: said.append(line)
    )
    await child.start()
    async with asyncio.timeout(LIMIT):
        while not said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await child.stop(0.1) == -signal.SIGKILL
    assert all_gone([int(said[0].split()[1])])
    assert "was ended by SIGKILL" in child.report()


async def test_child_output_without_newlines_is_passed_on(tmp_path: Path) -> None:
    """A megabyte without a newline stopped the reader; then the child stood still at a full pipe."""
    said: list[str] = []
    program = "import sys; sys.stdout.write('x' * 1_000_000 + '\\nend')"
    child = ChildProcess("wide", [sys.executable, "-c", program], {}, on_line=lambda _, line: said.append(line))
    await child.start()
    assert await asyncio.wait_for(child.wait(), LIMIT) == 0
    assert sum(map(len, said[:-1])) == 1_000_000
    assert child.tail[-1] == "end"
