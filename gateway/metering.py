"""From admission to the last byte: what one request reserves, uses, and is counted for.

Metering.admit ── limits: reserve prompt + max_tokens ──► Meter ──► headers, settle (before the last byte)
                                                            └────► leaving it: usage, exactly once,
                                                                   whether it ended, failed or its client left

A query that is rewritten for a request belongs to it: one reservation, one request in the usage, the tokens of both.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import ceil

from engine.settings import UsageSettings
from gateway.model_use import ModelUse
from gateway.rate_limits import DAY_MS, Held, Limiter, Reservation
from gateway.tenants import Caller
from gateway.usage import Bucket, UsageRecorder, counts_of_account, this_minute

_MAX_ABANDONED = 4096  # attempts whose client left, remembered for its retry


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What is known of a request before the engine has seen it."""

    caller: Caller
    request_id: str  # the engine's or the completion's: unique
    model: str
    num_tokens: int  # at most, as far as is known: the prompt, and the output of all choices
    is_retry: bool  # the client says so: `x-stainless-retry-count`
    digest: bytes  # of its body

    @classmethod
    def digest_of(cls, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=16).digest()


class Meter:
    """One admitted request."""

    def __init__(self, metering: Metering, attempt: Attempt, reservation: Reservation) -> None:
        self.attempt = attempt
        self.answer = ModelUse()
        self.rewriting: ModelUse | None = None  # of its query
        self.taken_on = False  # the engine has begun with it
        self.aborted = False
        self.failed = False
        self._metering = metering
        self._reservation = reservation

    @property
    def used(self) -> ModelUse:
        return self.answer if self.rewriting is None else self.rewriting + self.answer

    async def reserve_answer(self, num_tokens: int) -> None:
        """Prompt and output of an answer that was not known at admission. Raises `RateLimitError`.

        What has been used until now stays reserved beside it.
        """
        await self._metering.limiter.change(self._reservation, self.charged_tokens + num_tokens)

    async def settle(self) -> None:
        """Everything is known: the limits take it into account before the client knows the answer's end."""
        await self._metering.limiter.settle(self._reservation, 1, self.charged_tokens)

    @property
    def charged_tokens(self) -> int:
        """Against the token limits."""
        used = self.used
        cached = used.account.num_cached_tokens
        uncached = used.account.num_prompt_tokens - cached
        return uncached + ceil(cached * self._metering.cached_token_factor) + used.num_output_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-*`, as the last answer of the limiter has it; none for a tenant without limits.

        And what the rewriting of its query used: an error behind it has no body that could say so.
        """
        headers = rate_limit_headers(self._reservation.held)
        if (use := self.rewriting) is not None:
            prompt, cached = use.account.num_prompt_tokens, use.account.num_cached_tokens
            value = f"prompt={prompt}, cached={cached}, output={use.num_output_tokens}"
            headers.append((b"x-radixgate-query-rewrite", value.encode()))
        return headers

    def close(self) -> None:
        used = 1 if self.taken_on else 0
        self._metering.limiter.settle_later(self._reservation, used, self.charged_tokens)
        self._metering.record(self)


class Metering:
    def __init__(self, limiter: Limiter, recorder: UsageRecorder, settings: UsageSettings) -> None:
        self.limiter = limiter
        self.cached_token_factor = settings.cached_token_factor
        self._recorder = recorder
        self._abandoned: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    @asynccontextmanager
    async def admit(self, attempt: Attempt) -> AsyncGenerator[Meter]:
        """Raises `RateLimitError`. Whoever is admitted is counted when leaving."""
        tenant = attempt.caller.tenant
        reservation = await self.limiter.reserve(
            tenant.id, attempt.request_id, tenant.record.limits, attempt.num_tokens
        )
        meter = Meter(self, attempt, reservation)
        try:
            yield meter
        except Exception:
            meter.failed = True
            raise
        finally:
            meter.close()

    def record(self, meter: Meter) -> None:
        """Once a request. One that the engine never began with is no usage."""
        if not meter.taken_on:
            return
        attempt, used = meter.attempt, meter.used
        repeats = self._repeats(attempt)
        if meter.aborted:
            self._remember(attempt)
        counts = Counter(
            requests=0 if repeats else 1,
            retries=1 if repeats else 0,
            aborted=int(meter.aborted),
            failed=int(meter.failed),
            output=used.num_output_tokens,
            saved_us=round(used.seconds_saved * 1e6),
        )
        counts.update(counts_of_account(used.account))
        bucket = Bucket(attempt.caller.tenant.id, attempt.caller.key.id, attempt.model, this_minute())
        self._recorder.add(bucket, counts)

    def _repeats(self, attempt: Attempt) -> bool:
        """Whether it repeats an attempt that was counted: its client left that one, and asks the same again.

        A retry after an error repeats nothing that counts. Known on this gateway only: after a change of gateway a
        repeated request counts as two, which is what the engine did.
        """
        if not attempt.is_retry:
            return False
        key = (attempt.caller.key.id, attempt.digest)
        return self._abandoned.pop(key, False) is None

    def _remember(self, attempt: Attempt) -> None:
        self._abandoned[attempt.caller.key.id, attempt.digest] = None
        if len(self._abandoned) > _MAX_ABANDONED:
            self._abandoned.popitem(last=False)


def rate_limit_headers(held: list[Held]) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    names: set[str] = set()
    for part in held:
        window, standing = part.window, part.standing
        # OpenAI's names are those of the minute; a day's tokens go under a name of their own beside them.
        name = "tokens-day" if window.length_ms == DAY_MS and "tokens" in names else window.counts
        names.add(name)
        remaining = max(0, window.limit - standing.used)
        for what, value in (("limit", window.limit), ("remaining", remaining), ("reset", _duration(standing.reset_ms))):
            headers.append((f"x-ratelimit-{what}-{name}".encode(), str(value).encode()))
    return headers


def _duration(milliseconds: int) -> str:
    """As OpenAI writes it: `250ms`, `7.5s`, `6m0s`, `23h59m0s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{rest:03d}".rstrip("0").rstrip(".") if not minutes and not hours else ""
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if minutes or hours else ''}{seconds}{fraction}s"
