"""Reports of damaged and missing copies, from readers to the under-replication queue.

Owns what waits to be reported. Does not own the queue, nor repairs.

Invariants:
    * Reporting never holds a read up, and never fails one.
    * What was reported is not reported again for a while; what waits is bounded. What is
      dropped for that is met again by the next read, or by the periodic check.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from tierlog.model.errors import TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.replication import CopyTrouble, EntryRange

log = structlog.get_logger()


class AddToQueue(Protocol):
    """``UnderReplicationCatalog.add``."""

    def __call__(
        self,
        ledger_id: LedgerId,
        *,
        reason: str,
        nodes: list[NodeId],
        entries: EntryRange | None = None,
    ) -> Awaitable[None]:
        """Report that copies on ``nodes`` are missing or bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageLimits:
    """Every bound of it."""

    waiting_max: int = 1000
    again_s: float = 300.0
    retry_s: float = 5.0


class _Damage(NamedTuple):
    ledger_id: LedgerId
    node_id: NodeId
    entry_id: EntryId | None


class DamageReports:
    """Takes what readers notice; ``run`` passes it on."""

    def __init__(self, add: AddToQueue, *, limits: DamageLimits | None = None) -> None:
        self._add = add
        self._limits = limits or DamageLimits()
        self._waiting: list[_Damage] = []
        self._reported_s: dict[_Damage, float] = {}
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<DamageReports waiting={len(self._waiting)}>"

    def __call__(self, ledger_id: LedgerId, node_id: NodeId, entry_id: EntryId | None) -> None:
        """Take notice that a node has an entry's run damaged, or lacks runs (None)."""
        damage = _Damage(ledger_id, node_id, entry_id)
        now_s = asyncio.get_running_loop().time()
        reported_s = self._reported_s.get(damage)
        again = reported_s is not None and now_s - reported_s < self._limits.again_s
        if again or len(self._waiting) >= self._limits.waiting_max:
            return
        if len(self._reported_s) >= self._limits.waiting_max:
            del self._reported_s[next(iter(self._reported_s))]
        self._reported_s.pop(damage, None)
        self._reported_s[damage] = now_s
        self._waiting.append(damage)
        self._arrived.set()

    async def run(self) -> None:
        """Pass on what comes, until cancelled."""
        while True:
            self._arrived.clear()
            while self._waiting:
                await self._report(self._waiting[0])
                del self._waiting[0]
            await self._arrived.wait()

    async def _report(self, damage: _Damage) -> None:
        missing = damage.entry_id is None
        entries = None if damage.entry_id is None else (damage.entry_id, damage.entry_id)
        while True:
            try:
                await self._add(
                    damage.ledger_id,
                    reason=CopyTrouble.MISSING if missing else CopyTrouble.DAMAGED,
                    nodes=[damage.node_id],
                    entries=entries,
                )
            except TierlogError as error:
                log.warning("damage.unreported", ledger_id=damage.ledger_id, cause=str(error))
                await asyncio.sleep(self._limits.retry_s)
            else:
                log.warning(
                    "damage.reported",
                    ledger_id=damage.ledger_id,
                    node_id=damage.node_id,
                    entry_id=damage.entry_id,
                )
                return
