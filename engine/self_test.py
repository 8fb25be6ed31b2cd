"""At start: one canned prompt, asked twice. The second time it must come from the cache, and say the same.

A cache that never hits is silent: every answer is right, only slow. So an engine proves a hit before it serves.

    bits guaranteed (CPU with AVX-512)    the same text
    otherwise                             the same, or from some token on another one that came next to it both times

The warm run computes one token of the prompt where the cold one computed all: on a GPU by other kernels, and by matrix
products of other shapes. The low bits differ, and of two tokens that are nearly equal the other one may be drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.engine import LLMEngine
from engine.errors import ModelLoadError
from engine.protocol import (
    MAX_TOP_LOGPROBS,
    DrawnToken,
    Failure,
    PromptAccount,
    SamplingParams,
    Segment,
    SegmentKind,
    Submit,
)
from engine.scoped_tokens import SCOPE_BYTES

_SCOPE = b"self-test".ljust(SCOPE_BYTES, b"-")
_OUTPUT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    tokens: list[DrawnToken]
    account: PromptAccount


def bits_are_guaranteed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a logit is the same to the bit, whatever step it is computed in: where that is established
    (docs/decisions.md). Where AMX multiplies, and in fp16, it is not."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not torch.cpu._is_amx_tile_supported()


def prove_reuse(engine: LLMEngine, *, caching: bool, tolerance: float = 0.0) -> None:
    """Raises `ModelLoadError` if the second answer differs, or was computed again although caching is on.

    `tolerance`: what rounding may leave between two ways to compute a logit; 0: nothing.
    """
    info = engine.info()
    length = min(2 * info.block_size + 1, info.max_model_len - _OUTPUT_TOKENS)
    token_ids = [position % info.vocab_size for position in range(length)]
    cold, warm = (_ask(engine, name, token_ids, with_logprobs=tolerance > 0) for name in ("cold", "warm"))
    if warm.text != cold.text and not (tolerance > 0 and _is_near_tie(cold.tokens, warm.tokens, tolerance)):
        raise ModelLoadError(f"self-test: the cached prompt answered {warm.text!r}, the same computed {cold.text!r}")
    # The last output token is never computed. What is left of a block that did not fill is not found again.
    filled = (length + _OUTPUT_TOKENS - 1) // info.block_size * info.block_size
    expected = min(length - 1, filled) if caching else 0
    if warm.account.num_cached_tokens != expected:
        found = warm.account.num_cached_tokens
        raise ModelLoadError(f"self-test: {found} of {length} tokens were found, not {expected}")
    engine.forget_everything()


def _is_near_tie(cold: list[DrawnToken], warm: list[DrawnToken], tolerance: float) -> bool:
    """Whether the first tokens that differ were nearly equal, in both runs. What follows has other tokens before it."""
    for one, other in zip(cold, warm, strict=False):
        if one.token != other.token:
            return max(_lead(one, other.token), _lead(other, one.token)) <= tolerance
    return False


def _lead(drawn: DrawnToken, other: bytes) -> float:
    """By how much the drawn token's logit is above another's; a difference of log probabilities is one of logits."""
    return drawn.logprob - max((each.logprob for each in drawn.top if each.token == other), default=float("-inf"))


def _ask(engine: LLMEngine, name: str, token_ids: list[int], *, with_logprobs: bool) -> _Answer:
    segment = Segment.of(SegmentKind.QUESTION, token_ids, _SCOPE)
    num_logprobs = MAX_TOP_LOGPROBS if with_logprobs else None
    sampling = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=num_logprobs)
    engine.add_request(Submit(request_id=name, tenant_id="self-test", segments=(segment,), sampling=sampling))
    text, tokens, account = "", list[DrawnToken](), PromptAccount()
    while engine.has_work():
        for message in engine.step():
            if isinstance(message, Failure):
                raise ModelLoadError(f"self-test: {message.message}")
            text += message.text
            tokens += message.tokens
            account = message.account or account
    return _Answer(text, tokens, account)
