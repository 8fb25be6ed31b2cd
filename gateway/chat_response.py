"""One chat completion as an ASGI response: it owns the engine requests from the first to the last byte.

    admit  ─► 429, or the request's part of its tenant's limits is set aside (metering.py)
    submit ─► first delta of choice 0 (the account) ─► status and headers ─► body
              an error up to here is an HTTP status     an error from here on is an event in the stream

Owning everything inside one `__call__` is what makes an abort certain: client gone, drain deadline, engine failure
and normal end all leave through the same two `with` blocks. A handler that returned a generator would leave
open who closes it when nobody iterates it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec
from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, Receive, Scope, Send

from engine.errors import RadixgateError
from engine.protocol import FinishReason, PromptAccount, Submit
from gateway.cache_report import CacheReport, ReportRequest
from gateway.chat_documents import ChatDocuments
from gateway.drain import Drain
from gateway.engine_port import Engine
from gateway.error_responses import error_body
from gateway.generation import ClientDisconnectedError, Generation, Update
from gateway.metering import Attempt, Meter, Metering
from gateway.openai_types import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    ChunkDelta,
    CitationObject,
    FinishReasonText,
    PromptTokensDetails,
    Usage,
)
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


@dataclass(slots=True)
class _Tally:
    """What has been generated so far. The prompt is counted once, however many choices there are."""

    account: PromptAccount
    num_output_tokens: list[int]
    meter: Meter
    report: CacheReport | None

    def set_output(self, choice: int, num_output_tokens: int) -> None:
        self.num_output_tokens[choice] = num_output_tokens
        self.meter.num_output_tokens = sum(self.num_output_tokens)

    def usage(self) -> Usage:
        prompt, completion = self.account.num_prompt_tokens, sum(self.num_output_tokens)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(self.account.num_cached_tokens),
        )


class ChatCompletionResponse:
    """An ASGI application for a single request."""

    def __init__(
        self,
        header: CompletionHeader,
        submits: Sequence[Submit],
        documents: ChatDocuments,
        engine: Engine,
        drain: Drain,
        metering: Metering,
        attempt: Attempt,
        *,
        stream: bool,
        include_usage: bool,
        report: ReportRequest | None,
    ) -> None:
        self._header = header
        self._submits = submits
        self._documents = documents
        self._engine = engine
        self._drain = drain
        self._metering = metering
        self._attempt = attempt
        self._stream = stream
        self._include_usage = include_usage
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        context.model, context.stream = self._header.model, self._stream
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
        updates = generation.updates()
        early, tally = await self._until_account(updates, meter)
        meter.taken_on = True
        await self._documents.remember()
        context.account = meter.account = tally.account
        meter.seconds_saved = context.timing.seconds_saved
        order = next(update.delta.document_order for update in early if update.choice == 0)
        context.segments = in_prompt_order(self._submits[0].segments, order)
        body = self._stream_body if self._stream else self._whole_body
        try:
            await body(_chain(early, updates), tally, context, send)
        finally:
            context.num_output_tokens = meter.num_output_tokens

    async def _until_account(self, updates: AsyncIterator[Update], meter: Meter) -> tuple[list[Update], _Tally]:
        """The updates up to the one that carries choice 0's account."""
        early: list[Update] = []
        async for update in updates:
            early.append(update)
            account = update.delta.account
            if update.choice == 0 and account is not None:
                self._documents.settle(update.delta.document_order)
                report = self._report.make(account, update.delta.document_order) if self._report else None
                return early, _Tally(account, [0] * len(self._submits), meter, report)
        raise RadixgateError("the engine answered without an account of the prompt")

    # ------------------------------------------------------------ whole

    async def _whole_body(
        self, updates: AsyncIterator[Update], tally: _Tally, context: RequestContext, send: Send
    ) -> None:
        texts: list[list[str]] = [[] for _ in self._submits]
        reasons: dict[int, FinishReasonText] = {}
        async for choice, delta in updates:
            tally.set_output(choice, delta.num_output_tokens)
            texts[choice].append(delta.text)
            if delta.finish_reason is not None:
                reasons[choice] = _finish_reason(delta.finish_reason)
        choices = tuple(
            Choice(index=i, message=self._message("".join(text)), finish_reason=reasons[i])
            for i, text in enumerate(texts)
        )
        await tally.meter.settle()
        context.headers = tally.meter.headers()
        header = self._header
        completion = ChatCompletion(
            id=header.id,
            created=header.created,
            model=header.model,
            system_fingerprint=header.system_fingerprint,
            choices=choices,
            usage=tally.usage(),
            retrieval=self._documents.report() or msgspec.UNSET,
            cache_report=tally.report or msgspec.UNSET,
        )
        body = _JSON.encode(completion)
        await _send_start(send, "application/json", tally.account, [(b"content-length", str(len(body)).encode())])
        await _send_body(send, body, more=False)

    def _message(self, text: str) -> AssistantMessage:
        return AssistantMessage(content=text, citations=self._citations(text))

    def _citations(self, text: str) -> tuple[CitationObject, ...] | msgspec.UnsetType:
        return self._documents.citations(text) if self._documents.all else msgspec.UNSET

    # ------------------------------------------------------------ stream

    async def _stream_body(
        self, updates: AsyncIterator[Update], tally: _Tally, context: RequestContext, send: Send
    ) -> None:
        await _send_start(send, "text/event-stream; charset=utf-8", tally.account, _STREAM_HEADERS)
        try:
            await self._send_chunks(updates, tally, send)
        except RadixgateError as error:
            # The status is sent: the error is the stream's last event, and no [DONE] follows it.
            context.outcome = error.code
            tally.meter.failed = True
            await _send_body(send, _event(_JSON.encode(error_body(error, context.request_id))), more=False)

    async def _send_chunks(self, updates: AsyncIterator[Update], tally: _Tally, send: Send) -> None:
        for i in range(len(self._submits)):
            await self._send_choice(send, ChunkChoice(index=i, delta=ChunkDelta(role="assistant", content="")))
        texts: list[list[str]] = [[] for _ in self._submits]
        async for choice, delta in updates:
            tally.set_output(choice, delta.num_output_tokens)
            texts[choice].append(delta.text)
            if delta.text:
                await self._send_choice(send, ChunkChoice(index=choice, delta=ChunkDelta(content=delta.text)))
            if delta.finish_reason is not None:
                reason = _finish_reason(delta.finish_reason)
                end = ChunkDelta(citations=self._citations("".join(texts[choice])))
                await self._send_choice(send, ChunkChoice(index=choice, delta=end, finish_reason=reason))
        await tally.meter.settle()
        if self._include_usage or tally.report is not None:
            usage = tally.usage() if self._include_usage else msgspec.UNSET
            await _send_body(send, _event(_JSON.encode(self._chunk((), usage, tally.report))), more=True)
        await _send_body(send, _event(b"[DONE]"), more=False)

    async def _send_choice(self, send: Send, choice: ChunkChoice) -> None:
        chunk = self._chunk((choice,), None if self._include_usage else msgspec.UNSET)
        if choice.finish_reason is not None and (report := self._documents.report()) is not None:
            chunk = msgspec.structs.replace(chunk, retrieval=report)
        await _send_body(send, _event(_JSON.encode(chunk)), more=True)
        # A send that does not block does not suspend either: other requests, and a disconnect, get their turn here.
        await asyncio.sleep(0)

    def _chunk(
        self,
        choices: tuple[ChunkChoice, ...],
        usage: Usage | msgspec.UnsetType | None,
        report: CacheReport | None = None,
    ) -> ChatCompletionChunk:
        header = self._header
        return ChatCompletionChunk(
            id=header.id,
            created=header.created,
            model=header.model,
            system_fingerprint=header.system_fingerprint,
            choices=choices,
            usage=usage,
            cache_report=report or msgspec.UNSET,
        )


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
