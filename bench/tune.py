"""python -m bench.tune: write the tile table of the attention kernels, `kernels/tile_table.py`.

on a GPU     every candidate is timed on long sequences and prompts; then into how many parts decode's keys are best
             cut (PROGRAMS_PER_SM), and the saving from which a shared prefix pays. This architecture's rows are
             rewritten.
--static     no GPU needed. Each row gets the first candidate, in an order of preference, that compiles without
             spills for every head size of the row, for plain attention and with every option, fits shared memory, and
             keeps loads in flight while a tile is computed. Rows of architectures that were measured stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from bench.gpu_timer import median_ms
from kernels import tile_table
from kernels.compilation import ARCHITECTURES, Compiled, Specialisation, compile_specialisation
from kernels.heuristics import HEAD_DIMS, DeviceModel, TileTable
from kernels.metadata import AttentionMetadata
from kernels.triton_attention import MAX_DECODE_QUERY, TritonAttention

Key = tuple[int, str, int, int]
Row = tuple[int, int, int, int]

# (block_m, block_n, num_warps, num_stages), the preferred first: large tiles of keys, then deep pipelines.
CANDIDATES: dict[str, list[Row]] = {
    "decode": [(16, 64, 4, 3), (16, 32, 4, 4), (16, 32, 4, 3)],
    "decode_wide": [(64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 8, 3), (32, 32, 4, 3)],
    "prefill": [
        (128, 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 8, 3),
        (64, 16, 8, 3),
    ],
    "shared_prefix": [(128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 8, 3), (64, 32, 4, 3), (64, 32, 8, 3), (64, 16, 8, 3)],
}  # fmt: skip
# fp32 products are made of several, of factors in several parts: no tile of these sizes fits the registers.
FP32_CANDIDATES: list[Row] = [
    (64, 32, 8, 3), (32, 32, 8, 3), (32, 16, 8, 3), (16, 32, 8, 3), (16, 16, 8, 3), (16, 16, 4, 3),
]  # fmt: skip
FP32_DECODE_CANDIDATES: list[Row] = [(16, 64, 4, 3), (16, 32, 4, 3), (16, 16, 8, 3), (16, 16, 4, 3)]
NUM_KV_HEADS = 8  # of what is timed
HEADS_OF = {64: (64,), 128: (128, 80, 96), 256: (256,)}  # that models have, by row of the table
KV_DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}


def table_keys(architecture: int) -> Iterator[Key]:
    for kernel in CANDIDATES:
        for head_dim in HEAD_DIMS:
            for kv_bytes in KV_DTYPES:
                yield architecture, kernel, head_dim, kv_bytes


def candidates(key: Key) -> list[Row]:
    if key[3] < 4:
        return CANDIDATES[key[1]]
    return FP32_DECODE_CANDIDATES if key[1] == "decode" else FP32_CANDIDATES


def fitting_rows(key: Key) -> Iterator[tuple[Row, int]]:
    """The candidates that compile well, the preferred first, and how many programs of each run on a multiprocessor.

    For every head size that the row is for: columns that fill one up need masks, and masks registers.
    """
    heads, kv_dtypes = HEADS_OF[key[2]], _kv_dtypes(key)
    forms = [(head, kv_dtype, option) for head in heads for kv_dtype in kv_dtypes for option in (True, False)]
    for row in candidates(key):
        programs: list[int] = []
        for head_dim, kv_dtype, option in forms:
            compiled = _compile(key, row, head_dim, kv_dtype, option)
            if compiled is None or not acceptable(compiled, key[0]):
                break
            programs.append(compiled.programs_per_sm)
        else:
            yield row, min(programs)


def _kv_dtypes(key: Key) -> list[torch.dtype]:
    """The types of a cache whose elements have the row's size, as far as the architecture has them."""
    has_fp8 = key[3] == 1 and ARCHITECTURES[key[0]].device.has_fp8
    return [KV_DTYPES[key[3]], *([torch.float8_e4m3fn] if has_fp8 else [])]


def _compile(key: Key, row: Row, head_dim: int, kv_dtype: torch.dtype, every_option: bool) -> Compiled | None:
    """None: does not fit the device at all."""
    architecture, kernel, bucket, kv_bytes = key
    model = ARCHITECTURES[architecture]
    _, block_n, _, num_stages = row
    if 2 * (num_stages - 1) * block_n * bucket * kv_bytes > model.shared_memory_program:
        return None  # without compiling: not even the keys and values fit
    dtype = torch.float32 if kv_bytes == 4 else torch.bfloat16
    wanted = Specialisation(architecture, kernel, head_dim, dtype, kv_dtype, every_option=every_option)
    try:
        return compile_specialisation(wanted, {**tile_table.TILES, key: row})
    except OutOfResources:  # tensor memory, found by the compiler itself
        return None


def acceptable(compiled: Compiled, architecture: int) -> bool:
    fits = compiled.shared_memory <= ARCHITECTURES[architecture].shared_memory_program
    return fits and compiled.spilled == 0 and compiled.buffers >= 2


def _static_row(key: Key) -> tuple[Key, Row | None]:
    """For decode, the first of which two programs share a multiprocessor: one computes while the other waits."""
    first: Row | None = None
    for row, programs in fitting_rows(key):
        if key[1] != "decode" or programs >= 2:
            return key, row
        first = first or row
    return key, first


def tune_statically(processes: int) -> dict[Key, Row]:
    keys = [key for each in ARCHITECTURES if each not in tile_table.MEASURED for key in table_keys(each)]
    rows: dict[Key, Row] = dict(tile_table.TILES)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for key, row in pool.map(_static_row, keys):
            if row is None:
                raise SystemExit(f"no candidate compiles well for {key}")
            print(f"{key}: {row}", flush=True)
            rows[key] = row
    return rows


@dataclass(frozen=True)
class Workload:
    """What a kernel is timed on: `num_seqs` sequences of `seq_len` keys, of which the last `new` are new."""

    num_seqs: int
    seq_len: int
    new: int
    shared: int = 0

    def run(self, device: DeviceModel, key: Key, tiles: TileTable, shares: bool) -> float:
        _, _, head_dim, kv_bytes = key
        block_size, num_kv_heads, group = 16, NUM_KV_HEADS, 4
        per_seq = self.seq_len // block_size
        tables = [list(range(index * per_seq, (index + 1) * per_seq)) for index in range(self.num_seqs)]
        common = tables[0][: self.shared // block_size]
        tables = [common + table[len(common) :] for table in tables]
        metadata = AttentionMetadata.build(
            tables, [self.seq_len - self.new] * self.num_seqs, [self.new] * self.num_seqs, block_size, "cuda"
        )
        dtype = torch.float32 if kv_bytes == 4 else torch.bfloat16
        shape = (self.num_seqs * per_seq, 1, 2, block_size, num_kv_heads, head_dim)
        kv_cache = torch.zeros(shape, dtype=KV_DTYPES[kv_bytes], device="cuda")
        query = torch.randn(self.num_seqs * self.new, num_kv_heads * group, head_dim, dtype=dtype, device="cuda")
        scales = torch.ones(1, 2, num_kv_heads, device="cuda") if kv_bytes == 1 else None
        kernels = TritonAttention(device, kv_scales=scales, shares_prefixes=shares, min_shared_saving=1, tiles=tiles)
        call: Callable[[], torch.Tensor] = partial(
            kernels.paged_attention,
            query,
            kv_cache,
            0,
            metadata,
            scale=head_dim**-0.5,
            sliding_window=None,
            soft_cap=None,
            sinks=None,
        )
        return median_ms(call)


WORKLOADS = {
    "decode": Workload(16, 8192, 1),
    "decode_wide": Workload(16, 8192, MAX_DECODE_QUERY),
    "prefill": Workload(1, 8192, 4096),
    "shared_prefix": Workload(32, 4608, 1, shared=4096),
}


def tune_by_timing(device: DeviceModel) -> dict[Key, Row]:
    rows: dict[Key, Row] = dict(tile_table.TILES)
    for key in table_keys(device.architecture):
        workload = WORKLOADS[key[1]]
        timed = {
            row: workload.run(device, key, {**rows, key: row}, shares=key[1] == "shared_prefix")
            for row, _ in fitting_rows(key)
        }
        rows[key] = min(timed, key=timed.__getitem__)
        print(f"{key}: {rows[key]} {timed[rows[key]]:.3f} ms; {timed}", flush=True)
    return rows


PROGRAMS = (2, 4, 8, 16)  # a multiprocessor, that decode's keys may be cut for
BATCHES = (1, 8, 12, 16, 64)  # sequences of 16k: it is between 8 and 16 that a bad cut shows


def measured_programs(device: DeviceModel, rows: TileTable) -> int:
    """The number for which the slowest batch, against the best time that any number has for it, is the least slow."""
    key = (device.architecture, "decode", 128, 2)
    times = {
        count: [
            Workload(batch, 16384, 1).run(replace(device, cut_for=count), key, rows, shares=False) for batch in BATCHES
        ]
        for count in PROGRAMS
    }
    best = [min(each) for each in zip(*times.values(), strict=True)]
    print(f"programs a multiprocessor, ms at {BATCHES} sequences: {times}", flush=True)
    return min(PROGRAMS, key=lambda count: max(ms / least for ms, least in zip(times[count], best, strict=True)))


def measured_saving(device: DeviceModel, rows: TileTable) -> int:
    """The smallest saving in bytes, of those tried, from which sharing is faster at every larger one."""
    key = (device.architecture, "shared_prefix", 128, 2)
    key_bytes = 2 * NUM_KV_HEADS * 128 * 2
    least = key_bytes << 20
    for members, shared in reversed([(2, 1024), (4, 1024), (4, 2048), (8, 2048), (8, 4096), (32, 4096)]):
        workload = Workload(members, shared + 256, 1, shared=shared)
        if workload.run(device, key, rows, shares=True) >= workload.run(device, key, rows, shares=False):
            break
        least = (members - 1) * shared * key_bytes
    return least


def write_table(
    rows: TileTable,
    measured: frozenset[int],
    programs: Mapping[int, int],
    savings: Mapping[int, int],
    path: Path = Path(tile_table.__file__),
) -> None:
    head = path.read_text(encoding="utf-8").split("MEASURED:")[0]
    lines = [
        f"{head}MEASURED: frozenset[int] = frozenset({sorted(measured)})",
        f"PROGRAMS_PER_SM: dict[int, int] = {dict(programs)!r}",
        f"MIN_SHARED_SAVING: dict[int, int] = {dict(savings)!r}",
        "TILES: dict[tuple[int, str, int, int], tuple[int, int, int, int]] = {",
        *(f'    ({key[0]}, "{key[1]}", {key[2]}, {key[3]}): {row!r},' for key, row in rows.items()),
        "}\n",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tune")
    parser.add_argument("--static", action="store_true", help="choose by what compiles well; needs no GPU")
    parser.add_argument("--processes", type=int, default=2, help="compilers at a time with --static")
    arguments = parser.parse_args()
    programs, savings = dict(tile_table.PROGRAMS_PER_SM), dict(tile_table.MIN_SHARED_SAVING)
    if arguments.static:
        write_table(tune_statically(arguments.processes), tile_table.MEASURED, programs, savings)
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was timed. --static chooses by what compiles well.")
        print(json.dumps({"gpu": None}))
        return 0
    device = DeviceModel.of(torch.device("cuda"))
    rows = tune_by_timing(device)
    programs[device.architecture] = measured_programs(device, rows)
    device = replace(device, cut_for=programs[device.architecture])
    savings[device.architecture] = measured_saving(device, rows)
    write_table(rows, tile_table.MEASURED | {device.architecture}, programs, savings)
    found = {"programs_per_sm": device.cut_for, "min_shared_saving": savings[device.architecture]}
    print(json.dumps({"gpu": torch.cuda.get_device_name(), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
