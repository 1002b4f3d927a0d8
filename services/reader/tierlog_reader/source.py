"""Reads of a stream from whichever tier has it (protocols.md section 5).

Owns the loop around the decisions of ``places``: look up, ask memory, then a tier, look up again
when it turns out not to have the ledger, wait at the tail. Does not own how a tier is read.

Consistency: an answer is frames of one ledger from the asked entry on, never a gap and never
past the LAC of an open ledger. An empty answer says "not yet", and only at the tail.
Retries: a tier that fails, lacks or damages a closed ledger, or refuses this process what it asks
for, is left for the other one, after a fresh look at the metadata, at most once each, and each copy
in tier 2; then its error is told. A position is refused after a fresh look alone.
Cancellation: a read keeps nothing that another one waits for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

import structlog

from tierlog.catalog.streams import StreamSnapshot
from tierlog.ledger.reader import KnownEnd
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, StreamName
from tierlog.model.offload import OffloadContext
from tierlog.model.partitions import is_partitioned
from tierlog.model.position import Edge, Position
from tierlog.model.stream import ListedLedger
from tierlog.ports.reads import ServedLedger, ServedLedgers
from tierlog.ports.spending import Cause, spending
from tierlog_reader.chunk import NO_ROOM, Answer, Budget, Chunk, ReadRoom
from tierlog_reader.places import (
    GONE_REASONS,
    AtEnd,
    BehindLast,
    Failures,
    Following,
    Place,
    Spot,
    Tier,
    choose_tier,
    ledger_behind,
    locate,
    not_yet,
    unrefused,
    why_tier,
)
from tierlog_reader.timings import OF_TIER
from tierlog_reader.trace import step
from tierlog_reader.views import Views

log = structlog.get_logger()

T = TypeVar("T")

# A roll-over is noticed that late at most, while a read waits at a ledger's end.
TAIL_SLICE_S: Final = 0.25
# An owner tells the nodes of an acknowledgement a few milliseconds late at most, where no later
# entry carries it: "nothing there" is said only after that time, so that who has just appended
# and now reads finds what it appended.
TAIL_GRACE_S: Final = 0.025
# So long the end of a stream is looked for without coming nearer to it, with pauses that grow from
# what an owner's word takes. An owner whose disks are busy confirms what it has sent by and by.
END_S_MAX: Final = 2.0
END_PAUSE_S_FIRST: Final = 0.005
# What a list of ledgers says of a position that it lacks. Nobody asks again after a refusal.
UNLISTED_REASONS: Final = GONE_REASONS | {Reason.TRIMMED}
TRIMS_MET_MAX: Final = 1000


class Tier1(Protocol):
    """Ledgers on storage nodes. Raises LEDGER_NOT_FOUND when tier 1 has the ledger no more."""

    async def read(self, ledger: ListedLedger, first_entry_id: EntryId, budget: Budget) -> Chunk:
        """Return frames up to the LAC; NOT_YET after ``budget.wait_s`` without any."""
        ...

    async def last_confirmed(self, ledger_id: LedgerId) -> EntryId:
        """Return the LAC of an open ledger."""
        ...

    async def end(self, ledger_id: LedgerId) -> KnownEnd:
        """Return an open ledger's LAC, and the last entry that a node has which is of it now."""
        ...

    async def length(self, ledger_id: LedgerId, last: EntryId) -> int | None:
        """Return the bytes of a ledger's entries up to one that is confirmed; None: not known."""
        ...

    async def entry_at_time(self, ledger: ListedLedger, publish_ms: int) -> EntryId | None:
        """Return the first entry of the first run with that time or a later one; None: unknown.

        One behind the last where all are older.
        """
        ...


class Tier2(Protocol):
    """Ledgers in the object store. Raises LEDGER_NOT_FOUND when its objects are gone."""

    async def read(
        self,
        ledger: ListedLedger,
        context: OffloadContext,
        first_entry_id: EntryId,
        budget: Budget,
        following: Following | None = None,
    ) -> Chunk:
        """Return frames of the ledger's complete copy; ``following``: what will be read then."""
        ...

    async def entry_at_time(
        self, ledger: ListedLedger, context: OffloadContext, publish_ms: int
    ) -> EntryId | None:
        """Return an entry before which all are older; None: no times are known.

        One behind the last where all are.
        """
        ...


class Memory(Protocol):
    """The newest entries of ledgers that somebody follows (``tail``)."""

    def get(self, ledger_id: LedgerId, first_entry_id: EntryId, budget: Budget) -> Chunk | None:
        """Return what is in memory from an entry on; None: not even that one."""
        ...

    def awaited(self, ledger_id: LedgerId) -> EntryId | None:
        """Return the entry that is waited for in tier 1, for all who follow; None: none is."""
        ...

    def follow(self, ledger: ListedLedger, entry_id: EntryId) -> None:
        """Begin to take what comes in an open ledger from its end on."""
        ...

    async def wait(self, ledger_id: LedgerId, entry_id: EntryId, wait_s: float) -> bool:
        """Wait for an entry; False: nobody takes it any more."""
        ...


@dataclass(slots=True)
class _Try:
    """One read on its way: what was learned so far."""

    deadline_s: float
    fresh: bool = False
    """The next look at the metadata must be."""
    looked: bool = False
    """At least one look was."""
    watched_s: float = 0.0
    """So long memory was waited at, up to now."""
    trims_met: int = 0
    """So often the first ledger went while it was looked at."""
    failures: Failures = field(default_factory=Failures)
    failed_ledger: LedgerId | None = None

    def left_s(self) -> float:
        return max(0.0, self.deadline_s - asyncio.get_running_loop().time())

    def looks_again(self, where: Position | Edge, error: RefusedError, *, fresh: bool) -> bool:
        """Tell whether what was refused in one look may be there in the next one."""
        if where is Edge.EARLIEST and error.reason is Reason.TRIMMED:
            # Nothing that was asked for is lost: a long trim takes the list's head bit by bit.
            self.trims_met += 1
            return self.trims_met <= TRIMS_MET_MAX
        return not fresh and error.reason in UNLISTED_REASONS

    def failures_of(self, ledger_id: LedgerId) -> Failures:
        """Return what failed of a ledger; of another one nothing is known any more."""
        if self.failed_ledger != ledger_id:
            self.failed_ledger, self.failures = ledger_id, Failures()
        return self.failures


class StreamSource:
    """Reads of all streams of one cluster."""

    def __init__(
        self, views: Views, tier1: Tier1, tier2: Tier2, memory: Memory | None = None
    ) -> None:
        self._views = views
        self._tier1 = tier1
        self._tier2 = tier2
        self._memory = memory

    async def read(self, stream: StreamName, where: Position | Edge, budget: Budget) -> Answer:
        """Return what follows ``where``, waiting at the tail; or raise why there is nothing."""
        loop = asyncio.get_running_loop()
        # Only a new look knows what was acknowledged before the call, which "latest" is behind.
        state = _Try(deadline_s=loop.time() + budget.wait_s, fresh=where is Edge.LATEST)
        while True:
            fresh, state.fresh = state.fresh, False
            with step("metadata", f"stream {stream}"):
                snapshot = _with_entries(await self._views.stream(stream, fresh=fresh))
            state.looked = state.looked or fresh
            try:
                place, answer = await self._look(stream, where, budget, state, snapshot)
            except RefusedError as error:
                if not state.looks_again(where, error, fresh=fresh):
                    raise
                # Its ledger may have been opened, or the one before it trimmed, since that look.
                state.fresh = True
                continue
            if answer is not None:
                return replace(answer, raw=snapshot.stream.raw)
            if where is Edge.LATEST and place is not None:
                # "Latest" is decided once; what comes while the read waits is after it.
                where = place.resume

    async def _look(
        self,
        stream: StreamName,
        where: Position | Edge,
        budget: Budget,
        state: _Try,
        snapshot: StreamSnapshot,
    ) -> tuple[Spot | AtEnd | None, Answer | None]:
        """Return what ``where`` means in one look at the metadata, and what is read there.

        None: the ledger went; None: nothing for now. Then it is looked again.
        """
        found = locate(stream, snapshot.ledgers, where, trimmed_end=snapshot.stream.trimmed_end)
        place = await self._settled(found, state)
        if place is None:
            return None, None
        if isinstance(place, AtEnd):
            budget.room.leave()
            return place, await self._wait_at_end(place, state)
        return place, await self._read_spot(stream, place, budget, state, snapshot)

    async def snapshot(self, stream: StreamName, *, fresh: bool = False) -> StreamSnapshot:
        """Return what is known of a stream, which has entries itself."""
        return _with_entries(await self._views.stream(stream, fresh=fresh))

    async def why(self, stream: StreamName, ledger_id: LedgerId, tier: Tier) -> str:
        """Say why a ledger was read from that tier."""
        snapshot = await self.snapshot(stream)
        ledger = next((one for one in snapshot.ledgers if one.ledger_id == ledger_id), None)
        context = await self._views.context(ledger_id)
        priority = snapshot.policy.offloaded_read_priority or Tier.TIER2.value
        return why_tier(ledger, context, tier, priority=priority)

    async def entry_at_time(
        self, stream: StreamName, ledger: ListedLedger, publish_ms: int
    ) -> EntryId | None:
        """Return an entry of a ledger before which all are older; None: no times are known.

        A tier that fails is left for the other one, as in a read.
        """
        failed = Failures()
        while True:
            context = None
            if ledger.closed:
                context = await self._views.context(ledger.ledger_id, fresh=bool(failed.errors))
            gone = failed.of(context)
            try:
                tier = choose_tier(ledger, context, priority=Tier.TIER2.value, gone=frozenset(gone))
            except RetryableError as nowhere:
                raise unrefused(gone) or next(iter(gone.values()), nowhere) from None
            try:
                with step("times", f"ledger {ledger.ledger_id} in {tier}"):
                    if tier is Tier.TIER1:
                        return await self._tier1.entry_at_time(ledger, publish_ms)
                    assert context is not None
                    with spending(Cause.READ, stream):
                        return await self._tier2.entry_at_time(ledger, context, publish_ms)
            except (RefusedError, RetryableError, CorruptError) as error:
                failed.note(tier, error, context)

    async def end(self, stream: StreamName) -> tuple[StreamSnapshot, Position | Edge]:
        """Return the list of ledgers as of now, and the end that ``bounds`` says of it."""
        snapshot, place = await self._end(stream)
        return snapshot, place.resume

    async def latest(self, stream: StreamName) -> Position | Edge:
        """Return where "latest" is: behind the last entry that any node knows to be confirmed.

        It is told where ``bounds`` waits for an owner that is gone: what was acknowledged and is
        not known to be confirmed is behind it, and comes.
        """
        state = _Try(deadline_s=0.0)
        while True:
            snapshot = _with_entries(await self._views.stream(stream, fresh=True))
            end = snapshot.stream.trimmed_end
            found = locate(stream, snapshot.ledgers, Edge.LATEST, trimmed_end=end)
            if (place := await self._settled(found, state)) is not None:
                return place.resume

    async def bounds(self, stream: StreamName) -> tuple[Position | Edge, Position | Edge]:
        """Return the first readable position, and the one behind the last confirmed entry.

        All that was acknowledged before the call is before that end. Raises UNKNOWN while it
        can't be told: too few nodes answer, or they have more than they know to be confirmed
        and its owner is gone.
        """
        snapshot, place = await self._end(stream)
        if not snapshot.ledgers or place.resume in {Edge.EARLIEST, snapshot.stream.trimmed_end}:
            return place.resume, place.resume
        return Position(snapshot.ledgers[0].ledger_id, EntryId(0)), place.resume

    async def ledgers(
        self,
        stream: StreamName,
        first: LedgerId,
        *,
        count_max: int,
        room_for: Callable[[int], ReadRoom] = lambda _: NO_ROOM,
    ) -> ServedLedgers:
        """Return the ledgers from an id on that have entries; of the end what ``bounds`` says.

        ``room_for``: gives the room for so many of them, which is entered before any is made.
        """
        snapshot, place = await self._end(stream)
        asked = [one for one in snapshot.ledgers if one.ledger_id >= first]
        await room_for(min(count_max, len(asked))).enter()
        found: list[ServedLedger] = []
        resume = None
        for one in asked:
            count, length = one.entry_count, one.length
            if not one.closed:
                assert isinstance(place, Spot)
                count = int(place.entry_id)
                length = await self.length(one.ledger_id, count)
            if count and len(found) == count_max:
                resume = one.ledger_id
                break
            if count:
                found.append(
                    ServedLedger(
                        ledger_id=one.ledger_id,
                        entry_count=count,
                        length=length,
                        closed=one.closed,
                    )
                )
        return ServedLedgers(
            incarnation=snapshot.stream.incarnation,
            ledgers=found,
            trimmed_end=snapshot.stream.trimmed_end,
            resume=resume,
        )

    async def length(self, ledger_id: LedgerId, count: int) -> int:
        """Return the bytes of the first entries of an open ledger; 0: nobody says."""
        if not count:
            return 0
        try:
            return await self._tier1.length(ledger_id, EntryId(count - 1)) or 0
        except (RefusedError, RetryableError, CorruptError):
            # Whoever reads the entry is told why; a list is not refused for the sake of a length.
            return 0

    async def _end(self, stream: StreamName) -> tuple[StreamSnapshot, Spot | AtEnd]:
        """Look where a stream ends, and return what was known of it at that look."""
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + END_S_MAX, END_PAUSE_S_FIRST
        written: tuple[LedgerId, EntryId] | None = None
        nearest = NO_ENTRY
        while True:
            snapshot = _with_entries(await self._views.stream(stream, fresh=True))
            trimmed_end = snapshot.stream.trimmed_end
            place = locate(stream, snapshot.ledgers, Edge.LATEST, trimmed_end=trimmed_end)
            if not isinstance(place, BehindLast):
                assert isinstance(place, AtEnd)
                return snapshot, place
            ledger_id = place.ledger.ledger_id
            known = await _unless_gone(self._tier1.end(ledger_id))
            if known is not None:
                last = known.last_add_confirmed
                if written is None and known.covered:
                    written = ledger_id, known.last_entry_id
                if written is not None and (written[0] != ledger_id or last >= written[1]):
                    return snapshot, _spot(place, last)
                if written is not None and last > nearest:
                    nearest, deadline_s = last, loop.time() + END_S_MAX
            if loop.time() + pause_s > deadline_s:
                raise _no_end(stream, ledger_id)
            await asyncio.sleep(pause_s)
            pause_s = min(TAIL_SLICE_S, 2 * pause_s)

    async def _read_spot(
        self,
        stream: StreamName,
        spot: Spot,
        budget: Budget,
        state: _Try,
        snapshot: StreamSnapshot,
    ) -> Answer | None:
        ledger, memory = spot.ledger, self._memory
        if not ledger.closed and memory is not None and self._is_awaited(spot):
            budget.room.leave()
            if state.left_s() > 0:
                await self._watch(memory, spot, state)
                return None
            exactly = memory.awaited(ledger.ledger_id) == spot.entry_id
            if exactly and state.looked and state.watched_s >= TAIL_SLICE_S:
                return Answer(chunk=None, resume=spot.resume)
        await budget.room.enter()
        held = memory.get(ledger.ledger_id, spot.entry_id, budget) if memory is not None else None
        if held is not None:
            with step("memory", f"tail of ledger {ledger.ledger_id}") as noted:
                noted.outcome = f"{held.frames_len} bytes"
            return Answer(chunk=held, resume=held.end)
        if ledger.closed:
            priority = snapshot.policy.offloaded_read_priority or Tier.TIER2.value
            return await self._read_closed(spot, budget, state, snapshot, priority)
        return await self._read_open(stream, spot, budget, state)

    def _is_awaited(self, spot: Spot) -> bool:
        """Say whether somebody waits in tier 1 for this entry, or for one before it."""
        awaited = None if self._memory is None else self._memory.awaited(spot.ledger.ledger_id)
        return awaited is not None and awaited <= spot.entry_id

    async def _settled(self, place: Place, state: _Try) -> Spot | AtEnd | None:
        """Turn "behind the last entry" into a spot; None: the ledger went, look again."""
        if not isinstance(place, BehindLast):
            return place
        ledger_id = place.ledger.ledger_id
        try:
            last = await self._tier1.last_confirmed(ledger_id)
        except RefusedError as error:
            _reraise_unless_gone(error)
            failed = state.failures_of(ledger_id)
            if failed.errors:  # and a list that was read since has it as open
                raise unknown(error) from error
            failed.note(Tier.TIER1, error, None)
            state.fresh = True
            return None
        return _spot(place, last)

    async def _wait_at_end(self, place: AtEnd, state: _Try) -> Answer | None:
        # What is old is looked at again first: an append just acknowledged is never missed.
        if not state.looked:
            state.fresh = True
            return None
        left_s = state.left_s()
        if left_s <= 0:
            return Answer(chunk=None, resume=place.resume)
        await asyncio.sleep(min(TAIL_SLICE_S, left_s))
        return None

    async def _read_closed(
        self, spot: Spot, budget: Budget, state: _Try, snapshot: StreamSnapshot, priority: str
    ) -> Answer | None:
        ledger, stream = spot.ledger, snapshot.stream.name
        failed = state.failures_of(ledger.ledger_id)
        context = await self._views.context(ledger.ledger_id, fresh=bool(failed.errors))
        failures = failed.of(context)
        try:
            tier = choose_tier(
                ledger, context, priority=priority, gone=frozenset(failures), entry_id=spot.entry_id
            )
        except RetryableError as nowhere:
            raise unrefused(failures) or nowhere from None
        try:
            if tier is Tier.TIER1:
                with step("tier1", f"ledger {ledger.ledger_id}"), OF_TIER[tier].time():
                    chunk = await self._tier1.read(ledger, spot.entry_id, budget)
            else:
                assert context is not None
                with (
                    spending(Cause.READ, stream),
                    step("tier2", f"ledger {ledger.ledger_id}"),
                    OF_TIER[tier].time(),
                ):
                    chunk = await self._tier2.read(
                        ledger, context, spot.entry_id, budget, self._following(snapshot, priority)
                    )
        except (RefusedError, RetryableError, CorruptError) as error:
            log.info(
                "tier.left", stream=stream, ledger_id=ledger.ledger_id, tier=tier, cause=str(error)
            )
            failed.note(tier, error, context)
            state.fresh = True
            return None
        return Answer(chunk=chunk, resume=chunk.end)

    def _following(self, snapshot: StreamSnapshot, priority: str) -> Following:
        """Return what finds the ledger behind one where it is to be read from tier 2, too."""

        async def following(ledger_id: LedgerId) -> tuple[ListedLedger, OffloadContext] | None:
            ledger = ledger_behind(snapshot.ledgers, ledger_id)
            if ledger is None or not ledger.closed:
                return None
            context = await self._views.context(ledger.ledger_id)
            tier = choose_tier(ledger, context, priority=priority)
            return (ledger, context) if context is not None and tier is Tier.TIER2 else None

        return following

    async def _read_open(
        self, stream: StreamName, spot: Spot, budget: Budget, state: _Try
    ) -> Answer | None:
        ledger_id = spot.ledger.ledger_id
        slice_s = min(TAIL_SLICE_S, state.left_s())
        last_look = state.looked and slice_s <= 0
        memory = self._memory
        wait_s = slice_s if memory is None else 0.0
        asked = replace(budget, wait_s=TAIL_GRACE_S if last_look else wait_s)
        try:
            with step("tier1", f"ledger {ledger_id}, open"):
                chunk = await self._tier1.read(spot.ledger, spot.entry_id, asked)
        except (RefusedError, RetryableError) as error:
            _reraise_unless_gone(error)
            tail = error.reason is Reason.NOT_YET
            if not tail and (last_look or isinstance(error, RetryableError)):
                raise unknown(error) from error
            if not last_look:
                # It may have been closed, or be gone: the metadata tells.
                state.fresh = not state.looked or not tail
                budget.room.leave()  # whoever waits holds none
                if tail and memory is not None and slice_s > 0:
                    await self._follow(memory, spot, slice_s)
                else:
                    await asyncio.sleep(0 if tail else slice_s)
                return None
        else:
            return Answer(chunk=chunk, resume=chunk.end)
        last = await _unless_gone(self._tier1.last_confirmed(ledger_id))
        if last is None:
            state.fresh = True  # it was closed without an entry
        elif spot.entry_id > last + 1:
            raise not_yet(stream, Position(ledger_id, spot.entry_id), last=last)
        return None if last is None else Answer(chunk=None, resume=spot.resume)

    async def _follow(self, memory: Memory, spot: Spot, slice_s: float) -> None:
        """Have somebody wait in tier 1 for the entry behind the last one, if that is this one."""
        last = await _unless_gone(self._tier1.last_confirmed(spot.ledger.ledger_id))
        if last is not None and spot.entry_id == last + 1:
            memory.follow(spot.ledger, spot.entry_id)
        if last is not None and memory.awaited(spot.ledger.ledger_id) is None:
            # It came meanwhile, or nobody is to follow it.
            await asyncio.sleep(slice_s if spot.entry_id > last else 0)

    async def _watch(self, memory: Memory, spot: Spot, state: _Try) -> None:
        """Wait where one subscription waits for all who follow a ledger."""
        loop = asyncio.get_running_loop()
        begun_s, slice_s = loop.time(), min(TAIL_SLICE_S, state.left_s())
        followed = await memory.wait(spot.ledger.ledger_id, spot.entry_id, slice_s)
        state.watched_s += loop.time() - begun_s
        # A subscription ends when the ledger was closed, or is gone: the metadata tells. What came
        # is given at once.
        came = followed and not self._is_awaited(spot)
        state.fresh = not came and (not state.looked or not followed)


def _spot(place: BehindLast, last: EntryId) -> Spot:
    """Return the spot behind the last confirmed entry of an open ledger."""
    entry_id = EntryId(last + 1)
    resume = place.resume if last == NO_ENTRY else Position(place.ledger.ledger_id, entry_id)
    return Spot(ledger=place.ledger, entry_id=entry_id, resume=resume)


def _no_end(stream: StreamName, ledger_id: LedgerId) -> RetryableError:
    return RetryableError(
        f"where stream {stream} ends is not known: too few nodes of its ledger {ledger_id} answer,"
        " or they have entries that nobody says are confirmed",
        reason=Reason.UNKNOWN,
        remedy="Wait until an ingest node has recovered the ledger, as it does by itself where the"
        " owner is gone; if it lasts, append to the stream, or seal it with: tierlog stream seal"
        f" {stream}. What is known to be confirmed can be read with --follow meanwhile",
        details={"stream": stream, "ledger_id": str(ledger_id)},
    )


def _with_entries(snapshot: StreamSnapshot) -> StreamSnapshot:
    """Refuse a stream whose entries are in its partitions."""
    stream = snapshot.stream
    if stream.partitions:
        raise is_partitioned(stream.name, stream.partitions)
    return snapshot


def unknown(error: TierlogError) -> TierlogError:
    """Return what to tell when a listed ledger can't be read: never that an entry is missing."""
    if isinstance(error, RetryableError):
        return error
    return RetryableError(
        error.message, reason=Reason.UNKNOWN, remedy="Try again in a moment", details=error.details
    )


async def _unless_gone(asked: Awaitable[T]) -> T | None:
    """Return what tier 1 says of an open ledger; None: it went, look again."""
    try:
        return await asked
    except RefusedError as error:
        _reraise_unless_gone(error)
        return None


def _reraise_unless_gone(error: TierlogError) -> None:
    """Raise what refuses to read an open ledger, which is nowhere else."""
    if isinstance(error, RefusedError) and error.reason not in GONE_REASONS:
        raise error
