"""python -m bench.engine: the engine around a model of random weights. A table, and JSON lines.

    check           a small fp32 model answers the same on an engine with captured graphs and a step in flight, its
                    prefixes cached or not, as on one without any of them: else the figures say little
    first token     a prompt of PREFIX + TAIL tokens, asked cold, and again with another tail: the prefix is cached
    decode step     BATCH sequences, one token each: how long a step takes, what of it is the device's own work, and for
                    how long the host is busy (schedule, launch, postprocess) and waits

On a GPU the model has the shapes of an 8-billion Llama in bf16, PREFIX + TAIL is 6,144 + 200, BATCH 32 sequences of
about 1,000 tokens, and the device's own work is the sum of its kernels by torch's profiler. The host's time is hidden
where it waits: `wait_ms` above 0. On a CPU the shapes are small, and the model's step is the device's own work.

JSON: `checked_answers`, `ttft_cold_ms`, `ttft_warm_ms`, `warm_share` (warm over cold), `step_ms`, `device_ms`,
`device_share` (of the step the device's own work; null where the profiler saw nothing), `host_ms`, `wait_ms`, `graphs`
(the captured sizes), `shape`, `kv_dtype`, `device`, `stand_ins` (packages that are not installed, and that the host's
work was done without: `bench/bare_imports.py`), `sections_failed`. All so far after each section, so that one that
fails, or a process that is stopped, loses only what had not been measured. Exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import PreTrainedModel

import bench.bare_imports
from engine.batch import SchedulerOutput, StepResult, TransferReport
from engine.build import assemble_engine
from engine.engine import LLMEngine, Runner
from engine.in_flight import PendingStep
from engine.kv_quantization import KV_DTYPES, choose_kv_dtype, measure_scales
from engine.load_progress import no_progress
from engine.model_checks import trace_attention
from engine.model_loader import LoadedModel
from engine.model_runner import ModelRunner
from engine.protocol import Failure, SamplingParams, Segment, SegmentKind, Submit
from engine.settings import EngineSettings, Settings, TierSettings
from kernels.dispatch import select_kernels

SCOPE = b"bench-----------"
_ROUNDS = 3  # of cold and warm prompts
_PROFILED_STEPS = 20
_SEED = 6  # of seven, the one whose checked answers are the least close: no logit within 0.007 of the largest


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and what is asked of it."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab_size: int
    prefix: int  # tokens that the second prompt finds
    tail: int
    batch: int
    context: int  # tokens of each sequence of the batch
    steps: int  # that are timed
    draws_wide: bool = False  # fp32 weights so wide that attention decides the tokens: for comparing answers

    @property
    def max_model_len(self) -> int:
        return max(self.prefix + self.tail, self.context + self.steps + _PROFILED_STEPS) + 64


LARGE = Shape("8B", 32, 4096, 14336, 32, 8, 128_256, prefix=6144, tail=200, batch=32, context=1024, steps=100)
SMALL = Shape("small", 4, 256, 512, 8, 2, 2048, prefix=768, tail=24, batch=8, context=64, steps=32)
# Heads of 64; as many sequences on one prefix as it takes for a shared pass over it to pay, and some without.
CHECKED = Shape("checked", 3, 256, 512, 4, 2, 512, prefix=1536, tail=33, batch=8, context=17, steps=12, draws_wide=True)


# ---------------------------------------------------------------- the engine


def random_model(shape: Shape, device: torch.device, kv_cache_dtype: str = "auto") -> LoadedModel:
    """Weights of no meaning, always the same: an engine's speed does not depend on them."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_model_len,
        initializer_range=0.2 if shape.draws_wide else 0.02,
    )
    dtype = torch.bfloat16 if device.type == "cuda" and not shape.draws_wide else torch.float32
    torch.manual_seed(_SEED)
    # Large weights are drawn where they are used; those whose answers are compared are the same on every device.
    with torch.device("cpu" if shape.draws_wide else device):
        built: object = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert isinstance(built, PreTrainedModel)
    torch.nn.Module.to(built, device)
    facts = trace_attention(built.eval())
    tokenizer = _word_tokenizer(shape.vocab_size)
    kv_dtype = choose_kv_dtype(kv_cache_dtype, dtype, device)
    return LoadedModel(
        model=built,
        served_name=shape.name,
        num_layers=facts.num_layers,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        has_full_attention=facts.has_full_attention,
        block_size=16,
        max_model_len=shape.max_model_len,
        vocab_size=shape.vocab_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_scales=measure_scales(built, facts, select_kernels(device), tokenizer, kv_dtype),
        device=device,
        eos_token_ids=(0,),
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template="",
        special_tokens={},
        fingerprint="00" * 16,
    )


def _word_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(vocab_size)}, unk_token="w0 "))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@dataclass(frozen=True, slots=True)
class Mode:
    """How the engine runs."""

    enforce_eager: bool = False
    async_scheduling: bool = True
    caches_prefixes: bool = True
    kv_cache_dtype: str = "auto"


PLAIN = Mode(enforce_eager=True, async_scheduling=False, caches_prefixes=False)


def build(shape: Shape, device: torch.device, mode: Mode) -> LLMEngine:
    loaded = random_model(shape, device, mode.kv_cache_dtype)
    sequences = _ROUNDS + 1 + shape.batch
    kv_bytes = sequences * (shape.max_model_len + loaded.block_size) * loaded.kv_layout.bytes_per_token
    utilization = 0.9
    if device.type == "cuda":
        torch.cuda.empty_cache()
        weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
        utilization = gpu_share(*torch.cuda.mem_get_info(device), weights, kv_bytes)
    settings = Settings(
        engine=EngineSettings(
            device=str(device),
            kv_cache_memory=kv_bytes,  # on a CPU
            gpu_memory_utilization=utilization,
            max_num_seqs=shape.batch,
            max_num_batched_tokens=max(2048, 512 + shape.batch) if device.type == "cuda" else 512 + shape.batch,
            enforce_eager=mode.enforce_eager,
            async_scheduling=mode.async_scheduling,
            enable_prefix_caching=mode.caches_prefixes,
        ),
        tiers=TierSettings(host_memory=0, disk_size=0),
    )
    return assemble_engine(loaded, settings, no_progress)


def gpu_share(free: int, total: int, weights: int, kv_bytes: int) -> float:
    """Of a GPU's memory, so that KV gets `kv_bytes` beside what is taken already (the weights are, and other engines),
    the activations of the largest step and the graphs. All that is free would do for the figures, but keeps others off
    the device, and a small model's blocks would be millions."""
    room = (1 << 30) + weights // 3
    return min(0.9, (total - free + room + kv_bytes) / total)


class TimedRunner:
    """The runner with a watch: for how long the host launches, and for how long it waits."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.launching = self.waiting = 0.0

    @property
    def runs_ahead(self) -> bool:
        return self._runner.runs_ahead

    def launch(self, output: SchedulerOutput) -> PendingStep:
        started = time.perf_counter()
        pending = self._runner.launch(output)
        self.launching += time.perf_counter() - started
        return _TimedStep(self, pending)

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self.launch(output).wait()

    def transfer_report(self) -> TransferReport:
        return self._runner.transfer_report()

    def is_same_block(self, block_id: int, payload: memoryview) -> bool:
        return self._runner.is_same_block(block_id, payload)


@dataclass(frozen=True, slots=True)
class _TimedStep:
    runner: TimedRunner
    pending: PendingStep

    def wait(self) -> StepResult:
        started = time.perf_counter()
        result = self.pending.wait()
        self.runner.waiting += time.perf_counter() - started
        return result


# ---------------------------------------------------------------- what is measured


def check_answers(device: torch.device, mode: Mode, shape: Shape = CHECKED) -> dict[str, object]:
    """Raises AssertionError where graphs, a step in flight, or a cached prefix change an answer. On a CPU there is
    neither of the first two."""
    rng = random.Random(_SEED)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, shape.vocab_size) for _ in range(count)]

    prefix = tokens(shape.prefix)
    prompts = {f"on the prefix, {tail} more": prefix + tokens(tail) for tail in range(1, shape.tail, 4)}
    prompts |= {f"of {count} tokens": tokens(count) for count in (5, shape.context, 2 * shape.context)}
    expected = answers(build(shape, device, PLAIN), prompts, shape.steps)
    # In 8 bits KV is not what was computed, and answers differ by right.
    engine = build(shape, device, replace(mode, kv_cache_dtype="auto"))
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    if device.type == "cuda" and not mode.enforce_eager:
        assert runner.graph_sizes, "no decode step was captured: the log says why"
    for state in ("cold", "cached"):
        before = engine.stats().num_cached_tokens
        found = answers(engine, prompts, shape.steps)
        different = [name for name in prompts if found[name] != expected[name]]
        if different:
            name = different[0]
            raise AssertionError(
                f"{len(different)} of {len(prompts)} answers differ from those of the plain engine, {state}: the "
                f"prompt {name} got {found[name]!r}, not {expected[name]!r}"
            )
    cached = engine.stats().num_cached_tokens - before
    least = sum(map(len, prompts.values())) - len(prompts) * 16
    assert not mode.caches_prefixes or cached >= least, f"only {cached} tokens were cached when asked again"
    return {"checked_answers": 2 * len(prompts), "checked_graphs": runner.graph_sizes}


def answers(engine: LLMEngine, prompts: Mapping[str, Sequence[int]], max_tokens: int) -> dict[str, str]:
    """All prompts at once; the texts, by name."""
    texts = dict.fromkeys(prompts, "")
    for name, prompt in prompts.items():
        ask(engine, name, prompt, max_tokens)
    while engine.has_work():
        for message in engine.step():
            assert not isinstance(message, Failure), message
            texts[message.request_id] += message.text
    assert engine.check_integrity(), "the engine's books do not add up"
    return texts


def ask(engine: LLMEngine, name: str, prompt: Sequence[int], max_tokens: int) -> None:
    engine.add_request(
        Submit(
            request_id=name,
            tenant_id="bench",
            segments=(Segment.of(SegmentKind.QUESTION, prompt, SCOPE),),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
    )


def first_token_seconds(engine: LLMEngine, name: str, prompt: Sequence[int]) -> tuple[float, int]:
    """Until the first delta, and how many tokens were cached."""
    started = time.perf_counter()
    ask(engine, name, prompt, 1)
    seconds, cached = 0.0, 0
    while engine.has_work():
        for message in engine.step():
            assert not isinstance(message, Failure), message
            seconds = time.perf_counter() - started
            cached = message.account.num_cached_tokens if message.account else cached
    return seconds, cached


def bench_first_token(engine: LLMEngine, shape: Shape, rng: random.Random) -> dict[str, object]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, shape.vocab_size) for _ in range(count)]

    first_token_seconds(engine, "warm-up", tokens(shape.prefix + shape.tail))  # compiles kernels
    cold: list[float] = []
    warm: list[float] = []
    for number in range(_ROUNDS):
        prefix = tokens(shape.prefix)
        seconds, cached = first_token_seconds(engine, f"cold-{number}", prefix + tokens(shape.tail))
        assert cached < 16, f"a cold prompt found {cached} tokens"
        cold.append(seconds)
        seconds, cached = first_token_seconds(engine, f"warm-{number}", prefix + tokens(shape.tail))
        assert cached >= shape.prefix, f"a warm prompt found only {cached} of {shape.prefix} tokens"
        warm.append(seconds)
    cold_ms, warm_ms = statistics.median(cold) * 1e3, statistics.median(warm) * 1e3
    return {"ttft_cold_ms": cold_ms, "ttft_warm_ms": warm_ms, "warm_share": warm_ms / cold_ms}


def bench_decode(engine: LLMEngine, runner: ModelRunner, shape: Shape, rng: random.Random) -> dict[str, object]:
    timed = TimedRunner(engine.runner)
    engine.runner = timed
    for number in range(shape.batch):
        prompt = [rng.randrange(1, shape.vocab_size) for _ in range(shape.context)]
        ask(engine, f"decode-{number}", prompt, shape.steps + _PROFILED_STEPS + 32)
    while engine.scheduler.num_waiting or any(not r.num_output_tokens for r in engine.scheduler.running):
        engine.step()
    timed.launching = timed.waiting = 0.0
    started = time.perf_counter()
    for _ in range(shape.steps):
        engine.step()
    step_ms = (time.perf_counter() - started) / shape.steps * 1e3
    launch_ms, wait_ms = timed.launching / shape.steps * 1e3, timed.waiting / shape.steps * 1e3
    if runner.kv_cache.device.type == "cuda":
        device_ms, host_ms = kernel_ms(engine.step, _PROFILED_STEPS), step_ms - wait_ms
    else:
        device_ms, host_ms = launch_ms + wait_ms, step_ms - launch_ms - wait_ms
    for request in list(engine.scheduler.running):
        engine.abort_request(request.request_id)
    while engine.has_work():
        engine.step()
    return {
        "step_ms": step_ms,
        "device_ms": device_ms,
        "device_share": None if device_ms is None else device_ms / step_ms,
        "host_ms": host_ms,
        "wait_ms": wait_ms,
        "graphs": runner.graph_sizes,
    }


def kernel_ms(step: Callable[[], object], count: int) -> float | None:
    """The sum of the kernels' own times, a step. None where the profiler may not look."""
    torch.cuda.synchronize()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(count):
                step()
            torch.cuda.synchronize()
        total = sum(event.self_device_time_total for event in profile.key_averages())
    except RuntimeError as error:
        print(f"  no profile of the kernels: {error}", flush=True)
        return None
    return total / count / 1e3 or None


def run(shape: Shape, device: torch.device, mode: Mode, checked: Shape = CHECKED) -> dict[str, object]:
    """All figures; what failed is under `sections_failed`."""
    failed: dict[str, str] = {}
    figures: dict[str, object] = {
        "shape": shape.name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "stand_ins": bench.bare_imports.stand_ins(),
        "sections_failed": failed,
    }

    def section(name: str, measure: Callable[[], dict[str, object]]) -> None:
        try:
            figures.update(measure())
        except Exception as error:  # noqa: BLE001  reported, and in the exit code
            traceback.print_exc(file=sys.stdout)
            failed[name] = f"{type(error).__name__}: {error}"
        print(json.dumps(figures), flush=True)

    section("check", lambda: check_answers(device, mode, checked))
    gc.collect()  # the engines of the check: nothing of theirs is to be on the device any more
    built: list[LLMEngine] = []

    def start() -> dict[str, object]:
        built.append(build(shape, device, mode))
        runner = built[0].runner
        assert isinstance(runner, ModelRunner)
        return {"kv_dtype": str(runner.kv_cache.dtype).removeprefix("torch.")}

    section("start", start)
    if built:
        engine, rng = built[0], random.Random(_SEED)
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        section("first token", lambda: bench_first_token(engine, shape, rng))
        section("decode", lambda: bench_decode(engine, runner, shape, rng))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description="The engine around random weights.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="decode steps that are timed")
    parser.add_argument("--enforce-eager", action="store_true", help="without captured graphs")
    parser.add_argument("--no-async", action="store_true", help="no step in flight while the next is scheduled")
    parser.add_argument("--kv-cache-dtype", choices=("auto", *KV_DTYPES), default="auto", help="of the KV's elements")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    shape = LARGE if device.type == "cuda" else SMALL
    if arguments.steps is not None:
        shape = replace(shape, steps=arguments.steps)
    mode = Mode(
        enforce_eager=arguments.enforce_eager,
        async_scheduling=not arguments.no_async,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    figures = run(shape, device, mode)
    for name, value in figures.items():
        print(f"{name:16} {value:.3f}" if isinstance(value, float) else f"{name:16} {value}")
    print(json.dumps(figures))
    return 1 if figures["sections_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
