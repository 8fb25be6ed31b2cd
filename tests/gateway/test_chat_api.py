"""The chat API as the unchanged `openai` SDK sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.protocol import SegmentKind
from tests.gateway.conftest import RunningGateway
from tests.gateway.fake_engine import MODEL

LONG = "Tell me about prefix caching, please, and take your time."


def ask(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_whole_answer(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        answer = client.chat.completions.create(model=MODEL, messages=ask(LONG))
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.created > 0
    assert [(c.index, c.message.role, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "assistant", LONG, "stop")
    ]


def test_stream_gives_the_same_text_and_ends_properly(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        chunks = list(client.chat.completions.create(model=MODEL, messages=ask(LONG), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == LONG
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_stream_equals_usage_without_field_by_field(gateway: RunningGateway) -> None:
    """Streams that lose cached tokens make every bill of a stream wrong (litellm#36168)."""
    with gateway.client() as client:
        client.chat.completions.create(model=MODEL, messages=ask(LONG))
        whole = client.chat.completions.create(model=MODEL, messages=ask(LONG))
        stream = client.chat.completions.create(
            model=MODEL, messages=ask(LONG), stream=True, stream_options={"include_usage": True}
        )
        last = list(stream)[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage == whole.usage
    assert last.usage.prompt_tokens_details is not None
    assert 0 < (last.usage.prompt_tokens_details.cached_tokens or 0) < last.usage.prompt_tokens
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_cached_tokens_are_the_integer_zero_when_nothing_was_cached(gateway: RunningGateway) -> None:
    """`cached_tokens` that is null or absent when zero breaks every client that adds it up (vllm#44377)."""
    with gateway.client() as client:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ask(LONG))
    usage: dict[str, Any] = raw.http_response.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert type(usage["prompt_tokens_details"]["cached_tokens"]) is int


@pytest.mark.parametrize("stream", [False, True])
def test_headers_account_for_every_prompt_token(gateway: RunningGateway, stream: bool) -> None:
    """A client whose library drops usage still learns from the headers what was cached, in streams too."""
    with gateway.client() as client:
        client.chat.completions.create(model=MODEL, messages=ask(LONG))
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ask(LONG), stream=stream)
    classes = dict(part.split("=") for part in raw.headers["x-radixgate-cache"].split(", "))
    counts = {name: int(count) for name, count in classes.items()}
    assert sum(counts.values()) == int(raw.headers["x-radixgate-prompt-tokens"])
    assert counts["device"] == int(raw.headers["x-radixgate-cached-tokens"]) > 0


def test_request_id_is_the_clients_when_it_is_sane(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        sane = client.models.with_raw_response.list(extra_headers={"x-request-id": "abc-1"})
        odd = client.models.with_raw_response.list(extra_headers={"x-request-id": "a b\tc"})
    assert sane.headers["x-request-id"] == "abc-1"
    assert odd.headers["x-request-id"].startswith("req_")


def test_two_tenants_share_nothing_and_one_shares_with_itself(gateway: RunningGateway) -> None:
    """Tenant B repeating tenant A's prompt must see no hit, and A must: else the test would pass without a cache."""
    cached: list[int] = []
    for tenant in ("alice", "bob", "alice"):
        with gateway.client(tenant) as client:
            usage = client.chat.completions.create(model=MODEL, messages=ask(LONG)).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_tenants_of_one_cache_group_share(gateway: RunningGateway) -> None:
    for tenant in ("carol", "dave"):
        with gateway.client(tenant) as client:
            client.chat.completions.create(model=MODEL, messages=ask(LONG))
    first, second = gateway.engine.submitted
    assert first.segments == second.segments
    assert (first.tenant_id, second.tenant_id) == ("carol", "dave")


def test_a_clients_salt_narrows_and_never_widens(gateway: RunningGateway) -> None:
    """A salt that *is* the scope would let tenant B read A's cache by sending A's salt (vllm#53347)."""
    for tenant, extra in [("alice", {}), ("alice", {"cache_salt": "x"}), ("bob", {"cache_salt": "x"})]:
        with gateway.client(tenant) as client:
            client.chat.completions.create(model=MODEL, messages=ask(LONG), extra_body=extra)
    for field in ("prompt_cache_key", "user"):
        with gateway.client() as client:
            client.chat.completions.create(model=MODEL, messages=ask(LONG), extra_body={field: "x"})
    scopes = [submit.segments[-1].scope for submit in gateway.engine.submitted]
    assert len(set(scopes)) == 5


def test_stop_strings_and_length(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        stopped = client.chat.completions.create(model=MODEL, messages=ask("one two three"), stop=" three")
        listed = client.chat.completions.create(model=MODEL, messages=ask("one two three"), stop=[" three", " two"])
        short = client.chat.completions.create(model=MODEL, messages=ask("one two"), max_tokens=3)
    found = [(a.choices[0].message.content, a.choices[0].finish_reason) for a in (stopped, listed, short)]
    assert found == [("one two", "stop"), ("one", "stop"), ("one", "length")]


def test_max_completion_tokens_is_honoured(gateway: RunningGateway) -> None:
    """It was ignored elsewhere, so LangChain's limit was lost."""
    with gateway.client() as client:
        answer = client.chat.completions.create(model=MODEL, messages=ask(LONG), max_completion_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert gateway.engine.submitted[0].sampling.max_tokens == 5


def test_max_tokens_is_what_the_context_leaves_when_nothing_is_asked(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        client.chat.completions.create(model=MODEL, messages=ask(LONG))
        client.chat.completions.create(model=MODEL, messages=ask(LONG), max_tokens=1_000_000)
    room = 8192 - sum(len(segment) for segment in gateway.engine.submitted[0].segments)
    assert [submit.sampling.max_tokens for submit in gateway.engine.submitted] == [room, room]


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_count_the_prompt_once(gateway: RunningGateway, stream: bool) -> None:
    """`n` was accepted and dropped elsewhere; here each choice is a request with its own seed, of one prompt."""
    with gateway.client() as client:
        if stream:
            texts, usage = ["", "", ""], None
            for chunk in client.chat.completions.create(
                model=MODEL, messages=ask("abc"), n=3, seed=7, stream=True, stream_options={"include_usage": True}
            ):
                usage = chunk.usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            answer = client.chat.completions.create(model=MODEL, messages=ask("abc"), n=3, seed=7)
            texts, usage = [choice.message.content for choice in answer.choices], answer.usage
    assert texts == ["abc"] * 3
    assert usage is not None
    assert usage.completion_tokens == 9
    submits = gateway.engine.submitted
    assert usage.prompt_tokens == sum(len(segment) for segment in submits[0].segments)
    assert submits[0].sampling.seed == 7
    assert len({submit.sampling.seed for submit in submits}) == 3
    assert [submit.sibling_of for submit in submits] == ["", submits[0].request_id, submits[0].request_id]
    assert all(0 <= (submit.sampling.seed or 0) < 2**63 for submit in submits)


def test_sampling_parameters_reach_the_engine(gateway: RunningGateway) -> None:
    """A parameter that is parsed and carried but never handed on looks honoured and is not."""
    with gateway.client() as client:
        client.chat.completions.create(
            model=MODEL,
            messages=ask("abc"),
            temperature=0.5,
            top_p=0.9,
            seed=-1,
            stop=["x"],
            frequency_penalty=0.5,
            presence_penalty=-1,
            logit_bias={"7": -100, "8": 2},
            extra_body={
                "repetition_penalty": 1.1,
                "top_k": 5,
                "min_p": 0.1,
                "min_tokens": 2,
                "ignore_eos": True,
                "use_cache": False,
            },
        )
    (submit,) = gateway.engine.submitted
    s = submit.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.min_tokens) == (0.5, 0.9, 5, 0.1, 2)
    assert (s.frequency_penalty, s.presence_penalty, s.repetition_penalty) == (0.5, -1, 1.1)
    assert s.logit_bias == {7: -100, 8: 2}
    assert (s.stop, s.ignore_eos, s.seed, submit.use_cache) == (("x",), True, 2**63 - 1, False)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(gateway: RunningGateway, stream: bool) -> None:
    """A character of four bytes among them: `bytes` is what a client can rely on."""
    with gateway.client() as client:
        if stream:
            chunks = client.chat.completions.create(
                model=MODEL, messages=ask("hé"), logprobs=True, top_logprobs=2, stream=True
            )
            parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
            content = [token for part in parts for token in part.content or []]
        else:
            answer = client.chat.completions.create(model=MODEL, messages=ask("hé"), logprobs=True, top_logprobs=2)
            assert answer.choices[0].logprobs is not None
            content = answer.choices[0].logprobs.content or []
    assert [(token.token, token.bytes, token.logprob) for token in content] == [
        ("h", [104], -0.25),
        ("é", [0xC3, 0xA9], -0.25),
    ]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("a", -0.5), ("b", -1.5)]
    assert gateway.engine.submitted[0].sampling.num_logprobs == 2


def test_logprobs_without_top_are_of_the_drawn_tokens_and_unasked_for_are_null(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        asked = client.chat.completions.create(model=MODEL, messages=ask("ab"), logprobs=True).choices[0].logprobs
        unasked = client.chat.completions.create(model=MODEL, messages=ask("ab"), logprobs=False).choices[0].logprobs
    assert unasked is None
    assert asked is not None
    assert [(token.token, token.top_logprobs) for token in asked.content or []] == [("a", []), ("b", [])]
    assert [submit.sampling.num_logprobs for submit in gateway.engine.submitted] == [0, None]


def test_documents_of_both_shapes_become_segments(gateway: RunningGateway) -> None:
    documents = [
        {"id": "a", "title": "Alps", "text": "High."},
        {"id": "b", "data": {"title": "Sea", "snippet": "Deep.", "year": 1990}},
    ]
    with gateway.client() as client:
        client.chat.completions.create(model=MODEL, messages=ask("Q"), extra_body={"documents": documents})
    (submit,) = gateway.engine.submitted
    found = [s for s in submit.segments if s.kind is SegmentKind.DOCUMENT]
    assert [segment.document_id for segment in found] == ["a", "b"]
    assert "[a] Alps\nHigh.\n\n[b] Sea\nyear: 1990\nDeep.\n\n" in gateway.engine.prompt(submit)


def test_text_parts_and_developer_messages(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            ],
        )
    assert answer.choices[0].message.content == "Hello"
    assert "<|im_start|>system\nBe brief.<|im_end|>" in gateway.engine.prompt(gateway.engine.submitted[0])


def test_our_own_answer_can_be_sent_back_as_history(gateway: RunningGateway) -> None:
    """SDK users append `message.model_dump()`, with its nulls; refusing those would break every chat's second turn."""
    with gateway.client() as client:
        first = client.chat.completions.create(model=MODEL, messages=ask("One"))
        history: Any = [*ask("One"), first.choices[0].message.model_dump(), *ask("Two")]
        second = client.chat.completions.create(model=MODEL, messages=history)
    assert second.choices[0].message.content == "Two"


def test_parameters_that_change_nothing_are_accepted(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=ask("ok"),
            tools=[],
            tool_choice="auto",
            response_format={"type": "text"},
            store=False,
            metadata={"a": "b"},
            service_tier="auto",
            parallel_tool_calls=True,
        )
    assert answer.choices[0].message.content == "ok"


# ---------------------------------------------------------------- errors, as the SDK's exception classes


def test_a_wrong_key_is_401_and_shows_four_characters_at_most(gateway: RunningGateway) -> None:
    """An expired key was echoed in the error elsewhere (litellm#18731)."""
    key = "rg-" + "k" * 39 + "wxyz"
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
    with client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask("x"))
    assert caught.value.code == "invalid_api_key"
    assert "wxyz" in caught.value.message
    assert "kwxyz" not in caught.value.message
    assert gateway.engine.submitted == []


def test_an_unknown_model_is_404(gateway: RunningGateway) -> None:
    with gateway.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=ask("x"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_prompt_that_is_too_long_is_400_with_both_numbers(gateway: RunningGateway) -> None:
    """Elsewhere it was dropped with a log line, truncated in silence, or a 500."""
    with gateway.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask("x" * 30_000))
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message
    assert any(30_000 < int(word) < 31_000 for word in caught.value.message.split() if word.isdigit())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"), [("engine_overloaded", 503), ("engine_step_failed", 503), ("invalid_request", 400)]
)
def test_an_error_before_the_first_token_is_an_http_status(
    gateway: RunningGateway, stream: bool, code: str, status: int
) -> None:
    with gateway.client() as client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask(f"fail:{code}"), stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert ("retry-after" in caught.value.response.headers) == (status == 503)


def test_an_error_in_mid_stream_is_an_event_and_no_done(gateway: RunningGateway) -> None:
    """An error that arrives as the end of the stream reads as a complete answer (llama.cpp#16104)."""
    texts: list[str] = []
    with gateway.client() as client:
        stream = client.chat.completions.create(model=MODEL, messages=ask("break:engine_step_failed"), stream=True)
        with pytest.raises(openai.APIError, match="the engine says") as caught:
            texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(texts) == "bre"
    assert caught.value.code == "engine_step_failed"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_failure_tells_the_client_its_id_and_nothing_else(gateway: RunningGateway, stream: bool) -> None:
    with gateway.client() as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask("crash"), stream=stream)
    assert caught.value.code == "internal_error"
    assert "secret" not in caught.value.message
    assert (caught.value.request_id or "?") in caught.value.message


def test_models(gateway: RunningGateway) -> None:
    """The id of a hub model has a slash in it."""
    with gateway.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_an_engine_that_was_never_reached_is_503(gateway: RunningGateway) -> None:
    gateway.engine.reachable = False
    with gateway.client() as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask("x"))
    assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")


# ---------------------------------------------------------------- concurrency and leaving


async def test_many_async_clients_at_once(gateway: RunningGateway) -> None:
    async with gateway.async_client() as client:

        async def one(i: int) -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=ask(f"number {i}"), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(one(i) for i in range(40)))
    assert texts == [f"number {i}" for i in range(40)]
    assert gateway.engine.aborted == []


@pytest.mark.parametrize(("stream", "text"), [(True, "wait"), (True, "silence"), (False, "wait"), (False, "silence")])
async def test_a_client_that_leaves_aborts_its_request(gateway: RunningGateway, stream: bool, text: str) -> None:
    """At every phase: a plain handler of the framework is not told that its client left, and would compute on."""
    async with gateway.async_client() as client:
        call = asyncio.create_task(_exhaust(client, stream, text))
        await asyncio.to_thread(gateway.wait_until, lambda: len(gateway.engine.running) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await asyncio.to_thread(gateway.wait_until, lambda: not gateway.engine.running)
    assert len(gateway.engine.aborted) == 2
    assert gateway.engine.finished == []
    await asyncio.to_thread(gateway.wait_until, lambda: gateway.drain.num_active == 0)


async def _exhaust(client: openai.AsyncOpenAI, stream: bool, text: str) -> None:
    if stream:
        async for _ in await client.chat.completions.create(model=MODEL, messages=ask(text), n=2, stream=True):
            pass
    else:
        await client.chat.completions.create(model=MODEL, messages=ask(text), n=2)


def test_a_normal_end_aborts_nothing(gateway: RunningGateway) -> None:
    """An abort after the end has met a reused id elsewhere, and ended somebody else's request."""
    with gateway.client() as client:
        client.chat.completions.create(model=MODEL, messages=ask(LONG), n=2)
        list(client.chat.completions.create(model=MODEL, messages=ask(LONG), n=2, stream=True))
    gateway.wait_until(lambda: len(gateway.engine.finished) == 4)
    assert gateway.engine.aborted == []


def test_a_failure_of_one_choice_ends_the_others(gateway: RunningGateway) -> None:
    with gateway.client() as client, pytest.raises(openai.APIStatusError):
        client.chat.completions.create(model=MODEL, messages=ask("fail:engine_overloaded"), n=3)
    gateway.wait_until(lambda: not gateway.engine.running)


def test_a_client_that_does_not_read_does_not_block_others(gateway: RunningGateway) -> None:
    """A slow reader fills its socket; the loop, and everybody else's stream, must go on."""
    with gateway.client() as slow, gateway.client("bob") as quick:
        stalled = slow.chat.completions.create(model=MODEL, messages=ask("z" * 7000), stream=True)
        answer = quick.chat.completions.create(model=MODEL, messages=ask(LONG))
        assert answer.choices[0].message.content == LONG
        stalled.close()
    gateway.wait_until(lambda: not gateway.engine.running)
