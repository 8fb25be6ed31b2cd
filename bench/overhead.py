"""python -m bench.overhead: what the cache costs when it never hits.

A stream of random prompts runs through the real engine once, for the time that the model takes. The bookkeeping of
the same stream (scheduler, block manager, index, output) is then timed alone, over a device that does nothing,
with prefix caching on and off in turn. The difference, as a share of the whole, is what the cache costs; the pool is
small, so that every new block has to evict an old one.

Timing whole runs instead could not show it: one percent is less than a machine's noise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from bench.idle_device import IdleDevice
from engine.build import build_engine
from engine.engine import LLMEngine
from engine.load_progress import stderr_progress
from engine.protocol import Delta, SamplingParams, Segment, SegmentKind, Submit
from engine.settings import EngineSettings, ModelSettings, Settings, StoreSettings

PROMPT_TOKENS = 700
OUTPUT_TOKENS = 24
CONCURRENCY = 8


def stream(count: int, vocab_size: int, seed: int) -> list[Submit]:
    """Random prompts: nothing of them repeats."""
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    return [
        Submit(
            request_id=f"r{number}",
            tenant_id=f"t{number % 4}",
            segments=(
                Segment.of(SegmentKind.QUESTION, rng.choices(range(vocab_size), k=PROMPT_TOKENS), _scope(number)),
            ),
            sampling=sampling,
        )
        for number in range(count)
    ]


def run(engine: LLMEngine, submits: list[Submit]) -> tuple[float, int, int]:
    """(seconds, cached tokens, prompt tokens) of the stream at a fixed concurrency."""
    waiting, running = list(reversed(submits)), 0
    cached = total = 0
    start = time.perf_counter()
    while waiting or running:
        while waiting and running < CONCURRENCY:
            engine.add_request(waiting.pop())
            running += 1
        for message in engine.step():
            assert isinstance(message, Delta), message
            if message.account is not None:
                cached += message.account.num_cached_tokens
                total += message.account.num_prompt_tokens
            running -= message.finish_reason is not None
    return time.perf_counter() - start, cached, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(".radixgate"))
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    settings = Settings(
        model=ModelSettings(),
        store=StoreSettings(data_dir=args.data_dir),
        engine=EngineSettings(kv_cache_memory=256 << 20),
    )
    real = build_engine(settings, stderr_progress)
    info = real.info()
    submits = stream(args.requests, info.vocab_size, seed=1)
    print(f"{args.requests} random prompts of {PROMPT_TOKENS} tokens through the model …", file=sys.stderr)
    model_seconds, cached, total = run(real, submits)
    bookkeeping: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(args.rounds):
        for caching in (True, False):
            engine = LLMEngine(info, _with_caching(settings.engine, caching), IdleDevice())
            bookkeeping[caching].append(run(engine, submits)[0])
    on, off = (statistics.median(bookkeeping[caching]) for caching in (True, False))
    share = (on - off) / model_seconds
    tokens = args.requests * (PROMPT_TOKENS + OUTPUT_TOKENS)
    print(f"{'model and all':>24} {model_seconds:10.3f} s   {tokens / model_seconds:8.0f} tokens/s")
    print(f"{'bookkeeping, cache on':>24} {on:10.4f} s   {on / tokens * 1e6:8.2f} µs a token")
    print(f"{'bookkeeping, cache off':>24} {off:10.4f} s   {off / tokens * 1e6:8.2f} µs a token")
    print(f"{'cost of the cache':>24} {share:10.3%}     hit rate {cached / total:.2%}")
    print(json.dumps({"hit_rate_random": cached / total, "cache_cost_fraction": round(share, 5)}))


def _scope(number: int) -> bytes:
    """Of one of four tenants."""
    return f"t{number % 4}".encode().ljust(16, b"-")


def _with_caching(settings: EngineSettings, caching: bool) -> EngineSettings:
    return EngineSettings(kv_cache_memory=settings.kv_cache_memory, enable_prefix_caching=caching)


if __name__ == "__main__":
    main()
