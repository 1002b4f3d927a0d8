"""The public calls of ingest over gRPC: streams, their owners, and appends from any language."""

from typing import Any, Final, Protocol
from uuid import UUID

import grpc

from tierlog.catalog import Catalog
from tierlog.format.frame import pack_entries
from tierlog.format.records import policy_from_record
from tierlog.format.run import build_run
from tierlog.model.attributes import KEY_LEN, NO_EVENT_NUMBER, AttributeKey, is_core
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId, StreamName, stream_name
from tierlog.model.staging import ATTACHED_LEDGERS_MAX
from tierlog.ports.streams import (
    ATTRIBUTES_MAX,
    FIRST_KEY,
    LAST_KEY,
    Attachment,
    AttachOutcome,
    AttributeValues,
    OwnerInfo,
)
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc
from tierlog.proto.v1 import wire_pb2
from tierlog.wire.messages import condition_of
from tierlog_ingest.streams.owners import Owners

Context = grpc.aio.ServicerContext[Any, Any]

_OUTCOMES: Final = {
    AttachOutcome.ATTACHED: pb.ATTACH_OUTCOME_ATTACHED,
    AttachOutcome.THERE: pb.ATTACH_OUTCOME_THERE,
    AttachOutcome.IDS_TOO_LOW: pb.ATTACH_OUTCOME_IDS_TOO_LOW,
}


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
        condition = condition_of(request.condition) if request.HasField("condition") else None
        ranges = await self._owners.submit(name, draft, deadline_s=left_s, condition=condition)
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

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:  # noqa: N802
        """Make staging ledgers part of a stream."""
        del context
        outcome = await self._owners.attach(stream_name(request.stream), _attachment(request))
        return pb.AttachResponse(outcome=_OUTCOMES[outcome])

    async def GetAttributes(  # noqa: N802
        self, request: pb.GetAttributesRequest, context: Context
    ) -> pb.AttributesResponse:
        """Return values of attributes."""
        del context
        if len(request.keys) > ATTRIBUTES_MAX:
            raise RefusedError(
                f"{len(request.keys)} attributes are asked for",
                remedy=f"Ask for at most {ATTRIBUTES_MAX} at once",
            )
        keys = [_key(key) for key in request.keys]
        return _values(await self._owners.get_attributes(stream_name(request.stream), keys))

    async def ListAttributes(  # noqa: N802
        self, request: pb.ListAttributesRequest, context: Context
    ) -> pb.AttributesResponse:
        """Return the attributes between two keys."""
        del context
        first = _key(request.first_key) if request.first_key else FIRST_KEY
        last = _key(request.last_key) if request.last_key else LAST_KEY
        if not 0 < request.limit <= ATTRIBUTES_MAX:
            raise RefusedError(
                f"a limit of {request.limit} attributes",
                remedy=f"Give one of 1 to {ATTRIBUTES_MAX}",
            )
        name = stream_name(request.stream)
        return _values(await self._owners.list_attributes(name, first, last, request.limit))


def _attachment(request: pb.AttachRequest) -> Attachment:
    ledger_ids = tuple(LedgerId(one) for one in request.ledger_ids)
    if not 0 < len(ledger_ids) <= ATTACHED_LEDGERS_MAX:
        raise RefusedError(
            f"{len(ledger_ids)} ledgers to be attached at once",
            remedy=f"Attach 1 to {ATTACHED_LEDGERS_MAX}",
        )
    if list(ledger_ids) != sorted(set(ledger_ids)) or ledger_ids[0] < 0:
        raise RefusedError(
            "ledgers to be attached are out of order", remedy="Name each once, ascending by id"
        )
    writer = _key(request.writer_id)
    if is_core(writer) or request.number <= NO_EVENT_NUMBER:
        raise RefusedError(
            f"number {request.number} of writer {UUID(bytes=writer)} for ledgers to be attached",
            remedy="Number what a writer attaches from 1; its id is no core attribute's",
        )
    return Attachment(ledger_ids=ledger_ids, writer_id=UUID(bytes=writer), number=request.number)


def _key(key: bytes) -> AttributeKey:
    if len(key) != KEY_LEN:
        raise RefusedError(
            f"an attribute's key of {len(key)} bytes", remedy=f"Give {KEY_LEN} bytes"
        )
    return AttributeKey(key)


def _values(found: AttributeValues) -> pb.AttributesResponse:
    answer = pb.AttributesResponse()
    for key, value in found.values.items():
        answer.attributes.add(key=key, value=value)
    if found.as_of is not None:
        answer.as_of.ledger_id = found.as_of.ledger_id
        answer.as_of.entry_id = found.as_of.entry_id
    return answer


def register(
    server: grpc.aio.Server, *, catalog: Catalog, owners: Owners, finder: OwnerFinder
) -> None:
    """Add the calls of ingest to ``server``."""
    rpc.add_IngestServicer_to_server(IngestServicer(catalog, owners, finder), server)
