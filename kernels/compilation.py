"""What the kernels compile to, for GPUs that are not there: registers, spills, shared memory, instructions.

    specialisation ─► the host code launches over `meta` tensors ─► recorded launch ─► Triton ─► cubin ─► cuobjdump

The launches are recorded from the host code itself (`TritonAttention`, `BlockCopier`), with Triton's own rules for what
of an argument becomes part of the compiled code: what is inspected is what would run. Writing the signatures down a
second time was the alternative, and would go on compiling after a launch had become wrong.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.block_copier import BlockCopier, BlockMove
from kernels.heuristics import DeviceModel, TileTable, scan_size
from kernels.metadata import AttentionMetadata
from kernels.rerotation import RotationTable
from kernels.tile_table import TILES
from kernels.triton_attention import MAX_DECODE_QUERY, TritonAttention, product_precision

NUM_LAYERS = 32
NUM_KV_HEADS = 8


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPU's limits a multiprocessor, and the rates of its best known member, by the vendor's data sheet."""

    name: str
    device: DeviceModel
    shared_memory: int  # bytes a multiprocessor
    shared_memory_program: int  # bytes a program
    matrix_instruction: str  # for tiles of 64 rows and more
    member: str
    bandwidth: float  # bytes a second
    matrix_rate: float  # bf16 operations a second
    registers: int = 65536
    max_warps: int = 64
    max_programs: int = 32
    tensor_memory: int = 512  # columns


ARCHITECTURES = {
    # An sm_80 program may have 163 KB; the other devices of its row in the tile table (sm_86, sm_89, sm_120) have 99.
    80: Architecture("sm_80", DeviceModel(108, (8, 0)), 164 << 10, 99 << 10, "HMMA", "A100 80 GB", 2.04e12, 312e12),
    90: Architecture("sm_90", DeviceModel(132, (9, 0)), 228 << 10, 227 << 10, "HGMMA", "H100 SXM", 3.35e12, 990e12),
    100: Architecture("sm_100", DeviceModel(148, (10, 0)), 228 << 10, 227 << 10, "UTCHMMA", "B200", 8.0e12, 2250e12),
}


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One compiled variant of one kernel."""

    architecture: int
    kernel: str  # decode, decode_wide, prefill, shared_prefix, reduce, store, copy, rerotate
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    group: int = 4
    every_option: bool = False  # those of window, soft cap and sinks that the kernel has then
    prefix: bool = False  # of decode and reduce: beside a shared pass
    num_seqs: int = 3  # in the step; what is compiled depends on `scan_size` of it

    @property
    def case(self) -> str:
        parts = [_short(self.dtype)]
        if self.kv_dtype != self.dtype:
            parts.append(f"{_short(self.kv_dtype)} KV")
        parts += [f"head {self.head_dim}", f"block {self.block_size}"]
        if self.group != 4:
            parts.append(f"group {self.group}")
        if self.prefix:
            parts.append("prefix")
        if scan_size(self.num_seqs) > scan_size(1):
            parts.append(f"{self.num_seqs} sequences")
        return ", ".join(parts + (self.options if self.every_option else []))

    @property
    def options(self) -> list[str]:
        """Layers with a window do not share a prefix; the shared pass leaves sinks, and `reduce` finds caps applied."""
        has_window = self.kernel != "shared_prefix" and not self.prefix
        has = {"window": has_window, "cap": self.kernel != "reduce", "sinks": self.kernel != "shared_prefix"}
        return [name for name, is_there in has.items() if is_there]

    @property
    def key(self) -> str:
        return f"{ARCHITECTURES[self.architecture].name} {self.kernel}: {self.case}"

    @property
    def multiplies(self) -> bool:
        return self.kernel in ("decode", "decode_wide", "prefill", "shared_prefix")

    def expected_matrix(self, block_m: int) -> str:
        """The matrix instruction that its products should come to; none for fp32 heads that do without tensor cores."""
        block_d = triton.next_power_of_2(self.head_dim)
        without = self.dtype == torch.float32 and product_precision(self.dtype, block_d) == "ieee"
        if without or not self.multiplies:
            return ""
        return ARCHITECTURES[self.architecture].matrix_instruction if block_m >= 64 else "HMMA"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int  # a thread
    spilled: int  # bytes of stack a thread
    shared_memory: int  # bytes a program
    tensor_memory: int  # columns a program
    programs_per_sm: int
    wide_loads: int  # global loads of 16 bytes, straight or into shared memory
    half_loads: int  # of 8 bytes
    narrow_loads: int  # of less: indices, lengths, scales
    buffers: int  # tiles of keys that shared memory holds: with 2 or more, loads go on while a tile is computed
    matrix: str  # the matrix instruction, if any
    matrix_count: int


@dataclass(frozen=True, slots=True)
class Launch:
    function: JITFunction[Any]
    args: tuple[object, ...]
    kwargs: dict[str, object]


def compile_specialisation(specialisation: Specialisation, tiles: TileTable = TILES) -> Compiled:
    architecture = ARCHITECTURES[specialisation.architecture]
    launch = recorded_launch(specialisation, tiles)
    function: Any = launch.function
    target = GPUTarget("cuda", specialisation.architecture, 32)
    backend = make_backend(target)
    bound, kinds, options = _bind(launch, backend)
    parsed, signature, constants, attributes = function._pack_args(backend, dict(options), bound, kinds, options)
    source = ASTSource(function, signature, constants, attributes)
    kernel = triton.compile(source, target=target, options=parsed.__dict__)
    registers, spilled, static_shared = _resources(kernel.asm["cubin"])
    counts = _instructions(kernel.asm["cubin"])
    buffers = _key_buffers(kernel.asm["ttgir"], int(bound.get("BLOCK_N", 0)), int(bound.get("BLOCK_D", 0)))
    matrix = next((name for name in _MATRIX_INSTRUCTIONS if counts[name]), "")
    shared = int(kernel.metadata.shared) + static_shared
    tensor_memory = int(getattr(kernel.metadata, "tmem_size", None) or 0)
    num_warps = int(kernel.metadata.num_warps)
    return Compiled(
        block_m=int(bound.get("BLOCK_M", 0)),
        block_n=int(bound.get("BLOCK_N", 0)),
        num_warps=num_warps,
        num_stages=int(kernel.metadata.num_stages),
        registers=registers,
        spilled=spilled,
        shared_memory=shared,
        tensor_memory=tensor_memory,
        programs_per_sm=programs_per_sm(architecture, registers, num_warps, shared, tensor_memory),
        wide_loads=counts["wide"],
        half_loads=counts["half"],
        narrow_loads=counts["narrow"],
        buffers=buffers,
        matrix=matrix,
        matrix_count=counts[matrix],
    )


def _bind(launch: Launch, backend: object) -> Any:
    """As `JITFunction.run` does, up to the point where it needs a device: (arguments, what of them is part of the
    compiled code, launch options)."""
    function: Any = launch.function
    bind = create_function_from_signature(function.signature, function.params, backend)
    return bind(*launch.args, **launch.kwargs)


def variant(launch: Launch, architecture: int) -> str:
    """Which compiled code a launch runs: what is equal for two launches is compiled once."""
    _, kinds, options = _bind(launch, make_backend(GPUTarget("cuda", architecture, 32)))
    return f"{launch.function.__name__} {kinds} {options}"


def programs_per_sm(
    architecture: Architecture, registers: int, num_warps: int, shared_memory: int, tensor_memory: int
) -> int:
    """How many programs run on a multiprocessor at a time.

    Registers are given out in units of 256 a warp; each program holds 1 KB of shared memory for the system; tensor
    memory comes in powers of two columns, 32 at least.
    """
    limits = [architecture.max_programs, architecture.max_warps // num_warps]
    limits.append(architecture.registers // (-(-registers * 32 // 256) * 256 * num_warps))
    limits.append(architecture.shared_memory // (shared_memory + 1024))
    if tensor_memory:
        limits.append(architecture.tensor_memory // max(32, triton.next_power_of_2(tensor_memory)))
    return min(limits)


_LAUNCHED = {
    "decode": "paged_decode",
    "decode_wide": "paged_decode",
    "prefill": "paged_prefill",
    "shared_prefix": "shared_prefix_decode",
    "reduce": "reduce_splits",
    "store": "store_rows",
    "copy": "copy_planes",
    "rerotate": "rerotate_blocks",
}


def recorded_launch(specialisation: Specialisation, tiles: TileTable = TILES) -> Launch:
    """The launch that the host code makes for it."""
    with recording() as launches:
        match specialisation.kernel:
            case "store":
                _store(specialisation)
            case "copy":
                _copy(specialisation)
            case "rerotate":
                _rerotate(specialisation)
            case _:
                _attend(specialisation, tiles)
    name = _LAUNCHED[specialisation.kernel]
    return next(launch for launch in launches if launch.function.__name__ == name)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    launches: list[Launch] = []

    def record(self: JITFunction[Any], *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        assert grid is not None
        assert not warmup
        launches.append(Launch(self, args, kwargs))

    original: Callable[..., Any] = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def _attend(specialisation: Specialisation, tiles: TileTable) -> None:
    device = ARCHITECTURES[specialisation.architecture].device
    shares = specialisation.kernel == "shared_prefix" or specialisation.prefix
    # Of one, a prompt, or a chunk's end; the others on one prefix, one new token each.
    most = {"prefill": 512, "decode_wide": MAX_DECODE_QUERY}.get(specialisation.kernel, 1)
    new = [1] * (specialisation.num_seqs - 1) + [most]
    # Tables as wide as the engine's, a multiple of 16 blocks: that is part of what is compiled.
    length = 8192 if specialisation.num_seqs <= 32 else 16 * specialisation.block_size
    blocks = list(range(length // specialisation.block_size))
    metadata = AttentionMetadata.build(
        [blocks] * len(new),
        [length - count for count in new],
        new,
        specialisation.block_size,
        torch.device("meta"),
    )
    num_heads = NUM_KV_HEADS * specialisation.group
    query = torch.empty(sum(new), num_heads, specialisation.head_dim, dtype=specialisation.dtype, device="meta")
    options = specialisation.options if specialisation.every_option else []
    TritonAttention(
        device,
        kv_scales=_scales(specialisation),
        shares_prefixes=shares,
        min_shared_saving=1,
        tiles=tiles,
    ).paged_attention(
        query,
        _cache(specialisation),
        1,
        metadata,
        scale=0.1,
        sliding_window=1024 if "window" in options else None,
        # A layer's own: `reduce` and the shared pass are the same with and without what they leave to the others.
        soft_cap=30.0 if "cap" in options else None,
        sinks=torch.empty(num_heads, dtype=specialisation.dtype, device="meta") if "sinks" in options else None,
    )


def _store(specialisation: Specialisation) -> None:
    rows = torch.empty(64, NUM_KV_HEADS, specialisation.head_dim, dtype=specialisation.dtype, device="meta")
    slots = torch.empty(64, dtype=torch.int64, device="meta")
    attention = TritonAttention(ARCHITECTURES[specialisation.architecture].device, kv_scales=_scales(specialisation))
    attention.store_kv(rows, rows, _cache(specialisation), 1, slots)


def _copy(specialisation: Specialisation) -> None:
    BlockCopier().copy_blocks(_cache(specialisation), [(1, 2)])


def _rerotate(specialisation: Specialisation) -> None:
    inv_freq = torch.empty(NUM_LAYERS, specialisation.head_dim // 2, device="meta")
    table = RotationTable.build(inv_freq, [16])
    BlockCopier().rerotate_blocks(_cache(specialisation), [BlockMove(1, 2, 0)], table)


def _cache(specialisation: Specialisation) -> torch.Tensor:
    shape = (40000, NUM_LAYERS, 2, specialisation.block_size, NUM_KV_HEADS, specialisation.head_dim)
    return torch.empty(shape, dtype=specialisation.kv_dtype, device="meta")


def _scales(specialisation: Specialisation) -> torch.Tensor | None:
    if specialisation.kv_dtype.itemsize > 1:
        return None
    return torch.empty(NUM_LAYERS, 2, NUM_KV_HEADS, device="meta")


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, bytes of stack, and bytes of static shared memory."""
    text = _cuobjdump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert found is not None, text
    # From sm_90 on the 1 KB that the system keeps is counted here; it is in `programs_per_sm`.
    static_shared = max(0, int(found[3]) - 1024)
    return int(found[1]), int(found[2]), static_shared


def _key_buffers(ttgir: str, block_n: int, block_d: int) -> int:
    """Of the copies [buffers, BLOCK_N, BLOCK_D] that the pipeline keeps of a tile; its loops may differ."""
    found = re.findall(rf"ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x{block_n}x{block_d}x", ttgir)
    return min(map(int, found), default=0)


_MATRIX_INSTRUCTIONS = ("UTCHMMA", "UTCQMMA", "HGMMA", "QGMMA", "HMMA", "QMMA", "IMMA")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)")


def _instructions(cubin: bytes) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in _cuobjdump(cubin, "--dump-sass").splitlines():
        found = _INSTRUCTION.search(line)
        if found is None:
            continue
        parts = found[1].split(".")
        counts[parts[0]] += 1
        if parts[0] in ("LDG", "LDGSTS"):
            counts["wide" if "128" in parts else "half" if "64" in parts else "narrow"] += 1
    return counts


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _short(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "int8"}
    return names.get(dtype, "fp8")
