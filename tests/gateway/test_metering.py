"""Limits and usage over HTTP: what clients see of them, and that everything is counted once."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest

from engine.protocol import Delta, Submit
from engine.settings import ServerSettings, Settings, TenantSettings, UsageSettings
from gateway.auth import hash_api_key
from tests.gateway.admin_client import AdminClient
from tests.gateway.conftest import SECRET, RunningGateway, new_keys, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine

pytestmark = pytest.mark.redis

QUESTION = "What does the second document say of the sea, and what of the mountains? "


def body(content: str = QUESTION, **options: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **options}


def ask(gateway: RunningGateway, content: str = QUESTION, tenant: str = "alice", **options: object) -> httpx.Response:
    headers = gateway.headers(tenant)
    return gateway.http.post("/v1/chat/completions", json=body(content, **options), headers=headers)


def complete(gateway: RunningGateway, prompts: list[str], **options: object) -> httpx.Response:
    given = {"model": MODEL, "prompt": prompts, "max_tokens": 8, **options}
    return gateway.http.post("/v1/completions", json=given, headers=gateway.headers())


def usage_of(gateway: RunningGateway, tenant: str = "alice", path: str = "/v1/usage", **query: object) -> Any:
    params = {"start_time": int(time.time()) - 600, "bucket_width": "1d", **query}
    response = gateway.http.get(path, params=params, headers=gateway.headers(tenant))
    assert response.status_code == 200, response.text
    return response.json()


def total(page: Any, name: str) -> int:
    return sum(result[name] for bucket in page["data"] for result in bucket["results"])


@pytest.fixture(params=["store", "local"])
def limited(request: pytest.FixtureRequest) -> Iterator[RunningGateway]:
    """One tenant a limit: of requests, of tokens, of tokens a day, of concurrency. With the store, and without."""
    keys = new_keys()
    limits: dict[str, dict[str, int]] = {
        "alice": {"requests_per_minute": 2},
        "bob": {"tokens_per_minute": 1000},
        "carol": {"tokens_per_day": 200, "tokens_per_minute": 10_000},
        "dave": {"concurrent_requests": 1},
    }
    tenants = [
        TenantSettings(id=name, key_hashes=(hash_api_key(SECRET, keys[name]),), **limit)  # type: ignore[arg-type]
        for name, limit in limits.items()
    ]
    url = request.getfixturevalue("empty_store_url") if request.param == "store" else None
    yield from run_gateway_thread(FakeEngine(), store_url=url, keys=keys, tenants=tenants)


# ---------------------------------------------------------------- limits


def test_remaining_requests_fall_and_the_next_is_429(limited: RunningGateway) -> None:
    remaining = [ask(limited).headers["x-ratelimit-remaining-requests"] for _ in range(2)]
    assert remaining == ["1", "0"]
    response = ask(limited)
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("rate_limit_exceeded", "requests", None)
    milliseconds = int(response.headers["retry-after-ms"])
    assert 0 < milliseconds <= 60_000
    assert int(response.headers["retry-after"]) == -(-milliseconds // 1000)
    assert response.headers["x-should-retry"] == "true"
    assert len(limited.engine.submitted) == 2


def test_remaining_tokens_fall_by_the_tokens_used(limited: RunningGateway) -> None:
    """ai-gateway#1754: the header never fell. litellm#24677: limits tripped early, since reservations stayed."""
    left = 1000
    for _ in range(3):
        response = ask(limited, tenant="bob", max_tokens=300)
        left -= response.json()["usage"]["total_tokens"]
        assert response.headers["x-ratelimit-limit-tokens"] == "1000"
        assert int(response.headers["x-ratelimit-remaining-tokens"]) == left
        assert response.headers["x-ratelimit-reset-tokens"].endswith("s")


def test_a_stream_counts_like_any_other(limited: RunningGateway) -> None:
    """litellm#41610: streams were never counted."""
    whole = ask(limited, tenant="bob").json()["usage"]["total_tokens"]
    streamed = ask(limited, tenant="bob", stream=True)
    assert "[DONE]" in streamed.text
    after = ask(limited, tenant="bob")
    assert int(after.headers["x-ratelimit-remaining-tokens"]) == 1000 - 3 * whole
    # What a stream shows at its start is what is left while it runs, its own reservation included.
    assert int(streamed.headers["x-ratelimit-remaining-tokens"]) == 1000 - 2 * whole


def test_a_used_up_day_is_insufficient_quota_and_not_worth_a_retry(limited: RunningGateway) -> None:
    response = ask(limited, tenant="carol", max_tokens=1)
    while response.status_code == 200:
        day = int(response.headers["x-ratelimit-remaining-tokens-day"])
        assert int(response.headers["x-ratelimit-remaining-tokens"]) > day
        response = ask(limited, tenant="carol", max_tokens=1)
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
    assert response.headers["x-should-retry"] == "false"
    client = openai.OpenAI(base_url=f"{limited.url}/v1", api_key=limited.keys["carol"], max_retries=3)
    before = len(limited.engine.submitted)
    with client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": QUESTION * 3}])
    assert len(limited.engine.submitted) == before


def test_one_after_the_other_is_never_too_many_at_once(limited: RunningGateway) -> None:
    """A release that is late refuses a client that waited for its answer's end."""
    for i in range(20):
        assert ask(limited, tenant="dave", stream=bool(i % 2)).status_code == 200


def test_too_many_at_once_and_a_client_that_leaves_makes_room(limited: RunningGateway) -> None:
    with limited.http.stream(
        "POST", "/v1/chat/completions", json=body("wait", stream=True), headers=limited.headers("dave")
    ):
        response = ask(limited, tenant="dave")
        assert (response.status_code, response.json()["error"]["type"]) == (429, "requests")
    limited.wait_until(lambda: ask(limited, tenant="dave").status_code == 200)


@pytest.mark.parametrize("question", ["fail:engine_overloaded", "fail:invalid_request", "crash"])
def test_a_request_that_the_engine_did_not_take_on_costs_nothing(limited: RunningGateway, question: str) -> None:
    for _ in range(3):
        assert ask(limited, question, tenant="alice").status_code in (400, 500, 503)
    limited.wait_until(lambda: ask(limited).status_code == 200)


def test_tenants_without_limits_have_no_such_headers(gateway: RunningGateway) -> None:
    assert not [name for name in ask(gateway).headers if name.startswith("x-ratelimit")]


def test_cached_tokens_count_at_their_factor() -> None:
    keys = new_keys()
    tenants = [
        TenantSettings(id="bob", key_hashes=(hash_api_key(SECRET, keys["bob"]),), tokens_per_minute=10_000),
    ]
    settings = Settings(usage=UsageSettings(cached_token_factor=0.5), server=ServerSettings())
    for gateway in run_gateway_thread(FakeEngine(), settings, keys=keys, tenants=tenants):
        left = 10_000
        for expect_hit in (False, True):
            response = ask(gateway, tenant="bob")
            usage = response.json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert bool(cached) == expect_hit
            left -= usage["total_tokens"] - cached // 2
            assert abs(int(response.headers["x-ratelimit-remaining-tokens"]) - left) <= 1


# ---------------------------------------------------------------- usage


def test_usage_is_the_sum_of_responses_over_a_random_run(stored_gateway: RunningGateway) -> None:
    """I9, with both routes, streams, choices, prompts and failures. litellm#36168: streams lost their cached tokens."""
    chance = random.Random(7)
    expected: Counter[str] = Counter()
    for _ in range(60):
        content = QUESTION * chance.randint(1, 3) + chance.choice("abc")
        stream, n = chance.random() < 0.5, chance.randint(1, 3)
        options: dict[str, Any] = {"n": n}
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        if chance.random() < 0.15:
            assert ask(stored_gateway, "fail:engine_overloaded").status_code == 503
        if chance.random() < 0.3:
            response = complete(stored_gateway, [content, "another"][: chance.randint(1, 2)], **options)
        else:
            response = ask(stored_gateway, content, **options)
        usage = response.json()["usage"] if not stream else _stream_usage(response.text)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        expected.update(
            input_tokens=usage["prompt_tokens"],
            input_cached_tokens=cached,
            input_uncached_tokens=usage["prompt_tokens"] - cached,
            output_tokens=usage["completion_tokens"],
            num_model_requests=1,
        )
    page = usage_of(stored_gateway)
    assert {name: total(page, name) for name in expected} == dict(expected)
    (result,) = [result for bucket in page["data"] for result in bucket["results"]]
    assert sum(result["input_tokens_by_class"].values()) == result["input_tokens"]
    assert expected["input_cached_tokens"] > 0


def _stream_usage(text: str) -> Any:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return json.loads(events[-2])["usage"]


def test_a_client_that_leaves_is_counted_once_with_what_it_got(stored_gateway: RunningGateway) -> None:
    """litellm#14457: a disconnect lost the usage row."""
    prompt = 0
    for _ in range(3):
        with stored_gateway.http.stream(
            "POST", "/v1/chat/completions", json=body("wait", stream=True), headers=stored_gateway.headers()
        ) as response:
            prompt = int(response.headers["x-radixgate-prompt-tokens"])
    stored_gateway.wait_until(lambda: total(usage_of(stored_gateway), "num_aborted") == 3)
    page = usage_of(stored_gateway)
    assert total(page, "num_model_requests") == 3
    assert total(page, "input_tokens") == 3 * prompt
    assert total(page, "output_tokens") == 0


def test_a_client_that_leaves_before_the_first_token_is_counted_too(stored_gateway: RunningGateway) -> None:
    payload = json.dumps(body("silence")).encode()
    key = stored_gateway.keys["alice"]
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", stored_gateway.port)) as client:
        client.sendall(head.encode() + payload)
        stored_gateway.wait_until(lambda: len(stored_gateway.engine.submitted) == 1)
    stored_gateway.wait_until(lambda: total(usage_of(stored_gateway), "num_aborted") == 1)
    assert total(usage_of(stored_gateway), "num_model_requests") == 1


def test_a_retry_of_an_abandoned_request_is_the_same_request(stored_gateway: RunningGateway) -> None:
    """The SDK gives up waiting, and asks again: one request for its user, twice the tokens for the device."""
    content, headers = body("wait", stream=True), stored_gateway.headers()
    with stored_gateway.http.stream("POST", "/v1/chat/completions", json=content, headers=headers):
        pass
    stored_gateway.wait_until(lambda: total(usage_of(stored_gateway), "num_aborted") == 1)
    retry = {**headers, "x-stainless-retry-count": "1"}
    with stored_gateway.http.stream("POST", "/v1/chat/completions", json=content, headers=retry) as response:
        prompt = int(response.headers["x-radixgate-prompt-tokens"])
    stored_gateway.wait_until(lambda: total(usage_of(stored_gateway), "num_aborted") == 2)
    page = usage_of(stored_gateway)
    assert (total(page, "num_model_requests"), total(page, "num_retries")) == (1, 1)
    assert total(page, "input_tokens") == 2 * prompt


def test_a_retry_after_a_refusal_is_a_request(stored_gateway: RunningGateway) -> None:
    """What was refused was no request: the retry that gets through must be counted, or nobody is."""
    assert ask(stored_gateway, "fail:engine_overloaded").status_code == 503
    headers = {**stored_gateway.headers(), "x-stainless-retry-count": "1"}
    response = stored_gateway.http.post("/v1/chat/completions", json=body(), headers=headers)
    assert response.status_code == 200
    page = usage_of(stored_gateway)
    assert (total(page, "num_model_requests"), total(page, "num_retries")) == (1, 0)


def test_an_engine_failure_in_mid_stream_is_counted_as_failed(stored_gateway: RunningGateway) -> None:
    response = ask(stored_gateway, "break:engine_step_failed", stream=True)
    assert "engine_step_failed" in response.text
    page = usage_of(stored_gateway)
    assert [total(page, name) for name in ("num_model_requests", "num_failed", "output_tokens")] == [1, 1, 3]


class FailsBehindTheFirst(FakeEngine):
    """What is to fail does so once another prompt has its first token."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = asyncio.Event()

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        if self.question(submit).startswith("fail:"):
            await self._begun.wait()
        async for delta in super().generate(submit):
            yield delta
            self._begun.set()


def test_a_prompt_that_was_computed_is_counted_though_the_next_one_failed(empty_store_url: str) -> None:
    """I9: its tokens were in the metrics, and in no usage, since the answer had not begun."""
    for gateway in run_gateway_thread(FailsBehindTheFirst(), store_url=empty_store_url):
        assert complete(gateway, [QUESTION, "fail:engine_step_failed"]).status_code == 503
        page = usage_of(gateway)
        names = ("num_model_requests", "num_failed", "input_tokens")
        assert [total(page, name) for name in names] == [1, 1, len(QUESTION)]


def test_usage_by_tenant_key_and_model(stored_gateway: RunningGateway) -> None:
    admin = AdminClient(stored_gateway)
    second = admin.new_key("alice", "alice-2")
    for tenant in ("alice", "alice-2", "alice-2", "bob"):
        assert ask(stored_gateway, tenant=tenant).status_code == 200
    grouped = usage_of(
        stored_gateway, "root", "/admin/v1/usage", **{"group_by[]": ["project_id", "api_key_id", "model"]}
    )
    found = {
        (result["project_id"], result["api_key_id"] == second, result["model"]): result["num_model_requests"]
        for bucket in grouped["data"]
        for result in bucket["results"]
    }
    assert found == {("alice", True, MODEL): 2, ("alice", False, MODEL): 1, ("bob", False, MODEL): 1}
    only = usage_of(stored_gateway, "root", "/admin/v1/usage", project_ids="bob")
    assert total(only, "num_model_requests") == 1
    by_key = usage_of(stored_gateway, "alice", api_key_ids=second)
    assert total(by_key, "num_model_requests") == 2


def test_a_tenant_sees_its_own_usage_only(stored_gateway: RunningGateway) -> None:
    for _ in range(2):
        ask(stored_gateway, tenant="bob")
    ask(stored_gateway, tenant="alice")
    for key, path in (("alice", "/v1/usage"), ("alice-admin", "/admin/v1/usage"), ("root", "/v1/usage")):
        expected = 0 if key == "root" else 1
        assert total(usage_of(stored_gateway, key, path), "num_model_requests") == expected
        assert total(usage_of(stored_gateway, key, path, project_ids="bob"), "num_model_requests") == 0
    # The positive half: the operator sees both.
    assert total(usage_of(stored_gateway, "root", "/admin/v1/usage"), "num_model_requests") == 3


def test_saved_seconds_and_money_come_with_their_price(empty_store_url: str) -> None:
    settings = Settings(
        usage=UsageSettings(price_per_million_tokens=2.0, price_per_million_cached_tokens=0.5, currency="EUR")
    )
    for gateway in run_gateway_thread(FakeEngine(), settings, store_url=empty_store_url):
        assert [ask(gateway).status_code for _ in range(2)] == [200, 200]
        page = usage_of(gateway)
        cached = total(page, "input_cached_tokens")
        assert cached > 0
        assert page["price"] == {"per_million_tokens": 2.0, "per_million_cached_tokens": 0.5, "currency": "EUR"}
        assert total(page, "money_saved") == pytest.approx(cached * 1.5e-6)
        assert total(page, "prefill_seconds_saved") == pytest.approx(cached / gateway.engine.prefill_speed)


def test_buckets_page_and_add_up(stored_gateway: RunningGateway) -> None:
    ask(stored_gateway)
    start = int(time.time()) // 60 * 60 - 300
    first = usage_of(stored_gateway, bucket_width="1m", start_time=start, limit=3)
    assert [bucket["start_time"] for bucket in first["data"]] == [start, start + 60, start + 120]
    assert first["has_more"] is True
    pages = [first]
    while pages[-1]["has_more"]:
        page = pages[-1]["next_page"]
        pages.append(usage_of(stored_gateway, bucket_width="1m", start_time=start, limit=3, page=page))
    assert sum(total(page, "num_model_requests") for page in pages) == 1


@pytest.mark.parametrize(
    "query",
    [
        {"start_time": ""},
        {"start_time": "-1"},
        {"start_time": "99999999999"},
        {"bucket_width": "1w"},
        {"group_by": "user_id"},
        {"limit": "0"},
        {"limit": "9" * 5000},
        {"limit": "100000"},
        {"colour": "red"},
        {"page": "x"},
    ],
)
def test_a_bad_usage_query_is_400(stored_gateway: RunningGateway, query: dict[str, str]) -> None:
    params = {"start_time": "1700000000", **query}
    response = stored_gateway.http.get("/v1/usage", params=params, headers=stored_gateway.headers())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(query))
