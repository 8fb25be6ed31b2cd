"""`python -m bench.soak --minutes 60`: mixed load with trouble, and what must hold all the while.

    clients    streams and whole answers, shared and novel prompts, n > 1, bad bodies, aborts in mid-stream, requests
               that use no cache
    trouble    the store killed and back, the gateway reloaded, again and again
    held       no request fails that was not meant to; after each round the engine is idle and no block is active (I10),
               no invariant broke and no step failed; at the end the metrics equal the responses (I9), and memory grew
               by no more than `--growth` over the second half

It starts `radixgate serve` on a free port. Prints a table, then one JSON line; exit code 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.server import RunningServer, running_server

NUM_CLIENTS = 8
ROUND_SECONDS = 20.0
SETTLE_SECONDS = 30.0
PARTS = ("The quick brown fox jumps over the lazy dog. ", "A cache keeps what may be asked again. ", "Water boils. ")

Samples = dict[tuple[str, ...], float]


class BrokenPromiseError(Exception):
    """Something that must hold did not."""


@dataclass
class Tally:
    """What the clients were told."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    prompt: int = 0
    cached: int = 0
    output: int = 0
    aborted: int = 0


class Soak:
    def __init__(
        self,
        server: RunningServer,
        metrics_token: str,
        seed: int,
        *,
        trouble: bool,
        round_seconds: float = ROUND_SECONDS,
    ) -> None:
        self._server = server
        self._headers = {"authorization": f"Bearer {server.api_key}"}
        self._metrics_headers = {"authorization": f"Bearer {metrics_token}"}
        self._root = server.base_url.removesuffix("/v1")
        self._dice = random.Random(seed)
        self._trouble = trouble
        self._round_seconds = round_seconds
        self._model = ""
        self.tally = Tally()
        self.memory: list[int] = []  # bytes, of all processes, after each round

    async def run(self, seconds: float) -> None:
        """Raises BrokenPromiseError."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            async with session.get(f"{self._server.base_url}/models", headers=self._headers) as answer:
                self._model = (await answer.json())["data"][0]["id"]
            start = time.monotonic()
            while time.monotonic() - start < seconds:
                await self._round(session)
            await self._check_sums(session)

    async def _round(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + self._round_seconds
        clients = [self._client(session, deadline) for _ in range(NUM_CLIENTS)]
        if self._trouble:
            await asyncio.gather(self._make_trouble(), *clients)
        else:
            await asyncio.gather(*clients)
        await self._check_idle(session)
        self.memory.append(_memory(self._server.pid))

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

    # ------------------------------------------------------------ clients

    async def _client(self, session: aiohttp.ClientSession, deadline: float) -> None:
        while time.monotonic() < deadline:
            kind = self._dice.choices(
                ("repeat", "novel", "stream", "abort", "parallel", "uncached", "bad"), (4, 2, 4, 2, 1, 1, 1)
            )[0]
            await self._ask(session, kind)
            self.tally.kinds[kind] += 1

    def _body(self, kind: str) -> dict[str, object]:
        system = self._dice.choice(PARTS) * 8
        novel = f"{self._dice.random()} " * 12 if kind == "novel" else f"Question {self._dice.randrange(4)}?"
        body: dict[str, object] = {
            "model": self._model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": novel}],
            "max_tokens": self._dice.randint(1, 24),
            "temperature": 0,
        }
        if kind in ("stream", "abort"):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if kind == "abort":
            body["max_tokens"] = 200
        if kind == "parallel":
            body |= {"n": 2, "temperature": 1}
        if kind == "uncached":
            body["use_cache"] = False
        if kind == "bad":
            body["temperature"] = -1
        return body

    async def _ask(self, session: aiohttp.ClientSession, kind: str) -> None:
        url = f"{self._server.base_url}/chat/completions"
        async with session.post(url, json=self._body(kind), headers=self._headers) as answer:
            expected = 400 if kind == "bad" else 200
            if answer.status != expected:
                raise BrokenPromiseError(f"{kind}: {answer.status} {await answer.text()}")
            if kind == "bad":
                return
            if kind == "abort":
                await answer.content.readline()
                self.tally.aborted += 1
                answer.close()
                return
            text = await answer.text()
        usage = _usage(text, streamed=kind == "stream")
        self.tally.prompt += usage["prompt_tokens"]
        self.tally.output += usage["completion_tokens"]
        self.tally.cached += usage["cached_tokens"]

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

    async def _check_sums(self, session: aiohttp.ClientSession) -> None:
        """I9. Aborted requests are in the metrics alone, which are never below the responses."""
        found = await self._scrape(session, "/metrics")
        prompt = sum(n for key, n in found.items() if key[0] == "radixgate_prompt_tokens_total")
        output = sum(n for key, n in found.items() if key[0] == "radixgate_output_tokens_total")
        told = (self.tally.prompt, self.tally.output)
        equal = (prompt, output) == told
        if prompt < told[0] or output < told[1] or (not self.tally.aborted and not equal):
            raise BrokenPromiseError(f"I9: metrics say {prompt:.0f} and {output:.0f} tokens, responses {told}")

    def growth(self) -> float:
        """Of the memory, over the second half of the rounds, as a fraction; the first half warms up."""
        half = self.memory[len(self.memory) // 2 :]
        return half[-1] / half[0] - 1 if len(half) > 1 else 0.0


def _usage(text: str, *, streamed: bool) -> dict[str, int]:
    last = text.strip().split("\n\n")[-2].removeprefix("data: ") if streamed else text
    document = cast("dict[str, dict[str, object]]", json.loads(last))
    if "error" in document:
        raise BrokenPromiseError(f"an error in mid-stream: {document['error']}")
    usage = document["usage"]
    details = cast("dict[str, int]", usage["prompt_tokens_details"])
    counts = {name: cast("int", usage[name]) for name in ("prompt_tokens", "completion_tokens")}
    return {**counts, "cached_tokens": details["cached_tokens"]}


def _memory(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(member.memory_info().rss for member in (process, *process.children(recursive=True)))


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
        with running_server(data_dir, *arguments.serve_arguments) as server:
            token = (data_dir / "metrics.token").read_text().strip()
            soak = Soak(server, token, arguments.seed, trouble=True)
            problem = _run(soak, arguments.minutes * 60)
    growth = soak.growth()
    if problem is None and growth > arguments.growth:
        problem = f"memory grew by {100 * growth:.1f}% over the second half"
    _report(soak, growth, problem)
    return int(problem is not None)


def _run(soak: Soak, seconds: float) -> str | None:
    try:
        asyncio.run(soak.run(seconds))
    except BrokenPromiseError as error:
        return str(error)
    return None


def _report(soak: Soak, growth: float, problem: str | None) -> None:
    tally = soak.tally
    for kind, count in sorted(tally.kinds.items()):
        print(f"{kind:<10}{count:>8}")
    print(f"{'rounds':<10}{len(soak.memory):>8}   memory {[m >> 20 for m in soak.memory][-5:]} MiB")
    print(problem or "everything held")
    figures = {
        "requests": sum(tally.kinds.values()),
        "prompt_tokens": tally.prompt,
        "cached_tokens": tally.cached,
        "output_tokens": tally.output,
        "aborted": tally.aborted,
        "memory_growth": round(growth, 4),
        "problem": problem,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
