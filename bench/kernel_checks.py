"""Each kernel on this GPU against the reference, before its speed is looked at. Needs torch and Triton only.

The tests of the kernels (`tests/kernels/triton`) say more; these run wherever the bench does. Slots that no sequence
owns are NaN (127 in int8), so that a kernel that reads one shows it.

`where` is the torch device: a GPU; the CPU, in Triton's interpreter, for the checks of the checks; or torch's meta
device, where `launch_all` launches what the checks do (`bench.warm_kernels` records it).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels import reference
from kernels.block_copier import BlockCopier, BlockMove
from kernels.dispatch import PagedAttentionKernel
from kernels.heuristics import DeviceModel
from kernels.metadata import AttentionMetadata, StepPlan
from kernels.quantization import quantize
from kernels.rerotation import RotationTable, rerotate
from kernels.triton_attention import TritonAttention

# Of the size of the values (about 4 at most): sums in another order, weights and results rounded to the type.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...]  # (cached, new) of each sequence
    head_dim: int = 128
    group: int = 4
    num_kv_heads: int = 8
    block_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    shared: int = 0  # keys that all sequences have in the same blocks
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # 8-bit elements; None: `dtype`


CASES = {
    "decode": Case(((5000, 1), (40, 1), (900, 1), (0, 1))),
    "decode, a dozen": Case(((2000, 1),) * 12, head_dim=64),
    "decode, several tokens": Case(((5000, 8), (250, 8), (257, 2)), group=8),
    "prefill": Case(((700, 300), (0, 513))),
    "all at once": Case(((700, 300), (900, 1), (5, 0), (90, 7)), head_dim=96, group=3, block_size=32),
    "window, cap, sinks": Case(((3000, 1), (500, 200)), head_dim=256, sliding_window=512, soft_cap=50.0, sinks=True),
    "blocks of 256, heads of 80": Case(((3000, 1), (500, 200)), head_dim=80, block_size=256, group=1),
    "shared prefix": Case(((2100, 1),) * 9, shared=2048),
    "int8 KV": Case(((700, 300), (900, 1), (5000, 1), (90, 7)), kv_dtype=torch.int8),
    "fp8 KV": Case(((700, 300), (900, 1), (5000, 1), (90, 7)), kv_dtype=torch.float8_e4m3fn),
    "fp8 KV, shared prefix": Case(((2100, 1),) * 9, shared=2048, kv_dtype=torch.float8_e4m3fn),
    "fp16": Case(((700, 100), (900, 1)), dtype=torch.float16),
    "fp32": Case(((700, 100), (900, 1)), dtype=torch.float32),
}


# Steps of sequences with one new token each, that are captured.
CAPTURED = {
    "captured step": Case(((3000, 1), (40, 1)), dtype=torch.float16),
    "captured step that shares": Case(((2100, 1),) * 9, shared=2048, dtype=torch.float16),
}


def run_checks(
    device: DeviceModel,
    where: str = "cuda",
    cases: Mapping[str, Case] = CASES,
    captured: Mapping[str, Case] = CAPTURED,
) -> dict[str, str]:
    """What failed, by name; empty when all is right. One that fails does not keep the others from being looked at."""
    checks: dict[str, Callable[[], None]] = {}
    for name, case in cases.items():
        if _has(case, device):
            checks[name] = partial(_check_attention, name, case, device, where)
    for name, case in captured.items():
        checks[name] = partial(_check_captured_step, name, case, device, where)
    checks["moves"] = partial(_check_moves, device, where)
    failed: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
        except Exception as error:  # noqa: BLE001  whatever is wrong with one kernel, the others are looked at
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def launch_all(device: DeviceModel) -> None:
    """What the checks launch, over tensors without content."""
    for case in CASES.values():
        if _has(case, device):
            prepared = Prepared.of(case, device, "meta")
            prepared.store(prepared.kernels.store_kv)
            prepared.attend(prepared.kernels.paged_attention)
    for case in CAPTURED.values():
        prepared = Prepared.of(case, device, "meta", captured=True)
        prepared.store(prepared.kernels.store_kv)
        prepared.attend(prepared.kernels.paged_attention)
    _moves(device, torch.empty(50, 4, 2, 16, 2, 64, device="meta", dtype=torch.bfloat16))


def _has(case: Case, device: DeviceModel) -> bool:
    return case.kv_dtype != torch.float8_e4m3fn or device.has_fp8


@dataclass
class Prepared:
    """A case's tensors, and the kernels for it."""

    case: Case
    kernels: TritonAttention
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scales: torch.Tensor | None
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, case: Case, device: DeviceModel, where: str, captured: bool = False) -> Prepared:
        scales = None if case.kv_dtype is None else torch.rand(2, 2, case.num_kv_heads, device=where) * 0.02 + 0.01
        kv_cache, metadata = _cache(case, where, scales)
        num_heads, num_tokens = case.num_kv_heads * case.group, metadata.slot_mapping.shape[0]
        sharing = not captured or bool(case.shared)
        kernels = TritonAttention(
            device,
            min_shared_saving=1024,
            kv_scales=scales,
            shares_prefixes=sharing,
            captured=captured and sharing,
        )

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(num_tokens, heads, case.head_dim, device=where).to(case.dtype)

        return cls(
            case=case,
            kernels=kernels,
            kv_cache=kv_cache,
            metadata=metadata,
            query=normal(num_heads),
            key=normal(case.num_kv_heads),
            value=normal(case.num_kv_heads),
            scales=scales,
            sinks=torch.randn(num_heads, device=where).to(case.dtype) if case.sinks else None,
        )

    def store(self, store_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None]) -> None:
        store_kv(self.key, self.value, self.kv_cache, 1, self.metadata.slot_mapping)

    def attend(self, attention: PagedAttentionKernel) -> torch.Tensor:
        return attention(
            self.query,
            self.kv_cache,
            1,
            self.metadata,
            scale=self.case.head_dim**-0.5,
            sliding_window=self.case.sliding_window,
            soft_cap=self.case.soft_cap,
            sinks=self.sinks,
        )


def _check_attention(name: str, case: Case, device: DeviceModel, where: str) -> None:
    prepared = Prepared.of(case, device, where)
    scales = prepared.scales
    if scales is not None:
        _check_quantized_store(name, prepared, scales)
    prepared.store(prepared.kernels.store_kv)
    output = prepared.attend(prepared.kernels.paged_attention)
    assert prepared.kernels.shares_now == bool(case.shared), f"{name}: the shared pass"
    expected = prepared.attend(partial(reference.paged_attention, kv_scales=scales))
    _assert_close(name, output, expected, _TOLERANCE[case.dtype])


def _check_quantized_store(name: str, prepared: Prepared, scales: torch.Tensor) -> None:
    """The reference's elements, or their neighbours: a GPU's quotient may be on the other side of a border."""
    slots = prepared.metadata.slot_mapping
    block_size = prepared.case.block_size
    stored: list[torch.Tensor] = []
    for store in (prepared.kernels.store_kv, partial(reference.store_kv, kv_scales=scales)):
        written = replace(prepared, kv_cache=prepared.kv_cache.clone())
        written.store(store)
        stored.append(written.kv_cache[slots // block_size, 1, :, slots % block_size].float())
    step = 1.0 if prepared.kv_cache.dtype == torch.int8 else stored[1].abs() / 8 + 2.0**-9
    assert bool(((stored[0] - stored[1]).abs() <= step).all()), f"{name}: stored elements"
    assert float((stored[0] != stored[1]).float().mean()) < 0.01, f"{name}: stored elements"


def _cache(case: Case, where: str, scales: torch.Tensor | None) -> tuple[torch.Tensor, AttentionMetadata]:
    counts = [-(-(cached + new) // case.block_size) for cached, new in case.lengths]
    blocks = list(range(1, sum(counts) + 1))
    random.Random(0).shuffle(blocks)
    tables: list[list[int]] = []
    for count in counts:
        tables.append(blocks[:count])
        blocks = blocks[count:]
    common = tables[0][: case.shared // case.block_size]
    tables = [common + table[len(common) :] for table in tables]
    cached, new = [each[0] for each in case.lengths], [each[1] for each in case.lengths]
    metadata = AttentionMetadata.build(tables, cached, new, case.block_size, where)
    shape = (sum(counts) + 1, 2, 2, case.block_size, case.num_kv_heads, case.head_dim)
    dtype = case.kv_dtype or case.dtype
    kv_cache = torch.full(shape, 127 if dtype == torch.int8 else torch.nan, dtype=dtype, device=where)
    owned = AttentionMetadata.build(tables, [0] * len(tables), cached, case.block_size, where).slot_mapping
    rows = torch.randn(2, len(owned), case.num_kv_heads, case.head_dim, device=where).to(case.dtype)
    for part in range(2):
        stored = rows[part] if scales is None else quantize(rows[part], scales[1, part], dtype)
        kv_cache[owned // case.block_size, 1, part, owned % case.block_size] = stored
    return kv_cache, metadata


def _check_captured_step(name: str, case: Case, device: DeviceModel, where: str) -> None:
    """A captured step that is replayed with longer sequences, and with what they share by then."""
    prepared = Prepared.of(case, device, where, captured=True)
    kernels, metadata = prepared.kernels, prepared.metadata
    prepared.store(kernels.store_kv)
    short = replace(metadata, seq_lens=torch.full_like(metadata.seq_lens, 20))
    captured = replace(prepared, metadata=short)
    output, replay = _capture(lambda: captured.attend(kernels.paged_attention), where)
    short.seq_lens.copy_(metadata.seq_lens)
    plan = StepPlan(metadata.host_block_tables, metadata.host_query_lens, metadata.host_seq_lens, [])
    assert kernels.stage_prefixes(plan, case.block_size) == bool(case.shared), f"{name}: what is staged"
    replay()
    _assert_close(name, output, prepared.attend(reference.paged_attention), _TOLERANCE[case.dtype])


def _capture(step: Callable[[], torch.Tensor], where: str) -> tuple[torch.Tensor, Callable[[], object]]:
    """The step's output, and what computes it anew. Where nothing can be captured, the step is run again."""
    step()
    if where == "cpu":
        output = step()
        return output, lambda: output.copy_(step())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    return output, graph.replay


def _check_moves(device: DeviceModel, where: str) -> None:
    """Bit for bit; a padded row writes nothing; a turned key is what plain torch makes of it."""
    kv_cache = torch.randn(50, 4, 2, 16, 2, 64, device=where).bfloat16()
    before = kv_cache.clone()
    staging, table = _moves(device, kv_cache)
    assert torch.equal(staging, before[[40, 2, 17]]), "gather"
    before[[0, 49, 30]] = staging
    before[[3, 4]] = before[1].clone()
    rerotate(before, 5, 6, table, 0)
    others = [block for block in range(50) if block != 6]
    assert torch.equal(kv_cache[others], before[others]), "scatter, copy, or a padded row that was written"
    _assert_close("rerotate", kv_cache[6], before[6], 2.0**-5)


def _moves(device: DeviceModel, kv_cache: torch.Tensor) -> tuple[torch.Tensor, RotationTable]:
    """Store rows that are padding, gather, scatter, copy, turn. What was gathered, and the table of turns."""
    where = kv_cache.device
    rows = torch.randn(2, 2, 64, device=where).bfloat16()
    TritonAttention(device).store_kv(rows, rows, kv_cache, 1, torch.tensor([-1, -1], device=where))
    copier, staging = BlockCopier(), torch.empty_like(kv_cache[:3])
    copier.gather_blocks(kv_cache, [40, 2, 17], staging)
    copier.scatter_blocks(staging, kv_cache, [0, 49, 30])
    copier.copy_blocks(kv_cache, [(1, 3), (3, 4)])
    table = RotationTable.build(torch.rand(4, 32, device=where), [1000])
    copier.rerotate_blocks(kv_cache, [BlockMove(5, 6, 0)], table)
    return staging, table


def _assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0.0, atol=tolerance, equal_nan=False, msg=lambda text: f"{name}: {text}"
    )
