"""The gateway's own process: its command line, its log, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.auth import hash_api_key, new_api_key

KEY = new_api_key()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def process(tmp_path: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """`python -m gateway.server` without an engine behind it."""
    config = tmp_path / "radixgate.toml"
    config.write_text(
        f"""
        [server]
        port = {port}
        [store]
        data_dir = "{tmp_path}"
        [security]
        secret = "test"
        [[tenants]]
        id = "alice"
        key_hashes = ["{hash_api_key(b"test", KEY)}"]
        """
    )
    command = [sys.executable, "-m", "gateway.server", "--config", str(config)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_alive(port: int) -> None:
    transport = httpx.HTTPTransport(retries=8)  # with a growing pause between the attempts
    with httpx.Client(transport=transport) as client:
        assert client.get(f"http://127.0.0.1:{port}/livez").status_code == 200


def test_sigterm_ends_it_with_status_0_and_one_log_line_a_request(process: subprocess.Popen[str], port: int) -> None:
    """uvicorn raises the signal again after its end: a supervisor would take a clean stop for a killed process."""
    wait_alive(port)
    secret_text = "nobody else's business"
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": secret_text}]},
        headers={"authorization": f"Bearer {KEY}", "x-request-id": "my-id"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    (line,) = [line for line in log.splitlines() if "id=my-id" in line]
    assert "POST /v1/chat/completions 503" in line
    assert "tenant=alice" in line
    assert secret_text not in log
    assert KEY not in log


def test_a_port_that_is_taken_is_an_error_and_not_a_running_process(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environ = {
            **os.environ,
            "RADIXGATE_SERVER__PORT": str(taken.getsockname()[1]),
            "RADIXGATE_STORE__DATA_DIR": str(tmp_path),
        }
        done = subprocess.run(
            [sys.executable, "-m", "gateway.server"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode != 0
    assert "address already in use" in done.stderr
