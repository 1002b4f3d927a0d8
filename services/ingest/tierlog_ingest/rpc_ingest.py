"""The public calls of ingest over gRPC: streams, their owners, and appends from any language."""

from typing import Any, Protocol

import grpc

from tierlog.catalog import Catalog
from tierlog.format.frame import pack_entries
from tierlog.format.records import policy_from_record
from tierlog.format.run import build_run
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId, StreamName, stream_name
from tierlog.ports.streams import OwnerInfo
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc
from tierlog.proto.v1 import wire_pb2
from tierlog_ingest.streams.owners import Owners

Context = grpc.aio.ServicerContext[Any, Any]


class OwnerFinder(Protocol):
    """Finds, or becomes, the owner of a stream."""

    async def find_owner(self, stream: StreamName) -> OwnerInfo:
        """Return the stream's owner."""
        ...


class IngestServicer(rpc.IngestServicer):
    """Answers for one node. Errors travel by ``tierlog.runtime.rpc``."""

    def __init__(self, catalog: Catalog, owners: Owners, finder: OwnerFinder) -> None:
        self._catalog = catalog
        self._owners = owners
        self._finder = finder

    async def CreateStream(  # noqa: N802
        self, request: pb.CreateStreamRequest, context: Context
    ) -> pb.CreateStreamResponse:
        """Create a stream, or find the one of that name and shape."""
        del context
        name = stream_name(request.stream)
        policy = policy_from_record(request.policy) if request.HasField("policy") else None
        stream, created = await self._catalog.streams.create(
            name, raw=request.raw, policy=policy, partitions=request.partitions
        )
        if not created and not request.exist_ok:
            raise RefusedError(
                f"stream {name} exists already", remedy="Use another name, or set exist_ok"
            )
        return pb.CreateStreamResponse(incarnation=stream.incarnation.bytes, created=created)

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:  # noqa: N802
        """Append entries; bulk producers use the wire."""
        name = stream_name(request.stream)
        if not request.entries:
            raise RefusedError("an append without entries", remedy="Send at least one entry")
        frames, offsets = pack_entries(request.entries)
        low, high = request.publish_time_ms_min, request.publish_time_ms_max
        if not 0 <= low <= high:
            raise RefusedError(
                f"publish times {low} to {high} are out of order",
                remedy="Send the smallest and the largest publish time in ms, or neither",
            )
        draft = build_run(frames, offsets, publish_ms_min=low, publish_ms_max=high)
        await self._owners.ready()
        left_s = context.time_remaining()
        ranges = await self._owners.submit(name, draft, deadline_s=left_s)
        return pb.AppendResponse(
            ranges=[
                wire_pb2.AppendedRange(
                    ledger_id=one.ledger_id,
                    first_entry_id=one.first_entry_id,
                    last_entry_id=one.last_entry_id,
                )
                for one in ranges
            ]
        )

    async def FindOwner(  # noqa: N802
        self, request: pb.FindOwnerRequest, context: Context
    ) -> pb.FindOwnerResponse:
        """Return who may append to a stream; this node itself where nobody alive may."""
        del context
        owner = await self._finder.find_owner(stream_name(request.stream))
        return pb.FindOwnerResponse(
            node_id=owner.node_id,
            wire_address=owner.wire_address,
            grpc_address=owner.grpc_address,
            http_address=owner.http_address,
            owner_epoch=owner.owner_epoch,
            cluster_id=owner.cluster_id.bytes,
        )

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealResponse:  # noqa: N802
        """Close the stream's open ledger."""
        del context
        sealed = await self._owners.seal(stream_name(request.stream))
        return pb.SealResponse(ledger_id=LedgerId(-1) if sealed is None else sealed)


def register(
    server: grpc.aio.Server, *, catalog: Catalog, owners: Owners, finder: OwnerFinder
) -> None:
    """Add the calls of ingest to ``server``."""
    rpc.add_IngestServicer_to_server(IngestServicer(catalog, owners, finder), server)
