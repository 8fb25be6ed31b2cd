"""Log probabilities of the tokens that were drawn, and of the best ones beside them.

Of the model's own distribution: before bias, penalties, temperature and filters, as vLLM gives them. Like the
sampler's, the sum over the vocabulary is one of integers, and a tie goes to the lower id, so that the numbers of a row
are its own: they do not depend on the rows beside it.

    logits [R, V] ──► exp(logit − max) as int64 ──► exact sum ──► log
                 └──► (logit, lower id first) in one key ──► top k
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.batch import ScheduledSequence, TokenLogprobs
from kernels.upload import upload

_LOWEST = -9999.0  # for what cannot be drawn: JSON has no infinity, and OpenAI says the same


def asked_logprobs(logits: Tensor, rows: Sequence[ScheduledSequence], token_ids: Tensor) -> Tensor | None:
    """float64 [R, 1 + 2k] for the R rows that ask: the drawn token's, k best ids, theirs; None when no row asks.

    `logits` [B, V]; `token_ids` [B], what was drawn.
    """
    asking = [index for index, row in enumerate(rows) if row.sampling.num_logprobs is not None]
    if not asking:
        return None
    indices = upload(torch.tensor(asking), logits.device)
    width = min(max(rows[index].sampling.num_logprobs or 0 for index in asking), logits.shape[1])
    return _logprobs(logits[indices].float(), token_ids[indices], width)


def read_logprobs(
    table: Sequence[Sequence[float]], rows: Sequence[ScheduledSequence]
) -> Iterator[TokenLogprobs | None]:
    """One a row, from what `asked_logprobs` made for these rows."""
    lines = iter(table)
    for row in rows:
        count = row.sampling.num_logprobs
        if count is None:
            yield None
            continue
        logprob, *best = next(lines)
        width = len(best) // 2
        ids, values = best[:width], best[width:]
        yield TokenLogprobs(logprob, tuple((int(ids[i]), values[i]) for i in range(min(count, width))))


def _logprobs(logits: Tensor, token_ids: Tensor, width: int) -> Tensor:
    vocab_size = logits.shape[1]
    id_bits = (vocab_size - 1).bit_length()
    exact = logits.double()
    highest = exact.amax(dim=-1, keepdim=True)
    scale = 2.0 ** (53 - id_bits)
    total = (exact - highest).exp_().mul_(scale).long().sum(dim=-1, keepdim=True)
    normalizer = highest + (total.double() / scale).log()
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = _ordered(logits).bitwise_left_shift_(id_bits).bitwise_or_(reversed_ids)
    best = vocab_size - 1 - (keys.topk(width, dim=-1).values & ((1 << id_bits) - 1))  # [R, k]
    wanted = torch.cat((token_ids[:, None], best), dim=1)
    found = (exact.gather(1, wanted) - normalizer).clamp_(min=_LOWEST)
    return torch.cat((found[:, :1], best.double(), found[:, 1:]), dim=1)


def _ordered(values: Tensor) -> Tensor:
    """int64 in the order of these fp32 values."""
    bits = values.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
