"""Offload requests from the queue, each up to a complete copy (protocols.md section 3).

Owns what becomes of a request: how it ended, and whether it comes again. Does not own the attempt
(``tierlog.offload.attempting``); the loop around ``handle`` takes and acknowledges events.

Invariants:
    * ``handle`` returns only when the request needs no second delivery.
    * What nobody foresaw of one ledger's copy is a failure as any other: told, with its trace and
      in a metric, and no other ledger's end.

Crash: at any step, another delivery begins a new attempt and abandons this one.
Retries: what may succeed later, a copy that took too long with it, is raised for redelivery,
``deliveries_max`` times in a row; then, and at once for what is refused, the event goes to the
dead-letter topic and the scheduler, which looks at the metadata alone, asks again in its own
time. What can't even be put aside is raised for redelivery without an end: an event is never
dropped unseen. So is a request for a ledger that another worker is at, which nobody else may ask
for again. The scheduler also asks again for a stream whose offloads were paused.
"""

from dataclasses import dataclass
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.model.errors import RefusedError, TierlogError
from tierlog.offload.attempting import (
    COMPLETED,
    REFUSED,
    Done,
    LockedError,
    OffloadAttempts,
    OpenLedger,
    PausedError,
    StaleError,
    UnforeseenError,
    again,
    foreseen,
)
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.manifests import AttemptGuard
from tierlog.offload.messages import (
    ERROR_LEN_MAX,
    OffloadRequest,
    Outgoing,
    Stationery,
    parse_request,
    trace_of,
)
from tierlog.ports.clock import Clock
from tierlog.ports.events import Event, EventPublisher
from tierlog.ports.ids import Ids
from tierlog.ports.tracing import NO_TRACER, SpanKind, Tracer
from tierlog.proto.v1 import events_pb2 as pb
from tierlog_offloader import metrics

log = structlog.get_logger()

LOCKED_EVENTS_MAX: Final = 10_000
_FAILED: Final = pb.OffloadResult.OUTCOME_FAILED
_PAUSED: Final = pb.OffloadResult.OUTCOME_PAUSED
_STALE: Final = pb.OffloadResult.OUTCOME_STALE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Who this worker is, and how often it tries in a row."""

    name: str
    deliveries_max: int = 5


class OffloadWorker(OffloadAttempts):
    """Handles requests, one at a time or several at once."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        open_ledger: OpenLedger,
        offloader: LedgerOffloader,
        guard: AttemptGuard,
        publisher: EventPublisher,
        stationery: Stationery,
        clock: Clock,
        ids: Ids,
        settings: WorkerSettings,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        super().__init__(
            catalog=catalog,
            open_ledger=open_ledger,
            offloader=offloader,
            guard=guard,
            ids=ids,
            name=settings.name,
        )
        self._tracer = tracer
        self._publisher = publisher
        self._stationery = stationery
        self._clock = clock
        self._settings = settings
        self._locked = _LocksMet()
        self.dead_lettered = 0

    async def handle(self, event: Event) -> None:
        """Do what an event asks for; returning means that it may be acknowledged."""
        trace = trace_of(event)
        with (
            structlog.contextvars.bound_contextvars(
                trace_id=trace.trace_id.hex() if trace is not None else None
            ),
            metrics.IN_HAND.track_inprogress(),
            self._tracer.span(
                "offload.process",
                parent=trace,
                kind=SpanKind.CONSUMER,
                messaging__system="kafka",
                messaging__operation__type="process",
                messaging__destination__name=event.topic,
                delivery=event.attempt,
                worker=self._settings.name,
            ),
        ):
            await self._handle(event)

    async def _handle(self, event: Event) -> None:
        try:
            request = parse_request(event)
        except TierlogError as error:
            await self._put_aside(event, error)
            return
        began_s = self._clock.monotonic_s()
        told = log.bind(ledger_id=request.ledger_id, stream=request.stream)
        try:
            done = await self.offload(request)
        except LockedError:
            # However often: whoever is at it may die, and its own delivery of the request is void
            # where the partition is this worker's now. Its lock ends with it.
            self._locked.met(event)
            raise
        except (PausedError, StaleError) as error:
            outcome = _PAUSED if isinstance(error, PausedError) else _STALE
            await self._tell(event, request, Done(outcome=outcome), began_s, error)
            told.info("request.dropped", cause=str(error))
            return
        except Exception as error:
            known = _noted(error, request)
            refused = isinstance(known, RefusedError)
            if not refused and self._locked.tries(event) < self._settings.deliveries_max:
                raise again(known) from error
            outcome = REFUSED if refused else _FAILED
            await self._tell(event, request, Done(outcome=outcome), began_s, known)
            await self._put_aside(event, known)
            return
        await self._tell(event, request, done, began_s)
        told.info("request.handled", outcome=pb.OffloadResult.Outcome.Name(done.outcome))

    async def _tell(
        self,
        event: Event,
        request: OffloadRequest,
        done: Done,
        began_s: float,
        error: TierlogError | None = None,
    ) -> None:
        """Step 8: publish how it ended."""
        took_s = self._clock.monotonic_s() - began_s
        result = pb.OffloadResult(
            stream=request.stream,
            ledger_id=request.ledger_id,
            uuid=done.uuid.bytes if done.uuid is not None else b"",
            outcome=done.outcome,
            error_reason=error.reason.value if error is not None else "",
            error_message=str(error)[:ERROR_LEN_MAX] if error is not None else "",
            data_len=done.copy.data_len if done.copy is not None else 0,
            entry_count=done.copy.entry_count if done.copy is not None else 0,
            duration_ms=round(took_s * 1000),
            worker=self._settings.name,
        )
        await self._publish(self._stationery.result(result, cause=event))
        metrics.REQUESTS.labels(metrics.OUTCOMES[done.outcome]).inc()
        if done.outcome == COMPLETED:
            metrics.SECONDS.observe(took_s)
            metrics.BYTES.inc(result.data_len)

    async def _put_aside(self, event: Event, error: TierlogError) -> None:
        log.warning(
            "request.put_aside",
            key=event.key[:200].decode("utf-8", "replace"),
            attempt=event.attempt,
            reason=error.reason.value,
            cause=str(error),
        )
        await self._publish(self._stationery.dead_letter(event, error))
        self.dead_lettered += 1
        metrics.DEAD_LETTERS.labels(error.reason.value).inc()

    async def _publish(self, outgoing: Outgoing) -> None:
        topic, key, value, headers = outgoing
        try:
            await self._publisher.publish(topic, key=key, value=value, headers=headers)
        except RefusedError as error:
            log.error("event.refused", topic=topic, cause=str(error))  # noqa: TRY400 - not ours
            raise again(error) from error


def _noted(error: Exception, request: OffloadRequest) -> TierlogError:
    """Return an error as one of Tierlog's; one that nobody foresaw is counted and logged."""
    known = foreseen(error)
    if isinstance(known, UnforeseenError):
        metrics.UNEXPECTED.inc()
        log.error(
            "unexpected_error",
            work="offload",
            stream=request.stream,
            ledger_id=request.ledger_id,
            cause=known.message,
            exc_info=known.__cause__,
        )
    return known


class _LocksMet:
    """How many deliveries of an event met a lock: they are no tries that failed."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def met(self, event: Event) -> None:
        """Count a delivery; of too many events the oldest is forgotten, and has fewer tries."""
        name = event.headers["ce_id"]
        self._counts[name] = (0 if event.attempt == 1 else self._counts.pop(name, 0)) + 1
        if len(self._counts) > LOCKED_EVENTS_MAX:
            del self._counts[next(iter(self._counts))]

    def tries(self, event: Event) -> int:
        """Return for the how many-th time an event is tried; of a new delivery all else is over."""
        if event.attempt == 1:
            self._counts.pop(event.headers["ce_id"], None)
        return event.attempt - self._counts.get(event.headers["ce_id"], 0)
