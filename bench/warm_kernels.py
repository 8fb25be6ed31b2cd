"""python -m bench.warm_kernels: compile, over all cores, what the tests and benches will launch on this GPU.

    host code over `meta` tensors ─► recorded launches ─► distinct variants ─► workers ─► Triton's cache on disk

A process compiles one kernel at a time, at about a second each, so that the tests and checks on a GPU would spend
minutes on it. A process that launches a variant afterwards finds it on the disk. The launches of the checks, of the
kernels' tests and bench are recorded from themselves (`kernels.compilation.recording`); those of engines are named
here. One that was not foreseen is compiled where it is launched, as ever: that costs time, and changes no result.

Workers do not touch the GPU: Triton is told of it by a driver that only knows its name.
JSON: `compiled`, `failed`, `seconds`. Exit code 1 when a variant does not compile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from bench.kernel_checks import launch_all
from bench.kernels import PagedBatch, Sizes
from kernels.block_copier import BlockCopier
from kernels.compilation import Launch, recording
from kernels.cost import AttentionModel
from kernels.heuristics import DeviceModel
from kernels.triton_attention import TritonAttention


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor, as far as the compiled code depends on it."""

    dtype: torch.dtype
    is_aligned: bool


@dataclass(frozen=True, slots=True)
class Variant:
    module: str
    kernel: str
    args: tuple[Pointer | float | None, ...]
    options: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, launch: Launch) -> Variant:
        function = cast(JITFunction[Any], launch.function)
        args = tuple(
            _kind(arg, parameter.do_not_specialize)
            for arg, parameter in zip(launch.args, function.params, strict=False)
        )
        return cls(function.__module__, function.__name__, args, tuple(launch.kwargs.items()))


def _kind(arg: object, do_not_specialize: bool) -> Pointer | float | None:
    """An argument that stands for all that are compiled alike: of integers, Triton looks whether they are 1, or a
    multiple of 16."""
    if isinstance(arg, torch.Tensor):
        return Pointer(arg.dtype, arg.storage_offset() * arg.dtype.itemsize % 16 == 0)
    if isinstance(arg, int) and abs(arg) < 2**31:
        if do_not_specialize:
            return 3
        return 1 if arg == 1 else 16 if arg % 16 == 0 else 3
    assert arg is None or isinstance(arg, int | float), arg
    return 1.5 if isinstance(arg, float) else arg


def variants_of(launch_them: Iterable[Callable[[], object]]) -> list[Variant]:
    """What they launch, each variant once. They must launch over `meta` tensors."""
    found: dict[Variant, None] = {}
    for launch in launch_them:
        with recording() as launches:
            launch()
        found |= {Variant.of(each): None for each in launches}
    return list(found)


# ---------------------------------------------------------------- what is launched


def launches(device: DeviceModel) -> list[Callable[[], object]]:
    """By the tests where their packages are there, by the checks, and by the benches."""
    found: list[Callable[[], object]] = [partial(launch_all, device), partial(_bench_kernels, device)]
    found += [partial(_launch_engine, served, device) for served in SERVED]
    try:
        found += importlib.import_module("tests.kernels.triton.test_on_gpu").launches(device)
    except ImportError as error:
        print(f"without those of the tests: {error}", flush=True)
    return found


def _bench_kernels(device: DeviceModel) -> None:
    sizes = Sizes(device="meta")
    steps = [[(sizes.context - 1, 1)] * batch for batch in (1, 64)]
    steps += [[(cached, new)] for new, cached in sizes.prefills.values()]
    for lengths in steps:
        PagedBatch.build(sizes, lengths).attend(TritonAttention(device))
    shared = [(sizes.shared + sizes.own - 1, 1)] * sizes.members
    PagedBatch.build(sizes, shared, sizes.shared).attend(TritonAttention(device))
    _launch_moves(Served(sizes.model, sizes.dtype, sizes.num_layers), TritonAttention(device))


@dataclass(frozen=True, slots=True)
class Served:
    """A model that an engine serves."""

    model: AttentionModel
    dtype: torch.dtype
    num_layers: int
    kv_dtype: torch.dtype | None = None  # 8-bit elements; None: `dtype`
    windows: tuple[int | None, ...] = (None,)  # of its layers
    soft_cap: float | None = None


def _heads(head_dim: int) -> AttentionModel:
    return AttentionModel(num_heads=4, num_kv_heads=2, head_dim=head_dim)


SERVED = (
    Served(AttentionModel(), torch.bfloat16, 32),  # bench.engine
    Served(_heads(64), torch.float32, 3),  # whose answers it checks
    # tests/engine/test_on_gpu.py: llama, qwen3, gemma2, and llama over 8 bits
    Served(_heads(16), torch.float32, 3),
    Served(_heads(32), torch.float32, 3),
    Served(_heads(24), torch.float32, 3, windows=(9, None), soft_cap=3.0),
    Served(_heads(16), torch.bfloat16, 3, kv_dtype=torch.int8),
    Served(_heads(16), torch.bfloat16, 3, kv_dtype=torch.float8_e4m3fn),
)


def _launch_engine(served: Served, device: DeviceModel) -> None:
    """Prompts, steps of few new tokens, of one each, and of one each on one prefix; moves of blocks."""
    if served.kv_dtype == torch.float8_e4m3fn and not device.has_fp8:
        return
    sizes = Sizes(model=served.model, dtype=served.dtype, device="meta")
    scales = None
    if served.kv_dtype is not None:
        scales = torch.empty(served.num_layers, 2, served.model.num_kv_heads, device="meta")
    plain = partial(TritonAttention, device, kv_scales=scales, shares_prefixes=False)
    for window in served.windows:
        # Tables of 32 blocks: an engine's have a width of full 16 bytes.
        for lengths in ([(490, 10)], [(492, 8)], [(499, 1)] * 8):
            _batch(served, sizes, lengths).attend(plain(), window, served.soft_cap)
        sharing = TritonAttention(device, kv_scales=scales, captured=True)
        _batch(served, sizes, [(499, 1)] * 8).attend(sharing, window, served.soft_cap)
    _launch_moves(served, plain())


def _batch(served: Served, sizes: Sizes, lengths: list[tuple[int, int]]) -> PagedBatch:
    batch = PagedBatch.build(sizes, lengths, num_layers=served.num_layers)
    return replace(batch, kv_cache=batch.kv_cache.to(served.kv_dtype or served.dtype))


def _launch_moves(served: Served, kernels: TritonAttention) -> None:
    heads = (served.model.num_kv_heads, served.model.head_dim)
    kv_dtype = served.kv_dtype or served.dtype
    kv_cache = torch.empty((64, served.num_layers, 2, 16, *heads), dtype=kv_dtype, device="meta")
    rows = torch.empty((32, *heads), dtype=served.dtype, device="meta")
    kernels.store_kv(rows, rows, kv_cache, 0, torch.empty(32, dtype=torch.int64, device="meta"))
    BlockCopier().copy_blocks(kv_cache, [(1, 2)])


# ---------------------------------------------------------------- compiling


class _Named:
    """A driver for compiling alone."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0


class _Unaligned(MockTensor):
    @staticmethod
    def data_ptr() -> Any:
        return 1


def use_target(capability: int) -> None:
    """Compile for this GPU from now on, in this process."""
    torch.set_num_threads(1)
    driver: Any = _Named(GPUTarget("cuda", capability, 32))
    triton.runtime.driver.set_active(driver)


def compile_variant(variant: Variant) -> str | None:
    """Into Triton's cache on disk, as a launch would; None, or why it does not compile."""
    function: JITFunction[Any] = getattr(importlib.import_module(variant.module), variant.kernel)
    args = [_argument(arg) for arg in variant.args]
    try:
        function.warmup(*args, grid=(1,), **dict(variant.options))
    except Exception as error:  # noqa: BLE001  a compiler's error has any type; the others are compiled all the same
        return f"{variant.kernel}: {type(error).__name__}: {error}"
    return None


def _argument(arg: Pointer | float | None) -> object:
    if isinstance(arg, Pointer):
        return MockTensor(arg.dtype) if arg.is_aligned else _Unaligned(arg.dtype)
    return arg


def compile_all(variants: Sequence[Variant], capability: int, processes: int) -> list[str]:
    """What went wrong, of those that do not compile."""
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=use_target, initargs=(capability,)) as pool:
        return [reason for reason in pool.map(compile_variant, variants) if reason is not None]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.warm_kernels")
    parser.add_argument("--processes", type=int, default=min(16, len(os.sched_getaffinity(0))))
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was compiled.")
        print(json.dumps({"gpu": None}))
        return 0
    started = time.monotonic()
    device = DeviceModel.of(torch.device("cuda"))
    variants = variants_of(launches(device))
    print(f"{len(variants)} variants, {arguments.processes} processes", flush=True)
    failed = compile_all(variants, 10 * device.capability[0] + device.capability[1], arguments.processes)
    for reason in failed:
        print(reason)
    print(json.dumps({"compiled": len(variants), "failed": failed, "seconds": round(time.monotonic() - started, 1)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
