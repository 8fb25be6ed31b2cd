"""Each kernel on this GPU against the reference, before its speed is looked at. Needs torch and Triton only.

The tests of the kernels (`tests/kernels/triton`) say more; these run wherever the bench does. Slots that no sequence
owns are NaN (127 in int8), so that a kernel that reads one shows it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels import reference
from kernels.block_copier import BlockCopier, BlockMove
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


def run_checks(device: DeviceModel) -> int:
    """How many passed. Raises AssertionError for the first that does not."""
    cases = {name: case for name, case in CASES.items() if case.kv_dtype != torch.float8_e4m3fn or device.has_fp8}
    for name, case in cases.items():
        _check_attention(name, case, device)
    _check_captured_step(device, Case(((3000, 1), (40, 1)), dtype=torch.float16))
    _check_captured_step(device, Case(((2100, 1),) * 9, shared=2048, dtype=torch.float16))
    _check_moves(device)
    return len(cases) + 3


def _check_attention(name: str, case: Case, device: DeviceModel) -> None:
    scales = None if case.kv_dtype is None else torch.rand(2, 2, case.num_kv_heads, device="cuda") * 0.02 + 0.01
    kv_cache, metadata = _cache(case, scales)
    num_heads = case.num_kv_heads * case.group
    query = torch.randn(metadata.slot_mapping.shape[0], num_heads, case.head_dim, device="cuda").to(case.dtype)
    key, value = (torch.randn(len(query), case.num_kv_heads, case.head_dim, device="cuda") for _ in range(2))
    key, value = key.to(case.dtype), value.to(case.dtype)
    kernels = TritonAttention(device, min_shared_saving=1024, kv_scales=scales)
    if scales is not None:
        _check_quantized_store(name, kernels, key, value, kv_cache.clone(), metadata.slot_mapping, scales)
    kernels.store_kv(key, value, kv_cache, 1, metadata.slot_mapping)
    sinks = torch.randn(num_heads, device="cuda").to(case.dtype) if case.sinks else None
    results = [
        attention(
            query,
            kv_cache,
            1,
            metadata,
            scale=case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            sinks=sinks,
        )
        for attention in (kernels.paged_attention, partial(reference.paged_attention, kv_scales=scales))
    ]
    assert kernels.shares_now == bool(case.shared), name
    _assert_close(name, results[0], results[1], _TOLERANCE[case.dtype])


def _check_quantized_store(
    name: str,
    kernels: TritonAttention,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """The reference's elements, or their neighbours: a GPU's quotient may be on the other side of a border."""
    blocks, offsets = slots // kv_cache.shape[3], slots % kv_cache.shape[3]
    stored: list[torch.Tensor] = []
    for store in (kernels.store_kv, partial(reference.store_kv, kv_scales=scales)):
        store(key, value, kv_cache, 1, slots)
        stored.append(kv_cache[blocks, 1, :, offsets].float())
    step = 1.0 if kv_cache.dtype == torch.int8 else stored[1].abs() / 8 + 2.0**-9
    assert bool(((stored[0] - stored[1]).abs() <= step).all()), f"{name}: stored elements"
    assert float((stored[0] != stored[1]).float().mean()) < 0.01, f"{name}: stored elements"


def _cache(case: Case, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, AttentionMetadata]:
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
    metadata = AttentionMetadata.build(tables, cached, new, case.block_size, "cuda")
    shape = (sum(counts) + 1, 2, 2, case.block_size, case.num_kv_heads, case.head_dim)
    dtype = case.kv_dtype or case.dtype
    kv_cache = torch.full(shape, 127 if dtype == torch.int8 else torch.nan, dtype=dtype, device="cuda")
    owned = AttentionMetadata.build(tables, [0] * len(tables), cached, case.block_size, "cuda").slot_mapping
    rows = torch.randn(2, len(owned), case.num_kv_heads, case.head_dim, device="cuda").to(case.dtype)
    for part in range(2):
        stored = rows[part] if scales is None else quantize(rows[part], scales[1, part], dtype)
        kv_cache[owned // case.block_size, 1, part, owned % case.block_size] = stored
    return kv_cache, metadata


def _check_captured_step(device: DeviceModel, case: Case) -> None:
    """A captured step that is replayed with longer sequences, and with what they share by then."""
    kv_cache, metadata = _cache(case)
    num_seqs = len(case.lengths)
    query = torch.randn(num_seqs, 32, 128, device="cuda").half()
    sharing = bool(case.shared)
    kernels = TritonAttention(device, shares_prefixes=sharing, captured=sharing, min_shared_saving=1024)
    kernels.store_kv(query[:, :8], query[:, 8:16], kv_cache, 1, metadata.slot_mapping)
    captured = replace(metadata, seq_lens=torch.full_like(metadata.seq_lens, 20))

    def step() -> torch.Tensor:
        return kernels.paged_attention(
            query, kv_cache, 1, captured, scale=0.09, sliding_window=None, soft_cap=None, sinks=None
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    captured.seq_lens.copy_(metadata.seq_lens)
    plan = StepPlan(metadata.host_block_tables, metadata.host_query_lens, metadata.host_seq_lens, [])
    assert kernels.stage_prefixes(plan, case.block_size) == sharing, "captured step"
    graph.replay()
    expected = reference.paged_attention(
        query, kv_cache, 1, metadata, scale=0.09, sliding_window=None, soft_cap=None, sinks=None
    )
    _assert_close("captured step", output, expected, _TOLERANCE[torch.float16])


def _check_moves(device: DeviceModel) -> None:
    """Bit for bit; a padded row writes nothing; a turned key is what plain torch makes of it."""
    kv_cache = torch.randn(50, 4, 2, 16, 2, 64, device="cuda").bfloat16()
    before = kv_cache.clone()
    rows = torch.randn(2, 2, 64, device="cuda").bfloat16()
    TritonAttention(device).store_kv(rows, rows, kv_cache, 1, torch.tensor([-1, -1], device="cuda"))
    assert torch.equal(kv_cache, before), "a padded row was written"
    copier, staging = BlockCopier(), torch.empty_like(kv_cache[:3])
    copier.gather_blocks(kv_cache, [40, 2, 17], staging)
    assert torch.equal(staging, before[[40, 2, 17]]), "gather"
    copier.scatter_blocks(staging, kv_cache, [0, 49, 30])
    copier.copy_blocks(kv_cache, [(1, 3), (3, 4)])
    before[[0, 49, 30]] = staging
    before[[3, 4]] = before[1].clone()
    assert torch.equal(kv_cache, before), "scatter, copy"
    table = RotationTable.build(torch.rand(4, 32, device="cuda"), [1000])
    copier.rerotate_blocks(kv_cache, [BlockMove(5, 6, 0)], table)
    rerotate(before, 5, 6, table, 0)
    _assert_close("rerotate", kv_cache, before, 2.0**-5)


def _assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0.0, atol=tolerance, equal_nan=False, msg=lambda text: f"{name}: {text}"
    )
