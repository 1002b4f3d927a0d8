"""HTTP of the reader: runs of frames, bounds and ledgers of a stream, times, explanations.

``GET /v1/streams/{stream}/runs`` answers 200 with frames of one ledger back to back, or 204 when
there is nothing yet; headers say which, and where to go on:

    Tierlog-Ledger-Id        the ledger
    Tierlog-First-Entry-Id   of the first frame
    Tierlog-Entry-Count      frames in the body
    Tierlog-Next             where to go on: LEDGER:ENTRY, or earliest while there is no entry
    Tierlog-Tier             tier1, tier2, or memory
    Tierlog-Raw              1: entry data is the application's, without an append header
    Tierlog-Crc32c           of the body, eight hexadecimal digits

Invariant: a read is bounded by the settings, whatever the caller asks, and it, or a list of
ledgers, holds room in memory until its answer was sent.
"""

from typing import Annotated, Final

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from tierlog.format.checksum import crc32c
from tierlog.model.ids import INT64_MAX, LedgerId, stream_name
from tierlog.ports.reads import ServedLedgers
from tierlog_reader import metrics
from tierlog_reader.chunk import Answer
from tierlog_reader.explain import Explained, explain
from tierlog_reader.limits import ENTRIES_MAX, WAIT_MS_MAX, ReadLimits, client_of
from tierlog_reader.seek import TimeSeek, parse_start
from tierlog_reader.sending import HeldResponse
from tierlog_reader.served import HeldRoom, ServedReads

FRAMES_TYPE: Final = "application/vnd.tierlog.frames"
LEDGERS_MAX: Final = 10_000


class Bounds(BaseModel):
    """Where a stream begins and ends, each as LEDGER:ENTRY, or earliest while it has no entry."""

    stream: str
    first: str
    next: str


class Place(BaseModel):
    """A position of a stream, as LEDGER:ENTRY, or earliest while it has no entry."""

    stream: str
    position: str


class LedgerRow(BaseModel):
    """A ledger that has entries; bytes 0: those of an open one that nobody tells."""

    ledger_id: int
    entries: int
    bytes: int
    closed: bool


class Ledgers(BaseModel):
    """A stream's ledgers in order, the open one to its last confirmed entry.

    `next`: the ledger to go on with; null: there are no more. `incarnation`: which stream of that
    name, as manifests say it.
    """

    stream: str
    incarnation: str
    ledgers: list[LedgerRow]
    trimmed_end: str | None
    next: int | None


def add_routes(app: FastAPI, reads: ServedReads, seek: TimeSeek, limits: ReadLimits) -> None:
    """Add the reader's routes to ``app``."""

    async def runs(
        request: Request,
        stream: str,
        start: Annotated[str, Query(alias="from")] = "earliest",
        bytes_max: Annotated[int, Query(ge=1)] = 1024 * 1024,
        entries_max: Annotated[int, Query(ge=1, le=ENTRIES_MAX)] = ENTRIES_MAX,
        wait_ms: Annotated[int, Query(ge=0, le=WAIT_MS_MAX)] = 0,
    ) -> Response:
        budget = limits.budget(entries_max=entries_max, bytes_max=bytes_max, wait_ms=wait_ms)
        name = stream_name(stream)
        where = await seek.start(name, parse_start(start))
        answer, room = await reads.read(client_of(request, stream), name, where, budget)
        return _frames(answer, room, limits)

    async def bounds(stream: str) -> Bounds:
        first, behind = await reads.source.bounds(stream_name(stream))
        return Bounds(stream=stream, first=str(first), next=str(behind))

    async def ledgers(
        request: Request,
        stream: str,
        first: Annotated[int, Query(alias="from", ge=0, le=INT64_MAX)] = 0,
        limit: Annotated[int, Query(ge=1, le=LEDGERS_MAX)] = LEDGERS_MAX,
    ) -> Response:
        client = client_of(request, stream)
        found, room = await reads.ledgers(
            client, stream_name(stream), LedgerId(first), count_max=limit
        )
        try:
            body = listed(stream, found)
        except BaseException:
            room.leave()
            raise
        return HeldResponse(
            body, room, send_s_max=limits.send_s_max, headers={}, media_type="application/json"
        )

    async def position(stream: str, time: Annotated[str, Query()]) -> Place:
        name = stream_name(stream)
        found = await seek.start(name, parse_start(f"time:{time}"))
        return Place(stream=stream, position=str(found))

    async def explained(
        request: Request,
        stream: str,
        start: Annotated[str, Query(alias="from")] = "earliest",
        bytes_max: Annotated[int, Query(ge=1)] = 1024 * 1024,
        entries_max: Annotated[int, Query(ge=1, le=ENTRIES_MAX)] = 1,
    ) -> Explained:
        budget = limits.budget(entries_max=entries_max, bytes_max=bytes_max, wait_ms=0)
        name = stream_name(stream)
        client = client_of(request, stream)
        return await explain(reads, seek, client, name, parse_start(start), budget)

    app.add_api_route("/v1/streams/{stream}/runs", runs, response_class=Response)
    app.add_api_route("/v1/streams/{stream}/bounds", bounds)
    app.add_api_route("/v1/streams/{stream}/ledgers", ledgers, response_model=Ledgers)
    app.add_api_route("/v1/streams/{stream}/position", position)
    app.add_api_route("/v1/streams/{stream}/explain", explained)


def listed(stream: str, found: ServedLedgers) -> bytes:
    """Return a list of ledgers as JSON."""
    rows = [
        LedgerRow(
            ledger_id=one.ledger_id, entries=one.entry_count, bytes=one.length, closed=one.closed
        )
        for one in found.ledgers
    ]
    listed = Ledgers(
        stream=stream,
        incarnation=str(found.incarnation),
        ledgers=rows,
        trimmed_end=None if found.trimmed_end is None else str(found.trimmed_end),
        next=found.resume,
    )
    return listed.model_dump_json().encode()


def _frames(answer: Answer, room: HeldRoom, limits: ReadLimits) -> Response:
    metrics.count(answer)
    headers = {
        "Tierlog-Next": str(answer.resume),
        "Tierlog-Raw": str(int(answer.raw)),
        "Cache-Control": "no-store",
    }
    if answer.chunk is None:
        room.leave()
        return Response(status_code=204, headers=headers)
    chunk = answer.chunk
    # One buffer: the server takes no others.
    body = chunk.frames[0] if len(chunk.frames) == 1 else b"".join(chunk.frames)
    headers |= {
        "Tierlog-Ledger-Id": str(chunk.ledger_id),
        "Tierlog-First-Entry-Id": str(chunk.first_entry_id),
        "Tierlog-Entry-Count": str(chunk.count),
        "Tierlog-Tier": chunk.tier.value,
        "Tierlog-Crc32c": f"{crc32c(body):08x}",
    }
    return HeldResponse(
        body, room, send_s_max=limits.send_s_max, headers=headers, media_type=FRAMES_TYPE
    )
