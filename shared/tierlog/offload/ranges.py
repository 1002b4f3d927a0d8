"""Ranged reads of objects, 1 MiB at a time, shared by all who read (seeds/000, "Reading from S3").

Owns which ranges are being fetched, so that what many want at once is fetched once. Does not own
what is kept of them afterwards (``range_memory``).

Objects are read in *units*: grains, where a side object says what each must be, and whole ranges
where none does. One request fetches as many units as a range holds, or ahead of who has long read
on, as some ranges hold together. Where grains are known, a read that begins anywhere fetches only
its own; one that goes on from what is kept, or that is longer than a range, fetches its last range
to the end.

Invariants:
    * A unit is fetched once at a time, however many want it, and all who waited for it get it, or
      the error: also when there was no room to keep it.
    * At most ``in_flight_max`` fetches run, over all objects. What somebody waits for has its turn
      before what nobody does, however long that waits: a read, or a walk that begins behind it.
      What waits for its pace (``pacing``) has no turn.
    * What has paid and is not asked of the store after all has its payment back.
    * What nobody waits for is only fetched where the memory has room for it. What is longer than a
      range is never held elsewhere: who waits for such a request without room asks anew, by ranges.
    * What comes is written where it is kept, and nowhere else.
    * A range has exactly the length that the object's size says, or the read fails.
    * What has grains is checked against them before anything is made of it, or kept. What differs
      is fetched once more, since most damage happens on the way.

Cancellation: within ``run`` a fetch that has begun goes on when whoever asked for it goes, and is
kept. One that waits for its turn, and each without ``run``, is given up by who is cancelled; those
that waited for it fetch anew.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, Self

import structlog

from tierlog.format.checksum import Buffer
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.scrub import REPAIR_COPY
from tierlog.offload.groups import Outlasting, plain_errors
from tierlog.offload.range_memory import Blank, LastRanges, LooseBlank, RangeMemory
from tierlog.offload.turns import Pace, Turns
from tierlog.ports.filling import length_of
from tierlog.ports.objects import ObjectReads
from tierlog.ports.spending import purpose

log = structlog.get_logger()

RANGE_BYTES: Final = 1024 * 1024
IN_FLIGHT_MAX: Final = 8
KEPT_BYTES_MAX: Final = 16 * RANGE_BYTES
GROWTH_MAX: Final = 4
# A walk over a range has it as pieces, and joined.
WALK_COPIES: Final = 2
# The memory holds so many of the longest requests.
GROWN_KEPT_MIN: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLimits:
    """Every bound of ranged reads."""

    range_bytes: int = RANGE_BYTES
    in_flight_max: int = IN_FLIGHT_MAX
    kept_bytes_max: int = KEPT_BYTES_MAX
    """What the memory holds; half of it is fetched ahead at once."""
    growth_max: int = GROWTH_MAX
    """A request ahead of who has long read on is as long as so many ranges."""


class GrainChecks(Protocol):
    """What the grains of an object must be."""

    @property
    def grain_len(self) -> int:
        """How long each is, but the last."""
        ...

    async def check(self, start: int, body: Sequence[Buffer]) -> None:
        """Raise ``CorruptError`` unless ``body`` belongs at ``start``, where a grain begins."""
        ...


class WalkRooms(Protocol):
    """Memory for walks from a known place to where an entry begins."""

    def room(self, client: Hashable, size: int) -> AbstractAsyncContextManager[object]:
        """Give room for the length of the context, once there is some."""
        ...


class Source(NamedTuple):
    """An immutable object and its size; ``grains`` when something says what they must be."""

    key: str
    size: int
    grains: GrainChecks | None = None


class _UnitId(NamedTuple):
    key: str
    start: int


class _Span(NamedTuple):
    """A request: whole units, from byte ``start`` to ``end``."""

    units: list[_UnitId]
    start: int
    end: int


@dataclass(slots=True, eq=False)
class _Waiter:
    """Who waits for bytes from ``at`` on; None comes when whoever fetched them gave up."""

    at: int
    end: int
    landed: asyncio.Future[memoryview | None]


@dataclass(slots=True, eq=False)
class _Flight:
    """A request on its way, and all who ever waited for it."""

    for_nobody: bool = False
    """It was begun ahead of all who read."""
    waited_for: bool = False
    """A reader goes on behind it, though it was ahead."""
    stop: int = 0
    """The number of the unit behind its last one."""
    waiters: list[_Waiter] = field(default_factory=list)

    @property
    def ahead(self) -> bool:
        """Nobody waits for it: not yet, or not any more."""
        return all(one.landed.cancelled() for one in self.waiters)

    @property
    def urgent(self) -> bool:
        """Somebody waits for it, or for whoever began it."""
        return self.waited_for or not self.ahead

    def land(self, blank: Blank, end: int) -> None:
        """Give each its part of what is there up to ``end``."""
        for one in self.waiters:
            if not one.landed.done():
                one.landed.set_result(blank.part(one.at, min(one.end, end)))

    def fail(self, error: BaseException) -> None:
        """Tell those who wait, unless they may try by themselves.

        That somebody gave up is nobody else's error; nor is what fetching ahead met.
        """
        told = isinstance(error, Exception) and not self.for_nobody
        for one in self.waiters:
            if one.landed.done():
                continue
            if told:
                one.landed.set_exception(error)
                one.landed.exception()  # whoever waits may be going just now
            else:
                one.landed.set_result(None)


class Walk:
    """Room for a walk over an object. Who waits for its pace has none: it would be others' room."""

    def __init__(self, ranges: "Ranges", source: Source, rooms: WalkRooms | None) -> None:
        self._ranges = ranges
        self._source = source
        self._rooms = rooms
        self._held = contextlib.AsyncExitStack()

    def __repr__(self) -> str:
        return f"<Walk over {self._source.key}>"

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

    async def _enter(self) -> None:
        if self._rooms is not None:
            client = self._source.key, purpose().stream
            size = WALK_COPIES * self._ranges.limits.range_bytes
            await self._held.enter_async_context(self._rooms.room(client, size))

    @contextlib.asynccontextmanager
    async def left(self, start: int, end: int) -> AsyncIterator[None]:
        """Have no room within the context where there is a pace; then these bytes have come."""
        if not self._ranges.is_paced:
            yield
            return
        await self._held.aclose()
        yield
        await self._ranges.bring(self._source, start, end)
        await self._enter()


class Ranges:
    """Reads of byte ranges over one object store."""

    def __init__(
        self,
        objects: ObjectReads,
        limits: RangeLimits,
        memory: RangeMemory | None = None,
        walks: WalkRooms | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._objects = objects
        self._pace = pace
        self._walks = walks
        self.limits = limits
        self._memory = memory if memory is not None else LastRanges(limits.kept_bytes_max)
        self._turns = Turns(limits.in_flight_max)
        self._flying: dict[_UnitId, _Flight] = {}
        # Turns bound it sooner: a task is at its end for a moment after it gave back its own.
        self._outlasting = Outlasting(tasks_max=2 * limits.in_flight_max)
        self.in_flight = 0
        """Requests that are being answered."""
        self.fetches = 0
        self.bytes_fetched = 0
        self.mismatches = 0
        self.hits = self.misses = 0
        """Reads that memory answered alone, and that had to wait for some of it."""
        self.bytes_from_memory = 0
        self.bytes_waited_for = 0

    def __repr__(self) -> str:
        return f"<Ranges fetches={self.fetches} flying={len(self._flying)} {self._memory}>"

    def run(self) -> AbstractAsyncContextManager[None]:
        """Let what has begun go on, within the context, when whoever asked for it goes."""
        return self._outlasting.run()

    async def read(
        self, source: Source, start: int, end: int, *, exact: bool = False
    ) -> memoryview:
        """Return bytes ``start`` to ``end`` of an object, as one buffer.

        ``exact``: nobody will go on from there, so that nothing else is to be fetched.
        """
        assert 0 <= start < end <= source.size, (start, end, source)
        pieces = self._kept(source.key, start, end)
        at = start + sum(map(len, pieces))
        if at < end:
            self.misses += 1
            pieces += await self._rest(source, start, at, end, exact=exact)
        else:
            self.hits += 1
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    async def warm(
        self, source: Source, start: int, end: int, *, growth: int = 1, waited_for: bool = False
    ) -> None:
        """Fetch the ranges that hold these bytes, as far as they will be kept.

        ``growth``: so many at once, within the limits. ``waited_for``: a reader goes on behind it.
        """
        size, kept = self.limits.range_bytes, self.limits.kept_bytes_max
        growth = max(1, min(growth, self._growth_max, kept // (GROWN_KEPT_MIN * size)))
        if growth > 1:  # whole requests, or what is left of one comes as a short one
            end = -(-end // (growth * size)) * growth * size
        end = min(end, source.size, start + max(kept // 2, size))
        if start >= end:
            return
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                for span in self._spans(source, start, end, exact=False, growth=growth):
                    group.create_task(self._warm(source, *span, waited_for=waited_for))

    def walking(self, source: Source) -> "Walk":
        """Have room for a walk over an object, a range at a time, for the length of the context."""
        return Walk(self, source, self._walks)

    @property
    def is_paced(self) -> bool:
        """Whether requests may have to wait for a limit of bytes a second."""
        return self._pace is not None

    async def bring(self, source: Source, start: int, end: int) -> None:
        """Have the units of some bytes fetched; none that is not kept: it would be paid again."""
        unit = self._unit_of(source)
        for number in range(start // unit, -(-end // unit)):
            span = self._span(source, number, number + 1)
            while self._memory.known_end(source.key, span.start, span.end) < span.end:
                if span.units[0] not in self._flying and not self._has_room(span, ahead=False):
                    return
                if await self._landed(source, span.start, span.start, number + 1) is not None:
                    break

    def forget(self, key: str) -> None:
        """Drop what is kept of an object, which turned out damaged on its way or at its place."""
        self._memory.forget(key)

    @property
    def _growth_max(self) -> int:
        """So many ranges are one request: those of others wait behind a long one."""
        at_once = None if self._pace is None else self._pace.at_once
        if at_once is None:
            return self.limits.growth_max
        doublings = max(1, at_once // self.limits.range_bytes).bit_length() - 1
        return min(self.limits.growth_max, 1 << doublings)

    def _unit_of(self, source: Source) -> int:
        return self.limits.range_bytes if source.grains is None else source.grains.grain_len

    def _kept(self, key: str, at: int, end: int) -> list[memoryview]:
        """Return what is in memory from ``at`` on, up to the first gap."""
        pieces = []
        while at < end and (piece := self._memory.get(key, at, end)) is not None:
            self.bytes_from_memory += len(piece)
            pieces.append(piece)
            at += len(piece)
        return pieces

    async def _rest(
        self, source: Source, start: int, at: int, end: int, *, exact: bool
    ) -> list[memoryview]:
        """Return bytes ``at`` to ``end`` of what a read from ``start`` wants."""
        unit = self._unit_of(source)
        spans = [
            (max(at, first * unit), min(end, stop * unit), stop)
            for first, stop in self._spans(source, start, end, exact=exact)
            if stop * unit > at
        ]
        if len(spans) == 1:
            return await self._held(source, *spans[0])
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._held(source, *span)) for span in spans]
        return [piece for task in tasks for piece in task.result()]

    def _spans(
        self, source: Source, start: int, end: int, *, exact: bool, growth: int = 1
    ) -> list[tuple[int, int]]:
        """Cut units at the borders of ranges, or only where a request would be too long."""
        unit = self._unit_of(source)
        first, stop = start // unit, (end - 1) // unit + 1
        length = growth * max(1, self.limits.range_bytes // unit)
        borders = range(first if exact else first // length * length, stop, length)
        spans = [(max(first, border), min(stop, border + length)) for border in borders]
        if exact or source.grains is None:
            return spans
        last_first, last_stop = spans[-1]
        goes_on = len(spans) > 1 or self._known(source, last_first - 1)
        goes_on = goes_on and not self._known(source, last_stop - 1)
        range_end = min(borders[-1] + length, -(-source.size // unit))
        while goes_on and last_stop < range_end and not self._known(source, last_stop):
            last_stop += 1
        return [*spans[:-1], (last_first, last_stop)]

    def _known(self, source: Source, number: int) -> bool:
        unit_id = _UnitId(source.key, number * self._unit_of(source))
        return unit_id in self._flying or self._memory.known(*unit_id)

    def _unknown_stop(self, source: Source, first: int, stop: int) -> int:
        """Return up to where units are neither kept nor on their way; the first one is not."""
        unit = self._unit_of(source)
        missing_end = self._memory.unknown_end(source.key, first * unit, stop * unit)
        end, stop = first + 1, -(-missing_end // unit)
        while end < stop and _UnitId(source.key, end * unit) not in self._flying:
            end += 1
        return end

    async def _held(self, source: Source, at: int, end: int, stop: int) -> list[memoryview]:
        """Return bytes ``at`` to ``end``; what is fetched for it may go on up to unit ``stop``."""
        pieces: list[memoryview] = []
        while True:
            kept = self._kept(source.key, at, end)
            pieces += kept
            at += sum(map(len, kept))
            if at >= end:
                return pieces
            piece = await self._landed(source, at, end, stop)
            if piece is not None:
                self.bytes_waited_for += len(piece)
                pieces.append(piece)
                at += len(piece)

    async def _landed(self, source: Source, at: int, end: int, stop: int) -> memoryview | None:
        """Return what comes of bytes ``at`` to ``end``; None: who fetched it gave up."""
        unit = self._unit_of(source)
        number = at // unit
        waiter = _Waiter(at, end, asyncio.get_running_loop().create_future())
        flight = self._flying.get(_UnitId(source.key, number * unit))
        if flight is not None:
            flight.waiters.append(waiter)
        else:
            stop = self._unknown_stop(source, number, stop)
            span = self._span(source, number, stop)
            with contextlib.suppress(Exception):  # who waits is told
                await self._fetch(source, span, _Flight(waiters=[waiter]))
        return await waiter.landed

    async def _warm(self, source: Source, number: int, stop: int, *, waited_for: bool) -> None:
        """Fetch what is missing of some units, until there is no room for it."""
        unit = self._unit_of(source)
        stop_at = min(stop * unit, source.size)
        while number < stop:
            # Most of what is ahead of who reads on is there already, or on its way.
            flight = self._flying.get(_UnitId(source.key, number * unit))
            if flight is not None:
                flight.waited_for |= waited_for
                number = flight.stop
                continue
            end = self._memory.known_end(source.key, number * unit, stop_at)
            if end > number * unit:
                number = stop if end == stop_at else max(number + 1, end // unit)
                continue
            upto = self._unknown_stop(source, number, stop)
            span = self._span(source, number, upto)
            flight = _Flight(for_nobody=True, waited_for=waited_for)
            if not await self._fetch(source, span, flight):
                return
            number = upto

    def _span(self, source: Source, first: int, stop: int) -> _Span:
        unit = self._unit_of(source)
        units = [_UnitId(source.key, number * unit) for number in range(first, stop)]
        return _Span(units, first * unit, min(stop * unit, source.size))

    async def _fetch(self, source: Source, span: _Span, flight: _Flight) -> bool:
        """Fetch a span for those who wait for it, and keep it if there is room.

        False: there is none, and it was to be ahead. Within ``run`` it may return before it landed.
        """
        if self._pace is not None and flight.ahead and not self._has_room(span, ahead=True):
            return False  # it would pay for what is not fetched
        flight.stop = span.units[-1].start // self._unit_of(source) + 1
        self._flying.update(dict.fromkeys(span.units, flight))
        try:
            # Before the turn: who has to wait holds up nobody with another limit.
            await self._pay(span, flight)
            await self._take_turn(span, flight)
        except BaseException as error:
            self._end(span, flight, error)
            raise
        # Nothing is awaited between having the turn and who gives it back.
        ahead, kept = flight.ahead, asyncio.get_running_loop().create_future()
        await self._outlasting.begin(self._bring_for_all(source, span, flight, kept))
        return await kept if ahead else True

    async def _pay(self, span: _Span, flight: _Flight) -> None:
        if self._pace is not None:
            await self._pace.take(span.end - span.start, flight)

    async def _take_turn(self, span: _Span, flight: _Flight) -> None:
        try:
            await self._turns.take(flight)
        except asyncio.CancelledError:
            self._unpay(span)
            raise

    def _unpay(self, span: _Span) -> None:
        """Take back what was paid for a span that is not fetched after all."""
        if self._pace is not None:
            self._pace.give_back(span.end - span.start)

    def _has_room(self, span: _Span, *, ahead: bool) -> bool:
        """Say whether memory has room now for what is to come; it is taken once it has its turn."""
        key, start = span.units[0]
        if blank := self._memory.blank(key, start, span.end - start, ahead=ahead):
            blank.give_up()
        return blank is not None

    async def _bring_for_all(
        self, source: Source, span: _Span, flight: _Flight, kept: "asyncio.Future[bool]"
    ) -> None:
        """Tell whoever began it how it ended, too, unless that one went; the others are told."""
        outcome: bool | Exception = False
        try:
            outcome = await self._bring(source, span, flight)
        except Exception as error:  # noqa: BLE001 - told to who began it, whatever it is
            outcome = error
        finally:
            if kept.done():
                pass
            elif isinstance(outcome, Exception):
                kept.set_exception(outcome)
                kept.exception()  # nobody may ask
            else:
                kept.set_result(outcome)

    async def _bring(self, source: Source, span: _Span, flight: _Flight) -> bool:
        """Fetch a span, whose turn it is; see ``_fetch``."""
        size = span.end - span.start
        error: BaseException = asyncio.CancelledError()
        blank: Blank | None = None
        try:
            # Room is taken by what is on its way, not by what waits for its turn.
            ahead = flight.ahead
            blank = self._memory.blank(source.key, span.start, size, ahead=ahead)
            grown = size > max(self.limits.range_bytes, self._unit_of(source))
            if blank is None and (ahead or grown):
                self._unpay(span)
                return False
            blank = blank if blank is not None else LooseBlank(span.start, size)
            await self._get_checked(source, span.start, blank.targets)
            flight.land(blank, span.end)
        except BaseException as caught:
            error = caught
            if blank is not None:
                blank.give_up()
            raise
        else:
            # What took the room of who waits is not kept from others as what is ahead is, though
            # nobody waits any more.
            blank.keep(ahead=ahead and flight.ahead)
            return True
        finally:
            self._turns.give_back()
            self._end(span, flight, error)

    def _end(self, span: _Span, flight: _Flight, error: BaseException) -> None:
        """Take a flight out; who has nothing of it yet is told why."""
        for unit_id in span.units:
            del self._flying[unit_id]
        flight.fail(error)

    async def _get_checked(self, source: Source, start: int, targets: Sequence[memoryview]) -> None:
        await self._get(source, start, targets)
        if source.grains is None:
            return
        try:
            await source.grains.check(start, targets)
        except CorruptError as error:
            self.mismatches += 1
            log.warning("range.differs", key=source.key, offset=start, cause=str(error))
            await self._get(source, start, targets)
            await source.grains.check(start, targets)

    async def _get(self, source: Source, start: int, targets: Sequence[memoryview]) -> None:
        size = length_of(targets)
        self.in_flight += 1
        try:
            found = await self._objects.get_range_into(source.key, start, targets)
        finally:
            self.in_flight -= 1
        if found is None:
            raise object_gone(source.key)
        if found != size:
            raise CorruptError(
                f"object {source.key} ends at byte {start + found} of {source.size}",
                remedy=REPAIR_COPY,
                details={"object": source.key, "offset": str(start + found)},
            )
        self.fetches += 1
        self.bytes_fetched += size


def object_gone(key: str) -> RefusedError:
    """Say that an object is not where it should be, so that its place is looked up again."""
    return RefusedError(
        f"object {key} is not there",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy="Look the ledger up again: it may have been trimmed, or offloaded anew. If it was"
        " not, repair its copy with: tierlog scrub --repair",
        details={"object": key},
    )
