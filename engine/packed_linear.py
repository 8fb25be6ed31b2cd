"""Linear layers whose weights lie in the order in which oneDNN's CPU kernels read them.

`torch.nn.Linear` keeps its weight row-major and oneDNN reorders it on the fly, in every call. With few rows, which is
what decoding has, that costs more than the product. Reordered once, at load, in place of the original:

    1 core, all linear layers of the default model, CPU ms   rows:    1     4    16    64   512
        nn.Linear     bf16                                           27    29    42    88   554
        PackedLinear  bf16                                           16    14    26    72   518

The products are the same bits as nn.Linear's in bf16. What matters more: on AVX-512, a row's result does not depend on
how many rows stand beside it (nn.Linear in fp32: below 12 rows it does), so a sequence decodes alike alone and in a
batch. The one exception seen is the kernel for a single row, which sums long rows in another order (and is slower than
the one for four): a single row is computed as `_MIN_ROWS` equal ones.

The reordered weight is an opaque tensor: only oneDNN reads it. It replaces the original, so memory stays what it was;
an output layer tied to the embedding gets a copy of its own, because the embedding is still looked up by row.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import nn

_MIN_ROWS = 4
_TRIM_EVERY = 32  # layers
# Private names of torch, which is pinned to one exact version; inductor emits the same calls.
_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_linear = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """A drop-in for `nn.Linear` on a CPU, for inference."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight: torch.Tensor = _reorder(linear.weight.detach(), None)
        self.bias: torch.Tensor | None = None if linear.bias is None else linear.bias.detach()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [..., num_tokens, in_features]
        if hidden.numel() != self.in_features:
            return _linear(hidden, self.weight, self.bias, "none", [], "")
        # `expand` and `contiguous` are two calls; `repeat` is thirty, and this runs in every layer of every step.
        rows = hidden.reshape(1, self.in_features).expand(_MIN_ROWS, -1).contiguous()
        return _linear(rows, self.weight, self.bias, "none", [], "")[:1].view(*hidden.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> int:
    """Replace every plain linear layer of `model`, in place, where this CPU gains from it; how many were replaced."""
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _can_pack(child.weight)
    ]
    for index, (parent, name) in enumerate(places, start=1):
        linear = parent.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(parent, name, PackedLinear(linear))
        del linear
        if index % _TRIM_EVERY == 0 or index == len(places):
            _return_freed_memory()
    return len(places)


def _return_freed_memory() -> None:
    """Hand the original weights' memory back to the system: the C library keeps it, and oneDNN cannot reuse it."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
