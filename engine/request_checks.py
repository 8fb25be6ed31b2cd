"""What a request must be for the engine to take it: what the gateway has made sure of, once more.

An engine must not depend on a gateway to stay alive: a NaN for a temperature, or a `top_p` of 0, would fail the whole
step, and with it the requests of other tenants. Each refusal is an `InvalidRequestError` that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.errors import ContextLengthExceededError, InvalidRequestError
from engine.protocol import (
    MAX_TOP_LOGPROBS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    EngineInfo,
    SamplingParams,
    TenantPolicy,
)
from engine.request import Request

_MAX_SEED = 1 << 64
MAX_BIAS = 1000.0  # on a logit; finite with whatever logit it meets
MAX_STOPS = 64
MAX_STOP_LENGTH = 4096  # characters; each is looked for in every new text


def check_request(request: Request, info: EngineInfo) -> None:
    """Raises `ContextLengthExceededError` or `InvalidRequestError`."""
    if request.num_prompt_tokens >= info.max_model_len:
        raise ContextLengthExceededError(
            f"the prompt has {request.num_prompt_tokens} tokens; the model's context holds {info.max_model_len}, "
            "one of them for the answer",
            param="messages",
        )
    if min(request.token_ids) < 0 or max(request.token_ids) >= info.vocab_size:
        raise InvalidRequestError("a token id is outside the model's vocabulary", param="segments")
    if request.pin_top < 0:
        raise InvalidRequestError("pin_top must not be negative", param="pin_top")
    for rules in (_of_sampling(request.sampling, info), _of_policy(request.policy or TenantPolicy())):
        for holds, param, rule in rules:
            if not holds:
                raise InvalidRequestError(rule, param=param)


_Rule = tuple[bool, str, str]  # whether it holds, the field, what it has to be


def _of_sampling(sampling: SamplingParams, info: EngineInfo) -> Iterator[_Rule]:
    """Written so that a NaN, which is neither above nor below anything, is refused."""
    yield sampling.max_tokens >= 1, "max_tokens", "max_tokens must be at least 1"
    yield sampling.min_tokens >= 0, "min_tokens", "min_tokens must not be negative"
    yield 0 <= sampling.temperature < math.inf, "temperature", "temperature must be a number from 0 up"
    yield 0 < sampling.top_p <= 1, "top_p", "top_p must be above 0 and at most 1"
    yield sampling.top_k >= 0, "top_k", "top_k must not be negative; 0 is off"
    yield 0 <= sampling.min_p <= 1, "min_p", "min_p must be from 0 to 1"
    for name in ("frequency_penalty", "presence_penalty"):
        yield abs(getattr(sampling, name)) <= MAX_BIAS, name, f"{name} must be from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    repetition = 1 / MAX_BIAS <= sampling.repetition_penalty <= MAX_BIAS
    yield repetition, "repetition_penalty", f"repetition_penalty must be from {1 / MAX_BIAS:g} to {MAX_BIAS:g}"
    known = all(0 <= token_id < info.vocab_size for token_id in sampling.logit_bias)
    yield known, "logit_bias", "a token id is outside the model's vocabulary"
    bounded = all(abs(bias) <= MAX_BIAS for bias in sampling.logit_bias.values())
    yield bounded, "logit_bias", f"a bias must be from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    told = 0 <= (sampling.num_logprobs or 0) <= MAX_TOP_LOGPROBS
    yield told, "num_logprobs", f"num_logprobs must be from 0 to {MAX_TOP_LOGPROBS}"
    yield abs(sampling.seed or 0) < _MAX_SEED, "seed", "a seed must fit 64 bits"
    yield all(sampling.stop), "stop", "an empty stop string would end every text"
    short = len(sampling.stop) <= MAX_STOPS and all(len(stop) <= MAX_STOP_LENGTH for stop in sampling.stop)
    yield short, "stop", f"at most {MAX_STOPS} stop strings of {MAX_STOP_LENGTH} characters"


def _of_policy(policy: TenantPolicy) -> Iterator[_Rule]:
    weight = f"a tenant's weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
    yield MIN_WEIGHT <= policy.weight <= MAX_WEIGHT, "policy.weight", weight
    max_running = policy.max_running is None or policy.max_running >= 1
    yield max_running, "policy.max_running", "a tenant must be allowed one request at a time"
    yield policy.kv_floor_tokens >= 0, "policy.kv_floor_tokens", "a floor must not be negative"
    quota = policy.kv_quota_tokens is None or policy.kv_quota_tokens >= 0
    yield quota, "policy.kv_quota_tokens", "a quota must not be negative"
