"""One model in two processes: the text of one, and an end that says why."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch import BlockCopy, ScheduledSequence, SchedulerOutput
from engine.errors import ConfigError, ModelLoadError
from engine.model_checks import trace_attention
from engine.protocol import SamplingParams
from engine.ranks import EXIT_RANK_LOST, wire
from engine.settings import load_settings
from engine.sharding import check_sharding, shard_model
from tests.engine.tiny_models import FAMILIES, write_model, write_tiny_model

ROOT = Path(__file__).parents[2]


def command(directory: Path, size: int, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.engine.ranked_engine", str(directory), str(size), *flags]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def answers(directory: Path, size: int, *flags: str) -> list[object]:
    done = subprocess.run(
        command(directory, size, *flags),
        cwd=ROOT,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "extra", "parts", "flags"),
    [
        ("llama", {}, 2, ()),  # two KV heads, one each
        ("llama", {}, 2, ("--int8",)),  # each rank has the scale of its own
        ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 260}, 1, ()),  # one, on both
    ],
)
def test_two_processes_say_what_one_says(
    family: str, extra: dict[str, object], parts: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Cold and warm. Each rank's KV holds its own heads: half of a block's bytes where they can be divided."""
    directory = write_model(FAMILIES[family](**extra), tmp_path)
    alone, together = answers(directory, 1, *flags), answers(directory, 2, *flags)
    assert together[:2] == alone[:2]
    assert together[0] == together[1]
    assert isinstance(alone[2], int)
    assert together[2] == alone[2] // parts


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_engine_with_a_line_that_names_it(tmp_path: Path) -> None:
    """Else every request would wait for a sum that never comes."""
    directory = write_tiny_model("llama", tmp_path)
    with subprocess.Popen(
        command(directory, 2, "--hold"),
        cwd=ROOT,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        pids = json.loads(process.stdout.readline())
        assert process.stdout.readline(), "it answers"
        os.kill(pids["1"], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_RANK_LOST
    assert f"rank 1 (process {pids['1']}) ended with code -9" in errors


class LoneRank:
    """One of two ranks whose partner is heard of only through what is recorded here."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        return part


def tiny(family: str, directory: Path, **extra: object) -> PreTrainedModel:
    write_model(FAMILIES[family](**extra), directory)
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def test_the_shares_make_up_the_whole(tmp_path: Path) -> None:
    """Rows of one, columns of the other, a bias that is added once."""
    whole = tiny("llama", tmp_path, attention_bias=True)
    facts = trace_attention(whole)
    halves = [tiny("llama", tmp_path, attention_bias=True) for _ in range(2)]
    for rank, half in enumerate(halves):
        shard_model(half, facts, LoneRank(rank))
        local = trace_attention(half)
        assert (local.num_heads, local.num_kv_heads, local.head_dim) == (2, 1, facts.head_dim)
    with torch.no_grad():
        for name, axis in (("q_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            parts = [half.get_submodule(f"model.layers.1.self_attn.{name}") for half in halves]
            linears = [part if isinstance(part, nn.Linear) else part.get_submodule("linear") for part in parts]
            weights: list[torch.Tensor] = [linear.get_parameter("weight") for linear in linears]
            expected = whole.get_parameter(f"model.layers.1.self_attn.{name}.weight")
            assert torch.equal(torch.cat(weights, dim=axis), expected)
        hidden = torch.randn(3, 64)
        parts = [half.get_submodule("model.layers.1.self_attn.o_proj") for half in halves]
        bias = whole.get_parameter("model.layers.1.self_attn.o_proj.bias")
        total = sum(part(hidden[:, i * 32 : i * 32 + 32]) - bias for i, part in enumerate(parts)) + bias
        torch.testing.assert_close(total, whole.get_submodule("model.layers.1.self_attn.o_proj")(hidden))


@pytest.mark.parametrize(
    ("family", "extra", "size", "reason"),
    [
        ("llama", {}, 3, "4 attention heads; they cannot be divided among 3"),
        ("llama", {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 KV heads"),
        ("llama", {"intermediate_size": 98}, 4, r"gate_proj has 98 outputs, which 4 does not divide"),
        ("phi3", {"num_attention_heads": 2}, 2, "its plan"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_reason(
    family: str, extra: dict[str, object], size: int, reason: str, tmp_path: Path
) -> None:
    model = tiny(family, tmp_path, **extra)
    with pytest.raises(ModelLoadError, match=reason):
        check_sharding(model, trace_attention(model), size)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "set tiers.host_memory and tiers.disk_size to 0"),
        ({"TIERS__HOST_MEMORY": "0", "TIERS__DISK_SIZE": "0", "ENGINE__DEVICE": "cuda:1"}, "names one device"),
    ],
)
def test_what_goes_with_one_process_only_is_refused(environment: dict[str, str], reason: str) -> None:
    values = {f"RADIXGATE_{name}": value for name, value in environment.items()}
    with pytest.raises(ConfigError, match=reason):
        load_settings(None, {"RADIXGATE_ENGINE__TENSOR_PARALLEL_SIZE": "2", **values})


def test_a_step_on_its_way_to_the_ranks_carries_only_its_new_tokens() -> None:
    """With the whole text of every sequence, 32 long ones would be a quarter of a million numbers in each step."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    row = ScheduledSequence("a", list(range(500)), 490, 5, array("i", [3, 1]), sampling, 0, 500, False)
    last = ScheduledSequence("b", list(range(30)), 30, 1, array("i", [7]), sampling, 0, 20, True, takes_last=True)
    sent: SchedulerOutput = pickle.loads(pickle.dumps(wire(SchedulerOutput([row, last], [BlockCopy(1, 2, 3)]))))
    assert [sequence.token_ids for sequence in sent.sequences] == [[490, 491, 492, 493, 494], []]
    assert sent.sequences[0].block_table == array("i", [3, 1])
    assert sent.copies == [BlockCopy(1, 2, 3)]
