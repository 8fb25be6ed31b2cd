"""A gateway on a real socket, with uvicorn as in production, over a fake engine; and two tenants with keys."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
import uvicorn
from litestar import Litestar
from redis.asyncio import Redis

from engine.settings import ServerSettings, Settings, TenantSettings
from gateway.access_log import AccessLog
from gateway.app import create_app
from gateway.auth import hash_api_key, new_api_key
from gateway.drain import Drain
from gateway.operations import Operations
from gateway.server import GatewayServer
from gateway.store_client import StoreClient
from gateway.tenants import TenantDirectory
from retrieval.embedder_client import Embedder
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.store_server import StoreServer
from tests.store_server import store_url

__all__ = ["store_url"]

SECRET = b"a secret for tests"

# The store shares a loaded machine with the tests: what a slow answer leads to is tested on its own.
STORE_TIMEOUT = 10.0


@dataclass(slots=True)
class RunningGateway:
    url: str
    port: int
    engine: FakeEngine
    drain: Drain
    keys: dict[str, str]
    server: GatewayServer
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    http: httpx.Client  # without a key
    app: Litestar

    def client(self, tenant: str = "alice") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=20)

    def async_client(self, tenant: str = "alice") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=20)

    def headers(self, tenant: str = "alice") -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    def on_loop(self, action: Callable[[], object]) -> None:
        """Runs `action` on the server's loop and waits for it."""

        async def call() -> None:
            action()

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Fails when the condition does not come true; how soon it does is not judged."""
        pause = threading.Event()
        for _ in range(6000):
            if condition():
                return
            pause.wait(0.01)
        raise AssertionError("the condition never came true")


def four_tenants(keys: dict[str, str]) -> list[TenantSettings]:
    """alice, bob, and (in one cache group) carol and dave; alice has an admin, and root operates everything."""
    hashes = {name: (hash_api_key(SECRET, key),) for name, key in keys.items()}
    groups = {"carol": "research", "dave": "research"}
    users = [
        TenantSettings(
            id=name,
            key_hashes=hashes[name],
            admin_key_hashes=hashes["alice-admin"] if name == "alice" else (),
            cache_group=groups.get(name, ""),
        )
        for name in ("alice", "bob", "carol", "dave")
    ]
    return [*users, TenantSettings(id="root", operator_key_hashes=hashes["root"])]


def new_keys() -> dict[str, str]:
    return {name: new_api_key() for name in ("alice", "bob", "carol", "dave", "alice-admin", "root")}


def run_gateway_thread(
    engine: FakeEngine,
    settings: Settings | None = None,
    *,
    operated: bool = False,
    redis: Redis | None = None,
    embedder: Embedder | None = None,
    store_url: str | None = None,
    keys: dict[str, str] | None = None,
    tenants: list[TenantSettings] | None = None,
    drain_seconds: float = 0,
) -> Iterator[RunningGateway]:
    keys = keys or new_keys()
    tenants = four_tenants(keys) if tenants is None else tenants
    settings = settings or Settings(server=ServerSettings(max_choices=4, max_body_bytes=1 << 20))
    drain = Drain()
    operations = Operations(settings, StoreClient(settings.store.url or None)) if operated else None
    store = operations.store if operations else StoreClient(store_url, timeout=STORE_TIMEOUT)
    directory = TenantDirectory(SECRET, tenants)
    app = create_app(
        settings,
        engine,
        directory,
        drain=drain,
        store=store,
        redis=redis,
        embedder=embedder,
        operations=operations,
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        AccessLog(app, operations.observers if operations else ()),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=2,
    )
    server = GatewayServer(config, drain, drain_seconds)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])))
    thread.start()
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
    gateway = RunningGateway(f"http://127.0.0.1:{port}", port, engine, drain, keys, server, loop, thread, http, app)
    try:
        gateway.wait_until(lambda: server.started)
        yield gateway
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(server.begin_shutdown)
        thread.join(20)
        loop.close()
        listener.close()
        http.close()


@pytest.fixture
def gateway() -> Iterator[RunningGateway]:
    yield from run_gateway_thread(FakeEngine())


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path_factory.mktemp("store"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def empty_store_url(store_server: StoreServer) -> str:
    """A store that holds nothing, and is this test's alone while it runs."""
    store_server.command("FLUSHALL")
    return store_server.url


@pytest.fixture
def stored_gateway(empty_store_url: str) -> Iterator[RunningGateway]:
    yield from run_gateway_thread(FakeEngine(), store_url=empty_store_url)
