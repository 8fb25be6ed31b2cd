"""A query that the model rewrites: under its tenant's limits, in its usage, told to its client, ended with it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import msgspec
import pytest

from engine.protocol import Submit
from engine.settings import TenantSettings
from gateway.served_model import num_tokens
from tests.gateway.conftest import four_tenants, new_keys
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.retrieval_gateway import SETTINGS, RetrievalGateway, flush, running
from tests.gateway.test_metering import total, usage_of
from tests.retrieval.hashing_embedder import HashingEmbedder

pytestmark = pytest.mark.redis

TEXT = "Vienna is the capital of Austria. The river Danube flows through Vienna to the Black Sea."
REWRITTEN = "Danube in Vienna"
LIMITED: dict[str, dict[str, int]] = {
    "alice": {"concurrent_requests": 1, "requests_per_minute": 1000, "tokens_per_minute": 1_000_000},
    "bob": {"requests_per_minute": 2},
    "carol": {"tokens_per_minute": 800},
}


class RewritingEngine(FakeEngine):
    """To a prompt that asks for a rewriting it answers `rewriting`, or does what that says."""

    rewriting = f"{REWRITTEN}\nand more that nobody wants"

    def question(self, submit: Submit) -> str:
        return self.rewriting if is_rewriting(submit) else super().question(submit)


def is_rewriting(submit: Submit) -> bool:
    return submit.request_id.startswith("rewrite-")


class Rewriting:
    """A gateway with retrieval, limits, and a vector store for each tenant."""

    def __init__(self, retrieval: RetrievalGateway) -> None:
        self.gateway = retrieval.gateway
        self.engine = cast("RewritingEngine", retrieval.engine)
        self.stores: dict[str, str] = {}
        for tenant in ("alice", "bob", "carol", "dave"):
            with retrieval.client(tenant) as client:
                self.stores[tenant], _ = retrieval.store_with(client, {"vienna.txt": TEXT})

    def chat_body(self, tenant: str, question: str = "And the river?", **options: Any) -> dict[str, Any]:
        search = {"vector_store_ids": [self.stores[tenant]], "rewrite_query": True, **options.pop("retrieval", {})}
        messages = [{"role": "user", "content": question}]
        return {"model": MODEL, "messages": messages, "max_tokens": 8, "retrieval": search, **options}

    def chat(self, tenant: str = "alice", question: str = "And the river?", **options: Any) -> httpx.Response:
        body = self.chat_body(tenant, question, **options)
        return self.gateway.http.post("/v1/chat/completions", json=body, headers=self.gateway.headers(tenant))

    def search(self, tenant: str = "alice", query: Any = "And the river?", **options: Any) -> httpx.Response:
        body = {"query": query, "rewrite_query": True, **options}
        path = f"/v1/vector_stores/{self.stores[tenant]}/search"
        return self.gateway.http.post(path, json=body, headers=self.gateway.headers(tenant))

    def used(self, tenant: str, name: str) -> int:
        return total(usage_of(self.gateway, tenant), name)

    @property
    def rewritings(self) -> list[Submit]:
        return [submit for submit in self.engine.submitted if is_rewriting(submit)]


@contextmanager
def rewriting_gateway(store_url: str, **changes: dict[str, object]) -> Iterator[Rewriting]:
    """`changes`: of the tenants' settings."""
    flush(store_url)
    keys = new_keys()
    tenants = [
        tenant_with(each, {**LIMITED.get(each.id, {}), **changes.get(each.id, {})}) for each in four_tenants(keys)
    ]
    embedder = HashingEmbedder(has_reranker=False)
    with running(
        store_url, SETTINGS, engine=RewritingEngine(), embedder=embedder, keys=keys, tenants=tenants
    ) as retrieval:
        yield Rewriting(retrieval)


def tenant_with(tenant: TenantSettings, changes: dict[str, object]) -> TenantSettings:
    return msgspec.structs.replace(tenant, **changes)


@pytest.fixture
def rewriting(store_url: str) -> Iterator[Rewriting]:
    with rewriting_gateway(store_url) as found:
        yield found


def last_event(text: str) -> Any:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return json.loads(events[-2])


# ---------------------------------------------------------------- told, and counted


def test_openais_fields_stay_the_answers_and_the_rewriting_stands_beside_them(rewriting: Rewriting) -> None:
    """Added to `prompt_tokens`, it would be tokens of a prompt that the client never sent."""
    response = rewriting.chat()
    usage, (first, second) = response.json()["usage"], rewriting.engine.submitted
    assert response.json()["retrieval"]["query"] == REWRITTEN
    assert usage["prompt_tokens"] == num_tokens(second.segments)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["query_rewrite"] == {
        "prompt_tokens": num_tokens(first.segments),
        "completion_tokens": len(REWRITTEN),
        "total_tokens": num_tokens(first.segments) + len(REWRITTEN),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    shown = f"prompt={num_tokens(first.segments)}, cached=0, output={len(REWRITTEN)}"
    assert response.headers["x-radixgate-query-rewrite"] == shown
    assert int(response.headers["x-radixgate-prompt-tokens"]) == usage["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_the_answer_and_the_rewriting_and_one_request(rewriting: Rewriting, stream: bool) -> None:
    """I9. With several choices the query is rewritten once."""
    options: dict[str, Any] = {"n": 2}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    expected = dict.fromkeys(("input_tokens", "input_cached_tokens", "output_tokens", "num_model_requests"), 0)
    for _ in range(3):
        response = rewriting.chat(**options)
        usage = last_event(response.text)["usage"] if stream else response.json()["usage"]
        for part in (usage, usage["query_rewrite"]):
            expected["input_tokens"] += part["prompt_tokens"]
            expected["input_cached_tokens"] += part["prompt_tokens_details"]["cached_tokens"]
            expected["output_tokens"] += part["completion_tokens"]
        expected["num_model_requests"] += 1
    assert len(rewriting.rewritings) == 3
    assert {name: rewriting.used("alice", name) for name in expected} == expected
    assert expected["input_cached_tokens"] > 0


def test_a_search_tells_what_its_rewriting_used(rewriting: Rewriting) -> None:
    response = rewriting.search(query=["And the river?", "And the sea?"])
    usage, prompts = response.json()["usage"], [num_tokens(submit.segments) for submit in rewriting.rewritings]
    assert response.json()["search_query"] == [REWRITTEN] * 2
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(prompts), 2 * len(REWRITTEN))
    assert rewriting.used("alice", "input_tokens") == sum(prompts)
    assert rewriting.used("alice", "output_tokens") == 2 * len(REWRITTEN)
    assert rewriting.used("alice", "num_model_requests") == 1
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == 1_000_000 - usage["total_tokens"]


def test_who_wants_no_rewriting_is_told_of_none_and_a_search_is_then_no_request(rewriting: Rewriting) -> None:
    answer = rewriting.chat(retrieval={"rewrite_query": False})
    search = rewriting.search(rewrite_query=False)
    assert "query_rewrite" not in answer.json()["usage"]
    assert "usage" not in search.json()
    assert not {"x-radixgate-query-rewrite"} & {*answer.headers, *search.headers}
    assert not rewriting.rewritings
    assert rewriting.used("alice", "num_model_requests") == 1


def test_neither_rewriting_leaves_anything_for_a_tenant_that_opted_out(store_url: str) -> None:
    """The positive half: of the others' both do."""
    with rewriting_gateway(store_url, alice={"no_store": True}) as rewriting:
        for tenant in ("alice", "dave"):
            rewriting.search(tenant)
            rewriting.chat(tenant)
            rewriting.chat(tenant, use_cache=False)
        found = [(submit.tenant_id, submit.use_cache) for submit in rewriting.rewritings]
    assert found == [("alice", False)] * 3 + [("dave", True), ("dave", True), ("dave", False)]


# ---------------------------------------------------------------- limits


def test_one_request_at_a_time_can_rewrite_its_query(rewriting: Rewriting) -> None:
    """Admitted by itself, the rewriting would take the only place from the answer, or lose it to another request."""
    for i in range(10):
        assert rewriting.chat("alice", stream=bool(i % 2)).status_code == 200
        assert rewriting.search("alice").status_code == 200


def test_a_rewriting_runs_in_its_tenants_only_place(rewriting: Rewriting) -> None:
    rewriting.engine.rewriting = "wait"
    with leaving(rewriting, "/v1/chat/completions", rewriting.chat_body("alice")):
        rewriting.gateway.wait_until(lambda: len(rewriting.rewritings) == 1)
        refused = rewriting.chat("alice", retrieval={"rewrite_query": False})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "requests")
        assert rewriting.search("alice").status_code == 429
    rewriting.gateway.wait_until(lambda: not rewriting.engine.running)
    rewriting.gateway.wait_until(lambda: rewriting.chat("alice", retrieval={"rewrite_query": False}).status_code == 200)


def test_it_is_one_request_of_the_minute_and_a_used_up_minute_rewrites_nothing(rewriting: Rewriting) -> None:
    assert rewriting.chat("bob").headers["x-ratelimit-remaining-requests"] == "1"
    assert rewriting.search("bob").headers["x-ratelimit-remaining-requests"] == "0"
    before = len(rewriting.engine.submitted)
    for refused in (rewriting.search("bob"), rewriting.chat("bob")):
        assert refused.status_code == 429
        assert int(refused.headers["retry-after-ms"]) > 0
        assert "x-radixgate-query-rewrite" not in refused.headers
    assert len(rewriting.engine.submitted) == before
    # The positive half: without a rewriting, a search asks nothing of the model.
    assert rewriting.search("bob", rewrite_query=False).status_code == 200


def test_a_request_larger_than_its_window_is_let_in_behind_its_own_rewriting(rewriting: Rewriting) -> None:
    """Without `max_tokens` all of the context is reserved: as a second request it would be refused for ever."""
    response = rewriting.chat("carol", max_tokens=None)
    assert response.status_code == 200
    usage = response.json()["usage"]
    charged = usage["total_tokens"] + usage["query_rewrite"]["total_tokens"]
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == 800 - charged


def test_an_answer_that_others_leave_no_room_for_is_429_and_its_rewriting_is_counted(rewriting: Rewriting) -> None:
    """It was computed: the error's header tells of it, since its body cannot."""
    rewriting.chat("carol", "x", max_tokens=1, retrieval={"rewrite_query": False})
    before = rewriting.used("carol", "input_tokens")
    refused = rewriting.chat("carol", max_tokens=700)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
    (prompt,) = [num_tokens(submit.segments) for submit in rewriting.rewritings]
    assert refused.headers["x-radixgate-query-rewrite"] == f"prompt={prompt}, cached=0, output={len(REWRITTEN)}"
    assert rewriting.used("carol", "input_tokens") == before + prompt
    assert rewriting.used("carol", "num_model_requests") == 2
    assert rewriting.used("carol", "num_failed") == 1


# ---------------------------------------------------------------- ends


def test_nothing_is_asked_of_the_model_for_a_search_that_cannot_be_made(rewriting: Rewriting) -> None:
    rerank: dict[str, Any] = {"ranking_options": {"ranker": "rerank"}}
    assert rewriting.search(**rerank).status_code == 400
    assert rewriting.chat(retrieval=rerank).status_code == 400
    rewriting.stores["alice"] = rewriting.stores["bob"]
    assert rewriting.search().status_code == rewriting.chat().status_code == 404
    assert not rewriting.engine.submitted


@pytest.mark.parametrize("path", ["chat", "search"])
def test_a_rewriting_that_the_engine_refuses_is_an_error_and_costs_nothing(rewriting: Rewriting, path: str) -> None:
    """Not a search for the question as it stands: its results would pass for those of a rewritten one."""
    rewriting.engine.rewriting = "fail:engine_overloaded"
    for _ in range(3):
        response = getattr(rewriting, path)("bob")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_overloaded")
    assert rewriting.used("bob", "num_model_requests") == 0
    rewriting.engine.rewriting = REWRITTEN
    rewriting.gateway.wait_until(lambda: getattr(rewriting, path)("bob").status_code == 200)


@pytest.mark.parametrize("path", ["chat", "search"])
def test_a_rewriting_that_the_engine_loses_halfway_is_counted_as_failed(rewriting: Rewriting, path: str) -> None:
    rewriting.engine.rewriting = "break:engine_step_failed"
    response = getattr(rewriting, path)()
    assert response.status_code == 503
    prompt = num_tokens(rewriting.rewritings[0].segments)
    assert response.headers["x-radixgate-query-rewrite"] == f"prompt={prompt}, cached=0, output=3"
    names = ("num_model_requests", "num_failed", "input_tokens", "output_tokens")
    assert [rewriting.used("alice", name) for name in names] == [1, 1, prompt, 3]


@contextmanager
def leaving(rewriting: Rewriting, path: str, body: object, tenant: str = "alice", retry: int = 0) -> Iterator[None]:
    """A client that has asked, and leaves with the block."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {rewriting.gateway.keys[tenant]}\r\n"
        f"x-stainless-retry-count: {retry}\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", rewriting.gateway.port)) as client:
        client.sendall(head.encode() + payload)
        yield


@pytest.mark.parametrize("command", ["silence", "wait"])
@pytest.mark.parametrize("path", ["chat", "search"])
def test_a_client_that_leaves_ends_the_rewriting(rewriting: Rewriting, path: str, command: str) -> None:
    """A handler that nobody cancels would let it run to its end; and once counted, its retry is no second request."""
    rewriting.engine.rewriting = command
    store = rewriting.stores["alice"]
    where, body = (
        ("/v1/chat/completions", rewriting.chat_body("alice"))
        if path == "chat"
        else (f"/v1/vector_stores/{store}/search", {"query": "And the river?", "rewrite_query": True})
    )
    for count in (1, 2):
        with leaving(rewriting, where, body, retry=count - 1):
            rewriting.gateway.wait_until(lambda: len(rewriting.rewritings) == count)  # noqa: B023
        rewriting.gateway.wait_until(lambda: len(rewriting.engine.aborted) == count)  # noqa: B023
        rewriting.gateway.wait_until(lambda: rewriting.used("alice", "num_aborted") == count)  # noqa: B023
    assert (rewriting.used("alice", "num_model_requests"), rewriting.used("alice", "num_retries")) == (1, 1)
    assert rewriting.engine.submitted == rewriting.rewritings
    prompts = sum(num_tokens(submit.segments) for submit in rewriting.rewritings)
    assert rewriting.used("alice", "input_tokens") == (prompts if command == "wait" else 0)
    rewriting.gateway.wait_until(lambda: not rewriting.gateway.drain.num_active)


def test_a_drain_waits_for_a_request_from_its_rewriting_on_and_ends_it_at_the_deadline(rewriting: Rewriting) -> None:
    rewriting.engine.rewriting = "wait"
    gateway = rewriting.gateway
    body = json.dumps(rewriting.chat_body("alice")).encode()
    request = httpx.Request(
        "POST",
        f"{gateway.url}/v1/chat/completions",
        content=body,
        headers={**gateway.headers("alice"), "content-type": "application/json"},
    )

    async def ask_and_drain() -> tuple[httpx.Response, int]:
        async with httpx.AsyncClient(timeout=30) as client:
            asking = asyncio.create_task(client.send(request))
            while len(rewriting.rewritings) < 1:  # noqa: ASYNC110  the gateway runs on a loop of its own
                await asyncio.sleep(0.01)
            draining = asyncio.run_coroutine_threadsafe(gateway.drain.drain(0), gateway.loop)
            return await asking, await asyncio.wrap_future(draining)

    response, num_failed = asyncio.run(ask_and_drain())
    assert (response.status_code, response.json()["error"]["code"], num_failed) == (503, "shutting_down", 1)
    assert len(rewriting.engine.aborted) == 1
