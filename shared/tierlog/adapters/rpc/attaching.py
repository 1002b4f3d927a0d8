"""Attaching staging ledgers over gRPC, at the stream's owner: ``AttachDesk`` (ADR-0031).

Owns the call and the translation of errors. Does not own trying again.
"""

from typing import Final
from uuid import UUID

import grpc

from tierlog.format.attribute_changes import attribute_key
from tierlog.model.errors import CorruptError
from tierlog.model.ids import StreamName
from tierlog.ports.streams import Attachment, AttachOutcome, StreamControl
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc
from tierlog.runtime.calling import Calling
from tierlog.runtime.errors import error_of_grpc
from tierlog.runtime.rpc import open_channel

_OUTCOMES: Final = {
    pb.ATTACH_OUTCOME_ATTACHED: AttachOutcome.ATTACHED,
    pb.ATTACH_OUTCOME_THERE: AttachOutcome.THERE,
    pb.ATTACH_OUTCOME_IDS_TOO_LOW: AttachOutcome.IDS_TOO_LOW,
}


class GrpcAttachDesk:
    """Asks the owner that ``control`` finds; a connection for each call, since they are rare."""

    def __init__(self, control: StreamControl, *, calling: Calling) -> None:
        self._control = control
        self._calling = calling

    def __repr__(self) -> str:
        return f"<GrpcAttachDesk {self._control!r}>"

    async def attach(
        self, stream: StreamName, wanted: Attachment, *, deadline_s: float
    ) -> AttachOutcome:
        """See ``AttachDesk``."""
        owner = await self._control.find_owner(stream)
        source = f"ingest at {owner.grpc_address}"
        request = pb.AttachRequest(
            stream=stream,
            ledger_ids=wanted.ledger_ids,
            writer_id=wanted.writer_id.bytes,
            number=wanted.number,
        )
        channel = open_channel(owner.grpc_address, self._calling)
        try:
            answer = await rpc.IngestStub(channel).Attach(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=source, changes=True) from error
        finally:
            await channel.close()
        outcome = _OUTCOMES.get(answer.outcome)
        if outcome is None:
            raise CorruptError(
                f"{source} names no outcome of an attach",
                remedy="Upgrade the ingest nodes to the version of this client",
            )
        return outcome

    async def number(self, stream: StreamName, writer_id: UUID) -> int:
        """See ``AttachDesk``."""
        key = attribute_key(writer_id)
        return (await self._control.get_attributes(stream, [key])).values.get(key, 0)
