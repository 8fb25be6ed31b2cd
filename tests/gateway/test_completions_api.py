"""Text completions as the unchanged `openai` SDK sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from engine.protocol import SegmentKind, unpack_tokens
from gateway.completion_request import MAX_PROMPTS
from tests.gateway.conftest import RunningGateway
from tests.gateway.fake_engine import MODEL

LONG = "Once upon a time there was a cache that forgot nothing."


def test_whole_answer(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        answer = client.completions.create(model=MODEL, prompt=LONG, max_tokens=100)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, LONG, "stop")]
    (submit,) = gateway.engine.submitted
    assert gateway.engine.prompt(submit) == LONG  # and no template around it


def test_without_max_tokens_there_are_sixteen(gateway: RunningGateway) -> None:
    """OpenAI's default; the whole context instead would cost a client that relies on it."""
    with gateway.client() as client:
        answer = client.completions.create(model=MODEL, prompt=LONG)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (LONG[:16], "length")


def test_a_stream_gives_the_same_text_and_usage_field_by_field(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        client.completions.create(model=MODEL, prompt=LONG, max_tokens=100)
        whole = client.completions.create(model=MODEL, prompt=LONG, max_tokens=100)
        chunks = list(
            client.completions.create(
                model=MODEL, prompt=LONG, max_tokens=100, stream=True, stream_options={"include_usage": True}
            )
        )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == LONG
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert 0 < (whole.usage.prompt_tokens_details.cached_tokens or 0) < whole.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_n_choices_are_counted_over_all_prompts(gateway: RunningGateway, stream: bool) -> None:
    """LangChain sends twenty prompts a call. Each prompt counts once, whatever `n`; choices are numbered through."""
    prompts = ["one", "number two"]
    with gateway.client() as client:
        client.completions.create(model=MODEL, prompt="x", n=2, best_of=2)
        gateway.engine.submitted.clear()
        if stream:
            texts, usage = [""] * 4, None
            for chunk in client.completions.create(
                model=MODEL, prompt=prompts, n=2, seed=3, stream=True, stream_options={"include_usage": True}
            ):
                usage = chunk.usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            answer = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=3)
            texts, usage = [choice.text for choice in answer.choices], answer.usage
    assert texts == ["one", "one", "number two", "number two"]
    assert usage is not None
    assert usage.prompt_tokens == len("one") + len("number two")
    assert usage.completion_tokens == 2 * usage.prompt_tokens
    seeds = [submit.sampling.seed for submit in gateway.engine.submitted]
    assert (seeds[0], seeds[1]) == (seeds[2], seeds[3])
    assert seeds[0] != seeds[1]
    ids = [submit.request_id for submit in gateway.engine.submitted]
    assert [submit.sibling_of for submit in gateway.engine.submitted] == ["", ids[0], "", ids[2]]


def test_the_headers_and_the_usage_log_say_the_sum_of_all_prompts(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        raw = client.completions.with_raw_response.create(model=MODEL, prompt=["abc", "defgh"])
    classes = dict(part.split("=") for part in raw.headers["x-radixgate-cache"].split(", "))
    assert sum(map(int, classes.values())) == int(raw.headers["x-radixgate-prompt-tokens"]) == 8


def test_token_ids_are_the_prompt_as_they_are(gateway: RunningGateway) -> None:
    """Whoever sends token ids may send special ones: the prompt is all theirs."""
    ids = [104, 105, 257, 33]
    with gateway.client() as client:
        client.completions.create(model=MODEL, prompt=ids)
        client.completions.create(model=MODEL, prompt=[ids, [104]])
    sent = [unpack_tokens(segment.tokens) for submit in gateway.engine.submitted for segment in submit.segments]
    assert sent == [ids, ids, [104]]


def test_special_tokens_in_a_text_stay_text(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        client.completions.create(model=MODEL, prompt="<|im_start|>system")
    (segment,) = gateway.engine.submitted[0].segments
    assert segment.kind is SegmentKind.QUESTION
    assert len(segment) == len("<|im_start|>system")


def test_two_tenants_share_nothing_and_one_shares_with_itself_but_not_with_its_chats(gateway: RunningGateway) -> None:
    cached: list[int] = []
    for tenant in ("alice", "bob", "alice"):
        with gateway.client(tenant) as client:
            usage = client.completions.create(model=MODEL, prompt=LONG).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_salts_and_users_narrow(gateway: RunningGateway) -> None:
    for extra in ({}, {"cache_salt": "x"}, {"prompt_cache_key": "x"}, {"user": "x"}):
        with gateway.client() as client:
            client.completions.create(model=MODEL, prompt="abc", extra_body=extra)
    assert len({submit.segments[0].scope for submit in gateway.engine.submitted}) == 4


def test_sampling_parameters_reach_the_engine(gateway: RunningGateway) -> None:
    with gateway.client() as client:
        client.completions.create(
            model=MODEL,
            prompt="abc",
            max_tokens=7,
            temperature=0.5,
            top_p=0.9,
            seed=5,
            stop="x",
            frequency_penalty=0.5,
            presence_penalty=-1,
            logit_bias={"7": -100},
            extra_body={"top_k": 5, "repetition_penalty": 1.1, "use_cache": False},
        )
    (submit,) = gateway.engine.submitted
    s = submit.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.seed, s.stop, s.top_k) == (7, 0.5, 0.9, 5, ("x",), 5)
    assert (s.frequency_penalty, s.presence_penalty, s.repetition_penalty, s.logit_bias) == (0.5, -1, 1.1, {7: -100})
    assert submit.use_cache is False


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_in_four_columns(gateway: RunningGateway, stream: bool) -> None:
    with gateway.client() as client:
        if stream:
            chunks = client.completions.create(model=MODEL, prompt="héj", logprobs=1, stream=True)
            parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
        else:
            whole = client.completions.create(model=MODEL, prompt="héj", logprobs=1).choices[0].logprobs
            assert whole is not None
            parts = [whole]
    assert [token for part in parts for token in part.tokens or []] == ["h", "é", "j"]
    assert [offset for part in parts for offset in part.text_offset or []] == [0, 1, 2]
    assert [logprob for part in parts for logprob in part.token_logprobs or []] == [-0.25] * 3
    assert [top for part in parts for top in part.top_logprobs or []] == [{"a": -0.5}] * 3


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"prompt": None}, "prompt", "invalid_request"),
        ({"prompt": ""}, "prompt", "invalid_request"),
        ({"prompt": []}, "prompt", "invalid_request"),
        ({"prompt": [[]]}, "prompt", "invalid_request"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_request"),
        ({"prompt": [1, True]}, "prompt[1]", "invalid_request"),
        ({"prompt": [-1]}, "prompt[0]", "invalid_request"),
        ({"prompt": [100_000]}, "prompt", "invalid_request"),
        ({"prompt": {"text": "x"}}, "prompt", "invalid_request"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", "invalid_request"),
        ({"prompt": "x" * 9000}, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 9000}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"min_tokens": 17}, "min_tokens", "invalid_request"),
        ({"n": 9}, "n", "invalid_request"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "invalid_request"),
        ({"logprobs": 21}, "logprobs", "invalid_request"),
        ({"messages": []}, "messages", "unsupported_parameter"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "invalid_request"),
    ],
)
def test_a_bad_field_is_400_and_named_by_its_path(
    gateway: RunningGateway, change: dict[str, Any], param: str, code: str
) -> None:
    body = {"model": MODEL, "prompt": "x", **change}
    response = gateway.http.post("/v1/completions", json=body, headers=gateway.headers())
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert gateway.engine.submitted == []


def test_a_wrong_key_and_an_unknown_model(gateway: RunningGateway) -> None:
    with gateway.client() as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    stranger = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="rg-x", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model=MODEL, prompt="x")


def test_an_error_in_mid_stream_is_an_event_and_no_done(gateway: RunningGateway) -> None:
    texts: list[str] = []
    with gateway.client() as client:
        stream = client.completions.create(model=MODEL, prompt="break:engine_step_failed", max_tokens=30, stream=True)
        with pytest.raises(openai.APIError, match="the engine says"):
            texts.extend(chunk.choices[0].text for chunk in stream)
    assert "".join(texts) == "bre"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_every_choice_of_every_prompt(gateway: RunningGateway, stream: bool) -> None:
    """One prompt has begun, the other never will: the answer has not started, and its client is gone."""

    async def ask() -> None:
        async with gateway.async_client() as client:
            if stream:
                async for _ in await client.completions.create(
                    model=MODEL, prompt=["wait", "silence"], n=2, stream=True
                ):
                    pass
            else:
                await client.completions.create(model=MODEL, prompt=["wait", "silence"], n=2)

    call = asyncio.create_task(ask())
    await asyncio.to_thread(gateway.wait_until, lambda: len(gateway.engine.running) == 4)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(gateway.wait_until, lambda: not gateway.engine.running)
    assert len(gateway.engine.aborted) == 4
    await asyncio.to_thread(gateway.wait_until, lambda: gateway.drain.num_active == 0)
