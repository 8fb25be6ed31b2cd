"""A real store for the tests of a session: the binary that `radixgate serve` starts, without persistence."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
import redis

from gateway.store import find_store_binary


@pytest.fixture(scope="session")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("store")
    socket = directory / "s"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(directory)]
    process = subprocess.Popen([str(find_store_binary()), *options], stdout=subprocess.DEVNULL)
    try:
        _wait_until_it_answers(f"unix://{socket}", process)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait(10)


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    with redis.Redis.from_url(url) as client:
        for _ in range(500):
            try:
                client.ping()
            except redis.ConnectionError:
                assert process.poll() is None, "the store died"
                time.sleep(0.02)
            else:
                return
    raise AssertionError("the store does not answer")
