"""python -m bench.kernels: the Triton kernels on this GPU, against what this GPU can do. A table, and JSON lines.

    decode           KV bytes a second, as a share of the measured copy bandwidth; beside it, on contiguous KV,
                     torch's attention (flash and cuDNN)
    prefill          as a share of torch's contiguous flash attention, of its fastest in the same run, and of the GEMM
    shared prefix    our own plain decode's time over the shared one's
    store, copies    bytes a second, as a share of the copy bandwidth
    FlexAttention    beside some of decode and prefill; last, since it is compiled first

Shapes are one layer of an 8-billion model: 32 query heads, 8 KV heads of 128, bf16, blocks of 16, shuffled. Every
figure is a median on a cold L2. After each section all figures so far are printed as one JSON line, so that a section
that fails, or a process that is stopped, loses only what had not been measured. JSON, by batch or by case:

    decode_copy_share, decode_seconds {"ours", "flash", "cuDNN", "FlexAttention"}
    prefill_share_of_flash, prefill_share_of_fastest, prefill_share_of_gemm, flash_share_of_gemm, prefill_seconds
    shared_prefix_speedup, store_share, copy_share, gather_share, scatter_share
    copy_tb_s, gemm_tflop_s, checks_failed, sections_failed

First `bench.kernel_checks` compares every kernel with the reference: beside a wrong kernel's name its speed says
little. Exit code 1 when a check or a section failed. Without a CUDA device the JSON is {"gpu": null}.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.gpu_timer import median_ms
from bench.kernel_checks import run_checks
from bench.targets import DECODE_BATCHES, PREFILLS
from kernels.block_copier import BlockCopier
from kernels.cost import AttentionModel, copy_cost, decode_cost, prefill_cost, store_cost
from kernels.heuristics import DeviceModel
from kernels.metadata import AttentionMetadata
from kernels.triton_attention import TritonAttention

# Contiguous attention of torch, by name.
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
OURS, FLEX = "ours", "FlexAttention"


@dataclass(frozen=True)
class Sizes:
    """What is measured, and where."""

    model: AttentionModel = field(default_factory=AttentionModel)
    block_size: int = 16
    context: int = 16384
    batches: tuple[int, ...] = DECODE_BATCHES
    prefills: Mapping[str, tuple[int, int]] = field(default_factory=lambda: PREFILLS)  # (new, cached)
    members: int = 32
    shared: int = 4096
    own: int = 256
    min_shared_saving: int | None = None  # bytes; None: the rule's own
    num_layers: int = 32  # of the cache that blocks are moved in
    num_blocks: int = 4096
    moved_blocks: int = 1000
    stored_tokens: int = 32768
    flex_batches: tuple[int, ...] = (1, 16)
    copied_bytes: int = 1 << 30
    gemm_size: int = 8192
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def scale(self) -> float:
        return self.model.head_dim**-0.5

    @property
    def group(self) -> int:
        return self.model.num_heads // self.model.num_kv_heads

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        return median_ms(work, device=self.device) * 1e-3


@dataclass
class Results:
    figures: dict[str, object] = field(default_factory=dict[str, object])

    def add(self, name: str, text: str) -> None:
        print(f"{name:44} {text}", flush=True)

    def put(self, figure: str, case: str, value: object) -> None:
        by_case = cast(dict[str, object], self.figures.setdefault(figure, {}))
        by_case[case] = value

    def times(self, figure: str, case: str) -> dict[str, float]:
        by_case = cast(dict[str, dict[str, float]], self.figures.get(figure, {}))
        return by_case.get(case, {})


@dataclass(frozen=True)
class Device:
    """What the kernels are held against, measured here."""

    copy_bandwidth: float  # bytes a second, read and written
    gemm_rate: float  # operations a second


def measure_device(sizes: Sizes, results: Results) -> Device:
    source = torch.empty(sizes.copied_bytes, dtype=torch.int8, device=sizes.device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / sizes.seconds(partial(target.copy_, source))
    left = sizes.normal(sizes.gemm_size, sizes.gemm_size)
    rate = 2 * sizes.gemm_size**3 / sizes.seconds(partial(torch.mm, left, left))
    results.add("copy", f"{bandwidth / 1e12:.2f} TB/s")
    results.add("GEMM", f"{rate / 1e12:.0f} TFLOP/s")
    results.figures |= {"copy_tb_s": bandwidth / 1e12, "gemm_tflop_s": rate / 1e12}
    return Device(bandwidth, rate)


@dataclass(frozen=True)
class PagedBatch:
    """Sequences over shuffled blocks of a cache, whose first layer is read."""

    sizes: Sizes
    metadata: AttentionMetadata
    kv_cache: torch.Tensor
    query: torch.Tensor

    @classmethod
    def build(cls, sizes: Sizes, lengths: list[tuple[int, int]], shared: int = 0, num_layers: int = 1) -> PagedBatch:
        """lengths: (cached, new); the first `shared` keys of all sequences lie in the same blocks."""
        model, block_size = sizes.model, sizes.block_size
        counts = [-(-(cached + new) // block_size) for cached, new in lengths]
        blocks = list(range(sum(counts)))
        random.Random(0).shuffle(blocks)
        tables: list[list[int]] = []
        for count in counts:
            tables.append(blocks[:count])
            blocks = blocks[count:]
        common = tables[0][: shared // block_size]
        tables = [common + table[len(common) :] for table in tables]
        cached, new = [each[0] for each in lengths], [each[1] for each in lengths]
        return cls(
            sizes=sizes,
            metadata=AttentionMetadata.build(tables, cached, new, block_size, sizes.device),
            kv_cache=sizes.normal(sum(counts), num_layers, 2, block_size, model.num_kv_heads, model.head_dim),
            query=sizes.normal(sum(new), model.num_heads, model.head_dim),
        )

    def attend(
        self, kernels: TritonAttention, sliding_window: int | None = None, soft_cap: float | None = None
    ) -> torch.Tensor:
        return kernels.paged_attention(
            self.query,
            self.kv_cache,
            0,
            self.metadata,
            scale=self.sizes.scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=None,
        )

    def seconds(self, kernels: TritonAttention) -> float:
        return self.sizes.seconds(partial(self.attend, kernels))


# ---------------------------------------------------------------- torch's own, on contiguous keys


@dataclass(frozen=True)
class Contiguous:
    """The attention of `new` tokens of each sequence."""

    sizes: Sizes
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cached: int

    @classmethod
    def build(cls, sizes: Sizes, num_seqs: int, new: int, cached: int) -> Contiguous:
        model = sizes.model
        key, value = (sizes.normal(num_seqs, model.num_kv_heads, cached + new, model.head_dim) for _ in range(2))
        return cls(sizes, sizes.normal(num_seqs, model.num_heads, new, model.head_dim), key, value, cached)

    @property
    def new(self) -> int:
        return self.query.shape[2]

    def times(self) -> dict[str, float]:
        """Seconds, by implementation; without those that cannot run the shape here."""
        found: dict[str, float] = {}
        for name, backend in BACKENDS.items():
            seconds = _guarded(name, lambda backend=backend: self._time(backend))
            if seconds is not None:
                found[f"{name}, masked" if self._needs_mask(backend) else name] = seconds
        return found

    def _time(self, backend: SDPBackend) -> float:
        call = self.call(backend)
        with sdpa_kernel(backend):
            return self.sizes.seconds(call)

    def call(self, backend: SDPBackend) -> Callable[[], torch.Tensor]:
        attend, scale = F.scaled_dot_product_attention, self.sizes.scale
        if self.new == 1:
            return partial(attend, self.query, self.key, self.value, scale=scale, enable_gqa=True)
        # Heads are repeated beforehand for causal_lower_right, which does not group them; repeating is not timed.
        key, value = (each.repeat_interleave(self.sizes.group, 1) for each in (self.key, self.value))
        if not self.cached:
            return partial(attend, self.query, key, value, is_causal=True, scale=scale)
        if not self._needs_mask(backend):
            bias = causal_lower_right(self.new, self.cached + self.new)
            return partial(attend, self.query, key, value, attn_mask=bias, scale=scale)
        # torch would write the whole mask out in each call. It is written out once here; that it is read, and nothing
        # skipped by it, stays.
        ones = torch.ones(self.new, self.cached + self.new, dtype=torch.bool, device=self.sizes.device)
        mask = ones.tril(diagonal=self.cached)
        return partial(attend, self.query, key, value, attn_mask=mask, scale=scale)

    def _needs_mask(self, backend: SDPBackend) -> bool:
        """Whether it has no causal order of its own for new tokens after cached ones."""
        return backend != SDPBackend.FLASH_ATTENTION and self.new > 1 and self.cached > 0

    def flex_seconds(self) -> float | None:
        return _guarded(FLEX, self._time_flex)

    def _time_flex(self) -> float:
        # Compiled for each shape alone: with a second one torch would make a variant for any, which is slower.
        torch._dynamo.reset()
        cached = self.cached

        def visible(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            del batch, head
            return column <= row + cached

        mask = None
        if self.new > 1:
            mask = create_block_mask(visible, None, None, self.new, cached + self.new, device=self.sizes.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        return self.sizes.seconds(
            partial(
                compiled,
                self.query,
                self.key,
                self.value,
                block_mask=mask,
                scale=self.sizes.scale,
                enable_gqa=True,
            )
        )


def _guarded(name: str, measure: Callable[[], float]) -> float | None:
    """None where an implementation that is not ours cannot do it; a line says why."""
    try:
        return measure()
    except Exception as error:  # noqa: BLE001  no kernel, no compiler, a version's bug: what it can fail with is open
        reason = str(error).strip().splitlines() or [""]
        print(f"  {name} is not to be had here: {type(error).__name__}: {reason[0][:200]}", flush=True)
        return None


# ---------------------------------------------------------------- what is measured


def bench_decode(sizes: Sizes, device: Device, model: DeviceModel, results: Results) -> None:
    for batch in sizes.batches:
        seconds = PagedBatch.build(sizes, [(sizes.context - 1, 1)] * batch).seconds(TritonAttention(model))
        share = decode_cost(sizes.model, batch, sizes.context).bytes_moved / seconds / device.copy_bandwidth
        results.put("decode_copy_share", str(batch), share)
        others = Contiguous.build(sizes, batch, 1, sizes.context - 1).times()
        results.put("decode_seconds", str(batch), {OURS: seconds, **others})
        results.add(
            f"decode, {batch} × {sizes.context}", f"{seconds * 1e6:8.0f} µs  {share:6.1%} of copy   {_text(others)}"
        )


def bench_prefill(sizes: Sizes, device: Device, model: DeviceModel, results: Results) -> None:
    for name, (new, cached) in sizes.prefills.items():
        seconds = PagedBatch.build(sizes, [(cached, new)]).seconds(TritonAttention(model))
        others = Contiguous.build(sizes, 1, new, cached).times()
        operations = prefill_cost(sizes.model, new, cached).operations
        results.put("prefill_seconds", name, {OURS: seconds, **others})
        shares = {"prefill_share_of_gemm": operations / seconds / device.gemm_rate}
        if "flash" in others:
            shares["prefill_share_of_flash"] = others["flash"] / seconds
            shares["flash_share_of_gemm"] = operations / others["flash"] / device.gemm_rate
        for figure, share in shares.items():
            results.put(figure, name, share)
        _compare_with_fastest(results, name)
        text = ", ".join(f"{share:.1%} {figure.replace('_', ' ')}" for figure, share in shares.items())
        rate = operations / seconds / 1e12
        results.add(f"prefill, {name}", f"{seconds * 1e6:8.0f} µs  {rate:6.0f} TFLOP/s  {text}   {_text(others)}")


def bench_shared_prefix(sizes: Sizes, device: Device, model: DeviceModel, results: Results) -> None:
    del device
    batch = PagedBatch.build(sizes, [(sizes.shared + sizes.own - 1, 1)] * sizes.members, shared=sizes.shared)
    sharing = TritonAttention(model, min_shared_saving=sizes.min_shared_saving)
    together = batch.seconds(sharing)
    assert sharing.shares_now, "the prefix was not shared"
    apart = batch.seconds(TritonAttention(model, shares_prefixes=False))
    results.figures["shared_prefix_speedup"] = apart / together
    results.add(
        f"{sizes.members} on a prefix of {sizes.shared}, {sizes.own} own",
        f"{together * 1e6:8.0f} µs  {apart / together:.1f} × plain decode ({apart * 1e6:.0f} µs)",
    )


def bench_moves(sizes: Sizes, device: Device, model: DeviceModel, results: Results) -> None:
    heads = (sizes.model.num_kv_heads, sizes.model.head_dim)
    shape = (sizes.num_blocks, sizes.num_layers, 2, sizes.block_size, *heads)
    kv_cache = torch.empty(shape, dtype=sizes.dtype, device=sizes.device)
    ids = list(range(sizes.num_blocks))
    random.Random(0).shuffle(ids)
    moved_ids = ids[: sizes.moved_blocks]
    slots = torch.randperm(sizes.num_blocks * sizes.block_size, device=sizes.device)[: sizes.stored_tokens]
    rows = sizes.normal(sizes.stored_tokens, *heads)
    staging = torch.empty(sizes.moved_blocks, *shape[1:], dtype=sizes.dtype, device=sizes.device)
    kernels, copier = TritonAttention(model), BlockCopier()
    pairs = list(zip(moved_ids, ids[sizes.moved_blocks :], strict=False))
    copied = copy_cost(sizes.model, sizes.moved_blocks, sizes.block_size, sizes.num_layers).bytes_moved
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "store_share": (
            store_cost(sizes.model, sizes.stored_tokens).bytes_moved,
            partial(kernels.store_kv, rows, rows, kv_cache, 0, slots),
        ),
        "copy_share": (copied, partial(copier.copy_blocks, kv_cache, pairs)),
        "gather_share": (copied, partial(copier.gather_blocks, kv_cache, moved_ids, staging)),
        "scatter_share": (copied, partial(copier.scatter_blocks, staging, kv_cache, moved_ids)),
    }
    for name, (moved, work) in works.items():
        seconds = sizes.seconds(work)
        share = moved / seconds / device.copy_bandwidth
        results.figures[name] = share
        results.add(name.removesuffix("_share"), f"{seconds * 1e6:8.0f} µs  {share:6.1%} of copy")


def bench_flex(sizes: Sizes, device: Device, model: DeviceModel, results: Results) -> None:
    del device, model
    cases = [("decode_seconds", str(batch), batch, 1, sizes.context - 1) for batch in sizes.flex_batches]
    cases += [("prefill_seconds", name, 1, new, cached) for name, (new, cached) in sizes.prefills.items()]
    for figure, case, num_seqs, new, cached in cases:
        seconds = Contiguous.build(sizes, num_seqs, new, cached).flex_seconds()
        if seconds is None:
            continue
        results.put(figure, case, {**results.times(figure, case), FLEX: seconds})
        if figure == "prefill_seconds":
            _compare_with_fastest(results, case)
        results.add(f"FlexAttention, {figure.removesuffix('_seconds')}, {case}", f"{seconds * 1e6:8.0f} µs")


def _compare_with_fastest(results: Results, case: str) -> None:
    times = results.times("prefill_seconds", case)
    others = [seconds for name, seconds in times.items() if name != OURS]
    if OURS in times and others:
        results.put("prefill_share_of_fastest", case, min(others) / times[OURS])


SECTIONS = {
    "decode": bench_decode,
    "prefill": bench_prefill,
    "shared prefix": bench_shared_prefix,
    "store and copies": bench_moves,
    "FlexAttention": bench_flex,
}


def _text(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in times.items())


def run(sizes: Sizes, model: DeviceModel, results: Results) -> bool:
    """Whether no section failed. One that does not come to its end does not keep the next ones from theirs."""
    failed: dict[str, str] = {}
    results.figures["sections_failed"] = failed
    device = measure_device(sizes, results)
    for name, section in SECTIONS.items():
        try:
            section(sizes, device, model, results)
        except Exception as error:  # noqa: BLE001  reported, and in the exit code
            traceback.print_exc(file=sys.stdout)
            failed[name] = f"{type(error).__name__}: {error}"
        print(json.dumps(results.figures), flush=True)
    return not failed


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: the kernels' speed was not measured.")
        print(json.dumps({"gpu": None}))
        return 0
    model = DeviceModel.of(torch.device("cuda"))
    results = Results({"gpu": torch.cuda.get_device_name()})
    failed = run_checks(model)
    results.figures["checks_failed"] = failed
    for name, reason in failed.items():
        results.add(f"WRONG: {name}", reason)
    results.add("checks against the reference", "FAILED" if failed else "passed")
    print(json.dumps(results.figures), flush=True)
    is_complete = run(Sizes(), model, results)
    return 0 if is_complete and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
