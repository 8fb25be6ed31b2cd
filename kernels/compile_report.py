"""python -m kernels.compile_report: what every specialisation compiles to, in docs/kernels.json and docs/kernels.md.

    --processes N     compilers at a time (2)
    --only TEXT       compile the rows whose name has this in it, and those that are new; the others stay as they are

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
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from kernels.compilation import ARCHITECTURES, Architecture, Compiled, Specialisation, compile_specialisation
from kernels.cost import workloads

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEADS = (64, 80, 96, 128, 256)
SCANNED = (256, 2048)  # sequences, of the larger sizes that a program scans (`kernels.heuristics.scan_size`)
_BEGIN, _END = "<!-- compiled kernels: begin -->", "<!-- compiled kernels: end -->"


def specialisations() -> list[Specialisation]:
    """Every entry of the tile table, and every option, on each architecture."""
    found: list[Specialisation] = []
    for architecture, model in ARCHITECTURES.items():
        eight_bits = torch.float8_e4m3fn if model.device.has_fp8 else torch.int8
        for kernel in ("decode", "decode_wide", "prefill", "shared_prefix"):
            add = partial(Specialisation, architecture, kernel)
            found += [add(head_dim) for head_dim in HEADS]
            found += [add(head_dim, kv_dtype=eight_bits) for head_dim in HEADS]
            for head_dim in (64, 128, 256):
                found.append(add(head_dim, torch.float32, torch.float32))
                found.append(add(head_dim, every_option=True))
            found.append(add(kv_dtype=eight_bits, every_option=True))
            found.append(add(dtype=torch.float16, kv_dtype=torch.float16))
            found += [add(block_size=block_size) for block_size in (32, 64, 128, 256)]
            # A wide tile is for more rows than a head a group has in eight tokens.
            found += [add(group=group) for group in ((7, 8) if kernel == "decode_wide" else (1, 7, 8))]
            if eight_bits != torch.int8:
                found.append(add(kv_dtype=torch.int8))
            if kernel != "shared_prefix":
                found += [add(num_seqs=num_seqs) for num_seqs in SCANNED]
        for kernel in ("decode", "decode_wide"):
            add = partial(Specialisation, architecture, kernel, prefix=True)
            found += [add(head_dim) for head_dim in (64, 128, 256)]
            found += [add(kv_dtype=eight_bits), add(every_option=True), add(num_seqs=SCANNED[0])]
        for prefix in (False, True):
            add = partial(Specialisation, architecture, "reduce", prefix=prefix)
            found += [add(head_dim) for head_dim in HEADS]
            found += [add(every_option=True), *(add(num_seqs=num_seqs) for num_seqs in SCANNED)]
        for kernel in ("store", "rerotate"):
            found += [Specialisation(architecture, kernel, head_dim) for head_dim in HEADS]
        found.append(Specialisation(architecture, "store", kv_dtype=eight_bits))
        if eight_bits != torch.int8:
            found.append(Specialisation(architecture, "store", kv_dtype=torch.int8))
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
    found += _narrow_tiles(specialisation, compiled)
    if specialisation.multiplies and compiled.buffers < 2:
        found.append("loads nothing while it computes")
    expected = specialisation.expected_matrix(compiled.block_m)
    if compiled.matrix != expected:
        found.append(f"multiplies by {compiled.matrix or 'no matrix instruction'} instead of {expected}")
    return found


def _narrow_tiles(specialisation: Specialisation, compiled: Compiled) -> list[str]:
    """Tiles of keys and values that are loaded by less than they could be.

    Each loop has num_stages loads of each tile in its code: those that fill the pipeline, and the one that runs on.
    Elements of 16 and 32 bits must come by 16 bytes, those of 8 bits by 16 or 8: a product of widened values wants them
    in another order, so that decode's tiles of 16 rows, and all on sm_80, load their values by 8.
    """
    if not specialisation.multiplies:
        return [] if compiled.wide_loads else ["loads nothing by 16 bytes"]
    loops = 1
    if specialisation.kernel == "prefill":
        loops = 3 if specialisation.every_option else 2
    block_d = triton.next_power_of_2(specialisation.head_dim)
    threads = 32 * compiled.num_warps
    tile = compiled.block_n * block_d * specialisation.kv_dtype.itemsize // threads  # bytes of a thread
    query = compiled.block_m * block_d * specialisation.dtype.itemsize // (threads * 16)
    places = 2 * loops * compiled.num_stages
    wide = compiled.wide_loads - query
    if specialisation.kv_dtype.itemsize > 1:
        return [] if wide * 16 >= places * tile else [f"loads keys and values by less than 16 bytes ({wide} loads)"]
    loaded = wide * 16 + compiled.half_loads * 8
    return [] if loaded >= places * tile else [f"loads keys and values by less than 8 bytes ({loaded} bytes)"]


def compile_all(wanted: list[Specialisation], processes: int) -> dict[str, Compiled]:
    rows: dict[str, Compiled] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for each, compiled in zip(wanted, pool.map(compile_specialisation, wanted), strict=True):
            rows[each.key] = compiled
            print(f"{each.key}: {compiled}", flush=True)
    return rows


def _kept_rows(only: str) -> dict[str, Compiled]:
    """The checked-in rows, less those to be compiled again; none of another Triton's."""
    report = json.loads((DOCS / "kernels.json").read_text(encoding="utf-8"))
    if report["triton"] != triton.__version__:
        return {}
    return {key: Compiled(**row) for key, row in report["kernels"].items() if only not in key}


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
        f"{row.half_loads}",
        f"{row.narrow_loads}",
        matrix,
    ]


def _table(rows: Iterable[list[str]]) -> str:
    head = ["kernel", "case", "tile", "warps", "registers", "spilled", "shared KB", "programs a SM", "occupancy"]
    head += ["tiles held", "16-byte loads", "8-byte loads", "other loads", "matrix instructions"]
    return _markdown(head, rows)


def _limits() -> str:
    models = list(ARCHITECTURES.values())
    work = {each.name: workloads(each.device) for each in models}
    head = ["work", "operations", *(f"{each.member}: bytes, their time, the operations'" for each in models)]
    rows: list[list[str]] = []
    for name, first in work[models[0].name].items():
        row = [name, f"{first.operations / 1e9:,.1f} G"]
        for each in models:
            cost = work[each.name][name]
            memory, compute = cost.bytes_moved / each.bandwidth, cost.operations / each.matrix_rate
            figures = [f"{memory * 1e6:,.0f} µs", f"{compute * 1e6:,.0f} µs"]
            binding = 0 if memory >= compute else 1
            figures[binding] = f"**{figures[binding]}**"
            row.append(", ".join([f"{cost.bytes_moved / 1e6:,.1f} MB", *figures]))
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
    parser.add_argument("--only", metavar="TEXT", help="compile rows with this in their name, and new ones")
    arguments = parser.parse_args()
    wanted = specialisations()
    kept = {} if arguments.only is None else _kept_rows(arguments.only)
    compiled = compile_all([each for each in wanted if each.key not in kept], arguments.processes)
    rows = {each.key: kept.get(each.key) or compiled[each.key] for each in wanted}
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
