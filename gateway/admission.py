"""A request that the model works for, as an ASGI application: admitted, watched and counted to its last byte.

    admit ─► 429, or the request's part of its tenant's limits is set aside (metering.py)
    watch ─► its client, and the drain's deadline (interruption.py)
    reply ─► what is done under this admission: an answer (answer.py), perhaps behind a query that is rewritten first
             (query_rewrite.py), or a search with such a query

A request is admitted once, whatever the model does for it: were the rewriting admitted by itself, a tenant with one
concurrent request could lose its place between the two, and a request larger than its window would never be let in
behind its own rewriting. What is not known at admission (the prompt, before the search) is reserved later, in the same
reservation.

Owning everything inside one `__call__` is what makes an abort certain: client gone, drain deadline, engine failure
and normal end all leave through the same `with` blocks. A handler that returned a generator would leave
open who closes it when nobody iterates it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from litestar.types import Receive, Scope, Send

from gateway.call import Call
from gateway.drain import Drain
from gateway.generation import ClientDisconnectedError
from gateway.interruption import Interruption, interruptible
from gateway.metering import Attempt, Meter, Metering
from gateway.model_use import ModelUse
from gateway.request_context import RequestContext, request_context


@dataclass(frozen=True, slots=True)
class Admission:
    """What a reply is done under. Meter and context are told the same, so that usage and metrics cannot differ."""

    meter: Meter
    interruption: Interruption
    context: RequestContext

    def note_answer(self, use: ModelUse) -> None:
        """The engine has begun: this is used, whatever becomes of the request."""
        self.context.answer = self.meter.answer = use
        self.meter.taken_on = True

    def note_rewriting(self, use: ModelUse) -> None:
        """As `note_answer`; and its client is told."""
        self.context.rewriting = self.meter.rewriting = use
        self.meter.taken_on = True
        self.context.headers = self.meter.headers()

    async def reserve_answer(self, num_tokens: int) -> None:
        """For a request that was admitted before its prompt was known. Raises `RateLimitError`."""
        self.interruption.check()
        await self.meter.reserve_answer(num_tokens)
        self.context.headers = self.meter.headers()

    async def settle(self) -> None:
        await self.meter.settle()
        self.context.headers = self.meter.headers()


Reply = Callable[[Admission, Send], Awaitable[None]]


class Admissions:
    """Of one gateway."""

    def __init__(self, metering: Metering, drain: Drain) -> None:
        self._metering = metering
        self._drain = drain

    def admitted(
        self, call: Call, reply: Reply, *, request_id: str, model: str, num_tokens: int, stream: bool = False
    ) -> Admitted:
        """`reply` as an application. `num_tokens`: as far as they are known, at most: prompt and output."""
        attempt = Attempt(
            caller=call.caller,
            request_id=request_id,
            model=model,
            num_tokens=num_tokens,
            is_retry=call.is_retry,
            digest=Attempt.digest_of(call.raw),
        )
        return Admitted(attempt, reply, self._metering, self._drain, stream=stream)


class Admitted:
    """An ASGI application for a single request."""

    def __init__(self, attempt: Attempt, reply: Reply, metering: Metering, drain: Drain, *, stream: bool) -> None:
        self._attempt = attempt
        self._reply = reply
        self._metering = metering
        self._drain = drain
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        context.model, context.stream = self._attempt.model, self._stream
        async with self._metering.admit(self._attempt) as meter:
            context.headers = meter.headers()
            try:
                async with interruptible(receive, self._drain) as interruption:
                    await self._reply(Admission(meter, interruption, context), send)
            except ClientDisconnectedError:
                context.outcome = "disconnected"
                meter.taken_on = meter.aborted = True
