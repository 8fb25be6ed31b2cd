"""What a sampler draws, as numbers on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import ScheduledSequence
from engine.sampler import FetchedTokens, Sampler


def sampled(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[ScheduledSequence], eos_token_ids: Sequence[int]
) -> list[int | None]:
    return FetchedTokens(sampler.sample(logits, rows, eos_token_ids)).wait()
