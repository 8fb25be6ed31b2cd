"""One answer of generated text, given under an admission (admission.py).

    submit ─► the first delta of every prompt (its account) ─► status and headers ─► body
              an error up to here is an HTTP status            an error from here on is an event in the stream

What the body looks like is the `AnswerForm`'s: a chat completion's (`chat_response.py`) or a text completion's
(`completion_response.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, Send

from engine.errors import RadixgateError
from engine.protocol import Delta, DrawnToken, FinishReason, PromptAccount, Submit
from gateway.admission import Admission
from gateway.engine_port import Engine
from gateway.error_responses import error_body
from gateway.generation import Generation, Update
from gateway.http_io import send_json
from gateway.model_use import ModelUse, sum_of_accounts
from gateway.openai_types import FinishReasonText, Usage
from gateway.request_record import in_prompt_order
from gateway.served_model import num_tokens

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

    def __init__(self, num_choices: int, choices_per_prompt: int, admission: Admission) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._accounts: list[PromptAccount | None] = [None] * (num_choices // choices_per_prompt)
        self._num_output_tokens = [0] * num_choices
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._tokens: list[list[DrawnToken]] = [[] for _ in range(num_choices)]
        self._reasons: dict[int, FinishReasonText] = {}
        self._seconds_saved = 0.0
        self._admission = admission
        self.account = PromptAccount()  # of all prompts together, as far as they are known
        self.document_order: tuple[int, ...] | None = None  # of the first prompt

    def note(self, choice: int, delta: Delta) -> None:
        prompt, sibling = divmod(choice, self._choices_per_prompt)
        if delta.account is not None and sibling == 0:
            self._accounts[prompt] = delta.account
            self.account = sum_of_accounts(self.account, delta.account)
            self._seconds_saved += delta.seconds_saved or 0.0
            if prompt == 0:
                self.document_order = delta.document_order
        self._num_output_tokens[choice] = delta.num_output_tokens
        self._admission.note_answer(self._use())
        self._texts[choice].append(delta.text)
        self._tokens[choice] += delta.tokens
        if delta.finish_reason is not None:
            self._reasons[choice] = _finish_reason(delta.finish_reason)

    @property
    def is_accounted(self) -> bool:
        """Whether the account of every prompt is known."""
        return None not in self._accounts

    def _use(self) -> ModelUse:
        return ModelUse(
            account=self.account,
            num_output_tokens=sum(self._num_output_tokens),
            seconds_saved=self._seconds_saved,
        )

    def generated(self, choice: int) -> GeneratedText:
        return GeneratedText("".join(self._texts[choice]), tuple(self._tokens[choice]), self._reasons[choice])

    def usage(self) -> Usage:
        return Usage.of_request(self._use(), self._admission.meter.rewriting)


class Answer:
    def __init__(
        self,
        form: AnswerForm,
        submits: Sequence[Submit],
        engine: Engine,
        *,
        choices_per_prompt: int,
        stream: bool,
    ) -> None:
        """`submits`: the choices of the first prompt, of the second, …"""
        self._form = form
        self._submits = submits
        self._engine = engine
        self._choices_per_prompt = choices_per_prompt
        self._stream = stream

    @property
    def num_tokens(self) -> int:
        """At most: the prompts, each once, and the output of all choices."""
        prompts = self._submits[:: self._choices_per_prompt]
        most = sum(submit.sampling.max_tokens for submit in self._submits)
        return sum(num_tokens(submit.segments) for submit in prompts) + most

    async def give(self, admission: Admission, send: Send) -> None:
        """Raises `RadixgateError` as long as nothing is sent, and `ClientDisconnectedError`."""
        async with Generation(self._engine, self._submits, admission.context.timing) as generation:
            with admission.interruption.reaches(generation):
                await self._answer(generation, admission, send)

    async def _answer(self, generation: Generation, admission: Admission, send: Send) -> None:
        context = admission.context
        tally = _Tally(len(self._submits), self._choices_per_prompt, admission)
        updates = _noted(generation.updates(), tally)
        early = await _until_accounted(updates, tally)
        if len(self._submits) == self._choices_per_prompt:  # an account of several prompts lies along none of them
            context.segments = in_prompt_order(self._submits[0].segments, tally.document_order)
        context.causes = await self._form.begin(tally.account, tally.document_order)
        body = self._stream_body if self._stream else self._whole_body
        await body(_chain(early, updates), tally, admission, send)

    # ------------------------------------------------------------ whole

    async def _whole_body(
        self, updates: AsyncIterator[Update], tally: _Tally, admission: Admission, send: Send
    ) -> None:
        async for _ in updates:
            pass
        await admission.settle()
        body = self._form.whole([tally.generated(choice) for choice in range(len(self._submits))], tally.usage())
        await send_json(send, body, _account_headers(tally.account))

    # ------------------------------------------------------------ stream

    async def _stream_body(
        self, updates: AsyncIterator[Update], tally: _Tally, admission: Admission, send: Send
    ) -> None:
        await _start_stream(send, tally.account)
        try:
            await self._send_chunks(updates, tally, admission, send)
        except RadixgateError as error:
            # The status is sent: the error is the stream's last event, and no [DONE] follows it.
            context = admission.context
            context.outcome = error.code
            admission.meter.failed = True
            await _send_body(send, _event(_JSON.encode(error_body(error, context.request_id))), more=False)

    async def _send_chunks(
        self, updates: AsyncIterator[Update], tally: _Tally, admission: Admission, send: Send
    ) -> None:
        form = self._form
        for choice in range(len(self._submits)):
            await _send_chunk(send, form.opening(choice))
        async for choice, delta in updates:
            if delta.text or delta.tokens:
                await _send_chunk(send, form.piece(choice, delta.text, delta.tokens))
            if delta.finish_reason is not None:
                await _send_chunk(send, form.ending(choice, tally.generated(choice)))
        await admission.settle()
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


async def _start_stream(send: Send, account: PromptAccount) -> None:
    content_type = (b"content-type", b"text/event-stream; charset=utf-8")
    start: HTTPResponseStartEvent = {
        "type": "http.response.start",
        "status": 200,
        "headers": [content_type, *_STREAM_HEADERS, *_account_headers(account)],
    }
    await send(start)


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    event: HTTPResponseBodyEvent = {"type": "http.response.body", "body": body, "more_body": more}
    await send(event)
