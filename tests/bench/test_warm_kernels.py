"""What is compiled beforehand is what is launched: a launch then compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WARM = """
import json, os, sys
from functools import partial
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

from bench.kernel_checks import Case, Prepared
from bench.warm_kernels import Variant, compile_all, use_target, variants_of
from kernels.heuristics import DeviceModel

device = DeviceModel(132, (9, 0))
steps = (
    Case(((40, 1), (17, 1)), head_dim=16, group=1, dtype=torch.float16),
    Case(((40, 20),), head_dim=24, kv_dtype=torch.int8),
)


def launch(case, where):
    prepared = Prepared.of(case, device, where)
    prepared.store(prepared.kernels.store_kv)
    prepared.attend(prepared.kernels.paged_attention)


def cached():
    return sorted(str(path) for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"))


if __name__ == "__main__":
    variants = variants_of(partial(launch, case, "meta") for case in (*steps, *steps))
    nonsense = Variant("kernels.triton_store", "store_rows", (), ())
    failed = compile_all([*variants, nonsense], 90, 1)
    before = cached()
    use_target(90)
    run, launched = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **options):
        launched.append(self.__name__)
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    for case in steps:
        launch(case, "cpu")
    print(json.dumps([len(variants), launched, failed, len(before), cached() == before]))
"""


def test_a_launch_finds_what_was_compiled_beforehand(tmp_path: Path) -> None:
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, launched, failed, compiled, is_found = json.loads(done.stdout.splitlines()[-1])
    assert launched == ["store_rows", "paged_decode", "reduce_splits", "store_rows", "paged_prefill"]
    assert count == compiled == len(launched)
    assert is_found
    assert len(failed) == 1
    assert failed[0].startswith("store_rows: TypeError")


def test_without_a_gpu_nothing_is_compiled() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.warm_kernels"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"gpu": None}
