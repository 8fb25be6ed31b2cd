from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch import BlockCopy, ScheduledSequence, SchedulerOutput, StepResult
from engine.kv_cache import allocate_kv_cache
from engine.load_progress import no_progress
from engine.model_loader import LoadedModel, load_model
from engine.model_runner import ModelRunner, build_model_runner
from engine.protocol import SamplingParams
from engine.sampler import Sampler
from engine.settings import EngineSettings, ModelSettings
from kernels.dispatch import select_kernels
from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model

BLOCK_SIZE = 4
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def load_tiny(directory: Path, block_size: int = BLOCK_SIZE) -> LoadedModel:
    settings = ModelSettings(path=str(directory), dtype="float32")
    return load_model(settings, CPU, directory, no_progress, block_size=block_size)


def poisoned_runner(loaded: LoadedModel, num_blocks: int) -> ModelRunner:
    """Every slot is NaN until it is written, so that reading one too many shows."""
    kv_cache = allocate_kv_cache(loaded.kv_layout, num_blocks, CPU).fill_(float("nan"))
    return ModelRunner(loaded, kv_cache, select_kernels(CPU), Sampler(), max_num_seqs=8)


def sequence(name: str, prompt: list[int], blocks: list[int]) -> ScheduledSequence:
    return ScheduledSequence(name, list(prompt), 0, 0, array("i", blocks), GREEDY, 0, len(prompt), False)


def advance(row: ScheduledSequence, num_new: int) -> ScheduledSequence:
    """The next `num_new` tokens of a sequence, sampled when they reach its end."""
    return replace(row, num_computed=row.end, num_new=num_new, sample=row.end + num_new == len(row.token_ids))


def own_greedy(model: PreTrainedModel, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """What the model says without any cache: the tokens, and the logits that each was taken from."""
    tokens, rows = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            rows.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1])
            tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_paged_equals_own_attention(family: str, tmp_path: Path) -> None:
    """I7 for each family: packed sequences, cut prefills and decodes over shuffled blocks change nothing.

    Guards windows across a chunk's edge, soft caps, head sizes that are no power of two, grouped queries, positions
    that restart inside a packed row, and blocks that are read by their place instead of their id.
    """
    directory = write_tiny_model(family, tmp_path)
    own = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    loaded = load_tiny(directory)
    runner = poisoned_runner(loaded, num_blocks=40)
    order = random.Random(7).sample(range(40), 40)
    prompts = {"long": random_prompt(37, 1), "short": random_prompt(3, 2), "aligned": random_prompt(16, 3)}
    rows = {
        name: sequence(name, prompt, order[i * 13 : i * 13 + 13]) for i, (name, prompt) in enumerate(prompts.items())
    }
    # New tokens of each sequence in each step; after its prefill each decodes one token a step.
    plan = {"long": [10, 10, 10, 7], "short": [0, 3], "aligned": [0, 0, 11, 5]}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in rows}
    for step in range(11):
        batch: list[ScheduledSequence] = []
        for name in rows:
            num_new = plan[name][step] if step < len(plan[name]) else 1
            if num_new:
                rows[name] = advance(rows[name], num_new)
                batch.append(rows[name])
        sampled = [row for row in batch if row.sample]
        for row, row_logits in zip(sampled, runner.forward_logits(batch), strict=True):
            logits[row.request_id].append(row_logits)
            row.token_ids.append(int(row_logits.argmax()))
    for name, prompt in prompts.items():
        tokens, expected = own_greedy(own, prompt, len(logits[name]))
        assert len(tokens) >= 7
        assert rows[name].token_ids[len(prompt) :] == tokens
        torch.testing.assert_close(torch.stack(logits[name]), expected, atol=2e-3, rtol=1e-3)


def test_only_sampled_sequences_get_a_token(tmp_path: Path) -> None:
    """A chunk in mid-prefill has no next token; handing it one would append garbage to the prompt."""
    runner = poisoned_runner(load_tiny(write_tiny_model("llama", tmp_path)), 16)
    first = advance(sequence("a", random_prompt(9, 1), [0, 1, 2]), 5)
    second = advance(sequence("b", random_prompt(6, 2), [3, 4]), 6)
    third = advance(sequence("c", random_prompt(8, 3), [5, 6]), 4)
    tokens = runner.execute(SchedulerOutput([first, second, third])).token_ids
    assert tokens[0] is None
    assert tokens[2] is None
    assert tokens[1] == int(runner.forward_logits([second]).argmax())
    assert runner.execute(SchedulerOutput([first])) == StepResult([None])
    assert runner.execute(SchedulerOutput()) == StepResult([])


def test_copies_happen_before_the_step_writes(tmp_path: Path) -> None:
    """Copy-on-write: a sequence that diverges inside a block takes the shared slots along and spoils nothing."""
    loaded = load_tiny(write_tiny_model("llama", tmp_path))
    shared, tail = random_prompt(6, 1), random_prompt(5, 2)
    solo = poisoned_runner(loaded, 8)
    expected = solo.forward_logits([advance(sequence("solo", shared + tail, [0, 1, 2]), 11)])

    runner = poisoned_runner(loaded, 8)
    original = sequence("original", shared + random_prompt(4, 3), [5, 2, 6])
    runner.execute(SchedulerOutput([advance(original, 10)]))
    before = runner.kv_cache[2].clone()
    diverging = replace(advance(sequence("diverging", shared + tail, [5, 4, 7]), 11), num_computed=6, num_new=5)
    result = runner.execute(SchedulerOutput([diverging], [BlockCopy(src=2, dst=4, num_slots=2)]))
    assert result.token_ids == [int(expected.argmax())]
    torch.testing.assert_close(runner.kv_cache[4, :, :, :2], before[:, :, :2], rtol=0, atol=0)
    torch.testing.assert_close(runner.kv_cache[2], before, rtol=0, atol=0)


def test_a_step_takes_the_token_that_the_one_before_has_just_drawn(tmp_path: Path) -> None:
    """The next step is launched before that token is known: from the device, by request, not by place."""
    loaded = load_tiny(write_tiny_model("llama", tmp_path))
    prompts = {"a": random_prompt(9, 1), "b": random_prompt(6, 2), "c": random_prompt(7, 3)}
    tables = {"a": [0, 1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    apart, ahead = poisoned_runner(loaded, 10), poisoned_runner(loaded, 10)
    rows = {name: sequence(name, prompt, tables[name]) for name, prompt in prompts.items()}
    rows = {name: advance(row, len(row.token_ids)) for name, row in rows.items()}
    expected: dict[str, list[int | None]] = {name: [] for name in rows}
    for name, row in rows.items():
        for _ in range(3):
            (token,) = apart.execute(SchedulerOutput([row])).token_ids
            assert token is not None
            expected[name].append(token)
            row = advance(replace(row, token_ids=[*row.token_ids, token]), 1)
    first = ahead.launch(SchedulerOutput(list(rows.values())))
    late = [replace(rows[n], num_computed=rows[n].end, num_new=1, takes_last=True) for n in ("c", "a")]
    second = ahead.launch(SchedulerOutput(late))
    later = [replace(row, num_computed=row.end) for row in reversed(late)]
    third = ahead.launch(SchedulerOutput(later))
    steps = [step.wait().token_ids for step in (first, second, third)]
    assert dict(zip(("a", "b", "c"), steps[0], strict=True)) == {name: tokens[0] for name, tokens in expected.items()}
    assert steps[1] == [expected["c"][1], expected["a"][1]]
    assert steps[2] == [expected["a"][2], expected["c"][2]]


def test_a_token_that_was_just_drawn_is_penalised_in_the_next_step(tmp_path: Path) -> None:
    loaded = load_tiny(write_tiny_model("llama", tmp_path))
    never_twice = SamplingParams(max_tokens=64, temperature=0.0, frequency_penalty=100.0)
    apart, ahead = poisoned_runner(loaded, 4), poisoned_runner(loaded, 4)
    row = advance(replace(sequence("a", random_prompt(6, 2), [0, 1, 2]), sampling=never_twice), 6)
    tokens = list[int]()
    steps = [ahead.launch(SchedulerOutput([row]))]
    for _ in range(4):
        (token,) = apart.execute(SchedulerOutput([row])).token_ids
        assert token is not None
        row = advance(replace(row, token_ids=[*row.token_ids, token]), 1)
        # One step behind: all tokens but the newest are known.
        late = replace(row, token_ids=[*row.token_ids[:6], *tokens], takes_last=True)
        tokens.append(token)
        steps.append(ahead.launch(SchedulerOutput([late])))
    assert len(set(tokens)) == 4
    assert [step.wait().token_ids[0] for step in steps[:4]] == tokens


def test_a_poisoned_block_is_noticed(tmp_path: Path) -> None:
    """Reading a freed block must not pass unseen: what tests of the block pool rely on."""
    runner = poisoned_runner(load_tiny(write_tiny_model("llama", tmp_path)), 8)
    row = advance(sequence("a", random_prompt(9, 1), [0, 1, 2]), 8)
    runner.execute(SchedulerOutput([row]))
    runner.kv_cache[1].fill_(float("nan"))
    other = advance(sequence("b", random_prompt(3, 2), [4]), 3)
    result = runner.execute(SchedulerOutput([other, advance(row, 1)]))
    assert result.without_logits == {1}
    assert result.token_ids[0] is not None
    assert result.token_ids[1] is None


def test_a_step_writes_only_its_own_slots(tmp_path: Path) -> None:
    """A stray write would land in another sequence's block."""
    runner = poisoned_runner(load_tiny(write_tiny_model("gemma3", tmp_path)), 8)
    runner.execute(SchedulerOutput([advance(sequence("a", random_prompt(6, 1), [6, 3]), 6)]))
    written = ~torch.isnan(runner.kv_cache).any(dim=-1).any(dim=-1)  # [num_blocks, num_layers, 2, block_size]
    expected = torch.zeros_like(written)
    expected[6] = True
    expected[3, :, :, :2] = True
    assert torch.equal(written, expected)


def test_kv_cache_takes_what_is_configured(tmp_path: Path) -> None:
    """`kv_cache_memory` is a limit, and no more than a block of it is left unused."""
    loaded = load_tiny(write_tiny_model("llama", tmp_path))
    memory = 100_000
    runner = build_model_runner(loaded, EngineSettings(kv_cache_memory=memory, block_size=BLOCK_SIZE), no_progress)
    used = runner.kv_cache.nbytes
    assert used <= memory < used + loaded.kv_layout.bytes_per_block
    assert runner.num_blocks == memory // (3 * 2 * 4 * 2 * 16 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedded_model_knows_paris(dtype: str, embedded_model: Path) -> None:
    """The real model, through its own template and the runner, in both dtypes from one directory."""
    settings = ModelSettings(path=str(embedded_model), dtype=dtype)
    loaded = load_model(settings, CPU, embedded_model, no_progress, block_size=16)
    runner = poisoned_runner(loaded, 8)
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json.decode())
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    row = sequence("paris", tokenizer.encode(prompt, add_special_tokens=False).ids, [5, 2, 7, 0, 3, 1])
    row = advance(row, 20)  # in two chunks
    runner.execute(SchedulerOutput([row]))
    row = advance(row, len(row.token_ids) - 20)
    answer: list[int] = []
    for _ in range(16):
        (token,) = runner.execute(SchedulerOutput([row])).token_ids
        assert token is not None
        if token in loaded.eos_token_ids:
            break
        answer.append(token)
        row.token_ids.append(token)
        row = advance(row, 1)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
