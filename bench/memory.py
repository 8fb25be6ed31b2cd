"""python -m bench.memory: what the engine's process holds once its KV cache is full.

    limit      weights + configured KV + 1 GiB
    weights    the model's parameters, each once, in the dtype in which it is served
    KV         engine.kv_cache_memory; every block of it is written by real requests before anything is measured

Prompts that share nothing are asked until blocks are evicted, and as many again. RSS counts the pages of shared
libraries in full, PSS by the number of processes that map them: RSS is held against the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import msgspec
import psutil

from bench.chat_client import Target, ask, client_session, first_model
from bench.server import RunningServer, running_server
from bench.workload import RagRequest, Workload
from engine.client import EngineClient
from engine.settings import engine_endpoint, load_settings

ALLOWANCE = 1 << 30  # libraries, activations, the index and its bookkeeping
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONCURRENCY = 8
MAX_TOKENS = 4
MAX_SESSIONS = 100_000


class Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    shape: list[int]


@dataclass(frozen=True)
class Memory:
    weights_bytes: int
    kv_bytes: int
    rss_at_start_bytes: int  # ready, nothing asked yet
    rss_bytes: int
    pss_bytes: int
    peak_rss_bytes: int  # loading included
    num_requests: int

    @property
    def limit_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + ALLOWANCE

    def figures(self) -> dict[str, int | bool]:
        headroom = self.limit_bytes - self.rss_bytes
        return asdict(self) | {
            "limit_bytes": self.limit_bytes,
            "headroom_bytes": headroom,
            "within_limit": headroom >= 0,
        }


def count_parameters(model_dir: Path) -> int:
    """From the headers of a model's safetensors: a length in 8 bytes, then JSON."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"no safetensors in {model_dir}")
    return sum(math.prod(tensor.shape) for path in files for tensor in _header(path).values())


def _header(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        entries = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")), type=dict[str, msgspec.Raw])
    return {name: msgspec.json.decode(raw, type=Tensor) for name, raw in entries.items() if name != "__metadata__"}


def engine_process(server_pid: int) -> psutil.Process:
    """The engine among the children of `radixgate serve`."""
    for process in psutil.Process(server_pid).children(recursive=True):
        if process.cmdline()[1:3] == ["-m", "engine"]:
            return process
    raise SystemExit("the server has no engine process")


def peak_rss(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text("ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


async def fill(engine: EngineClient, server: RunningServer, prompts: Iterator[RagRequest]) -> int:
    """Ask until every block has been written, and once more as much; how many requests that took."""
    count = 0
    async with client_session() as session:
        model = await first_model(session, server.base_url, server.api_key)
        target = Target("radixgate", server.base_url, model, server.api_key)

        async def ask_some() -> int:
            requests = list(islice(prompts, CONCURRENCY))
            await asyncio.gather(*(ask(session, target, request.as_text(), MAX_TOKENS) for request in requests))
            return len(requests)

        # A prompt's last block is not full and comes back free: that all were used shows when one has to go.
        while (stats := await engine.stats()).num_evicted_blocks == 0:
            print(f"  {count} requests: {stats.num_free_blocks} of {stats.num_blocks} blocks free", file=sys.stderr)
            count += await ask_some()
        for _ in range(count // CONCURRENCY):
            count += await ask_some()
    return count


def unlike_prompts() -> Iterator[RagRequest]:
    """About 1,800 tokens each, and no prefix in common."""
    workload = Workload(salt=secrets.token_hex(4))
    return (requests[0] for requests in workload.sessions(MAX_SESSIONS))


async def measure(server: RunningServer, endpoint: str, model_dir: Path, kv_bytes: int) -> Memory:
    process = engine_process(server.pid)
    prompts = unlike_prompts()  # before the engine is listening for our heartbeat: this takes seconds
    engine = EngineClient(endpoint)
    await engine.start()
    try:
        info = await engine.wait_ready(60.0)
        rss_at_start = process.memory_info().rss
        count = await fill(engine, server, prompts)
    finally:
        await engine.close()
    full = process.memory_full_info()
    return Memory(
        weights_bytes=count_parameters(model_dir) * ITEM_BYTES[info.dtype],
        kv_bytes=kv_bytes,
        rss_at_start_bytes=rss_at_start,
        rss_bytes=full.rss,
        pss_bytes=full.pss,
        peak_rss_bytes=peak_rss(process),
        num_requests=count,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(".radixgate"))
    parser.add_argument("--kv-cache-memory", default="1GiB")
    args = parser.parse_args()
    # No tiers below: their host memory is a setting of its own and not part of the limit.
    overrides = {"engine.kv_cache_memory": args.kv_cache_memory, "engine.device": "cpu"}
    overrides |= {"tiers.host_memory": "0", "tiers.disk_size": "0"}
    settings = load_settings(None, os.environ, {**overrides, "store.data_dir": str(args.data_dir)})
    flags = [flag for key, value in overrides.items() for flag in ("--set", f"{key}={value}")]
    with running_server(args.data_dir, *flags) as server:
        model_dir = args.data_dir / "models" / "SmolLM2-135M-Instruct"
        memory = asyncio.run(measure(server, engine_endpoint(settings), model_dir, settings.engine.kv_cache_memory))
    for name, value in memory.figures().items():
        shown = f"{value / (1 << 20):12,.0f} MiB" if name.endswith("_bytes") else f"{value!s:>12}"
        print(f"{name:>20} {shown}")
    print(json.dumps(memory.figures()))


if __name__ == "__main__":
    main()
