"""python -m bench.write_through: what the disk tier costs those who are served, and what an absent Redis costs them.

Two engines over one loaded model, with and without a disk tier, are asked in turns: prompts that nobody has asked, all
at once, and then the same twice more, so that every block is written through while others compute. Then the engine with
the disk tier answers one warm request after the other: with its store, with the store paused (SIGSTOP), and killed.

    tokens_per_s_on, _off     prompt tokens a second, median over the rounds; throughput_fraction: on / off
    request_ms_store_up       a warm request, median
    added_ms_store_paused     what more it took then; added_ms_store_killed: likewise
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from bench.store import RunningStore, running_store
from engine.build import assemble_engine, choose_device
from engine.engine import LLMEngine
from engine.load_progress import no_progress
from engine.model_loader import LoadedModel, load_model
from engine.model_runner import configure_threads
from engine.protocol import Failure, SamplingParams, Segment, SegmentKind, Submit
from engine.settings import EngineSettings, ModelSettings, Settings, StoreSettings, TierSettings

SCOPE = b"bench-----------"
PROMPTS = 6
PROMPT_TOKENS = 480
QUESTION_TOKENS = 20
PASSES = 3
CYCLES = 4


def settings_for(directory: Path, url: str, disk_size: int) -> Settings:
    return Settings(
        store=StoreSettings(data_dir=directory, url=url),
        engine=EngineSettings(kv_cache_memory=256 << 20),
        tiers=TierSettings(host_memory=256 << 20, disk_size=disk_size),
    )


def ask(engine: LLMEngine, prompts: list[list[int]]) -> None:
    """All at once, to their ends."""
    for number, prompt in enumerate(prompts):
        segment = Segment.of(SegmentKind.QUESTION, prompt, SCOPE)
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        engine.add_request(Submit(request_id=str(number), tenant_id="bench", segments=(segment,), sampling=sampling))
    while engine.has_work():
        for message in engine.step():
            if isinstance(message, Failure):
                raise SystemExit(f"a request failed: {message.message}")


def come_to_rest(engine: LLMEngine) -> None:
    while engine.idle():
        time.sleep(0.002)


def tokens_per_second(engine: LLMEngine, rng: random.Random) -> float:
    contexts = [rng.choices(range(1_000, 40_000), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
    started = time.perf_counter()
    for _ in range(PASSES):
        ask(engine, [context + rng.choices(range(1_000, 40_000), k=QUESTION_TOKENS) for context in contexts])
    seconds = time.perf_counter() - started
    come_to_rest(engine)
    return PASSES * PROMPTS * (PROMPT_TOKENS + QUESTION_TOKENS) / seconds


def throughput(with_disk: LLMEngine, without: LLMEngine, rounds: int) -> dict[str, float]:
    rng = random.Random(3)
    rates: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(rounds + 1):
        turns = [("on", with_disk), ("off", without)]
        for name, engine in turns if number % 2 else reversed(turns):
            rate = tokens_per_second(engine, rng)
            if number:  # the first round warms up
                rates[name].append(rate)
    tiers = with_disk.tiers
    assert tiers is not None
    assert tiers.disk is not None
    fractions = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "tokens_per_s_on": statistics.median(rates["on"]),
        "tokens_per_s_off": statistics.median(rates["off"]),
        "throughput_fraction": statistics.median(fractions),
        "written_mb": tiers.disk.counters.bytes_written / 1e6,
    }


def without_store(engine: LLMEngine, store: RunningStore, requests: int) -> dict[str, float]:
    rng = random.Random(4)
    context = rng.choices(range(1_000, 40_000), k=PROMPT_TOKENS)
    ask(engine, [context])

    def times_ms(count: int) -> list[float]:
        times: list[float] = []
        for _ in range(count):
            question = rng.choices(range(1_000, 40_000), k=QUESTION_TOKENS)
            started = time.perf_counter()
            ask(engine, [context + question])
            times.append((time.perf_counter() - started) * 1e3)
            engine.idle()
        return times

    times_ms(3)
    up, paused = list[float](), list[float]()
    for _ in range(CYCLES):  # in turns: the machine may be faster at one time than at another
        up += times_ms(requests)
        store.process.send_signal(signal.SIGSTOP)
        paused += times_ms(requests)
        store.process.send_signal(signal.SIGCONT)
        come_to_rest(engine)
    store.process.kill()
    killed = times_ms(CYCLES * requests)
    usual = statistics.median(up)
    return {
        "request_ms_store_up": usual,
        "added_ms_store_paused": statistics.median(paused) - usual,
        "added_ms_store_killed": statistics.median(killed) - usual,
    }


def measure(loaded: LoadedModel, directory: Path, rounds: int, requests: int) -> dict[str, float]:
    with running_store(directory) as store:
        settings = settings_for(directory, store.url, 512 << 20)
        with_disk = assemble_engine(loaded, settings, no_progress)
        tiers = msgspec.structs.replace(settings.tiers, disk_size=0)
        without = assemble_engine(loaded, msgspec.structs.replace(settings, tiers=tiers), no_progress)
        for engine in (with_disk, without):
            come_to_rest(engine)
        figures = throughput(with_disk, without, rounds) | without_store(with_disk, store, requests)
        with_disk.close(0)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(".radixgate"), help="with the converted model")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=10, help="in each of the turns without a store")
    args = parser.parse_args()
    configure_threads(0)
    loaded = load_model(ModelSettings(), choose_device("auto"), args.data_dir, no_progress, block_size=16)
    with tempfile.TemporaryDirectory(prefix="rg-through-", dir=args.data_dir) as directory:
        figures = measure(loaded, Path(directory), args.rounds, args.requests)
    for name, value in figures.items():
        print(f"{name:<28}{value:>12,.2f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
