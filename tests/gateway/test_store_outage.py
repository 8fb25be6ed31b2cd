"""The store goes away while the gateway serves, and two gateway processes share one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

import httpx
import pytest

from engine.settings import TenantSettings
from gateway.auth import hash_api_key, new_api_key
from gateway.store_client import Script, StoreClient
from tests.cases.conftest import MODEL as STACK_MODEL
from tests.cases.conftest import Stack, run_stack
from tests.gateway.conftest import SECRET, RunningGateway, new_keys, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.store_server import StoreServer
from tests.gateway.test_server import free_port, wait_alive

pytestmark = pytest.mark.redis

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def mortal_store(tmp_path: Path) -> Iterator[StoreServer]:
    """One of this test's own, to be stopped."""
    server = StoreServer(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def readiness_of(gateway: RunningGateway) -> str:
    return gateway.http.get("/readyz").json()["status"]


def ask(gateway: RunningGateway) -> int:
    return gateway.http.post("/v1/chat/completions", json=BODY, headers=gateway.headers()).status_code


def counted(gateway: RunningGateway) -> int:
    page = gateway.http.get("/v1/usage", params={"start_time": int(time.time()) - 600}, headers=gateway.headers())
    if page.status_code != 200:
        return 0
    return sum(result["num_model_requests"] for bucket in page.json()["data"] for result in bucket["results"])


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_without_the_store_requests_are_served_and_readiness_says_degraded(
    mortal_store: StoreServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """litellm#35273: Redis down, and every request waited for it, or was a bogus 429. And back again."""
    monkeypatch.setattr("tests.gateway.conftest.STORE_TIMEOUT", 0.05)
    monkeypatch.setattr("gateway.store_client.FETCH_SECONDS", 0.5)
    keys = new_keys()
    tenants = [TenantSettings(id="alice", key_hashes=(hash_api_key(SECRET, keys["alice"]),), requests_per_minute=1000)]
    with contextmanager(run_gateway_thread)(
        FakeEngine(), store_url=mortal_store.url, keys=keys, tenants=tenants
    ) as gateway:
        gateway.wait_until(lambda: readiness_of(gateway) == "ok")
        assert ask(gateway) == 200
        (mortal_store.freeze if how == "frozen" else mortal_store.stop)()
        assert [ask(gateway) for _ in range(10)] == [200] * 10
        gateway.wait_until(lambda: readiness_of(gateway) == "degraded")
        # What lives in the store cannot be had; what is in memory can.
        usage = gateway.http.get("/v1/usage?start_time=1700000000", headers=gateway.headers())
        assert (usage.status_code, usage.json()["error"]["code"]) == (503, "store_unavailable")
        (mortal_store.thaw if how == "frozen" else mortal_store.start)()
        gateway.wait_until(lambda: readiness_of(gateway) == "ok")
        # Nothing that was served meanwhile is lost. (A store that was killed without persistence lost what it had.)
        gateway.wait_until(lambda: counted(gateway) >= 10)


def leave(gateway: RunningGateway) -> int:
    """Ask, and go before the answer has ended."""
    body = {**BODY, "stream": True, "messages": [{"role": "user", "content": "wait"}]}
    with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=gateway.headers()) as response:
        return response.status_code


def test_an_outage_refuses_nobody_for_requests_that_have_ended(
    mortal_store: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one request at a time, and clients that leave: before, while and after the store answers nothing. What is
    counted afterwards is what was used, and nothing runs."""
    monkeypatch.setattr("tests.gateway.conftest.STORE_TIMEOUT", 0.05)
    monkeypatch.setattr("gateway.store_client.FETCH_SECONDS", 0.5)
    keys = new_keys()
    alice = TenantSettings(
        id="alice",
        key_hashes=(hash_api_key(SECRET, keys["alice"]),),
        requests_per_minute=1000,
        tokens_per_day=1_000_000,
        concurrent_requests=1,
    )
    with contextmanager(run_gateway_thread)(
        FakeEngine(), store_url=mortal_store.url, keys=keys, tenants=[alice]
    ) as gateway:

        def in_turn(action: Callable[[], int]) -> int:
            """One after the other: the one before has ended for the gateway, too."""
            status = action()
            gateway.wait_until(lambda: not gateway.engine.running)
            time.sleep(0.05)
            return status

        gateway.wait_until(lambda: readiness_of(gateway) == "ok")
        assert [in_turn(action) for action in (lambda: ask(gateway), lambda: leave(gateway))] == [200, 200]
        mortal_store.freeze()
        for _ in range(4):
            assert in_turn(lambda: leave(gateway)) == 200
            assert in_turn(lambda: ask(gateway)) == 200
        gateway.wait_until(lambda: readiness_of(gateway) == "degraded")
        mortal_store.thaw()
        gateway.wait_until(lambda: readiness_of(gateway) == "ok")
        gateway.wait_until(lambda: not running_in(mortal_store))
        assert [in_turn(action) for action in (lambda: leave(gateway), lambda: ask(gateway))] == [200, 200]
        gateway.wait_until(lambda: not running_in(mortal_store))
        # At least what was asked beside the outage, and of what was asked in it what the store had been told.
        tokens, requests = used_in(mortal_store, "tokens_per_day"), used_in(mortal_store, "requests_per_minute")
        assert 4 <= requests <= 12
        assert tokens < 100 * requests, "no max_tokens is left reserved"


def running_in(store: StoreServer) -> list[bytes]:
    """Requests that count as running."""
    return cast("list[bytes]", store.command("ZRANGEBYSCORE", "radixgate:running:alice", "1", "+inf"))


def used_in(store: StoreServer, window: str) -> int:
    return int(cast(bytes, store.command("HGET", "radixgate:limits:alice", f"{window}:used")))


async def test_a_script_that_the_store_has_forgotten_is_sent_again(store_server: StoreServer) -> None:
    script = Script("echo", "return ARGV[1]", hashlib.sha1(b"return ARGV[1]").hexdigest())
    store = StoreClient(store_server.url, timeout=10)
    await store.probe(("PING",))
    for _ in range(2):
        assert await store.ask(script, [], ["x"]) == b"x"
        store_server.command("SCRIPT", "FLUSH")
    await store.close()


async def test_a_task_that_is_cancelled_while_it_asks_the_store_ends_at_every_moment(store_server: StoreServer) -> None:
    """The client's library takes a cancellation for a lost connection, or for nothing. A background task then went on
    for ever, and a gateway whose first script was just being sent again did not end."""
    swallowed: list[int] = []
    for number in range(480):
        store = StoreClient(store_server.url, timeout=10)
        text = f"return {number}"  # not known to the store: sent twice
        asking = asyncio.create_task(store.run(Script("new", text, hashlib.sha1(text.encode()).hexdigest()), [], []))
        for _ in range(number % 40):
            await asyncio.sleep(0)
        was_running = asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
            if was_running:
                swallowed.append(number % 40)
        await store.close()
    assert not swallowed


@pytest.fixture
def two_processes(tmp_path: Path, empty_store_url: str) -> Iterator[tuple[Stack, list[int], dict[str, str]]]:
    """`python -m gateway.server` twice, on one store and one engine."""
    keys = {name: new_api_key() for name in ("alice", "root")}
    config = tmp_path / "radixgate.toml"
    with ExitStack() as closing:
        stack = closing.enter_context(contextmanager(run_stack)(tmp_path))
        config.write_text(
            f"""
            [store]
            data_dir = "{tmp_path}"
            url = "{empty_store_url}"
            timeout_ms = 5000
            [engine]
            endpoint = "{stack.server.endpoint}"
            [security]
            secret = "test"
            [[tenants]]
            id = "alice"
            key_hashes = ["{hash_api_key(b"test", keys["alice"])}"]
            requests_per_minute = 10
            [[tenants]]
            id = "root"
            operator_key_hashes = ["{hash_api_key(b"test", keys["root"])}"]
            """
        )
        ports = [free_port(), free_port()]
        for port in ports:
            command = [sys.executable, "-m", "gateway.server", "--config", str(config)]
            environ = {**os.environ, "RADIXGATE_SERVER__PORT": str(port)}
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environ)
            closing.callback(process.wait)
            closing.callback(process.kill)
        for port in ports:
            wait_alive(port)
        yield stack, ports, keys


def test_two_gateway_processes_share_limits_keys_and_usage(
    two_processes: tuple[Stack, list[int], dict[str, str]],
) -> None:
    stack, ports, keys = two_processes
    alice, root = ({"authorization": f"Bearer {keys[name]}"} for name in ("alice", "root"))
    body = {**BODY, "model": STACK_MODEL, "max_tokens": 2}
    with httpx.Client(timeout=30) as http:
        for port in ports:
            stack.gateway.wait_until(
                lambda port=port: http.get(f"http://127.0.0.1:{port}/readyz").json()["status"] == "ok"
            )
        found = [
            http.post(f"http://127.0.0.1:{ports[i % 2]}/v1/chat/completions", json=body, headers=alice).status_code
            for i in range(12)
        ]
        assert found == [200] * 10 + [429] * 2
        keys_url = f"http://127.0.0.1:{ports[0]}/admin/v1/tenants/alice/keys"
        (key,) = http.get(keys_url, headers=root).json()["data"]
        assert http.post(f"{keys_url}/{key['id']}/revoke", headers=root).status_code == 200
        stack.gateway.wait_until(
            lambda: http.get(f"http://127.0.0.1:{ports[1]}/v1/models", headers=alice).status_code == 401
        )
        usage = f"http://127.0.0.1:{ports[1]}/admin/v1/usage?start_time={int(time.time()) - 600}&project_ids=alice"

        def requests() -> int:
            page = http.get(usage, headers=root).json()
            return sum(result["num_model_requests"] for bucket in page["data"] for result in bucket["results"])

        stack.gateway.wait_until(lambda: requests() == 10)
