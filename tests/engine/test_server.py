"""engine/server.py and engine/client.py over a real socket, with an engine that echoes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from engine.client import EngineClient
from engine.errors import (
    ConfigError,
    ContextLengthExceededError,
    EngineStepError,
    EngineUnavailableError,
    InvalidRequestError,
    ServiceError,
    ShuttingDownError,
)
from engine.protocol import (
    ClientMessage,
    Delta,
    EngineInfo,
    EngineMessage,
    Explain,
    ExplainedPart,
    Failure,
    FinishReason,
    GetStats,
    Hello,
    OperatorAnswer,
    PromptAccount,
    SamplingParams,
    Segment,
    SegmentKind,
    Submit,
    unpack_tokens,
)
from engine.server import EngineServer, _Sent
from tests.engine.echo_engine import MAX_MODEL_LEN, EchoEngine

LIMIT = 20.0  # seconds that anything may take before a test fails


def submit_of(request_id: str, prompt: str, max_tokens: int = 10_000) -> Submit:
    segment = Segment.of(SegmentKind.QUESTION, [ord(char) for char in prompt], b"tenant")
    return Submit(
        request_id=request_id,
        tenant_id="tenant",
        segments=(segment,),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


class RunningServer:
    """An `EngineServer` on a thread of its own, as its process would run it."""

    def __init__(self, server: EngineServer, engine: EchoEngine) -> None:
        self.server = server
        self.engine = engine
        self.thread = threading.Thread(target=server.serve)
        self.thread.start()

    def join(self) -> None:
        self.thread.join(LIMIT)
        assert not self.thread.is_alive(), "the server does not stop"

    def stop(self) -> None:
        self.server.stop()
        self.server.stop()
        self.join()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'e.sock'}"


@pytest.fixture
def running(endpoint: str) -> Iterator[RunningServer]:
    engine = EchoEngine()
    server = RunningServer(EngineServer(engine, endpoint), engine)
    yield server
    server.stop()


@asynccontextmanager
async def connected_client(endpoint: str, stall_seconds: float = 60.0) -> AsyncIterator[EngineClient]:
    client = EngineClient(endpoint, heartbeat_seconds=0.05, stall_seconds=stall_seconds)
    await client.start()
    try:
        await client.wait_ready(LIMIT)
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110  what is awaited happens on the server's thread
            await asyncio.sleep(0.005)


async def text_of(client: EngineClient, submit: Submit) -> str:
    return "".join([delta.text async for delta in client.generate(submit)])


# ---------------------------------------------------------------- requests


async def test_deltas_arrive_in_order_with_account_and_finish_reason(running: RunningServer, endpoint: str) -> None:
    async with connected_client(endpoint) as client:
        assert client.info == running.engine.info()
        deltas = [delta async for delta in client.generate(submit_of("r", "hello"))]
        assert "".join(delta.text for delta in deltas) == "hello"
        assert deltas[0].account is not None
        assert deltas[0].account.num_prompt_tokens == 5
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert {delta.request_id for delta in deltas} == {"r"}


async def test_normal_finish_sends_no_abort(running: RunningServer, endpoint: str) -> None:
    """An abort after the end ended the next request of that id elsewhere."""
    async with connected_client(endpoint) as client:
        for _ in range(3):
            assert await text_of(client, submit_of("same-id", "abc")) == "abc"
        await client.stats()  # everything sent before has been handled
        assert running.engine.aborted == []


async def test_closing_at_the_last_delta_sends_no_abort(running: RunningServer, endpoint: str) -> None:
    """A consumer that stops reading at the finish reason has seen a normal finish."""
    async with connected_client(endpoint) as client:
        generator = client.generate(submit_of("r", "abc"))
        while (await anext(generator)).finish_reason is None:
            pass
        await generator.aclose()
        await client.stats()
        assert running.engine.aborted == []


async def test_early_close_aborts(running: RunningServer, endpoint: str) -> None:
    """A client that went away went on costing compute until max_tokens."""
    running.engine.step_seconds = 0.001
    async with connected_client(endpoint) as client:
        generator = client.generate(submit_of("r", "x" * 900))
        await anext(generator)
        await generator.aclose()
        await until(lambda: bool(running.engine.aborted))
        assert (await client.stats()).num_running == 0


async def test_cancellation_before_the_first_delta_aborts(running: RunningServer, endpoint: str) -> None:
    running.engine.held = True
    async with connected_client(endpoint) as client:
        task = asyncio.create_task(text_of(client, submit_of("r", "abc")))
        await until(lambda: bool(running.engine.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: running.engine.aborted == ["c1/r"])


async def test_two_gateways_may_use_the_same_request_id(running: RunningServer, endpoint: str) -> None:
    """Ids are a gateway's own: one gateway's answer must never reach the other."""
    async with connected_client(endpoint) as one, connected_client(endpoint) as two:
        texts = await asyncio.gather(
            text_of(one, submit_of("same", "a" * 300)), text_of(two, submit_of("same", "b" * 300))
        )
        assert texts == ["a" * 300, "b" * 300]


async def test_a_sibling_is_looked_for_among_the_requests_of_its_own_gateway(
    running: RunningServer, endpoint: str
) -> None:
    """To name another gateway's request as one's leader must lead to nothing."""
    async with connected_client(endpoint) as client:
        await text_of(client, submit_of("a", "x"))
        await text_of(client, msgspec.structs.replace(submit_of("b", "x"), sibling_of="a"))
    (leader, sibling) = running.engine.submitted
    assert (leader.sibling_of, sibling.sibling_of) == ("", leader.request_id)


async def test_many_requests_at_once_stay_apart(running: RunningServer, endpoint: str) -> None:
    async with connected_client(endpoint) as client:
        prompts = [f"{index}:" * (index + 1) for index in range(100)]
        tasks = [text_of(client, submit_of(str(index), prompt)) for index, prompt in enumerate(prompts)]
        assert await asyncio.gather(*tasks) == prompts


async def test_duplicate_request_id_is_refused_and_the_first_goes_on(running: RunningServer, endpoint: str) -> None:
    running.engine.held = True
    async with connected_client(endpoint) as client:
        first = asyncio.create_task(text_of(client, submit_of("r", "abc")))
        await until(lambda: bool(running.engine.requests))
        with pytest.raises(InvalidRequestError, match="already running"):
            await text_of(client, submit_of("r", "xyz"))
        running.engine.held = False
        assert await first == "abc"


async def test_slow_consumer_gets_everything_merged(running: RunningServer, endpoint: str) -> None:
    """A slow reader's deltas must not pile up, and none of its text, its account or its end may be lost."""
    async with connected_client(endpoint) as client:
        generator = client.generate(submit_of("r", "abc" * 300))
        first = await anext(generator)
        await until(lambda: not running.engine.requests)
        await client.stats()  # all deltas have arrived here too
        rest = [delta async for delta in generator]
        assert len(rest) == 1
        assert first.text + rest[0].text == "abc" * 300
        assert (rest[0].num_output_tokens, rest[0].finish_reason) == (900, FinishReason.LENGTH)


async def test_what_comes_with_the_first_delta_survives_merging(running: RunningServer, endpoint: str) -> None:
    """The order of the documents is said once, with the account: a reader that was late did not get it."""
    running.engine.held = True
    async with connected_client(endpoint) as client:
        generator = client.generate(submit_of("r", "abc" * 30))
        reading = asyncio.create_task(anext(generator))
        await until(lambda: bool(running.engine.requests))
        running.engine.held = False
        while running.engine.requests:
            time.sleep(0.001)  # noqa: ASYNC251  nothing is read meanwhile
        first = await reading
        assert (first.account, first.document_order) == (PromptAccount(cold=90), (1, 0))
        assert [delta async for delta in generator if delta.account or delta.document_order] == []


async def test_refusal_arrives_as_its_own_type(running: RunningServer, endpoint: str) -> None:
    async with connected_client(endpoint) as client:
        with pytest.raises(ContextLengthExceededError, match=str(MAX_MODEL_LEN)) as caught:
            await text_of(client, submit_of("r", "x" * 2_000))
        assert caught.value.param == "messages"


async def test_failed_step_arrives_as_its_own_type(running: RunningServer, endpoint: str) -> None:
    running.engine.failing = True
    async with connected_client(endpoint) as client:
        with pytest.raises(EngineStepError, match="device lost"):
            await text_of(client, submit_of("r", "abc"))
        running.engine.failing = False
        assert await text_of(client, submit_of("r", "abc")) == "abc"


# ---------------------------------------------------------------- health


async def test_probe_is_a_real_decode_step(running: RunningServer, endpoint: str) -> None:
    """Health said ok while the device was dead, because nothing was computed to find out."""
    async with connected_client(endpoint) as client:
        assert (await client.probe(LIMIT)).ok
        assert [(submit.use_cache, submit.counted) for submit in running.engine.submitted] == [(False, False)]
        running.engine.failing = True
        result = await client.probe(LIMIT)
        assert (result.ok, result.message) == (False, "device lost")
        running.engine.failing = False
        assert (await client.probe(LIMIT)).ok


async def test_probe_of_a_stuck_engine_is_unavailable(running: RunningServer, endpoint: str) -> None:
    running.engine.held = True
    async with connected_client(endpoint) as client:
        with pytest.raises(EngineUnavailableError, match="computed nothing"):
            await client.probe(0.1)


async def test_busy_engine_answers_probes_without_work_of_their_own(running: RunningServer, endpoint: str) -> None:
    """A probe that waits behind a full queue would take a busy, healthy engine out of service."""
    running.engine.step_seconds = 0.001
    async with connected_client(endpoint) as client:
        generator = client.generate(submit_of("r", "x" * 900))
        await anext(generator)
        assert (await client.probe(LIMIT)).ok
        assert [submit.tenant_id for submit in running.engine.submitted] == ["tenant"]
        await generator.aclose()


async def test_probes_wait_until_an_earlier_lifes_cache_is_back(running: RunningServer, endpoint: str) -> None:
    """Ready was said while the cache was still on its way: the first requests after a restart were slow."""
    running.engine.restoring = True
    async with connected_client(endpoint) as client:
        asking = asyncio.create_task(client.probe(LIMIT))
        assert await text_of(client, submit_of("r", "abc")) == "abc"
        assert not asking.done()
        running.engine.restoring = False
        assert (await asking).ok


async def test_long_prefill_answers_probes(running: RunningServer, endpoint: str) -> None:
    """Only a delta answered a probe: a healthy engine in a prefill of many steps was taken out of service."""
    running.engine.prefilling = True
    async with connected_client(endpoint) as client:
        task = asyncio.create_task(text_of(client, submit_of("r", "abc")))
        await until(lambda: bool(running.engine.requests))
        assert (await client.probe(LIMIT)).ok
        assert [submit.tenant_id for submit in running.engine.submitted] == ["tenant"]
        running.engine.prefilling = False
        assert await task == "abc"


async def test_lost_answer_to_a_question_leaves_the_next_ones_in_order(endpoint: str) -> None:
    """Statistics were given to whoever asked first: after one lost answer everybody got the one before his own."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(endpoint)
    engine = EchoEngine()

    async def answer_all_but_the_first() -> None:
        num_questions = 0
        while True:
            identity, payload = await socket.recv_multipart()
            message = msgspec.msgpack.decode(payload, type=ClientMessage)
            if isinstance(message, Hello):
                await socket.send_multipart([identity, msgspec.msgpack.encode(engine.info())])
            if isinstance(message, GetStats):
                num_questions += 1
                stats = msgspec.structs.replace(engine.stats(), query_id=message.query_id, num_steps=num_questions)
                if num_questions > 1:
                    await socket.send_multipart([identity, msgspec.msgpack.encode(stats)])

    answering = asyncio.create_task(answer_all_but_the_first())
    try:
        async with connected_client(endpoint) as client:
            with pytest.raises(EngineUnavailableError, match="no answer"):
                await client.stats(timeout=0.05)
            found = await asyncio.gather(*(client.stats(LIMIT) for _ in range(3)))
            assert sorted(stats.num_steps for stats in found) == [2, 3, 4]
    finally:
        answering.cancel()
        context.destroy(linger=0)


# ---------------------------------------------------------------- the engine goes away


async def test_shutdown_drains_running_requests_and_refuses_new_ones(running: RunningServer, endpoint: str) -> None:
    running.engine.held = True
    async with connected_client(endpoint) as client:
        first = asyncio.create_task(text_of(client, submit_of("r", "abc")))
        await until(lambda: bool(running.engine.requests))
        running.server.stop()
        with pytest.raises(ShuttingDownError):
            await text_of(client, submit_of("new", "xyz"))
        running.engine.held = False
        assert await first == "abc"
        running.join()


async def test_drain_deadline_fails_what_still_runs(endpoint: str) -> None:
    """A drain that waits for ever is killed, and then clients see a bare cut."""
    engine = EchoEngine(held=True)
    running = RunningServer(EngineServer(engine, endpoint, drain_seconds=0.05), engine)
    async with connected_client(endpoint) as client:
        task = asyncio.create_task(text_of(client, submit_of("r", "abc")))
        await until(lambda: bool(engine.requests))
        running.server.stop()
        with pytest.raises(ShuttingDownError):
            await task
    running.join()
    assert engine.aborted == ["c1/r"]


async def test_restarted_engine_fails_the_old_requests_and_serves_new_ones(endpoint: str) -> None:
    """Requests of an engine that was killed must fail, not wait for an engine that never heard of them."""
    async with AsyncExitStack() as stack:
        first = RunningServer(EngineServer(old := EchoEngine(held=True), endpoint), old)
        stack.callback(first.stop)
        client = await stack.enter_async_context(connected_client(endpoint))
        task = asyncio.create_task(text_of(client, submit_of("r", "abc")))
        await until(lambda: bool(old.requests))
        first.stop()
        with pytest.raises(ServiceError):
            await task
        await until(lambda: not client.connected)
        with pytest.raises(EngineUnavailableError):
            await text_of(client, submit_of("r", "abc"))

        second = RunningServer(EngineServer(new := EchoEngine(incarnation="second"), endpoint), new)
        stack.callback(second.stop)
        await client.wait_ready(LIMIT)
        assert client.info is not None
        assert client.info.incarnation == "second"
        assert await text_of(client, submit_of("r", "abc")) == "abc"


async def test_loop_that_hangs_is_found_and_recovers(running: RunningServer, endpoint: str) -> None:
    """The connection lives while the engine's loop hangs in the device: its clients waited for ever."""
    async with connected_client(endpoint, stall_seconds=0.2) as client:
        running.engine.step_seconds = 1.0
        with pytest.raises(EngineUnavailableError, match="has not answered"):
            await text_of(client, submit_of("r", "x" * 900))
        assert not client.connected
        running.engine.step_seconds = 0.001
        await client.wait_ready(LIMIT)
        # The request was given up while nobody listened: the engine must learn it.
        await until(lambda: running.engine.aborted == ["c1/r"])


async def test_no_engine_at_all_is_unavailable_at_once(endpoint: str) -> None:
    client = EngineClient(endpoint)
    await client.start()
    try:
        assert (client.info, client.connected) == (None, False)
        with pytest.raises(EngineUnavailableError):
            await text_of(client, submit_of("r", "abc"))
        with pytest.raises(EngineUnavailableError):
            await client.wait_ready(0.05)
    finally:
        await client.close()


def test_second_engine_on_a_living_socket_is_refused(running: RunningServer, endpoint: str) -> None:
    """zmq unlinks the socket before it binds: the first engine went deaf without a word."""
    with pytest.raises(ConfigError, match="another engine"):
        EngineServer(EchoEngine(), endpoint)


def test_stale_socket_file_is_no_obstacle(endpoint: str) -> None:
    Path(endpoint.removeprefix("ipc://")).touch()
    engine = EchoEngine()
    RunningServer(EngineServer(engine, endpoint), engine).stop()


# ---------------------------------------------------------------- clients that misbehave


class RawClient:
    """Speaks zmq without our client's manners."""

    def __init__(self, endpoint: str, receive_queue: int = 1_000) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, receive_queue)
        self.socket.setsockopt(zmq.RCVBUF, 4_096)
        self.socket.setsockopt(zmq.IDENTITY, b"raw")
        self.socket.connect(endpoint)

    async def send(self, message: object) -> None:
        await self.socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    async def receive(self) -> EngineMessage:
        async with asyncio.timeout(LIMIT):
            payload = await self.socket.recv()
        assert isinstance(payload, bytes)
        return msgspec.msgpack.decode(payload, type=EngineMessage)

    async def say_hello_again_and_again(self) -> None:
        while True:
            await self.send(Hello())
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
async def raw(running: RunningServer, endpoint: str) -> AsyncIterator[RawClient]:
    client = RawClient(endpoint)
    yield client
    client.close()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\xff" * 100, msgspec.msgpack.encode({"type": "nonsense"}), msgspec.msgpack.encode([1, 2])],
)
async def test_malformed_message_is_counted_and_survived(
    running: RunningServer, raw: RawClient, payload: bytes
) -> None:
    await raw.send(payload)
    await raw.send(Hello())
    assert isinstance(await raw.receive(), EngineInfo)
    assert running.server.counters.num_malformed == 1


async def test_unreadable_submit_is_answered(running: RunningServer, raw: RawClient) -> None:
    """Of a Submit that does not decode its client never heard again."""
    await raw.send({"type": "submit", "request_id": "r", "tenant_id": 7})
    answer = await raw.receive()
    assert isinstance(answer, Failure)
    assert (answer.request_id, answer.code) == ("r", "invalid_request")


async def test_submit_that_the_engine_cannot_digest_is_answered_and_survived(
    running: RunningServer, raw: RawClient
) -> None:
    """Three bytes of token ids were a ValueError in the loop, and the end of the engine."""
    submit = submit_of("r", "abc")
    broken = msgspec.structs.replace(submit.segments[0], tokens=b"abc")
    await raw.send(msgspec.structs.replace(submit, segments=(broken,)))
    answer = await raw.receive()
    assert isinstance(answer, Failure)
    assert (answer.request_id, answer.code) == ("r", "invalid_request")
    await raw.send(submit_of("r", "a"))
    answer = await raw.receive()
    assert isinstance(answer, Delta)
    assert answer.text == "a"


async def test_call_that_the_engine_cannot_digest_is_answered_and_survived(
    running: RunningServer, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explaining a prompt reads the same tokens as answering it, and ended the engine the same way."""

    def explain(submit: Submit) -> list[ExplainedPart]:
        return [ExplainedPart(start=0, end=len(unpack_tokens(submit.segments[0].tokens)), place="cold")]

    monkeypatch.setattr(running.engine, "explain", explain)
    submit = submit_of("r", "abc")
    broken = msgspec.structs.replace(submit.segments[0], tokens=b"abc")
    await raw.send(Explain(call_id="e", submit=msgspec.structs.replace(submit, segments=(broken,))))
    answer = await raw.receive()
    assert isinstance(answer, Failure)
    assert (answer.request_id, answer.code) == ("e", "invalid_request")
    await raw.send(submit_of("r", "a"))
    assert isinstance(await raw.receive(), Delta)


async def test_second_submit_of_an_id_leaves_the_first_alone(running: RunningServer, raw: RawClient) -> None:
    await raw.send(submit_of("r", "ab"))
    running.engine.held = True
    await raw.send(submit_of("s", "x"))
    await raw.send(submit_of("s", "yz"))
    await until(lambda: running.server.counters.num_malformed == 1)
    running.engine.held = False
    texts: dict[str, str] = {"r": "", "s": ""}
    for _ in range(3):
        delta = await raw.receive()
        assert isinstance(delta, Delta)
        texts[delta.request_id] += delta.text
    assert texts == {"r": "ab", "s": "x"}


async def test_gateway_that_vanished_has_its_requests_aborted(running: RunningServer, endpoint: str) -> None:
    """A gateway that was killed sends no abort."""
    running.engine.step_seconds = 0.001
    client = RawClient(endpoint)
    await client.send(submit_of("r", "x" * 900))
    assert isinstance(await client.receive(), Delta)
    client.close()
    await until(lambda: running.engine.aborted == ["c1/r"])


async def test_silent_gateway_has_its_requests_aborted_and_is_told(endpoint: str) -> None:
    """No message to send means no way to notice that nobody is there: a held request would stay for ever."""
    engine = EchoEngine(held=True)
    running = RunningServer(EngineServer(engine, endpoint, silence_limit=0.05), engine)
    client = RawClient(endpoint)
    try:
        await client.send(submit_of("r", "abc"))
        answer = await client.receive()
        assert isinstance(answer, Failure)
        assert answer.code == "engine_unavailable"
        assert engine.aborted == ["c1/r"]
        assert running.server.counters.num_expired_clients == 1
    finally:
        client.close()
        running.stop()


async def test_gateway_that_does_not_read_cannot_block_the_engine(endpoint: str) -> None:
    """One full queue stopped the step loop for every other client."""
    engine = EchoEngine()
    running = RunningServer(EngineServer(engine, endpoint, send_queue=4), engine)
    raw = RawClient(endpoint, receive_queue=1)
    try:
        open_requests = {str(index) for index in range(100)}
        for request_id in sorted(open_requests):
            await raw.send(submit_of(request_id, "x" * 900))
        await until(lambda: running.server.counters.num_slow_clients > 0)
        async with connected_client(endpoint) as other:
            assert await text_of(other, submit_of("r", "abc")) == "abc"
        await until(lambda: not engine.requests)
        # It reads again: of every request that it does not know the end of, it is told.
        heartbeat = asyncio.create_task(raw.say_hello_again_and_again())
        while open_requests:
            answer = await raw.receive()
            if isinstance(answer, Failure) or (isinstance(answer, Delta) and answer.finish_reason is not None):
                open_requests.discard(answer.request_id)
        heartbeat.cancel()
    finally:
        raw.close()
        running.stop()


class StuckServer(EngineServer):
    """While `stuck`, every client's queue is full."""

    stuck = False

    def _try_send(self, identity: bytes, message: EngineMessage | OperatorAnswer) -> _Sent:
        return _Sent.FULL if self.stuck else super()._try_send(identity, message)


async def test_request_whose_text_is_lost_behind_owed_answers_ends_with_an_error(endpoint: str) -> None:
    """A new request of a client that was behind lost its text without a word, and its reader waited for ever."""
    engine = EchoEngine(held=True)
    server = StuckServer(engine, endpoint)
    running = RunningServer(server, engine)
    raw = RawClient(endpoint)
    try:
        await raw.send(submit_of("early", "abc"))
        await until(lambda: bool(engine.requests))
        server.stuck, engine.held = True, False
        await until(lambda: not engine.requests)
        await raw.send(submit_of("long", "x" * 900))
        await raw.send(submit_of("short", "x"))
        await until(lambda: len(engine.submitted) == 3 and not engine.requests)
        assert engine.aborted == ["c1/early", "c1/long"]
        server.stuck = False
        await raw.send(Hello())
        answers = [await raw.receive() for _ in range(4)]
        codes = {answer.request_id: answer.code for answer in answers if isinstance(answer, Failure)}
        assert codes == dict.fromkeys(("early", "long", "short"), "engine_step_failed")
        assert isinstance(answers[-1], EngineInfo)
    finally:
        raw.close()
        running.stop()
