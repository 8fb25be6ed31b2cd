"""The engine's bench and the GPU's one command, as far as they run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.engine import Shape, run
from bench.gpu import PARTS, Part, run_all

TINY = Shape("tiny", 2, 32, 64, 4, 2, 128, prefix=64, tail=8, batch=3, context=20, steps=4)


def test_the_engine_bench_measures_what_it_names() -> None:
    """Its own asserts hold the cache to what is measured: cold finds nothing, warm the whole prefix."""
    results = run(TINY, torch.device("cpu"), enforce_eager=False, async_scheduling=True)
    names = {"ttft_cold_ms", "ttft_warm_ms", "warm_share", "step_ms", "device_ms", "device_share", "host_ms", "wait_ms"}
    assert names <= results.keys()
    assert all(isinstance(results[name], float) for name in names)
    assert results["graphs"] == []
    json.dumps(results)


def test_the_report_has_every_part_also_those_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = (
        Part("good", ("-c", "print('a table'); print('{\"share\": 0.9}')"), 60),
        Part("bad", ("-c", "print('it broke'); raise SystemExit(3)"), 60),
        Part("endless", ("-c", "import time; print('begun', flush=True); time.sleep(600)"), 1.5),
    )
    assert not run_all(parts, tmp_path, tmp_path / "out", "a GPU")
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert report["gpu"] == "a GPU"
    assert (report["good"]["passed"], report["good"]["figures"]) == (True, {"share": 0.9})
    assert (report["bad"]["passed"], report["endless"]["passed"]) == (False, False)
    table = (tmp_path / "out" / "gpu.txt").read_text()
    assert all(text in table for text in ("a table", "it broke", "begun", "stopped after"))
    assert "FAILED" in capsys.readouterr().out


def test_its_limits_end_within_eight_minutes() -> None:
    assert sum(part.seconds for part in PARTS) < 480
