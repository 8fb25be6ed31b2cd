"""The cache report over HTTP: the account laid along the prompt, and hints for the common causes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from retrieval.lint import lint
from tests.gateway.chat_templates import CHATML, THINKING
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine

DOCUMENTS = [
    {"id": "alps", "text": "The Alps are high, and they are cold in winter. " * 3},
    {"id": "sea", "text": "The sea is deep, and it is salt all the year round. " * 3},
]
SYSTEM = "You are a careful assistant that answers from the documents only.\nTools: search\nTools: weather\n"


VOLATILE = [
    ("2026-11-29 08:15", "date and time", "timestamp_in_system_prompt"),
    ("Today is 2026-11-29", "today's date", "timestamp_in_system_prompt"),
    ("1767225600", "Unix time", "timestamp_in_system_prompt"),
    ("session id: 8c1f22ab-x", "id of a request or session", "volatile_system_prompt"),
    ("ann@example.org", "name or address of a user", "volatile_system_prompt"),
    ("{{user_name}}", "unfilled template", "volatile_system_prompt"),
]


def report(
    gateway: RunningGateway,
    *,
    system: str = SYSTEM,
    documents: list[dict[str, str]] = DOCUMENTS,
    tenant: str = "alice",
    **options: object,
) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "How high are they?"}]
    body = {"model": MODEL, "messages": messages, "documents": documents, "cache_report": True, "max_tokens": 3}
    response = gateway.http.post("/v1/chat/completions", json={**body, **options}, headers=gateway.headers(tenant))
    assert response.status_code == 200, response.text
    return response.json()["cache_report"]


def codes(found: Any) -> list[str]:
    return [hint["code"] for hint in found["hints"]]


def test_every_token_has_one_class_and_the_divergence_is_where_it_is(gateway: RunningGateway) -> None:
    """vllm#54607: zero hits look the same whatever the cause."""
    report(gateway)
    found = report(gateway, documents=[DOCUMENTS[0], {"id": "sea", "text": "The sea is shallow. " * 6}])
    segments = found["segments"]
    assert sum(segment["tokens"] for segment in segments) == found["prompt_tokens"]
    assert all(sum(segment["classes"].values()) == segment["tokens"] for segment in segments)
    assert sum(segment["cached_tokens"] for segment in segments) == found["cached_tokens"]
    assert found["first_divergent_token"] == found["cached_tokens"] > 0
    by_document = {segment["document_id"]: segment for segment in segments if segment["document_id"]}
    assert by_document["alps"]["first_divergent_token"] is None
    divergent = by_document["sea"]["first_divergent_token"]
    assert 0 <= divergent <= len("[sea]\nThe sea is ")
    assert codes(found) == ["document_changed"]


def test_the_report_comes_only_when_asked_for(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    headers = gateway.headers()
    plain = gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    assert "cache_report" not in plain.json()
    asked = gateway.http.post("/v1/chat/completions", json=body, headers={**headers, "x-radixgate-cache-report": "1"})
    assert asked.json()["cache_report"]["prompt_tokens"] == asked.json()["usage"]["prompt_tokens"]
    asked_body = {**body, "stream": True, "cache_report": True}
    streamed = gateway.http.post("/v1/chat/completions", json=asked_body, headers=headers)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert Counter("cache_report" in chunk for chunk in chunks)[True] == 1
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (
            {"system": f"Now: 2026-11-29T08:15:00.\n{SYSTEM}"},
            {"system": f"Now: 2026-11-29T08:15:07.\n{SYSTEM}"},
            "timestamp_in_system_prompt",
        ),
        (
            {"system": "A: be kind\nTools: search\nTools: weather"},
            {"system": "A: be kind\nTools: weather\nTools: search"},
            "reordered_system_prompt",
        ),
        (
            {"system": f"It is 8:15 in Vienna.\n{SYSTEM}"},
            {"system": f"It is 8:16 in Vienna.\n{SYSTEM}"},
            "timestamp_in_system_prompt",
        ),
        (
            {"system": f"The user is named Alice.\n{SYSTEM}"},
            {"system": f"The user is named Robert.\n{SYSTEM}"},
            "volatile_system_prompt",
        ),
        (
            {"system": f"Request 123e4567-e89b-12d3-a456-426614174000.\n{SYSTEM}"},
            {"system": f"Request 123e4567-e89b-12d3-a456-426614174001.\n{SYSTEM}"},
            "volatile_system_prompt",
        ),
        (
            {"system": 'Tools: [{"name": "search", "needs": "a query"}, {"name": "weather", "needs": "a place"}]'},
            {"system": 'Tools: [{"name": "weather", "needs": "a place"}, {"name": "search", "needs": "a query"}]'},
            "reordered_system_prompt",
        ),
        (
            {},
            {"system": "Something else entirely, and longer than a single block."},
            "system_prompt_changed",
        ),
        ({}, {"documents": DOCUMENTS[::-1]}, "documents_reordered"),
        ({"cache_salt": "one"}, {"cache_salt": "two"}, "other_scope"),
        ({}, {"use_cache": False}, "caching_disabled"),
    ],
)
def test_common_causes_are_named(
    gateway: RunningGateway, first: dict[str, Any], second: dict[str, Any], code: str
) -> None:
    """open-chat-studio#3625: a time stamp at the head of the system prompt: 0% for ever, and nothing said so."""
    report(gateway, **first)
    assert code in codes(report(gateway, **second))


@pytest.mark.parametrize(("template", "expected"), [(THINKING, True), (CHATML, False)])
def test_a_template_that_drops_an_answers_reasoning_is_named(template: str, expected: bool) -> None:
    """Rapid-MLX#214: it broke the next turn's prefix, and nothing said so. One that keeps it breaks nothing."""
    turns = [
        {"role": "user", "content": "What is two and two, and why is it so? " * 2},
        {"role": "assistant", "content": "<think>" + "Let me see. " * 9 + "</think>It is four."},
        {"role": "user", "content": "And three and three? " * 3 + "Now?"},
    ]
    for gateway in run_gateway_thread(FakeEngine(chat_template=template)):
        found = report(gateway, messages=turns, documents=[])
        assert ("reasoning_in_history" in codes(found)) == expected
        assert "reasoning_in_history" not in codes(report(gateway, messages=turns, documents=[]))  # all of it is cached


@pytest.mark.parametrize(("stamp", "kind", "code"), VOLATILE)
def test_what_lint_finds_the_report_finds(gateway: RunningGateway, stamp: str, kind: str, code: str) -> None:
    """One detector: what the command points at before a prompt is sent, a first request's report points at, too."""
    system = f"Context: {stamp}. {SYSTEM}"
    assert lint([system, "?"])[0].kind == kind
    found = report(gateway, system=system, tenant="bob")
    assert codes(found) == [code]
    assert stamp in found["hints"][0]["message"]


def test_nothing_is_hinted_where_everything_was_cached(gateway: RunningGateway) -> None:
    report(gateway)
    assert codes(report(gateway)) == []


def test_a_hint_never_comes_from_another_tenants_prompts(gateway: RunningGateway) -> None:
    """That somebody else asked the same, changed or reordered, is nothing this tenant may learn."""
    fresh = report(gateway, tenant="bob")
    for tenant in ("alice", "carol"):
        report(gateway, tenant=tenant, documents=DOCUMENTS[::-1])
        report(gateway, tenant=tenant, system="Today is 2026-11-29\n" + SYSTEM)
    dave = report(gateway, tenant="dave", cache_salt="x")
    assert codes(fresh) == codes(dave) == []
