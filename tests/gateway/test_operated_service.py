"""A whole service of processes (store, engine over the fake device, two gateway workers), as an operator runs it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx
import msgspec
import psutil
import pytest

from bench.server import RunningServer
from bench.soak import Soak
from bench.soak_clients import BrokenPromiseError, Credentials
from engine.errors import ConfigError
from engine.settings import RetrievalSettings, SecuritySettings, ServerSettings, Settings, StoreSettings, TenantSettings
from gateway.auth import hash_api_key, new_api_key
from gateway.history_reader import HistoryReader, span_of, total
from gateway.store_client import StoreClient
from gateway.supervisor import Supervisor, free_port, local_url
from tests.gateway.test_metrics import parse

pytestmark = [pytest.mark.redis, pytest.mark.slow]

LIMIT = 60.0  # seconds that anything may take before a test fails
SECRET = "a secret for tests"
TOKEN = "a token for tests"
TENANTS = ("acme", "borealis", "cobalt")


@dataclass
class Service:
    settings: Settings
    keys: dict[str, str]
    supervisor: Supervisor = field(init=False)
    serving: asyncio.Task[int] = field(init=False)
    models: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.next_settings: Settings | None = self.settings
        self.supervisor = Supervisor(
            self.settings,
            on_ready=self.models.append,
            on_line=lambda name, line: self.lines.append(f"{name}: {line}"),
            engine_command=(sys.executable, "-m", "tests.gateway.fake_engine_process"),
            read_settings=self._read_settings,
        )
        self.serving = asyncio.create_task(self.supervisor.run())

    def _read_settings(self) -> Settings:
        if self.next_settings is None:
            raise ConfigError("no such file")
        return self.next_settings

    @property
    def url(self) -> str:
        return local_url(self.settings)

    async def until(self, *said: str) -> None:
        async with asyncio.timeout(LIMIT):
            while not all(any(part in line for line in self.lines) for part in said):
                assert not self.serving.done(), self.lines
                await asyncio.sleep(0.02)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=LIMIT)

    async def metrics(self, path: str = "/metrics") -> dict[tuple[str, ...], float]:
        async with self.client() as client:
            answer = await client.get(path, headers={"authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 200, answer.text
            return dict(parse(answer.content))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    keys = {tenant: new_api_key() for tenant in TENANTS}
    settings = Settings(
        server=ServerSettings(port=free_port(), drain_seconds=10.0, workers=2),
        store=StoreSettings(data_dir=tmp_path),
        security=SecuritySettings(secret=SECRET, metrics_token=TOKEN),
        retrieval=RetrievalSettings(embedder_endpoint=f"ipc://{tmp_path}/no-embedder.sock"),
        tenants=tuple(
            TenantSettings(id=tenant, key_hashes=(hash_api_key(SECRET.encode(), key),)) for tenant, key in keys.items()
        ),
    )
    service = Service(settings, keys)
    try:
        async with asyncio.timeout(LIMIT):
            while not service.models:
                assert not service.serving.done(), service.lines
                await asyncio.sleep(0.02)
        yield service
    finally:
        service.supervisor.stop()
        await asyncio.wait_for(service.serving, LIMIT)


@dataclass
class Spent:
    """What the responses said, by tenant."""

    prompt: Counter[str] = field(default_factory=Counter[str])
    cached: Counter[str] = field(default_factory=Counter[str])
    output: Counter[str] = field(default_factory=Counter[str])
    requests: Counter[str] = field(default_factory=Counter[str])


async def ask(service: Service, client: httpx.AsyncClient, spent: Spent, dice: random.Random) -> None:
    tenant = dice.choice(TENANTS)
    text = f"{dice.choice('abcd') * dice.randint(20, 200)} {dice.randint(0, 3)}"
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": dice.randint(1, 12),
        "n": dice.choice((1, 1, 2)),
    }
    headers = {"authorization": f"Bearer {service.keys[tenant]}"}
    if dice.random() < 0.2:
        body["temperature"] = -1
        assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 400
        return
    stream = dice.random() < 0.5
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    last = answer.text.strip().split("\n\n")[-2].removeprefix("data: ") if stream else answer.text
    usage = msgspec.json.decode(last, type=dict[str, object])["usage"]
    assert isinstance(usage, dict)
    counts = cast("dict[str, int]", usage)
    details = cast("dict[str, dict[str, int]]", usage)["prompt_tokens_details"]
    spent.requests[tenant] += 1
    spent.prompt[tenant] += counts["prompt_tokens"]
    spent.cached[tenant] += details["cached_tokens"]
    spent.output[tenant] += counts["completion_tokens"]


async def run_load(service: Service, count: int, seed: int) -> Spent:
    """Four clients, each on connections of its own, so that both workers get some."""
    spent, dice = Spent(), random.Random(seed)

    async def worker() -> None:
        for _ in range(count // 4):
            async with service.client() as client:
                await ask(service, client, spent, dice)

    await asyncio.gather(*(worker() for _ in range(4)))
    return spent


async def test_metrics_equal_usage_equal_history_equal_responses_over_two_workers(service: Service) -> None:
    """I9, and litellm#10595: workers that count apart, or twice, disagree with what the clients were told."""
    spent = await run_load(service, 80, seed=1)
    first, second = await service.metrics(), await service.metrics()
    for found in (first, second):
        for tenant in TENANTS:
            classes = {
                key[1]: n for key, n in found.items() if key[0] == "radixgate_prompt_tokens_total" and key[3] == tenant
            }
            assert sum(classes.values()) == spent.prompt[tenant]
            assert sum(classes.get(tier, 0) for tier in ("device", "host", "disk")) == spent.cached[tenant] > 0
            assert found["radixgate_output_tokens_total", "fake", tenant] == spent.output[tenant]
            assert found["radixgate_requests_total", "fake", "ok", tenant] == spent.requests[tenant]
            assert found["radixgate_time_to_first_token_seconds_count", "miss", "fake", tenant] >= 1
    await same_in_usage(service, spent)
    await same_in_history(service, spent)
    engine = await service.metrics("/metrics/engine")
    assert engine["radixgate_engine_output_tokens_total",] >= sum(spent.output.values())
    assert sum(engine["radixgate_engine_blocks", state] for state in ("free", "cached", "active")) == 2048


async def same_in_usage(service: Service, spent: Spent) -> None:
    """As the usage API tells each tenant, whichever worker answers; the others' last counts arrive within moments."""
    start = int(time.time()) // 3600 * 3600 - 3600
    for tenant in TENANTS:
        told = (spent.requests[tenant], spent.prompt[tenant], spent.cached[tenant], spent.output[tenant])
        async with asyncio.timeout(LIMIT), service.client() as client:
            while await billed(client, service.keys[tenant], start) != told:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def billed(client: httpx.AsyncClient, key: str, start: int) -> tuple[int, ...]:
    query = {"start_time": start, "bucket_width": "1h", "limit": 3}
    answer = await client.get("/v1/usage", params=query, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    rows = [row for bucket in answer.json()["data"] for row in bucket["results"]]
    names = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
    return tuple(sum(row[name] for row in rows) for name in names)


async def same_in_history(service: Service, spent: Spent) -> None:
    store = StoreClient(f"unix://{service.settings.store.data_dir.resolve()}/run/store.sock")
    reader = HistoryReader(store)
    try:
        async with asyncio.timeout(LIMIT):
            while total(await reader.series(None, span_of("1h"))).requests < sum(spent.requests.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for tenant in TENANTS:
            sums = total(await reader.series(tenant, span_of("1h")))
            told = (spent.requests[tenant], spent.prompt[tenant], spent.cached[tenant], spent.output[tenant])
            assert (sums.requests, sums.prompt, sums.cached, sums.output) == told
    finally:
        await store.close()


async def test_a_reload_under_load_fails_no_request_and_loses_no_count(service: Service) -> None:
    """A restart of the gateway to read new settings must not be seen by clients; its counters must not fall."""
    before = [service.supervisor.children[name].pid for name in ("gateway", "gateway.2")]
    load = asyncio.create_task(run_load(service, 160, seed=2))
    service.supervisor.reload()
    await service.until("serve: reloaded")
    spent = await load
    after = [service.supervisor.children[name].pid for name in ("gateway", "gateway.2")]
    assert not set(before) & set(after)
    found = await service.metrics()
    assert sum(n for key, n in found.items() if key[0] == "radixgate_output_tokens_total") == sum(spent.output.values())


async def test_a_short_soak_holds_what_it_promises(service: Service) -> None:
    """The soak itself has to work before an hour is spent on it; a reload falls into each of its rounds."""
    server = RunningServer(f"{service.url}/v1", service.keys["acme"], os.getpid())
    credentials = Credentials(server.base_url, service.keys["acme"], service.keys["borealis"])
    tenants = ("acme", "borealis")
    soak = Soak(server, credentials, tenants, TOKEN, 4, trouble=False, retrieval=False, round_seconds=3.0)
    running = asyncio.create_task(soak.run(5.0))
    await asyncio.sleep(1.0)
    service.supervisor.reload()
    await running
    assert {"stream", "abort", "retry", "stranger", "bad", "parallel"} <= set(soak.tally.kinds)
    assert len(soak.memory) >= 2
    with pytest.raises(BrokenPromiseError, match="I9"):  # a second run's responses are not all that was counted
        await soak.run(0.0)


async def test_a_reload_takes_new_tenants_and_refuses_what_needs_a_restart(service: Service) -> None:
    replace, old = msgspec.structs.replace, service.settings
    key = new_api_key()
    tenant = TenantSettings(id="late", key_hashes=(hash_api_key(SECRET.encode(), key),))
    service.next_settings = replace(old, tenants=(*old.tenants, tenant), server=replace(old.server, port=1))
    service.supervisor.reload()
    await service.until("not reloaded: a change of server.port takes a restart")
    service.next_settings = replace(old, tiers=replace(old.tiers, host_memory=1 << 20))
    service.supervisor.reload()
    await service.until("not reloaded: a change of tiers takes a restart")
    service.next_settings = replace(old, tenants=(*old.tenants, tenant))
    service.supervisor.reload()
    await service.until("serve: reloaded")
    async with service.client() as client:
        answer = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    await refuses_unreadable_settings(service)


async def test_a_stop_in_the_middle_of_a_reload_leaves_no_gateway_behind(service: Service) -> None:
    """The successor belonged to nobody: it was neither a child to be stopped, nor ready to be one."""
    known = set(psutil.Process().children())
    service.supervisor.reload()
    async with asyncio.timeout(LIMIT):
        while not set(psutil.Process().children()) - known:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    service.supervisor.stop()
    await asyncio.wait_for(service.serving, LIMIT)
    assert not [child for child in psutil.Process().children() if child not in known]


async def refuses_unreadable_settings(service: Service) -> None:
    """A slip in the file must not take down what runs."""
    before = service.supervisor.children["gateway"].pid
    service.next_settings = None
    service.supervisor.reload()
    await service.until("not reloaded: no such file")
    assert service.supervisor.children["gateway"].pid == before
