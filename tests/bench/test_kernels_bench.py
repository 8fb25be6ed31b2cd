"""`bench.kernels` from its first line to its last, at small sizes in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCH = """
import json, torch
import bench.kernels
from bench.kernel_checks import Case, run_checks
from bench.kernels import AttentionModel, DeviceModel, Results, Sizes, run

torch.set_num_threads(1)
small = {"head_dim": 32, "num_kv_heads": 1}
cases = {
    "decode": Case(((300, 1), (40, 1), (0, 1)), dtype=torch.float32, **small),
    "int8 KV": Case(((30, 9), (40, 1), (9, 3)), dtype=torch.float16, kv_dtype=torch.int8, **small),
    "shared": Case(((530, 1),) * 3, shared=512, dtype=torch.float32, **small),
}
captured = {
    "captured": Case(((300, 1), (40, 1)), dtype=torch.float16, **small),
    "captured, shared": Case(((530, 1),) * 4, shared=512, dtype=torch.float16, **small),
}
device = DeviceModel(2, (9, 0))
right = run_checks(device, "cpu", cases, captured)


def broken(*args, **kwargs):
    raise RuntimeError("not this one")


torch.compile = broken
bench.kernels.SECTIONS["broken"] = broken
sizes = Sizes(
    model=AttentionModel(4, 2, 32, 4, 4), context=300, batches=(1, 2),
    prefills={"8k on nothing": (64, 0), "8k on 24k": (40, 80)}, members=5, shared=2560, own=20, num_layers=2,
    min_shared_saving=1, num_blocks=20, moved_blocks=4, stored_tokens=50, flex_batches=(1,), copied_bytes=1 << 20,
    gemm_size=64, dtype=torch.float32, device="cpu",
)
complete = run(sizes, device, Results())

bench.kernel_checks.BlockCopier.gather_blocks = lambda *args: None
wrong = run_checks(device, "cpu", {}, {})
print(json.dumps({"right": right, "complete": complete, "wrong": list(wrong)}))
"""


def test_the_kernels_bench_measures_what_it_names_section_by_section() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", BENCH], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert reports.pop() == {"right": {}, "complete": False, "wrong": ["moves"]}
    assert "not this one" in reports[-1]["sections_failed"]["broken"]
    assert "FlexAttention is not to be had here: RuntimeError: not this one" in done.stdout
    # Each section adds to what there was before it.
    assert len(reports) == 6
    assert all(earlier.keys() <= later.keys() for earlier, later in itertools.pairwise(reports))
    figures = reports[-1]
    assert figures["decode_copy_share"].keys() == figures["decode_seconds"].keys() == {"1", "2"}
    for name in ("of_flash", "of_fastest", "of_gemm"):
        assert figures[f"prefill_share_{name}"].keys() == {"8k on nothing", "8k on 24k"}
    assert figures["prefill_seconds"]["8k on 24k"].keys() >= {"ours", "flash"}
    moves = {"store_share", "copy_share", "gather_share", "scatter_share"}
    assert moves | {"shared_prefix_speedup", "copy_tb_s", "gemm_tflop_s"} <= figures.keys()
