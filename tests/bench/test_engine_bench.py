"""The engine's bench, as far as it runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import bench.engine
from bench.engine import Mode, Shape, check_answers, gpu_share, run
from engine.model_loader import LoadedModel

TINY = Shape("tiny", 2, 32, 64, 4, 2, 128, prefix=64, tail=8, batch=3, context=20, steps=4)
TINY_CHECKED = replace(TINY, draws_wide=True)
CPU = torch.device("cpu")


def test_the_engine_bench_measures_what_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own asserts hold the cache to what is measured: cold finds nothing, warm the whole prefix."""
    results = run(TINY, CPU, Mode(), TINY_CHECKED)
    assert results["sections_failed"] == {}
    names = {"ttft_cold_ms", "ttft_warm_ms", "warm_share", "step_ms", "device_ms", "device_share", "host_ms", "wait_ms"}
    assert names <= results.keys()
    assert all(isinstance(results[name], float) for name in names)
    assert results["graphs"] == []
    json.dumps(results)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == results
    assert "checked_answers" in lines[0]
    assert "ttft_cold_ms" not in lines[1]
    assert "ttft_cold_ms" in lines[2]


def test_the_engine_bench_keeps_kv_in_eight_bits_when_asked_to() -> None:
    results = run(TINY, CPU, Mode(kv_cache_dtype="int8"), TINY_CHECKED)
    assert results["kv_dtype"] == "int8"
    assert results["sections_failed"] == {}


def test_the_random_model_is_the_same_each_time() -> None:
    first, second = (bench.engine.random_model(TINY, CPU).model for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_an_engine_that_answers_otherwise_is_found_and_does_not_keep_the_rest_from_being_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shifted(shape: Shape, device: torch.device, kv_cache_dtype: str = "auto") -> LoadedModel:
        loaded = right(shape, device, kv_cache_dtype)
        built.append(loaded)
        if len(built) == 2:  # the first is the plain engine's
            head = loaded.model.get_output_embeddings()
            assert isinstance(head, torch.nn.Linear)
            with torch.no_grad():
                head.weight.copy_(head.weight.roll(1, 0))
        return loaded

    right, built = bench.engine.random_model, list[LoadedModel]()
    monkeypatch.setattr(bench.engine, "random_model", shifted)
    with pytest.raises(AssertionError, match="answers differ from those of the plain engine, cold: the prompt"):
        check_answers(CPU, Mode(), TINY_CHECKED)
    built.clear()
    results = run(TINY, CPU, Mode(), TINY_CHECKED)
    assert results["sections_failed"].keys() == {"check"}  # pyright: ignore[reportAttributeAccessIssue]
    assert results["step_ms"]


def test_the_engine_bench_takes_of_a_gpu_what_it_needs() -> None:
    gib = 1 << 30
    taken = gpu_share(free=124 * gib, total=140 * gib, weights=15 * gib, kv_bytes=30 * gib)
    assert taken == pytest.approx((16 + 1 + 15 / 3 + 30) / 140)
    assert gpu_share(free=20 * gib, total=24 * gib, weights=15 * gib, kv_bytes=30 * gib) == 0.9


# ---------------------------------------------------------------- with torch, Triton and transformers alone

ROOT = Path(__file__).parents[2]
BENCH = """
import torch, bench.gpu, bench.kernels
from dataclasses import replace
from bench.engine import Mode, Shape, run
tiny = Shape("tiny", 2, 32, 64, 4, 2, 128, prefix=64, tail=8, batch=3, context=20, steps=4)
torch.set_num_threads(1)
results = run(tiny, torch.device("cpu"), Mode(), replace(tiny, draws_wide=True))
print(results["stand_ins"], results["sections_failed"])
"""


def with_dependencies(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        if wanted.name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[wanted.name] = metadata.distribution(wanted.name)
        todo += [Requirement(text) for text in found[wanted.name].requires or ()]
    return found


@pytest.fixture
def bare_packages(tmp_path: Path) -> Path:
    """A directory of packages that holds these three and what they need themselves."""
    for distribution in with_dependencies(("torch", "triton", "transformers")).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(str(distribution.locate_file(top)))
    assert not any((tmp_path / name).exists() for name in ("msgspec", "xxhash", "redis", "gguf"))
    return tmp_path


def test_the_benches_need_torch_triton_and_transformers_alone(bare_packages: Path) -> None:
    """A rented GPU machine often has these three only, and without a network to fetch more."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{bare_packages}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", BENCH], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "['msgspec', 'xxhash'] {}"
