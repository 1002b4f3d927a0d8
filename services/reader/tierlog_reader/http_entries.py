"""HTTP of the reader for programs that know nothing of frames: entries as they are asked for.

``GET /v1/streams/{stream}/entries?from=&to=&limit=`` answers a page in the type that ``Accept``
names (``documents``), or 204 when there is nothing yet; ``Tierlog-Next`` is the resume token: the
``from`` of the next page. With ``Accept: text/event-stream`` the same route follows the stream
with server-sent events:

    id: LEDGER:ENTRY     the resume token, behind an entry's last event: what a client that
                         connects again sends as Last-Event-ID; of "latest" one comes at once
    data: {…}            a document an event, as in a line of JSON
    event: error         the last one: its data is the problem
    : …                  a comment, while nothing comes

``GET /v1/streams/{stream}/ledgers/{ledger}`` gives all of a raw ledger's payloads back to back, of
an open one those that are confirmed as it begins; with ``Range: entries=FIRST-LAST`` these entries
alone, up to ``Tierlog-Next``, as 206 with ``Content-Range``. A range in any other unit is as none.

Invariants:
    * An answer is bounded by the settings, whatever is asked, and holds room until it was sent:
      for its events as they are decompressed, for how many they are, for how many properties the
      one has that has most, and for what JSON makes of them.
    * What is followed, and a whole ledger, hold room for one page at a time: a client that is slow
      is waited for, and one that takes nothing is left. Behind the first page a whole ledger waits
      for room longer than who can be told to come again.
    * No part of a ledger passes for the whole: what can't be read to its end is cut.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final

from fastapi import FastAPI, Header, Path, Query, Request
from fastapi.responses import Response

from tierlog.format.checksum import Buffer
from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId, StreamName, stream_name
from tierlog.model.position import Edge, Position
from tierlog.model.stream import ListedLedger
from tierlog.offload.tier2_reader import EntryTooLongError
from tierlog.runtime.errors import problem_of
from tierlog.runtime.http_access import still_admitted
from tierlog_reader import metrics
from tierlog_reader.chunk import Budget
from tierlog_reader.documents import (
    ARROW,
    BODY_TYPES,
    EVENTS,
    NDJSON,
    OCTETS,
    FoundEntry,
    Unpacking,
    body_of,
    events_of,
    line_of,
    wanted_type,
)
from tierlog_reader.limits import ENTRIES_MAX, WAIT_MS_MAX, ReadLimits, client_of
from tierlog_reader.memory import COPIES_OF_AN_ANSWER
from tierlog_reader.pages import OBJECT_BYTES, Page, read_page
from tierlog_reader.places import no_such_entry, not_whole
from tierlog_reader.seek import TimeSeek, parse_start
from tierlog_reader.sending import PIECE_BYTES, HeldResponse, HeldStream
from tierlog_reader.served import ROOM_BYTES_MIN, HeldRoom, ServedReads

LIMIT: Final = 1000
PAGE_BYTES: Final = 1024 * 1024
FOLLOW_WAIT_MS: Final = 10_000
# So often the room for a page is waited for once a ledger is on its way.
ROOM_TRIES_MAX: Final = 12
ROOM_PAUSE_S: Final = 1.0
# Entries as they were read, as objects, and the body that is made of them.
COPIES: Final = {NDJSON: 5, OCTETS: 4, ARROW: 5, EVENTS: 5}
# What is written of an event may be several times as long as it is.
TEXTS: Final = (NDJSON, EVENTS)

_RANGE: Final = re.compile(r"entries=(\d{1,18})-(\d{1,18})?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one request asks for, read and within the limits."""

    client: tuple[str, str]
    stream: StreamName
    where: Position | Edge
    until: Position | None
    budget: Budget
    still: Callable[[], None]
    """Raises once whoever asks may ask no more."""


class EntryPages:
    """Pages of entries for clients, each within its room."""

    def __init__(
        self,
        reads: ServedReads,
        seek: TimeSeek,
        limits: ReadLimits,
        unpacking: Unpacking,
    ) -> None:
        self._reads = reads
        self._seek = seek
        self.limits = limits
        self.unpacking = unpacking

    async def page(self, wish: _Wish, kind: str) -> tuple[Page, HeldRoom]:
        """Return a page and its room, which the caller gives back."""
        where, budget = wish.where, wish.budget
        room_bytes = max(ROOM_BYTES_MIN, budget.bytes_max)
        while True:
            room = self._reads.room(wish.client, COPIES[kind] * room_bytes)
            entries_max = min(budget.entries_max, max(1, room_bytes // OBJECT_BYTES))
            try:
                page = await read_page(
                    self._reads.source,
                    wish.stream,
                    where,
                    replace(budget, room=room, entries_max=entries_max, alone_max=room_bytes),
                    until=wish.until,
                )
            except EntryTooLongError as error:
                room.leave()
                where = Position(error.ledger_id, error.entry_id)
                room_bytes = error.frame_len + 2 * OBJECT_BYTES
                budget = replace(budget, bytes_max=error.frame_len)
                continue
            except BaseException:
                room.leave()
                raise
            page = page.cut(room_bytes)
            # Events that say they are longer than that are not decompressed.
            unpacked_len = min(page.unpacked_len, self.unpacking.events_len_max)
            unpacked_len = max(page.frames_len, unpacked_len)
            needed = unpacked_len + page.objects_len
            if needed <= room_bytes:
                # Half of the room is for one event as objects, whatever the page.
                needed = max(needed, 2 * page.properties_len(self.unpacking))
            if needed <= room_bytes and kind in TEXTS:
                text_len = page.text_len(unpacked_len, self.unpacking)
                needed = max(needed, text_len // (COPIES_OF_AN_ANSWER * COPIES[kind]))
            if needed <= room_bytes:
                # While it is sent it holds what it has, and not what it might have had.
                room.shrink(COPIES_OF_AN_ANSWER * COPIES[kind] * needed)
                return page, room
            # An entry alone may be longer than was asked for: see ``ServedReads.read``.
            room.leave()
            where, room_bytes = page.entries[0].position, needed
            budget = replace(budget, bytes_max=page.frames_len)
            del page

    async def start(self, stream: StreamName, text: str) -> Position | Edge:
        """Return where a text says to begin."""
        return await self._seek.start(stream, parse_start(text))

    async def raw_ledger(
        self, stream: StreamName, where: Position, *, fresh: bool = False
    ) -> ListedLedger | None:
        """Return a raw ledger as it is listed, None while it is open; or refuse."""
        snapshot = await self._reads.source.snapshot(stream, fresh=fresh)
        if not snapshot.stream.raw:
            raise RefusedError(
                f"entries of stream {stream} have append headers: they are no plain bytes",
                remedy=f"Read them with: GET /v1/streams/{stream}/entries",
            )
        listed = [one for one in snapshot.ledgers if one.ledger_id == where.ledger_id]
        if not listed or not listed[0].closed:
            return None
        if where.entry_id > listed[0].last_entry_id:
            raise no_such_entry(stream, where, last=listed[0].last_entry_id)
        return listed[0]

    async def confirmed(self, stream: StreamName, where: Position, until: Position) -> Position:
        """Return what is confirmed now, or ``until``, unless that is between the two."""
        latest = await self._reads.source.latest(stream)
        # Of what lies behind it the read tells whether it is not there, or has nothing yet.
        return latest if isinstance(latest, Position) and where < latest < until else until

    async def length(self, ledger: ListedLedger | None, end: Position) -> int:
        """Return the bytes of a ledger's entries before ``end``; 0: nobody says."""
        if ledger is not None:
            return ledger.length
        return await self._reads.source.length(end.ledger_id, end.entry_id)

    async def whole(self, wish: _Wish, page: Page, room: HeldRoom) -> AsyncGenerator[bytes, None]:
        """Give nothing, then all from a page on that has its room; ended, it holds none."""
        try:
            yield b""
            while True:
                metrics.count_entries(page.entries)
                body = memoryview(_joined(page.entries))
                for at in range(0, len(body), PIECE_BYTES):
                    yield bytes(body[at : at + PIECE_BYTES])
                del body
                room.leave()
                if page.at_end:
                    if not _is_whole(wish, page.resume):
                        raise _not_whole(wish, page.resume)
                    return
                wish = replace(wish, where=page.resume)
                del page  # whoever waits for the next one holds nothing
                page, room = await self._page_behind(wish)
        finally:
            room.leave()

    async def _page_behind(self, wish: _Wish) -> tuple[Page, HeldRoom]:
        """Return a page of what has begun: nobody can be told to come again for the rest of it."""
        tries = 0
        while True:
            wish.still()
            try:
                return await self.page(wish, OCTETS)
            except RetryableError as error:
                tries += 1
                if error.reason is not Reason.RESOURCE_EXHAUSTED or tries >= ROOM_TRIES_MAX:
                    raise
                await asyncio.sleep(error.retry_after_s or ROOM_PAUSE_S)

    async def follow(self, wish: _Wish) -> AsyncGenerator[bytes, None]:
        """Give server-sent events until ``until``, or until the client goes."""
        left = wish.budget.entries_max
        yield b"retry: 1000\n\n"
        if wish.where is Edge.LATEST:
            # Told at once: who connects again goes on there, and misses nothing.
            try:
                wish = replace(wish, where=await self._reads.source.latest(wish.stream))
            except TierlogError as error:
                yield _problem(error)
                return
            yield b"id: %b\n\n" % str(wish.where).encode()
        while left > 0 and not (wish.until is not None and _is_at(wish.where, wish.until)):
            budget = replace(wish.budget, entries_max=min(left, ENTRIES_MAX))
            try:
                wish.still()
                page, room = await self.page(replace(wish, budget=budget), EVENTS)
            except TierlogError as error:
                yield _problem(error)
                return
            try:
                metrics.count_entries(page.entries)
                if not page.entries:
                    yield b": nothing yet\n\n"
                for message in _messages(page, self.unpacking):
                    yield message
                    del message
            except TierlogError as error:
                yield _problem(error)
                return
            finally:
                room.leave()
            left -= len(page.entries)
            wish = replace(wish, where=page.resume)
            del page  # whoever waits for the next one holds nothing


def add_entry_routes(app: FastAPI, pages: EntryPages) -> None:
    """Add the routes of entries to ``app``."""
    limits = pages.limits

    async def entries(
        request: Request,
        stream: str,
        *,
        start: Annotated[str, Query(alias="from")] = "earliest",
        to: Annotated[str | None, Query()] = None,
        limit: Annotated[int | None, Query(ge=1, le=ENTRIES_MAX)] = None,
        bytes_max: Annotated[int, Query(ge=1)] = PAGE_BYTES,
        wait_ms: Annotated[int, Query(ge=0, le=WAIT_MS_MAX)] = 0,
        accept: Annotated[str | None, Header()] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        kind = wanted_type(accept, (*BODY_TYPES, EVENTS))
        name, until = stream_name(stream), Position.parse(to) if to is not None else None
        following = kind == EVENTS
        if following and last_event_id:
            start = last_event_id
        budget = limits.budget(
            entries_max=limit if limit is not None else LIMIT,
            bytes_max=min(bytes_max, limits.response_bytes_max // COPIES[kind]),
            wait_ms=max(wait_ms, FOLLOW_WAIT_MS) if following else wait_ms,
            following=following,
        )
        where = await pages.start(name, start)
        still = still_admitted(request)
        wish = _Wish(client_of(request, stream), name, where, until, budget, still)
        if following:
            if limit is None:
                wish = replace(wish, budget=replace(budget, entries_max=INT64_MAX))
            return HeldStream(pages.follow(wish), send_s_max=limits.send_s_max, media_type=EVENTS)
        page, room = await pages.page(wish, kind)
        encode = partial(body_of, kind, unpacking=pages.unpacking)
        return _held(page, room, encode, pages.unpacking, kind, limits)

    app.add_api_route("/v1/streams/{stream}/entries", entries, response_class=Response)


def add_ledger_route(app: FastAPI, pages: EntryPages) -> None:
    """Add the route of a raw ledger's payloads to ``app``."""

    async def ledger(
        request: Request,
        stream: str,
        ledger_id: Annotated[int, Path(ge=0, lt=INT64_MAX)],
        wanted: Annotated[str | None, Header(alias="Range")] = None,
    ) -> Response:
        asked = _asked_range(wanted)
        first, last = asked if asked is not None else (0, None)
        name = stream_name(stream)
        where = Position(LedgerId(ledger_id), EntryId(first))
        found = await pages.raw_ledger(name, where)
        end = Position(LedgerId(ledger_id + 1), EntryId(0))
        if found is None and asked is None:
            end = await pages.confirmed(name, where, end)
            if end.ledger_id > ledger_id:  # it was closed since it was listed so, or is not there
                found = await pages.raw_ledger(name, where, fresh=True)
        count = None if found is None else found.entry_count
        until = None if last is None else last + 1
        if count is not None:
            until = count if until is None else min(until, count)
        if until is not None:
            end = Position(where.ledger_id, EntryId(until))
        budget = pages.limits.budget(
            entries_max=ENTRIES_MAX,
            bytes_max=pages.limits.response_bytes_max // COPIES[OCTETS],
            wait_ms=0,
        )
        still = still_admitted(request)
        wish = _Wish(client_of(request, stream), name, where, end, budget, still)
        page, room = await pages.page(wish, OCTETS)
        if asked is None and page.entries and not page.at_end:
            return await _begun(pages, wish, found, page, room)
        if asked is None and end.ledger_id == ledger_id and not _is_whole(wish, page.resume):
            room.leave()
            raise _not_whole(wish, page.resume)
        answer = _held(page, room, _joined, pages.unpacking, OCTETS, pages.limits)
        if asked is not None and page.entries:
            shown = f"{first}-{page.entries[-1].position.entry_id}"
            answer.headers["Content-Range"] = f"entries {shown}/{'*' if count is None else count}"
            answer.status_code = 206
        answer.headers["Accept-Ranges"] = "entries"
        return answer

    app.add_api_route("/v1/streams/{stream}/ledgers/{ledger_id}", ledger, response_class=Response)


async def _begun(
    pages: EntryPages, wish: _Wish, found: ListedLedger | None, page: Page, room: HeldRoom
) -> Response:
    """Return a ledger of which this is the first page."""
    end = wish.until
    assert end is not None
    try:
        if end.ledger_id > page.entries[0].position.ledger_id:
            end, found = await _end_now(pages, wish, page, end)
            wish = replace(wish, until=end)
        length = await pages.length(found, end)
    except BaseException:
        room.leave()
        raise
    pieces = pages.whole(wish, page, room)
    await anext(pieces)  # from here on the room goes with it, also when it is only closed
    return _whole(pieces, end, found, length, pages.limits)


async def _end_now(
    pages: EntryPages, wish: _Wish, page: Page, until: Position
) -> tuple[Position, ListedLedger | None]:
    """Return where a ledger ends of which nothing was confirmed yet as it was looked up.

    It was closed meanwhile, perhaps. Where nobody says any more whether what was read is all, that
    can still be told.
    """
    first, last = page.entries[0].position, page.entries[-1].position
    end = await pages.confirmed(wish.stream, last, until)
    if end.ledger_id == first.ledger_id:
        return end, None
    found = await pages.raw_ledger(wish.stream, first, fresh=True)
    if found is None:
        raise _not_whole(wish, page.resume)
    return replace(first, entry_id=EntryId(found.entry_count)), found


def _is_whole(wish: _Wish, resume: Position | Edge) -> bool:
    """Say whether nothing is left before the end that was told."""
    return wish.until is None or _is_at(resume, wish.until)


def _not_whole(wish: _Wish, resume: Position | Edge) -> RetryableError:
    assert wish.until is not None
    return not_whole(wish.stream, resume, wish.until)


def _joined(entries: Sequence[FoundEntry]) -> bytes:
    return b"".join(one.data for one in entries)


def _whole(
    pieces: AsyncGenerator[bytes, None],
    end: Position,
    ledger: ListedLedger | None,
    length: int,
    limits: ReadLimits,
) -> Response:
    """Return a ledger that is longer than a page; without a length HTTP/1.0 can't tell a cut."""
    headers = {"Tierlog-Next": str(end), "Tierlog-Raw": "1", "Accept-Ranges": "entries"}
    if length:
        headers["Content-Length"] = str(length)
    if ledger is not None:
        headers["Tierlog-Entry-Count"] = str(ledger.entry_count)
    return HeldStream(pieces, send_s_max=limits.send_s_max, media_type=OCTETS, headers=headers)


def _held(
    page: Page,
    room: HeldRoom,
    encode: Callable[[Sequence[FoundEntry]], Buffer],
    unpacking: Unpacking,
    kind: str,
    limits: ReadLimits,
) -> Response:
    """Return a page as an answer that holds its room; it ends before what can't be decoded."""
    try:
        try:
            body = encode(page.entries) if page.entries else b""
        except (CorruptError, RefusedError):
            page = page.before_bad(unpacking)
            body = encode(page.entries)
    except BaseException:
        room.leave()
        raise
    headers = {
        "Tierlog-Next": str(page.resume),
        "Tierlog-Raw": str(int(page.raw)),
        "Tierlog-Entry-Count": str(len(page.entries)),
        "Cache-Control": "no-store",
    }
    if not page.entries:
        room.leave()
        return Response(status_code=204, headers=headers)
    metrics.count_entries(page.entries)
    headers["Tierlog-Tier"] = ",".join(sorted({entry.tier for entry in page.entries}))
    return HeldResponse(body, room, send_s_max=limits.send_s_max, headers=headers, media_type=kind)


def _problem(error: TierlogError) -> bytes:
    """Return an error as the last server-sent event."""
    problem = problem_of(error).model_dump_json(exclude_none=True)
    return f"event: error\ndata: {problem}\n\n".encode()


def _messages(page: Page, unpacking: Unpacking) -> Iterator[bytes]:
    """Give a page as server-sent events; the token stands at an entry's last event alone.

    What lies before an entry that can't be decoded is given before that is raised.
    """
    for entry in page.entries:
        lines = [b"data: " + line_of(event) + b"\n" for event in events_of(entry, unpacking)]
        if lines:
            token = replace(entry.position, entry_id=EntryId(entry.position.entry_id + 1))
            lines[-1] = b"id: %b\n%b" % (str(token).encode(), lines[-1])
        yield from lines


def _asked_range(text: str | None) -> tuple[int, int | None] | None:
    """Read ``entries=FIRST-LAST``; None: all, also where it counts in other units (RFC 9110)."""
    if text is None or text.partition("=")[0].strip().lower() != "entries":
        return None
    match = _RANGE.fullmatch(text.strip())
    last = int(match[2]) if match is not None and match[2] is not None else None
    if match is None or (last is not None and last < int(match[1])):
        raise RefusedError(
            f"{text[:60]!r} is no range of entries",
            reason=Reason.INVALID_ARGUMENT,
            remedy="Give Range: entries=FIRST-LAST, or entries=FIRST- for the rest",
        )
    return int(match[1]), last


def _is_at(where: Position | Edge, until: Position) -> bool:
    return isinstance(where, Position) and where >= until
