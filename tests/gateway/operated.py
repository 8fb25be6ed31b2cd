"""A gateway as in production: metrics, history and dashboard over a real store, on a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from engine.settings import SecuritySettings, ServerSettings, Settings, StoreSettings, UsageSettings
from gateway.dashboard.login import hash_password
from gateway.store import EmbeddedStore
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import FakeEngine

METRICS_TOKEN = "a token for tests"
PASSWORD = "correct horse battery staple"


def silent(_name: str, _line: str) -> None:
    pass


@contextmanager
def run_store(data_dir: Path) -> Generator[EmbeddedStore]:
    """A real store on a loop of its own, so that tests on other loops can use it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    store = EmbeddedStore(data_dir, on_line=silent)
    try:
        asyncio.run_coroutine_threadsafe(store.start(), loop).result(60)
        yield store
    finally:
        asyncio.run_coroutine_threadsafe(store.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def operated_settings(data_dir: Path, store_url: str) -> Settings:
    return Settings(
        server=ServerSettings(max_choices=4, max_body_bytes=1 << 20),
        store=StoreSettings(data_dir=data_dir, url=store_url),
        security=SecuritySettings(metrics_token=METRICS_TOKEN, operator_password_hash=hash_password(PASSWORD)),
        usage=UsageSettings(price_per_million_tokens=2.0, price_per_million_cached_tokens=0.5),
    )


@contextmanager
def run_operated(data_dir: Path, store_url: str, engine: FakeEngine | None = None) -> Generator[RunningGateway]:
    settings = operated_settings(data_dir, store_url)
    yield from run_gateway_thread(engine or FakeEngine(), settings, operated=True)


def ask(gateway: RunningGateway, text: str, tenant: str = "alice", **body: object) -> None:
    request = {"model": "echo/byte-model", "messages": [{"role": "user", "content": text}], **body}
    answer = gateway.http.post("/v1/chat/completions", json=request, headers=gateway.headers(tenant))
    assert answer.status_code == 200, answer.text
