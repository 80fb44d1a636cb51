"""Spans by OpenTelemetry, sent by OTLP over HTTP. Its packages are imported only when a tracer is
opened.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from lmcache_core.errors import ConfigError
from lmcache_core.extras import install_line
from lmcache_core.telemetry.request_context import TRACEPARENT_HEADER
from lmcache_core.telemetry.sparse_log import SparseLog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer

logger = logging.getLogger(__name__)

MAX_QUEUED_SPANS: Final = 2048
"""Queue of spans; beyond, spans are dropped: workers never wait for the collector."""
MAX_BATCH_SPANS: Final = 512
SEND_INTERVAL_MS: Final = 1000
SEND_TIMEOUT_S: Final = 2.0
CLOSE_TIMEOUT_S: Final = 3.0
DEFAULT_SAMPLE_RATIO: Final = 0.01
TRACES_PATH: Final = "/v1/traces"
_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
_SENDING: Final[ContextVar[bool]] = ContextVar("lmcache_sending_spans", default=False)


def open_tracer(
    endpoint: str | None, service: str, instance: str, sample_ratio: float = DEFAULT_SAMPLE_RATIO
) -> Tracer | None:
    """Start tracing, if there is a collector.

    Args:
        endpoint: Base URL of the collector's OTLP over HTTP, such as `http://collector:4318`; None:
            nothing is traced or imported.
        service: Name of this process in traces.
        instance: Its name among processes of the same kind.
        sample_ratio: Share of the traces that begin here; for others the caller's decision applies.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    try:
        return Tracer(endpoint, service, instance, sample_ratio)
    except ImportError as exc:
        raise ConfigError(
            f"otlp_endpoint is set, but {exc.name} is not installed: {install_line('traces')}"
        ) from exc


class Tracer:
    """Begins spans and sends those that have ended. Created by `open_tracer`."""

    def __init__(self, endpoint: str, service: str, instance: str, sample_ratio: float) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        sender = OTLPSpanExporter(endpoint.rstrip("/") + TRACES_PATH, timeout=SEND_TIMEOUT_S)
        processor = BatchSpanProcessor(
            _quiet(sender),
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=SEND_INTERVAL_MS,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
        resource = Resource({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(
            resource=resource,
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("lmcache")
        self._is_closing = threading.Event()
        # Started now: an exit handler may be unable to start a thread.
        self._closing = threading.Thread(
            target=self._shut_down, name="lmcache-traces-close", daemon=True
        )
        self._closing.start()

    def begin(self, name: str, traceparent: str = "", *, is_server: bool = True) -> Span:
        """Begin a span.

        Args:
            traceparent: The caller's span in another process; "" for none.
            is_server: Whether the work is done for another process.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = (
            TraceContextTextMapPropagator().extract({TRACEPARENT_HEADER: traceparent}, Context())
            if traceparent
            else Context()
        )
        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        return Span(self._tracer, self._tracer.start_span(name, parent, kind))

    def close(self) -> None:
        """Send spans that have ended; a hanging collector is left to its thread. Idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._closing.join(CLOSE_TIMEOUT_S)
        if self._closing.is_alive():
            logger.warning(
                "collector did not take the last spans, leaving them: waited_s=%g", CLOSE_TIMEOUT_S
            )

    def _shut_down(self) -> None:
        self._is_closing.wait()
        self._provider.shutdown()


class Span:
    """A traced piece of work. Ended once."""

    def __init__(self, tracer: OtelTracer, span: OtelSpan) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        """Its identity for other processes, in the format of W3C Trace Context."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(self, name: str) -> Span:
        """Begin a span for a part of this work."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return Span(
            self._tracer, self._tracer.start_span(name, set_span_in_context(self._span, Context()))
        )

    def end(self, failed: bool = False) -> None:
        """End the span."""
        from opentelemetry.trace import StatusCode

        if failed:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _quiet(sender: Any) -> Any:
    """Return an exporter that logs failures once a minute instead of once per attempt."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Quiet(SpanExporter):
        def __init__(self) -> None:
            self._log = SparseLog(logger)

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            begun = time.monotonic()
            before = _SENDING.set(True)
            try:
                result: SpanExportResult = sender.export(spans)
            finally:
                _SENDING.reset(before)
            if result is not SpanExportResult.SUCCESS:
                waited_s = time.monotonic() - begun
                self._log.log(
                    logging.WARNING,
                    "spans not sent, dropped: spans=%d waited_s=%.1f",
                    len(spans),
                    waited_s,
                )
            return result

        def shutdown(self) -> None:
            sender.shutdown()

        def force_flush(self, timeout_millis: int = 0) -> bool:
            return True

    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_from_another_exporter)
    return Quiet()


def _is_from_another_exporter(record: logging.LogRecord) -> bool:
    """Return whether another exporter logs this; a serving engine may have its own."""
    return not _SENDING.get()
