"""python -m bench.serve: time to first token, decode speed and reuse of retrieval-augmented chat, side by side.

    sessions   one request at a time: cold, repeat, newq, newdocs, perm (bench/workload.py). Every request goes to
               every server in turn, so that a busy minute of the machine hits all of them; the turn rotates.
    loops      closed loops at 8 and 16: so many clients, each sends its next request when it has its answer.
               One server after the other at each concurrency.

Without --base-url it starts a radixgate of its own. --peers adds any other OpenAI-compatible servers; they should serve
the same model. Prints a table, then one JSON line: the figures of the first server, those of the peers under `peers`.

    ttft_KIND_s, cached_fraction_KIND      medians of the sessions; tokens over all prompts of the kind
    cold_over_repeat, cold_over_newq       how much sooner the first token comes
    tpot_ms                                median time per output token, one request at a time
    out_tok_s_cN, prompt_tok_s_cN          of the whole loop; prompt tokens cached or not
    ttft_cN_s, gap_p99_cN_ms               median; how long a stream stands still while others prefill
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.chat_client import Answer, RequestFailedError, Target, ask, client_session, first_model
from bench.server import running_server
from bench.workload import KINDS, RagRequest, Workload

Figures = dict[str, float | None]


@dataclass
class Measured:
    """What one server answered."""

    target: Target
    by_kind: dict[str, list[Answer]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    loops: dict[int, tuple[list[Answer], float]] = field(default_factory=dict)  # by concurrency; with the wall time

    def figures(self) -> Figures:
        figures = _session_figures(self.by_kind)
        for concurrency, (answers, wall_s) in self.loops.items():
            figures |= _loop_figures(f"c{concurrency}", answers, wall_s)
        return figures


def _session_figures(by_kind: dict[str, list[Answer]]) -> Figures:
    ttft_s = {kind: statistics.median(answer.ttft_s for answer in answers) for kind, answers in by_kind.items()}
    figures: Figures = {f"ttft_{kind}_s": round(value, 4) for kind, value in ttft_s.items()}
    figures |= {f"cold_over_{kind}": round(ttft_s["cold"] / ttft_s[kind], 2) for kind in ("repeat", "newq")}
    figures |= {f"cached_fraction_{kind}": _cached_fraction(answers) for kind, answers in by_kind.items()}
    tpot_s = [answer.tpot_s for answers in by_kind.values() for answer in answers if answer.tpot_s is not None]
    figures["tpot_ms"] = round(statistics.median(tpot_s) * 1e3, 2) if tpot_s else None
    return figures


def _loop_figures(name: str, answers: list[Answer], wall_s: float) -> Figures:
    gaps_s = sorted(gap for answer in answers for gap in answer.gaps_s)
    return {
        f"out_tok_s_{name}": round(sum(answer.output_tokens for answer in answers) / wall_s, 2),
        f"prompt_tok_s_{name}": round(sum(answer.prompt_tokens for answer in answers) / wall_s, 1),
        f"ttft_{name}_s": round(statistics.median(answer.ttft_s for answer in answers), 4),
        f"gap_p99_{name}_ms": round(gaps_s[int(len(gaps_s) * 0.99)] * 1e3, 1) if gaps_s else None,
        f"cached_fraction_{name}": _cached_fraction(answers),
    }


def _cached_fraction(answers: Sequence[Answer]) -> float | None:
    """Of all prompt tokens; None where the server does not report it."""
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return round(sum(cached) / prompt_tokens, 4) if len(cached) == len(answers) and prompt_tokens else None


@dataclass
class Bench:
    session: aiohttp.ClientSession
    measured: list[Measured]
    workload: Workload
    max_tokens: int

    async def warm_up(self) -> None:
        for measured in self.measured:
            answer = await self._ask(measured.target, self.workload.warmup())
            _progress(f"{measured.target.name}: {answer.prompt_tokens} prompt tokens, says {answer.text[:60]!r}")

    async def run_sessions(self, count: int) -> None:
        for done, requests in enumerate(self.workload.sessions(count)):
            for request in requests:
                for turn in range(len(self.measured)):
                    measured = self.measured[(done + turn) % len(self.measured)]
                    measured.by_kind[request.kind].append(await self._ask(measured.target, request))
            _progress(f"session {done + 1} of {count}")

    async def run_loop(self, concurrency: int, count: int) -> None:
        for measured in self.measured:
            started_s = time.perf_counter()
            answers = await self._closed_loop(measured.target, concurrency, count)
            measured.loops[concurrency] = answers, time.perf_counter() - started_s

    async def _closed_loop(self, target: Target, concurrency: int, count: int) -> list[Answer]:
        requests = iter(self.workload.loop(f"c{concurrency:02d}", count))
        answers: list[Answer] = []

        async def client() -> None:
            for request in requests:
                answers.append(await self._ask(target, request))
                if len(answers) % 20 == 0:
                    _progress(f"{target.name}, {concurrency} at once: {len(answers)} of {count}")

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        return answers

    async def _ask(self, target: Target, request: RagRequest) -> Answer:
        prompt = request.as_documents() if target.takes_documents else request.as_text()
        return await ask(self.session, target, prompt, self.max_tokens)


def _progress(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


async def _targets(session: aiohttp.ClientSession, args: argparse.Namespace, server: tuple[str, str]) -> list[Target]:
    base_url, api_key = server
    model = args.model or await first_model(session, base_url, api_key)
    targets = [Target("radixgate", base_url, model, api_key, takes_documents=args.documents)]
    for peer in args.peers:
        name, _, url = peer.partition("=")
        url = url.rstrip("/")
        targets.append(Target(name, url, args.model or await first_model(session, url, "")))
    return targets


async def _measure(args: argparse.Namespace, server: tuple[str, str]) -> list[Measured]:
    async with client_session() as session, _no_measurement_after_a_failure():
        measured = [Measured(target) for target in await _targets(session, args, server)]
        bench = Bench(session, measured, Workload(salt=args.salt), args.max_tokens)
        await bench.warm_up()
        await bench.run_sessions(min(args.sessions, max(1, args.limit // len(KINDS))))
        for concurrency in args.concurrency:
            await bench.run_loop(concurrency, args.limit)
    return measured


@contextlib.asynccontextmanager
async def _no_measurement_after_a_failure() -> AsyncIterator[None]:
    failures: list[BaseException] = []
    try:
        yield
    except* (RequestFailedError, aiohttp.ClientError) as group:
        failures += group.exceptions
    if failures:
        raise SystemExit(f"no measurement: {failures[0]}")


def _print_table(measured: Sequence[Measured]) -> None:
    columns = [one.figures() for one in measured]
    print(f"{'':<26}" + "".join(f"{one.target.name:>14}" for one in measured))
    for key in columns[0]:
        values = ("-" if column[key] is None else f"{column[key]:,}" for column in columns)
        print(f"{key:<26}" + "".join(f"{value:>14}" for value in values))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="the server under test, with /v1; without, a radixgate is started")
    parser.add_argument("--model", help="default: the first one that each server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=URL", help="other servers to run beside it")
    parser.add_argument("--documents", action="store_true", help="send documents by radixgate's field (not to peers)")
    parser.add_argument("--limit", type=int, default=200, help="requests of a closed loop, and at most of the sessions")
    parser.add_argument("--sessions", type=int, default=10, help="of five requests each")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--salt", default=secrets.token_hex(4), help="the same one asks the same prompts again")
    parser.add_argument("--data-dir", type=Path, default=Path(".radixgate"), help="of the server that is started")
    return parser.parse_args()


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(base URL, API key) of the server under test."""
    if args.base_url:
        yield args.base_url.rstrip("/"), args.api_key
        return
    with running_server(args.data_dir) as server:
        yield server.base_url, server.api_key


def main() -> None:
    args = _arguments()
    with _server(args) as server:
        measured = asyncio.run(_measure(args, server))
    _print_table(measured)
    first, *peers = measured
    result: dict[str, object] = dict(first.figures())
    result |= {"limit": args.limit, "documents": args.documents, "salt": args.salt}
    result |= {"python": platform.python_version(), "peers": {peer.target.name: peer.figures() for peer in peers}}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
