"""python -m kernels.compile_report: what every specialisation compiles to, in docs/kernels.json and docs/kernels.md.

    --processes N     compilers at a time (2)

The figures are those of one version of Triton and its assembler, named in the report. A test compiles some of the rows
again and compares; `make kernels-report` compiles all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from kernels.compilation import ARCHITECTURES, Architecture, Compiled, Specialisation, compile_specialisation
from kernels.cost import WORKLOADS

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BEGIN, _END = "<!-- compiled kernels: begin -->", "<!-- compiled kernels: end -->"


def specialisations() -> list[Specialisation]:
    """Every entry of the tile table, and every option, on each architecture."""
    found: list[Specialisation] = []
    for architecture, model in ARCHITECTURES.items():
        eight_bits = torch.float8_e4m3fn if model.device.has_fp8 else torch.int8
        for kernel in ("decode", "decode_wide", "prefill", "shared_prefix"):
            found += [Specialisation(architecture, kernel, head_dim) for head_dim in (64, 80, 96, 128, 256)]
            for head_dim in (64, 128, 256):
                found.append(Specialisation(architecture, kernel, head_dim, kv_dtype=eight_bits))
                found.append(Specialisation(architecture, kernel, head_dim, torch.float32, torch.float32))
                found.append(Specialisation(architecture, kernel, head_dim, every_option=True))
            found.append(Specialisation(architecture, kernel, dtype=torch.float16, kv_dtype=torch.float16))
            found.append(Specialisation(architecture, kernel, block_size=256))
            if eight_bits != torch.int8:
                found.append(Specialisation(architecture, kernel, kv_dtype=torch.int8))
        if eight_bits != torch.int8:
            found.append(Specialisation(architecture, "store", kv_dtype=torch.int8))
        for kernel in ("reduce", "store", "rerotate"):
            found += [Specialisation(architecture, kernel, head_dim) for head_dim in (64, 80, 96, 128, 256)]
        found.append(Specialisation(architecture, "reduce", every_option=True))
        found.append(Specialisation(architecture, "store", kv_dtype=eight_bits))
        found.append(Specialisation(architecture, "copy"))
        found.append(Specialisation(architecture, "copy", dtype=eight_bits, kv_dtype=eight_bits))
    return found


def faults(specialisation: Specialisation, compiled: Compiled) -> list[str]:
    """What is wrong with it; nothing, for a row that may be checked in."""
    architecture = ARCHITECTURES[specialisation.architecture]
    found: list[str] = []
    if compiled.spilled:
        found.append(f"spills {compiled.spilled} bytes")
    if compiled.shared_memory > architecture.shared_memory_program:
        found.append(f"takes {compiled.shared_memory} bytes of shared memory")
    if compiled.programs_per_sm < 1:
        found.append("does not fit a multiprocessor")
    if not compiled.wide_loads:
        found.append("loads nothing by 16 bytes")
    if specialisation.multiplies and compiled.buffers < 2:
        found.append("loads nothing while it computes")
    expected = specialisation.expected_matrix(compiled.block_m)
    if compiled.matrix != expected:
        found.append(f"multiplies by {compiled.matrix or 'no matrix instruction'} instead of {expected}")
    return found


def compile_all(wanted: list[Specialisation], processes: int) -> dict[str, Compiled]:
    rows: dict[str, Compiled] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for each, compiled in zip(wanted, pool.map(compile_specialisation, wanted), strict=True):
            rows[each.key] = compiled
            print(f"{each.key}: {compiled}", flush=True)
    return rows


def to_json(rows: dict[str, Compiled]) -> str:
    compiled = ",\n".join(f"  {json.dumps(key)}: {json.dumps(dataclasses.asdict(row))}" for key, row in rows.items())
    return f'{{"triton": "{triton.__version__}", "kernels": {{\n{compiled}\n}}}}\n'


def render(version: str, rows: dict[str, Compiled]) -> str:
    """The generated part of docs/kernels.md."""
    parts = [f"Compiled by Triton {version}; `make kernels-report` writes this part.\n"]
    for number, architecture in ARCHITECTURES.items():
        parts.append(f"### {architecture.name}\n")
        own = {each.key: each for each in specialisations() if each.architecture == number}
        parts.append(_table(_compiled_row(own[key], row, architecture) for key, row in rows.items() if key in own))
    parts.append("### The two limits\n")
    parts.append(_limits())
    return "\n".join(parts)


def _compiled_row(specialisation: Specialisation, row: Compiled, architecture: Architecture) -> list[str]:
    occupancy = row.programs_per_sm * row.num_warps / architecture.max_warps
    tile = f"{row.block_m}×{row.block_n}" if specialisation.multiplies else ""
    matrix = f"{row.matrix_count} {row.matrix}" if row.matrix else ""
    return [
        specialisation.kernel,
        specialisation.case,
        tile,
        f"{row.num_warps}",
        f"{row.registers}",
        f"{row.spilled}",
        f"{row.shared_memory / 1024:.0f}",
        f"{row.programs_per_sm}",
        f"{occupancy:.0%}",
        f"{row.buffers}" if specialisation.multiplies else "",
        f"{row.wide_loads}",
        f"{row.narrow_loads}",
        matrix,
    ]


def _table(rows: Iterable[list[str]]) -> str:
    head = ["kernel", "case", "tile", "warps", "registers", "spilled", "shared KB", "programs a SM", "occupancy"]
    head += ["tiles held", "16-byte loads", "other loads", "matrix instructions"]
    return _markdown(head, rows)


def _limits() -> str:
    head = ["work", "bytes", "operations", *(f"{each.member}: bytes, operations" for each in ARCHITECTURES.values())]
    rows: list[list[str]] = []
    for name, cost in WORKLOADS.items():
        row = [name, f"{cost.bytes_moved / 1e6:,.1f} MB", f"{cost.operations / 1e9:,.1f} G"]
        for each in ARCHITECTURES.values():
            memory, compute = cost.bytes_moved / each.bandwidth, cost.operations / each.matrix_rate
            figures = [f"{memory * 1e6:,.0f} µs", f"{compute * 1e6:,.0f} µs"]
            binding = 0 if memory >= compute else 1
            figures[binding] = f"**{figures[binding]}**"
            row.append(", ".join(figures))
        rows.append(row)
    return _markdown(head, rows)


def _markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def replace_generated(document: str, generated: str) -> str:
    before, _, rest = document.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"the document has no part between {_BEGIN} and {_END}"
    return f"{before}{_BEGIN}\n{generated}{_END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.compile_report")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    wanted = specialisations()
    rows = compile_all(wanted, arguments.processes)
    (DOCS / "kernels.json").write_text(to_json(rows), encoding="utf-8")
    document = DOCS / "kernels.md"
    generated = render(triton.__version__, rows)
    document.write_text(replace_generated(document.read_text(encoding="utf-8"), generated), encoding="utf-8")
    found = {each.key: wrong for each in wanted if (wrong := faults(each, rows[each.key]))}
    for key, wrong in found.items():
        print(f"{key}: {', '.join(wrong)}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
