"""Spans and structured log lines, from the same record as the metrics."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from engine.logging_setup import JsonFormatter, configure_logging
from engine.protocol import PromptAccount
from engine.settings import ServerSettings, TracingSettings
from gateway.child import print_json_line
from gateway.tracing import build_tracer, span_tracer
from tests.gateway.conftest import RunningGateway, run_gateway_thread
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.operated import ask, operated_settings
from tests.gateway.test_metrics import record


class Kept(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def spans_of(ratio: float = 1.0, **changes: object) -> dict[str, ReadableSpan]:
    kept = Kept()
    tracer = span_tracer(kept, ratio)
    tracer.request_finished(record(**changes))  # type: ignore[arg-type]
    tracer.close()
    return {span.name: span for span in kept.spans}


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def test_a_request_is_a_span_with_the_genai_names_and_its_parts_below() -> None:
    account = PromptAccount(device=60, cold=30, partial_block=10)
    times = {"time": 1000.0, "seconds": 2.0, "time_to_first_token": 1.0, "queue_seconds": 0.25}
    spans = spans_of(account=account, prepare_seconds=0.5, retrieval=(0.125, 0.375), **times)
    whole = spans["chat m"]
    attributes = dict(whole.attributes or {})
    assert attributes["gen_ai.usage.input_tokens"] == 100
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 60
    assert attributes["gen_ai.usage.output_tokens"] == 7
    assert attributes["gen_ai.request.model"] == "m"
    parts = [spans[name] for name in ("prepare", "queue", "generate")]
    assert [part.parent.span_id for part in parts if part.parent] == [span_id(whole)] * 3
    edges = [edge for part in parts for edge in (part.start_time or 0, part.end_time or 0)]
    assert edges == sorted(edges)
    retrieve = spans["retrieve"]
    assert edges[0] < (retrieve.start_time or 0) < (retrieve.end_time or 0) < edges[1]
    assert (edges[0], edges[-1]) == (whole.start_time, whole.end_time)


def test_the_callers_trace_goes_on_and_its_decision_holds() -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    spans = spans_of(ratio=0.0, traceparent=f"00-{trace}-b7ad6b7169203331-01")
    found = spans["chat m"].context
    assert found is not None
    assert f"{found.trace_id:032x}" == trace
    assert spans_of(ratio=1.0, traceparent=f"00-{trace}-b7ad6b7169203331-00") == {}
    assert spans_of(ratio=0.0) == {}
    assert "chat m" in spans_of(traceparent="not a traceparent")


def test_failed_requests_are_errors_and_health_checks_are_not_traced() -> None:
    assert not spans_of(outcome="server_error", error_code="engine_step_failed")["chat m"].status.is_ok
    assert spans_of(model="") == {}


def test_tracing_is_off_by_default_and_then_not_even_imported() -> None:
    assert build_tracer(TracingSettings()) is None
    code = "import sys, gateway.operations; sys.exit('gateway.otel_tracer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


class Collector(BaseHTTPRequestHandler):
    """An OTLP collector: keeps what it is sent."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
        assert self.path == "/v1/traces"
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_a_gateway_sends_its_spans_to_a_collector_and_no_text_with_them(tmp_path: Path) -> None:
    """From `tracing.endpoint` to the bytes on the wire, under the trace of the caller."""
    Collector.bodies.clear()
    trace, secret = "0af7651916cd43dd8448eb211c80319c", "what nobody but the model shall read"
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever).start()
        tracing = TracingSettings(endpoint=f"http://127.0.0.1:{server.server_port}")
        settings = msgspec.structs.replace(operated_settings(tmp_path, ""), tracing=tracing)
        try:
            with contextmanager(run_gateway_thread)(FakeEngine(), settings, operated=True) as gateway:
                body = {"model": "echo/byte-model", "messages": [{"role": "user", "content": secret}]}
                headers = gateway.headers("alice") | {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
                answer = gateway.http.post("/v1/chat/completions", json=body, headers=headers)
                usage = answer.json()["usage"]
        finally:
            server.shutdown()
    sent = [ExportTraceServiceRequest.FromString(body) for body in Collector.bodies]
    spans = [
        span
        for message in sent
        for part in message.resource_spans
        for scope in part.scope_spans
        for span in scope.spans
    ]
    assert {span.name for span in spans} == {"chat echo/byte-model", "generate"}
    assert {span.trace_id.hex() for span in spans} == {trace}
    (whole,) = [span for span in spans if span.name.startswith("chat")]
    assert whole.parent_span_id.hex() == "b7ad6b7169203331"
    numbers = {attribute.key: attribute.value.int_value for attribute in whole.attributes}
    assert numbers["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert numbers["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert secret.encode() not in b"".join(Collector.bodies)


def test_one_json_line_a_request_with_numbers_and_no_text(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "a question that nobody but the model shall read"
    with caplog.at_level(logging.INFO, "gateway.access"):
        ask(gateway, secret, "bob", stream=False)
        gateway.wait_until(lambda: any(r.name == "gateway.access" for r in caplog.records))
    (line,) = [JsonFormatter().format(r) for r in caplog.records if r.name == "gateway.access"]
    fields = json.loads(line)
    assert fields["tenant"] == "bob"
    assert (fields["status"], fields["outcome"]) == (200, "ok")
    assert fields["prompt_tokens"] > fields["cached_tokens"] >= 0
    assert 0 < fields["ttft_seconds"] <= fields["seconds"]
    assert "question" not in line
    assert "\n" not in line


def test_a_path_with_line_breaks_stays_one_line(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    """A client that can start a line can forge one."""
    with caplog.at_level(logging.INFO, "gateway.access"):
        gateway.http.get("/a%0a%0d%1b[31mforged")
        gateway.wait_until(lambda: any(r.name == "gateway.access" for r in caplog.records))
    for r in caplog.records:
        assert "\n" not in r.getMessage()
        assert "\x1b" not in JsonFormatter().format(r)


def test_exceptions_and_other_messages_are_objects_too(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging(ServerSettings(log_format="json", log_level="warning"))
    assert isinstance(root.handlers[0].formatter, JsonFormatter)
    try:
        raise ValueError("broken")
    except ValueError:
        made = logging.LogRecord("n", logging.ERROR, "f", 1, "went %s", ("wrong",), sys.exc_info())
    fields = json.loads(JsonFormatter().format(made))
    assert (fields["level"], fields["message"]) == ("error", "went wrong")
    assert "ValueError: broken" in fields["exception"]


def test_every_line_of_a_whole_service_is_an_object_when_its_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix before a child's JSON, or the store's own words between, would break whoever collects the lines."""
    print_json_line("gateway.2", '{"level": "warning", "message": "märz"}')
    print_json_line("store", '31010:M 30 Nov * "Ready"')
    print_json_line("serve", "42")
    gateway, store, serve = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert gateway == {"process": "gateway.2", "level": "warning", "message": "märz"}
    assert (store["process"], store["level"], store["message"]) == ("store", "info", '31010:M 30 Nov * "Ready"')
    assert serve["message"] == "42"
