"""`radixgate cache` over a real socket, with an engine that echoes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.protocol import unpack_tokens
from engine.server import EngineServer
from gateway.cli import main
from tests.engine.echo_engine import EchoEngine
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.gateway.chat_templates import CHATML


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine(tokenizer_json=byte_tokenizer().to_str().encode(), chat_template=CHATML)


@pytest.fixture
def flags(tmp_path: Path, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.chdir(tmp_path)
    endpoint = f"ipc://{tmp_path / 'e.sock'}"
    server = EngineServer(engine, endpoint, drain_seconds=0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield ["--set", f"engine.endpoint={endpoint}", "--data-dir", str(tmp_path / "data")]
    server.stop()
    thread.join()


def test_stats_show_every_tier(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stats", *flags]) == 0
    assert "device" in capsys.readouterr().out
    assert main(["cache", "stats", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["incarnation"] == "first"


def test_explain_builds_the_prompt_as_the_gateway_does(
    flags: list[str], engine: EchoEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {
        "model": "echo",
        "messages": [{"role": "user", "content": "Why?"}],
        "documents": [{"id": "handbook", "text": "Because."}],
    }
    (tmp_path / "request.json").write_text(json.dumps(body))
    assert main(["cache", "explain", "request.json", *flags]) == 0
    assert "cold" in capsys.readouterr().out
    (submit,) = engine.explained
    assert submit.tenant_id == "demo"
    assert [segment.document_id for segment in submit.segments if segment.document_id] == ["handbook"]
    token_ids = [token for segment in submit.segments for token in unpack_tokens(segment.tokens)]
    assert "Because." in byte_tokenizer().decode(token_ids)


def test_explain_of_a_request_that_would_be_refused_says_so(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "request.json").write_text('{"model": "echo", "messages": [], "temprature": 1}')
    assert main(["cache", "explain", "request.json", *flags]) == 1
    assert "temprature" in capsys.readouterr().err


def test_verify_reports_and_ends_with_1_when_a_block_differs(
    flags: list[str], engine: EchoEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "verify", "--sample", "7", *flags]) == 0
    assert "7 blocks computed anew, 0 different" in capsys.readouterr().out
    engine.num_different = 1
    assert main(["cache", "verify", *flags]) == 1


def test_evict_names_tier_and_count(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "evict", "host", "--blocks", "12", *flags]) == 0
    assert "12 blocks" in capsys.readouterr().out


def test_erase_wants_to_be_told_what(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A bare `erase` must not take everything."""
    assert main(["cache", "erase", *flags]) == 2
    assert main(["cache", "erase", "--owner", "acme", "--document", "handbook", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out) == {"num_blocks": 3, "device": 1, "host": 1, "disk": 1}


def test_without_an_engine_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cache_command.ANSWER_SECONDS", 0.1)
    endpoint = f"ipc://{tmp_path / 'nobody.sock'}"
    assert main(["cache", "stats", "--set", f"engine.endpoint={endpoint}", "--data-dir", str(tmp_path)]) == 1
    assert "no engine answers" in capsys.readouterr().err
