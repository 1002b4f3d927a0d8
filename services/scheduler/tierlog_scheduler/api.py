"""The admin REST API of the scheduler (seeds/000, "Triggering an offload").

Any scheduler answers, leader or not: what is read comes from the metadata, and what is wanted is
written there. Errors are problem+json with the reasons of the closed list.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final, TypeVar

from fastapi import Body, FastAPI, Path, Query

from tierlog.catalog import Catalog
from tierlog.catalog.ledgers import context_not_found
from tierlog.catalog.streams import StreamSnapshot
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LEDGER_ID_MAX, LedgerId, StreamName, stream_name
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.partitions import is_partitioned
from tierlog.model.position import Position
from tierlog.offload.groups import plain_errors
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
Asked = TypeVar("Asked")
Read = TypeVar("Read")

READS_AT_ONCE: Final = 64
"""Of the metadata, for one answer that tells of many ledgers."""


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
            partition_streams=[
                await self._summary(one) for one in await self._catalog.streams.partitions(stream)
            ],
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
        names = await self._catalog.streams.partitions(stream) or [stream.name]
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
        """List what is on its way to tier 2, or there: state, attempts, last error, leftovers.

        ``stream``: of it alone; of one with partitions, of them. ``state``: those in it alone;
        without one, all but ledgers that are LOCAL and were never tried.
        """
        wanted = _state_of(state) if state is not None else None
        if stream is not None:
            found = await self._catalog.streams.get(stream_name(stream))
            names = await self._catalog.streams.partitions(found) or [found.name]
        else:
            names = await self._catalog.streams.names()
        snapshots = await read_all(self._snapshot_if_there, names)
        listed = [one for snapshot in snapshots if snapshot is not None for one in snapshot.ledgers]
        contexts = await read_all(self._catalog.contexts.peek, [one.ledger_id for one in listed])
        return OffloadsAnswer(
            offloads=[
                OffloadDocument.of(context, length=one.length)
                for one, context in zip(listed, contexts, strict=True)
                if context is not None
                and (_was_tried(context) if wanted is None else context.state is wanted)
            ]
        )


async def read_all(read: Callable[[Asked], Awaitable[Read]], asked: Sequence[Asked]) -> list[Read]:
    """Return what is read of each, ``READS_AT_ONCE`` at a time."""

    async def one(of: Asked) -> Read:
        return await read(of)

    found: list[Read] = []
    for start in range(0, len(asked), READS_AT_ONCE):
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                some = asked[start : start + READS_AT_ONCE]
                tasks = [group.create_task(one(of)) for of in some]
        found += [task.result() for task in tasks]
    return found


def _was_tried(context: OffloadContext) -> bool:
    """Tell whether an offload of a ledger was ever begun, though it may be LOCAL again."""
    return context.state is not OffloadState.LOCAL or context.attempt_count > 0


def _state_of(text: str) -> OffloadState:
    """Return the state that is asked for; ``RefusedError`` when there is none of that name."""
    try:
        return OffloadState[text.upper()]
    except KeyError:
        raise RefusedError(
            f"there is no state {text!r} of an offload",
            remedy=f"Ask for one of: {', '.join(one.name for one in OffloadState)}",
        ) from None
