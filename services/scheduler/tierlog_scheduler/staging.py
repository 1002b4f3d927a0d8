"""Deletes what was staged for streams by jobs that are gone (ADR-0031).

Owns when that is looked for, and what is old enough. Does not own the deletion: a staging ledger
that is attached at the same moment is not one any more, and the metadata store refuses to delete
it (``BareLedgerCatalog.delete``).

Invariants:
    * Only what bears the mark of a staging ledger is deleted, and only when the clock of whoever
      made it says that it is older than the age. A clock that is wrong costs a job its work, and
      never a stream its entries.
    * Nothing is deleted while deletions of its stream are stopped, nor before this leader has read
      the stream and its manifest: metadata from a backup may call staging what has become the
      stream's since. What is deleted was old enough at the last look too.
    * Nor as long as there is the mark of such metadata, or no storage node is up which would leave
      it: between two looks each does. Why is told at each look.
    * One ledger that can't be read or deleted keeps no other one from it.

Crash: the next leader looks again.
"""

import asyncio
from collections.abc import Callable

import structlog

from tierlog.catalog import Catalog
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.staging import Staging
from tierlog.ports.clock import Clock
from tierlog.runtime.worker import unless_stopped
from tierlog_scheduler.defects import note_defect

log = structlog.get_logger()


class StagingSweeper:
    """Looks every ``again_s`` while ``leading``, for what is older than ``age_s``.

    ``stopped`` tells why nothing of a stream is deleted now; None: nothing stops it.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        leading: Callable[[], bool],
        stopped: Callable[[StreamName], str | None],
        clock: Clock,
        age_s: float,
        again_s: float,
    ) -> None:
        self._bare = catalog.bare
        self._scrubs = catalog.scrubs
        self._nodes = catalog.nodes
        self._leading = leading
        self._stopped = stopped
        self._clock = clock
        self._age_s = age_s
        self._again_s = again_s
        self._seen: frozenset[LedgerId] = frozenset()

    def __repr__(self) -> str:
        return f"<StagingSweeper {len(self._seen)} due>"

    async def run(self, stop: asyncio.Event) -> None:
        """Sweep from time to time, until ``stop``."""
        while not stop.is_set():
            if self._leading():
                await unless_stopped(self._guarded(), stop)
            else:
                self._seen = frozenset()
            try:
                async with asyncio.timeout(self._again_s):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _guarded(self) -> None:
        """Do what must not end the scheduler, whatever becomes of it."""
        try:
            await self.sweep()
        except TierlogError as error:
            log.warning("staging.not_swept", cause=str(error))
        except Exception as error:  # noqa: BLE001 - told: metric, log
            note_defect("staging", error)

    async def sweep(self) -> list[LedgerId]:
        """Delete what is old enough, and was at the last look; return what was deleted."""
        due = await self._due()
        doubt = await self._doubt() if due else None
        if doubt is not None:
            cause, remedy = doubt
            log.warning("staging.kept", count=len(due), cause=cause, remedy=remedy)
            due = []
        before, self._seen = self._seen, frozenset(due)
        deleted: list[LedgerId] = []
        for ledger_id in due:
            if ledger_id not in before:
                continue
            try:
                await self._bare.delete(ledger_id)
            except TierlogError as error:
                log.info("staging.kept", ledger_id=ledger_id, cause=str(error))
            else:
                deleted.append(ledger_id)
        if deleted:
            log.info("staging.deleted", ledgers=deleted)
        return deleted

    async def _doubt(self) -> tuple[str, str] | None:
        """Return why the metadata may be a backup's, and what ends that; None: nothing says so."""
        if await self._scrubs.is_restored():
            remedy = "See the how-to metadata-from-a-backup, then: tierlog scrub --repair"
            return "the metadata came back from the bucket or from a backup", remedy
        if not await self._nodes.live():
            return "no storage node is up, which would tell of a backup", "Start storage nodes"
        return None

    async def _due(self) -> list[LedgerId]:
        before_ms = self._clock.wall_ms() - round(self._age_s * 1000)
        due: list[LedgerId] = []
        for ledger_id, metadata in sorted((await self._bare.list_staging()).items()):
            if metadata.ctime_ms is None or metadata.ctime_ms >= before_ms:
                continue
            try:
                staging = Staging.of(metadata)
            except CorruptError as error:
                log.warning("staging.kept", ledger_id=ledger_id, cause=str(error))
                continue
            if staging is None:
                continue
            cause = self._stopped(staging.stream)
            if cause is None:
                due.append(ledger_id)
            else:
                log.info("staging.kept", ledger_id=ledger_id, cause=cause)
        return due
