"""python -m bench.fairness: what a noisy neighbour costs a quiet tenant, on the real engine.

    quiet    a few conversations about documents of its own, one question after the other: a prompt that was
             asked before, and a new question at its end
    noisy    ten times that load: ten clients at once, ten answers between two questions, as long as the quiet ones,
             each prompt new; from one question of a conversation to the next, four times of what the pool holds

A question arrives at a random moment of the step under way, and waits for its end; the engine's settings are its
defaults. Three runs of the same quiet questions, each on an empty cache: alone; beside the noisy tenant with a floor
under the quiet one's cached tokens; and beside it without. A table, then one JSON line:

    hit_rate_drop_points    of the quiet tenant's token hit rate, in points, against alone
    ttft_p50_ratio          of its median time to first token, against alone
    …_without_floors        the same without the floor: what a plain cache does to it
    noisy_tokens_per_s      prompt and output tokens of the noisy tenant meanwhile, with the floor
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.build import build_engine
from engine.engine import LLMEngine
from engine.load_progress import stderr_progress
from engine.protocol import Delta, SamplingParams, Segment, SegmentKind, Submit, TenantPolicy
from engine.settings import EngineSettings, Settings, StoreSettings, TierSettings

CONVERSATIONS = 4
PROMPT_TOKENS = 480
QUESTION_TOKENS = 96
NOISY_TOKENS = PROMPT_TOKENS + QUESTION_TOKENS
NOISY_CLIENTS = 10
OUTPUT_TOKENS = 8
POOL_TOKENS = 6144
FLOOR_TOKENS = CONVERSATIONS * (PROMPT_TOKENS + QUESTION_TOKENS + OUTPUT_TOKENS) + 512


@dataclass
class Quiet:
    """What the quiet tenant has seen, after its conversations have been asked once."""

    ttft_s: list[float] = field(default_factory=list[float])
    cached: int = 0
    total: int = 0
    noisy_tokens_per_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached / self.total

    @property
    def ttft_p50_s(self) -> float:
        return statistics.median(self.ttft_s)


class Load:
    """Drives the engine: the quiet tenant asks one question at a time, the noisy one keeps its clients busy."""

    def __init__(
        self,
        engine: LLMEngine,
        noisy_clients: int,
        floor_tokens: int,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._noisy_clients = noisy_clients
        self._quiet_policy = TenantPolicy(kv_floor_tokens=floor_tokens)
        self._rng = random.Random(seed)
        self._vocabulary = range(256, engine.info().vocab_size - 256)
        self._count = 0
        self._arrivals = random.Random(seed)
        self._noisy: set[str] = set()
        self._num_noisy_done = 0

    def run(self, questions: int) -> Quiet:
        seen, begun = Quiet(), self._clock()
        prompts = [self._tokens(PROMPT_TOKENS) for _ in range(CONVERSATIONS)]
        for i in range(CONVERSATIONS + questions):
            prompt = prompts[i % CONVERSATIONS] + self._tokens(QUESTION_TOKENS)
            first, answer = self._ask(prompt)
            if i >= CONVERSATIONS:
                seen.ttft_s.append(first)
                seen.cached += answer.cached
                seen.total += answer.total
        noisy_tokens = self._num_noisy_done * (NOISY_TOKENS + OUTPUT_TOKENS)
        seen.noisy_tokens_per_s = noisy_tokens / (self._clock() - begun)
        self._finish_noisy()
        return seen

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(self._vocabulary, k=count)

    def _ask(self, prompt: list[int]) -> tuple[float, _Account]:
        """Between two questions the quiet user reads; the noisy tenant does not wait for that."""
        until = self._num_noisy_done + self._noisy_clients
        while self._num_noisy_done < until:
            self._step(None)
        began = self._clock()
        self._step(None)  # the one under way: nothing without the noisy tenant
        start = began + self._arrivals.random() * (self._clock() - began)
        request_id = self._submit("quiet", prompt, self._quiet_policy)
        first, account = 0.0, _Account(0, 0)
        while True:
            for delta in self._step(request_id):
                if delta.account is not None:
                    first = self._clock() - start
                    account = _Account(delta.account.num_cached_tokens, delta.account.num_prompt_tokens)
                if delta.finish_reason is not None:
                    return first, account

    def _step(self, wanted: str | None) -> list[Delta]:
        while len(self._noisy) < self._noisy_clients:
            self._noisy.add(self._submit("noisy", self._tokens(NOISY_TOKENS), TenantPolicy()))
        if not self._engine.has_work():
            return []
        found: list[Delta] = []
        for message in self._engine.step():
            assert isinstance(message, Delta), message
            if message.request_id == wanted:
                found.append(message)
            elif message.finish_reason is not None:
                self._noisy.discard(message.request_id)
                self._num_noisy_done += 1
        return found

    def _submit(self, tenant: str, tokens: list[int], policy: TenantPolicy) -> str:
        self._count += 1
        request_id = f"{tenant}-{self._count}"
        self._engine.add_request(
            Submit(
                request_id=request_id,
                tenant_id=tenant,
                segments=(Segment.of(SegmentKind.QUESTION, tokens, tenant.ljust(16).encode()),),
                sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
                policy=policy,
            )
        )
        return request_id

    def _finish_noisy(self) -> None:
        for request_id in list(self._noisy):
            self._engine.abort_request(request_id)


@dataclass(frozen=True)
class _Account:
    cached: int
    total: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(".radixgate"))
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--fair-step-ms", type=int, help="engine.fair_step_ms; 0: steps as long as ever")
    args = parser.parse_args()
    fair_step = {} if args.fair_step_ms is None else {"fair_step_ms": args.fair_step_ms}
    settings = Settings(
        store=StoreSettings(data_dir=args.data_dir),
        tiers=TierSettings(host_memory=0, disk_size=0),  # they would give back what the flood took
        engine=EngineSettings(
            threads=args.threads, max_model_len=1024, kv_cache_memory=kv_bytes(POOL_TOKENS), **fair_step
        ),
    )
    engine = build_engine(settings, stderr_progress)
    runs = {"alone": (0, 0), "with_floor": (NOISY_CLIENTS, FLOOR_TOKENS), "without_floor": (NOISY_CLIENTS, 0)}
    seen: dict[str, Quiet] = {}
    for name, (clients, floor) in runs.items():
        engine.forget_everything()
        seen[name] = Load(engine, clients, floor, seed=5).run(args.questions)
        print(f"{name}: {args.questions} questions asked", file=sys.stderr)
    print(f"{'quiet tenant':<16}{'hit rate':>10}{'TTFT p50':>12}{'noisy tokens/s':>16}")
    for name, quiet in seen.items():
        print(f"{name:<16}{quiet.hit_rate:>10.1%}{quiet.ttft_p50_s * 1000:>9.0f} ms{quiet.noisy_tokens_per_s:>16.0f}")
    print(json.dumps(figures(seen)))


def figures(seen: dict[str, Quiet]) -> dict[str, float]:
    alone, results = seen["alone"], dict[str, float]()
    for name, suffix in (("with_floor", ""), ("without_floor", "_without_floors")):
        results[f"hit_rate_drop_points{suffix}"] = round((alone.hit_rate - seen[name].hit_rate) * 100, 2)
        results[f"ttft_p50_ratio{suffix}"] = round(seen[name].ttft_p50_s / alone.ttft_p50_s, 3)
    return results | {"noisy_tokens_per_s": round(seen["with_floor"].noisy_tokens_per_s, 1)}


def kv_bytes(tokens: int) -> int:
    """Of the default model: 30 layers, 3 KV heads of 64, keys and values, two bytes each."""
    return tokens * 30 * 3 * 64 * 2 * 2


if __name__ == "__main__":
    main()
