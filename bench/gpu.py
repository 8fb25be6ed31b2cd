"""python -m bench.gpu: all that needs a GPU, in one go: the tests, `bench.kernels`, `bench.engine`. `make gpu` runs it.

    tests            those marked `gpu`, where what they are written with is installed; it says so where it is not, and
                     `bench.kernels` compares every kernel with the reference all the same
    bench.kernels    each kernel against what this GPU can do
    bench.engine     the engine around an 8-billion shape

The benches need torch, Triton and transformers, no more and no network: the weights are random, of a real model's
shapes. Each part is a process with a time limit of its own; together they end within 8 minutes. Writes `gpu.json` and
`gpu.txt` (the tables) into the directory of `--out`. Exit code 1 when a part failed; without a CUDA device nothing is
run, and it says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]  # after the interpreter
    seconds: float  # its limit
    has_figures: bool = True  # its last line is JSON
    needs: tuple[str, ...] = ()  # modules without which it is left out


PARTS = (
    Part(
        "tests",
        ("-m", "pytest", "-q", "-x", "tests/kernels/triton/test_on_gpu.py", "tests/engine/test_on_gpu.py"),
        110,
        has_figures=False,
        needs=("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis", "msgspec", "xxhash", "redis"),
    ),
    Part("kernels", ("-m", "bench.kernels"), 190),
    Part("engine", ("-m", "bench.engine"), 160),
)


_VERDICTS = {True: "passed", False: "FAILED", None: "left out"}


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool | None  # None: it was left out
    seconds: float
    text: str
    figures: object  # of the last line; None: there were none to be had


def run_part(part: Part, root: Path) -> Outcome:
    absent = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if absent:
        return Outcome(part.name, None, 0.0, f"left out, since {', '.join(absent)} cannot be imported here\n", None)
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *part.command],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=part.seconds,
        )
        text, passed = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        text, passed = f"{text}\nstopped after {part.seconds:.0f} s\n", False
    figures: object = None
    if part.has_figures and passed:
        figures = json.loads(text.strip().splitlines()[-1])
    return Outcome(part.name, passed, time.monotonic() - started, text, figures)


def run_all(parts: Sequence[Part], root: Path, out: Path, device: str) -> bool:
    """Whether no part failed."""
    outcomes: list[Outcome] = []
    for part in parts:
        outcome = run_part(part, root)
        outcomes.append(outcome)
        print(f"==> {outcome.name}: {_VERDICTS[outcome.passed]}, {outcome.seconds:.0f} s")
        print(outcome.text, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    table = "\n".join(f"==> {outcome.name}\n{outcome.text}" for outcome in outcomes)
    (out / "gpu.txt").write_text(f"{device}\n{table}")
    report = {
        outcome.name: {"passed": outcome.passed, "seconds": round(outcome.seconds, 1), "figures": outcome.figures}
        for outcome in outcomes
    }
    (out / "gpu.json").write_text(json.dumps({"gpu": device, **report}, indent=1) + "\n")
    return all(outcome.passed is not False for outcome in outcomes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="All that needs a GPU.")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="where gpu.json and gpu.txt go")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run, and nothing is known of the GPU path's speed.")
        print(json.dumps({"gpu": None}))
        return 0
    return 0 if run_all(PARTS, Path(__file__).parents[1], arguments.out, torch.cuda.get_device_name()) else 1


if __name__ == "__main__":
    sys.exit(main())
