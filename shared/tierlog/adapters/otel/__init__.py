"""Traces by OpenTelemetry's SDK, sent with OTLP or to whatever exporter is given.

Owns the provider, which is no global one, and how spans of Tierlog become the SDK's. Invariants:
    * A ledger's first span has the ids that its life says; all others have random ones.
    * What an error says goes into a span without secrets, and never with a stack trace.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping

from opentelemetry.context import attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind as OtelKind

from tierlog.format.envelope import Traceparent
from tierlog.model.errors import TierlogError
from tierlog.ports.tracing import LedgerLife, Span, SpanKind, Value, tracing_with
from tierlog.runtime.redaction import process_redactor

ERROR_LEN_MAX = 300
_KINDS: Mapping[SpanKind, OtelKind] = {
    SpanKind.INTERNAL: OtelKind.INTERNAL,
    SpanKind.PRODUCER: OtelKind.PRODUCER,
    SpanKind.CONSUMER: OtelKind.CONSUMER,
}


class _Ids(IdGenerator):
    """Random ids, but for a span whose ids are said. Asked within one call, by no other thread."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.said: Traceparent | None = None

    def generate_span_id(self) -> int:
        if self.said is None:
            return self._random.generate_span_id()
        return int.from_bytes(self.said.span_id, "big")

    def generate_trace_id(self) -> int:
        if self.said is None:
            return self._random.generate_trace_id()
        return int.from_bytes(self.said.trace_id, "big")

    def is_trace_id_random(self) -> bool:
        """Tell what the flag "random" of a trace context may say."""
        return self.said is None


class _OtelSpan:
    def __init__(self, span: OtelSpan) -> None:
        self._span = span

    @property
    def traceparent(self) -> Traceparent | None:
        place = self._span.get_span_context()
        return Traceparent(
            trace_id=place.trace_id.to_bytes(16, "big"),
            span_id=place.span_id.to_bytes(8, "big"),
            sampled=place.trace_flags.sampled,
        )

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))


class OtelTracer:
    """``Tracer`` over the SDK."""

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        service: str,
        instance: str = "",
        version: str = "",
        ledgers_share: float = 1.0,
        append_every: int = 0,
    ) -> None:
        self.append_every = append_every
        self._share = ledgers_share
        self._ids = _Ids()
        resource = {
            "service.name": f"tierlog-{service}",
            "service.namespace": "tierlog",
            "service.instance.id": instance,
            "service.version": version,
        }
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource({name: value for name, value in resource.items() if value}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tierlog", version or None)

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        *,
        parent: Traceparent | LedgerLife | None = None,
        link: Traceparent | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        first: bool = False,
        age_s: float = 0.0,
        **attributes: Value,
    ) -> Iterator[Span]:
        place = parent.traceparent(self._share) if isinstance(parent, LedgerLife) else parent
        if first and place is not None and not place.sampled:
            # It has no parent that could say so.
            yield _NotSampled(place)
            return
        started = self._start(name, place, link, kind, first=first, age_s=age_s)
        started.set_attributes(_named(attributes))
        with contextlib.ExitStack() as around:
            around.enter_context(_current(started))
            around.enter_context(tracing_with(self))
            try:
                yield _OtelSpan(started)
            except BaseException as error:
                started.set_status(StatusCode.ERROR, _told(error))
                raise
            finally:
                started.end()

    def _start(
        self,
        name: str,
        place: Traceparent | None,
        link: Traceparent | None,
        kind: SpanKind,
        *,
        first: bool,
        age_s: float,
    ) -> OtelSpan:
        context = None
        if place is not None and not first:
            context = set_span_in_context(NonRecordingSpan(_context_of(place)))
        elif first:
            context = set_span_in_context(NonRecordingSpan(_NOWHERE))
            self._ids.said = place
        try:
            return self._tracer.start_span(
                name,
                context=context,
                kind=_KINDS[kind],
                links=[Link(_context_of(link))] if link is not None else None,
                start_time=time.time_ns() - round(age_s * 1e9) if age_s else None,
            )
        finally:
            self._ids.said = None

    def close(self) -> None:
        """Send what waits, within the exporter's bound; blocks."""
        self._provider.shutdown()


class _NotSampled:
    def __init__(self, place: Traceparent) -> None:
        self.traceparent = place

    def set(self, **attributes: Value) -> None:
        pass


@contextlib.contextmanager
def _current(span: OtelSpan) -> Iterator[None]:
    """Let spans that are begun inside be below this one."""
    token = attach(set_span_in_context(span))
    try:
        yield
    finally:
        detach(token)


_NOWHERE = SpanContext(trace_id=0, span_id=0, is_remote=False)


def _context_of(place: Traceparent) -> SpanContext:
    return SpanContext(
        trace_id=int.from_bytes(place.trace_id, "big"),
        span_id=int.from_bytes(place.span_id, "big"),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if place.sampled else TraceFlags.DEFAULT),
    )


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Return attributes by the names of OpenTelemetry's conventions, or of Tierlog's own."""
    return {
        name.replace("__", ".") if "__" in name else f"tierlog.{name}": value
        for name, value in attributes.items()
    }


def _told(error: BaseException) -> str:
    if isinstance(error, TierlogError):
        return process_redactor().text(f"{error.reason.value}: {error.message}")[:ERROR_LEN_MAX]
    return type(error).__name__


def otlp_processor(
    endpoint_url: str,
    *,
    headers: Mapping[str, str],
    queued_max: int,
    timeout_s: float,
) -> SpanProcessor:
    """Return what sends spans to a collector, by OTLP over HTTP, in a thread of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - large
        OTLPSpanExporter,
    )

    exporter: SpanExporter = OTLPSpanExporter(
        endpoint=endpoint_url, headers=dict(headers), timeout=timeout_s
    )
    return BatchSpanProcessor(
        exporter,
        max_queue_size=queued_max,
        max_export_batch_size=min(512, queued_max),
        export_timeout_millis=timeout_s * 1000,
    )
