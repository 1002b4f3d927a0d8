"""Doing what was decided, one stream at a time (protocols.md section 3, steps 1, 3, 9, 10, 13).

Owns the order of steps within one action, and what a leader remembers of its own doing: what it
asked for, what it swept. Does not own decisions (``policy``, ``retention``).

Invariants:
    * Decisions are made from a copy; whatever deletes reads the metadata first, as of now, and
      changes it by named compare-and-sets, so that two leaders at once do no harm, and neither
      does a leader that learns late that it was deposed.
    * A local copy is deleted only after tier 2 was verified anew, for that very attempt, and
      only if the bucket's own manifest names it, and policy and pause are as they were decided by.
      One that fails for what the objects are puts the copy in doubt; none is deleted for such one.
    * Of a trimmed ledger nothing is deleted before a manifest is there without it.
    * What goes wrong with one action is told, and decided anew at the next pass. A queue that does
      not take one request is asked for no other one in that pass: each may wait as long.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.format import paths
from tierlog.model.errors import CorruptError, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import CopySeen, OffloadContext, OffloadState, SchedulerProgress
from tierlog.model.stream import Stream
from tierlog.model.trimming import TrimGrounds
from tierlog.offload.attribute_sweep import AttributeSweeper, UnneededSeen
from tierlog.offload.cleaning import UploadsUnseenError
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.messages import OffloadRequest, Stationery
from tierlog.offload.verify import ReadBack
from tierlog.ports.events import EventPublisher, TopicMark
from tierlog.ports.spending import Cause, spending, spending_on
from tierlog.ports.tracing import NO_TRACER, LedgerLife, SpanKind, Tracer
from tierlog_scheduler.clocks import Now
from tierlog_scheduler.manifests import ManifestGate
from tierlog_scheduler.mirror import Mirror
from tierlog_scheduler.policy import (
    AbandonStalled,
    Action,
    Asked,
    DeleteTier1,
    RequestOffload,
    SweepAbandoned,
)
from tierlog_scheduler.retention import (
    BeginTrim,
    DropTrimmed,
    FinishTrim,
    RemoveStream,
    SweepAttributes,
    Trimming,
)

log = structlog.get_logger()

TIDY_PASSES: Final = 64
INDEX_OBJECTS_MAX: Final = 500
"""So many objects of a deleted stream's attribute index go in one pass, one after the other."""


@dataclass(slots=True)
class Memory:
    """What a leader did and saw, by its own progress; forgotten at the end of its term."""

    asked: dict[LedgerId, Asked] = field(default_factory=dict)
    complete_seen: dict[LedgerId, CopySeen] = field(default_factory=dict)
    swept_seen_ms: dict[UUID, int] = field(default_factory=dict)
    closed_seen_ms: dict[LedgerId, int] = field(default_factory=dict)
    unseen_ms: dict[UUID, int] = field(default_factory=dict)
    """Sweeps after which nobody knew whether an upload is open, or that wait for a sound copy."""
    attributes_swept_ms: dict[StreamName, int] = field(default_factory=dict)
    unneeded: UnneededSeen = field(default_factory=UnneededSeen)
    queue: TopicMark | None = None
    """What the queue was as of the last pass, while anything that was asked for may be in it."""
    inherited: set[LedgerId] = field(default_factory=set)
    """Ledgers that the leader before left, and that no stream decided about has shown yet."""
    pauses: dict[StreamName, int] = field(default_factory=dict)
    """The number of each stream's newest pause, as of the last pass."""
    undecided: set[LedgerId] = field(default_factory=set)
    """Those, and the ledgers of streams that nothing may be decided about, as of the last pass."""
    _passes: int = 0

    def forget(self) -> None:
        """Know nothing."""
        for kept in (
            self.asked,
            self.complete_seen,
            self.swept_seen_ms,
            self.closed_seen_ms,
            self.unseen_ms,
            self.attributes_swept_ms,
            self.unneeded,
            self.inherited,
            self.pauses,
            self.undecided,
        ):
            kept.clear()
        self.queue = None

    def inherit(self, progress: SchedulerProgress) -> None:
        """Take over what the leaders before saw; of which streams it was they did not say."""
        self.complete_seen.update(progress.complete_seen)
        self.closed_seen_ms.update(progress.closed_seen_ms)
        self.inherited.update(progress.complete_seen, progress.closed_seen_ms)

    def see_complete(self, context: OffloadContext, now: Now) -> None:
        """Note a complete copy; the lag of another one than before begins now."""
        seen = self.complete_seen.get(context.ledger_id)
        if context.uuid is not None and (seen is None or seen.uuid != context.uuid):
            self.complete_seen[context.ledger_id] = CopySeen(context.uuid, now.progress_ms)

    def see_pauses(self, snapshot: StreamSnapshot) -> None:
        """Forget what was asked for of a stream that is paused, or was since the last pass.

        Workers drop that; once the stream is resumed all of it is asked for anew.
        """
        stream = snapshot.stream
        seen, self.pauses[stream.name] = self.pauses.get(stream.name), stream.offload_pauses
        if stream.offload_pause is not None or seen not in (None, stream.offload_pauses):
            for one in snapshot.ledgers:
                self.asked.pop(one.ledger_id, None)

    def tidy(self, mirror: Mirror, complete: set[LedgerId]) -> None:
        """Forget ledgers that are gone; ``complete`` are those whose lag still goes on.

        What was seen before of a stream that nothing can be decided about now stays seen: it is
        not empty. No other one's memory waits for it.
        """
        if mirror.is_whole:
            self.inherited.clear()
        self.undecided = mirror.undecided() | self.inherited
        for ledger_id in self.complete_seen.keys() - complete - self.undecided:
            del self.complete_seen[ledger_id]
        self._passes += 1
        if self._passes % TIDY_PASSES:
            return
        # Streams in trouble are in the mirror as they were read last.
        listed = mirror.listed()
        for ledger_id in self.asked.keys() - listed:
            del self.asked[ledger_id]
        for ledger_id in self.closed_seen_ms.keys() - listed - self.inherited:
            del self.closed_seen_ms[ledger_id]
        abandoned = mirror.abandoned()
        for uuid in self.swept_seen_ms.keys() - abandoned:
            del self.swept_seen_ms[uuid]
        for uuid in self.unseen_ms.keys() - abandoned:
            del self.unseen_ms[uuid]
        for name in self.attributes_swept_ms.keys() - mirror.streams.keys():
            del self.attributes_swept_ms[name]
        for name in self.pauses.keys() - mirror.streams.keys():
            del self.pauses[name]
        self.unneeded.clear(but=mirror.streams)


class Actions:
    """What a leader can do."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        offloader: LedgerOffloader,
        publisher: EventPublisher,
        stationery: Stationery,
        manifests: ManifestGate,
        memory: Memory,
        sweeper: AttributeSweeper | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._tracer = tracer
        self._catalog = catalog
        self._offloader = offloader
        self._publisher = publisher
        self._stationery = stationery
        self._manifests = manifests
        self._memory = memory
        self._sweeper = sweeper
        self._queue_is_away = False

    async def begin_pass(self) -> None:
        """Ask the queue again, whatever it was like before; what it lost meanwhile, anew."""
        self._queue_is_away = False
        asked, topic = self._memory.asked, self._stationery.topics.requested
        before, now = self._memory.queue, None
        if asked:
            try:
                now = await self._publisher.mark(topic)
            except TierlogError as error:
                log.warning("queue.unread", topic=topic, cause=str(error))
                return
            if before is not None and before.is_lost_in(now):
                log.warning("queue.lost", topic=topic, count=len(asked))
                asked.clear()
        self._memory.queue = now

    async def do(self, stream: Stream, action: Action | Trimming, now: Now) -> bool:
        """Do one thing. Nothing that goes wrong with it is raised; False: something did."""
        try:
            with spending_on(stream.name):
                await self._do(stream, action, now)
        except UploadsUnseenError as error:
            log.warning("uploads.unseen", stream=stream.name, cause=str(error))
        except RefusedError as error:
            log.info("action.refused", action=type(action).__name__, cause=str(error))
        except CorruptError as error:
            log.error(  # noqa: TRY400 - a human must look, not at our stack
                "copy.damaged", action=type(action).__name__, cause=str(error)
            )
        except TierlogError as error:
            log.warning("action.failed", action=type(action).__name__, cause=str(error))
        else:
            return True
        return False

    async def _do(self, stream: Stream, action: Action | Trimming, now: Now) -> None:
        match action:
            case RequestOffload():
                await self._request_in_pass(stream, action, now)
            case DeleteTier1():
                life = LedgerLife(stream.incarnation, action.context.ledger_id)
                with self._tracer.span("tier1.delete", parent=life, stream=stream.name):
                    await self.delete_tier1(action)
            case SweepAbandoned():
                life = LedgerLife(stream.incarnation, action.ledger_id)
                with self._tracer.span("attempt.sweep", parent=life, stream=stream.name):
                    await self.sweep(stream, action, now)
            case AbandonStalled():
                await self._abandon(stream, action)
            case BeginTrim():
                await self._begin_trim(stream, action)
            case DropTrimmed():
                await self._drop_trimmed(stream, action.ledger_id)
            case FinishTrim():
                await self._finish_trim(stream, action.ledger_id)
            case RemoveStream():
                await self._remove_stream(stream)
            case SweepAttributes():
                await self._sweep_attributes(stream, now)

    async def _remove_stream(self, stream: Stream) -> None:
        stopped = self._manifests.stopped(stream.name)
        if stopped is not None:
            # The last manifest must say that the stream goes: a restore would bring it back.
            log.info("stream.kept", stream=stream.name, cause=stopped)
            return
        partitions = await self._catalog.streams.partitions(stream)
        if partitions:
            # By its name people ask what is left of them, and resume them.
            cause = f"{len(partitions)} of its partitions are there"
            log.info("stream.kept", stream=stream.name, cause=cause)
            return
        if self._sweeper is not None:
            with spending(Cause.SWEEP):
                count = await self._sweeper.remove(
                    stream.name, stream.incarnation, at_most=INDEX_OBJECTS_MAX
                )
            if count == INDEX_OBJECTS_MAX:
                log.info("stream.kept", stream=stream.name, cause="its index goes bit by bit")
                return
        await self._catalog.retention.remove_stream(stream.name, stream.incarnation)
        log.info("stream.deleted", stream=stream.name, incarnation=str(stream.incarnation))

    async def _sweep_attributes(self, stream: Stream, now: Now) -> None:
        """Delete what no checkpoint of a stream needs; faults are a scrub's to tell."""
        self._memory.attributes_swept_ms[stream.name] = now.progress_ms
        stopped = self._manifests.stopped(stream.name)
        if self._sweeper is None or stopped is not None:
            return
        with spending(Cause.SWEEP):
            swept = await self._sweeper.run(
                stream.name,
                stream.incarnation,
                delete=True,
                pay=_at_once,
                ages=partial(self._memory.unneeded.look, stream.name, now.progress_ms),
            )
        if swept.kept or swept.findings:
            first = swept.findings[0].cause if swept.findings else swept.kept
            log.warning("attributes.kept", stream=stream.name, cause=first)

    async def _request_in_pass(self, stream: Stream, action: RequestOffload, now: Now) -> None:
        """Ask, unless the queue took nothing in this pass: deletions and others do not wait."""
        if self._queue_is_away:
            return
        try:
            await self.request(stream, action, now)
        except RetryableError:
            self._queue_is_away = True
            raise

    async def request(self, stream: Stream, action: RequestOffload, now: Now) -> None:
        """Ask workers for a ledger; raises when the queue does not take it."""
        request = OffloadRequest(
            stream=stream.name,
            incarnation=stream.incarnation,
            ledger_id=action.ledger_id,
            trigger=action.trigger,
            requested_ms=now.wall_ms,
            request_count=action.count,
        )
        with self._tracer.span(
            "offload.request",
            parent=LedgerLife(stream.incarnation, action.ledger_id),
            kind=SpanKind.PRODUCER,
            messaging__system="kafka",
            messaging__operation__type="send",
            messaging__destination__name=self._stationery.topics.requested,
            stream=stream.name,
            ledger_id=action.ledger_id,
            trigger=action.trigger.value,
        ) as span:
            outgoing = self._stationery.request(request, span.traceparent)
            topic, key, value, headers = outgoing
            await self._publisher.publish(topic, key=key, value=value, headers=headers)
        self._memory.asked[action.ledger_id] = Asked(
            progress_ms=now.progress_ms, count=action.count
        )
        log.info(
            "offload.requested",
            stream=stream.name,
            ledger_id=action.ledger_id,
            trigger=action.trigger.value,
            count=action.count,
        )

    async def delete_tier1(self, action: DeleteTier1) -> None:
        """Delete a local copy whose time has come (step 9)."""
        ledger_id, uuid = action.context.ledger_id, action.context.uuid
        context = await self._catalog.contexts.get(ledger_id)
        if context is None or uuid is None or (context.uuid, context.complete) != (uuid, True):
            # It moved on since it was decided about.
            return
        copy = context.copy
        assert copy is not None, "a complete context says what was written"
        # The samples that are read next may miss what was found.
        context.check_not_doubted()
        if not await self._manifests.may_delete_local(context):
            # One that was begun too: it may be a backup's metadata that say so.
            log.info("tier1.kept", ledger_id=ledger_id, cause="no manifest names its copy yet")
            return
        if not await self._still_ordered(context.stream, action.grounds):
            return
        policy = action.grounds.policy
        read_back = None if policy is None else ReadBack.by(policy)
        try:
            # One that was begun too: that may be long ago, and the local copy still stands.
            await self._offloader.verify(
                ledger_id, uuid, context.location, copy, read_back=read_back
            )
        except CorruptError as error:
            cause = f"{error.reason.value}: {error.message}"
            await self._catalog.contexts.doubt(ledger_id, uuid=uuid, cause=cause)
            await self._catalog.contexts.record_error(ledger_id, uuid=uuid, error=cause)
            raise
        # Reading back takes long, and somebody may have stopped it meanwhile.
        if not await self._still_ordered(context.stream, action.grounds):
            return
        if context.state is not OffloadState.TIER1_DELETING:
            context = await self._catalog.contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
        await self._catalog.ledgers.delete_tier1(ledger_id, context)
        log.info("tier1.deleted", ledger_id=ledger_id, uuid=str(uuid))

    async def _still_ordered(self, name: StreamName, grounds: TrimGrounds) -> bool:
        """Tell whether policy and pause are as decided by; if not, the next pass decides."""
        stream = await self._catalog.streams.get(name)
        now = TrimGrounds.of(stream, await self._catalog.policies.levels())
        if now.paused or now.policy != grounds.policy:
            log.info("tier1.kept", stream=name, cause="it was paused, or its policy was changed")
            return False
        return True

    async def sweep(self, stream: Stream, action: SweepAbandoned, now: Now) -> None:
        """Delete what an abandoned attempt left, again for the last time (steps 3 and 10)."""
        ledger_id, attempt = action.ledger_id, action.attempt
        context = await self._catalog.contexts.get(ledger_id)
        if context is None or context.swept_at(attempt.uuid) is None:
            return
        if context.is_own(attempt.uuid):
            # A release before let one be both: nothing of what is the ledger's is deleted.
            await self._catalog.contexts.strike_off(ledger_id, attempt.uuid)
            log.info("attempt.kept", ledger_id=ledger_id, uuid=str(attempt.uuid))
            return
        if context.state is OffloadState.TRIMMING:
            allowed = await self._let_go(stream, ledger_id)
        else:
            allowed = await self._manifests.may_sweep(context, attempt.uuid)
        if not allowed:
            log.info("attempt.kept", ledger_id=ledger_id, uuid=str(attempt.uuid))
            if context.lacks_sound_copy:
                # That may stay so for long.
                self._memory.unseen_ms[attempt.uuid] = now.progress_ms
            return
        try:
            await self._offloader.delete_offloaded(ledger_id, attempt.uuid, attempt.location)
        except UploadsUnseenError:
            self._memory.unseen_ms[attempt.uuid] = now.progress_ms
            raise
        self._memory.unseen_ms.pop(attempt.uuid, None)
        if action.strike_off:
            await self._catalog.contexts.strike_off(ledger_id, attempt.uuid)
            self._memory.swept_seen_ms.pop(attempt.uuid, None)
        else:
            await self._catalog.contexts.mark_swept(ledger_id, attempt.uuid)
            self._memory.swept_seen_ms.setdefault(attempt.uuid, now.progress_ms)
        log.info(
            "attempt.swept",
            ledger_id=ledger_id,
            uuid=str(attempt.uuid),
            struck_off=action.strike_off,
        )

    async def _abandon(self, stream: Stream, action: AbandonStalled) -> None:
        """Abandon an attempt that did not end; its leftovers are swept as all others are."""
        cause = self._manifests.stopped(stream.name)
        if cause is None and await self._is_locked(action.ledger_id):
            cause = "a worker is at the ledger"
        if cause is not None:
            log.info("attempt.left", ledger_id=action.ledger_id, cause=cause)
            return
        # Should a worker be at it all the same it drops out: its copy can't become complete.
        await self._catalog.contexts.give_up_attempt(action.ledger_id, uuid=action.uuid)
        log.warning("attempt.given_up", ledger_id=action.ledger_id, uuid=str(action.uuid))

    async def _is_locked(self, ledger_id: LedgerId) -> bool:
        path = paths.ledger_lock_path(ledger_id)
        await self._catalog.store.sync(path)
        return await self._catalog.store.get(path) is not None

    async def _begin_trim(self, stream: Stream, action: BeginTrim) -> None:
        stopped = self._manifests.stopped(stream.name)
        if stopped is not None:
            log.info("trim.waits", stream=stream.name, cause=stopped)
            return
        count = await self._catalog.retention.begin_trim(
            stream.name, stream.incarnation, action.ledger_ids, grounds=action.grounds
        )
        log.info("stream.trimmed", stream=stream.name, ledgers=action.ledger_ids[:count])

    async def _drop_trimmed(self, stream: Stream, ledger_id: LedgerId) -> None:
        if await self._let_go(stream, ledger_id):
            await self._catalog.retention.drop_tier1(ledger_id)
            log.info("trimmed.dropped", stream=stream.name, ledger_id=ledger_id)

    async def _finish_trim(self, stream: Stream, ledger_id: LedgerId) -> None:
        if await self._let_go(stream, ledger_id):
            await self._catalog.retention.finish_trim(stream.name, stream.incarnation, ledger_id)
            log.info("trimmed.finished", stream=stream.name, ledger_id=ledger_id)

    async def _let_go(self, stream: Stream, ledger_id: LedgerId) -> bool:
        return await self._manifests.let_go(stream.name, stream.incarnation, ledger_id)


async def _at_once(length: int) -> None:
    """Hold nobody up: a sweep reads lists, no data."""
    del length
