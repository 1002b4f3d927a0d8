"""Runs of a ledger over HTTP, for readers, offloaders and recovery.

``GET /v1/ledgers/{ledger_id}/runs`` answers with encoded runs back to back, whole and in order,
and then an end mark (``tierlog.format.run_stream``), so that a body that was cut never passes as
a short one. What fails before the first run is problem+json; what fails later cuts the body.

Invariant: a read is bounded by ``bytes_max`` of the settings, whatever the caller asks.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Final

from fastapi import FastAPI, Query
from fastapi.responses import Response, StreamingResponse

from tierlog.format.run import Run
from tierlog.format.run_stream import RUNS_TYPE, end_mark
from tierlog.model.errors import TierlogError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId
from tierlog.ports.storage_node import StorageNodeControl

BYTES_MAX: Final = 256 * 1024 * 1024
WAIT_MS_MAX: Final = 60_000
PIECE_BYTES: Final = 1024 * 1024

LedgerNumber = Annotated[int, Query(ge=0, le=INT64_MAX)]


def add_routes(app: FastAPI, node: StorageNodeControl) -> None:
    """Add the storage node's routes to ``app``."""

    @app.get("/v1/ledgers/{ledger_id}/runs", response_class=Response)
    async def runs(
        ledger_id: int,
        *,
        first: LedgerNumber = 0,
        last: Annotated[int | None, Query(ge=0, le=INT64_MAX)] = None,
        bytes_max: Annotated[int, Query(ge=1, le=BYTES_MAX)] = BYTES_MAX,
        wait_ms: Annotated[int, Query(ge=0, le=WAIT_MS_MAX)] = 0,
        recovery: bool = False,
    ) -> Response:
        """Answer with whole runs from the one that holds entry ``first``."""
        found = node.read(
            LedgerId(ledger_id),
            EntryId(first),
            last_entry_id=None if last is None else EntryId(last),
            bytes_max=bytes_max,
            wait_s=wait_ms / 1000,
            recovery=recovery,
        )
        # The first runs decide between an answer and an error.
        head = await anext(found, None) or ()
        return StreamingResponse(_body(head, found), media_type=RUNS_TYPE)


async def _body(head: Sequence[Run], rest: AsyncIterator[Sequence[Run]]) -> AsyncIterator[bytes]:
    """Give runs in pieces of some size: each piece costs the server more than its bytes do."""
    waiting = [run.encoded for run in head]
    waiting_len, count = 0, len(waiting)
    try:
        async for runs in rest:
            count += len(runs)
            for run in runs:
                waiting.append(run.encoded)
                waiting_len += len(run.encoded)
                if waiting_len >= PIECE_BYTES:
                    piece, waiting, waiting_len = b"".join(waiting), [], 0
                    yield piece
    except TierlogError:
        # What could be read goes out all the same; then the body is cut.
        if waiting:
            yield b"".join(waiting)
        raise
    yield b"".join([*waiting, end_mark(count)])
