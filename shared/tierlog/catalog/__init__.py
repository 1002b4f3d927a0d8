"""Streams, ledgers, contexts and nodes in the metadata store, changed only by compare-and-set.

Owns every transaction of protocols.md sections 1 and 3 on metadata. Does not own what a change
is for: owners, workers, recovery and the scheduler ask for changes by name.

Invariants:
    * A change is planned from what was just read and refused if that has moved since.
    * A change whose answer was lost is decided by reading back, before anyone is told.
    * Unknown versions of a record are refused, never overwritten.
"""

from dataclasses import dataclass

from tierlog.catalog.attributes import AttributeCatalog
from tierlog.catalog.bare import BareLedgerCatalog
from tierlog.catalog.contexts import ContextCatalog
from tierlog.catalog.draining import DrainingCatalog
from tierlog.catalog.ledgers import LedgerCatalog
from tierlog.catalog.nodes import NodeCatalog
from tierlog.catalog.policies import PolicyCatalog
from tierlog.catalog.progress import ProgressCatalog
from tierlog.catalog.restore import RestoreCatalog
from tierlog.catalog.retention import RetentionCatalog
from tierlog.catalog.scrubs import ScrubCatalog
from tierlog.catalog.streams import StreamCatalog
from tierlog.catalog.underreplication import UnderReplicationCatalog
from tierlog.format import paths
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore


@dataclass(frozen=True, slots=True)
class Catalog:
    """The parts of the catalog over one client of the metadata store."""

    store: MetadataStore
    nodes: NodeCatalog
    streams: StreamCatalog
    ledgers: LedgerCatalog
    contexts: ContextCatalog
    progress: ProgressCatalog
    underreplicated: UnderReplicationCatalog
    draining: DrainingCatalog
    bare: BareLedgerCatalog
    policies: PolicyCatalog
    retention: RetentionCatalog
    restore: RestoreCatalog
    scrubs: ScrubCatalog
    attributes: AttributeCatalog

    @classmethod
    def over(cls, store: MetadataStore, *, clock: Clock, ids: Ids) -> "Catalog":
        """Build the catalog over ``store``."""
        return cls(
            store=store,
            nodes=NodeCatalog(store, clock=clock, ids=ids),
            streams=StreamCatalog(store, clock=clock, ids=ids),
            ledgers=LedgerCatalog(store, clock=clock, ids=ids),
            contexts=ContextCatalog(store, clock=clock, ids=ids),
            progress=ProgressCatalog(store, ids=ids),
            underreplicated=UnderReplicationCatalog(store, clock=clock, ids=ids),
            draining=DrainingCatalog(store, clock=clock, ids=ids),
            bare=BareLedgerCatalog(store, clock=clock, ids=ids),
            policies=PolicyCatalog(store, clock=clock, ids=ids),
            retention=RetentionCatalog(store, clock=clock, ids=ids),
            restore=RestoreCatalog(store, ids=ids),
            scrubs=ScrubCatalog(store, ids=ids),
            attributes=AttributeCatalog(store, clock=clock, ids=ids),
        )

    async def answers(self) -> bool:
        """Return True if the metadata store answers, or raise why not: for /readyz.

        A small question: everybody may ask it, and each process is asked every few seconds.
        """
        await self.store.get(paths.CLUSTER)
        return True


__all__ = [
    "AttributeCatalog",
    "BareLedgerCatalog",
    "Catalog",
    "ContextCatalog",
    "DrainingCatalog",
    "LedgerCatalog",
    "NodeCatalog",
    "PolicyCatalog",
    "ProgressCatalog",
    "RetentionCatalog",
    "ScrubCatalog",
    "StreamCatalog",
    "UnderReplicationCatalog",
]
