"""Draws the next token of every sequence of a step, all rows at once.

    logits [B, V] ──► bias, penalties (logits_processors.py) ──► eos masked until min_tokens
                  ──► max ──┬─► temperature 0: the highest logit, lowest id on a tie
                            └─► weights ──┬─► no filter: inverse CDF in id order
                                          └─► ranked ──► kept ──► inverse CDF

    ranked   w0 ≥ w1 ≥ w2 ≥ ………………………… ≥ wV     temperature is already in the weights
    top-k    [0, k)                             always a prefix of the ranking,
    top-p    [0, n)  smallest n with            so what three filters keep is the shortest of three prefixes:
                     Σ w[0, n) ≥ p · Σ w[0, k)  one number a row, no masks
    min-p    [0, m)  w ≥ min_p · w0

Temperature, top-k, top-p, min-p in this order, top-p measured on what top-k left: the order of transformers
(`GenerationMixin._get_logits_processor`). vLLM puts min-p before top-p, llama.cpp the temperature last.
A tie at the edge of a filter keeps the lower ids, so that top_k=k never keeps more than k.

The same seed gives the same text alone, in any batch, and after preemption, because of two things:

1. No generator state. The uniform of a draw is a hash of (request's seed, token's position) and of nothing else.
2. No sum that depends on its order. A weight is exp((logit − max) / temperature) in fp32, an operation on one element,
   then cut to a fixed-point int64 whose row sum is below 2^53: integer sums are exact, in any order, on any device,
   for any batch shape, and exact again as a float64. The tail below 2^-35 of the top token (V = 256k) is never drawn.

Rejected: `torch.multinomial` and exponential races (q ~ Exp, argmax w/q) with a generator per row: state to save on
preemption, and one Python call a row. Rejected: fp32 softmax and cumsum, whose low bits move with the batch's shape.

Only the `window` best tokens of a row are ranked; rows whose filters reach beyond (a flat distribution under top-p) are
ranked again 16 times wider. Exact sums make the width invisible in the result.

On a GPU nothing here may wait for the device, or the next step could not be prepared meanwhile: no value is looked at.
Which rows the window does not settle is not known then, so every row whose filters do not settle it beforehand
(a top-k within the window does) is ranked as a whole. What came out is fetched when it has come (`FetchedTokens`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from engine.batch import ScheduledSequence
from engine.logits_processors import process_logits
from engine.logprobs import asked_logprobs
from engine.protocol import SamplingParams
from kernels.upload import upload

_U64 = (1 << 64) - 1
_WIDEN = 16
# (logit − max) / temperature stays finite or −inf, never NaN, between these.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a step's rows where they were drawn."""

    token_ids: Tensor  # int64 [B]; any id in a row without finite logits
    is_finite: Tensor  # bool [B]: False where the logits hold a NaN or +inf, or nothing but -inf
    logprobs: Tensor | None = None  # float64 [R, 1 + 2k], of the rows that ask: `engine/logprobs.py`


class FetchedTokens:
    """Sampled tokens on their way to the host."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._host = _download(torch.stack((sampled.token_ids, sampled.is_finite.long())))
        self._logprobs = None if sampled.logprobs is None else _download(sampled.logprobs)
        self._arrived: torch.cuda.Event | None = None
        if sampled.token_ids.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(sampled.token_ids.device))

    def logprobs(self) -> list[list[float]]:
        """Of the rows that asked, after `wait`: see `engine.logprobs.read_logprobs`."""
        return [] if self._logprobs is None else self._logprobs.tolist()

    def wait(self) -> list[int | None]:
        """One a row; None where there was nothing to draw from."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids, is_finite = self._host.tolist()
        return [token_id if finite else None for token_id, finite in zip(token_ids, is_finite, strict=True)]


def _download(values: Tensor) -> Tensor:
    """A copy in the host's memory, there when the device has come to it."""
    if values.device.type != "cuda":
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def uniform(seed: int, position: int) -> float:
    """The draw of (seed, position): one of 2^53 equally likely numbers in [0, 1)."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed & _U64, position)) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class _Draws:
    """The rows' parameters as tensors, each [R]."""

    top_k: Tensor  # int64; the vocabulary's size: off
    top_p: Tensor  # float64
    min_p: Tensor  # float64
    uniform: Tensor  # float64

    @classmethod
    def of(cls, rows: Sequence[ScheduledSequence], vocab_size: int, device: torch.device) -> _Draws:
        params = [row.sampling for row in rows]
        table = torch.tensor(
            [
                [min(p.top_k or vocab_size, vocab_size) for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                [uniform(row.seed, row.end) for row in rows],
            ],
            dtype=torch.float64,  # one transfer to the device; ids and sizes are exact below 2^53
        )
        table = upload(table, device)
        return cls(table[0].long(), table[1], table[2], table[3])

    def __getitem__(self, rows: Tensor) -> _Draws:
        return _Draws(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows])


class Sampler:
    def __init__(self, window: int = 256, *, may_wait: bool = True) -> None:
        """`window`: how many of the best tokens are ranked at first; changes the cost of a draw, never its result.

        `may_wait`: whether values may be looked at while drawing; on a GPU that waits for the device.
        """
        self._window = window
        self._may_wait = may_wait

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[ScheduledSequence],
        eos_token_ids: Sequence[int],
        newest: Tensor | None = None,
    ) -> SampledTokens:
        """One token a row of `logits` [B, V], which are left as they are. `newest` as in `process_logits`."""
        assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} sequences"
        raw, logits = logits, _mask_eos(process_logits(logits, rows, newest), rows, eos_token_ids)
        highest, token_ids = logits.max(dim=-1)  # [B], [B]; the first of equal logits
        # max() carries a NaN on, and is −inf only when the whole row is: the maxima stand for all of the logits.
        is_finite = torch.isfinite(highest)
        if not (self._may_wait and bool(is_finite.all())):
            logits = logits.masked_fill(~is_finite[:, None], 0.0)  # weights of NaN would lead to ids that do not exist
        for chosen, window in self._draws(rows, logits.shape[1]):
            indices = upload(torch.tensor(chosen), logits.device)
            drawn = self._draw(logits[indices].float(), [rows[index] for index in chosen], window)
            token_ids.index_copy_(0, indices, drawn)
        return SampledTokens(token_ids, is_finite, asked_logprobs(raw, rows, token_ids))

    def _draws(self, rows: Sequence[ScheduledSequence], vocab_size: int) -> Iterator[tuple[list[int], int | None]]:
        """The rows that are drawn alike, and how many of their best tokens are ranked; None: they need no ranking."""
        random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
        plain = [index for index in random if not _is_filtered(rows[index].sampling)]
        filtered = [index for index in random if _is_filtered(rows[index].sampling)]
        settled = filtered if self._may_wait else [i for i in filtered if 0 < rows[i].sampling.top_k <= self._window]
        others = sorted(set(filtered) - set(settled))
        for chosen, window in ((plain, None), (settled, self._window), (others, vocab_size)):
            if chosen:
                yield chosen, window

    def _draw(self, logits: Tensor, rows: Sequence[ScheduledSequence], window: int | None) -> Tensor:
        if window is None:
            return _draw_plain(logits, rows)
        return _draw_filtered(logits, rows, window, self._may_wait)


def _is_filtered(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _mask_eos(logits: Tensor, rows: Sequence[ScheduledSequence], eos_token_ids: Sequence[int]) -> Tensor:
    early = [i for i, row in enumerate(rows) if row.end - row.num_prompt_tokens < row.sampling.min_tokens]
    if not early or not eos_token_ids:
        return logits
    masked = logits.clone()
    row_indices = upload(torch.tensor(early), logits.device)[:, None]  # [E, 1]
    ends = upload(torch.tensor(list(eos_token_ids)), logits.device)
    masked[row_indices, ends] = torch.full((), -math.inf, dtype=logits.dtype, device=logits.device)
    return masked


def _id_bits(vocab_size: int) -> int:
    return (vocab_size - 1).bit_length()


def _fixed_point_weights(logits: Tensor, rows: Sequence[ScheduledSequence]) -> Tensor:
    """exp((logit − max) / temperature) as int64 [R, V]: the row's maximum is 2^(53 − id bits), so its sum is ≤ 2^53."""
    temperature = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float64)
    temperature = upload(temperature.clamp(_MIN_TEMPERATURE, _MAX_TEMPERATURE).to(logits.dtype), logits.device)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    return scaled.exp_().mul_(2.0 ** (53 - _id_bits(logits.shape[1]))).long()


def _draw_plain(logits: Tensor, rows: Sequence[ScheduledSequence]) -> Tensor:
    """Token ids [R] for rows of `logits` [R, V] fp32 without a filter: nothing has to be ranked."""
    cumulative = _fixed_point_weights(logits, rows).cumsum(dim=-1)
    return _invert_cdf(cumulative, cumulative[:, -1], _Draws.of(rows, logits.shape[1], logits.device).uniform)


def _draw_filtered(logits: Tensor, rows: Sequence[ScheduledSequence], window: int, may_wait: bool) -> Tensor:
    """Token ids [R] for rows of `logits` [R, V] fp32 with at least one filter."""
    vocab_size = logits.shape[1]
    weights = _fixed_point_weights(logits, rows)
    total = weights.sum(dim=-1)
    # (weight, then lower id first) in one key of at most 54 bits: unique, so that every top-k and sort agrees.
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = weights.bitwise_left_shift_(_id_bits(vocab_size)).bitwise_or_(reversed_ids)
    return _draw_ranked(keys, total, _Draws.of(rows, vocab_size, logits.device), window, may_wait)


def _draw_ranked(keys: Tensor, total: Tensor, draws: _Draws, window: int, may_wait: bool) -> Tensor:
    """Token ids [R] from the `window` highest of `keys` [R, V]; rows that it does not settle are drawn wider.

    Without `may_wait` it has to settle all of them.
    """
    vocab_size = keys.shape[1]
    id_bits = _id_bits(vocab_size)
    is_whole = window >= vocab_size
    ranked = (keys.sort(descending=True) if is_whole else keys.topk(window)).values  # [R, W]
    weights = ranked >> id_bits
    cumulative = weights.cumsum(dim=-1)
    num_kept, settled = _count_kept(weights, cumulative, total, draws, vocab_size)
    mass = cumulative.gather(1, num_kept[:, None] - 1)[:, 0]
    ranks = _invert_cdf(cumulative, mass, draws.uniform)
    token_ids = vocab_size - 1 - (ranked.gather(1, ranks[:, None])[:, 0] & ((1 << id_bits) - 1))
    if not may_wait:
        return token_ids
    open_rows = (~settled).nonzero()[:, 0]
    if open_rows.numel():
        wider = _draw_ranked(keys[open_rows], total[open_rows], draws[open_rows], window * _WIDEN, may_wait)
        token_ids[open_rows] = wider
    return token_ids


def _count_kept(
    weights: Tensor, cumulative: Tensor, total: Tensor, draws: _Draws, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The length of the prefix that all filters keep, 1 ≤ n ≤ W, and whether the window is wide enough to tell; [R].

    `weights` and `cumulative` are the window [R, W]; `total` [R] is the sum over the whole vocabulary.
    """
    width = weights.shape[1]
    top_k_in_window = draws.top_k <= width
    last = draws.top_k.clamp(max=width) - 1
    top_k_mass = torch.where(top_k_in_window, cumulative.gather(1, last[:, None])[:, 0], total)
    nucleus_mass = (draws.top_p * top_k_mass).ceil().long()
    nucleus = torch.searchsorted(cumulative, nucleus_mass[:, None])[:, 0] + 1
    above_min_p = (weights >= (draws.min_p * weights[:, 0]).ceil()[:, None]).sum(dim=-1)
    num_kept = draws.top_k.minimum(nucleus).minimum(above_min_p).clamp(max=width)
    ends_in_window = (nucleus <= width) | (above_min_p < width)
    return num_kept, top_k_in_window | ((draws.top_k == vocab_size) & ends_in_window)


def _invert_cdf(cumulative: Tensor, mass: Tensor, uniforms: Tensor) -> Tensor:
    """The first index [R] whose cumulative weight is above uniform · mass.

    A token without weight is never hit. With mass ≤ 2^53 and uniform ≤ 1 − 2^-53 the product rounds below the mass.
    """
    return torch.searchsorted(cumulative, (uniforms * mass).long()[:, None], right=True)[:, 0]
