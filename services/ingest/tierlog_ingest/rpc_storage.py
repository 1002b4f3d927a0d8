"""The storage node's small calls over gRPC; its runs travel over HTTP and on the wire."""

from typing import Any

import grpc

from tierlog.model.ids import LedgerId
from tierlog.model.spans import deltas_of_spans
from tierlog.ports.storage_node import StorageNodeControl
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc

Context = grpc.aio.ServicerContext[Any, Any]


class StorageNodeServicer(rpc.StorageNodeServicer):
    """Answers for one storage node. Errors travel by ``tierlog.runtime.rpc``."""

    def __init__(self, node: StorageNodeControl) -> None:
        self._node = node

    async def Fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:  # noqa: N802
        """Refuse ordinary adds of a ledger for ever."""
        del context
        answer = await self._node.fence(LedgerId(request.ledger_id))
        return pb.FenceResponse(
            last_add_confirmed=answer.last_add_confirmed, last_entry_id=answer.last_entry_id
        )

    async def GetLac(self, request: pb.GetLacRequest, context: Context) -> pb.GetLacResponse:  # noqa: N802
        """Return what the node knows of a ledger's end."""
        del context
        answer = await self._node.last_add_confirmed(LedgerId(request.ledger_id))
        return pb.GetLacResponse(
            last_add_confirmed=answer.last_add_confirmed,
            last_entry_id=answer.last_entry_id,
            doubtful=answer.doubtful,
        )

    async def ListLedgers(  # noqa: N802
        self, request: pb.ListLedgersRequest, context: Context
    ) -> pb.ListLedgersResponse:
        """Return the ledgers that the node holds entries of."""
        del request, context
        return pb.ListLedgersResponse(ledger_ids=await self._node.list_ledgers())

    async def GetHeldEntries(  # noqa: N802
        self, request: pb.GetHeldEntriesRequest, context: Context
    ) -> pb.GetHeldEntriesResponse:
        """Return which entries of a ledger the node holds."""
        del context
        spans = await self._node.held_entries(LedgerId(request.ledger_id))
        return pb.GetHeldEntriesResponse(deltas=deltas_of_spans(spans))


def register(server: grpc.aio.Server, node: StorageNodeControl) -> None:
    """Add the storage node's calls to ``server``."""
    rpc.add_StorageNodeServicer_to_server(StorageNodeServicer(node), server)
