"""One answer of generated text as an ASGI response: it owns the engine requests from the first to the last byte.

    admit  ─► 429, or the request's part of its tenant's limits is set aside (metering.py)
    submit ─► the first delta of every prompt (its account) ─► status and headers ─► body
              an error up to here is an HTTP status            an error from here on is an event in the stream

What the body looks like is the `AnswerForm`'s: a chat completion's (`chat_response.py`) or a text completion's
(`completion_response.py`).

Owning everything inside one `__call__` is what makes an abort certain: client gone, drain deadline, engine failure
and normal end all leave through the same two `with` blocks. A handler that returned a generator would leave
open who closes it when nobody iterates it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, Receive, Scope, Send

from engine.errors import RadixgateError
from engine.protocol import Delta, DrawnToken, FinishReason, PromptAccount, Submit
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.error_responses import error_body
from gateway.generation import ClientDisconnectedError, Generation, Update
from gateway.metering import Attempt, Meter, Metering
from gateway.openai_types import FinishReasonText, PromptTokensDetails, Usage
from gateway.request_context import RequestContext, request_context
from gateway.request_record import in_prompt_order

_JSON = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHeader:
    """What every object of one completion repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class GeneratedText:
    text: str
    tokens: tuple[DrawnToken, ...]  # if log probabilities were asked for
    finish_reason: FinishReasonText


class AnswerForm(Protocol):
    """What an answer looks like on the wire. Choices are counted over all prompts; everything is encoded JSON."""

    async def begin(self, account: PromptAccount, document_order: tuple[int, ...] | None) -> tuple[str, ...]:
        """Once, before anything else: the engine has taken the prompts on. Codes of why they had to be computed."""
        ...

    def opening(self, choice: int) -> bytes | None:
        """The chunk before a choice's first text."""
        ...

    def piece(self, choice: int, text: str, tokens: tuple[DrawnToken, ...]) -> bytes: ...

    def ending(self, choice: int, generated: GeneratedText) -> bytes: ...

    def closing(self, usage: Usage) -> bytes | None:
        """The chunk after all choices."""
        ...

    def whole(self, choices: Sequence[GeneratedText], usage: Usage) -> bytes: ...


class _Tally:
    """What has been generated so far. Each prompt is counted once, however many choices there are of it."""

    def __init__(self, num_choices: int, choices_per_prompt: int, meter: Meter, context: RequestContext) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._accounts: list[PromptAccount | None] = [None] * (num_choices // choices_per_prompt)
        self._num_output_tokens = [0] * num_choices
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._tokens: list[list[DrawnToken]] = [[] for _ in range(num_choices)]
        self._reasons: dict[int, FinishReasonText] = {}
        self._meter = meter
        self._context = context
        self.document_order: tuple[int, ...] | None = None  # of the first prompt

    def note(self, choice: int, delta: Delta) -> None:
        prompt, sibling = divmod(choice, self._choices_per_prompt)
        if delta.account is not None and sibling == 0:
            self._accounts[prompt] = delta.account
            self._context.account = self._meter.account = self.account
            self._meter.seconds_saved += delta.seconds_saved or 0.0
            self._context.timing.seconds_saved = self._meter.seconds_saved
            if prompt == 0:
                self.document_order = delta.document_order
        self._num_output_tokens[choice] = delta.num_output_tokens
        self._context.num_output_tokens = self._meter.num_output_tokens = sum(self._num_output_tokens)
        self._texts[choice].append(delta.text)
        self._tokens[choice] += delta.tokens
        if delta.finish_reason is not None:
            self._reasons[choice] = _finish_reason(delta.finish_reason)

    @property
    def is_accounted(self) -> bool:
        """Whether the account of every prompt is known."""
        return None not in self._accounts

    @property
    def account(self) -> PromptAccount:
        """Of all prompts together, as far as they are known."""
        total: Counter[str] = Counter()
        for account in self._accounts:
            total.update(msgspec.structs.asdict(account) if account is not None else {})
        return PromptAccount(**total)

    def generated(self, choice: int) -> GeneratedText:
        return GeneratedText("".join(self._texts[choice]), tuple(self._tokens[choice]), self._reasons[choice])

    def usage(self) -> Usage:
        account, completion = self.account, sum(self._num_output_tokens)
        return Usage(
            prompt_tokens=account.num_prompt_tokens,
            completion_tokens=completion,
            total_tokens=account.num_prompt_tokens + completion,
            prompt_tokens_details=PromptTokensDetails(account.num_cached_tokens),
        )


class Answer:
    """An ASGI application for a single request."""

    def __init__(
        self,
        form: AnswerForm,
        submits: Sequence[Submit],
        engine: Engine,
        drain: Drain,
        metering: Metering,
        attempt: Attempt,
        *,
        choices_per_prompt: int,
        stream: bool,
    ) -> None:
        """`submits`: the choices of the first prompt, of the second, …"""
        self._form = form
        self._submits = submits
        self._engine = engine
        self._drain = drain
        self._metering = metering
        self._attempt = attempt
        self._choices_per_prompt = choices_per_prompt
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        context.model, context.stream = self._attempt.model, self._stream
        async with self._metering.admit(self._attempt) as meter:
            context.headers = meter.headers()
            async with Generation(self._engine, self._submits, context.timing) as generation:
                with self._drain.admit(generation.fail):
                    async with _fail_on_disconnect(receive, generation):
                        try:
                            await self._answer(generation, meter, context, send)
                        except ClientDisconnectedError:
                            context.outcome = "disconnected"
                            meter.taken_on = meter.aborted = True

    async def _answer(self, generation: Generation, meter: Meter, context: RequestContext, send: Send) -> None:
        tally = _Tally(len(self._submits), self._choices_per_prompt, meter, context)
        updates = _noted(generation.updates(), tally)
        early = await _until_accounted(updates, tally)
        meter.taken_on = True
        if len(self._submits) == self._choices_per_prompt:  # an account of several prompts lies along none of them
            context.segments = in_prompt_order(self._submits[0].segments, tally.document_order)
        context.causes = await self._form.begin(tally.account, tally.document_order)
        body = self._stream_body if self._stream else self._whole_body
        await body(_chain(early, updates), tally, meter, context, send)

    # ------------------------------------------------------------ whole

    async def _whole_body(
        self, updates: AsyncIterator[Update], tally: _Tally, meter: Meter, context: RequestContext, send: Send
    ) -> None:
        async for _ in updates:
            pass
        await meter.settle()
        context.headers = meter.headers()
        body = self._form.whole([tally.generated(choice) for choice in range(len(self._submits))], tally.usage())
        await _send_start(send, "application/json", tally.account, [(b"content-length", str(len(body)).encode())])
        await _send_body(send, body, more=False)

    # ------------------------------------------------------------ stream

    async def _stream_body(
        self, updates: AsyncIterator[Update], tally: _Tally, meter: Meter, context: RequestContext, send: Send
    ) -> None:
        await _send_start(send, "text/event-stream; charset=utf-8", tally.account, _STREAM_HEADERS)
        try:
            await self._send_chunks(updates, tally, meter, send)
        except RadixgateError as error:
            # The status is sent: the error is the stream's last event, and no [DONE] follows it.
            context.outcome = error.code
            meter.failed = True
            await _send_body(send, _event(_JSON.encode(error_body(error, context.request_id))), more=False)

    async def _send_chunks(self, updates: AsyncIterator[Update], tally: _Tally, meter: Meter, send: Send) -> None:
        form = self._form
        for choice in range(len(self._submits)):
            await _send_chunk(send, form.opening(choice))
        async for choice, delta in updates:
            if delta.text or delta.tokens:
                await _send_chunk(send, form.piece(choice, delta.text, delta.tokens))
            if delta.finish_reason is not None:
                await _send_chunk(send, form.ending(choice, tally.generated(choice)))
        await meter.settle()
        await _send_chunk(send, form.closing(tally.usage()))
        await _send_body(send, _event(b"[DONE]"), more=False)


async def _noted(updates: AsyncIterator[Update], tally: _Tally) -> AsyncIterator[Update]:
    async for update in updates:
        tally.note(update.choice, update.delta)
        yield update


async def _until_accounted(updates: AsyncIterator[Update], tally: _Tally) -> list[Update]:
    """The updates up to the one with which the account of every prompt is known."""
    early: list[Update] = []
    async for update in updates:
        early.append(update)
        if tally.is_accounted:
            return early
    raise RadixgateError("the engine answered without an account of the prompt")


async def _send_chunk(send: Send, chunk: bytes | None) -> None:
    if chunk is None:
        return
    await _send_body(send, _event(chunk), more=True)
    # A send that does not block does not suspend either: other requests, and a disconnect, get their turn here.
    await asyncio.sleep(0)


# `no-transform` and `x-accel-buffering`: a proxy on the way must not collect the events.
_STREAM_HEADERS = [(b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no")]


@asynccontextmanager
async def _fail_on_disconnect(receive: Receive, generation: Generation) -> AsyncGenerator[None]:
    """The body has been read, so the next thing that a client can say is that it leaves."""

    async def watch() -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
        generation.fail(ClientDisconnectedError())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _chain(early: Sequence[Update], updates: AsyncIterator[Update]) -> AsyncIterator[Update]:
    for update in early:
        yield update
    async for update in updates:
        yield update


def _finish_reason(reason: FinishReason) -> FinishReasonText:
    assert reason is not FinishReason.ABORT, "never sent to a client"
    return reason.value


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _account_headers(account: PromptAccount) -> list[tuple[bytes, bytes]]:
    classes = ", ".join(f"{name}={count}" for name, count in msgspec.structs.asdict(account).items())
    return [
        (b"x-radixgate-prompt-tokens", str(account.num_prompt_tokens).encode()),
        (b"x-radixgate-cached-tokens", str(account.num_cached_tokens).encode()),
        (b"x-radixgate-cache", classes.encode()),
    ]


async def _send_start(
    send: Send, content_type: str, account: PromptAccount, headers: Sequence[tuple[bytes, bytes]]
) -> None:
    start: HTTPResponseStartEvent = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", content_type.encode()), *headers, *_account_headers(account)],
    }
    await send(start)


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    event: HTTPResponseBodyEvent = {"type": "http.response.body", "body": body, "more_body": more}
    await send(event)
