"""A writer's state, to be stored by its producer, and taking the writer over from it.

    {"version": 1, "writer_id": "…",
     "streams": {"orders": {"acked_event_number": 120, "sent_event_number": 150}}}

The state needs to be stored once, before the first event is sent: what is there is the owner's
knowledge, and it is asked. The numbers are how far things had come when the state was taken.

A session is a random number: a stream that was restored, or deleted and made again, knows none of
those that were, and counted up it would give one of them again, to appends that still wait.

Owns the state as a value and as JSON, and the order of a take-over: first the session changes, so
that nothing of a predecessor can land any more; only then is the number read that counts.

Invariant: when ``take_over`` returns, no append of an earlier session will land, and the number is
that of the writer's last event in the stream.
Crash, Retries: a session that changed once too often does no harm.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self
from uuid import UUID

import structlog

from tierlog.client.attributes import check_settable
from tierlog.client.batches import updates_alone
from tierlog.client.idempotent import Numbers, is_failed_condition, session_key
from tierlog.client.owners import OwnerConnections, append_alone
from tierlog.format.entry import AttributeUpdate, Verb
from tierlog.format.versions import GATE, Format, current
from tierlog.model.attributes import NO_EVENT_NUMBER, AttributeKey
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import INT64_MAX, StreamName, stream_name
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.streams import StreamControl

log = structlog.get_logger()

BACKOFF_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterState:
    """What resumes a writer: its id, and how far it had come in each stream it wrote to."""

    writer_id: UUID
    streams: Mapping[StreamName, Numbers] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "version": current(Format.WRITER_STATE),
            "writer_id": str(self.writer_id),
            "streams": {
                name: {"acked_event_number": one.acked, "sent_event_number": one.sent}
                for name, one in self.streams.items()
            },
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Self:
        """Invert ``document``, or raise ``RefusedError``."""
        try:
            if document["version"] not in GATE[Format.WRITER_STATE].readable:
                raise RefusedError(
                    f"a writer's state of version {document['version']!r}",
                    remedy="Resume it with the version of tierlog that stored it",
                )
            return cls(
                writer_id=UUID(document["writer_id"]),
                streams={
                    stream_name(name): Numbers(
                        acked=_number(one["acked_event_number"]),
                        sent=_number(one["sent_event_number"]),
                    )
                    for name, one in document["streams"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError(
                f"a writer's state can't be read: {error!r}",
                remedy="Give what state().document() returned",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A writer that was taken over in one stream."""

    session: int
    event_number: int
    """Of the last event that is there."""
    number_now: Callable[[], Awaitable[int | None]]
    """Asks for the number, as of a moment when the session was this one; None: it is another's."""


async def take_over(
    stream: StreamName,
    writer_id: UUID,
    *,
    owners: OwnerConnections,
    control: StreamControl,
    clock: Clock,
    ids: Ids,
    append_s_max: float,
    retry_s_max: float,
) -> Taken:
    """Begin a session of the writer, and return how far the stream has its events."""
    check_settable(writer_id)
    key = AttributeKey(session_key(writer_id).bytes)
    number_key = AttributeKey(writer_id.bytes)

    async def session_and_number() -> tuple[int | None, int]:
        # One answer is of one moment: whoever knows the session knows what was sent before it.
        found = (await control.get_attributes(stream, [key, number_key])).values
        return found.get(key), found.get(number_key, NO_EVENT_NUMBER)

    async def number_in(session: int) -> int | None:
        now, number = await session_and_number()
        return number if now == session else None

    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + retry_s_max
    while True:
        try:
            before, _ = await session_and_number()
            session = _session(ids.uuid())
            update = _changed(writer_id, before, session)
            await append_alone(
                owners,
                stream,
                updates_alone([update], now_ms=clock.wall_ms()),
                condition=None,
                append_s_max=append_s_max,
                retry_s_max=retry_s_max,
            )
            number = await _known(number_in(session), stream)
        except TierlogError as error:
            # Whatever became of it, the next session is one that nobody has.
            known = isinstance(error, RetryableError | IndeterminateError)
            if not (known or is_failed_condition(error)) or loop.time() >= deadline_s:
                raise
            log.info("writer.take_over_again", stream=stream, cause=str(error))
        else:
            log.info("writer.taken_over", stream=stream, writer_id=str(writer_id), number=number)
            number_now = partial(number_in, session)
            return Taken(session=session, event_number=number, number_now=number_now)
        await asyncio.sleep(BACKOFF_S)


async def _known(asked: Awaitable[int | None], stream: StreamName) -> int:
    number = await asked
    if number is None:
        raise RetryableError(
            f"{stream} does not show this writer's session: its owner has not heard of it, or "
            "another process resumes the writer, too",
            remedy="Ask again, and let one process alone resume a writer",
        )
    return number


def _session(random: UUID) -> int:
    """Return 63 random bits, from around those that tell the kind of a UUID."""
    return random.int >> 80 << 15 | random.int & 0x7FFF


def _changed(writer_id: UUID, before: int | None, session: int) -> AttributeUpdate:
    if before is None:
        return AttributeUpdate(
            key=session_key(writer_id), verb=Verb.REPLACE_IF_ABSENT, value=session
        )
    return AttributeUpdate(
        key=session_key(writer_id), verb=Verb.REPLACE_IF_EQUALS, value=session, expected=before
    )


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= INT64_MAX:
        message = f"{value!r} is no event number"
        raise ValueError(message)
    return value
