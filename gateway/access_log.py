"""The end of every request: one record, one log line, and whoever else wants to know.

An ASGI wrapper around the whole application, so that it also sees a request whose client went away. The line holds ids
and numbers, and no text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from gateway.model_use import ModelUse
from gateway.request_context import RequestContext, request_context
from gateway.request_record import Outcome, RequestObserver, RequestRecord, locate

logger = logging.getLogger("gateway.access")

# What is noted of a request whose client left before a response began; never sent.
_CLIENT_CLOSED_REQUEST = 499
_KNOWN_ROUTES = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/livez", "/readyz", "/metrics"}
)

WATCHED_PATHS = frozenset({"/livez", "/readyz", "/metrics", "/metrics/engine"})


class AccessLog:
    def __init__(self, app: ASGIApp, observers: Sequence[RequestObserver] = ()) -> None:
        self._app = app
        self._observers = (LogLine(), *observers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = request_context(scope)  # made here, so that its clock starts here
        start = time.monotonic()
        status = _CLIENT_CLOSED_REQUEST

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            record = _record(scope, context, status, time.monotonic() - start)
            for observer in self._observers:
                observer.request_finished(record)


def _record(scope: HTTPScope, context: RequestContext, status: int, seconds: float) -> RequestRecord:
    timing, path = context.timing, scope["path"]
    answer = context.answer
    miss, documents = locate(context.segments, answer.account) if answer is not None else (None, ())
    return RequestRecord(
        time=time.time(),
        request_id=context.request_id,
        method=str(scope["method"]),
        path=_printable(path),
        route=_route(path),
        status=status,
        outcome=_outcome(status, context.outcome),
        error_code=context.outcome,
        tenant_id=context.tenant.id if context.tenant is not None else None,
        model=context.model,
        stream=context.stream,
        seconds=seconds,
        account=answer.account if answer is not None else None,
        num_output_tokens=answer.num_output_tokens if answer is not None else 0,
        time_to_first_token=timing.time_to_first_token,
        queue_seconds=timing.queue_seconds,
        seconds_saved=answer.seconds_saved if answer is not None else 0.0,
        retrieval=timing.retrieval,
        prepare_seconds=timing.prepare_seconds,
        traceparent=_header(scope, b"traceparent"),
        token_intervals=timing.intervals,
        miss=miss,
        causes=context.causes,
        documents=documents,
        rewriting=context.rewriting,
    )


def _header(scope: HTTPScope, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")


def _outcome(status: int, code: str) -> Outcome:
    if status == _CLIENT_CLOSED_REQUEST or code == "disconnected":
        return "disconnected"
    if status >= 500:
        return "server_error"
    if status == 429:
        return "rate_limited"
    if status >= 400:
        return "client_error"
    return "stream_error" if code else "ok"


def _route(path: str) -> str:
    """A path is the client's to choose: as a label it would be unbounded."""
    if path in _KNOWN_ROUTES:
        return path
    for prefix in ("/dashboard", "/admin", "/v1"):
        if path == prefix or path.startswith(f"{prefix}/"):
            return f"{prefix}/…"
    return "other"


class LogLine:
    """`key=value` text after a readable head; the same numbers as fields for a structured formatter."""

    def request_finished(self, record: RequestRecord) -> None:
        used = record.used or ModelUse()
        logger.log(
            # Every second or so, from whoever watches the server.
            logging.DEBUG if record.path in WATCHED_PATHS else logging.INFO,
            "%s %s %d %.1fms id=%s tenant=%s prompt=%d cached=%d output=%d%s",
            record.method,
            record.path,
            record.status,
            record.seconds * 1000,
            record.request_id,
            record.tenant_id or "-",
            used.account.num_prompt_tokens,
            used.account.num_cached_tokens,
            used.num_output_tokens,
            f" outcome={record.error_code}" if record.error_code else "",
            extra={"fields": _fields(record, used)},
        )


def _fields(record: RequestRecord, used: ModelUse) -> dict[str, str | int | float | bool | None]:
    return {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "outcome": record.outcome,
        "error_code": record.error_code or None,
        "tenant": record.tenant_id,
        "model": record.model or None,
        "stream": record.stream,
        "seconds": round(record.seconds, 6),
        "ttft_seconds": _rounded(record.time_to_first_token),
        "queue_seconds": _rounded(record.queue_seconds),
        "prompt_tokens": used.account.num_prompt_tokens,
        "cached_tokens": used.account.num_cached_tokens,
        "output_tokens": used.num_output_tokens,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _printable(path: str) -> str:
    """A path is the client's text: it must not start a new line in the log."""
    return "".join(char if char.isprintable() else "?" for char in path[:200])
