"""Lives of a small real engine, for a test that kills them: `python -m tests.engine.tiers.killed_engine DIR URL`.

Loads a tiny random model once, computes what every prompt answers without any cache, and then, for each line on its
standard input, forks a child that lives one life: say `begun PID`, restore what the last one left, answer every prompt
of a sample and compare, say `ready PID RESTORED HITS READ_ERRORS`, and go on serving until it is killed. A wrong answer
is said, too.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import torch

from engine.build import assemble_engine
from engine.engine import LLMEngine
from engine.load_progress import no_progress
from engine.model_loader import LoadedModel, load_model
from engine.protocol import Failure, SamplingParams, Segment, SegmentKind, Submit
from engine.settings import EngineSettings, ModelSettings, Settings, StoreSettings, TierSettings
from tests.engine.tiny_models import NUM_BYTES, write_tiny_model

BLOCK_BYTES = 4 * 3 * 2 * 2 * 16 * 4  # slots, layers, K and V, heads, head size, bytes
SCOPE = b"one tenant------"
OUTPUT_TOKENS = 4
TRUNK = 24  # tokens that every prompt of a family shares


def settings_for(directory: Path, url: str, *, caching: bool = True) -> Settings:
    return Settings(
        model=ModelSettings(path=str(directory / "model"), dtype="float32"),
        engine=EngineSettings(
            device="cpu",
            block_size=4,
            kv_cache_memory=48 * BLOCK_BYTES,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            prefill_chunk_size=16,
            threads=1,
            enable_prefix_caching=caching,
        ),
        tiers=TierSettings(host_memory=40 * BLOCK_BYTES, disk_size=160 * BLOCK_BYTES, write_through_hits=1),
        store=StoreSettings(data_dir=directory, url=url),
    )


def make_prompts() -> list[list[int]]:
    rng = random.Random(11)
    trunks = [rng.choices(range(NUM_BYTES), k=TRUNK) for _ in range(5)]
    return [trunk + rng.choices(range(NUM_BYTES), k=rng.randrange(5, 25)) for trunk in trunks for _ in range(4)]


class Life:
    def __init__(self, loaded: LoadedModel, settings: Settings) -> None:
        self.engine: LLMEngine = assemble_engine(loaded, settings, no_progress)
        self.hits = self._names = 0

    def answers(self, prompts: list[list[int]]) -> list[str]:
        names: list[str] = []
        for prompt in prompts:
            self._names += 1
            names.append(str(self._names))
            segment = Segment.of(SegmentKind.QUESTION, prompt, SCOPE)
            sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
            self.engine.add_request(Submit(request_id=names[-1], tenant_id="t", segments=(segment,), sampling=sampling))
        texts = dict.fromkeys(names, "")
        while self.engine.has_work():
            for message in self.engine.step():
                assert not isinstance(message, Failure), message
                texts[message.request_id] += message.text
                self.hits += message.account.disk + message.account.host if message.account is not None else 0
        return [texts[name] for name in names]


def live(loaded: LoadedModel, settings: Settings, prompts: list[list[int]], expected: list[str], seed: int) -> None:
    rng = random.Random(seed)
    print(f"begun {os.getpid()}", flush=True)
    life = Life(loaded, settings)
    engine = life.engine
    assert engine.tiers is not None
    disk = engine.tiers.disk
    assert disk is not None
    deadline = time.monotonic() + 20
    while disk.directory is None and time.monotonic() < deadline:
        engine.idle()
        time.sleep(0.0005)
    assert disk.directory is not None, "the index was not read"
    for turn in range(100_000):
        chosen = rng.sample(range(len(prompts)), 3)
        answers = life.answers([prompts[number] for number in chosen])
        wrong = sum(answer != expected[number] for number, answer in zip(chosen, answers, strict=True))
        engine.tiers.check_integrity()
        if wrong:
            print(f"wrong {os.getpid()} {wrong}", flush=True)
            os._exit(3)
        if turn == 1:
            counters = disk.counters
            print(f"ready {os.getpid()} {counters.num_restored} {life.hits} {counters.num_read_errors}", flush=True)
        engine.persist()
        engine.idle()


def main() -> None:
    directory, url = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    write_tiny_model("llama", directory / "model")
    settings = settings_for(directory, url)
    loaded = load_model(settings.model, torch.device("cpu"), directory, no_progress, block_size=4)
    prompts = make_prompts()
    without = Life(loaded, settings_for(directory, url, caching=False))
    expected = [without.answers([prompt])[0] for prompt in prompts]
    print("loaded", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            live(loaded, settings, prompts, expected, int(line))
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
