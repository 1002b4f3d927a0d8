"""Garbage collection: which ledgers of this node were deleted (protocols.md section 1, "Delete").

Owns: the decision (pure) and the order of looking. Does not own deleting: ``StorageNode`` does.

A round: snapshot what the node holds *first*; then sync and list the ledgers that exist; then ask
of each candidate whether its deletion is on record (its offload context says so, or the record
that the deletion of a bare ledger leaves); then confirm each by a read of its own; then
quarantine it; and free it in a later round, when it has been quarantined long enough and is
confirmed absent once more.

Invariants:
    * A ledger made after the snapshot is never a candidate.
    * Nothing is ever concluded from an error, nor from a list without any ledger.
    * More fresh candidates without a record than a share of what is held stop the round with an
      alarm. A ledger of which only the fence is held counts on neither side: nothing of it can be
      lost, its id stays refused, and recoveries leave many that never had an entry.
    * A metadata store that forgot ids it gave came back from an old backup (``seen_ids``): what it
      does not list may exist here alone. Nothing is freed from then on, also after restarts, and
      what was in quarantine is served again, until an operator takes the store for right. Until
      then the mark of that is left in the store in every round.
    * Looking at the store's counter takes no id.
    * Every ledger that is freed was confirmed absent at least twice, ``quarantine_s`` apart.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Protocol

import structlog

from tierlog.catalog import Catalog
from tierlog.model.errors import TierlogError
from tierlog.model.ids import LedgerId, NodeId
from tierlog.ports.clock import Clock
from tierlog_ingest.storage.seen_ids import SeenIds, judged

log = structlog.get_logger()

FEW_LEDGERS = 8
"""Below so many, a share says nothing; a node with so few may lose them all at once."""

DELETIONS_KEPT_MS: Final = 30 * 24 * 3600 * 1000
"""A node that was away for longer frees bare ledgers without a record, by the share alone."""
FORGET_INTERVAL_S: Final = 24 * 3600.0


class LedgerList(Protocol):
    """What garbage collection asks the metadata store; every failure raises."""

    async def list_ids(self) -> list[LedgerId]:
        """Return the ids of all ledgers, as of a sync."""
        ...

    async def get(self, ledger_id: LedgerId) -> object | None:
        """Return a ledger's metadata as of a sync, or None when there is none."""
        ...

    async def next_id(self) -> LedgerId:
        """Return the id that would be given next, as of a sync; take none."""
        ...

    async def tally(self) -> int:
        """Return the version of the node's tally, as of a sync; -1: there is none."""
        ...

    async def count(self) -> int:
        """Raise the node's tally; return its version."""
        ...

    async def note_behind(self) -> None:
        """Leave the mark that metadata came back from a backup."""
        ...

    async def deletion_on_record(self, ledger_id: LedgerId) -> bool:
        """Tell whether the ledger's copies on storage nodes were deleted in order."""
        ...

    async def forget_deletions(self, *, before_ms: int) -> None:
        """Drop the records of bare ledgers that were deleted before then."""
        ...


class CatalogLedgers:
    """``LedgerList`` over the catalog."""

    def __init__(self, catalog: Catalog, node_id: NodeId) -> None:
        self._catalog = catalog
        self._node_id = node_id

    async def list_ids(self) -> list[LedgerId]:
        return await self._catalog.ledgers.list_ids()

    async def get(self, ledger_id: LedgerId) -> object | None:
        return await self._catalog.ledgers.get(ledger_id)

    async def next_id(self) -> LedgerId:
        return await self._catalog.ledgers.next_id()

    async def tally(self) -> int:
        return await self._catalog.nodes.tally(self._node_id)

    async def count(self) -> int:
        return await self._catalog.nodes.count(self._node_id)

    async def note_behind(self) -> None:
        await self._catalog.scrubs.note_behind()

    async def deletion_on_record(self, ledger_id: LedgerId) -> bool:
        context = await self._catalog.contexts.get(ledger_id)
        if context is not None:
            return context.bookkeeper_deleted
        return await self._catalog.bare.deletion_on_record(ledger_id)

    async def forget_deletions(self, *, before_ms: int) -> None:
        count = await self._catalog.bare.forget_deleted(before_ms=before_ms)
        if count:
            log.info("gc.deletions_forgotten", count=count)


class HeldLedgers(Protocol):
    """What garbage collection does to the node."""

    def held_ledgers(self) -> list[LedgerId]:
        """Return what the node holds, fences included."""
        ...

    async def list_ledgers(self) -> list[LedgerId]:
        """Return the ledgers that the node holds entries of."""
        ...

    def quarantine(self, ledger_id: LedgerId) -> None:
        """Serve nothing of a ledger, but keep it."""
        ...

    def restore(self, ledger_id: LedgerId) -> None:
        """Serve a ledger again."""
        ...

    async def free(self, ledger_id: LedgerId) -> None:
        """Forget a ledger, durably."""
        ...

    @property
    def seen_ids(self) -> SeenIds:
        """What the node saw of the ids that were given."""
        ...

    async def keep_seen_ids(self, seen_ids: SeenIds) -> None:
        """Keep that durably."""
        ...


class Alarm(Enum):
    """Why a round does nothing."""

    EMPTY_LIST = "the metadata store lists no ledger at all"
    TOO_MANY = "too large a share of the node's ledgers would go, and nothing says why"
    OLD_BACKUP = "the metadata store forgot ledger ids that it gave: it is an old backup's"

    @property
    def remedy(self) -> str:
        """What ends it."""
        return _REMEDIES[self]

    @property
    def message(self) -> str:
        """What happened and the remedy."""
        return f"{self.value}. {self.remedy}"


_REMEDIES: Final[Mapping[Alarm, str]] = {
    Alarm.EMPTY_LIST: "Nothing is freed before ledgers are listed again",
    Alarm.TOO_MANY: "Bring the missing metadata back; or raise ingest.storage.gc_share_max, once "
    "it is known that they were deleted",
    Alarm.OLD_BACKUP: "Nothing is freed any more. Bring newer metadata back, or take these for "
    "right; either way end this with the node stopped: tierlog node trust-metadata DIR",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a round may go on with."""

    candidates: tuple[LedgerId, ...] = ()
    alarm: Alarm | None = None


def decide(
    held: Collection[LedgerId],
    living: Collection[LedgerId],
    *,
    accounted_for: Collection[LedgerId],
    share_max: float,
    fences: Collection[LedgerId] = (),
) -> Decision:
    """Judge a snapshot of what is held by a later list of what exists.

    ``accounted_for``: deletion is on record, or was judged in a round before. ``fences``: those
    of ``held`` of which there is no entry.
    """
    alive = set(living)
    absent = sorted(set(held) - alive)
    if absent and not alive:
        return Decision(alarm=Alarm.EMPTY_LIST)
    stored = set(held) - set(fences)
    fresh = stored.intersection(absent) - set(accounted_for)
    if len(fresh) > max(FEW_LEDGERS, share_max * len(stored)):
        return Decision(alarm=Alarm.TOO_MANY)
    return Decision(candidates=tuple(absent))


class GarbageCollector:
    """Runs rounds. What is quarantined is known to it alone; a restart begins anew."""

    def __init__(
        self,
        node: HeldLedgers,
        ledgers: LedgerList,
        clock: Clock,
        *,
        share_max: float,
        quarantine_s: float,
    ) -> None:
        self._node = node
        self._ledgers = ledgers
        self._clock = clock
        self._share_max = share_max
        self._quarantine_s = quarantine_s
        self._since_s: dict[LedgerId, float] = {}
        self.alarm: Alarm | None = Alarm.OLD_BACKUP if node.seen_ids.behind else None
        """Why the last round did nothing; None when it did what it had to."""

    def __repr__(self) -> str:
        return f"<GarbageCollector quarantined={len(self._since_s)} alarm={self.alarm}>"

    @property
    def quarantined(self) -> Mapping[LedgerId, float]:
        """Since when (monotonic) each ledger is in quarantine."""
        return dict(self._since_s)

    async def run(self, *, interval_s: float) -> None:
        """Collect for ever. An error ends a round, never the loop."""
        forgot_s = self._clock.monotonic_s()
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.collect()
                is_due = self._clock.monotonic_s() - forgot_s >= FORGET_INTERVAL_S
                if is_due and self.alarm is None:
                    before_ms = self._clock.wall_ms() - DELETIONS_KEPT_MS
                    await self._ledgers.forget_deletions(before_ms=before_ms)
                    forgot_s = self._clock.monotonic_s()
            except TierlogError as error:
                log.warning("gc.skipped", cause=str(error))

    async def collect(self) -> list[LedgerId]:
        """Do one round; return what was freed."""
        held = self._node.held_ledgers()
        stored = await self._node.list_ledgers()
        living = set(await self._ledgers.list_ids())
        await self._look_at_ids(stored)
        if self._node.seen_ids.behind:
            for ledger_id in list(self._since_s):
                self._revive(ledger_id)
            self._stop(Alarm.OLD_BACKUP, held=len(held), found=len(living))
            return []
        for ledger_id in sorted(living.intersection(self._since_s)):
            log.error("gc.ledger_revived", ledger_id=ledger_id)
            self._revive(ledger_id)
        absent = [one for one in held if one not in living]
        fences = set(held).difference(stored)
        decision = decide(
            held,
            living,
            accounted_for=await self._accounted_for([one for one in absent if one not in fences]),
            share_max=self._share_max,
            fences=fences,
        )
        self.alarm = None
        if decision.alarm is not None:
            self._stop(decision.alarm, held=len(held), found=len(living))
            return []
        return [one for one in decision.candidates if await self._judge(one)]

    def _stop(self, alarm: Alarm, *, held: int, found: int) -> None:
        self.alarm = alarm
        log.error("gc.stopped", cause=alarm.value, remedy=alarm.remedy, held=held, found=found)

    async def _look_at_ids(self, stored: list[LedgerId]) -> None:
        """Judge the store by what it says of ids, and keep that before anything is freed."""
        before = self._node.seen_ids
        if before.behind:
            # What took the store's place since has no mark, nor has one that was found behind by a
            # release that left none.
            await self._ledgers.note_behind()
            return
        next_id, tally = await self._ledgers.next_id(), await self._ledgers.tally()
        seen = judged(before, stored, next_id=next_id, tally=tally)
        if seen.behind:
            log.error(
                "gc.metadata_behind",
                next_id=next_id,
                next_id_seen=seen.next_id,
                tally=tally,
                tally_seen=seen.tally,
            )
            # Nor may a scrub by schedule take what the store does not know for nobody's.
            await self._ledgers.note_behind()
        elif next_id > seen.next_id:
            seen = replace(seen, next_id=next_id, tally=await self._ledgers.count())
        if seen != before:
            await self._node.keep_seen_ids(seen)

    async def _accounted_for(self, absent: list[LedgerId]) -> set[LedgerId]:
        recorded = set(self._since_s)
        for ledger_id in absent:
            if ledger_id not in recorded and await self._ledgers.deletion_on_record(ledger_id):
                recorded.add(ledger_id)
        return recorded

    async def _judge(self, ledger_id: LedgerId) -> bool:
        """Confirm a candidate by a read of its own, then quarantine it or free it."""
        if await self._ledgers.get(ledger_id) is not None:
            self._revive(ledger_id)
            return False
        since_s = self._since_s.get(ledger_id)
        if since_s is None:
            self._since_s[ledger_id] = self._clock.monotonic_s()
            self._node.quarantine(ledger_id)
            log.info("gc.quarantined", ledger_id=ledger_id)
            return False
        if self._clock.monotonic_s() - since_s < self._quarantine_s:
            return False
        await self._node.free(ledger_id)
        del self._since_s[ledger_id]
        log.info("gc.freed", ledger_id=ledger_id)
        return True

    def _revive(self, ledger_id: LedgerId) -> None:
        if self._since_s.pop(ledger_id, None) is not None:
            self._node.restore(ledger_id)
