"""Retrieval's errors as the gateway's own: one place, and every one of them (a test looks)."""

from __future__ import annotations

from engine.errors import InvalidRequestError, NotFoundError, RadixgateError, ServiceError
from retrieval import errors


def as_radixgate_error(error: errors.RetrievalError) -> RadixgateError:
    match error:
        case errors.NotFoundError():
            return NotFoundError(error.message)
        case errors.InvalidValueError():
            return InvalidRequestError(f"`{error.path}`: {error.message}.", param=error.path)
        case errors.FileContentError():
            return InvalidRequestError(error.message, param="file")
        case errors.UnavailableError():
            return ServiceError(error.message)
        case _:
            return RadixgateError(error.message)
