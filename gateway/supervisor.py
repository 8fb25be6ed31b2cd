"""`radixgate serve`: store, engine and gateway as children, from the first start to the last exit code.

    start     lock the data directory ─► store ─► engine, embedder, gateway ─► GET /readyz until 200 ─► on_ready
    run       a child's death is reported with its last lines, and the child is started again
    reload    SIGHUP: settings read again; each gateway gets a successor, and goes when that one is ready
    stop      SIGTERM, SIGINT: gateway (drains) ─► engine (drains), embedder ─► store ─► exit 0; a second one ends the
              drains

Who dies, and what then:
    before the first /readyz    everything stops, the exit code is the child's (2: settings or model unusable, else 1):
                                what cannot start will not start by trying again
    engine                      restarted; meanwhile the gateway answers 503 with retry-after, and reconnects by itself
    embedder                    restarted; searches and ingestion wait, or are answered with 503
    store                       restarted with its data; the gateway serves on without it
    gateway                     restarted: it holds nothing that its clients' retries do not bring back
    any of them, MAX_DEATHS     everything stops, exit 1: the machine's own service manager decides then
      times in DEATH_WINDOW
    the supervisor, kill -9     the kernel ends the children (gateway/child.py)

The listening socket is the supervisor's own and is handed to every gateway worker (`server.workers`): one queue of
connections for all of them, which is there whatever worker comes or goes. So a reload refuses no connection and resets
none. SO_REUSEPORT instead would give each worker a queue of its own, whose connections are lost when it ends.

Children get the whole settings as environment variables, so that all processes run with the same ones. Engine and
embedder get no secret and no tenant. An embedder that has an endpoint in the settings is somebody else's to start.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.settings import (
    PREFIX,
    SecuritySettings,
    Settings,
    embedder_endpoint,
    runtime_dir,
    settings_environ,
)
from gateway.child import ChildProcess, LineSink, print_line
from gateway.handover import HAND_OVER, LISTEN_FD, READY_FD, SHARED_METRICS_VARIABLE
from gateway.store import EmbeddedStore

logger = logging.getLogger(__name__)

MAX_DEATHS = 5
DEATH_WINDOW = 600.0  # seconds
BACKOFF = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before the first, second, … restart within the window
POLL_SECONDS = (0.1, 1.0)  # between two looks at /readyz: at first, and after some
READYZ_TIMEOUT = 15.0
BACKLOG = 2048  # connections that may wait to be accepted
GRACE_SECONDS = 10.0  # that a child may take to stop after its drain
EXIT_FAILED = 1
SUCCESSOR_SECONDS = 60.0  # that a new gateway may take to get ready
GATEWAY = "gateway"

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy's 127.0.0.1 is not ours

PACKAGE_ROOT = Path(__file__).resolve().parent.parent


class Supervisor:
    """Runs one instance. `on_ready` is called once, with the name of the model that is served."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_ready: Callable[[str], None],
        on_line: LineSink = print_line,
        engine_command: Sequence[str] = (sys.executable, "-m", "engine"),
        gateway_command: Sequence[str] = (sys.executable, "-m", "gateway.server"),
        embedder_command: Sequence[str] = (),
        read_settings: Callable[[], Settings] | None = None,
    ) -> None:
        """`embedder_command`: by default the real one, with its settings as arguments.

        `read_settings` gives the settings of a reload; it may raise ConfigError. Without it they stay.
        """
        self._settings = settings
        self._on_ready = on_ready
        self._on_line = on_line
        self._read_settings = read_settings
        self._commands = {"engine": engine_command}
        if not settings.retrieval.embedder_endpoint:
            self._commands["embedder"] = embedder_command or default_embedder_command(settings)
        self._commands[GATEWAY] = gateway_command
        self._gateways = tuple(GATEWAY if i == 0 else f"{GATEWAY}.{i + 1}" for i in range(settings.server.workers))
        self._listener: socket.socket | None = None
        self._leaving: set[ChildProcess] = set()  # gateways that have a successor and finish their requests
        self._reloading = asyncio.Lock()
        self._reloads: set[asyncio.Task[None]] = set()
        self._store: EmbeddedStore | None = None
        self.children: dict[str, ChildProcess] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._deaths: dict[str, deque[float]] = {}
        self._stop_requests = 0
        self._stopped = asyncio.Event()
        self._ready = False
        self._exit_code = 0

    async def run(self) -> int:
        """Serves until it is told to stop, or cannot go on. Returns the exit code."""
        with _locked(self._settings.store.data_dir), self._signals():
            try:
                await self._start()
                await self._until_stopped()
            finally:
                await self._stop()
        return self._exit_code

    def stop(self) -> None:
        """What SIGTERM does."""
        self._stop_requests += 1
        self._stopped.set()
        if self._stop_requests > 1:
            for name in (*self._gateways, "engine"):
                if name in self.children:
                    self.children[name].signal(signal.SIGTERM)

    def reload(self) -> None:
        """What SIGHUP does."""
        task = asyncio.ensure_future(self._reload())
        self._watchers.add(task)
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    # ------------------------------------------------------------ start

    async def _start(self) -> None:
        self._listener = listen(self._settings.server.host, self._settings.server.port)
        shutil.rmtree(self._metrics_dir, ignore_errors=True)  # counts of an earlier run
        self._metrics_dir.mkdir(mode=0o700, exist_ok=True)
        if not self._settings.store.url:
            await self._start_store()
        for name in (*(name for name in self._commands if name != GATEWAY), *self._gateways):
            await self._spawn(name)
        self._watch(self._await_readiness())

    async def _start_store(self) -> None:
        store = EmbeddedStore(self._settings.store.data_dir, self._settings.store.port, on_line=self._on_line)
        await store.start()
        assert store.child is not None, "a store that was started has a process"
        self._store = store
        self.children["store"] = store.child
        self._watch(self._await_death("store", store.child))

    async def _spawn(self, name: str) -> None:
        child = await self._start_child(name)
        self.children[name] = child
        self._watch(self._await_death(name, child))

    async def _start_child(self, name: str, ready_fd: int | None = None) -> ChildProcess:
        environ, inherited = self._environ(name), []
        if name in self._gateways:
            assert self._listener is not None, "opened at the start"
            inherited = [self._listener.fileno(), *([] if ready_fd is None else [ready_fd])]
            environ[LISTEN_FD] = str(self._listener.fileno())
            environ[SHARED_METRICS_VARIABLE] = str(self._metrics_dir)
            if ready_fd is not None:
                environ[READY_FD] = str(ready_fd)
        command = self._commands[GATEWAY if name in self._gateways else name]
        child = ChildProcess(name, command, environ, on_line=self._on_line, inherited=inherited)
        await child.start()
        return child

    @property
    def _metrics_dir(self) -> Path:
        return runtime_dir(self._settings.store.data_dir) / "metrics"

    def _environ(self, name: str) -> dict[str, str]:
        settings = self._settings
        if self._store is not None:
            store = msgspec.structs.replace(settings.store, url=self._store.url)
            settings = msgspec.structs.replace(settings, store=store)
        if name in ("engine", "embedder"):
            settings = msgspec.structs.replace(settings, security=SecuritySettings(), tenants=())
        return child_environ(os.environ, settings)

    async def _await_readiness(self) -> None:
        url = f"{local_url(self._settings)}/readyz"
        pause, longest = POLL_SECONDS
        while not self._stop_requests:
            if (model := await asyncio.to_thread(ready_model, url)) is not None:
                self._ready = True
                self._on_ready(model)
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

    # ------------------------------------------------------------ run

    def _watch(self, work: Coroutine[None, None, None]) -> None:
        self._watchers.add(asyncio.ensure_future(work))

    async def _await_death(self, name: str, child: ChildProcess) -> None:
        code = await child.wait()
        if not self._stop_requests and self.children[name] is child:
            await self._handle_death(name, code)

    async def _handle_death(self, name: str, code: int) -> None:
        report = self.children[name].report()
        if not self._ready:
            self._give_up(f"{report}\nradixgate cannot start", code if code > 0 else EXIT_FAILED)
            return
        deaths = self._deaths.setdefault(name, deque())
        now = time.monotonic()
        deaths.append(now)
        while now - deaths[0] > DEATH_WINDOW:
            deaths.popleft()
        if len(deaths) >= MAX_DEATHS:
            self._give_up(f"{report}\n{name} died {len(deaths)} times in {DEATH_WINDOW:.0f} s", EXIT_FAILED)
            return
        pause = BACKOFF[min(len(deaths), len(BACKOFF)) - 1]
        self._report(f"{report}\n{name} is started again in {pause:.1f} s")
        await asyncio.sleep(pause)
        if self._stop_requests:
            return
        if name == "store":
            await self._start_store()
        else:
            await self._spawn(name)

    async def _until_stopped(self) -> None:
        """Returns when told to stop; raises what a watcher raised."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        while not stopped.done():
            done, _ = await asyncio.wait([stopped, *self._watchers], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                self._watchers.discard(task)
                task.result()

    def _give_up(self, why: str, exit_code: int) -> None:
        self._report(why)
        self._exit_code = exit_code
        self._stop_requests += 1
        self._stopped.set()

    def _report(self, text: str) -> None:
        for line in text.splitlines():
            self._on_line("serve", line)

    # ------------------------------------------------------------ reload

    async def _reload(self) -> None:
        """Gateways by settings that were read again; whoever cannot be replaced goes on as it is."""
        async with self._reloading:
            if not self._ready or self._stop_requests:
                self._report("not reloaded: only a server that is ready and goes on can be")
                return
            try:
                self._settings = self._reloaded_settings()
            except ConfigError as error:
                self._report(f"not reloaded: {error.message}")
                return
            for name in self._gateways:
                if not await self._replace(name):
                    return
            self._report("reloaded")

    def _reloaded_settings(self) -> Settings:
        if self._read_settings is None:
            return self._settings
        new, old = self._read_settings(), self._settings
        fixed = ("host", "port", "workers")
        changed = [f"server.{key}" for key in fixed if getattr(new.server, key) != getattr(old.server, key)]
        changed += [name for name in ("model", "engine", "tiers", "store") if getattr(new, name) != getattr(old, name)]
        if changed:
            raise ConfigError(f"a change of {', '.join(changed)} takes a restart")
        return new

    async def _replace(self, name: str) -> bool:
        """A successor first; the old one goes only when it is ready. False, and nothing changed, if it never is."""
        read_fd, write_fd = os.pipe()
        try:
            successor = await self._start_child(name, write_fd)
        finally:
            os.close(write_fd)
        try:
            is_ready = await _becomes_ready(read_fd, SUCCESSOR_SECONDS)
        except asyncio.CancelledError:  # the whole server stops, and nobody else knows of this process
            successor.kill()
            await successor.wait()
            raise
        if not is_ready:
            await successor.stop(GRACE_SECONDS)
            self._report(f"not reloaded: the new {name} did not get ready: {successor.report()}")
            return False
        old, self.children[name] = self.children[name], successor
        self._watch(self._await_death(name, successor))
        old.signal(HAND_OVER)
        self._leaving.add(old)
        self._watch(self._await_leaving(old))
        return True

    async def _await_leaving(self, child: ChildProcess) -> None:
        await child.wait()
        self._leaving.discard(child)

    # ------------------------------------------------------------ stop

    async def _stop(self) -> None:
        """In the order of the requests' way, so that each drains while what it needs still runs."""
        for task in self._reloads:
            task.cancel()
        await asyncio.gather(*self._reloads, return_exceptions=True)
        seconds = self._settings.server.drain_seconds + GRACE_SECONDS
        self._stop_requests = max(self._stop_requests, 1)
        gateways = [self.children[name] for name in self._gateways if name in self.children]
        await asyncio.gather(*(child.stop(seconds) for child in (*gateways, *self._leaving)))
        for name in ("engine", "embedder", "store"):
            if name in self.children:
                await self.children[name].stop(seconds)
        if self._listener is not None:
            self._listener.close()
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    @contextmanager
    def _signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.reload if number == signal.SIGHUP else self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


# ---------------------------------------------------------------- what it stands on


def child_environ(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The parent's environment with exactly these settings, and with this code first on Python's path."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), environ.get("PYTHONPATH", "")]))
    return {**kept, **settings_environ(settings), "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def default_embedder_command(settings: Settings) -> list[str]:
    retrieval = settings.retrieval
    return [
        *(sys.executable, "-m", "retrieval.embedder", embedder_endpoint(settings)),
        *("--model", retrieval.embedder_model),
        *("--reranker", retrieval.reranker),
        *("--threads", str(retrieval.embedder_threads)),
        *("--batch-size", str(retrieval.embedder_batch_size)),
    ]


def local_url(settings: Settings) -> str:
    """The gateway as this machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.server.host, settings.server.host)
    return f"http://[{host}]:{settings.server.port}" if ":" in host else f"http://{host}:{settings.server.port}"


def ready_model(readyz_url: str) -> str | None:
    """The served model's name once /readyz says 200, else None."""
    try:
        with DIRECT.open(readyz_url, timeout=READYZ_TIMEOUT) as response:
            body = msgspec.json.decode(response.read(), type=dict[str, object])
    except (urllib.error.URLError, ConnectionError, TimeoutError, msgspec.DecodeError):
        return None
    return str(body.get("model") or "")


def listen(host: str, port: int) -> socket.socket:
    """The socket of this address, as long as it has a name in this process. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; see --port", param="server.port")


async def _becomes_ready(fd: int, seconds: float) -> bool:
    """Whether the other end of the pipe writes before it is closed, or the time is over. Closes the descriptor."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            return bool(await asyncio.wait_for(reader.read(1), seconds))
        except TimeoutError:
            return False
        finally:
            transport.close()


def require_free_port(host: str, port: int) -> None:
    """Raises ConfigError while there is still nothing to stop."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def _locked(data_dir: Path) -> Generator[None]:
    """One instance a data directory. The kernel lets go of the lock when the process ends, however it ends."""
    path = runtime_dir(data_dir) / "serve.lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another `radixgate serve` runs on {data_dir}", param="store.data_dir") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def running_supervisor(data_dir: Path) -> int | None:
    """The process id of the `radixgate serve` of a data directory, if there is one."""
    if not data_dir.is_dir():  # a question makes no directory
        return None
    path = runtime_dir(data_dir) / "serve.lock"
    if not path.exists():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read())
    return None
