"""python -m bench.dashboard: how fast the dashboard's pages come with a thousand active tenants.

A real server; its history is written as its gateway writes it, for every tenant and hour of the last day. Then the
operator's pages are loaded one after the other, as a browser does it, without the scripts and styles that it keeps.
A table, then one JSON line; exit code 1 when a page's median is above `--limit`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from bench.server import RunningServer, running_server
from engine.protocol import PromptAccount
from engine.settings import Settings, StoreSettings
from gateway.backup import store_of
from gateway.history import HistoryWriter
from gateway.request_record import DocumentShare, RequestRecord

HOURS = 24
REQUESTS = 3  # of each tenant in each hour
PAGES = (
    "/dashboard?span=1h",
    "/dashboard?span=24h",
    "/dashboard?span=7d",
    "/dashboard?span=24h&tenant=tenant-0500",
    "/dashboard/cache",
    "/dashboard/live",
    "/dashboard/tenants?span=24h",
    "/dashboard/tenants?span=24h&search=99&page=1",
)


class _NothingIsLost:
    def history_dropped(self, count: int) -> None:
        raise AssertionError(f"{count} records did not fit")


async def write_history(data_dir: Path, num_tenants: int) -> None:
    dice = random.Random(1)
    async with store_of(Settings(store=StoreSettings(data_dir=data_dir))) as store:
        writer = HistoryWriter(store, 35, _NothingIsLost())
        now = time.time()
        for hour in range(HOURS):
            for tenant in range(num_tenants):
                for _ in range(REQUESTS):
                    at = now - 3600 * (hour + dice.random())
                    writer.request_finished(_record(f"tenant-{tenant:04}", at, dice))
                if tenant % 100 == 99:
                    await writer.flush()
            await writer.flush()


def _record(tenant: str, at: float, dice: random.Random) -> RequestRecord:
    cached = dice.choice((0, 320, 1008))
    return RequestRecord(
        time=at,
        request_id=f"req_{dice.getrandbits(64):x}",
        method="POST",
        path="/v1/chat/completions",
        route="/v1/chat/completions",
        status=200,
        outcome="ok",
        error_code="",
        tenant_id=tenant,
        model="m",
        stream=True,
        seconds=2.0,
        account=PromptAccount(device=cached, diverged=1100 - cached, partial_block=9),
        num_output_tokens=dice.randrange(1, 200),
        time_to_first_token=dice.lognormvariate(-2, 1),
        queue_seconds=0.01,
        seconds_saved=cached / 1000,
        retrieval=None,
        prepare_seconds=0.01,
        traceparent="",
        token_intervals=(),
        miss=None,
        causes=(),
        documents=(DocumentShare(document_id=f"doc-{dice.randrange(400)}", num_tokens=256, num_cached_tokens=128),),
    )


async def ask(server: RunningServer) -> None:
    """Something to draw on the cache page."""
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with aiohttp.ClientSession(base_url=f"{server.base_url}/", headers=headers) as session:
        async with session.get("models") as answer:
            model = (await answer.json())["data"][0]["id"]
        for number in range(12):
            body = {
                "model": model,
                "messages": [{"role": "user", "content": f"{'A cache. ' * (4 * (number % 4) + 4)} Question {number}?"}],
                "max_tokens": 2,
            }
            async with session.post("chat/completions", json=body) as answer:
                answer.raise_for_status()


async def load_pages(root: str, password: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each load of each page."""
    times: dict[str, list[float]] = {page: [] for page in PAGES}
    async with aiohttp.ClientSession(base_url=root, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        async with session.get("/dashboard/login") as answer:
            token = re.findall(r'name="form_token" value="(\w+)"', await answer.text())[0]
        async with session.post("/dashboard/login", data={"form_token": token, "credential": password}) as answer:
            answer.raise_for_status()
        for _ in range(rounds):
            for page in PAGES:
                start = time.perf_counter()
                async with session.get(page) as answer:
                    text = await answer.text()
                times[page].append(time.perf_counter() - start)
                if answer.status != 200 or "away" in text or "does not answer" in text:
                    raise SystemExit(f"{page}: {answer.status} {text[:400]}")
    return times


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.dashboard", description="Times of the dashboard's pages.")
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=0.3, help="seconds, of a page's median")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="radixgate-dashboard-") as directory:
        data_dir = Path(directory)
        with running_server(data_dir) as server:
            asyncio.run(write_history(data_dir, arguments.tenants))
            asyncio.run(ask(server))
            password = (data_dir / "operator.password").read_text().strip()
            times = asyncio.run(load_pages(server.base_url.removesuffix("/v1"), password, arguments.rounds))
    medians = {page: round(1000 * statistics.median(values), 1) for page, values in times.items()}
    print(f"{'page':<48}{'median':>10}{'slowest':>10}     ms, {arguments.tenants:,} tenants over {HOURS} hours")
    for page, values in times.items():
        print(f"{page:<48}{medians[page]:>10}{1000 * max(values):>10.1f}")
    print(json.dumps({"tenants": arguments.tenants, "median_ms": medians}))
    return int(max(medians.values()) > 1000 * arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
