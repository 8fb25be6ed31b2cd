"""A gateway that hands over: whoever is connected is served to the end, and nobody is told that it shuts down."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from gateway import handover
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine


@pytest.fixture
def patient() -> Iterator[RunningGateway]:
    yield from run_gateway_thread(FakeEngine(), drain_seconds=60)


def ask(client: httpx.Client, gateway: RunningGateway) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    return client.post("/v1/chat/completions", json=body, headers=gateway.headers())


def test_requests_on_kept_connections_are_answered_and_the_last_on_each(patient: RunningGateway) -> None:
    """A client's pool knows nothing of a reload: what it sends on an old connection was answered with 503."""
    clients = [httpx.Client(base_url=patient.url) for _ in range(3)]
    assert [ask(client, patient).status_code for client in clients] == [200] * 3
    patient.on_loop(patient.server.begin_handover)
    for client in clients:
        answer = ask(client, patient)  # one after the other: between them nothing runs
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        client.close()
    patient.thread.join(20)
    assert not patient.thread.is_alive()


def test_idle_connections_are_closed_while_a_stream_goes_on(
    patient: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_IDLE_SECONDS", 0.2)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "wait"}], "stream": True}
    with socket.create_connection(("127.0.0.1", patient.port), timeout=20) as idle:
        idle.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        url, headers = f"{patient.url}/v1/chat/completions", patient.headers()
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as stream:
            patient.on_loop(patient.server.begin_handover)
            assert idle.recv(4096) == b"", "closed without a word"
            assert patient.engine.running, "and the stream goes on"
            assert stream.status_code == 200


def test_a_signal_to_stop_ends_a_handover(patient: RunningGateway) -> None:
    with socket.create_connection(("127.0.0.1", patient.port), timeout=20) as idle:
        idle.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        patient.on_loop(patient.server.begin_handover)
        patient.on_loop(patient.server.begin_shutdown)
        patient.thread.join(20)
        assert not patient.thread.is_alive()
