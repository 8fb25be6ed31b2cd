"""Every error of this server in OpenAI's shape: one table, one encoder, one set of litestar handlers.

    {"error": {"message": …, "type": …, "param": … | null, "code": …}}

The message of a `RequestError` or `ServiceError` is meant for the client. Every other error is ours: it is logged
with its request id, and the client is told the id and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import msgspec
from litestar import Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException

from engine.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    ContextLengthExceededError,
    EngineStepError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    QuotaExceededError,
    RadixgateError,
    RateLimitError,
    RequestError,
    ServiceError,
    ShuttingDownError,
    StoreUnavailableError,
    UnsupportedParameterError,
)
from gateway.request_context import request_context
from gateway.retrieval_errors import as_radixgate_error
from retrieval.errors import RetrievalError

logger = logging.getLogger(__name__)


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ErrorResponse(NamedTuple):
    """How a class of errors is answered. `retry_after`: seconds, for what will pass by itself."""

    status: int
    type: str
    retry_after: int | None = None


ERROR_RESPONSES: dict[type[RadixgateError], ErrorResponse] = {
    RadixgateError: ErrorResponse(500, "server_error"),
    ConfigError: ErrorResponse(500, "server_error"),
    ModelLoadError: ErrorResponse(500, "server_error"),
    RequestError: ErrorResponse(400, "invalid_request_error"),
    InvalidRequestError: ErrorResponse(400, "invalid_request_error"),
    UnsupportedParameterError: ErrorResponse(400, "invalid_request_error"),
    ContextLengthExceededError: ErrorResponse(400, "invalid_request_error"),
    ModelNotFoundError: ErrorResponse(404, "invalid_request_error"),
    NotFoundError: ErrorResponse(404, "invalid_request_error"),
    ConflictError: ErrorResponse(409, "invalid_request_error"),
    AuthenticationError: ErrorResponse(401, "invalid_request_error"),
    PermissionDeniedError: ErrorResponse(403, "invalid_request_error"),
    RateLimitError: ErrorResponse(429, "rate_limit"),  # the body says which: requests or tokens
    QuotaExceededError: ErrorResponse(429, "insufficient_quota"),
    ServiceError: ErrorResponse(503, "server_error", retry_after=2),
    EngineUnavailableError: ErrorResponse(503, "server_error", retry_after=2),
    EngineStepError: ErrorResponse(503, "server_error", retry_after=1),
    OverloadedError: ErrorResponse(503, "server_error", retry_after=1),
    StoreUnavailableError: ErrorResponse(503, "server_error", retry_after=1),
    ShuttingDownError: ErrorResponse(503, "server_error", retry_after=5),
}

# What the framework itself refuses, before a handler runs.
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def error_body(error: RadixgateError, request_id: str) -> ErrorBody:
    """The body for an error; the text of an error that is ours stays in the log."""
    message = error.message if isinstance(error, RequestError | ServiceError) else _internal_message(request_id)
    kind = ERROR_RESPONSES[type(error)].type
    if type(error) is RateLimitError:
        kind = error.kind
    return ErrorBody(ErrorDetail(message, kind, error.param, error.code))


def error_headers(error: RadixgateError) -> dict[str, str]:
    retry_after = ERROR_RESPONSES[type(error)].retry_after
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, RateLimitError):
        headers |= _retry_headers(error)
    return headers


def _retry_headers(error: RateLimitError) -> dict[str, str]:
    """OpenAI's SDKs look at the milliseconds first; rounded up, or the retry would come a moment too early."""
    return {
        "retry-after-ms": str(error.retry_after_ms),
        "retry-after": str(-(-error.retry_after_ms // 1000)),
        "x-should-retry": "false" if isinstance(error, QuotaExceededError) else "true",
    }


# litestar's own alias has an unknown type in it. Each handler is called with errors of the class it is filed under.
Handler = Callable[[Request[Any, Any, State], Any], Response[bytes]]


def exception_handlers() -> MutableMapping[int | type[Exception], Handler]:
    return {
        RadixgateError: _answer_radixgate_error,
        RetrievalError: _answer_retrieval_error,
        HTTPException: _answer_http_exception,
        Exception: _answer_other,
    }


def _answer_retrieval_error(request: Request[Any, Any, State], error: RetrievalError) -> Response[bytes]:
    return _answer_radixgate_error(request, as_radixgate_error(error))


def _answer_radixgate_error(request: Request[Any, Any, State], error: RadixgateError) -> Response[bytes]:
    context = request_context(request.scope)
    context.outcome = error.code
    rid = context.request_id
    if not isinstance(error, RequestError | ServiceError):
        logger.error("request %s failed", rid, exc_info=error)
    return _response(error_body(error, rid), ERROR_RESPONSES[type(error)].status, error_headers(error))


def _answer_http_exception(request: Request[Any, Any, State], error: HTTPException) -> Response[bytes]:
    status = error.status_code
    if status >= 500:
        return _answer_other(request, error)
    code = _HTTP_CODES.get(status, "invalid_request")
    message = {
        404: f"Unknown URL: {request.method} {request.url.path}",
        405: f"Method {request.method} is not allowed for {request.url.path}",
        413: "The request body is too large.",
    }.get(status, error.detail)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    return _response(ErrorBody(ErrorDetail(message, "invalid_request_error", None, code)), status, headers)


def _answer_other(request: Request[Any, Any, State], error: Exception) -> Response[bytes]:
    rid = request_context(request.scope).request_id
    logger.error("request %s failed", rid, exc_info=error)
    body = ErrorBody(ErrorDetail(_internal_message(rid), "server_error", None, "internal_error"))
    return _response(body, 500, {})


def _internal_message(rid: str) -> str:
    return f"The server failed on this request. Its log has the details under request id {rid}."


def _response(body: ErrorBody, status: int, headers: dict[str, str]) -> Response[bytes]:
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")
