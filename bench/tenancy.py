"""python -m bench.tenancy: what tenants cost a request, over a real store on this machine.

    request    authenticate + reserve + settle + record, one request after the other, over 10,000 tenants in turn
    streams    so many streams open at once on one gateway (an engine that only waits), then an answer beside them
    growth     memory of the process over the requests of the first part, in bytes a request

A table, then one JSON line: overhead_p50_ms, overhead_p99_ms, open_streams, ttft_beside_streams_ms, growth_bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import statistics
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import aiohttp
import uvicorn

from engine.settings import ServerSettings, Settings, TenantSettings, UsageSettings
from gateway.app import create_app
from gateway.auth import authenticate, hash_api_key, new_api_key
from gateway.metering import Attempt, Metering
from gateway.model_use import ModelUse
from gateway.rate_limits import Limiter
from gateway.store_client import StoreClient
from gateway.tenants import TenantDirectory
from gateway.usage import UsageRecorder
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.store_server import StoreServer

SECRET = b"bench"
TENANTS = 10_000


def tenant(number: int, key: str) -> TenantSettings:
    return TenantSettings(
        id=f"t{number}",
        key_hashes=(hash_api_key(SECRET, key),),
        requests_per_minute=10**6,
        tokens_per_minute=10**9,
        tokens_per_day=10**12,
        concurrent_requests=10**4,
    )


async def overhead(store: StoreClient, requests: int) -> tuple[list[float], float]:
    """Seconds of each request; and bytes that stay, a request."""
    keys = [new_api_key() for _ in range(TENANTS)]
    directory = TenantDirectory(SECRET, [tenant(i, key) for i, key in enumerate(keys)])
    limiter, recorder = Limiter(store), UsageRecorder(store, retention_days=1)
    metering = Metering(limiter, recorder, UsageSettings())
    for i in range(requests // 4):  # the store learns the scripts, and the tenants their windows
        await one_request(directory, metering, keys[i % TENANTS], f"first{i}")
    times: list[float] = []
    for i in range(requests):
        start = time.perf_counter()
        await one_request(directory, metering, keys[i % TENANTS], f"r{i}")
        times.append(time.perf_counter() - start)
    held: list[int] = []
    tracemalloc.start()
    for part in range(2):
        for i in range(requests // 4):
            await one_request(directory, metering, keys[i % TENANTS], f"part{part}-{i}")
        await recorder.flush()
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return times, (held[1] - held[0]) / (requests // 4)


async def one_request(directory: TenantDirectory, metering: Metering, key: str, name: str) -> None:
    caller = authenticate(directory, f"Bearer {key}")
    attempt = Attempt(
        caller=caller,
        request_id=name,
        model=MODEL,
        num_tokens=600,
        is_retry=False,
        digest=b"",
    )
    async with metering.admit(attempt) as meter:
        meter.taken_on, meter.answer = True, ModelUse(num_output_tokens=20)
        await meter.settle()


async def streams(store_url: str, count: int) -> tuple[int, float]:
    """Streams that were open together, and the time to an answer beside them."""
    key = new_api_key()
    engine = FakeEngine()
    directory = TenantDirectory(SECRET, [tenant(0, key)])
    app = create_app(Settings(server=ServerSettings()), engine, directory, store=StoreClient(store_url, 1.0))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None, access_log=False, ws="none"))
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        opened = await asyncio.gather(*(session.post(url, json=body("wait", stream=True)) for _ in range(count)))
        statuses = Counter(response.status for response in opened)
        times: list[float] = []
        for _ in range(20):
            start = time.perf_counter()
            async with session.post(url, json=body("hi", stream=False)) as response:
                await response.read()
            times.append(time.perf_counter() - start)
        for response in opened:
            response.close()
    server.should_exit = True
    await serving
    return statuses[200], statistics.median(times)


def body(question: str, *, stream: bool) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": stream, "max_tokens": 4}


async def measure(url: str, requests: int, count: int) -> dict[str, float]:
    store = StoreClient(url, 1.0)
    await store.probe(("PING",))
    times, growth = await overhead(store, requests)
    await store.close()
    num_open, beside = await streams(url, count)
    times.sort()
    return {
        "overhead_p50_ms": round(statistics.median(times) * 1000, 3),
        "overhead_p99_ms": round(times[int(len(times) * 0.99)] * 1000, 3),
        "open_streams": num_open,
        "ttft_beside_streams_ms": round(beside * 1000, 1),
        "growth_bytes": round(growth, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--streams", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = StoreServer(Path(directory))
        server.start()
        try:
            found = asyncio.run(measure(server.url, args.requests, args.streams))
        finally:
            server.stop()
    for name, value in found.items():
        print(f"{name:<26}{value:>12}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
