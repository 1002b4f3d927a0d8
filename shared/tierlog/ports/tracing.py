"""Traces: spans of what happens to a ledger, in whichever process.

A ledger's life is one trace. Its id is a hash of the stream's incarnation and the ledger's id, so
that ingest, scheduler and offloaders know it without telling each other; requests on the queue have
it in their ``traceparent`` too, where somebody else's is followed as well.

Invariants:
    * Nothing depends on a span: without a tracer all works the same, and costs a comparison.
    * What is inside of a span, in the same task or one that it started, is below it.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import Context, ContextVar, copy_context
from enum import StrEnum
from typing import Final, NamedTuple, Protocol
from uuid import UUID

import structlog

from tierlog.format.envelope import SPAN_ID_LEN, TRACE_ID_LEN, Traceparent
from tierlog.model.ids import LedgerId

Value = str | int | float | bool


class SpanKind(StrEnum):
    """On which side of a message a span is."""

    INTERNAL = "internal"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class LedgerLife(NamedTuple):
    """The trace of one ledger, and the span that all others of it are below."""

    incarnation: UUID
    ledger_id: LedgerId

    def traceparent(self, share: float) -> Traceparent:
        """Return the place of its first span; sampled are ``share`` of all ledgers."""
        name = self.incarnation.bytes + self.ledger_id.to_bytes(8, "big")
        made = hashlib.blake2b(
            name, digest_size=TRACE_ID_LEN + SPAN_ID_LEN, person=b"tierlog trace"
        )
        raw = made.digest()
        sampled = int.from_bytes(raw[8:TRACE_ID_LEN], "big") < share * 2**64
        return Traceparent(trace_id=raw[:TRACE_ID_LEN], span_id=raw[TRACE_ID_LEN:], sampled=sampled)


class Span(Protocol):
    """What is being done."""

    @property
    def traceparent(self) -> Traceparent | None:
        """Its place, for a message to somebody else; None when nothing is traced."""
        ...

    def set(self, **attributes: Value) -> None:
        """Say more of it."""
        ...


class Tracer(Protocol):
    """Makes spans."""

    append_every: int
    """One in so many appends is to have a span; 0: none."""

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
    ) -> AbstractContextManager[Span]:
        """Give a span, which ends with the context; an error that passes is noted in it.

        Without ``parent`` it is below the span around it. ``first``: it is the parent's own, the
        one that all others of the ledger's life are below. It began ``age_s`` ago.
        """
        ...


class _NoSpan:
    """Nothing is traced."""

    @property
    def traceparent(self) -> Traceparent | None:
        return None

    def set(self, **attributes: Value) -> None:
        pass


class NoTracer:
    """Traces nothing."""

    append_every = 0

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
    ) -> AbstractContextManager[Span]:
        """Give a span that is none."""
        return _NOTHING


_NOTHING: Final[AbstractContextManager[Span]] = contextlib.nullcontext(_NoSpan())
NO_TRACER: Final[Tracer] = NoTracer()

CALLER: Final[ContextVar[Traceparent | None]] = ContextVar("tierlog_caller", default=None)
"""The trace in which somebody called this process, if they said so."""

_AROUND: ContextVar[Tracer] = ContextVar("tierlog_tracer", default=NO_TRACER)


@contextlib.contextmanager
def tracing_with(tracer: Tracer) -> Iterator[None]:
    """Let ``within`` use this tracer inside of the context; for tracers."""
    token = _AROUND.set(tracer)
    try:
        yield
    finally:
        _AROUND.reset(token)


def apart() -> Context:
    """Return a context for a task that outlives the request or span in which it is started.

    It is in no trace, and its lines in the log have no request's ids.
    """
    context = copy_context()
    context.run(_forget)
    return context


def _forget() -> None:
    structlog.contextvars.unbind_contextvars("request_id", "trace_id")
    CALLER.set(None)
    _AROUND.set(NO_TRACER)


def within(name: str, **attributes: Value) -> AbstractContextManager[Span]:
    """Give a span below the one around it; where there is none, nothing is traced."""
    tracer = _AROUND.get()
    if tracer is NO_TRACER:
        return _NOTHING
    return tracer.span(name, **attributes)  # type: ignore[arg-type]  # none of its own options
