"""What this node does with requests on the wire: appends go to owners, runs to its storage.

Invariants:
    * Appends of one connection reach their streams' queues in the order in which they came.
    * Runs of other owners are taken for as long as the storage takes them, however many appends of
      this node wait: those wait for other nodes, and nodes that waited for each other's appends
      before they take each other's runs would all wait.
"""

import asyncio

from tierlog.format.run import Run
from tierlog.model.attributes import AppendCondition
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import AppendedRange
from tierlog_ingest.storage.node import StorageNode
from tierlog_ingest.streams.owners import Owners


class IngestWireHandler:
    """A ``tierlog.wire.server.WireHandler``."""

    def __init__(self, owners: Owners, node: StorageNode) -> None:
        self._owners = owners
        self._node = node

    async def ready(self, *, appends: bool) -> None:
        if appends:
            await self._owners.ready()
        await self._node.ready()

    def append(
        self,
        stream: StreamName,
        draft: Run,
        *,
        deadline_s: float | None,
        condition: AppendCondition | None,
    ) -> "asyncio.Future[list[AppendedRange]]":
        return self._owners.submit(stream, draft, deadline_s=deadline_s, condition=condition)

    def add_run(self, run: Run, *, recovery: bool) -> "asyncio.Future[None]":
        return self._node.add(run, recovery=recovery)

    def lac(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        self._node.confirm(ledger_id, last_add_confirmed)
