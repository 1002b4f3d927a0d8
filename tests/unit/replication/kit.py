"""A cluster in memory whose ledgers lack copies, and the workers and auditors of its processes."""

# mypy: disable-error-code="arg-type,union-attr"

from collections.abc import Collection

from tests.unit.ledger.small_cluster import STREAM, SmallCluster
from tests.unit.storage.node_kit import make_run
from tierlog.adapters.memory.faults import Faults
from tierlog.catalog import Catalog
from tierlog.format import paths, records
from tierlog.format.run import Run
from tierlog.ledger.shares import share_of
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.node import Cookie
from tierlog.model.spans import Spans, without
from tierlog.runtime.sections import ReplicationSettings
from tierlog_ingest.replication.auditor import Auditor
from tierlog_ingest.replication.worker import Owning, Worker

SETTINGS = ReplicationSettings(
    interval_s=1, lost_node_delay_s=30, grace_s=20, scan_interval_s=5, backoff_s_max=4
)
N1, N2, N3, N4 = (NodeId(f"n{number}") for number in range(1, 5))


class LackingCluster(SmallCluster):
    """Four nodes with identities; ledgers made by hand, whole or not."""

    def __init__(self, count: int = 4, *, seed: int = 1) -> None:
        super().__init__(count, seed=seed)
        self.sealed: list[str] = []
        self.recovered: list[LedgerId] = []

    async def begin(self) -> Catalog:
        """Start with identities, and a claimed stream."""
        catalog = await self.start()
        cluster = await catalog.nodes.ensure_cluster()
        for name in self.names:
            cookie = Cookie(
                cluster_id=cluster.cluster_id, node_id=name, instance_id=self.ids.uuid()
            )
            await catalog.store.create(paths.cookie_path(name), records.encode_cookie(cookie))
        return catalog

    async def ledger(
        self,
        catalog: Catalog,
        *,
        entries: int = 6,
        entry_bytes: int = 50,
        quorums: tuple[int, int, int] = (3, 3, 2),
        stripe_entries: int = 2**40,
        lacking: Collection[NodeId] = (),
        closed: bool = True,
    ) -> LedgerId:
        """Make a ledger of single entries; ``lacking`` nodes got none of them."""
        claimed = (await catalog.streams.snapshot(STREAM)).stream
        if claimed.owner is None:
            claimed = await catalog.streams.claim(STREAM, N1)
        ledger_id, metadata = await self.open_ledger(
            catalog, claimed, quorums=quorums, stripe_entries=stripe_entries
        )
        for entry in range(entries):
            for node_id in metadata.write_set(EntryId(entry)):
                if node_id not in lacking:
                    await self.nodes[node_id].add(make_run(ledger_id, entry, size=entry_bytes))
        if closed:
            await catalog.ledgers.close(
                claimed,
                ledger_id,
                last_entry_id=EntryId(entries - 1),
                length=entry_bytes * entries,
            )
        return ledger_id

    async def lose(self, catalog: Catalog, name: NodeId) -> None:
        """Let a node's process end; what it has stays on its disk."""
        self.nodes[name].down = True
        await catalog.store.delete(paths.available_path(name), version=-1)

    async def come_back(self, catalog: Catalog, name: NodeId) -> None:
        """Let a node's process start again."""
        self.nodes[name].down = False
        await catalog.nodes.announce(self.info(name))

    def worker(
        self,
        *,
        node_id: NodeId = N1,
        faults: Faults | None = None,
        settings: ReplicationSettings = SETTINGS,
    ) -> Worker:
        """Return the worker of one process."""

        async def seal(stream: str) -> None:
            self.sealed.append(stream)

        async def recover_bare(ledger_id: LedgerId) -> None:
            self.recovered.append(ledger_id)

        catalog = self.catalog(faults)
        return Worker(
            catalog,
            self.directory(catalog),
            Owning(node_id=node_id, seal=seal, recover_bare=recover_bare),
            clock=self.clock,
            ids=self.ids,
            settings=settings,
        )

    def auditor(self, faults: Faults | None = None) -> Auditor:
        """Return the auditor of one process."""
        catalog = self.catalog(faults)
        return Auditor(
            catalog,
            self.directory(catalog),
            clock=self.clock,
            ids=self.ids,
            settings=SETTINGS,
        )

    async def metadata_of(self, catalog: Catalog, ledger_id: LedgerId) -> LedgerMetadata:
        """Return a ledger's metadata."""
        metadata = await catalog.ledgers.get(ledger_id)
        assert metadata is not None
        return metadata

    async def lacks(self, catalog: Catalog, ledger_id: LedgerId) -> dict[NodeId, Spans]:
        """Return what each node of a ledger lacks of its share."""
        metadata = await self.metadata_of(catalog, ledger_id)
        found: dict[NodeId, Spans] = {}
        for at, segment in enumerate(metadata.segments):
            for place, name in enumerate(segment.ensemble):
                held = [(run.first_entry_id,) * 2 for run in self.runs(name, ledger_id)]
                lacking = without(share_of(metadata, at, place), sorted(held))
                if lacking:
                    found.setdefault(name, []).extend(lacking)
        return found

    def runs(self, name: NodeId, ledger_id: LedgerId) -> list[Run]:
        """Return the runs that a node has, by entry."""
        held = self.nodes[name].runs.get(ledger_id, {})
        return [held[first] for first in sorted(held)]
