"""How the host code starts a Triton kernel: the one place where its arguments leave the type checker's sight.

Inside a kernel every argument is Triton's; at the launch it is a torch tensor, a number or None. Triton types both as
the kernel's own signature, which fits neither.

Multiplications and additions are fused, as on every GPU compiler by default. Triton asks for it to be said.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction


def launch(
    kernel: JITFunction[Any],
    grid: tuple[int, ...],
    *args: torch.Tensor | float | None,
    **options: object,  # compile-time constants and num_warps, num_stages
) -> None:
    kernel[grid](*args, enable_fp_fusion=True, **options)
