"""What bare ledgers stand on: the metadata store alone; it names the storage nodes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import UUID

from tierlog.catalog import Catalog
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import LedgerKeys
from tierlog.ledger.reader import OnDamage, log_damage
from tierlog.ledger.recovery import Recovery
from tierlog.model.errors import RetryableError
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.runtime.settings import Settings
from tierlog.wire.connection import Hello
from tierlog.wire.messages import ROLE_OWNER
from tierlog.wiring.build import open_metadata, system_clock, system_ids
from tierlog.wiring.keys import ledger_keys
from tierlog.wiring.nodes import open_transport, wire_connector
from tierlog.wiring.security import calling_of, wire_credentials
from tierlog.wiring.tier1 import reporting_damage


@dataclass(frozen=True, slots=True)
class LedgerParts:
    """The parts that whoever writes and reads ledgers by itself puts together."""

    catalog: Catalog
    nodes: NodeDirectory[StorageNodeClient]
    recovery: Recovery
    keys: LedgerKeys
    clock: Clock
    ids: Ids
    cluster_id: UUID
    on_damage: OnDamage = log_damage


@contextlib.asynccontextmanager
async def open_ledger_parts(
    settings: Settings, tasks: asyncio.TaskGroup
) -> AsyncIterator[LedgerParts]:
    """Connect to the metadata store; to storage nodes at their first use, in ``tasks``."""
    async with open_metadata(settings) as store:
        clock, ids, keys = system_clock(), system_ids(), ledger_keys(settings)
        catalog = Catalog.over(store, clock=clock, ids=ids)
        cluster = await catalog.nodes.cluster()
        if cluster is None:
            raise RetryableError(
                f"there is no cluster in ZooKeeper at {settings.zookeeper.hosts}",
                remedy="Correct TIERLOG_ZOOKEEPER__HOSTS, with its root; or start ingest nodes",
            )
        calling = calling_of(settings.security)
        hello = Hello(
            cluster_id=cluster.cluster_id,
            role=ROLE_OWNER,
            client_name="ledger-client",
            show=wire_credentials(settings, calling),
        )
        transport = open_transport(settings.wire, calling=calling)
        connector = wire_connector(transport, calling)(hello, tasks)
        nodes: NodeDirectory[StorageNodeClient] = NodeDirectory(catalog.nodes.live, connector)
        recovery = Recovery(catalog, nodes, ids=ids, keys=keys)
        try:
            async with reporting_damage(catalog) as reports:
                yield LedgerParts(
                    catalog, nodes, recovery, keys, clock, ids, cluster.cluster_id, reports
                )
        finally:
            await nodes.close()
