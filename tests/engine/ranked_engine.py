"""An engine of several ranks on the CPU: `python -m tests.engine.ranked_engine DIRECTORY SIZE [--hold] [--int8]`.

Prints the process ids of the other ranks, then the answers, each a line of JSON; with `--hold` it goes on answering.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from engine.build import assemble_engine, load_share, rank_device
from engine.engine import LLMEngine
from engine.load_progress import no_progress
from engine.protocol import Failure, SamplingParams, Segment, SegmentKind, Submit
from engine.ranks import start_ranks
from engine.settings import EngineSettings, ModelSettings, Settings, StoreSettings, TierSettings, settings_environ
from tests.engine.test_model_runner import random_prompt

LENGTHS = (37, 5, 16)
COUNT = 8


def settings_of(directory: Path, size: int, *, int8: bool) -> Settings:
    return Settings(
        model=ModelSettings(path=str(directory), dtype="float32"),
        store=StoreSettings(data_dir=directory),
        tiers=TierSettings(host_memory=0, disk_size=0),
        engine=EngineSettings(
            device="cpu",
            block_size=4,
            kv_cache_memory=1 << 20,
            kv_cache_dtype="int8" if int8 else "auto",
            max_num_seqs=4,
            max_num_batched_tokens=32,
            prefill_chunk_size=16,
            threads=1,
            tensor_parallel_size=size,
        ),
    )


def answers(engine: LLMEngine) -> list[str]:
    """Of one prompt after the other, and of all of them at once, then warm."""
    sampling = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    texts: dict[str, str] = {}
    for index, length in enumerate(LENGTHS):
        segment = Segment.of(SegmentKind.QUESTION, random_prompt(length, index), b"one tenant------")
        engine.add_request(Submit(request_id=str(index), tenant_id="t", segments=(segment,), sampling=sampling))
    while engine.has_work():
        for message in engine.step():
            assert not isinstance(message, Failure), message
            texts[message.request_id] = texts.get(message.request_id, "") + message.text
    assert engine.check_integrity()
    return [texts[str(index)] for index in range(len(LENGTHS))]


def main(directory: str, size: str, *flags: str) -> None:
    torch.set_num_threads(1)
    settings = settings_of(Path(directory), int(size), int8="--int8" in flags)
    ranks, pids = None, dict[int, int]()
    device = rank_device(settings.engine, 0)
    if settings.engine.tensor_parallel_size > 1:
        ranks, processes = start_ranks(settings.engine.tensor_parallel_size, device, settings_environ(settings))
        pids = processes.pids
    engine = assemble_engine(load_share(settings, device, no_progress, ranks), settings, no_progress, ranks)
    print(json.dumps(pids), flush=True)
    while True:
        print(json.dumps([answers(engine), answers(engine), engine.info().block_bytes]), flush=True)
        if "--hold" not in flags:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
