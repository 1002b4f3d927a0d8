"""The reader service over HTTP: frames with their checksum verified, bounds and ledgers."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote
from uuid import UUID

from tierlog.adapters.pieces import Pieces
from tierlog.adapters.rpc.rest import HttpAnswer, RestService
from tierlog.format.checksum import crc32c
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Edge, Position, parse_position
from tierlog.ports.reads import FramesAnswer, ServedLedger, ServedLedgers
from tierlog.runtime.calling import PLAIN, Calling

PIECE_BYTES: Final = 4 * 1024 * 1024
"""As much as who reads on asks for at once, unless told otherwise."""
# The answer that is looked at, the one that is coming, and one that somebody still holds.
PIECES_KEPT: Final = 3
_NO_CONTENT: Final = 204


class HttpReads:
    """``StreamReads`` and ``ReadDesk`` over HTTP."""

    def __init__(self, address: str, *, timeout_s: float, calling: Calling = PLAIN) -> None:
        self._service = RestService(address, name="reader", timeout_s=timeout_s, calling=calling)
        self._pieces = Pieces(piece_bytes=PIECE_BYTES, kept_bytes_max=PIECES_KEPT * PIECE_BYTES)

    def __repr__(self) -> str:
        return f"<HttpReads {self._service!r}>"

    async def read(
        self,
        stream: StreamName,
        where: Position | Edge,
        *,
        bytes_max: int,
        entries_max: int | None = None,
        wait_s: float = 0.0,
    ) -> FramesAnswer:
        """See ``StreamReads``."""
        params = {
            "from": str(where),
            "bytes_max": str(bytes_max),
            "wait_ms": str(int(wait_s * 1000)),
        }
        if entries_max is not None:
            params["entries_max"] = str(entries_max)
        path = f"/v1/streams/{quote(stream, safe='')}/runs"
        answer = await self._service.call(
            "GET", path, params=params, wait_s=wait_s, pieces=self._pieces
        )
        with self._understanding("the headers of a read"):
            resume = parse_position(answer.headers["Tierlog-Next"])
            if answer.status == _NO_CONTENT:
                return FramesAnswer(resume=resume)
            return _frames(answer, resume)

    async def bounds(self, stream: StreamName) -> tuple[Position | Edge, Position | Edge]:
        """See ``StreamReads``."""
        path = f"/v1/streams/{quote(stream, safe='')}/bounds"
        found = await self._service.json("GET", path)
        with self._understanding("a stream's bounds"):
            return parse_position(found["first"]), parse_position(found["next"])

    async def ledgers(self, stream: StreamName, first: LedgerId) -> ServedLedgers:
        """See ``ReadDesk``."""
        path = f"/v1/streams/{quote(stream, safe='')}/ledgers"
        found = await self._service.json("GET", path, params={"from": str(first)})
        with self._understanding("a stream's ledgers"):
            trimmed, resume = found["trimmed_end"], found["next"]
            return ServedLedgers(
                incarnation=UUID(found["incarnation"]),
                ledgers=tuple(
                    ServedLedger(
                        ledger_id=LedgerId(one["ledger_id"]),
                        entry_count=one["entries"],
                        length=one["bytes"],
                        closed=one["closed"],
                    )
                    for one in found["ledgers"]
                ),
                trimmed_end=None if trimmed is None else Position.parse(trimmed),
                resume=None if resume is None else LedgerId(resume),
            )

    async def position_at(self, stream: StreamName, time: str) -> Position | Edge:
        """See ``ReadDesk``."""
        path = f"/v1/streams/{quote(stream, safe='')}/position"
        found = await self._service.json("GET", path, params={"time": time})
        with self._understanding("a position"):
            return parse_position(found["position"])

    async def explain(
        self, stream: StreamName, start: str, *, entries_max: int, bytes_max: int
    ) -> Mapping[str, Any]:
        """See ``ReadDesk``."""
        path = f"/v1/streams/{quote(stream, safe='')}/explain"
        params = {"from": start, "entries_max": str(entries_max), "bytes_max": str(bytes_max)}
        found: Mapping[str, Any] = await self._service.json("GET", path, params=params)
        return found

    @contextlib.contextmanager
    def _understanding(self, what: str) -> Iterator[None]:
        """Tell of an answer that is no reader's, whatever it has instead."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RetryableError(
                f"{self!r} answered without {what}: {error}",
                remedy="Check that the address is that of a Tierlog reader",
            ) from error

    async def close(self) -> None:
        """See ``StreamReads``."""
        await self._service.close()


def _frames(answer: HttpAnswer, resume: Position | Edge) -> FramesAnswer:
    expected = int(answer.headers["Tierlog-Crc32c"], 16)
    ledger_id = LedgerId(int(answer.headers["Tierlog-Ledger-Id"]))
    first = EntryId(int(answer.headers["Tierlog-First-Entry-Id"]))
    if crc32c(answer.body) != expected:
        raise CorruptError(
            f"frames from {ledger_id}:{first} on were damaged on their way",
            remedy="Read them again",
            details={"ledger_id": str(ledger_id), "entry_id": str(first)},
        )
    return FramesAnswer(
        resume=resume,
        ledger_id=ledger_id,
        first_entry_id=first,
        count=int(answer.headers["Tierlog-Entry-Count"]),
        frames=memoryview(answer.body),
        tier=answer.headers["Tierlog-Tier"],
        raw=answer.headers["Tierlog-Raw"] == "1",
    )
