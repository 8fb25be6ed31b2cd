from __future__ import annotations

import pytest

from engine.errors import ConfigError, RadixgateError, RequestError, ServiceError, all_errors
from gateway.error_responses import ERROR_RESPONSES, error_body, error_headers


def test_the_table_has_every_error() -> None:
    """A class that is missing would be a KeyError while an error is being answered."""
    assert set(ERROR_RESPONSES) == set(all_errors())


@pytest.mark.parametrize("error", all_errors())
def test_status_fits_the_kind_of_error(error: type[RadixgateError]) -> None:
    """A client's fault is a 4xx (and is not retried), a passing one of ours a 503 that says when to try again."""
    response = ERROR_RESPONSES[error]
    if issubclass(error, RequestError):
        assert 400 <= response.status < 500
    elif issubclass(error, ServiceError):
        assert response.status == 503
        assert int(error_headers(error("x"))["retry-after"]) > 0
    else:
        assert response.status == 500


def test_what_is_ours_stays_in_the_log() -> None:
    body = error_body(ConfigError("the secret is 42"), "req_1")
    assert "42" not in body.error.message
    assert "req_1" in body.error.message
