"""Attributes of an owned stream between memory and their index.

Owns the rebuild after a claim or a recovery, fetches of values that appends wait for, flushes,
reads for clients, and telling failed checks. Does not own the checks (``gate``), nor when the
owner recovers.

Invariants:
    * A state is used for checks only once every entry of the stream is counted in.
    * One flush at a time, of everything that changed since the last one: an attribute that
      changed often is written once.
    * No append waits for a flush, and none but those that want a value for a fetch.
    * What is told of attributes was true while this process was the stream's owner.
    * Entries are left out only where that is on record, which takes an admin's consent and a
      while in which no tier gave them.
    * An index of which a page can't be read is made anew (``mending``) before the next flush.

Retries: fetches and flushes are tried again with back-off for as long as somebody wants them.
Crash, Cancellation: what was not flushed is rebuilt from the entries.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot, check_owner
from tierlog.format.attribute_changes import change_in_stream, replayed
from tierlog.format.entry import Verb
from tierlog.model.attribute_record import GivenUp, kept_of
from tierlog.model.attributes import AttributeKey, Checkpoint
from tierlog.model.core_attributes import DERIVED, derived
from tierlog.model.errors import (
    CorruptError,
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger, Stream
from tierlog.ports.attributes import AttributeIndex
from tierlog.ports.ids import Ids
from tierlog.ports.streams import ATTRIBUTES_MAX, AttributeValues
from tierlog.runtime.sections import AttributeSettings
from tierlog_ingest.streams.attributes.crowd import Crowd
from tierlog_ingest.streams.attributes.gate import AttributeGate
from tierlog_ingest.streams.attributes.mending import LOSS_GRACE_S, IndexCare, not_rebuilt
from tierlog_ingest.streams.attributes.replay import (
    Entries,
    Lost,
    OpenLedger,
    entries_after,
    next_readable,
    pieces_after,
)
from tierlog_ingest.streams.attributes.room import Room
from tierlog_ingest.streams.attributes.state import AttributeState

log = structlog.get_logger()

T = TypeVar("T")

FETCH_KEYS_MAX: Final = 1000
BACKOFF_S_FIRST: Final = 0.05
BACKOFF_S_MAX: Final = 5.0
BACKOFF_DOUBLINGS_MAX: Final = 10
"""Failures may go on for days, and no float is as large as what is doubled a thousand times."""

Deposed = Callable[[Stream], Awaitable[TierlogError]]
"""What to tell whoever asks an owner that is none any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeParts:
    """What every keeper of a process shares."""

    index: AttributeIndex
    open_ledger: OpenLedger
    settings: AttributeSettings
    open_copy: OpenLedger | None = None
    """Opens what tier 2 has of a ledger, for where its nodes don't give it."""
    room: Room | None = None
    """For what all keepers have in memory that can be fetched again; None: each has its own."""
    crowd: Crowd | None = None
    """For what all keepers have waiting for a checkpoint; None: only each has a limit."""


class AttributeKeeper:
    """Keeps the attributes of one stream; the owner's task group runs what takes time."""

    def __init__(
        self,
        claimed: Stream,
        gate: AttributeGate,
        parts: AttributeParts,
        *,
        catalog: Catalog,
        ids: Ids,
        deposed: Deposed,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called once those were told who waited for it."""
        self._claimed = claimed
        self._gate = gate
        self._index = parts.index
        self._open_ledger, self._open_copy = parts.open_ledger, parts.open_copy
        self._settings, self._room = parts.settings, parts.room
        self._catalog = catalog
        self._ids = ids
        self._deposed = deposed
        self._wake = wake
        self._running: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._rebuilt: AttributeState | None = None
        self._missed: tuple[Position, float] | None = None
        """Where a rebuild stands still that may give entries up, and since when."""
        self._care = IndexCare(claimed, self._entries, index=parts.index, catalog=catalog, ids=ids)
        self._crowd = parts.crowd
        if self._crowd is not None:
            self._crowd.join(self)

    def __repr__(self) -> str:
        return f"<AttributeKeeper {self._claimed.name} {sorted(self._running)}>"

    # Among all streams of the process

    @property
    def name(self) -> StreamName:
        """Whose attributes they are."""
        return self._claimed.name

    @property
    def unflushed(self) -> int:
        """How many wait for a checkpoint, those that a rebuild has counted in among them."""
        states = (self._gate.state, self._rebuilt)
        return sum(one.unflushed_count for one in states if one is not None)

    def crowd(self, *, is_full: bool) -> None:
        """Take no further attributes until a flush, or take them again."""
        if self._gate.state is not None:
            self._gate.state.is_crowded = is_full

    # Rebuilding

    async def rebuild(self, snapshot: StreamSnapshot) -> AttributeState:
        """Load the checkpoint and count in all entries behind it.

        Called again after an error, with a snapshot as of now, it goes on where it was, unless
        there is another checkpoint: what that has may be trimmed.
        """
        state = self._rebuilt
        # Read behind the snapshot: what that lacks for being trimmed is in this checkpoint.
        base = await self._index.load(snapshot.stream)
        if state is None or not kept_of(state.base).is_at(kept_of(base)):
            state = self._rebuilt = AttributeState(
                base,
                created_ms=snapshot.stream.created_ms,
                capacity=self._settings.cached_max,
                room=self._room,
            )
        record = await self._catalog.attributes.peek(snapshot.stream.name)
        if record is not None and record.incarnation != snapshot.stream.incarnation:
            record = None
        ids = [one.ledger_id for one in snapshot.ledgers]
        lost = {one: record.given_up_of(one) for one in ids} if record is not None else {}
        try:
            counted = await self._replay_all(state, snapshot, lost)
        except TierlogError as error:
            if record is not None and record.loss_accepted:
                told = await self._without_what_is_lost(state, snapshot, lost, error)
            else:
                told = not_rebuilt(snapshot.stream, error)
            if told is error:
                raise
            raise told from error
        self._rebuilt = self._missed = None
        state.rebuilt(_last_entry(snapshot))
        log.info(
            "attributes.rebuilt",
            stream=self._claimed.name,
            checkpoint=str(state.base.through),
            entries=counted,
        )
        return state

    def _entries(
        self, ledgers: Sequence[ListedLedger], after: Position | None, lost: Lost
    ) -> Entries:
        return entries_after(ledgers, after, self._open_ledger, self._open_copy, lost)

    async def _replay_all(self, state: AttributeState, snapshot: StreamSnapshot, lost: Lost) -> int:
        """Count in all entries that are not lost; return how many."""
        counted, ledgers = 0, snapshot.ledgers
        read = self._entries(ledgers, state.through, lost)
        async with aclosing(read):
            async for place, entries in read:
                await self._replay(state, place, entries)
                counted += len(entries)
        return counted

    async def _without_what_is_lost(
        self, state: AttributeState, snapshot: StreamSnapshot, lost: Lost, error: TierlogError
    ) -> TierlogError:
        """Give up what stands in the way of a rebuild, as an admin accepted.

        Returns what to raise: ``RetryableError`` to go on, behind it or because it may come back.
        """
        ahead = pieces_after(snapshot.ledgers, state.through, lost)
        if not ahead or isinstance(error, RefusedError):
            return error
        (ledger, first, _), now_s = ahead[0], asyncio.get_running_loop().time()
        place = Position(ledger.ledger_id, first)
        if self._missed is None or self._missed[0] != place:
            self._missed = place, now_s
        waits_s = self._missed[1] + LOSS_GRACE_S - now_s
        if waits_s > 0:
            return RetryableError(
                f"{error.message}; it is given up in {waits_s:.0f} s", remedy=error.remedy
            )
        listed = (await self._catalog.streams.snapshot(snapshot.stream.name)).ledgers
        if any(one.ledger_id == ledger.ledger_id for one in listed):
            end = await next_readable(ledger, first, self._open_ledger, self._open_copy)
            if end > first:
                given_up = GivenUp(ledger.ledger_id, first, EntryId(end - 1))
                await self._catalog.attributes.give_up(self._claimed, given_up)
                log.error(
                    "attributes.entries_given_up", stream=self._claimed.name, lost=tuple(given_up)
                )
        return RetryableError(error.message, remedy="It goes on behind what is lost")

    async def _replay(
        self, state: AttributeState, place: Position, entries: Sequence[memoryview]
    ) -> None:
        changes = [change_in_stream(entry) for entry in entries]
        sums = {
            AttributeKey(update.key.bytes)
            for change in changes
            if change is not None
            for update in change.updates
            if update.verb is Verb.ACCUMULATE
        }
        pinned = sorted(sums)
        state.pin(pinned)
        try:
            unknown = state.unknown(pinned)
            if unknown:
                state.absorb(unknown, await self._found_or_mended(state, unknown))
            for offset, (change, entry) in enumerate(zip(changes, entries, strict=True)):
                end = Position(place.ledger_id, EntryId(place.entry_id + offset))
                made = replayed(change, state.value) if change is not None else {}
                events = change.event_count if change is not None else 0
                state.replay(made, events, end=end, size=len(entry))
        finally:
            state.unpin(pinned)

    async def _found_or_mended(
        self, state: AttributeState, keys: Sequence[AttributeKey]
    ) -> Mapping[AttributeKey, int]:
        try:
            return await self._index.get(state.base, keys)
        except CorruptError:
            state.base = await self._care.mended(state.base)
        return await self._index.get(state.base, keys)

    # What runs beside the appends

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """From now on run what is due in ``tasks``."""
        self._tasks = tasks
        self.confirmed()
        self.look()

    def look(self) -> None:
        """Start what is due and does not run."""
        if "fetch" not in self._running and self._gate.wanted(1):
            self._start("fetch", self._fetch)
        if self._gate.failed:
            self._start("tell", self._tell)

    def confirmed(self) -> None:
        """Flush if so much changed, or no more may; otherwise after some time."""
        state, settings = self._gate.state, self._settings
        if state is None:
            return
        if (
            state.is_at_capacity
            or state.changes_since >= settings.checkpoint_updates
            or state.bytes_since >= settings.checkpoint_bytes
        ):
            self.flush_soon()
        else:
            self._flush_later()

    def _flush_later(self) -> None:
        """Flush after some time, if there is something to flush by now."""

        def due() -> None:
            self._timer = None
            self.flush_soon()

        state = self._gate.state
        is_wanted = self._tasks is not None and state is not None and not state.is_flushed
        if is_wanted and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._settings.checkpoint_interval_s, due)

    def flush_soon(self) -> None:
        """Flush what is confirmed, unless a flush is under way."""
        self._start("flush", self._flush)

    async def flush_now(self) -> None:
        """Flush what is confirmed; gives up after the settings' ``checkpoint_timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.checkpoint_timeout_s):
                # One that runs began before; the second has all.
                for _ in range(2):
                    self.flush_soon()
                    running = self._running.get("flush")
                    if running is not None:
                        await asyncio.wait({running})

    def end(self) -> None:
        """Stop all that runs."""
        if self._crowd is not None:
            self._crowd.leave(self)
        self._cancel_timer()
        self._tasks = None
        for task in self._running.values():
            task.cancel()

    def _start(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        if self._tasks is None or name in self._running:
            return

        async def run() -> None:
            try:
                await work()
            finally:
                del self._running[name]

        self._running[name] = self._tasks.create_task(run(), name=f"attributes {name}")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _back_off(self, failures: int) -> None:
        grown_s = BACKOFF_S_FIRST * float(2 ** min(failures, BACKOFF_DOUBLINGS_MAX))
        backoff_s = min(BACKOFF_S_MAX, grown_s)
        await asyncio.sleep(self._ids.uniform(0.5, 1.0) * backoff_s)

    async def _fetch(self) -> None:
        """Fetch what appends wait for, until none waits."""
        failures = 0
        while (state := self._gate.state) is not None:
            keys = state.unknown(self._gate.wanted(FETCH_KEYS_MAX))
            if not keys:
                self._gate.look_again()
                if not self._gate.wanted(1):
                    return
                continue
            state.pin(keys)
            try:
                found = await self._index.get(state.base, keys)
                state.absorb(keys, found)
                failures = 0
            except TierlogError as error:
                log.warning("attributes.not_fetched", stream=self._claimed.name, cause=str(error))
                if isinstance(error, CorruptError):
                    self._look_into_index()
                    await self._absorb_each(state, keys)
                await self._back_off(failures)
                failures += 1
            finally:
                state.unpin(keys)
            if state is self._gate.state:
                self._gate.look_again()

    async def _absorb_each(self, state: AttributeState, keys: Sequence[AttributeKey]) -> None:
        """Take in what can be read, though not all can."""
        for key in keys:
            with suppress(TierlogError):
                state.absorb([key], await self._index.get(state.base, [key]))

    async def _flush(self) -> None:
        """Publish a checkpoint; what was confirmed meanwhile is for another one."""
        self._cancel_timer()
        while await self._flush_until_done() and self._care.is_suspect:
            pass
        self._flush_later()

    async def _flush_until_done(self) -> bool:
        """Publish a checkpoint of all that is confirmed, until it is done. False: it can't be."""
        failures = 0
        while (state := self._gate.state) is not None:
            if self._care.is_suspect:
                base = await self._care.sound(state.base)
                if base is None:
                    return False
                # As of what it was, or of a flush of this owner's own: what changed since is known.
                state.base = base
            flush = state.begin_flush()
            if flush is None:
                return True
            try:
                made = await self._index.flush(
                    self._claimed,
                    flush.base,
                    changes=flush.changes,
                    core=flush.core,
                    through=flush.through,
                )
            except TierlogError as error:
                log.warning("attributes.not_flushed", stream=self._claimed.name, cause=str(error))
                self._care.is_suspect |= isinstance(error, CorruptError)
                if not await self._after_failed_flush(state, error):
                    return False
            else:
                state.finish_flush(made)
                log.info(
                    "attributes.flushed",
                    stream=self._claimed.name,
                    through=str(flush.through),
                    changed=len(flush.changes),
                )
                return True
            await self._back_off(failures)
            failures += 1
        return False

    def _look_into_index(self) -> None:
        """Have it looked at why a page of the index is damaged or gone, before the next flush.

        It was swept, maybe, since another checkpoint was published.
        """
        self._care.is_suspect = True
        self.flush_soon()

    async def _after_failed_flush(self, state: AttributeState, error: TierlogError) -> bool:
        """Take back what was to be flushed; tell whether to try again.

        Where it was refused, the newest checkpoint becomes the base: it is one of this owner's own
        whose answer was lost, or the same one in a newer generation, and what this owner has not
        flushed changed since any of them.
        """
        base = None
        try:
            if isinstance(error, RefusedError) and error.reason is Reason.FENCED:
                check_owner(await self._catalog.streams.get(self._claimed.name), self._claimed)
                base = await self._index.load(self._claimed)
        except TierlogError as trouble:
            error = trouble
        finally:
            state.fail_flush(base)
        return base is not None or not isinstance(error, RefusedError)

    async def _tell(self) -> None:
        """Tell whose checks failed, once it is sure that this still is the owner."""
        failures = 0
        while self._gate.failed:
            count = len(self._gate.failed)
            error = await self._not_owner()
            if isinstance(error, RetryableError) and error.reason is not Reason.NOT_OWNER:
                # Not known: those whose time is not up wait on.
                left = [one for one in self._gate.failed if not one[0].answer.done()]
                self._gate.failed = left
                await self._back_off(failures)
                failures += 1
                continue
            # Those who came since are told when that was asked again.
            failed, self._gate.failed = self._gate.failed[:count], self._gate.failed[count:]
            for append, own in failed:
                append.finish(own if error is None else error)
        self._wake()

    async def _not_owner(self) -> TierlogError | None:
        """Return why nothing may be told of attributes; None: this is the stream's owner."""
        try:
            await self._owned_stream()
        except (RetryableError, RefusedError) as error:
            return error
        return None

    async def _owned_stream(self) -> Stream:
        """Return the stream as of now; raises why nothing may be told of its attributes."""
        stream = await _read(self._catalog.streams.get(self._claimed.name))
        try:
            check_owner(stream, self._claimed)
        except RefusedError as error:
            raise await self._deposed(stream) from error
        return stream

    # For clients

    async def get(self, keys: Sequence[AttributeKey]) -> AttributeValues:
        """Return those attributes that are there, as of an entry behind all that were sent."""
        state = await self._gate.all_confirmed()
        through, base = state.through, state.base
        values: dict[AttributeKey, int] = {}
        unknown = []
        for key in sorted(set(keys)):
            is_known, value = state.confirmed(key)
            if not is_known:
                unknown.append(key)
            elif value is not None:
                values[key] = value
        if unknown:
            # Nothing that is not in memory changed since the base.
            with self._care.telling(self._look_into_index):
                values |= await self._index.get(base, unknown)
        return await self._told(sorted(set(keys)), values, through, base)

    async def listed(self, first: AttributeKey, last: AttributeKey, limit: int) -> AttributeValues:
        """Return the attributes between two keys, the first ``limit`` of them."""
        limit = min(limit, ATTRIBUTES_MAX)
        state = await self._gate.all_confirmed()
        through, base = state.through, state.base
        over = state.unflushed(first, last)
        under: dict[AttributeKey, int] = {}
        if base.root.count:
            with self._care.telling(self._look_into_index):
                async with _closing(self._index.iterate(base, first, last)) as runs:
                    async for found in runs:
                        under.update(found)
                        if len(under) >= limit:
                            break
        if len(under) >= limit:
            # Behind the last one that was read there may be others, so that nothing is passed over.
            end = max(under)
            over = {key: value for key, value in over.items() if key <= end}
        merged = under | over
        keys = {*merged, *(key for key in DERIVED if first <= key <= last)}
        return await self._told(sorted(keys)[:limit], merged, through, base)

    async def _told(
        self,
        keys: Sequence[AttributeKey],
        values: Mapping[AttributeKey, int],
        through: Position | None,
        base: Checkpoint,
    ) -> AttributeValues:
        """Return those of the keys that have a value, and what is derived, as of now."""
        stream = await self._owned_stream()
        if not DERIVED.isdisjoint(keys):
            levels = await _read(self._catalog.policies.levels())
            values = {**values, **derived(stream.name, stream.policy, levels, base.root)}
        found = {key: values[key] for key in keys if key in values}
        return AttributeValues(values=found, as_of=through)


async def _read(asked: Awaitable[T]) -> T:
    """Return what the metadata say; a read without an answer may be asked again."""
    try:
        return await asked
    except (RetryableError, IndeterminateError) as error:
        raise RetryableError(error.message, remedy=error.remedy) from error


@asynccontextmanager
async def _closing(iteration: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    try:
        yield iteration
    finally:
        if isinstance(iteration, AsyncGenerator):
            await iteration.aclose()


def _last_entry(snapshot: StreamSnapshot) -> Position | None:
    """Return the stream's last entry, one that is trimmed included."""
    for ledger in reversed(snapshot.ledgers):
        if ledger.last_entry_id >= 0:
            return Position(ledger.ledger_id, ledger.last_entry_id)
    end = snapshot.stream.trimmed_end
    return Position(end.ledger_id, EntryId(end.entry_id - 1)) if end and end.entry_id else None
