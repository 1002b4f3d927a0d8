"""Appends over HTTP: ``POST /v1/streams/{stream}/events``, one entry a request.

The body is one event, or with ``application/x-ndjson`` one event a line. To a raw stream each event
is an entry of its own.

With ``Idempotency-Key: WRITER:NUMBER`` (a UUID, and the number of the request's last event, counted
from 1) the request can be repeated: what is there already is answered 200 and is not appended
again. A number that leaves a gap is a conflict, 409.

Beside its number, an attribute of the writer says what its last request brought. A repeat of that
with other events is a conflict, too. Of those before it nothing but the number is known.

Invariant: a body is read only up to ``BODY_BYTES_MAX``.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, Protocol
from uuid import UUID, uuid5

from fastapi import FastAPI, Header, Request
from pydantic import BaseModel

from tierlog.format.entry import AttributeUpdate, Verb, encode_entry
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.model.attributes import AppendCondition, AttributeKey
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import INT64_MAX, StreamName, stream_name
from tierlog.model.stream import Stream
from tierlog.ports.clock import Clock
from tierlog_ingest.streams.owners import Owners

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
NDJSON: Final = "application/x-ndjson"

REQUEST_NAME: Final = "tierlog.http.request"
_DIGEST_LEN: Final = 6
_DIGEST_BITS: Final = 8 * _DIGEST_LEN
_NUMBER_MASK: Final = 0x7FFF

_KEY: Final = re.compile(r"([0-9a-fA-F-]{36}):(\d{1,19})", re.ASCII)


class FindStream(Protocol):
    """Finds a stream's metadata."""

    async def __call__(self, name: StreamName) -> Stream:
        """Return a stream, or raise STREAM_NOT_FOUND."""
        ...


class IdempotencyKey(NamedTuple):
    """Who sends a request, and the number of its last event."""

    writer_id: UUID
    event_number: int


class PlaceBody(BaseModel):
    """Where entries went within one ledger."""

    ledger_id: int
    first_entry_id: int
    last_entry_id: int


class AppendedBody(BaseModel):
    """What became of a request. ``repeated``: its events were there already, and are once."""

    stream: str
    events: int
    repeated: bool
    places: list[PlaceBody]
    """Where they went; not known of a repeated request."""


def parse_idempotency_key(text: str) -> IdempotencyKey:
    """Read ``WRITER:NUMBER``, or raise ``RefusedError``."""
    match = _KEY.fullmatch(text)
    try:
        found = IdempotencyKey(UUID(match[1]), int(match[2])) if match else None
    except ValueError:
        found = None
    if found is None or not 0 < found.event_number <= INT64_MAX:
        raise RefusedError(
            f"the Idempotency-Key {text[:60]!r} is not WRITER:NUMBER",
            remedy="Give the writer's UUID and the number of its last event, from 1 on",
        )
    return found


def events_of(body: bytes, content_type: str) -> list[bytes]:
    """Return the events of a body."""
    if content_type.partition(";")[0].strip().lower() != NDJSON:
        return [body]
    events = [line.removesuffix(b"\r") for line in body.split(b"\n")]
    events = [event for event in events if event]
    if not events:
        raise RefusedError("a body without events", remedy="Send one event a line")
    return events


def is_repeated(error: RefusedError, key: IdempotencyKey) -> bool:
    """Tell whether an append failed because what it brings is there."""
    if error.reason is not Reason.CONDITIONAL_APPEND_FAILED:
        return False
    number = error.details.get("event_number")
    return number is not None and int(number) >= key.event_number


def request_key(writer_id: UUID) -> UUID:
    """Return the key of the attribute that says what a writer's last request brought."""
    return uuid5(writer_id, REQUEST_NAME)


def brought(event_number: int, events: Sequence[bytes]) -> int:
    """Return what that attribute is set to: the number's last bits, and the events' digest."""
    digest = hashlib.sha256()
    for event in events:
        digest.update(len(event).to_bytes(4, "big"))
        digest.update(event)
    number = event_number & _NUMBER_MASK
    return number << _DIGEST_BITS | int.from_bytes(digest.digest()[:_DIGEST_LEN], "big")


def is_other(key: IdempotencyKey, events: Sequence[bytes], number: int, told: int | None) -> bool:
    """Tell whether the events of this number are known to be others than these.

    ``number`` is the writer's last one, and ``told`` what its last request brought.
    """
    ours = brought(key.event_number, events)
    if told is None or number != key.event_number:
        return False
    # One of another number was left there by appends that were not over HTTP.
    return told >> _DIGEST_BITS == ours >> _DIGEST_BITS and told != ours


async def _check_same(
    owners: Owners, stream: StreamName, key: IdempotencyKey, events: Sequence[bytes]
) -> None:
    writer = AttributeKey(key.writer_id.bytes)
    request = AttributeKey(request_key(key.writer_id).bytes)
    # One answer is of one moment.
    found = (await owners.get_attributes(stream, [writer, request])).values
    if is_other(key, events, found.get(writer, 0), found.get(request)):
        raise RefusedError(
            f"event {key.event_number} of writer {key.writer_id} is there, and is another one",
            reason=Reason.CONDITIONAL_APPEND_FAILED,
            remedy="Number each event once: a repeat brings the same events; go on behind them",
            details={"event_number": str(key.event_number)},
        )


def _entry(events: Sequence[bytes], key: IdempotencyKey | None, now_ms: int) -> bytes:
    if key is None:
        return encode_entry(events, publish_time_ms=now_ms)
    told = brought(key.event_number, events)
    return encode_entry(
        events,
        publish_time_ms=now_ms,
        writer_id=key.writer_id,
        event_number=key.event_number,
        attribute_updates=[
            AttributeUpdate(key=request_key(key.writer_id), verb=Verb.REPLACE, value=told)
        ],
    )


def add_routes(app: FastAPI, *, owners: Owners, find: FindStream, clock: Clock) -> None:
    """Add the routes of appends to ``app``."""

    @app.post("/v1/streams/{stream}/events")
    async def append(
        stream: str,
        request: Request,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> AppendedBody:
        """Append the body's events; at most once where an Idempotency-Key is given."""
        name = stream_name(stream)
        key = parse_idempotency_key(idempotency_key) if idempotency_key is not None else None
        events = events_of(await _body(request), request.headers.get("content-type", ""))
        entries, condition = events, None
        if not (await find(name)).raw:
            entries = [_entry(events, key, clock.wall_ms())]
        if key is not None:
            last = key.event_number - len(events)
            if last < 0:
                raise RefusedError(
                    f"{len(events)} events end with number {key.event_number}",
                    remedy="Give the number of the last event, counted from 1",
                )
            condition = AppendCondition(last_event_number=last)
        frames, offsets = pack_entries(entries)
        await owners.ready()
        try:
            ranges = await owners.submit(name, build_run(frames, offsets), condition=condition)
        except RefusedError as error:
            if key is None or not is_repeated(error, key):
                raise
            await _check_same(owners, name, key, events)
            return AppendedBody(stream=name, events=len(events), repeated=True, places=[])
        places = [
            PlaceBody(
                ledger_id=one.ledger_id,
                first_entry_id=one.first_entry_id,
                last_entry_id=one.last_entry_id,
            )
            for one in ranges
        ]
        return AppendedBody(stream=name, events=len(events), repeated=False, places=places)


async def _body(request: Request) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > BODY_BYTES_MAX:
            raise RefusedError(
                f"a body of more than {BODY_BYTES_MAX} bytes",
                reason=Reason.TOO_LARGE,
                remedy="Send fewer events at once, or append by the client library",
            )
        pieces.append(piece)
    return b"".join(pieces)
