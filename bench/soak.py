"""`python -m bench.soak --minutes 60`: mixed load with trouble, and what must hold all the while.

    clients    what `bench.soak_clients` lists: streams and whole answers of two tenants, shared and novel prompts,
               aborts and retries, documents and files that are deleted again
    trouble    the store killed and back, the gateway reloaded, again and again
    held       no request fails that was not meant to; what the clients check (I5, I6, I7, deletion); after each round
               the engine is idle and no block is active (I10), no invariant broke (I1 to I4, I8: it walks everything
               when idle) and no step failed; at the end metrics, usage and responses are equal (I9), and memory grew
               by no more than `--growth` over the second half

It starts `radixgate serve` on a free port, with a cache so small that it is full within minutes. Prints a table, then
one JSON line; exit code 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.server import RunningServer, running_server
from bench.soak_clients import BrokenPromiseError, Clients, Credentials, Tally

NUM_CLIENTS = 8
ROUND_SECONDS = 20.0
SETTLE_SECONDS = 120.0  # for the machine may have other work
SMALL_CACHE = ("engine.kv_cache_memory=192MiB", "tiers.host_memory=64MiB", "tiers.disk_size=128MiB")
NEIGHBOUR = "neighbour"
CACHED_CLASSES = ("device", "host", "disk")

Samples = dict[tuple[str, ...], float]


class Soak:
    """`tenants`: the ids behind the two keys of `credentials`, in their order."""

    def __init__(
        self,
        server: RunningServer,
        credentials: Credentials,
        tenants: tuple[str, str],
        metrics_token: str,
        seed: int,
        *,
        trouble: bool = True,
        retrieval: bool = True,
        round_seconds: float = ROUND_SECONDS,
    ) -> None:
        self._server = server
        self._credentials = credentials
        self._tenants: dict[str, str] = dict(zip(("own", "neighbour"), tenants, strict=True))
        self._metrics_headers = {"authorization": f"Bearer {metrics_token}"}
        self._root = server.base_url.removesuffix("/v1")
        self._seed = seed
        self._trouble = trouble
        self._retrieval = retrieval
        self._round_seconds = round_seconds
        self.tally = Tally()
        self.memory: list[int] = []  # bytes, of all processes, after each round

    async def run(self, seconds: float) -> None:
        """Raises BrokenPromiseError."""
        start, began = time.monotonic(), int(time.time())
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1800)) as session:
            model, _ = [await self._model(session, who) for who in self._tenants]
            clients = Clients(session, self._credentials, model, self._seed, retrieval=self._retrieval)
            self.tally = clients.tally
            while time.monotonic() - start < seconds:
                await self._round(session, clients)
            await self._check_sums(session, began)

    async def _model(self, session: aiohttp.ClientSession, who: str) -> str:
        """What is served to a tenant, once its key is known to the gateway."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            async with session.get(f"{self._server.base_url}/models", headers=self._credentials.headers(who)) as answer:
                if answer.status == 200:
                    return str((await answer.json())["data"][0]["id"])
                if time.monotonic() > deadline:
                    raise BrokenPromiseError(f"the key of {self._tenants[who]}: {answer.status} {await answer.text()}")
            await asyncio.sleep(0.2)

    async def _round(self, session: aiohttp.ClientSession, clients: Clients) -> None:
        deadline = time.monotonic() + self._round_seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(clients.work(deadline))
            if self._trouble:
                group.create_task(self._make_trouble())
        await self._check_idle(session)
        self.memory.append(_memory(self._server.pid))
        done = self.tally.kinds.total()
        print(f"soak    | round {len(self.memory)}: {done} requests, {self.memory[-1] >> 20} MiB", file=sys.stderr)

    async def _make_trouble(self) -> None:
        """A supervisor starts a store again that was killed, and reloads its gateways on SIGHUP."""
        await asyncio.sleep(self._round_seconds / 4)
        supervisor = psutil.Process(self._server.pid)
        if len(self.memory) % 8 == 3:  # rarely: five deaths in ten minutes and the supervisor gives up, as it should
            for child in supervisor.children():
                if "server" in child.name() and "python" not in child.name():
                    child.kill()
        elif len(self.memory) % 2:
            supervisor.send_signal(signal.SIGHUP)

    # ------------------------------------------------------------ what must hold

    async def _scrape(self, session: aiohttp.ClientSession, path: str) -> Samples:
        async with session.get(f"{self._root}{path}", headers=self._metrics_headers) as answer:
            answer.raise_for_status()
            text = await answer.text()
        return {
            (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def _check_idle(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            engine = await self._scrape(session, "/metrics/engine")
            blocks = {state: engine["radixgate_engine_blocks", state] for state in ("free", "cached", "active")}
            busy = (
                engine["radixgate_engine_requests_now", "running"] + engine["radixgate_engine_requests_now", "waiting"]
            )
            if not busy and not blocks["active"]:
                break
            if time.monotonic() > deadline:
                raise BrokenPromiseError(f"I10: {busy:.0f} requests and {blocks['active']:.0f} blocks stay behind")
            await asyncio.sleep(0.2)
        if engine["radixgate_engine_integrity_failures_total",]:
            raise BrokenPromiseError("an invariant was broken: the engine's log names it")
        if engine["radixgate_engine_step_failures_total",]:
            raise BrokenPromiseError("a step failed: the engine's log names it")

    async def _check_sums(self, session: aiohttp.ClientSession, began: int) -> None:
        """I9. What clients left before its end is in metrics and usage, and in no response."""
        found = await self._scrape(session, "/metrics")
        for who, tenant in self._tenants.items():
            told = (self.tally.prompt[who], self.tally.cached[who], self.tally.output[who])
            counted = _metered(found, tenant)
            await self._check_usage(session, who, began, counted)
            below = any(n < least for n, least in zip(counted, told, strict=True))
            if below or (counted != told and not self.tally.aborted[who]):
                raise BrokenPromiseError(f"I9: of {tenant}, metrics say {counted}, the responses {told}")

    async def _check_usage(
        self, session: aiohttp.ClientSession, who: str, began: int, counted: tuple[int, int, int]
    ) -> None:
        """Each gateway writes its usage every now and then, and catches up when the store is back."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (billed := await self._billed(session, who, began)) != counted:
            if time.monotonic() > deadline:
                raise BrokenPromiseError(f"I9: of {self._tenants[who]}, metrics say {counted}, its usage {billed}")
            await asyncio.sleep(0.2)

    async def _billed(self, session: aiohttp.ClientSession, who: str, began: int) -> tuple[int, int, int]:
        """Prompt, cached and output tokens, as the usage API has them."""
        url = f"{self._server.base_url}/usage?start_time={began // 60 * 60}&bucket_width=1h&limit=168"
        async with session.get(url, headers=self._credentials.headers(who)) as answer:
            if answer.status != 200:
                raise BrokenPromiseError(f"usage: {answer.status} {await answer.text()}")
            page = cast("dict[str, list[dict[str, list[dict[str, int]]]]]", await answer.json())
        rows = [row for bucket in page["data"] for row in bucket["results"]]
        names = ("input_tokens", "input_cached_tokens", "output_tokens")
        prompt, cached, output = (sum(row[name] for row in rows) for name in names)
        return prompt, cached, output

    def growth(self) -> float:
        """Of the memory, over the second half of the rounds, as a fraction; the first half warms up."""
        half = self.memory[len(self.memory) // 2 :]
        return half[-1] / half[0] - 1 if len(half) > 1 else 0.0


def _metered(found: Samples, tenant: str) -> tuple[int, int, int]:
    """Prompt, cached and output tokens of a tenant; the labels of a sample stand in alphabetical order."""
    classes = {
        key[1]: int(n) for key, n in found.items() if key[0] == "radixgate_prompt_tokens_total" and key[3] == tenant
    }
    output = sum(int(n) for key, n in found.items() if key[0] == "radixgate_output_tokens_total" and key[2] == tenant)
    return sum(classes.values()), sum(classes.get(name, 0) for name in CACHED_CLASSES), output


def _memory(pid: int) -> int:
    """Bytes of the server's processes, as they are printed."""
    process = psutil.Process(pid)
    sizes = [member.memory_info().rss for member in (process, *process.children(recursive=True))]
    print(f"soak    | MiB: {' '.join(str(size >> 20) for size in sizes)}", file=sys.stderr)
    return sum(sizes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="Mixed load with trouble.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--growth", type=float, default=0.02, help="of the memory over the second half, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, help="by default a temporary one")
    parser.add_argument("serve_arguments", nargs="*", help="after --: more arguments of `radixgate serve`")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="radixgate-soak-") as temporary:
        data_dir: Path = arguments.data_dir or Path(temporary)
        small = [part for setting in SMALL_CACHE for part in ("--set", setting)]
        with running_server(data_dir, *small, *arguments.serve_arguments) as server:
            token = (data_dir / "metrics.token").read_text().strip()
            credentials = Credentials(server.base_url, server.api_key, _new_tenant(data_dir, NEIGHBOUR))
            soak = Soak(server, credentials, ("demo", NEIGHBOUR), token, arguments.seed)
            problem = _run(soak, arguments.minutes * 60)
    growth = soak.growth()
    if problem is None and growth > arguments.growth:
        problem = f"memory grew by {100 * growth:.1f}% over the second half"
    _report(soak, growth, problem)
    return int(problem is not None)


def _run(soak: Soak, seconds: float) -> str | None:
    problems: list[str] = []
    try:
        asyncio.run(soak.run(seconds))
    except* BrokenPromiseError as broken:
        problems = [str(error) for error in broken.exceptions]
    return "; ".join(problems) or None


def _new_tenant(data_dir: Path, name: str) -> str:
    """Its API key."""
    for command in (["tenant", "create", name], ["key", "create", name]):
        done = subprocess.run(
            [sys.executable, "-m", "gateway", *command, "--data-dir", str(data_dir)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return done.stdout.split()[-1]


def _report(soak: Soak, growth: float, problem: str | None) -> None:
    tally = soak.tally
    for kind, count in sorted(tally.kinds.items()):
        print(f"{kind:<10}{count:>8}")
    print(f"{'rounds':<10}{len(soak.memory):>8}   memory {[m >> 20 for m in soak.memory][-5:]} MiB")
    print(problem or "everything held")
    figures = {
        "requests": sum(tally.kinds.values()),
        "prompt_tokens": tally.prompt.total(),
        "cached_tokens": tally.cached.total(),
        "output_tokens": tally.output.total(),
        "aborted": tally.aborted.total(),
        "waited_for_store": tally.waited_for_store,
        "memory_growth": round(growth, 4),
        "problem": problem,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
