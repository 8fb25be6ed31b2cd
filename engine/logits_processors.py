"""What a request asks to be done to the model's logits before a token is drawn: a bias on tokens, and penalties.

    logits [B, V] ──► + logit_bias ──► repetition ──► frequency ──► presence ──► to be drawn from

    repetition   of tokens in prompt or output:  logit / r if it is positive, logit · r if not   (Keskar et al. 2019)
    frequency    of tokens in the output:        logit − f · (times it is in there)              (OpenAI's formula)
    presence     of tokens in the output:        logit − p

The order is that of transformers and vLLM; only the repetition penalty makes it matter. What a row has said is read
from its token ids, so nothing has to be kept from step to step, and a preempted request is penalised as before. Each
operation is on one element, rounded once, so a row's bits do not depend on the rows beside it.

A row's newest token may still lie on the device, drawn by the step before (`takes_last`): it is counted there. Nothing
here looks at a value, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.batch import ScheduledSequence
from engine.protocol import SamplingParams
from kernels.upload import upload


def process_logits(logits: Tensor, rows: Sequence[ScheduledSequence], newest: Tensor | None = None) -> Tensor:
    """The logits [B, V] to draw from: `logits` itself if no row asks for anything, else a copy in fp32.

    `newest`: int64 [B], the newest token of each row with `takes_last`; needed if one of those is penalised.
    """
    chosen = [index for index, row in enumerate(rows) if is_processed(row.sampling)]
    if not chosen:
        return logits
    processed = logits.to(torch.float32, copy=True)
    asked = [rows[index] for index in chosen]
    indices = upload(torch.tensor(chosen), logits.device)
    part = processed[indices]  # [R, V]
    _add_bias(part, asked)
    return processed.index_copy_(0, indices, _penalise(part, asked, None if newest is None else newest[indices]))


def is_processed(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or is_penalised(sampling)


def is_penalised(sampling: SamplingParams) -> bool:
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
    return penalties != (0.0, 0.0, 1.0)


def _add_bias(logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    entries = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.sampling.logit_bias.items()]
    if entries:
        row_indices, token_ids, biases = zip(*entries, strict=True)
        at = upload(torch.tensor([row_indices, token_ids]), logits.device)
        logits[at[0], at[1]] += upload(torch.tensor(biases, dtype=logits.dtype), logits.device)


def _penalise(logits: Tensor, rows: Sequence[ScheduledSequence], newest: Tensor | None) -> Tensor:
    """`logits` [R, V] with the three penalties; they are 1, 0 and 0 for a row that only has a bias."""
    if not any(is_penalised(row.sampling) for row in rows):
        return logits
    in_output = _count_tokens([_output_of(row) for row in rows], logits)
    late = [index for index, row in enumerate(rows) if row.takes_last and is_penalised(row.sampling)]
    if late:
        assert newest is not None, "penalties need every token before the one that is drawn"
        at = upload(torch.tensor(late), logits.device)
        one = torch.ones(len(late), dtype=logits.dtype, device=logits.device)
        in_output = in_output.index_put((at, newest[at]), one, accumulate=True)
    factor = _column((row.sampling.repetition_penalty for row in rows), logits)
    if any(row.sampling.repetition_penalty != 1.0 for row in rows):
        in_prompt = _count_tokens([row.token_ids[: row.num_prompt_tokens] for row in rows], logits)
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(in_prompt + in_output > 0, repeated, logits)
    frequency = _column((row.sampling.frequency_penalty for row in rows), logits)
    presence = _column((row.sampling.presence_penalty for row in rows), logits)
    return logits - frequency * in_output - presence * (in_output > 0)


def _output_of(row: ScheduledSequence) -> list[int]:
    known = row.end - row.takes_last
    assert len(row.token_ids) >= known, "penalties need every token before the one that is drawn"
    return row.token_ids[row.num_prompt_tokens : known]


def _count_tokens(token_ids: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """How often each token of the vocabulary is in each row; [R, V] in the dtype of `logits`."""
    vocab_size = logits.shape[1]
    # One column more than the vocabulary, for the padding.
    padded = pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in token_ids], True, vocab_size)
    counts = torch.zeros(len(token_ids), vocab_size + 1, dtype=logits.dtype, device=logits.device)
    padded = upload(padded, logits.device)
    return counts.scatter_add_(1, padded, torch.ones_like(padded, dtype=logits.dtype))[:, :vocab_size]


def _column(values: Iterable[float], logits: Tensor) -> Tensor:
    return upload(torch.tensor(list(values), dtype=logits.dtype), logits.device)[:, None]
