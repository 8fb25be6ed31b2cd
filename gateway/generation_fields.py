"""The fields of every body that asks for generated text: what to draw, how much of it, whose KV it may share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError
from engine.protocol import SamplingParams
from gateway.json_body import refuse_field

StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Narrowing = Annotated[str, Meta(min_length=1, max_length=512)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]

# Spreads the seeds of parallel choices; any odd number with well-mixed bits does.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEED_LIMIT = 1 << 63


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # padding against a listener who counts bytes: not done


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's first, then ours."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: LogitBias = msgspec.field(default_factory=dict[int, float])
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] = msgspec.field(default_factory=list[StopText])
    user: Narrowing | None = None

    prompt_cache_key: Narrowing | None = None
    cache_salt: Narrowing | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    ignore_eos: bool = False
    use_cache: bool = True

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def narrowing(self) -> dict[str, str]:
        """The fields that narrow the scope of this prompt's KV."""
        fields = {"cache_salt": self.cache_salt, "prompt_cache_key": self.prompt_cache_key, "user": self.user}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def num_logprobs(self) -> int | None:
        """Of the best tokens beside the drawn one; None: no log probabilities. Each route has its own field for it."""
        return None

    def sampling(self, max_tokens: int, choice: int) -> SamplingParams:
        """Of one of the `n` choices; choice 0 has the seed itself: it is what the same request with n=1 gives."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=None if self.seed is None else (self.seed + choice * _SEED_STEP) % _SEED_LIMIT,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            num_logprobs=self.num_logprobs,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `InvalidRequestError` for a bias on what is no token of the model."""
        for token_id in self.logit_bias:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"`logit_bias`: {token_id} is not a token; the vocabulary has {vocab_size}.", param="logit_bias"
                )


Body = TypeVar("Body", bound=GenerationFields)


def read_fields(fields: Mapping[str, object], kind: type[Body], max_choices: int) -> Body:
    """`fields` as a body that is right in itself. Raises `RequestError`."""
    try:
        # The keys of `logit_bias` are numbers, and JSON writes them as strings.
        body = msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        refuse_field(error)
    if body.n > max_choices:
        raise InvalidRequestError(f"`n` is {body.n}, and this server's largest is {max_choices}.", param="n")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("`stream_options` is for `stream: true` only.", param="stream_options")
    return body


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequestError(
            f"`min_tokens` is {min_tokens}, and there is room for {max_tokens}.", param="min_tokens"
        )
