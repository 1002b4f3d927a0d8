"""HTTP of the reader: runs of frames, and the bounds of a stream.

``GET /v1/streams/{stream}/runs`` answers 200 with frames of one ledger back to back, or 204 when
there is nothing yet; headers say which, and where to go on:

    Tierlog-Ledger-Id        the ledger
    Tierlog-First-Entry-Id   of the first frame
    Tierlog-Entry-Count      frames in the body
    Tierlog-Next             where to go on: LEDGER:ENTRY, or earliest while there is no entry
    Tierlog-Tier             tier1 or tier2
    Tierlog-Raw              1: entry data is the application's, without an append header
    Tierlog-Crc32c           of the body, eight hexadecimal digits

Invariant: a read is bounded by the settings, whatever the caller asks.
"""

from typing import Annotated, Final

from fastapi import FastAPI, Query
from fastapi.responses import Response
from pydantic import BaseModel

from tierlog.format.checksum import crc32c
from tierlog.model.ids import stream_name
from tierlog.model.position import parse_position
from tierlog_reader import metrics
from tierlog_reader.chunk import Budget
from tierlog_reader.source import StreamSource

FRAMES_TYPE: Final = "application/vnd.tierlog.frames"
ENTRIES_MAX: Final = 1_000_000
WAIT_MS_MAX: Final = 600_000


class ReadLimits(BaseModel, frozen=True):
    """The most that one read gets."""

    response_bytes_max: int
    wait_ms_max: int

    def budget(self, *, entries_max: int, bytes_max: int, wait_ms: int) -> Budget:
        """Return what was asked, within these limits."""
        return Budget(
            entries_max=entries_max,
            bytes_max=min(bytes_max, self.response_bytes_max),
            wait_s=min(wait_ms, self.wait_ms_max) / 1000,
        )


class Bounds(BaseModel):
    """Where a stream begins and ends, each as LEDGER:ENTRY, or earliest while it has no entry."""

    stream: str
    first: str
    next: str


def add_routes(app: FastAPI, source: StreamSource, limits: ReadLimits) -> None:
    """Add the reader's routes to ``app``."""

    async def runs(
        stream: str,
        start: Annotated[str, Query(alias="from")] = "earliest",
        bytes_max: Annotated[int, Query(ge=1)] = 1024 * 1024,
        entries_max: Annotated[int, Query(ge=1, le=ENTRIES_MAX)] = ENTRIES_MAX,
        wait_ms: Annotated[int, Query(ge=0, le=WAIT_MS_MAX)] = 0,
    ) -> Response:
        budget = limits.budget(entries_max=entries_max, bytes_max=bytes_max, wait_ms=wait_ms)
        answer = await source.read(stream_name(stream), parse_position(start), budget)
        metrics.count(answer)
        headers = {
            "Tierlog-Next": str(answer.resume),
            "Tierlog-Raw": str(int(answer.raw)),
            "Cache-Control": "no-store",
        }
        if answer.chunk is None:
            return Response(status_code=204, headers=headers)
        chunk = answer.chunk
        # One buffer: the server takes no others, and sends one large one with the least effort.
        body = b"".join(chunk.frames)
        headers |= {
            "Tierlog-Ledger-Id": str(chunk.ledger_id),
            "Tierlog-First-Entry-Id": str(chunk.first_entry_id),
            "Tierlog-Entry-Count": str(chunk.count),
            "Tierlog-Tier": chunk.tier.value,
            "Tierlog-Crc32c": f"{crc32c(body):08x}",
        }
        return Response(body, headers=headers, media_type=FRAMES_TYPE)

    async def bounds(stream: str) -> Bounds:
        first, behind = await source.bounds(stream_name(stream))
        return Bounds(stream=stream, first=str(first), next=str(behind))

    app.add_api_route("/v1/streams/{stream}/runs", runs, response_class=Response)
    app.add_api_route("/v1/streams/{stream}/bounds", bounds)
