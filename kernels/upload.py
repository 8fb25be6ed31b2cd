"""Host numbers on their way to a device, without anyone waiting.

A copy from ordinary memory makes the host wait until the device has come to it: until all that was launched before is
done. From pinned memory it is one more thing in the device's queue. torch's allocator of pinned memory hands a buffer
out again only after the copies from it have ended, so that no ring of buffers is kept here.
"""

from __future__ import annotations

import torch


def upload(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy of `host` on `device`; `host` itself where that is the CPU."""
    return staged(host, device).to(device, non_blocking=True)


def staged(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`host` in memory that `device` copies from without making anyone wait."""
    return host.pin_memory() if torch.device(device).type == "cuda" else host
