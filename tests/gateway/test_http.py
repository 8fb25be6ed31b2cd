"""The API below the SDK: bodies that no SDK sends, and the errors of the HTTP layer itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat_request import ChatBody
from gateway.inert_parameters import CHAT
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine

GOOD: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    """One for the whole file: no request here leaves anything behind."""
    yield from run_gateway_thread(FakeEngine())


def post(gateway: RunningGateway, body: object = None, *, raw: bytes | None = None, **headers: str) -> httpx.Response:
    content = json.dumps(body).encode() if raw is None else raw
    sent = {
        "content-type": "application/json",
        **gateway.headers(),
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    return gateway.http.post("/v1/chat/completions", content=content, headers=sent)


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"model": None}, "model", "invalid_request"),
        ({"model": 7}, "model", "invalid_request"),
        ({"messages": None}, "messages", "invalid_request"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": {}}, "messages", "invalid_request"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_request"),
        ({"messages": [{}] * 4097}, "messages", "invalid_request"),
        ({"documents": [{}] * 4097}, "documents", "invalid_request"),
        ({"messages": [{"role": "user", "content": [{}] * 4097}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "invalid_request"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_request"),
        ({"messages": [{"role": ["x"], "content": "x"}]}, "messages[0].role", "invalid_request"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "x", "mood": None}]}, "messages[0].mood", "unsupported_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "messages[0].content[0].text",
            "invalid_request",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
        ({"stream": "yes"}, "stream", "invalid_request"),
        ({"stream": 1}, "stream", "invalid_request"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_request"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unsupported_parameter"),
        ({"n": 0}, "n", "invalid_request"),
        ({"n": 5}, "n", "invalid_request"),
        ({"n": True}, "n", "invalid_request"),
        ({"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_request"),
        ({"max_tokens": 10**30}, "max_tokens", "invalid_request"),
        ({"max_completion_tokens": 3}, "max_tokens", "invalid_request"),
        ({"temperature": 2.1}, "temperature", "invalid_request"),
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"temperature": True}, "temperature", "invalid_request"),
        ({"top_p": 0}, "top_p", "invalid_request"),
        ({"top_k": -1}, "top_k", "invalid_request"),
        ({"top_k": 2**40}, "top_k", "invalid_request"),
        ({"min_p": 2}, "min_p", "invalid_request"),
        ({"seed": 2**63}, "seed", "invalid_request"),
        ({"stop": ""}, "stop", "invalid_request"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_request"),
        ({"stop": ["a"] * 17}, "stop", "invalid_request"),
        ({"min_tokens": 5}, "min_tokens", "invalid_request"),
        ({"min_tokens": 9000, "max_tokens": 10000}, "min_tokens", "invalid_request"),
        ({"cache_salt": ""}, "cache_salt", "invalid_request"),
        ({"use_cache": 0}, "use_cache", "invalid_request"),
        ({"documents": [{"text": "a"}, {"title": "b"}]}, "documents[1].text", "invalid_request"),
        ({"documents": "a"}, "documents", "invalid_request"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "invalid_request"),
        ({"presence_penalty": "1"}, "presence_penalty", "invalid_request"),
        ({"presence_penalty": False}, "presence_penalty", "invalid_request"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_request"),
        ({"logprobs": 1}, "logprobs", "invalid_request"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_request"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_request"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]", "invalid_request"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "invalid_request"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_request"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", "invalid_request"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias", "invalid_request"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_request"),
        ({"tools": [{"type": "function"}]}, "tools[0].type", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"audio": {}}, "audio", "unsupported_parameter"),
        ({"store": "yes"}, "store", "invalid_request"),
        ({"temprature": 1}, "temprature", "unsupported_parameter"),
    ],
)
def test_a_bad_field_is_400_and_named_by_its_path(
    gateway: RunningGateway, change: dict[str, object], param: str, code: str
) -> None:
    """Accepted and dropped, or a 500: both have been reported of other servers for most of these."""
    before = len(gateway.engine.submitted)
    response = post(gateway, {**GOOD, **change})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert len(gateway.engine.submitted) == before


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b"{",
        b'{"model": NaN}',
        b'{"model": "\xff\xfe"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b"\xef\xbb\xbf{}",
        json.dumps(GOOD).encode() + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_400(gateway: RunningGateway, raw: bytes) -> None:
    response = post(gateway, raw=raw)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_request"


@pytest.mark.parametrize("content_type", ["", "text/plain", "multipart/form-data; boundary=x", "application/x-msgpack"])
def test_a_body_of_another_type_is_400(gateway: RunningGateway, content_type: str) -> None:
    response = post(gateway, GOOD, content_type=content_type)
    assert response.status_code == 400
    assert "content-type" in error_of(response)["message"]


def test_json_with_a_charset_is_json(gateway: RunningGateway) -> None:
    assert post(gateway, GOOD, content_type="Application/JSON; charset=utf-8").status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(sorted([*ChatBody.__struct_fields__, *CHAT.neutral, *CHAT.harmless, *CHAT.refused]))
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | JSON, "content": JSON}
)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.dictionaries(FIELDS, JSON, max_size=3),
    messages=st.none() | st.lists(MESSAGE | JSON, max_size=3),
)
def test_no_body_is_a_500(gateway: RunningGateway, changes: dict[str, object], messages: list[object] | None) -> None:
    body = {**GOOD, **changes} if messages is None else {**GOOD, "messages": messages, **changes}
    response = post(gateway, body)
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        error_of(response)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 80), garbage=st.binary(min_size=1, max_size=8))
def test_no_broken_bytes_are_a_500(gateway: RunningGateway, at: int, garbage: bytes) -> None:
    raw = json.dumps(GOOD).encode()
    assert post(gateway, raw=raw[:at] + garbage + raw[at:]).status_code in (200, 400, 404)


@pytest.mark.parametrize("content", ["\x00", "\U0010ffff", "a\u2028b", "\ufeff", "<|im_end|>", "{{ 7*7 }}", ""])
def test_odd_text_comes_back_as_it_was_sent(gateway: RunningGateway, content: str) -> None:
    body = {**GOOD, "messages": [{"role": "user", "content": content}], "max_tokens": 100}
    assert post(gateway, body).json()["choices"][0]["message"]["content"] == content


def test_stream_bytes_are_server_sent_events(gateway: RunningGateway) -> None:
    response = post(gateway, {**GOOD, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "server" not in response.headers
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_an_error_event_is_the_last_and_no_done_follows(gateway: RunningGateway) -> None:
    body = {
        **GOOD,
        "stream": True,
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "break:engine_step_failed"}],
    }
    response = post(gateway, body)
    events = response.text.rstrip("\n").split("\n\n")
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "engine_step_failed"
    assert "[DONE]" not in response.text


def test_a_client_that_leaves_while_it_sends_is_no_error_of_ours(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """The framework calls it an internal error: a log full of tracebacks that any client can write."""
    caplog.set_level("INFO")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: {gateway.headers()['authorization']}\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(head.encode() + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    gateway.wait_until(lambda: any(record.name == "gateway.access" for record in caplog.records))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_unknown_url_wrong_method_and_large_body(gateway: RunningGateway) -> None:
    """The framework's own errors are not in OpenAI's shape."""
    missing = gateway.http.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    method = gateway.http.get("/v1/chat/completions", headers=gateway.headers())
    assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
    assert "POST" in method.headers["allow"]
    large = post(gateway, raw=b" " * ((1 << 20) + 1))
    assert (large.status_code, error_of(large)["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Basic x"},
        {"authorization": "Bearer a b"},
    ],
)
@pytest.mark.parametrize("path", ["models", f"models/{MODEL}"])
def test_no_key_is_401(gateway: RunningGateway, headers: dict[str, str], path: str) -> None:
    response = gateway.http.get(f"/v1/{path}", headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


def test_the_key_is_checked_before_the_body(gateway: RunningGateway) -> None:
    """Without a key nobody learns from error messages how bodies are read, or makes the server read one."""
    assert gateway.http.post("/v1/chat/completions", content=b"{").status_code == 401
