from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from engine.errors import RadixgateError, ShuttingDownError
from gateway.drain import Drain
from tests.gateway.conftest import RunningGateway
from tests.gateway.fake_engine import MODEL


async def test_an_idle_server_is_drained_at_once() -> None:
    assert await Drain().drain(deadline=3600) == 0


async def test_requests_that_finish_in_time_are_not_failed() -> None:
    drain, failed = Drain(), list[RadixgateError]()
    with drain.admit(failed.append):
        waiting = asyncio.create_task(drain.drain(deadline=3600))
        await asyncio.sleep(0)
        assert drain.draining
        with pytest.raises(ShuttingDownError), drain.admit(failed.append):
            pytest.fail("a new request was admitted")
        assert drain.num_active == 1
    assert await waiting == 0
    assert failed == []


async def test_a_second_signal_fails_the_rest_now() -> None:
    drain, failed = Drain(), asyncio.Queue[RadixgateError]()

    async def request() -> None:
        with drain.admit(failed.put_nowait):
            error = await failed.get()
            assert isinstance(error, ShuttingDownError)

    running = asyncio.create_task(request())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(drain.drain(deadline=3600))
    await asyncio.sleep(0)
    drain.cut()
    assert await waiting == 1
    await running


def stream_body(text: str) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True}


def test_at_the_deadline_a_stream_gets_an_error_event(gateway: RunningGateway) -> None:
    """A bare cut reads as a network fault, or worse as the end of the answer (vllm#24885)."""
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=stream_body("wait"), headers=gateway.headers(), timeout=30) as response:
        assert response.status_code == 200
        gateway.on_loop(gateway.server.begin_shutdown)
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert "data: [DONE]" not in lines
    gateway.thread.join(20)
    assert not gateway.thread.is_alive()
    assert gateway.engine.closed
    assert len(gateway.engine.aborted) == 1


def test_at_the_deadline_a_request_without_a_byte_yet_gets_503(gateway: RunningGateway) -> None:
    with gateway.client() as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            client.chat.completions.create, model=MODEL, messages=[{"role": "user", "content": "silence"}]
        )
        gateway.wait_until(lambda: bool(gateway.engine.running))
        gateway.on_loop(gateway.server.begin_shutdown)
        with pytest.raises(openai.InternalServerError) as caught:
            call.result(20)
    assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")


def test_while_draining_new_requests_get_503_and_running_ones_go_on(gateway: RunningGateway) -> None:
    """The socket stays open, so that a balancer reads the 503 and does not see refused connections."""
    gateway.on_loop(gateway.drain.begin)
    with gateway.client() as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
    assert caught.value.response.headers["retry-after"]
    ready = httpx.get(f"{gateway.url}/readyz")
    assert (ready.status_code, ready.json()["reason"]) == (503, "shutting down")
    assert httpx.get(f"{gateway.url}/livez").status_code == 200
