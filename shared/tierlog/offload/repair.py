"""The repair of a copy in tier 2 that is damaged or lacks objects (protocols.md section 3, step 9).

Owns the order of steps and the choice of what is copied. Does not own what is wrong
(``tierlog.offload.scrub``), what is left (``salvage``, ``vouching``), how a copy is written (the
offloader), nor cleaning: the scheduler sweeps what is abandoned, once a manifest names the new
copy.

Steps, under the ledger's courtesy lock:
    1. Find out whether every entry is still somewhere: in the local copy, if all of it reads; else
       in the good grains of the data objects, and in the local copy for what is not in those.
       Entries that are nowhere are named, and nothing is changed.
    2. One compare-and-set to REPAIRING, with a fresh attempt beside the damaged copy: nobody
       deletes the local copy any more, readers go on with the damaged one.
    3. Copy the ledger under the new attempt's keys, in the order and with the checks of an offload.
    4. Verify the new copy, reading back what the stream's policy says, or else the settings.
    5. One compare-and-set puts it in the damaged one's place, and that one to the abandoned.

Invariants:
    * The damaged copy stays the ledger's, and no object of it is touched, until the new one is
      complete and verified.
    * Nothing is written whose bytes nothing vouches for.
    * Of two that repair one ledger, only the one that began last completes.

Crash: before step 5 the ledger is REPAIRING, and as readable as it was; the next repair takes its
place, and abandons what was written. Failing at step 3 or 4: the same while a local copy stands,
which may be all that is good; without one the ledger is what it was, the attempt is abandoned.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.election import CourtesyLock
from tierlog.format import paths
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.manifest import copy_of
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.replication import EntryRange
from tierlog.model.scrub import LOST_RANGES_MAX
from tierlog.offload.driver import DRIVERS
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.salvage import GrainSource, Salvage, SalvageHandle
from tierlog.offload.verify import ReadBack
from tierlog.offload.vouching import Evidence, metadata_from_list
from tierlog.ports.ids import Ids
from tierlog.ports.objects import ObjectStore
from tierlog.ports.throttle import TokenBucket

log = structlog.get_logger()

WORKER: Final = "scrub"
RELEASE_TRIES_MAX: Final = 5
AT_WORK: Final = "another process is at work on the ledger"
ANOTHER_COPY: Final = "the ledger has another copy by now, or none"

OpenLedger = Callable[[LedgerId, LedgerMetadata], ReadHandle]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOutcome:
    """What came of a repair. ``repaired``: what was done; ``kept``: why nothing was.

    ``lost``: entries that are in no copy, as many ranges as there is room for; ``lost_count``: all.
    """

    repaired: str = ""
    kept: str = ""
    lost: tuple[EntryRange, ...] = ()
    lost_count: int = 0


@dataclass(frozen=True, slots=True)
class _Found:
    """What a repair copies, or why it can't."""

    handle: ReadHandle
    how: str
    lost: tuple[EntryRange, ...] = ()
    lost_count: int = 0


class Repairer:
    """Repairs ledgers, one at a time."""

    def __init__(
        self,
        *,
        objects: ObjectStore,
        catalog: Catalog,
        offloader: LedgerOffloader,
        open_ledger: OpenLedger,
        ids: Ids,
    ) -> None:
        self._objects = objects
        self._catalog = catalog
        self._offloader = offloader
        self._open_ledger = open_ledger
        self._ids = ids
        self._holder = ids.uuid()

    def __repr__(self) -> str:
        return f"<Repairer {self._holder}>"

    async def is_at_work(self, ledger_id: LedgerId) -> bool:
        """Tell whether another process holds the ledger's lock; it may be dead for a while."""
        path = paths.ledger_lock_path(ledger_id)
        await self._catalog.store.sync(path)
        found = await self._catalog.store.get(path)
        return found is not None and found.data != self._holder.bytes

    async def repair(self, context: OffloadContext, cause: str, pace: TokenBucket) -> RepairOutcome:
        """Make a new copy in the place of the one that a context names; ``cause``: what is wrong.

        ``pace``: of the bytes that are read. Raises nothing that metadata, nodes or bucket do.
        """
        ledger_id = context.ledger_id
        try:
            async with self._lock(ledger_id) as taken:
                if not taken:
                    return RepairOutcome(kept=AT_WORK)
                now = await self._as_before(context)
                if now is None:
                    return RepairOutcome(kept=ANOTHER_COPY)
                return await self._repair(now, cause, pace)
        except TierlogError as error:
            log.warning("repair.failed", ledger_id=ledger_id, cause=str(error))
            return RepairOutcome(kept=str(error))

    async def _as_before(self, context: OffloadContext) -> OffloadContext | None:
        """Return a ledger's context as of now, if it still names that copy."""
        now = await self._catalog.contexts.get(context.ledger_id)
        if now is None or copy_of(now) is None or now.uuid != context.uuid:
            return None
        return now

    @contextlib.asynccontextmanager
    async def _lock(self, ledger_id: LedgerId) -> AsyncIterator[bool]:
        lock = CourtesyLock(self._catalog.store, paths.ledger_lock_path(ledger_id), self._holder)
        try:
            yield await lock.take()
        finally:
            for attempt in range(RELEASE_TRIES_MAX):
                if await lock.release():
                    break
                await asyncio.sleep(self._ids.uniform(0.5, 1.0) * 2**attempt)

    async def _repair(
        self, context: OffloadContext, cause: str, pace: TokenBucket
    ) -> RepairOutcome:
        ledger_id = context.ledger_id
        async with self._local(context) as local:
            found = await self._found(context, local, pace)
            if found.lost:
                if await self._as_before(context) is None:
                    # Who slept over another one's repair looks at what is swept meanwhile.
                    return RepairOutcome(kept=ANOTHER_COPY)
                await self._call_off(context, found)
                log.error(
                    "repair.lost", ledger_id=ledger_id, entries=found.lost_count, lost=found.lost
                )
                return RepairOutcome(
                    kept=f"{found.lost_count} entries are in no copy; what is good stays as it is",
                    lost=found.lost,
                    lost_count=found.lost_count,
                )
            await self._copy(context, found.handle)
        log.warning(
            "repair.completed",
            stream=context.stream,
            ledger_id=ledger_id,
            damaged=str(context.uuid),
            source=found.how,
            cause=cause,
        )
        return RepairOutcome(repaired=f"copied anew, from {found.how}")

    @contextlib.asynccontextmanager
    async def _local(self, context: OffloadContext) -> AsyncIterator[ReadHandle | None]:
        """Open the local copy, if there is one."""
        metadata = None
        if not context.bookkeeper_deleted:
            metadata = await self._catalog.ledgers.get(context.ledger_id)
        if metadata is None or metadata.state is not LedgerState.CLOSED:
            yield None
            return
        handle = self._open_ledger(context.ledger_id, metadata)
        try:
            yield handle
        finally:
            await handle.close()

    async def _found(
        self, context: OffloadContext, local: ReadHandle | None, pace: TokenBucket
    ) -> _Found:
        """Find where all entries are, or which are nowhere."""
        trouble: TierlogError | None = None
        if local is not None:
            try:
                await check_whole(local)
            except TierlogError as error:
                log.warning("repair.local", ledger_id=context.ledger_id, cause=str(error))
                trouble = error
            else:
                return _Found(local, "the local copy")
        try:
            return await self._salvaged(context, local, pace)
        except CorruptError as error:
            if trouble is None:
                raise
            raise CorruptError(
                f"{error.message}; the local copy: {trouble.message}",
                remedy=error.remedy,
                details=error.details,
            ) from error

    async def _salvaged(
        self, context: OffloadContext, local: ReadHandle | None, pace: TokenBucket
    ) -> _Found:
        assert context.location is not None
        if context.location.driver not in DRIVERS:
            raise RefusedError(
                f"what is left of a copy by driver {context.location.driver} can't be read in part",
                remedy="Bring the object back from another copy of the bucket",
            )
        evidence = Evidence(self._objects, context, pace)
        metadata = await evidence.metadata()
        if metadata is None:
            metadata = await self._metadata(context, local, evidence)
        layout = await evidence.layout(metadata)
        source = GrainSource(self._objects, evidence.data_keys, layout, pace)
        handle = SalvageHandle(context.ledger_id, metadata, Salvage(source, layout), local)
        lost: list[EntryRange] = []
        count = 0
        async for first, last in handle.missing():
            count += last + 1 - first
            if len(lost) < LOST_RANGES_MAX:
                lost.append((first, last))
        return _Found(
            handle,
            "what is good in both tiers" if local else "what is good in tier 2",
            tuple(lost),
            count,
        )

    async def _metadata(
        self, context: OffloadContext, local: ReadHandle | None, evidence: Evidence
    ) -> LedgerMetadata:
        """Return what is known of the ledger where its copy's own index does not say it."""
        if local is not None:
            return local.ledger_metadata
        snapshot = await self._catalog.streams.snapshot(context.stream)
        for one in snapshot.ledgers:
            if one.ledger_id == context.ledger_id and one.closed:
                known = metadata_from_list(context, one, raw=snapshot.stream.raw)
                return await evidence.metadata_like(known) or known
        raise RefusedError(
            f"ledger {context.ledger_id} left the list of stream {context.stream}",
            remedy="Nothing to do: it is being trimmed",
        )

    async def _call_off(self, context: OffloadContext, found: _Found) -> None:
        """End what someone began who did not come to the end."""
        if context.state is OffloadState.REPAIRING and context.repair is not None:
            await self._catalog.contexts.give_up_repair(
                context.ledger_id,
                uuid=context.repair.uuid,
                error=f"{found.lost_count} entries are in no copy",
            )

    async def _copy(self, context: OffloadContext, handle: ReadHandle) -> None:
        """Take steps 2 to 5."""
        ledger_id, damaged, uuid = context.ledger_id, context.uuid, self._ids.uuid()
        assert damaged is not None
        contexts, location = self._catalog.contexts, self._offloader.location(ledger_id, uuid)
        stream = await self._catalog.streams.get(context.stream)
        policy = await self._catalog.policies.effective(stream)
        await contexts.begin_repair(
            ledger_id, damaged=damaged, uuid=uuid, location=location, worker=WORKER
        )
        log.info("repair.begun", ledger_id=ledger_id, uuid=str(uuid), damaged=str(damaged))
        extra = {
            "ManagedLedgerName": str(context.stream),
            "TierlogWorker": WORKER,
            "TierlogRepairOf": str(damaged),
        }
        try:
            copy = await self._offloader.offload(
                handle, uuid, extra, data_sha256=policy.data_sha256
            )
            await self._offloader.verify(
                ledger_id, uuid, location, copy, read_back=ReadBack.by(policy)
            )
        except TierlogError as error:
            if context.bookkeeper_deleted:
                await self._give_up(ledger_id, uuid, error)
            # Else it stays REPAIRING: a sample may not find the damage before the local copy goes.
            raise
        # Refused for certain: the attempt is among the abandoned, and swept with them.
        await contexts.complete_repair(ledger_id, uuid=uuid, copy=copy)

    async def _give_up(self, ledger_id: LedgerId, uuid: UUID, error: TierlogError) -> None:
        text = f"{error.reason.value}: {error}"
        try:
            await self._catalog.contexts.give_up_repair(ledger_id, uuid=uuid, error=text)
        except TierlogError as second:
            # It stays REPAIRING; the next repair takes its place.
            log.warning("repair.not_given_up", ledger_id=ledger_id, cause=str(second))


async def check_whole(handle: ReadHandle) -> None:
    """Read all of a ledger's local copy; raise unless it is whole."""
    metadata, behind = handle.ledger_metadata, 0
    async for runs in handle.read_runs(EntryId(0), metadata.last_entry_id):
        for run in runs:
            if run.first_entry_id != behind:
                break
            behind = run.last_entry_id + 1
    if behind != metadata.last_entry_id + 1:
        raise CorruptError(
            f"the local copy of ledger {handle.ledger_id} ends before entry {behind}",
            remedy="Make it whole with: tierlog node check; then scrub again",
            details={"ledger_id": str(handle.ledger_id)},
        )
