"""A gateway that hands over: whoever is connected is served to the end, and nobody is told that it shuts down."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from gateway import handover
from gateway.handover import LISTEN_FD, READY_FD
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import MODEL, FakeEngine


@pytest.fixture
def patient() -> Iterator[RunningGateway]:
    yield from run_gateway_thread(FakeEngine(), drain_seconds=60)


def ask(client: httpx.Client, gateway: RunningGateway) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    return client.post("/v1/chat/completions", json=body, headers=gateway.headers())


def whole_answer(connection: socket.socket) -> bytes:
    """Of /livez: head and body may come one by one."""
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(4096)
        assert part, answer
        answer += part
    return answer


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
        assert b"200" in whole_answer(idle)
        url, headers = f"{patient.url}/v1/chat/completions", patient.headers()
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as stream:
            patient.on_loop(patient.server.begin_handover)
            assert idle.recv(4096) == b"", "closed without a word"
            assert patient.engine.running, "and the stream goes on"
            assert stream.status_code == 200


def test_a_signal_to_stop_ends_a_handover(patient: RunningGateway) -> None:
    with socket.create_connection(("127.0.0.1", patient.port), timeout=20) as idle:
        idle.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in whole_answer(idle)
        patient.on_loop(patient.server.begin_handover)
        patient.on_loop(patient.server.begin_shutdown)
        patient.thread.join(20)
        assert not patient.thread.is_alive()


@pytest.mark.slow
def test_a_successor_answers_nobody_before_it_has_reached_the_engine(tmp_path: Path) -> None:
    """It shares the listening socket: what it took meanwhile got a 503 that its predecessor would not have given."""
    endpoint = f"ipc://{tmp_path}/engine.sock"
    environ = {**os.environ, "RADIXGATE_STORE__DATA_DIR": str(tmp_path), "RADIXGATE_ENGINE__ENDPOINT": endpoint}
    read_fd, write_fd = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        passed = {LISTEN_FD: str(listener.fileno()), READY_FD: str(write_fd)}
        command = [sys.executable, "-m", "gateway.server"]
        fds = (listener.fileno(), write_fd)
        successor = subprocess.Popen(command, env=environ | passed, pass_fds=fds, stderr=subprocess.PIPE, text=True)
        stack.callback(end, successor)
        os.close(write_fd)
        assert successor.stderr is not None
        assert any("Waiting for application startup" in line for line in successor.stderr)
        with socket.create_connection(listener.getsockname(), timeout=1.0) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            with pytest.raises(TimeoutError):
                client.recv(4096)
            engine = subprocess.Popen([sys.executable, "-m", "tests.gateway.fake_engine_process"], env=environ)
            stack.callback(end, engine)
            client.settimeout(60)
            assert os.read(read_fd, 1) == b"1"
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
    os.close(read_fd)


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
