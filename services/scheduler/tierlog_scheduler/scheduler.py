"""The leader's loop: learn what changed, decide for every stream, do (protocols.md section 3).

Owns the order of a pass, the terms of a leader and what it keeps for the next one. Does not own
what is known (``mirror``), decided (``policy``, ``retention``) nor done (``actions``); data is
moved by workers.

Invariants:
    * A pass decides about every stream, from what is known of it; a stream that could not be
      read waits for the next pass, and no other one waits for it. A defect that one stream
      provokes stops that one alone, until the next pass; one that a single action provokes stops
      that action alone. Each is told (``defects``).
    * Requests of all streams come first, and what metrics say of the lag. All else (deletions,
      sweeps, trimming) holds up a pass for a bounded time, however much is due and however slow
      the store is; the next one goes on behind it (``turns``).
    * Being deposed is no danger: see ``actions``.

Crash: what was remembered is lost and decided anew: ledgers are asked for once more, waits begin
again from the last checkpoint, which is at most ``checkpoint_s`` old.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.election import Election
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.attribute_record import AttributesRecord
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadContext, OffloadState, SchedulerProgress
from tierlog.model.policy import Policy, threshold
from tierlog.model.position import Position
from tierlog.model.stream import Stream, StreamLifecycle
from tierlog.offload.attribute_sweep import AttributeSweeper
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.messages import Stationery
from tierlog.ports.clock import Clock
from tierlog.ports.events import EventPublisher
from tierlog.ports.ids import Ids
from tierlog.ports.tracing import NO_TRACER, Tracer
from tierlog.runtime.worker import unless_stopped
from tierlog_scheduler import retention
from tierlog_scheduler.actions import Actions, Memory
from tierlog_scheduler.clocks import PARTS, SAMPLE_AGAIN_MS, History, Now, Timekeeper
from tierlog_scheduler.defects import note_defect
from tierlog_scheduler.manifests import ManifestGate
from tierlog_scheduler.mirror import KnownStream, Mirror
from tierlog_scheduler.policy import (
    TRIMMING,
    Action,
    Delays,
    LedgerView,
    OffloadLag,
    RequestOffload,
    StreamView,
    decide,
    offload_lag,
)
from tierlog_scheduler.prefix import PrefixOffload, PrefixOffloads
from tierlog_scheduler.turns import Turns

log = structlog.get_logger()

Seen = TypeVar("Seen")

OFFICE: Final = "scheduler"
# So many copies of 32 bytes each and closed ledgers of 16: below the limit of a znode.
CHECKPOINT_LEDGERS_MAX: Final = 20_000
STREAMS_A_TURN: Final = 100
"""So many streams are decided about before others have their turn in the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How often, how long, how many."""

    interval_s: float = 10.0
    request_again_s: float = 30.0
    sweep_again_s: float = 300.0
    sweep_attributes_s: float = 900.0
    stalled_s: float = 86_400.0
    checkpoint_s: float = 60.0
    reread_s: float = 6 * 3600.0
    streams_in_flight_max: int = 16
    longest_request_s: Callable[[int], float] = lambda _: 0.0

    @property
    def delays(self) -> Delays:
        """Return the waits of the policy."""
        return Delays(
            request_again_ms=round(self.request_again_s * 1000),
            sweep_again_ms=round(self.sweep_again_s * 1000),
            sweep_attributes_ms=round(self.sweep_attributes_s * 1000),
            stalled_ms=round(self.stalled_s * 1000),
            longest_request_s=self.longest_request_s,
        )


class Scheduler:
    """Leads when it is elected; answers admins at any time."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        offloader: LedgerOffloader,
        publisher: EventPublisher,
        stationery: Stationery,
        manifests: ManifestGate,
        clock: Clock,
        ids: Ids,
        limits: SchedulerLimits,
        sweeper: AttributeSweeper | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._catalog = catalog
        self._manifests = manifests
        self._clock = clock
        self._limits = limits
        self._election = Election(catalog.store, ids, office=OFFICE)
        self._slots = asyncio.Semaphore(limits.streams_in_flight_max)
        self._time = Timekeeper(clock)
        self._memory = Memory()
        self._turns = Turns(clock)
        self._actions = Actions(
            catalog=catalog,
            offloader=offloader,
            publisher=publisher,
            stationery=stationery,
            manifests=manifests,
            memory=self._memory,
            sweeper=sweeper,
            tracer=tracer,
        )
        self._prefixes = PrefixOffloads(
            catalog, self._actions, self._memory, leading=lambda: self.leading
        )
        self.mirror = Mirror(
            catalog,
            manifests,
            streams_in_flight_max=limits.streams_in_flight_max,
            reread_s=limits.reread_s,
        )
        self.leading = False
        self.decided = False
        """Whether this term has decided about the streams: lags are not known before."""
        self.passes = 0
        self.pass_s = 0.0
        """How long the last pass took."""
        self.lags: dict[StreamName, OffloadLag] = {}
        """By stream that is offloaded by itself: what is not in tier 2. Of one that can't be read
        what was known last, older by now."""
        self.streams_unread = 0
        """How many streams the last pass decided nothing about."""
        self.ledger_states: Counter[str] = Counter()
        """How many ledgers are where, by the names of their contexts' states; open and sealed."""
        self._forget()

    def __repr__(self) -> str:
        return f"<Scheduler leading={self.leading} passes={self.passes} {self.mirror!r}>"

    def _forget(self) -> None:
        self._memory.forget()
        self._turns.forget()
        self.mirror.forget()
        self._manifests.begin_term()
        self._saved: SchedulerProgress | None = None
        self._saved_s = self._refreshed_s = self._compared_s = self._clock.monotonic_s()
        self._waits = self._noted = self.decided = False
        self._defects: dict[StreamName, str] = {}
        self._acted_ms = self.streams_unread = 0
        self.lags, self.ledger_states = {}, Counter()

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
                    # It may wait for long; cut off, it leaves what a crash leaves.
                    await unless_stopped(self.run_pass(), stop)
                except TierlogError as error:
                    log.warning("pass.failed", cause=str(error))
                except Exception as error:  # noqa: BLE001 - told: metric, log; no pass is counted
                    note_defect("pass", error)
                await self._pause(lost, stop)
            if self.leading and self._noted and not lost.is_set():
                await self._retire()
        finally:
            self.leading = False
            self.lags, self.ledger_states = {}, Counter()
            log.info("leader.retired")

    async def _retire(self) -> None:
        """Leave the next leader the progress up to now."""
        try:
            await self._checkpoint(self._time.now(), at_once=True)
        except TierlogError as error:
            log.warning("progress.not_saved", cause=str(error))

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
        self._time.begin(progress)
        self._memory.inherit(progress)

    async def run_pass(self) -> None:
        """Learn what changed, decide about every stream once, and do what is to be done."""
        begun_s = self._clock.monotonic_s()
        self._manifests.begin_pass()
        compare = begun_s - self._compared_s >= self._limits.reread_s
        await self._manifests.record_cluster(compare=compare)
        if compare:
            self._compared_s = begun_s
        # From begin to begin: the slow round goes on while passes take long, too.
        await self.mirror.refresh(begun_s - self._refreshed_s)
        self._refreshed_s = begun_s
        self._time.note_newest(self.mirror.newest_id())
        now = self._time.now()
        await self._actions.begin_pass()
        # Of what a pass that is cut off has noted nothing is kept: it may lack what was before.
        self._noted = False
        await self._act(now)
        self._noted = True
        await self._checkpoint(now)
        self.passes += 1
        self.pass_s = self._clock.monotonic_s() - begun_s

    async def _act(self, now: Now) -> None:
        seen: set[LedgerId] = set()
        lags: dict[StreamName, OffloadLag] = {}
        states: Counter[str] = Counter()
        unread, slow = self.mirror.unread(), set[StreamName]()
        # What is not read may wait for its retention.
        self._waits, self._defects = bool(unread), {}
        async with asyncio.TaskGroup() as group:
            for count, (name, known) in enumerate(list(self.mirror.items())):
                if count % STREAMS_A_TURN == STREAMS_A_TURN - 1:
                    await asyncio.sleep(0)
                try:
                    view = self._view(known)
                    self._memory.see_pauses(known.snapshot)
                    self._note(view, now, seen)
                    states.update(one.state for one in view.ledgers)
                    # What is trimmed has left the list.
                    states[TRIMMING] += len(view.trimmed)
                    if view.policy.offloads and not view.deleting:
                        lags[name] = offload_lag(view, now)
                    actions = self._decide(view, now)
                except Exception as error:  # noqa: BLE001 - told: metric, log, status
                    seen |= self._note_undecided(known, error)
                    unread.add(name)
                    continue
                requests = [one for one in actions if isinstance(one, RequestOffload)]
                if len(requests) < len(actions):
                    slow.add(name)
                if requests:
                    await self._slots.acquire()
                    group.create_task(self._do(known.snapshot.stream, requests, now))
        self.lags = {**self._lags_kept(unread, now), **lags}
        self.streams_unread, self.ledger_states, self.decided = len(unread), states, True
        self._memory.tidy(self.mirror, seen)
        await self._act_in_turn(slow, now)

    async def _act_in_turn(self, slow: set[StreamName], now: Now) -> None:
        """Do all but requests, for as long as a pass has time for it."""
        streams = self.mirror.streams
        async with asyncio.TaskGroup() as group:
            for name in self._turns.begin(slow, known=streams):
                await self._slots.acquire()
                if not self._turns.has_turn(name):
                    self._slots.release()
                    break
                actions = self._in_turn(streams[name], now)
                group.create_task(self._do(streams[name].snapshot.stream, actions, now))

    @property
    def behind_s(self) -> float:
        """For how long no pass has come to the end of what takes long."""
        return self._turns.behind_s

    @property
    def failing_s(self) -> float:
        """For how long something of that has failed whenever it was tried."""
        return self._turns.failing_s

    def _lags_kept(self, unread: set[StreamName], now: Now) -> dict[StreamName, OffloadLag]:
        """Return of streams that can't be read what was known before, older by the time since."""
        passed_ms, self._acted_ms = now.progress_ms - self._acted_ms, now.progress_ms
        return {one: lag.aged(passed_ms) for one, lag in self.lags.items() if one in unread}

    def _note_undecided(self, known: KnownStream, error: Exception) -> set[LedgerId]:
        """Tell of a stream that can't be decided about; return what must stay seen of it."""
        name = known.snapshot.stream.name
        self._defects[name] = note_defect("decide", error, stream=name)
        self._waits = True
        return {one.ledger_id for one in known.snapshot.ledgers}

    def _decide(self, view: StreamView, now: Now) -> list[Action | retention.Trimming]:
        delays = self._limits.delays
        return [*decide(view, now, delays), *retention.decide(view, now, delays)]

    async def _do(
        self, stream: Stream, actions: Iterable[Action | retention.Trimming], now: Now
    ) -> None:
        try:
            for action in actions:
                await self._do_one(stream, action, now)
        except Exception as error:  # noqa: BLE001 - told: metric, log, status
            self._defects[stream.name] = note_defect("decide", error, stream=stream.name)
        finally:
            self._slots.release()

    async def _do_one(self, stream: Stream, action: Action | retention.Trimming, now: Now) -> None:
        """Do one thing: what nobody foresaw of it keeps no other one from its turn."""
        done = False
        try:
            done = await self._actions.do(stream, action, now)
        except Exception as error:  # noqa: BLE001 - told: metric, log, status
            kind = type(action).__name__
            self._defects[stream.name] = note_defect("act", error, stream=stream.name, action=kind)
        if not isinstance(action, RequestOffload):
            self._turns.note(stream.name, action, failed=not done)

    def _in_turn(self, known: KnownStream, now: Now) -> Iterator[Action | retention.Trimming]:
        """Iterate over all but requests of a stream, as long as there is time."""
        # Decided anew: what is due in all streams would be much to keep.
        actions = self._decide(self._view(known), now)
        slow = [one for one in actions if not isinstance(one, RequestOffload)]
        yield from self._turns.of(known.snapshot.stream.name, slow)

    def _view(self, known: KnownStream) -> StreamView:
        assert known.policy is not None
        stream = known.snapshot.stream
        return view_of(
            stream,
            known.policy,
            known.views,
            known.trimmed,
            self._memory,
            attributes=known.attributes,
            attributes_named=self._manifests.attributes_through(stream.name),
        )

    @property
    def delays(self) -> Delays:
        """Return the waits that decisions are made with."""
        return self._limits.delays

    async def remembered(self) -> tuple[Memory, Now]:
        """Return what leaders saw, and the time: of another process as of its last checkpoint."""
        memory, now = self._memory, self._time.now()
        if self.leading:
            return memory, now
        progress = await self._catalog.progress.load()
        memory = Memory(
            complete_seen=dict(progress.complete_seen),
            closed_seen_ms=dict(progress.closed_seen_ms),
        )
        history = History(progress.samples)
        return memory, replace(now, progress_ms=progress.progress_ms, history=history)

    async def look_at(self, name: StreamName, memory: Memory) -> tuple[StreamSnapshot, StreamView]:
        """Return a stream as of now and as decisions see it, for people."""
        snapshot = await self._catalog.streams.snapshot(name)
        contexts = self._catalog.contexts
        views = [
            LedgerView(listed=one, context=await contexts.peek(one.ledger_id))
            for one in snapshot.ledgers
        ]
        trimmed = {one: await contexts.peek(one) for one in snapshot.stream.deleting}
        attributes = None if snapshot.stream.raw else await self._catalog.attributes.peek(name)
        named = self._manifests.attributes_through(name)
        if not self.leading and attributes is not None:
            # Only a leader knows manifests; of the others none says what it does not know.
            named = attributes.newest.through
        view = view_of(
            snapshot.stream,
            snapshot.policy,
            views,
            trimmed,
            memory,
            attributes=attributes,
            attributes_named=named,
        )
        return snapshot, view

    def deletions_stopped(self, name: StreamName) -> str | None:
        """Return why nothing of a stream is deleted now, as far as this process knows."""
        return self._manifests.stopped(name) if self.leading else None

    def kept_beside_passes(self, name: StreamName) -> str | None:
        """Return why nothing of a stream may be deleted outside of a pass; None: nothing stops it.

        Whether its metadata are older than its manifest is known once this leader has read both.
        """
        if not self.leading or self.mirror.is_unread(name):
            return "this process does not lead, or has not read the stream in its term"
        return self._manifests.stopped(name)

    def defect(self, name: StreamName) -> str | None:
        """Return what stopped a stream's last pass and nobody foresaw; None: nothing known."""
        found = self._defects.get(name) or self.mirror.defects.get(name)
        return found if self.leading else None

    def _note(self, view: StreamView, now: Now, seen: set[LedgerId]) -> None:
        """Note what is seen for the first time."""
        memory = self._memory
        self._note_closed(view, now)
        # Where copies never go local ones stay for ever, and would fill the checkpoint.
        waits = threshold(view.policy.deletion_lag_ms) is not None
        for one in view.ledgers:
            ledger_id, context = one.listed.ledger_id, one.context
            memory.inherited.discard(ledger_id)
            if context is None:
                continue
            if waits and context.state is OffloadState.COMPLETE and context.doubt is None:
                # Of one that is in doubt the lag begins anew, once it is so no more.
                seen.add(ledger_id)
                memory.see_complete(context, now)
            if context.complete:
                memory.asked.pop(ledger_id, None)
            if context.abandoned:
                self._note_swept(context, now)
        for ledger_id, trimmed in view.trimmed.items():
            memory.inherited.discard(ledger_id)
            if trimmed is not None:
                self._note_swept(trimmed, now)
        self._waits = self._waits or threshold(view.policy.retention_time_ms) is not None

    def _note_closed(self, view: StreamView, now: Now) -> None:
        """Note when ledgers were seen closed; forget it once a successor's id says as much."""
        seen_ms = self._memory.closed_seen_ms
        good_ms = max(SAMPLE_AGAIN_MS, (threshold(view.policy.retention_time_ms) or 0) // PARTS)
        for one, behind in retention.with_what_is_behind(view.ledgers):
            successor = behind.successor
            ledger_id = one.listed.ledger_id
            if one.listed.closed and (successor is None or one.to_offload):
                seen_ms.setdefault(ledger_id, now.progress_ms)
            elif ledger_id in seen_ms and successor is not None:
                given_ms = now.history.given_by(successor)
                if given_ms is not None and given_ms - seen_ms[ledger_id] < good_ms:
                    del seen_ms[ledger_id]

    def _note_swept(self, context: OffloadContext, now: Now) -> None:
        for attempt in context.abandoned:
            if attempt.swept_ms:
                self._memory.swept_seen_ms.setdefault(attempt.uuid, now.progress_ms)

    async def _checkpoint(self, now: Now, *, at_once: bool = False) -> None:
        """Keep the progress, when a wait depends on it."""
        last = self._memory.undecided
        kept = _oldest(self._memory.complete_seen, last)
        first = self._saved is None
        if not kept and not self._waits and (first or not self._waited):
            return
        due = self._clock.monotonic_s() - self._saved_s >= self._limits.checkpoint_s
        if not (due or at_once or first):
            return
        progress = SchedulerProgress(
            progress_ms=now.progress_ms,
            complete_seen=kept,
            closed_seen_ms=_oldest(self._memory.closed_seen_ms, last) if self._waits else {},
            samples=now.history.samples,
        )
        await self._catalog.progress.save(progress)
        self._saved, self._saved_s = progress, self._clock.monotonic_s()

    @property
    def _waited(self) -> bool:
        return self._saved is not None and bool(self._saved.complete_seen)

    async def offload_prefix(
        self, names: Sequence[StreamName], before: Position | None = None
    ) -> list[PrefixOffload]:
        """See ``PrefixOffloads.offload``."""
        return await self._prefixes.offload(names, before, self._time.now())


def _oldest(seen: Mapping[LedgerId, Seen], last: Container[LedgerId]) -> dict[LedgerId, Seen]:
    """Return what a checkpoint has room for: what may be gone has none that others need."""
    by_age = sorted(seen.items(), key=lambda one: (one[0] in last, one[0]))
    return dict(by_age[:CHECKPOINT_LEDGERS_MAX])


def view_of(
    stream: Stream,
    policy: Policy,
    ledgers: Sequence[LedgerView],
    trimmed: Mapping[LedgerId, OffloadContext | None],
    memory: Memory,
    *,
    attributes: AttributesRecord | None = None,
    attributes_named: Position | None = None,
) -> StreamView:
    """Return what decisions about a stream look at."""
    return StreamView(
        ledgers=ledgers,
        policy=policy,
        offload_through=stream.offload_through,
        asked=memory.asked,
        complete_seen=memory.complete_seen,
        swept_seen_ms=memory.swept_seen_ms,
        closed_seen_ms=memory.closed_seen_ms,
        unseen_ms=memory.unseen_ms,
        trimmed=trimmed,
        paused=stream.offload_pause is not None,
        deleting=stream.lifecycle is StreamLifecycle.DELETING,
        attributes=attributes,
        attributes_named=attributes_named,
        attributes_swept_ms=memory.attributes_swept_ms.get(stream.name),
    )
