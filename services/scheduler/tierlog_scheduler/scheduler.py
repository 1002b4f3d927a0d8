"""The leader's loop: look at every stream, decide, do (protocols.md section 3).

Owns doing what ``policy`` decided and remembering, for as long as it leads, what it asked for.
Does not own data: workers move it.

Invariants:
    * A pass changes metadata only by named compare-and-sets, so that two leaders at once do no
      harm, and neither does a leader that learns late that it was deposed.
    * A local copy is deleted only after tier 2 was verified anew, and for that very attempt.
    * One stream's trouble never keeps another waiting.

Crash: what was remembered is lost and decided anew: ledgers are asked for once more, waits begin
again from the last checkpoint.
"""

import asyncio
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.election import Election
from tierlog.catalog.streams import StreamSnapshot, check_not_paused
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.offload import OffloadContext, OffloadState, SchedulerProgress
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.messages import OffloadRequest, Stationery, Trigger
from tierlog.ports.clock import Clock
from tierlog.ports.events import EventPublisher
from tierlog.ports.ids import Ids
from tierlog.runtime.worker import unless_stopped
from tierlog_scheduler.policy import (
    Action,
    Asked,
    Delays,
    DeleteTier1,
    LedgerView,
    Now,
    RequestOffload,
    StreamView,
    SweepAbandoned,
    decide,
    sealed_before,
)

log = structlog.get_logger()

OFFICE: Final = "scheduler"
# 20 bytes each at most: well below the limit of a znode.
CHECKPOINT_LEDGERS_MAX: Final = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How often, how long, how many."""

    interval_s: float = 10.0
    request_again_s: float = 60.0
    sweep_again_s: float = 300.0
    streams_in_flight_max: int = 16

    @property
    def delays(self) -> Delays:
        """Return the waits of the policy."""
        return Delays(
            request_again_ms=round(self.request_again_s * 1000),
            sweep_again_ms=round(self.sweep_again_s * 1000),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffload:
    """What an admin's wish came to: ``position`` is where what is not selected begins."""

    position: Position | None
    selected: tuple[LedgerId, ...]
    requested: tuple[LedgerId, ...]


class Scheduler:
    """Leads when it is elected; answers admins at any time."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        offloader: LedgerOffloader,
        publisher: EventPublisher,
        stationery: Stationery,
        clock: Clock,
        ids: Ids,
        limits: SchedulerLimits,
    ) -> None:
        self._catalog = catalog
        self._offloader = offloader
        self._publisher = publisher
        self._stationery = stationery
        self._clock = clock
        self._limits = limits
        self._election = Election(catalog.store, ids, office=OFFICE)
        self._slots = asyncio.Semaphore(limits.streams_in_flight_max)
        self.leading = False
        self.passes = 0
        self._forget()

    def __repr__(self) -> str:
        return f"<Scheduler leading={self.leading} passes={self.passes}>"

    def _forget(self) -> None:
        self._asked: dict[LedgerId, Asked] = {}
        self._complete_seen_ms: dict[LedgerId, int] = {}
        self._swept_seen_ms: dict[UUID, int] = {}
        # Nothing is left to do for these: deleted locally, nothing abandoned.
        self._settled: set[LedgerId] = set()
        self._progress_ms = 0
        self._last_s = self._clock.monotonic_s()
        self._saved: SchedulerProgress | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Stand for election and lead, until ``stop``."""
        try:
            while not stop.is_set():
                try:
                    lost = await unless_stopped(self._election.win(), stop)
                except TierlogError as error:
                    # Whoever can't reach the metadata does not lead, and stands again.
                    log.warning("election.interrupted", cause=str(error))
                    await self._pause(asyncio.Event(), stop)
                    continue
                if lost is None:
                    break
                await self._lead(lost, stop)
        finally:
            self.leading = False
            await self._resign()

    async def _resign(self) -> None:
        try:
            await self._election.resign()
        except TierlogError as error:
            # The office is vacant with the session at the latest.
            log.warning("election.resign_failed", cause=str(error))

    async def _lead(self, lost: asyncio.Event, stop: asyncio.Event) -> None:
        log.info("leader.elected")
        try:
            while not (lost.is_set() or stop.is_set()):
                try:
                    if not self.leading:
                        await self.begin()
                        self.leading = True
                    await self.run_pass()
                except TierlogError as error:
                    log.warning("pass.failed", cause=str(error))
                await self._pause(lost, stop)
        finally:
            self.leading = False
            log.info("leader.retired")

    async def _pause(self, lost: asyncio.Event, stop: asyncio.Event) -> None:
        over = asyncio.wait_for(lost.wait(), self._limits.interval_s)
        try:
            await unless_stopped(over, stop)
        except TimeoutError:
            return

    async def begin(self) -> None:
        """Begin a term: forget, and take over the progress of the leaders before."""
        self._forget()
        try:
            progress = await self._catalog.progress.load()
        except CorruptError as error:
            log.error("progress.corrupt", cause=str(error))  # noqa: TRY400 - no bug of ours
            progress = SchedulerProgress()
        self._progress_ms = progress.progress_ms
        self._complete_seen_ms = dict(progress.complete_seen_ms)
        self._last_s = self._clock.monotonic_s()

    async def run_pass(self) -> None:
        """Look at every stream once, and do what is to be done."""
        now = self._now()
        names = await self._catalog.streams.names()
        seen: set[LedgerId] = set()
        async with asyncio.TaskGroup() as group:
            for name in names:
                await self._slots.acquire()
                group.create_task(self._visit(name, now, seen))
        for ledger_id in self._complete_seen_ms.keys() - seen:
            del self._complete_seen_ms[ledger_id]
        await self._checkpoint()
        self.passes += 1

    def _now(self) -> Now:
        monotonic_s = self._clock.monotonic_s()
        self._progress_ms += round((monotonic_s - self._last_s) * 1000)
        self._last_s = monotonic_s
        return Now(wall_ms=self._clock.wall_ms(), progress_ms=self._progress_ms)

    async def _visit(self, name: StreamName, now: Now, seen: set[LedgerId]) -> None:
        try:
            snapshot = await self._catalog.streams.snapshot(name)
            view = await self._view(snapshot, now, seen)
            for action in decide(view, now, self._limits.delays):
                await self._do(snapshot, action, now)
        except TierlogError as error:
            # What was seen before stays seen: a stream that could not be read is not empty.
            seen.update(self._complete_seen_ms)
            log.warning("stream.visit_failed", stream=name, cause=str(error))
        finally:
            self._slots.release()

    async def _view(self, snapshot: StreamSnapshot, now: Now, seen: set[LedgerId]) -> StreamView:
        """Read the contexts of a stream's ledgers, and note what is seen for the first time."""
        views: list[LedgerView] = []
        for listed in snapshot.ledgers:
            ledger_id = listed.ledger_id
            if ledger_id in self._settled:
                continue
            context = await self._catalog.contexts.peek(ledger_id)
            views.append(LedgerView(listed=listed, context=context))
            if context is not None:
                self._note(context, now, seen)
        return StreamView(
            ledgers=views,
            policy=snapshot.policy,
            offload_through=snapshot.stream.offload_through,
            asked=self._asked,
            complete_seen_ms=self._complete_seen_ms,
            swept_seen_ms=self._swept_seen_ms,
            paused=snapshot.stream.offload_pause is not None,
        )

    def _note(self, context: OffloadContext, now: Now, seen: set[LedgerId]) -> None:
        ledger_id = context.ledger_id
        if context.state is OffloadState.COMPLETE:
            seen.add(ledger_id)
            self._complete_seen_ms.setdefault(ledger_id, now.progress_ms)
        if context.complete:
            self._asked.pop(ledger_id, None)
        if context.state is OffloadState.TIER1_DELETED and not context.abandoned:
            self._settled.add(ledger_id)
        for attempt in context.abandoned:
            if attempt.swept_ms:
                self._swept_seen_ms.setdefault(attempt.uuid, now.progress_ms)

    async def _checkpoint(self) -> None:
        """Keep the progress, when a wait depends on it."""
        kept = dict(sorted(self._complete_seen_ms.items())[:CHECKPOINT_LEDGERS_MAX])
        if not kept and (self._saved is None or not self._saved.complete_seen_ms):
            return
        progress = SchedulerProgress(progress_ms=self._progress_ms, complete_seen_ms=kept)
        await self._catalog.progress.save(progress)
        self._saved = progress

    async def _do(self, snapshot: StreamSnapshot, action: Action, now: Now) -> None:
        """Do one thing; what goes wrong with it is told, and decided anew at the next pass."""
        try:
            if isinstance(action, RequestOffload):
                await self._request(snapshot, action, now)
            elif isinstance(action, DeleteTier1):
                await self._delete_tier1(action.context)
            else:
                await self._sweep(action, now)
        except RefusedError as error:
            log.info("action.refused", action=type(action).__name__, cause=str(error))
        except CorruptError as error:
            log.error(  # noqa: TRY400 - a human must look, not at our stack
                "copy.damaged", action=type(action).__name__, cause=str(error)
            )
        except TierlogError as error:
            log.warning("action.failed", action=type(action).__name__, cause=str(error))

    async def _request(self, snapshot: StreamSnapshot, action: RequestOffload, now: Now) -> None:
        outgoing = self._stationery.request(
            OffloadRequest(
                stream=snapshot.stream.name,
                incarnation=snapshot.stream.incarnation,
                ledger_id=action.ledger_id,
                trigger=action.trigger,
                requested_ms=now.wall_ms,
                request_count=action.count,
            )
        )
        topic, key, value, headers = outgoing
        await self._publisher.publish(topic, key=key, value=value, headers=headers)
        self._asked[action.ledger_id] = Asked(progress_ms=now.progress_ms, count=action.count)
        log.info(
            "offload.requested",
            stream=snapshot.stream.name,
            ledger_id=action.ledger_id,
            trigger=action.trigger.value,
            count=action.count,
        )

    async def _delete_tier1(self, context: OffloadContext) -> None:
        """Delete a local copy whose time has come (step 9)."""
        ledger_id, uuid, copy = context.ledger_id, context.uuid, context.copy
        assert uuid is not None
        assert copy is not None, "a complete context says what was written"
        if context.state is not OffloadState.TIER1_DELETING:
            try:
                await self._offloader.verify(ledger_id, uuid, context.location, copy)
            except CorruptError as error:
                await self._catalog.contexts.record_error(
                    ledger_id, uuid=uuid, error=f"{error.reason.value}: {error}"
                )
                raise
            context = await self._catalog.contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
        await self._catalog.ledgers.delete_tier1(ledger_id, context)
        log.info("tier1.deleted", ledger_id=ledger_id, uuid=str(uuid))

    async def _sweep(self, action: SweepAbandoned, now: Now) -> None:
        ledger_id, attempt = action.ledger_id, action.attempt
        await self._offloader.delete_offloaded(ledger_id, attempt.uuid, attempt.location)
        if action.strike_off:
            await self._catalog.contexts.strike_off(ledger_id, attempt.uuid)
            self._swept_seen_ms.pop(attempt.uuid, None)
        else:
            await self._catalog.contexts.mark_swept(ledger_id, attempt.uuid)
            self._swept_seen_ms.setdefault(attempt.uuid, now.progress_ms)
        log.info(
            "attempt.swept",
            ledger_id=ledger_id,
            uuid=str(attempt.uuid),
            struck_off=action.strike_off,
        )

    async def offload_prefix(self, name: StreamName, before: Position | None) -> PrefixOffload:
        """Want every sealed ledger before a position offloaded, and ask for them now.

        The wish is kept in the stream's metadata, so that any leader goes on asking.
        """
        snapshot = await self._catalog.streams.snapshot(name)
        check_not_paused(snapshot.stream)
        selected = sealed_before(snapshot.ledgers, before)
        requested: list[LedgerId] = []
        if selected:
            await self._catalog.streams.want_offloaded(name, selected[-1].ledger_id)
        now = Now(wall_ms=self._clock.wall_ms(), progress_ms=self._progress_ms)
        for listed in selected:
            context = await self._catalog.contexts.get(listed.ledger_id)
            if LedgerView(listed=listed, context=context).to_offload:
                asked = self._asked.get(listed.ledger_id)
                count = 1 if asked is None else asked.count + 1
                action = RequestOffload(
                    ledger_id=listed.ledger_id, trigger=Trigger.ADMIN, count=count
                )
                await self._request(snapshot, action, now)
                requested.append(listed.ledger_id)
        return PrefixOffload(
            position=_first_behind(snapshot.ledgers, selected),
            selected=tuple(one.ledger_id for one in selected),
            requested=tuple(requested),
        )


def _first_behind(
    ledgers: tuple[ListedLedger, ...], selected: list[ListedLedger]
) -> Position | None:
    """Return the first position behind what was selected; None in a stream without ledgers."""
    rest = ledgers[len(selected) :]
    if rest:
        return Position(rest[0].ledger_id, EntryId(0))
    if selected:
        return Position(selected[-1].ledger_id, EntryId(selected[-1].last_entry_id + 1))
    return None
