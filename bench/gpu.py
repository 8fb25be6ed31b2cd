"""python -m bench.gpu: all that needs a GPU, in one go: the tests, `bench.kernels`, `bench.engine`. `make gpu` runs it.

    compile          what the others will launch, over all cores: a kernel at a time, in each of them, took minutes
    tests            those marked `gpu`, where what they are written with is installed; it says so where it is not, and
                     both benches compare what they measure with the reference, or with a plain engine, all the same
    bench.kernels    each kernel against what this GPU can do
    bench.engine     the engine around an 8-billion shape

The benches need torch, Triton and transformers, no more and no network: the weights are random, of a real model's
shapes. Each part is a process with a time limit of its own; together they end within 8 minutes. Writes `gpu.json` and
`gpu.txt` into the directory of `--out`, after each part anew: the figures, and a table that says which of the targets
(`bench/targets.py`) are met. Exit code 1 when a part failed; without a CUDA device nothing is run, and it says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from bench import targets

_TEST_PACKAGES = ("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis", "msgspec", "xxhash", "redis")
# Of another version of torch than ours a warning is no failure here.
_PYTEST = ("-m", "pytest", "-q", "-W", "default", "-m", "gpu", "--tb=short")


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]  # after the interpreter
    seconds: float  # its limit
    needs: tuple[str, ...] = ()  # modules without which it is left out


PARTS = (
    Part("compile", ("-m", "bench.warm_kernels"), 70),
    Part("kernel tests", (*_PYTEST, "tests/kernels/triton/test_on_gpu.py"), 60, needs=_TEST_PACKAGES),
    Part("engine tests", (*_PYTEST, "tests/engine/test_on_gpu.py"), 90, needs=_TEST_PACKAGES),
    Part("kernels", ("-m", "bench.kernels"), 120),
    Part("engine", ("-m", "bench.engine"), 130),
)


_VERDICTS = {True: "passed", False: "FAILED", None: "left out"}


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool | None  # None: it was left out
    seconds: float
    text: str  # what it printed, without the figures
    figures: dict[str, object] = field(default_factory=dict[str, object])  # the last that it printed


def run_part(part: Part, root: Path) -> Outcome:
    absent = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if absent:
        return Outcome(part.name, None, 0.0, f"left out, since {', '.join(absent)} cannot be imported here\n")
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # A group of its own, so that the end of a part is that of its workers too. Unbuffered: what is not in the file
        # when a part is stopped is lost.
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=root,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        note = ""
        try:
            passed = process.wait(part.seconds) == 0
        except subprocess.TimeoutExpired:
            passed, note = False, f"stopped after {part.seconds:.0f} s\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        printed = output.read().decode(errors="replace")
    figures, text = split_figures(printed)
    return Outcome(part.name, passed, time.monotonic() - started, f"{text}\n{note}", figures)


def split_figures(printed: str) -> tuple[dict[str, object], str]:
    """The last line that is a JSON object, and the lines that are none. What libraries print in between or afterwards
    is of no harm."""
    figures: dict[str, object] = {}
    others: list[str] = []
    for line in printed.splitlines():
        try:
            found: object = json.loads(line) if line.startswith("{") else None
        except ValueError:
            found = None
        if isinstance(found, dict):
            figures = cast(dict[str, object], found)
        else:
            others.append(line)
    return figures, "\n".join(others)


def run_all(parts: Sequence[Part], root: Path, out: Path, device: str) -> bool:
    """Whether no part failed."""
    outcomes: list[Outcome] = []
    for part in parts:
        outcome = run_part(part, root)
        outcomes.append(outcome)
        print(f"{_headline(outcome)}\n{outcome.text}", flush=True)
        write_report(outcomes, out, device)
    print(_verdicts(outcomes), flush=True)
    return all(outcome.passed is not False for outcome in outcomes)


def write_report(outcomes: Sequence[Outcome], out: Path, device: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    texts = "\n".join(f"{_headline(outcome)}\n{outcome.text}" for outcome in outcomes)
    (out / "gpu.txt").write_text(f"{device}\n\n{_verdicts(outcomes)}\n\n{texts}", encoding="utf-8")
    report = {
        outcome.name: {"passed": outcome.passed, "seconds": round(outcome.seconds, 1), "figures": outcome.figures}
        for outcome in outcomes
    }
    reached = targets.to_json(targets.rows(*_figures(outcomes)))
    (out / "gpu.json").write_text(json.dumps({"gpu": device, "targets": reached, **report}, indent=1) + "\n")


def _headline(outcome: Outcome) -> str:
    return f"==> {outcome.name}: {_VERDICTS[outcome.passed]}, {outcome.seconds:.0f} s"


def _verdicts(outcomes: Sequence[Outcome]) -> str:
    kernels, engine = _figures(outcomes)
    lines = [targets.to_text(targets.rows(kernels, engine)), *targets.warnings(kernels, engine)]
    lines += [_headline(outcome) for outcome in outcomes if outcome.passed is False]
    return "\n".join(lines)


def _figures(outcomes: Sequence[Outcome]) -> tuple[targets.Figures, targets.Figures]:
    """Of the kernels, and of the engine."""
    by_name = {outcome.name: outcome.figures for outcome in outcomes}
    return by_name.get("kernels", {}), by_name.get("engine", {})


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
