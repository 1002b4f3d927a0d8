"""Requests that were put aside: what they are, what became of them, and bringing them back.

The topic is the only record: a letter lies where a worker put it until its time is over, and what
people do about it is one more event there, a mark, that names its place.

Owns the meaning of letters and marks. Does not own the topic: workers write to it.

Invariants:
    * A letter is replayed before it is marked. A crash in between leaves it waiting, and another
      replay asks twice, which a request may.
    * Only what parses as a request is replayed; anything else would come straight back.
    * The newest letters of each partition are looked through, and no more than a bound.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import structlog

from tierlog.model.errors import Reason, RefusedError, TierlogError
from tierlog.offload import messages
from tierlog.offload.messages import Outgoing, Stationery, parse_request, trace_of
from tierlog.ports.event_log import EventLog, EventPlace, StoredEvent
from tierlog.ports.events import Event, EventPublisher

log = structlog.get_logger()

KEY_SHOWN_MAX: Final = 200
REPLAYED_AT_ONCE_MAX: Final = 1000


class LetterState(StrEnum):
    """What became of a letter."""

    WAITING = "waiting"
    REPLAYED = "replayed"
    DISMISSED = "dismissed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """What is said of a letter. Stream and ledger: None when it is no request."""

    place: EventPlace | str
    state: str
    stored_ms: int
    topic: str
    key: str
    stream: str | None
    ledger_id: int | None
    reason: str
    error: str
    attempts: int
    value_len: int
    cut: bool
    trace_id: str | None
    replay_of: str | None
    marked_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter(Letter):
    """A letter as it was read."""

    place: EventPlace
    state: LetterState

    @property
    def is_request(self) -> bool:
        """Whether it can be replayed."""
        return self.ledger_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    place: EventPlace
    state: LetterState
    time_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay of several letters came to."""

    replayed: tuple[EventPlace, ...]
    refused: tuple[tuple[EventPlace, str], ...]
    left: int
    """How many it did not come to: so many are not replayed at once."""


def letter_of(stored: StoredEvent) -> DeadLetter:
    """Read a letter; whatever is in it makes one."""
    event = stored.event
    try:
        request = parse_request(event)
    except TierlogError:
        stream, ledger_id = None, None
    else:
        stream, ledger_id = request.stream, request.ledger_id
    trace = trace_of(event)
    return DeadLetter(
        place=stored.place,
        state=LetterState.WAITING,
        stored_ms=stored.stored_ms,
        topic=_text(event, messages.FROM_TOPIC),
        key=event.key[:KEY_SHOWN_MAX].decode("utf-8", "replace"),
        stream=stream,
        ledger_id=ledger_id,
        reason=_text(event, messages.ERROR_REASON),
        error=_text(event, messages.ERROR_MESSAGE),
        attempts=_number(_text(event, messages.ATTEMPTS)),
        value_len=len(event.value),
        cut=messages.CUT in event.headers,
        trace_id=trace.trace_id.hex() if trace is not None else None,
        replay_of=_text(event, messages.REPLAY_OF) or None,
        marked_ms=None,
    )


def parse_place(text: str) -> EventPlace:
    """Read ``PARTITION:OFFSET``."""
    partition, found, offset = text.partition(":")
    if not (found and partition.isdecimal() and offset.isdecimal() and text.isascii()):
        raise RefusedError(
            f"{text[:40]!r} is not the place of a dead letter",
            remedy="Write it as PARTITION:OFFSET, as tierlog dlq list shows it",
        )
    if len(text) > len("2147483647:9223372036854775807"):
        raise no_such_letter(text)
    return EventPlace(int(partition), int(offset))


def no_such_letter(place: object) -> RefusedError:
    """Say that there is no such letter."""
    return RefusedError(
        f"there is no dead letter at {str(place)[:60]}",
        reason=Reason.NO_SUCH_ENTRY,
        remedy="List them with: tierlog dlq list; they are kept for kafka.dead_letter_retention_s",
    )


class DeadLetters:
    """The letters of one deployment."""

    def __init__(
        self,
        event_log: EventLog,
        publisher: EventPublisher,
        stationery: Stationery,
        *,
        newest_max: int,
    ) -> None:
        self._log = event_log
        self._publisher = publisher
        self._stationery = stationery
        self._newest_max = newest_max

    @property
    def topic(self) -> str:
        """Where they lie."""
        return self._stationery.topics.dead_letter

    async def find(
        self,
        *,
        state: LetterState | None = LetterState.WAITING,
        stream: str | None = None,
        reason: str | None = None,
    ) -> list[DeadLetter]:
        """Return the letters, newest first; ``None`` does not restrict."""
        letters: dict[EventPlace, DeadLetter] = {}
        marks: dict[EventPlace, _Mark] = {}
        async for stored in self._scan():
            mark = _mark_of(stored)
            if mark is not None:
                marks[mark.place] = mark
            elif messages.MARK not in stored.event.headers:
                letters[stored.place] = letter_of(stored)
        found = [_marked(one, marks.get(place)) for place, one in letters.items()]
        return sorted(
            (
                one
                for one in found
                if state in (None, one.state)
                and stream in (None, one.stream)
                and reason in (None, one.reason)
            ),
            key=lambda one: (one.stored_ms, one.place),
            reverse=True,
        )

    async def get(self, place: EventPlace) -> tuple[DeadLetter, Event]:
        """Return a letter, and the event that it is."""
        stored = await self._stored(place)
        marks = [_mark_of(one) async for one in self._scan()]
        newest = next((m for m in reversed(marks) if m is not None and m.place == place), None)
        return _marked(letter_of(stored), newest), stored.event

    async def replay(self, place: EventPlace) -> DeadLetter:
        """Ask again for what a letter asked for, whether or not that was done before."""
        stored = await self._stored(place)
        letter = letter_of(stored)
        if not letter.is_request:
            raise RefusedError(
                f"the dead letter at {place} is no offload request: {letter.error}",
                remedy=f"It would come back at once. Forget it with: tierlog dlq dismiss {place}",
                details={"place": str(place)},
            )
        await self._publish(self._stationery.replay(stored.event, str(place)))
        await self._mark(stored, LetterState.REPLAYED)
        log.info("letter.replayed", place=str(place), ledger_id=letter.ledger_id)
        return replace(letter, state=LetterState.REPLAYED)

    async def replay_waiting(
        self, *, stream: str | None = None, reason: str | None = None
    ) -> Replay:
        """Replay what waits, oldest first, up to a bound."""
        replayed: list[EventPlace] = []
        refused: list[tuple[EventPlace, str]] = []
        waiting = await self.find(stream=stream, reason=reason)
        for letter in waiting[::-1][:REPLAYED_AT_ONCE_MAX]:
            try:
                await self.replay(letter.place)
            except RefusedError as error:
                refused.append((letter.place, error.message))
            else:
                replayed.append(letter.place)
        left = max(0, len(waiting) - REPLAYED_AT_ONCE_MAX)
        return Replay(replayed=tuple(replayed), refused=tuple(refused), left=left)

    async def dismiss(self, place: EventPlace) -> DeadLetter:
        """Note that a letter needs nothing any more."""
        stored = await self._stored(place)
        await self._mark(stored, LetterState.DISMISSED)
        log.info("letter.dismissed", place=str(place))
        return replace(letter_of(stored), state=LetterState.DISMISSED)

    def _scan(self) -> AsyncIterator[StoredEvent]:
        return self._log.scan(self.topic, newest_max=self._newest_max)

    async def _stored(self, place: EventPlace) -> StoredEvent:
        stored = await self._log.get(self.topic, place)
        if stored is None or messages.MARK in stored.event.headers:
            raise no_such_letter(place)
        return stored

    async def _mark(self, stored: StoredEvent, state: LetterState) -> None:
        await self._publish(self._stationery.mark(stored.event, str(stored.place), state.value))

    async def _publish(self, outgoing: Outgoing) -> None:
        topic, key, value, headers = outgoing
        await self._publisher.publish(topic, key=key, value=value, headers=headers)


def _mark_of(stored: StoredEvent) -> _Mark | None:
    """Read a mark; None when it is none, or says nothing that is understood here."""
    if messages.MARK not in stored.event.headers:
        return None
    try:
        return _Mark(
            place=parse_place(_text(stored.event, messages.MARK_OF)),
            state=LetterState(_text(stored.event, messages.MARK)),
            time_ms=_number(_text(stored.event, messages.MARK_TIME_MS)),
        )
    except (RefusedError, ValueError):
        return None


def _marked(letter: DeadLetter, mark: _Mark | None) -> DeadLetter:
    if mark is None:
        return letter
    return replace(letter, state=mark.state, marked_ms=mark.time_ms)


def _text(event: Event, name: str) -> str:
    return event.headers.get(name, b"")[: messages.HEADER_LEN_MAX].decode("utf-8", "replace")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0
