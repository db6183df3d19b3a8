"""OpenTelemetry traces of requests, where a server is asked for them: a span each, below the caller's own.

Spans bear the route, the request id and the kind of an error, never a body, a boundary or a message that could quote
one. Where they go is what OpenTelemetry's own environment variables say (a collector on this machine, if they are not
set).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from importlib import import_module
from typing import TypeVar

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

T = TypeVar("T")


class Tracing:
    """A tracer of one server."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "zeromem"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _collector()))
        self._tracer = self._provider.get_tracer("zeromem_torch.serving")
        self._read = TraceContextTextMapPropagator()

    async def around(self, work: Awaitable[T], name: str, headers: Mapping[bytes, bytes], request_id: str) -> T:
        """The work, inside a span that continues the trace that the headers name."""
        names = (b"traceparent", b"tracestate")
        carrier = {key.decode(): headers[key].decode("latin-1") for key in names if key in headers}
        with self._tracer.start_as_current_span(
            name,
            context=self._read.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"zeromem.request_id": request_id},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                return await work
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(StatusCode.ERROR)
                raise

    def close(self) -> None:
        """Send what is still held."""
        self._provider.shutdown()


def _collector() -> SpanExporter:
    try:
        module = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        needed = "pip install opentelemetry-exporter-otlp-proto-http"
        raise ImportError(f"traces need an exporter that sends them; run `{needed}`") from error
    exporter: SpanExporter = module.OTLPSpanExporter()
    return exporter
