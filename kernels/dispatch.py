"""Which kernels a device runs. With `kernels.metadata`, the only module here that other packages import."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kernels import reference
from kernels.cpu import CpuAttention
from kernels.metadata import AttentionMetadata, StepPlan
from kernels.quantization import LARGEST_ELEMENT
from kernels.reference import SlotCopy

_DEVICES = {"cpu": "cpu", "triton": "cuda"}


class PagedAttentionKernel(Protocol):
    """`kernels.reference.paged_attention` says what it computes."""

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,  # [num_heads]
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """One set of kernels for one KV cache. They may share a workspace: one thread calls them."""

    name: str
    store_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    paged_attention: PagedAttentionKernel
    copy_slots: Callable[[torch.Tensor, Iterable[SlotCopy]], None]
    max_head_dim: int | None = None  # elements; None: any
    # Of a set that is `captured`: before a replay, of blocks of that size. Whether its sequences share what pays.
    stage_prefixes: Callable[[StepPlan, int], bool] = lambda plan, block_size: False


def select_kernels(
    device: torch.device,
    name: str = "auto",
    *,
    shares_prefixes: bool = True,
    captured: bool = False,
    kv_scales: torch.Tensor | None = None,  # fp32 [num_layers, 2, num_kv_heads], on `device`
) -> AttentionKernels:
    """A fresh set for `device`: `cpu`, `triton` or `reference`, by name, or `auto` for the device's fastest.

    `shares_prefixes`: False for a set that reads every sequence's keys for itself; any steps of it can be captured.
    `captured`: for one step that only decodes, is captured, and shares what `stage_prefixes` finds before each replay.
    `kv_scales`: for a cache of 8-bit elements, and only for one (`kernels.quantization`).

    Raises ValueError for a name that is not there, or that the device cannot run.
    """
    if name == "auto":
        name = {"cpu": "cpu", "cuda": "triton"}.get(device.type, "reference")
    if name == "reference":
        return AttentionKernels(
            name,
            partial(reference.store_kv, kv_scales=kv_scales),
            partial(reference.paged_attention, kv_scales=kv_scales),
            reference.copy_slots,
        )
    if name not in _DEVICES:
        raise ValueError(f"no attention kernels named {name!r}; there are: auto, {', '.join(_DEVICES)}, reference")
    if device.type != _DEVICES[name]:
        raise ValueError(f"the {name} kernels cannot run on {device.type}")
    if name == "triton":
        return _triton_kernels(device, shares_prefixes, captured, kv_scales)
    cpu = CpuAttention(kv_scales)
    return AttentionKernels(name, cpu.store_kv, cpu.paged_attention, cpu.copy_slots)


def why_not_kv_dtype(device: torch.device, model_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why the kernels of `device` cannot keep a model's KV in elements of `kv_dtype`; None: they can."""
    if device.type != "cuda" or kv_dtype == model_dtype:
        return None
    if kv_dtype not in LARGEST_ELEMENT:
        return f"the triton kernels keep KV in the model's own type, {model_dtype}, or in 8 bits"
    if model_dtype == torch.float32:
        return "8-bit elements widened to fp32 do not fit the registers beside an fp32 model: serve it in bf16"
    from kernels.heuristics import DeviceModel

    if kv_dtype == torch.float8_e4m3fn and not DeviceModel.of(device).has_fp8:
        return "fp8 needs a GPU of compute capability 8.9 or higher; int8 runs on this one"
    return None


def _triton_kernels(
    device: torch.device, shares_prefixes: bool, captured: bool, kv_scales: torch.Tensor | None
) -> AttentionKernels:
    # Here, because Triton is not there on every platform that the cpu kernels run on, and takes a second to import.
    from kernels.heuristics import HEAD_DIMS, DeviceModel
    from kernels.triton_attention import TritonAttention

    kernels = TritonAttention(
        DeviceModel.of(device), shares_prefixes=shares_prefixes, captured=captured, kv_scales=kv_scales
    )
    return AttentionKernels(
        "triton",
        kernels.store_kv,
        kernels.paged_attention,
        kernels.copy_slots,
        max_head_dim=HEAD_DIMS[-1],
        stage_prefixes=kernels.stage_prefixes,
    )
