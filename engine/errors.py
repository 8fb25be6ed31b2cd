"""Every error that crosses a module boundary.

    RadixgateError
    ├── ConfigError             the settings cannot be used; names the key
    ├── ModelLoadError          the model cannot be loaded, or cannot be paged exactly; says why
    ├── RequestError            the request is wrong; `param` names the field
    │   ├── InvalidRequestError
    │   ├── UnsupportedParameterError
    │   ├── ContextLengthExceededError
    │   ├── ModelNotFoundError
    │   ├── NotFoundError           a tenant, a key, …: not there, or not yours to know of
    │   ├── ConflictError           it is there already, or somebody changed it meanwhile
    │   ├── AuthenticationError
    │   ├── PermissionDeniedError
    │   └── RateLimitError          too much for this minute, or too many at once
    │       └── QuotaExceededError  too much for this day
    └── ServiceError            the request is right, we cannot serve it now
        ├── EngineUnavailableError
        ├── EngineStepError     the step that computed this request failed
        ├── OverloadedError     the waiting queue is full
        ├── StoreUnavailableError   what was asked for is in the store, and the store is away
        └── ShuttingDownError

Errors that travel from the engine to the gateway carry their `code`; `from_wire` finds the class again.
Our own bookkeeping being wrong is none of these: it is an `InvariantError` (an AssertionError) that names the
invariant of docs/architecture.md; the engine then logs, counts, drops its cache and goes on.
"""

from __future__ import annotations

from typing import ClassVar


class RadixgateError(Exception):
    """Base of every error that radixgate raises on purpose. `code` is stable and machine readable."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(RadixgateError):
    code = "config_error"


class ModelLoadError(RadixgateError):
    code = "model_load_error"


class RequestError(RadixgateError):
    code = "invalid_request"


class InvalidRequestError(RequestError):
    code = "invalid_request"


class UnsupportedParameterError(RequestError):
    code = "unsupported_parameter"


class ContextLengthExceededError(RequestError):
    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    code = "model_not_found"


class NotFoundError(RequestError):
    code = "not_found"


class PermissionDeniedError(RequestError):
    code = "permission_denied"


class AuthenticationError(RequestError):
    code = "invalid_api_key"


class ConflictError(RequestError):
    code = "conflict"


class RateLimitError(RequestError):
    """`kind` is what ran out, in OpenAI's words: `requests` or `tokens`."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str = "requests", retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_ms = retry_after_ms


class QuotaExceededError(RateLimitError):
    """Trying again soon is of no use."""

    code = "insufficient_quota"


class ServiceError(RadixgateError):
    code = "service_unavailable"


class EngineUnavailableError(ServiceError):
    code = "engine_unavailable"


class EngineStepError(ServiceError):
    code = "engine_step_failed"


class OverloadedError(ServiceError):
    code = "engine_overloaded"


class StoreUnavailableError(ServiceError):
    """`asked`: the question went out and no answer came, so that it may have been carried out. `refused`: the store
    answered, and will answer that again."""

    code = "store_unavailable"

    def __init__(self, message: str, *, param: str | None = None, asked: bool = False, refused: bool = False) -> None:
        super().__init__(message, param=param)
        self.asked = asked
        self.refused = refused


class ShuttingDownError(ServiceError):
    code = "shutting_down"


class InvariantError(AssertionError):
    """Our own bookkeeping is wrong. The message starts with the invariant's number ("I3: …")."""


def all_errors(root: type[RadixgateError] = RadixgateError) -> list[type[RadixgateError]]:
    """`root` and everything below it, parents first."""
    return [root] + [leaf for child in root.__subclasses__() for leaf in all_errors(child)]


def from_wire(code: str, message: str, param: str | None) -> RadixgateError:
    """The typed error for a code that came over the wire; an unknown code becomes `EngineUnavailableError`."""
    # Parents come first, so the last class with a code is the most specific one.
    by_code = {cls.code: cls for cls in all_errors()}
    return by_code.get(code, EngineUnavailableError)(message, param=param)
