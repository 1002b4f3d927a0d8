"""Attempts to offload one ledger, up to a complete copy (protocols.md section 3, steps 2 to 7).

Owns the order of the steps. Does not own what each does: the catalog changes metadata, the
``LedgerOffloader`` moves bytes. Nor who asks: an offloader's queue (``tierlog_offloader.worker``),
or a back-fill on Spark.

Invariants:
    * The attempt's UUID and place are in the metadata before its first byte is uploaded.
    * An attempt is begun only by a worker that has the ledger's key, if it has one.
    * Abandoned attempts are cleaned only after that, since only then they can't complete, and
      only when no manifest names them: metadata that came back from a backup may not know.
    * An attempt becomes complete only by a compare-and-set on its own UUID, after verification.
    * A stream whose offloads are paused gets no attempt.
    * How a copy is written is what the stream's policy says when its attempt begins, never what a
      request says: anybody may ask, and an old request would bring an old policy.
    * A copy that its driver did not end in time has failed, as one that the store refuses; so has
      one whose driver raised what nobody foresaw.
    * Only the metadata say that a request comes too late: a ledger that they have no word of, in
      a stream that lives, is none that was trimmed, and somebody is to look at that.

Crash: at any step, whoever asks again begins a new attempt and abandons this one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, NoReturn
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.election import CourtesyLock
from tierlog.catalog.streams import check_not_paused
from tierlog.format import paths
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
    first_error,
)
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.offload import OffloadContext, OffloadState, Tier2Copy, Tier2Location
from tierlog.model.policy import Policy
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.manifests import AttemptGuard
from tierlog.offload.messages import OffloadRequest
from tierlog.ports.ids import Ids
from tierlog.ports.objects import NoSuchUploadError
from tierlog.ports.spending import spending_on
from tierlog.ports.tracing import within
from tierlog.proto.v1 import events_pb2 as pb

log = structlog.get_logger()

OpenLedger = Callable[[LedgerId, LedgerMetadata], ReadHandle]

_TRIMMED: Final = "it was trimmed by retention, or deleted with its stream"
CLEAN_TRIES_MAX: Final = 5
RELEASE_TRIES_MAX: Final = 10
LOCKS_LEFT_S: Final = 30.0
"""So often locks are given back that could not be before, also when no request comes."""

MAY_BEGIN: Final = frozenset({OffloadState.LOCAL, OffloadState.OFFLOADING})
COMPLETED: Final = pb.OffloadResult.OUTCOME_COMPLETED
ALREADY_COMPLETE: Final = pb.OffloadResult.OUTCOME_ALREADY_COMPLETE
SUPERSEDED: Final = pb.OffloadResult.OUTCOME_SUPERSEDED
REFUSED: Final = pb.OffloadResult.OUTCOME_REFUSED
_GONE: Final = frozenset({Reason.LEDGER_NOT_FOUND, Reason.STREAM_NOT_FOUND})


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a request ended that needs no second delivery."""

    outcome: pb.OffloadResult.Outcome.ValueType
    uuid: UUID | None = None
    copy: Tier2Copy | None = None


class LockedError(RetryableError):
    """Another worker is at it."""


class PausedError(RefusedError):
    """An admin wants no offload now."""


class StaleError(RefusedError):
    """What is asked for was trimmed or deleted since."""


class UnforeseenError(RetryableError):
    """A driver of one's own, or a defect, raised what is no ``TierlogError``: its cause."""

    default_reason = Reason.UNKNOWN


class OffloadAttempts:
    """Takes a ledger to tier 2, one at a time or several at once; ``name``: who does."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        open_ledger: OpenLedger,
        offloader: LedgerOffloader,
        guard: AttemptGuard,
        ids: Ids,
        name: str,
    ) -> None:
        self._catalog = catalog
        self._open_ledger = open_ledger
        self._offloader = offloader
        self._guard = guard
        self._ids = ids
        self._name = name
        self._holder = ids.uuid()
        self._in_hand: set[LedgerId] = set()
        self._locks_left: dict[LedgerId, CourtesyLock] = {}
        self.attempts = 0
        self.completed = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} attempts={self.attempts}>"

    async def offload(self, request: OffloadRequest) -> Done:
        """Take steps 2 to 7. Besides what they meet they raise what needs no second look.

        ``LockedError``: somebody else is at it. ``PausedError``: no offload is wanted now.
        ``StaleError``: the ledger surely went since it was asked for.
        """
        try:
            # What earlier attempts left is deleted on the stream's account, too.
            with spending_on(request.stream):
                return await self._take_steps(request)
        except RefusedError as error:
            gone = await self._gone(request) if error.reason in _GONE else None
            if gone is None:
                raise
            raise _stale(request, gone) from error

    async def _gone(self, request: OffloadRequest) -> str | None:
        """Return how a ledger went, as of now, if the metadata tell; None: they don't."""
        ledger_id, catalog = request.ledger_id, self._catalog
        context = await catalog.contexts.get(ledger_id)
        if context is not None:
            return _TRIMMED if context.state is OffloadState.TRIMMING else None
        if await catalog.ledgers.get(ledger_id) is not None:
            # It belongs to no stream.
            return None
        try:
            stream = await catalog.streams.get(request.stream)
        except RefusedError as error:
            if error.reason is not Reason.STREAM_NOT_FOUND:
                raise
            return "its stream is not there, or not any more"
        if stream.incarnation != request.incarnation:
            return "its stream was deleted and made anew"
        if stream.trimmed_end is not None and ledger_id <= stream.trimmed_end.ledger_id:
            return _TRIMMED
        return None

    async def _take_steps(self, request: OffloadRequest) -> Done:
        """Look, lock, begin, copy, complete."""
        await self._release_left()
        ended = _ended(await self._checked_context(request))
        if ended is not None:
            return ended
        policy = await self._wanted(request)
        await self._checked_metadata(request.ledger_id)
        async with self._lock(request.ledger_id):
            return await self._attempt(request, policy)

    @contextlib.asynccontextmanager
    async def _lock(self, ledger_id: LedgerId) -> AsyncIterator[None]:
        """Hold the ledger's lock, or raise when someone else has it, in this process too."""
        lock = CourtesyLock(self._catalog.store, paths.ledger_lock_path(ledger_id), self._holder)
        if ledger_id in self._in_hand:
            raise _locked(ledger_id)
        self._in_hand.add(ledger_id)
        # Noted first: also a lock whose taking had no answer may be there.
        self._locks_left[ledger_id] = lock
        try:
            if not await lock.take():
                raise _locked(ledger_id)
            yield
        finally:
            try:
                await self._release(ledger_id)
            except asyncio.CancelledError:
                # Torn out of giving it back: no later request may ever do it here.
                await self._release(ledger_id)
                raise
            finally:
                self._in_hand.discard(ledger_id)

    async def _release(self, ledger_id: LedgerId) -> None:
        """Give a lock back. Where that has no answer it is tried again, and in the end left.

        A lock that is left keeps others from the ledger for as long as this session lives.
        """
        lock = self._locks_left.get(ledger_id)
        if lock is None:
            return
        for attempt in range(RELEASE_TRIES_MAX):
            if await lock.release():
                self._locks_left.pop(ledger_id, None)
                return
            await asyncio.sleep(self._ids.uniform(0.5, 1.0) * min(2.0**attempt, 5.0))

    async def keep_releasing(self) -> NoReturn:
        """Give back, now and then, what locks were left, until it is cancelled."""
        while True:
            await asyncio.sleep(LOCKS_LEFT_S)
            with contextlib.suppress(TierlogError):  # next time, or when the session ends
                await self._release_left()

    async def _release_left(self) -> None:
        """Give back what was left: else a lock of this session keeps others away for good."""
        for ledger_id in list(self._locks_left):
            if ledger_id in self._in_hand:
                continue
            # Else a request that takes it meanwhile would have it given back under its hands.
            self._in_hand.add(ledger_id)
            try:
                await self._release(ledger_id)
            finally:
                self._in_hand.discard(ledger_id)

    async def _checked_context(self, request: OffloadRequest) -> OffloadContext:
        context = await self._catalog.contexts.get(request.ledger_id)
        if context is None:
            raise RefusedError(
                f"there is no ledger {request.ledger_id}",
                reason=Reason.LEDGER_NOT_FOUND,
                remedy="Look who asked for it; the scheduler asks only for ledgers that exist",
                details={"ledger_id": str(request.ledger_id)},
            )
        if (context.stream, context.incarnation) != (request.stream, request.incarnation):
            raise RefusedError(
                f"ledger {request.ledger_id} belongs to {context.stream} of incarnation "
                f"{context.incarnation}, not to {request.stream} of {request.incarnation}",
                remedy="Nothing to do: the request is from before the stream was made anew",
                details={"ledger_id": str(request.ledger_id)},
            )
        return context

    async def _wanted(self, request: OffloadRequest) -> Policy:
        """Return the policy that a copy is made by; raise where none is wanted now."""
        stream = await self._catalog.streams.get(request.stream)
        try:
            check_not_paused(stream)
        except RefusedError as error:
            raise PausedError(error.message, remedy=error.remedy, details=error.details) from error
        return await self._catalog.policies.effective(stream)

    async def _checked_metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        metadata = await self._catalog.ledgers.get(ledger_id)
        if metadata is None:
            raise RefusedError(
                f"ledger {ledger_id} is not in tier 1 any more",
                reason=Reason.LEDGER_NOT_FOUND,
                remedy="Nothing to do: it was trimmed, or deleted after another attempt",
                details={"ledger_id": str(ledger_id)},
            )
        if metadata.state is not LedgerState.CLOSED:
            raise RefusedError(
                f"ledger {ledger_id} is {metadata.state.name}, and only a closed one is offloaded",
                remedy="Wait until it is rolled over, or recover it",
                details={"ledger_id": str(ledger_id)},
            )
        return metadata

    async def _attempt(self, request: OffloadRequest, policy: Policy) -> Done:
        metadata = await self._checked_metadata(request.ledger_id)
        handle = self._open_ledger(request.ledger_id, metadata)
        try:
            return await self._attempt_from(handle, request, policy)
        finally:
            await handle.close()

    async def _attempt_from(
        self, handle: ReadHandle, request: OffloadRequest, policy: Policy
    ) -> Done:
        ledger_id, uuid = request.ledger_id, self._ids.uuid()
        location = self._offloader.location(ledger_id, uuid)
        try:
            context = await self._catalog.contexts.begin_attempt(
                ledger_id, uuid=uuid, location=location, worker=self._name
            )
        except RefusedError:
            # Its state moved since it was read: complete by another worker, or being trimmed.
            now = await self._checked_context(request)
            ended = _ended(now)
            if ended is None and now.swept_at(uuid) is not None:
                # It had begun, and another one did before the lost answer was read back.
                ended = Done(outcome=SUPERSEDED, uuid=uuid)
            if ended is None:
                raise
            return ended
        self.attempts += 1
        log.info("attempt.begun", ledger_id=ledger_id, uuid=str(uuid), count=context.attempt_count)
        await self._clean_abandoned(context)
        try:
            with within(
                "offload.attempt",
                stream=request.stream,
                ledger_id=ledger_id,
                uuid=str(uuid),
                count=context.attempt_count,
            ):
                copy = await self._copy(request, handle, uuid, policy)
        except TierlogError as error:
            if await self._superseded(ledger_id, uuid):
                # Its successor takes its leftovers away, and aborts its upload under it; nobody
                # does where the ledger is gone.
                await self._clean_unnamed(request, uuid, location)
                return Done(outcome=SUPERSEDED, uuid=uuid)
            if isinstance(error, NoSuchUploadError):
                raise again(error) from error
            raise
        try:
            with within("offload.complete", uuid=str(uuid), bytes=copy.data_len):
                await self._catalog.contexts.complete_attempt(ledger_id, uuid=uuid, copy=copy)
        except RefusedError as error:
            log.info("attempt.superseded", ledger_id=ledger_id, uuid=str(uuid), cause=str(error))
            await self._clean_unnamed(request, uuid, location)
            return Done(outcome=SUPERSEDED, uuid=uuid)
        self.completed += 1
        log.info("attempt.completed", ledger_id=ledger_id, uuid=str(uuid), length=copy.data_len)
        return Done(outcome=COMPLETED, uuid=uuid, copy=copy)

    async def _clean_unnamed(
        self, request: OffloadRequest, uuid: UUID, location: Tier2Location
    ) -> None:
        """Delete an attempt of this worker's that nothing names any more: nobody else will.

        Its ledger is gone, or it took so long that it was swept for the last time and struck off.
        """
        ledger_id = request.ledger_id
        gone = OffloadContext(
            stream=request.stream, incarnation=request.incarnation, ledger_id=ledger_id
        )
        for attempt in range(CLEAN_TRIES_MAX):
            try:
                context = await self._catalog.contexts.get(ledger_id)
                if context is not None and context.names(uuid):
                    return
                if not await self._guard.may_clean(context or gone, uuid):
                    # Named by a manifest that is newer than these metadata: it may be the last.
                    return
                await self._offloader.delete_offloaded(ledger_id, uuid, location)
            except Exception as error:  # noqa: BLE001 - a driver's own, too
                _note_left(uuid, error)
                await asyncio.sleep(self._ids.uniform(0.5, 1.0) * 2**attempt)
            else:
                return

    async def _clean_abandoned(self, context: OffloadContext) -> None:
        """Delete what attempts before this one left. Failing is legal: the scheduler sweeps."""
        for attempt in context.abandoned:
            if attempt.swept_ms or not await self._guard.may_clean(context, attempt.uuid):
                continue
            try:
                await self._offloader.delete_offloaded(
                    context.ledger_id, attempt.uuid, attempt.location
                )
                await self._catalog.contexts.mark_swept(context.ledger_id, attempt.uuid)
            except Exception as error:  # noqa: BLE001 - a driver's own, too
                _note_left(attempt.uuid, error)

    async def _copy(
        self, request: OffloadRequest, handle: ReadHandle, uuid: UUID, policy: Policy
    ) -> Tier2Copy:
        """Take steps 4 to 6. A failure is recorded for people, its leftovers are taken away."""
        extra = {"ManagedLedgerName": str(request.stream), "TierlogWorker": self._name}
        try:
            return await self._offloader.offload(
                handle, uuid, extra, data_sha256=policy.data_sha256
            )
        except Exception as error:
            # Not complete, and never will be: this worker alone could say so.
            known = foreseen(error)
            await self._note_failure(request.ledger_id, uuid, known)
            if known is error:
                raise
            raise known from error

    async def _superseded(self, ledger_id: LedgerId, uuid: UUID) -> bool:
        """Tell whether this is not the newest attempt now; False when that can't be told."""
        try:
            context = await self._catalog.contexts.get(ledger_id)
        except TierlogError:
            return False
        return context is None or context.uuid != uuid

    async def _note_failure(self, ledger_id: LedgerId, uuid: UUID, error: TierlogError) -> None:
        text = f"{error.reason.value}: {error}"
        log.warning("attempt.failed", ledger_id=ledger_id, uuid=str(uuid), cause=text)
        try:
            await self._catalog.contexts.record_error(ledger_id, uuid=uuid, error=text)
            await self._offloader.delete_offloaded(ledger_id, uuid)
        except Exception as second:  # noqa: BLE001 - a driver's own, too
            # The next attempt abandons this one and cleans it.
            _note_left(uuid, second)


def _note_left(uuid: UUID, error: Exception) -> None:
    known = foreseen(error)
    if isinstance(known, UnforeseenError):
        log.error(
            "unexpected_error", work="clean", uuid=str(uuid), cause=known.message, exc_info=error
        )
    log.warning("attempt.clean_failed", uuid=str(uuid), cause=str(known))


def foreseen(error: Exception) -> TierlogError:
    """Return ``error``; for one that is none of Tierlog's, what may be tried again and says it."""
    if isinstance(error, TierlogError):
        return error
    first = first_error(error)
    said = f"unexpected {type(first).__name__}: {first}"
    known = UnforeseenError(
        # Names of files that are no text can't be kept as it.
        said.encode(errors="replace").decode(),
        remedy="Look for its trace in the log: a driver of your own, or Tierlog, is to be mended",
    )
    known.__cause__ = error
    return known


def _stale(request: OffloadRequest, gone: str) -> StaleError:
    return StaleError(
        f"the request for ledger {request.ledger_id} of {request.stream} came too late: {gone}",
        reason=Reason.LEDGER_NOT_FOUND,
        remedy="Nothing to do",
        details={"stream": request.stream, "ledger_id": str(request.ledger_id)},
    )


def _locked(ledger_id: LedgerId) -> LockedError:
    return LockedError(
        f"another worker is offloading ledger {ledger_id}",
        remedy="Nothing to do: it is looked at again",
    )


def _ended(context: OffloadContext) -> Done | None:
    """Return how a request for such a ledger ends at once; None: it is to be offloaded.

    Raises LEDGER_NOT_FOUND for one that was trimmed.
    """
    if context.complete:
        return Done(outcome=ALREADY_COMPLETE, uuid=context.uuid, copy=context.copy)
    if context.state is OffloadState.TRIMMING:
        raise RefusedError(
            f"ledger {context.ledger_id} is to be offloaded no more: {_TRIMMED}",
            reason=Reason.LEDGER_NOT_FOUND,
            remedy="Nothing to do",
            details={"ledger_id": str(context.ledger_id)},
        )
    if context.state not in MAY_BEGIN:
        return Done(outcome=REFUSED, uuid=context.uuid)
    return None


def again(error: TierlogError) -> TierlogError:
    """Return ``error`` as one that may be tried again: damage may lie on the way, not on disk."""
    if isinstance(error, RetryableError | IndeterminateError):
        return error
    return RetryableError(
        error.message, reason=Reason.UNKNOWN, remedy=error.remedy, details=error.details
    )
