"""Finds ledgers that lack copies: nodes that are lost, or being emptied, and now and then all.

Owns: the one office of auditor, looking for nodes that went, and reporting the ledgers that name
them. Does not own copying (``worker``), nor comparing copies one by one (``checking``).

Consistency
    Two auditors at once do no harm: a report is idempotent, and nothing else is changed here.
    A new auditor begins to count absences anew: at worst a loss is found one delay later.

Retries
    An error ends a round, never the auditor; the next round looks at everything again.

Cancellation
    At any time; the office goes with the session at the latest.
"""

import asyncio
from collections.abc import Collection
from math import inf
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.election import Election
from tierlog.ledger.directory import NodeDirectory
from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.model.ids import NodeId
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.ports.waiting import first_of
from tierlog.runtime.sections import ReplicationSettings
from tierlog_ingest.replication.checking import Checker
from tierlog_ingest.replication.plan import Absences, complaints_of, named_nodes

log = structlog.get_logger()

OFFICE: Final = "auditor"
ROUND_S_MIN: Final = 0.2
SCAN_PAUSE_FACTOR: Final = 20.0


class Auditor:
    """One candidate for the office. ``run`` is its life."""

    def __init__(
        self,
        catalog: Catalog,
        nodes: NodeDirectory[StorageNodeClient],
        *,
        clock: Clock,
        ids: Ids,
        settings: ReplicationSettings,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._election = Election(catalog.store, ids, office=OFFICE)
        self._checker = Checker(catalog, nodes, clock=clock, settings=settings)
        self._absences = Absences()
        self._named: frozenset[NodeId] = frozenset()
        """Nodes without an identity that a ledger names all the same."""
        self._named_s = -inf
        self._scanned: tuple[frozenset[NodeId], ...] = ()
        """Who was gone when all ledgers were last looked through."""
        self._scan_due_s = 0.0
        self.leading = False

    def __repr__(self) -> str:
        return f"<Auditor leading={self.leading} {self._absences!r}>"

    async def run(self) -> None:
        """Stand for the office, and do its work while holding it; ends by cancellation."""
        while True:
            try:
                ended = await self._election.win()
                log.info("auditor.elected")
                self.leading = True
                await self._lead(ended)
            except TierlogError as error:
                log.info("auditor.waiting", cause=str(error))
                await asyncio.sleep(self._settings.interval_s * self._ids.uniform(0.5, 1.0))
            finally:
                self.leading = False

    async def resign(self) -> None:
        """Leave the office to another candidate at once."""
        await self._election.resign()

    async def _lead(self, ended: asyncio.Event) -> None:
        self._absences, self._scanned, self._named_s = Absences(), (), -inf
        async with asyncio.TaskGroup() as tasks:
            checking = tasks.create_task(self._checker.run(), name="checking copies")
            looking = tasks.create_task(self._look(), name="looking for lost nodes")
            await ended.wait()
            looking.cancel()
            checking.cancel()

    async def _look(self) -> None:
        """Look again when a node came or went, when one was away long enough, and now and then."""
        watched: list[asyncio.Event] = []
        while True:
            wait_s = self._settings.interval_s
            try:
                if not watched or any(one.is_set() for one in watched):
                    _, watched = await self._catalog.nodes.watch_live()
                wait_s = await self.look_once()
            except TierlogError as error:
                log.info("auditor.skipped", cause=str(error))
                watched = []
            try:
                async with asyncio.timeout(max(ROUND_S_MIN, wait_s)):
                    await first_of(*watched or (asyncio.Event(),))
            except TimeoutError:
                continue

    async def look_once(self) -> float:
        """Do one round; return in how many seconds the next one is due."""
        settings, now_s = self._settings, self._clock.monotonic_s()
        live = await self._catalog.nodes.live()
        draining = {
            node_id
            for node_id, one in (await self._catalog.draining.list()).items()
            if not one.done_ms
        }
        if now_s - self._named_s >= settings.scan_interval_s:
            # Nodes whose identity is gone are known by the ledgers that lack their copies.
            queue = await self._catalog.underreplicated.list()
            self._named |= {node_id for one in queue for node_id in one.nodes}
            self._named_s = now_s
        known = {*await self._catalog.draining.known_nodes(), *self._named}
        self._absences.note(known, live, now_s)
        delays = (settings.lost_node_delay_s, settings.lost_node_delay_s + settings.grace_s)
        lost, lost_long = (self._absences.longer_than(delay_s, now_s) for delay_s in delays)
        gone = (lost, lost_long, frozenset(draining))
        is_old = now_s >= self._scan_due_s
        if any(gone) and (gone != self._scanned or is_old):
            if gone != self._scanned:
                log.info("auditor.nodes_gone", lost=sorted(lost), draining=sorted(draining))
            await self._scan(lost=lost, lost_long=lost_long, draining=draining)
            ended_s = self._clock.monotonic_s()
            # Of a cluster with very many ledgers, looking takes no more than a share of the time.
            pause_s = max(settings.scan_interval_s, SCAN_PAUSE_FACTOR * (ended_s - now_s))
            self._scanned, self._scan_due_s = gone, ended_s + pause_s
        due_s = self._absences.next_s(delays, self._clock.monotonic_s())
        return min(settings.interval_s, due_s) if due_s is not None else settings.interval_s

    async def _scan(
        self,
        *,
        lost: Collection[NodeId],
        lost_long: Collection[NodeId],
        draining: Collection[NodeId],
    ) -> None:
        """Report every ledger that names a node which is gone, or is to go."""
        named: set[NodeId] = set()
        reported = 0
        for ledger_id in await self._catalog.ledgers.list_ids():
            try:
                metadata = await self._catalog.ledgers.get(ledger_id)
            except (RetryableError, IndeterminateError):
                raise
            except TierlogError as error:
                # One ledger that can't be read keeps no other from being found.
                log.warning("auditor.ledger_unreadable", ledger_id=ledger_id, cause=str(error))
                continue
            if metadata is None:
                continue
            named |= named_nodes(metadata)
            complaints = complaints_of(metadata, lost=lost, lost_long=lost_long, draining=draining)
            for trouble, nodes in complaints.items():
                await self._catalog.underreplicated.add(ledger_id, reason=trouble, nodes=nodes)
                reported += 1
        self._named = frozenset(named)
        log.debug("auditor.scanned", reported=reported)
