"""OpenTelemetry spans of finished requests, by the GenAI semantic conventions. Off unless `tracing.endpoint` is set.

    traceparent of the caller ─┐
                               └─ chat MODEL ──┬── prepare      authentication, prompt, tokenization
                                               ├── retrieve     documents for it (inside prepare)
                                               ├── queue        in the engine, until the first step
                                               └── generate     first step to last token

The spans are made when a request is over, from the same record as its log line and its metrics, with the times that
were measured: nothing is on a request's way but the copy of its `traceparent`. No text of a prompt or an answer is in
them.
Rejected: live spans around every call, which put a library's context handling into each token's path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.errors import ConfigError
from engine.settings import TracingSettings
from gateway.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_NANOSECONDS = 1_000_000_000


class Tracer(Protocol):
    def request_finished(self, record: RequestRecord) -> None: ...

    def close(self) -> None:
        """Sends what has not been sent."""
        ...


def build_tracer(settings: TracingSettings) -> Tracer | None:
    """None when tracing is off; OpenTelemetry is then not even imported. Raises `ConfigError`."""
    if not settings.endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError("tracing.endpoint is set: pip install 'radixgate[tracing]'", param="tracing") from error
    return span_tracer(OTLPSpanExporter(f"{settings.endpoint.rstrip('/')}/v1/traces"), settings.sample_ratio)


def span_tracer(exporter: SpanExporter, sample_ratio: float) -> Tracer:
    """Imported here, because a gateway that traces nothing must not pay a second of start for it."""
    from gateway.otel_tracer import OtelTracer

    return OtelTracer(exporter, sample_ratio)


def span_attributes(record: RequestRecord) -> dict[str, str | int | float | bool]:
    """The names of the GenAI semantic conventions, and ours where they have none."""
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "radixgate",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.route,
        "radixgate.request_id": record.request_id,
        "radixgate.outcome": record.outcome,
    }
    if record.tenant_id is not None:
        attributes["radixgate.tenant"] = record.tenant_id
    if record.error_code:
        attributes["error.type"] = record.error_code
    if (used := record.used) is not None:
        attributes["gen_ai.usage.input_tokens"] = used.account.num_prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = used.account.num_cached_tokens
        attributes["gen_ai.usage.output_tokens"] = used.num_output_tokens
        for name, count in msgspec.structs.asdict(used.account).items():
            if count:
                attributes[f"radixgate.prompt_tokens.{name}"] = count
    return attributes


def span_times(record: RequestRecord) -> list[tuple[str, int, int]]:
    """(name, begin, end) of the parts, in Unix nanoseconds; only what was measured."""
    end = record.time
    begin = end - record.seconds
    if record.time_to_first_token is None:
        return []
    first = begin + record.time_to_first_token
    if record.queue_seconds is None:
        return [("generate", _nano(first), _nano(end))]
    prepared = begin + (record.prepare_seconds or 0.0)
    # What lies between the end of the queue and the first token is prefill, which belongs to generating.
    started = min(prepared + record.queue_seconds, first)
    parts = [("prepare", _nano(begin), _nano(prepared))]
    if record.retrieval is not None:
        parts.append(("retrieve", _nano(begin + record.retrieval[0]), _nano(begin + record.retrieval[1])))
    return [
        *parts,
        ("queue", _nano(prepared), _nano(started)),
        ("generate", _nano(started), _nano(end)),
    ]


def _nano(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
