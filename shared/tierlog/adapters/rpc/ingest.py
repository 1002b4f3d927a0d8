"""The ingest service's small calls over gRPC: ``StreamControl`` of ``tierlog.ports.streams``.

Owns the stub, deadlines and the translation of errors. Does not own appends in bulk, which
travel on the wire, nor retries: what may have happened is told as ``IndeterminateError``.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tierlog.format.records import policy_to_record
from tierlog.model.attributes import AppendCondition, AttributeKey
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import AppendedRange, Position
from tierlog.ports.streams import (
    ATTRIBUTES_MAX,
    FIRST_KEY,
    LAST_KEY,
    AttributeValues,
    OwnerInfo,
)
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.errors import error_of_grpc
from tierlog.runtime.rpc import open_channel
from tierlog.wire.messages import condition_to_record

NO_LEDGER: Final = -1


class GrpcStreamControl:
    """Calls the ingest node at ``address`` (``host:port``); connects at the first call."""

    def __init__(self, address: str, *, timeout_s: float, calling: Calling = PLAIN) -> None:
        self._source = f"ingest at {address}"
        self._timeout_s = timeout_s
        self._calling = calling
        self._channel = open_channel(address, calling)
        self._calls = rpc.IngestStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __repr__(self) -> str:
        return f"<GrpcStreamControl {self._source}>"

    async def create_stream(
        self,
        stream: StreamName,
        *,
        raw: bool,
        policy: Policy | None,
        exist_ok: bool,
        partitions: int = 0,
    ) -> bool:
        """See ``StreamControl``."""
        record = policy_to_record(policy) if policy is not None else None
        request = pb.CreateStreamRequest(
            stream=stream, raw=raw, policy=record, exist_ok=exist_ok, partitions=partitions
        )
        try:
            answer = await self._calls.CreateStream(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._source, changes=True) from error
        return answer.created

    async def find_owner(self, stream: StreamName) -> OwnerInfo:
        """See ``StreamControl``."""
        try:
            answer = await self._calls.FindOwner(
                pb.FindOwnerRequest(stream=stream), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._source, changes=False) from error
        if len(answer.cluster_id) != 16:
            raise CorruptError(
                f"{self._source} names no cluster",
                remedy="Upgrade the ingest nodes to the version of this client",
            )
        cluster_id = UUID(bytes=answer.cluster_id)
        self._calling.check(str(cluster_id), where=self._source)
        return OwnerInfo(
            node_id=NodeId(answer.node_id),
            wire_address=answer.wire_address,
            grpc_address=answer.grpc_address,
            http_address=answer.http_address,
            owner_epoch=answer.owner_epoch,
            cluster_id=cluster_id,
        )

    async def answers(self) -> bool:
        """See ``NodeControl``."""
        try:
            answer = await self._health.Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(), timeout=self._timeout_s
            )
        except (grpc.aio.AioRpcError, RetryableError):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def seal(self, stream: StreamName) -> LedgerId | None:
        """See ``StreamControl``. Sealing twice does no harm, so a lost answer is a retry."""
        try:
            answer = await self._calls.Seal(pb.SealRequest(stream=stream), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._source, changes=False) from error
        return None if answer.ledger_id == NO_LEDGER else LedgerId(answer.ledger_id)

    async def get_attributes(
        self, stream: StreamName, keys: Sequence[AttributeKey]
    ) -> AttributeValues:
        """See ``StreamControl``."""
        request = pb.GetAttributesRequest(stream=stream, keys=keys)
        try:
            answer = await self._calls.GetAttributes(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._source, changes=False) from error
        return _attribute_values(answer)

    async def list_attributes(
        self,
        stream: StreamName,
        *,
        first: AttributeKey = FIRST_KEY,
        last: AttributeKey = LAST_KEY,
        limit: int = ATTRIBUTES_MAX,
    ) -> AttributeValues:
        """See ``StreamControl``."""
        request = pb.ListAttributesRequest(
            stream=stream, first_key=first, last_key=last, limit=limit
        )
        try:
            answer = await self._calls.ListAttributes(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._source, changes=False) from error
        return _attribute_values(answer)

    async def append(
        self,
        stream: StreamName,
        entries: Sequence[bytes],
        *,
        publish_ms: tuple[int, int] = (0, 0),
        condition: AppendCondition | None = None,
    ) -> list[AppendedRange]:
        """Append a few entries by gRPC, as a producer in another language does."""
        request = pb.AppendRequest(
            stream=stream,
            entries=entries,
            publish_time_ms_min=publish_ms[0],
            publish_time_ms_max=publish_ms[1],
            condition=condition_to_record(condition),
        )
        try:
            answer = await self._calls.Append(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._source, changes=True) from error
        return [
            AppendedRange(
                ledger_id=LedgerId(one.ledger_id),
                first_entry_id=EntryId(one.first_entry_id),
                last_entry_id=EntryId(one.last_entry_id),
            )
            for one in answer.ranges
        ]

    async def close(self) -> None:
        """See ``StreamControl``."""
        await self._channel.close()


def _attribute_values(answer: pb.AttributesResponse) -> AttributeValues:
    as_of = answer.as_of
    return AttributeValues(
        values={AttributeKey(one.key): one.value for one in answer.attributes},
        as_of=Position(LedgerId(as_of.ledger_id), EntryId(as_of.entry_id))
        if answer.HasField("as_of")
        else None,
    )
