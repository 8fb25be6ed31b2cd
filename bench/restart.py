"""python -m bench.restart: what of the cache is left after everything was killed.

    1. a radixgate of its own answers sessions over ~1,800 tokens of shared prompt: cold, then warm
    2. the cache comes to rest on disk; every process is killed with SIGKILL
    3. the same data directory is served again, and before anything is asked, every block on disk is read and a sample
       computed anew; everything is killed again
    4. RESTARTS times: it is served again, the first request over a prefix that was cached before (another one each
       time), then the others, and killed

The first request after a start meets a machine that has rested, which on virtual machines is another machine: a plain
torch product of 12 ms takes 23 there once nothing has run for 0.3 s. So every warm request is measured after a rest,
before the kill as after it.

Prints a table, then one JSON line:

    ttft_cold_s, ttft_warm_s      medians over the sessions, before the kill; ttft_warm_burst_s: one right after another
    ttft_after_restart_s          median of the very first requests; ttft_after_restart_median_s: of all requests
    ready_s                       median, until the server says that it is ready: it loads the model, and what was used
                                  last of the cache
    usable_fraction               of the blocks that were on disk at the first kill, those that are read intact after it
    wrong_blocks                  of the blocks computed anew, those that differ
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.chat_client import Answer, Target, ask, client_session, first_model
from bench.server import free_port, wait_until_ready
from bench.workload import RagRequest, Workload
from engine.protocol import CacheVerified, EngineStats, GetStats, VerifyCache
from engine.settings import Settings, StoreSettings, engine_endpoint
from gateway.cache_command import EngineConnection

OUTPUT_TOKENS = 8
WARM_ROUNDS = 3
RESTARTS = 3
PAUSE_SECONDS = 1.0  # before each warm request
REST_SECONDS = 120.0


@dataclass
class Life:
    """One start of everything over a data directory."""

    process: subprocess.Popen[bytes]
    base_url: str
    api_key: str
    ready_s: float  # after its start

    def kill(self) -> None:
        """SIGKILL to every process, at once: nobody can write anything any more."""
        everyone = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for one in everyone:
            one.send_signal(signal.SIGSTOP)
        for one in everyone:
            one.kill()
        psutil.wait_procs(everyone, timeout=30)


@contextmanager
def running(data_dir: Path, extra: list[str]) -> Iterator[Life]:
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", "--port", str(port), "--data-dir", str(data_dir), *extra]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/readyz")
            api_key = (data_dir / "demo.key").read_text().strip()
            yield Life(process, f"http://127.0.0.1:{port}/v1", api_key, time.monotonic() - started)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


async def ask_all(life: Life, requests: list[RagRequest], pause: float = 0.0) -> list[Answer]:
    async with client_session() as session:
        model = await first_model(session, life.base_url, life.api_key)
        target = Target("radixgate", life.base_url, model, life.api_key, takes_documents=True)
        answers: list[Answer] = []
        for request in requests:
            await asyncio.sleep(pause)
            answers.append(await ask(session, target, request.as_documents(), OUTPUT_TOKENS))
        return answers


def stats_of(data_dir: Path) -> EngineStats:
    with EngineConnection(engine_endpoint(_settings(data_dir))) as engine:
        return engine.ask(GetStats(), EngineStats)


def _settings(data_dir: Path) -> Settings:
    return Settings(store=StoreSettings(data_dir=data_dir))


def wait_until_on_disk(data_dir: Path) -> int:
    """Blocks on disk, once no more come and the index has them all."""
    deadline, before = time.monotonic() + REST_SECONDS, -1
    while time.monotonic() < deadline:
        stats = stats_of(data_dir)
        disk = next((tier for tier in stats.tiers if tier.name == "disk"), None)
        if disk is None or stats.index is None:
            raise SystemExit("this engine has no disk tier")
        if disk.num_blocks and disk.num_blocks == before and not stats.index.num_pending:
            return disk.num_blocks
        before = disk.num_blocks
        time.sleep(7.0)  # longer than the engine waits before it rests
    raise SystemExit(f"the cache did not come to rest on disk within {REST_SECONDS:.0f} s")


def verify(data_dir: Path) -> CacheVerified:
    with EngineConnection(engine_endpoint(_settings(data_dir)), seconds=600) as engine:
        return engine.call(lambda call_id: VerifyCache(call_id=call_id, num_recomputed=10), CacheVerified)


def measure(data_dir: Path, sessions: int, extra: list[str]) -> dict[str, float | int]:
    workload = Workload(salt=secrets.token_hex(4))
    requests = [kinds[0] for kinds in workload.sessions(sessions)]
    with running(data_dir, extra) as life:
        asyncio.run(ask_all(life, [workload.warmup()]))
        cold = asyncio.run(ask_all(life, requests))
        burst = [answer for _ in range(WARM_ROUNDS) for answer in asyncio.run(ask_all(life, requests))]
        warm = [answer for _ in range(WARM_ROUNDS) for answer in asyncio.run(ask_all(life, requests, PAUSE_SECONDS))]
        on_disk = wait_until_on_disk(data_dir)
        life.kill()
    with running(data_dir, extra) as life:
        proof = verify(data_dir)
        life.kill()
    first: list[Answer] = []
    after: list[Answer] = []
    ready_s: list[float] = []
    asked = [(request, answer.text) for request, answer in zip(requests, warm[-sessions:], strict=True)]
    changed = 0
    for restart in range(RESTARTS):
        turn = asked[restart % sessions :] + asked[: restart % sessions]
        with running(data_dir, extra) as life:
            ready_s.append(life.ready_s)
            answers = asyncio.run(ask_all(life, [request for request, _ in turn], PAUSE_SECONDS))
            life.kill()
        first.append(answers[0])
        after += answers
        for (_, text), answer in zip(turn, answers, strict=True):
            if answer.text != text:
                changed += 1
                print(f"another text after the restart: {text!r}, {answer.text!r}", file=sys.stderr)
    return {
        "ttft_cold_s": round(statistics.median(answer.ttft_s for answer in cold), 4),
        "ttft_warm_s": round(statistics.median(answer.ttft_s for answer in warm), 4),
        "ttft_warm_burst_s": round(statistics.median(answer.ttft_s for answer in burst), 4),
        "ttft_after_restart_s": round(statistics.median(answer.ttft_s for answer in first), 4),
        "ttft_after_restart_median_s": round(statistics.median(answer.ttft_s for answer in after), 4),
        "cached_fraction_after_restart": round(
            sum(answer.cached_tokens or 0 for answer in after) / sum(answer.prompt_tokens for answer in after), 4
        ),
        "ready_s": round(statistics.median(ready_s), 2),
        "blocks_on_disk": on_disk,
        "usable_fraction": round((proof.num_read - proof.num_unreadable) / on_disk, 4),
        "recomputed_blocks": proof.num_recomputed,
        "wrong_blocks": proof.num_different,
        "changed_texts": changed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--data-dir", type=Path, help="with a converted model; default: a new one")
    args, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="radixgate-restart-") as directory:
        figures = measure(args.data_dir or Path(directory), args.sessions, extra)
    for name, value in figures.items():
        print(f"{name:<32}{value:>10}")
    print(f"{'warm / after restart':<32}{figures['ttft_after_restart_s'] / figures['ttft_warm_s']:>10.2f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
