"""The admin REST API of the scheduler (seeds/000, "Triggering an offload").

Any scheduler answers, leader or not: what is read comes from the metadata, and what is wanted is
written there. Errors are problem+json with the reasons of the closed list.
"""

from typing import Annotated

from fastapi import Body, FastAPI, Path, Query

from tierlog.catalog import Catalog
from tierlog.catalog.ledgers import context_not_found
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LEDGER_ID_MAX, LedgerId, StreamName, stream_name
from tierlog.model.offload import OffloadState
from tierlog.model.partitions import is_partitioned, partition_names
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog_scheduler.documents import (
    LedgerAnswer,
    LedgerDocument,
    LedgerMetadataDocument,
    OffloadAnswer,
    OffloadDocument,
    OffloadRequestDocument,
    OffloadsAnswer,
    PolicyDocument,
    StreamDocument,
    StreamsAnswer,
    StreamSummary,
)
from tierlog_scheduler.scheduler import Scheduler

LedgerPath = Annotated[int, Path(ge=0, le=LEDGER_ID_MAX)]


class AdminApi:
    """The handlers, over the catalog and a scheduler."""

    def __init__(self, catalog: Catalog, scheduler: Scheduler) -> None:
        self._catalog = catalog
        self._scheduler = scheduler

    def add_routes(self, app: FastAPI) -> None:
        """Add the API to ``app``."""
        app.add_api_route("/v1/streams", self.streams, methods=["GET"])
        app.add_api_route("/v1/streams/{name}", self.stream, methods=["GET"])
        app.add_api_route("/v1/streams/{name}/offload", self.offload, methods=["POST"])
        app.add_api_route("/v1/ledgers/{ledger_id}", self.ledger, methods=["GET"])
        app.add_api_route("/v1/offloads", self.offloads, methods=["GET"])

    async def streams(self) -> StreamsAnswer:
        """List all streams."""
        names = await self._catalog.streams.names()
        found = [await self._snapshot_if_there(name) for name in names]
        return StreamsAnswer(
            streams=[
                StreamSummary.of(one, await self._ledgers(one)) for one in found if one is not None
            ]
        )

    async def _snapshot_if_there(self, name: StreamName) -> StreamSnapshot | None:
        """Return a stream; None: it was removed since its name was read."""
        try:
            return await self._catalog.streams.snapshot(name)
        except RefusedError as error:
            if error.reason is not Reason.STREAM_NOT_FOUND:
                raise
            return None

    async def _summary(self, name: StreamName) -> StreamSummary:
        snapshot = await self._catalog.streams.snapshot(name)
        return StreamSummary.of(snapshot, await self._ledgers(snapshot))

    async def stream(self, name: str) -> StreamDocument:
        """Show a stream and its ledgers: state, tiers, attempts, sizes."""
        snapshot = await self._catalog.streams.snapshot(stream_name(name))
        stream = snapshot.stream
        return StreamDocument(
            stream=stream.name,
            incarnation=str(stream.incarnation),
            lifecycle=stream.lifecycle.name,
            raw=stream.raw,
            created_ms=stream.created_ms,
            owner=stream.owner.node_id if stream.owner is not None else None,
            owner_epoch=stream.owner_epoch,
            offload_through=stream.offload_through,
            policy=PolicyDocument.of(snapshot.policy),
            ledgers=await self._ledgers(snapshot),
            partitions=stream.partitions,
            partition_streams=[await self._summary(one) for one in _partitions_of(stream)],
        )

    async def _ledgers(self, snapshot: StreamSnapshot) -> list[LedgerDocument]:
        return [
            LedgerDocument.of(one, await self._catalog.contexts.peek(one.ledger_id))
            for one in snapshot.ledgers
        ]

    async def ledger(self, ledger_id: LedgerPath) -> LedgerAnswer:
        """Show a ledger: its metadata and its offload context, which a bare ledger has not."""
        context = await self._catalog.contexts.get(LedgerId(ledger_id))
        metadata = await self._catalog.ledgers.get(LedgerId(ledger_id))
        if context is None:
            if metadata is None or not metadata.is_bare:
                raise context_not_found(LedgerId(ledger_id))
            return LedgerAnswer(
                ledger_id=ledger_id,
                stream=None,
                metadata=LedgerMetadataDocument.of(metadata),
                offload=None,
            )
        length = metadata.length if metadata is not None else None
        return LedgerAnswer(
            ledger_id=ledger_id,
            stream=context.stream,
            metadata=LedgerMetadataDocument.of(metadata) if metadata is not None else None,
            offload=OffloadDocument.of(context, length=length),
        )

    async def offload(
        self, name: str, wish: Annotated[OffloadRequestDocument | None, Body()] = None
    ) -> OffloadAnswer:
        """Offload every sealed ledger before a position, whatever the thresholds say."""
        text = wish.before if wish is not None else None
        before = Position.parse(text) if text is not None else None
        stream = (await self._catalog.streams.snapshot(stream_name(name))).stream
        if stream.partitions and before is not None:
            # A position is in one of them.
            raise is_partitioned(stream.name, stream.partitions)
        names = _partitions_of(stream) or [stream.name]
        done = await self._scheduler.offload_prefix(names, before)
        position = done[0].position if not stream.partitions else None
        return OffloadAnswer(
            stream=name,
            position=str(position) if position is not None else None,
            ledgers=[ledger_id for one in done for ledger_id in one.selected],
            requested=[ledger_id for one in done for ledger_id in one.requested],
        )

    async def offloads(
        self,
        stream: Annotated[str | None, Query()] = None,
        state: Annotated[str | None, Query()] = None,
    ) -> OffloadsAnswer:
        """List what is on its way to tier 2, or there: state, attempts, last error, leftovers."""
        if stream is not None:
            snapshots = [await self._catalog.streams.snapshot(stream_name(stream))]
        else:
            names = await self._catalog.streams.names()
            looked = [await self._snapshot_if_there(name) for name in names]
            snapshots = [one for one in looked if one is not None]
        found: list[OffloadDocument] = []
        for snapshot in snapshots:
            for listed in snapshot.ledgers:
                context = await self._catalog.contexts.peek(listed.ledger_id)
                if context is None or context.state is OffloadState.LOCAL:
                    continue
                if state is None or context.state.name == state.upper():
                    found.append(OffloadDocument.of(context, length=listed.length))
        return OffloadsAnswer(offloads=found)


def _partitions_of(stream: Stream) -> list[StreamName]:
    return partition_names(stream.name, stream.partitions) if stream.partitions else []
