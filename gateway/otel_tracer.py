"""The tracer that speaks OpenTelemetry; imported only when tracing is on."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.request_record import RequestRecord
from gateway.tracing import span_attributes, span_times

_FAILED = ("server_error", "stream_error")


class OtelTracer:
    def __init__(self, exporter: SpanExporter, sample_ratio: float) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "radixgate-gateway"}),
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("radixgate")
        self._propagator = TraceContextTextMapPropagator()

    def request_finished(self, record: RequestRecord) -> None:
        if not record.model:
            return
        parent = self._propagator.extract({"traceparent": record.traceparent})
        end = int(record.time * 1e9)
        span = self._tracer.start_span(
            f"chat {record.model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=span_attributes(record),
            start_time=end - int(record.seconds * 1e9),
        )
        inside = trace.set_span_in_context(span)
        for name, begin, stop in span_times(record):
            self._tracer.start_span(name, context=inside, start_time=begin).end(stop)
        if record.outcome in _FAILED:
            span.set_status(Status(StatusCode.ERROR, record.error_code))
        span.end(end)

    def close(self) -> None:
        self._provider.shutdown()
