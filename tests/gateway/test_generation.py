from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from engine.errors import EngineUnavailableError, OverloadedError, RadixgateError, ShuttingDownError
from engine.protocol import Delta, DrawnToken, FinishReason, PromptAccount, SamplingParams, Segment, SegmentKind, Submit
from gateway.generation import ClientDisconnectedError, Generation, merge
from tests.gateway.fake_engine import FakeEngine


def submit(text: str, name: str = "r") -> Submit:
    question = Segment.of(SegmentKind.QUESTION, FakeEngine().tokenizer.encode(text).ids, b"s")
    return Submit(request_id=name, tenant_id="t", segments=(question,), sampling=SamplingParams(max_tokens=99))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")


async def exhaust(generation: Generation) -> None:
    async for _ in generation.updates():
        pass


async def test_a_slow_reader_gets_one_merged_delta_a_choice() -> None:
    """Memory for a client that does not read must not grow by a message a token."""
    engine = FakeEngine()
    async with Generation(engine, [submit("hello", "a"), submit("bye", "b")]) as generation:
        await until(lambda: len(engine.finished) == 2)
        found = [(u.choice, u.delta.text, u.delta.num_output_tokens) async for u in generation.updates()]
    assert found == [(0, "hello", 5), (1, "bye", 3)]


def test_merging_keeps_account_and_order_of_the_first_and_the_end_of_the_last() -> None:
    account = PromptAccount(cold=3)
    first = Delta(request_id="r", text="a", num_output_tokens=1, account=account, document_order=(1, 0))
    last = Delta(request_id="r", text="b", num_output_tokens=2, finish_reason=FinishReason.STOP)
    assert merge(first, last) == Delta(
        request_id="r",
        text="ab",
        num_output_tokens=2,
        account=account,
        document_order=(1, 0),
        finish_reason=FinishReason.STOP,
    )


def test_merging_keeps_every_tokens_log_probability() -> None:
    first, last = (
        Delta(request_id="r", text=text, num_output_tokens=i, tokens=(DrawnToken(text.encode(), -1.0, ()),))
        for i, text in enumerate("ab", 1)
    )
    assert [token.token for token in merge(first, last).tokens] == [b"a", b"b"]


async def test_text_that_came_before_an_error_is_handed_out_first() -> None:
    engine = FakeEngine()
    async with Generation(engine, [submit("break:engine_overloaded")]) as generation:
        await until(lambda: bool(engine.submitted) and not engine.running)
        updates = generation.updates()
        assert (await anext(updates)).delta.text == "bre"
        with pytest.raises(OverloadedError):
            await anext(updates)


@pytest.mark.parametrize("error", [ShuttingDownError("x"), ClientDisconnectedError()])
async def test_failing_from_outside_ends_it_and_aborts_what_runs(
    error: RadixgateError | ClientDisconnectedError,
) -> None:
    engine = FakeEngine()
    async with Generation(engine, [submit("wait", "a"), submit("quick", "b")]) as generation:
        await until(lambda: "b" in engine.finished)
        generation.fail(error)
        generation.fail(OverloadedError("too late"))
        with pytest.raises(type(error)):
            await exhaust(generation)
    assert (engine.finished, engine.aborted) == (["b"], ["a"])


async def test_cancelling_the_response_aborts_too() -> None:
    engine = FakeEngine()

    async def run() -> None:
        async with Generation(engine, [submit("wait")]) as generation:
            await exhaust(generation)

    task = asyncio.create_task(run())
    await until(lambda: bool(engine.running))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == ["r"]


async def test_a_stream_that_just_stops_is_an_error() -> None:
    """Every request ends with a finish reason or a typed error: silence would be a client that waits for ever."""

    class Mute(FakeEngine):
        async def _answer(self, submit: Submit) -> AsyncGenerator[Delta, None]:
            for never in ():
                yield never

    async with Generation(Mute(), [submit("x")]) as generation:
        with pytest.raises(EngineUnavailableError, match="without a finish reason"):
            await exhaust(generation)
