"""REST of offloads for people: where a stream's stand, every attempt, leftovers, pause and resume.

Owns these documents and handlers. What is wanted is written to the metadata; the leader and the
workers act on it. Nothing here deletes: sweeping is the leader's, behind its own questions.
"""

from collections import Counter
from typing import Annotated, Self

from fastapi import Body, FastAPI, Path
from pydantic import BaseModel, ConfigDict, Field

from tierlog.catalog import Catalog
from tierlog.catalog.ledgers import context_not_found
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.ids import LEDGER_ID_MAX, EntryId, LedgerId, StreamName, stream_name
from tierlog.model.offload import OffloadContext, OffloadState, PastAttempt
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger
from tierlog_scheduler.explain import doubt_text

FAILING_MAX = 100
DOUBTED_MAX = 100


class PauseDocument(BaseModel):
    """Since when, and why, nothing of a stream is offloaded or deleted."""

    since_ms: int
    cause: str


class PauseRequestDocument(BaseModel):
    """Why an admin pauses: for whoever finds it so."""

    model_config = ConfigDict(extra="forbid")

    cause: str = ""


class FailingDocument(BaseModel):
    """A ledger whose copy is not made yet, and what went wrong last."""

    ledger_id: int
    attempts: int
    last_error: str
    last_error_ms: int


class DoubtedDocument(BaseModel):
    """A ledger whose complete copy was found damaged, and what helps."""

    ledger_id: int
    doubt: str
    doubted_ms: int


class OffloadStatusDocument(BaseModel):
    """How far the copies of a stream have come.

    ``position``: all before it is in tier 2. ``states``: how many closed ledgers are in each
    state. ``wanted``: ledgers that an admin asked for and that are not there yet; done when 0.
    ``doubted``: whose local copy stays, since the one in tier 2 was found damaged. Of either, the
    first ones are listed, and ``failing_count`` and ``doubted_count`` say how many there are.
    """

    stream: str
    position: str | None
    pause: PauseDocument | None
    offload_through: int | None
    wanted: int
    states: dict[str, int]
    waiting_bytes: int
    oldest_waiting_ms: int | None
    failing: list[FailingDocument]
    failing_count: int
    doubted: list[DoubtedDocument]
    doubted_count: int


class OffloadStatusAnswer(BaseModel):
    """One status; of a stream with partitions, one for each of them."""

    streams: list[OffloadStatusDocument]


class PastAttemptDocument(BaseModel):
    """An attempt. RUNNING may also mean that its worker died, until another attempt begins.

    ``error`` is as the object store told it, with the id of its request.
    """

    uuid: str
    worker: str
    outcome: str
    started_ms: int
    ended_ms: int | None
    duration_ms: int | None
    error: str

    @classmethod
    def of(cls, one: PastAttempt) -> Self:
        """Return what is told of an attempt."""
        ended = one.ended_ms or None
        return cls(
            uuid=str(one.uuid),
            worker=one.worker,
            outcome=one.outcome.name,
            started_ms=one.started_ms,
            ended_ms=ended,
            duration_ms=max(0, ended - one.started_ms) if ended is not None else None,
            error=one.error,
        )


class LedgerAttemptsDocument(BaseModel):
    """The attempts at one ledger, oldest first; of many, the newest are kept."""

    stream: str
    ledger_id: int
    state: str
    complete: bool
    attempt_count: int
    attempts: list[PastAttemptDocument]

    @classmethod
    def of(cls, context: OffloadContext) -> Self:
        """Return the attempts of a ledger."""
        return cls(
            stream=context.stream,
            ledger_id=context.ledger_id,
            state=context.state.name,
            complete=context.complete,
            attempt_count=context.attempt_count,
            attempts=[PastAttemptDocument.of(one) for one in context.history],
        )


class AttemptsAnswer(BaseModel):
    """All ledgers of a stream that were ever attempted."""

    ledgers: list[LedgerAttemptsDocument]


class LeftoverDocument(BaseModel):
    """What an attempt may have left that was abandoned, or whose ledger was trimmed.

    ``swept_ms`` null: not deleted for the first time.

    It is deleted once more when no request of its worker can land any more, then forgotten.
    """

    stream: str
    ledger_id: int
    uuid: str
    bucket: str
    data_key: str
    abandoned_ms: int
    swept_ms: int | None


class LeftoversAnswer(BaseModel):
    """What is still to be deleted."""

    leftovers: list[LeftoverDocument] = Field(default_factory=list)


LedgerPath = Annotated[int, Path(ge=0, le=LEDGER_ID_MAX)]


class AttemptsApi:
    """The handlers, over the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def add_routes(self, app: FastAPI) -> None:
        """Add the API to ``app``."""
        stream = "/v1/streams/{name}"
        app.add_api_route(f"{stream}/offload", self.status, methods=["GET"])
        app.add_api_route(f"{stream}/offload/pause", self.pause, methods=["POST"])
        app.add_api_route(f"{stream}/offload/resume", self.resume, methods=["POST"])
        app.add_api_route(f"{stream}/attempts", self.attempts, methods=["GET"])
        app.add_api_route(f"{stream}/leftovers", self.leftovers, methods=["GET"])
        app.add_api_route("/v1/ledgers/{ledger_id}/attempts", self.of_ledger, methods=["GET"])

    async def status(self, name: str) -> OffloadStatusAnswer:
        """Show how far the offload of a stream has come, and what is in its way."""
        found = [await self._status(one) for one in await self._with_ledgers(name)]
        return OffloadStatusAnswer(streams=found)

    async def pause(
        self, name: str, wish: Annotated[PauseRequestDocument | None, Body()] = None
    ) -> OffloadStatusAnswer:
        """Begin no offload of a stream, and delete none of its copies, until it is resumed.

        What is under way ends. A pause that is there already stays as it is.
        """
        cause = wish.cause if wish is not None else ""
        for one in await self._all_of(name):
            await self._catalog.streams.pause_offload(one, cause)
        return await self.status(name)

    async def resume(self, name: str) -> OffloadStatusAnswer:
        """Let the offloads and deletions of a stream go on."""
        for one in await self._all_of(name):
            await self._catalog.streams.resume_offload(one)
        return await self.status(name)

    async def attempts(self, name: str) -> AttemptsAnswer:
        """Show every attempt at the ledgers of a stream: worker, times, outcome, error."""
        found = [
            LedgerAttemptsDocument.of(context)
            for one in await self._with_ledgers(name)
            for _, context in await self._contexts(await self._catalog.streams.snapshot(one))
            if context is not None and context.attempt_count
        ]
        return AttemptsAnswer(ledgers=found)

    async def of_ledger(self, ledger_id: LedgerPath) -> LedgerAttemptsDocument:
        """Show every attempt at one ledger."""
        context = await self._catalog.contexts.get(LedgerId(ledger_id))
        if context is None:
            raise context_not_found(LedgerId(ledger_id))
        return LedgerAttemptsDocument.of(context)

    async def leftovers(self, name: str) -> LeftoversAnswer:
        """Show what attempts left that is still to be deleted; the leader deletes it by itself.

        So are the copies of ledgers that were trimmed, or go with their stream.
        """
        return LeftoversAnswer(
            leftovers=[
                LeftoverDocument(
                    stream=context.stream,
                    ledger_id=context.ledger_id,
                    uuid=str(attempt.uuid),
                    bucket=attempt.location.bucket,
                    data_key=attempt.location.data_key,
                    abandoned_ms=attempt.abandoned_ms,
                    swept_ms=attempt.swept_ms or None,
                )
                for one in await self._with_ledgers(name)
                for context in await self._to_clean(await self._catalog.streams.snapshot(one))
                for attempt in context.abandoned
            ]
        )

    async def _to_clean(self, snapshot: StreamSnapshot) -> list[OffloadContext]:
        """Return the contexts of a stream's ledgers, oldest first, also of those that left it."""
        trimmed = [await self._catalog.contexts.peek(one) for one in snapshot.stream.deleting]
        listed = [context for _, context in await self._contexts(snapshot)]
        return [context for context in (*trimmed, *listed) if context is not None]

    async def _status(self, name: StreamName) -> OffloadStatusDocument:
        snapshot = await self._catalog.streams.snapshot(name)
        return status_of(snapshot, await self._contexts(snapshot))

    async def _contexts(
        self, snapshot: StreamSnapshot
    ) -> list[tuple[ListedLedger, OffloadContext | None]]:
        return [(one, await self._catalog.contexts.peek(one.ledger_id)) for one in snapshot.ledgers]

    async def _with_ledgers(self, name: str) -> list[StreamName]:
        """Return the streams that have the ledgers: the partitions, or the stream itself."""
        return (await self._all_of(name))[1:] or [stream_name(name)]

    async def _all_of(self, name: str) -> list[StreamName]:
        stream = await self._catalog.streams.get(stream_name(name))
        return [stream.name, *await self._catalog.streams.partitions(stream)]


def status_of(
    snapshot: StreamSnapshot, contexts: list[tuple[ListedLedger, OffloadContext | None]]
) -> OffloadStatusDocument:
    """Return how far the copies of a stream have come; pure."""
    stream = snapshot.stream
    closed = [(one, context) for one, context in contexts if one.closed]
    left = [
        (one, context)
        for one, context in closed
        if one.entry_count and not (context is not None and context.complete)
    ]
    failing = [
        (one, context) for one, context in left if context is not None and context.last_error
    ]
    doubted = [
        (one, context.doubt)
        for one, context in closed
        if context is not None and context.doubt is not None
    ]
    through = stream.offload_through
    pause = stream.offload_pause
    return OffloadStatusDocument(
        stream=stream.name,
        position=_position(snapshot, left[0][0] if left else None),
        pause=(
            PauseDocument(since_ms=pause.since_ms, cause=pause.cause) if pause is not None else None
        ),
        offload_through=through,
        wanted=sum(through is not None and one.ledger_id <= through for one, _ in left),
        states=dict(
            Counter(
                (context.state if context is not None else OffloadState.LOCAL).name
                for _, context in closed
            )
        ),
        waiting_bytes=sum(one.length for one, _ in left),
        oldest_waiting_ms=left[0][0].closed_ms if left else None,
        failing=[
            FailingDocument(
                ledger_id=one.ledger_id,
                attempts=context.attempt_count,
                last_error=context.last_error,
                last_error_ms=context.last_error_ms,
            )
            for one, context in failing[:FAILING_MAX]
        ],
        failing_count=len(failing),
        doubted=[
            DoubtedDocument(
                ledger_id=one.ledger_id,
                doubt=doubt_text(doubt),
                doubted_ms=doubt.found_ms,
            )
            for one, doubt in doubted[:DOUBTED_MAX]
        ],
        doubted_count=len(doubted),
    )


def _position(snapshot: StreamSnapshot, first_left: ListedLedger | None) -> str | None:
    """Return the first position that is not in tier 2; None in a stream without ledgers."""
    if first_left is None:
        first_left = next((one for one in snapshot.ledgers if not one.closed), None)
    if first_left is not None:
        return str(Position(first_left.ledger_id, EntryId(0)))
    if snapshot.ledgers:
        last = snapshot.ledgers[-1]
        return str(Position(last.ledger_id, EntryId(last.last_entry_id + 1)))
    return None
