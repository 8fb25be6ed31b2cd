"""python -m bench.kernels: the Triton kernels on this GPU, against what this GPU can do. A table, then one JSON line.

    decode           KV bytes a second, as a share of the measured copy bandwidth; beside it, on contiguous KV:
                     torch's attention (flash and cuDNN) and FlexAttention
    prefill          operations a second, as a share of torch's fastest contiguous attention in the same run
    shared prefix    our own plain decode's time over the shared one's
    store, copies    bytes a second, as a share of the copy bandwidth

Shapes are one layer of an 8-billion model: 32 query heads, 8 KV heads of 128, bf16, blocks of 16, shuffled. Every
figure is a median on a cold L2. JSON: `decode_copy_share` by batch, `prefill_share` by case, `shared_prefix_speedup`,
`store_copy_share`, `copy_share`, `gather_share`, `copy_tb_s`, `gemm_tflop_s`.

First `bench.kernel_checks` compares every kernel with the reference: a wrong kernel's speed is not worth a figure.
Without a CUDA device it says so, and the JSON is {"gpu": null}.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.gpu_timer import median_ms
from bench.kernel_checks import run_checks
from kernels.block_copier import BlockCopier
from kernels.cost import AttentionModel, copy_cost, decode_cost, prefill_cost, store_cost
from kernels.heuristics import DeviceModel
from kernels.metadata import AttentionMetadata
from kernels.triton_attention import TritonAttention

MODEL = AttentionModel()
BLOCK_SIZE = 16
CONTEXT = 16384
BATCHES = (1, 4, 8, 12, 16, 32, 64)
PREFILLS = {"8k on nothing": (8192, 0), "8k on 24k": (8192, 24576), "200 on 6k": (200, 6144)}
MEMBERS, SHARED, OWN = 32, 4096, 256
GROUP = MODEL.num_heads // MODEL.num_kv_heads
SCALE = MODEL.head_dim**-0.5
# Contiguous attention of torch: by name, so that one that cannot run a shape is left out and not the whole bench.
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass
class Results:
    rows: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    figures: dict[str, object] = field(default_factory=dict[str, object])

    def add(self, name: str, text: str) -> None:
        self.rows.append((name, text))
        print(f"{name:44} {text}", flush=True)


@dataclass(frozen=True)
class Device:
    """What the kernels are held against, measured here."""

    copy_bandwidth: float  # bytes a second, read and written
    gemm_rate: float  # operations a second


def measure_device(results: Results) -> Device:
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / (median_ms(partial(target.copy_, source)) * 1e-3)
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    rate = 2 * 8192**3 / (median_ms(partial(torch.mm, left, left)) * 1e-3)
    results.add("copy", f"{bandwidth / 1e12:.2f} TB/s")
    results.add("GEMM, bf16", f"{rate / 1e12:.0f} TFLOP/s")
    results.figures |= {"copy_tb_s": bandwidth / 1e12, "gemm_tflop_s": rate / 1e12}
    return Device(bandwidth, rate)


@dataclass(frozen=True)
class PagedBatch:
    """Sequences over shuffled blocks of a cache of one layer."""

    metadata: AttentionMetadata
    kv_cache: torch.Tensor
    query: torch.Tensor

    @classmethod
    def build(cls, lengths: list[tuple[int, int]], shared: int = 0) -> PagedBatch:
        """lengths: (cached, new); the first `shared` keys of all sequences lie in the same blocks."""
        counts = [-(-(cached + new) // BLOCK_SIZE) for cached, new in lengths]
        blocks = list(range(sum(counts)))
        random.Random(0).shuffle(blocks)
        tables: list[list[int]] = []
        for count in counts:
            tables.append(blocks[:count])
            blocks = blocks[count:]
        common = tables[0][: shared // BLOCK_SIZE]
        tables = [common + table[len(common) :] for table in tables]
        cached, new = [each[0] for each in lengths], [each[1] for each in lengths]
        shape = (sum(counts), 1, 2, BLOCK_SIZE, MODEL.num_kv_heads, MODEL.head_dim)
        return cls(
            metadata=AttentionMetadata.build(tables, cached, new, BLOCK_SIZE, "cuda"),
            kv_cache=torch.randn(shape, dtype=torch.bfloat16, device="cuda"),
            query=torch.randn(sum(new), MODEL.num_heads, MODEL.head_dim, dtype=torch.bfloat16, device="cuda"),
        )

    def time(self, kernels: TritonAttention) -> float:
        """Seconds."""
        call = partial(kernels.paged_attention, self.query, self.kv_cache, 0, self.metadata)
        return median_ms(partial(call, scale=SCALE, sliding_window=None, soft_cap=None, sinks=None)) * 1e-3


def contiguous_times(num_seqs: int, new: int, cached: int, bench_flex: bool) -> dict[str, float]:
    """Seconds of the attention of `new` tokens of each sequence on contiguous keys, by implementation."""
    shape = (num_seqs, MODEL.num_kv_heads, cached + new, MODEL.head_dim)
    key, value = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    query = torch.randn(num_seqs, MODEL.num_heads, new, MODEL.head_dim, dtype=torch.bfloat16, device="cuda")
    times: dict[str, float] = {}
    for name, backend in BACKENDS.items():
        call = _contiguous(query, key, value, cached)
        try:
            with sdpa_kernel(backend):
                times[name] = median_ms(call) * 1e-3
        except RuntimeError as error:  # "No available kernel": this backend does not take the shape
            print(f"  {name}: {error}")
    if bench_flex:
        times["FlexAttention"] = median_ms(_flex(query, key, value, cached)) * 1e-3
    return times


def _contiguous(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cached: int) -> Callable[[], torch.Tensor]:
    new = query.shape[2]
    mask = None if new == 1 else causal_lower_right(new, cached + new)
    # The wide heads are repeated beforehand for causal_lower_right, which does not group them; repeating is not timed.
    if new > 1:
        key, value = (each.repeat_interleave(GROUP, 1) for each in (key, value))
    attend = partial(F.scaled_dot_product_attention, query, key, value, attn_mask=mask, scale=SCALE)
    return partial(attend, enable_gqa=new == 1)


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cached: int) -> Callable[[], object]:
    def visible(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        del batch, head
        return column <= row + cached

    new = query.shape[2]
    mask = None if new == 1 else create_block_mask(visible, None, None, new, cached + new, device="cuda")
    return partial(torch.compile(flex_attention), query, key, value, block_mask=mask, scale=SCALE, enable_gqa=True)


def bench_decode(device: Device, model: DeviceModel, results: Results) -> None:
    shares: dict[str, float] = {}
    for batch in BATCHES:
        seconds = PagedBatch.build([(CONTEXT - 1, 1)] * batch).time(TritonAttention(model))
        moved = decode_cost(MODEL, batch, CONTEXT).bytes_moved
        shares[str(batch)] = moved / seconds / device.copy_bandwidth
        others = contiguous_times(batch, 1, CONTEXT - 1, bench_flex=batch in (1, 16))
        results.add(
            f"decode, {batch} × {CONTEXT}",
            f"{seconds * 1e6:8.0f} µs  {shares[str(batch)]:6.1%} of copy   {_text(others)}",
        )
    results.figures["decode_copy_share"] = shares


def bench_prefill(model: DeviceModel, results: Results) -> None:
    shares: dict[str, float] = {}
    for name, (new, cached) in PREFILLS.items():
        seconds = PagedBatch.build([(cached, new)]).time(TritonAttention(model))
        others = contiguous_times(1, new, cached, bench_flex=True)
        rate = prefill_cost(MODEL, new, cached).operations / seconds
        shares[name] = min(others.values()) / seconds
        figures = f"{seconds * 1e6:8.0f} µs  {rate / 1e12:6.0f} TFLOP/s  {shares[name]:6.1%} of the fastest"
        results.add(f"prefill, {name}", f"{figures}   {_text(others)}")
    results.figures["prefill_share"] = shares


def bench_shared_prefix(model: DeviceModel, results: Results) -> None:
    batch = PagedBatch.build([(SHARED + OWN - 1, 1)] * MEMBERS, shared=SHARED)
    together = batch.time(TritonAttention(model))
    apart = batch.time(TritonAttention(model, shares_prefixes=False))
    results.figures["shared_prefix_speedup"] = apart / together
    results.add(
        f"{MEMBERS} on a prefix of {SHARED}, {OWN} own",
        f"{together * 1e6:8.0f} µs  {apart / together:.1f} × plain decode ({apart * 1e6:.0f} µs)",
    )


def bench_moves(device: Device, model: DeviceModel, results: Results) -> None:
    num_layers, num_blocks, moved_blocks, num_tokens = 32, 4096, 1000, 32768
    shape = (num_blocks, num_layers, 2, BLOCK_SIZE, MODEL.num_kv_heads, MODEL.head_dim)
    kv_cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    ids = list(range(num_blocks))
    random.Random(0).shuffle(ids)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:num_tokens]
    rows = torch.randn(num_tokens, MODEL.num_kv_heads, MODEL.head_dim, dtype=torch.bfloat16, device="cuda")
    staging = torch.empty(moved_blocks, *shape[1:], dtype=torch.bfloat16, device="cuda")
    kernels, copier = TritonAttention(model), BlockCopier()
    pairs = list(zip(ids[:moved_blocks], ids[moved_blocks:], strict=False))
    copied = copy_cost(MODEL, moved_blocks, BLOCK_SIZE, num_layers).bytes_moved
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "store_copy_share": (
            store_cost(MODEL, num_tokens).bytes_moved,
            partial(kernels.store_kv, rows, rows, kv_cache, 0, slots),
        ),
        "copy_share": (copied, partial(copier.copy_blocks, kv_cache, pairs)),
        "gather_share": (copied, partial(copier.gather_blocks, kv_cache, ids[:moved_blocks], staging)),
    }
    for name, (moved, work) in works.items():
        share = moved / (median_ms(work) * 1e-3) / device.copy_bandwidth
        results.figures[name] = share
        results.add(name.replace("_", " "), f"{share:6.1%} of copy")


def _text(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in times.items())


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: the kernels' speed was not measured.")
        print(json.dumps({"gpu": None}))
        return 0
    model = DeviceModel.of(torch.device("cuda"))
    results = Results(figures={"checks_passed": run_checks(model)})
    device = measure_device(results)
    bench_decode(device, model, results)
    bench_prefill(model, results)
    bench_shared_prefix(model, results)
    bench_moves(device, model, results)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), **results.figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
