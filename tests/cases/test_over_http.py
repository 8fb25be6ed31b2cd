"""Reported faults that show only at the surface, through the whole stack over the fake device."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket

import httpx
import openai
import pytest

from tests.cases.conftest import BLOCK_SIZE, MODEL, Stack

QUESTION = "What does the third paragraph of the second document say about blocks? " * 4


def body(content: str = QUESTION, **options: object) -> dict[str, object]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **options}


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def ask(stack: Stack, tenant: str = "alice", content: str = QUESTION, **options: object) -> httpx.Response:
    return stack.gateway.http.post(
        "/v1/chat/completions", json=body(content, **options), headers=stack.gateway.headers(tenant)
    )


def test_cached_tokens_is_always_an_integer_in_streams_too(stack: Stack) -> None:
    """vllm#44377, #16162: null or absent when zero, missing in streams."""
    for expect_hit in (False, True):
        usage = ask(stack).json()["usage"]
        streamed = ask(stack, stream=True, stream_options={"include_usage": True})
        last = json.loads(events(streamed.text)[-2])
        assert events(streamed.text)[-1] == "[DONE]"
        for shown in (usage, last["usage"]):
            cached = shown["prompt_tokens_details"]["cached_tokens"]
            assert type(cached) is int
            assert 0 <= cached < shown["prompt_tokens"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == expect_hit
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_same_messages_hit_although_bodies_differ(stack: Stack) -> None:
    """production-stack#1045, #1062: bodies were hashed before the chat template was applied: never a hit."""
    first = ask(stack)
    again = stack.gateway.http.post(
        "/v1/chat/completions",
        content=json.dumps(body([{"type": "text", "text": QUESTION}], seed=5, top_p=0.5)),  # type: ignore[arg-type]
        headers={**stack.gateway.headers(), "content-type": "application/json"},
    )
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usage = again.json()["usage"]
    # Everything up to the last full block: the rest of the prompt never filled one.
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE


def test_another_tenant_repeating_a_prompt_gets_nothing_of_it_and_the_first_gets_a_hit(stack: Stack) -> None:
    cached = [
        ask(stack, tenant).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for tenant in ("alice", "bob")
    ]
    assert cached == [0, 0]
    assert ask(stack, "alice").json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_text_completions_of_two_tenants_share_nothing_and_of_one_all_but_the_last_token(stack: Stack) -> None:
    cached: list[int] = []
    for tenant in ("alice", "bob", "alice"):
        given = {"model": MODEL, "prompt": QUESTION, "max_tokens": 1, "n": 2}
        answer = stack.gateway.http.post("/v1/completions", json=given, headers=stack.gateway.headers(tenant)).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, len(QUESTION) // BLOCK_SIZE * BLOCK_SIZE]


def test_a_salt_of_the_victim_opens_nothing(stack: Stack) -> None:
    """vllm#53347: the salt was the caller's, so an attacker sent the victim's."""
    ask(stack, "alice", cache_salt="alice-salt")
    stolen = ask(stack, "bob", cache_salt="alice-salt").json()["usage"]
    own = ask(stack, "alice", cache_salt="alice-salt").json()["usage"]
    assert stolen["prompt_tokens_details"]["cached_tokens"] == 0
    assert own["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_prompt_that_is_too_long_is_a_400_with_both_numbers_and_is_not_truncated(stack: Stack) -> None:
    """vllm#24885: 500. ollama#2208: silently truncated."""
    answer = ask(stack, content="x" * 5000)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "4096" in error["message"]
    assert any(int(word) > 5000 for word in error["message"].replace(",", "").split() if word.isdigit())
    assert stack.wait_idle().num_prompt_tokens == 0


def test_an_error_in_mid_stream_is_an_event_and_the_stream_ends_without_done(stack: Stack) -> None:
    """llama.cpp#16104: it became an empty message."""
    with stack.gateway.http.stream(
        "POST", "/v1/chat/completions", json=body(stream=True, max_tokens=3000), headers=stack.gateway.headers()
    ) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if '"content"' in line)
        stack.runner.fail_next = RuntimeError("secret detail")
        rest = events("\n".join(lines))
    error = json.loads(rest[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "engine_step_failed"
    assert "secret" not in error["message"]
    assert "[DONE]" not in rest
    assert ask(stack).status_code == 200


def test_the_sdk_raises_what_went_wrong_in_mid_stream(stack: Stack) -> None:
    stream = stack.gateway.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=3000, stream=True
    )
    next(iter(stream))
    stack.runner.fail_next = RuntimeError("boom")
    with pytest.raises(openai.APIError, match="step"):
        list(stream)


def test_readiness_is_a_real_decode_step(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#36960: health said 200 while the device was dead."""
    assert stack.gateway.http.get("/readyz").status_code == 200

    def dead(output: object) -> list[int | None]:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(stack.runner, "launch", dead)
    stack.gateway.wait_until(lambda: stack.gateway.http.get("/readyz").status_code == 503)
    assert stack.gateway.http.get("/livez").status_code == 200
    monkeypatch.undo()
    stack.gateway.wait_until(lambda: stack.gateway.http.get("/readyz").status_code == 200)


def test_streams_and_whole_answers_have_the_same_usage_field_by_field(stack: Stack) -> None:
    """litellm#36168: streams lost cached tokens."""
    ask(stack)
    whole = ask(stack).json()
    streamed = ask(stack, stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(event) for event in events(streamed.text)[:-1]]
    assert chunks[-1]["usage"] == whole["usage"]
    text = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("caching", [True, False])
def test_parallel_samples_and_several_prompts_are_counted_once_by_usage_and_by_the_engine(
    stack: Stack, caching: bool
) -> None:
    """litellm#36168: usage four-fold. The sum of all usage is what the engine counted (I9), and computed."""
    chat = ask(stack, n=4, seed=3, temperature=1, use_cache=caching).json()
    prompts = ["a text of its own " * 9, "Quite another one " * 7]
    texts = stack.gateway.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": prompts, "n": 3, "seed": 3, "max_tokens": 8, "use_cache": caching},
        headers=stack.gateway.headers(),
    ).json()
    assert len({choice["message"]["content"] for choice in chat["choices"]}) == 4
    assert len({choice["text"] for choice in texts["choices"]}) == 6
    assert texts["usage"]["prompt_tokens"] == sum(map(len, prompts))
    stats = stack.wait_idle()
    asked = [chat["usage"], texts["usage"]]
    assert stats.num_prompt_tokens == sum(usage["prompt_tokens"] for usage in asked)
    assert stats.num_output_tokens == sum(usage["completion_tokens"] for usage in asked) == 8 * 10
    assert stats.num_cached_tokens == 0
    # Each sample but the first computes the last token of its prompt once more, for its logits.
    assert stats.num_computed_tokens == stats.num_prompt_tokens + 3 + 2 * 2 + 10 * 7
    assert stats.num_active_blocks == 0


def test_a_sample_is_the_same_whatever_n_is(stack: Stack) -> None:
    alone = ask(stack, seed=11, temperature=1).json()["choices"][0]
    assert ask(stack, seed=11, temperature=1, n=3).json()["choices"][0] == alone


def test_a_normal_finish_sends_no_abort(stack: Stack) -> None:
    for stream in (False, True):
        ask(stack, stream=stream)
    stats = stack.wait_idle()
    assert (stats.num_requests_finished, stats.num_requests_aborted) == (2, 0)


def _leave(stack: Stack, rng: random.Random) -> None:
    """Open a connection, send some or all of a request, read some or nothing of the answer, and go."""
    text, route = QUESTION[: rng.randrange(len(QUESTION))] or "x", rng.choice(["chat/completions", "completions"])
    given: dict[str, object] = {
        "stream": rng.random() < 0.6,
        "max_tokens": rng.choice([4, 900]),
        "n": rng.choice([1, 1, 3]),
    }
    fields = body(text, **given) if route != "completions" else {"model": MODEL, "prompt": [text, "y"], **given}
    payload = json.dumps(fields).encode()
    headers = {**stack.gateway.headers(rng.choice(["alice", "bob"])), "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", stack.gateway.port, timeout=20)
    connection.connect()
    connection.putrequest("POST", f"/v1/{route}")
    for name, value in {**headers, "content-length": str(len(payload))}.items():
        connection.putheader(name, value)
    connection.endheaders()
    phase = rng.choice(["head", "half", "sent", "sent", "first bytes", "some"])
    if phase == "half":
        connection.send(payload[: len(payload) // 2])
    elif phase != "head":
        connection.send(payload)
    assert isinstance(connection.sock, socket.socket)
    if phase in ("first bytes", "some"):
        connection.sock.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            connection.sock.recv(1 if phase == "first bytes" else 4000)
    connection.close()


@pytest.mark.slow
def test_a_thousand_disconnects_in_every_phase_leave_nothing_behind(stack: Stack) -> None:
    """LMCache#3688, sglang#36475, ATOM#1562: a disconnect crashed the engine, leaked blocks, corrupted the next."""
    expected = ask(stack).json()["choices"][0]["message"]["content"]
    rng = random.Random(17)
    for _ in range(1000):
        _leave(stack, rng)
    stats = stack.wait_idle()
    assert stats.num_requests_aborted > 100
    assert stats.num_active_blocks == 0
    assert stats.num_running + stats.num_waiting == 0
    assert stats.num_integrity_failures == 0
    assert stack.engine.check_integrity()
    stack.gateway.wait_until(lambda: not stack.gateway.drain.num_active)  # the last to leave are seen to be gone later
    assert ask(stack).json()["choices"][0]["message"]["content"] == expected
