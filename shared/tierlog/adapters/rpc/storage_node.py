"""A storage node of another process: small calls by gRPC, runs by HTTP, adds on the wire.

Invariants:
    * Every run's checksum is verified before it is handed on.
    * What came whole before a damaged run, or before a cut, is handed on; then comes the error.
    * A body of runs that was cut raises UNKNOWN; it never passes as a short one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import Final
from urllib.parse import urlencode

import grpc

from tierlog.adapters.pieces import Pieces
from tierlog.adapters.rpc.run_http import BrokenHttpError, RunsHttp
from tierlog.adapters.rpc.run_inflow import receiving_pieces
from tierlog.format.run import Run
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.node import NodeInfo
from tierlog.model.spans import Spans, spans_of_deltas
from tierlog.ports.storage_node import LacAnswer
from tierlog.ports.transport import Transport
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.errors import error_of_grpc
from tierlog.runtime.rpc import open_channel
from tierlog.wire.connection import Hello, WireClient

CALL_S_MAX: Final = 10.0
CONNECT_S_MAX: Final = 5.0
SILENCE_S_MAX: Final = 30.0


class RemoteStorageControl:
    """``StorageNodeControl`` of a node in another process."""

    def __init__(
        self, info: NodeInfo, pieces: Pieces | None = None, *, calling: Calling = PLAIN
    ) -> None:
        self._name = f"storage node {info.node_id}"
        self._channel = open_channel(info.grpc_address, calling)
        self._calls = rpc.StorageNodeStub(self._channel)
        self._runs = RunsHttp(
            info.http_address,
            source=self._name,
            connect_s_max=CONNECT_S_MAX,
            pieces=pieces,
            calling=calling,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}>"

    async def fence(self, ledger_id: LedgerId) -> LacAnswer:
        # Fencing twice is fencing once, so a lost answer is a plain retry.
        try:
            answer = await self._calls.Fence(
                pb.FenceRequest(ledger_id=ledger_id), timeout=CALL_S_MAX
            )
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._name, changes=False) from error
        return LacAnswer(EntryId(answer.last_add_confirmed), EntryId(answer.last_entry_id))

    async def last_add_confirmed(self, ledger_id: LedgerId) -> LacAnswer:
        try:
            answer = await self._calls.GetLac(
                pb.GetLacRequest(ledger_id=ledger_id), timeout=CALL_S_MAX
            )
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._name, changes=False) from error
        return LacAnswer(
            EntryId(answer.last_add_confirmed), EntryId(answer.last_entry_id), answer.doubtful
        )

    async def list_ledgers(self) -> list[LedgerId]:
        try:
            answer = await self._calls.ListLedgers(pb.ListLedgersRequest(), timeout=CALL_S_MAX)
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._name, changes=False) from error
        return [LedgerId(one) for one in answer.ledger_ids]

    async def held_entries(self, ledger_id: LedgerId) -> Spans:
        try:
            answer = await self._calls.GetHeldEntries(
                pb.GetHeldEntriesRequest(ledger_id=ledger_id), timeout=CALL_S_MAX
            )
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._name, changes=False) from error
        return spans_of_deltas(answer.deltas)

    async def read(
        self,
        ledger_id: LedgerId,
        first_entry_id: EntryId,
        *,
        last_entry_id: EntryId | None = None,
        bytes_max: int,
        wait_s: float = 0.0,
        recovery: bool = False,
    ) -> AsyncIterator[Sequence[Run]]:
        params = {
            "first": first_entry_id,
            "bytes_max": bytes_max,
            "wait_ms": int(wait_s * 1000),
            "recovery": str(recovery).lower(),
        }
        if last_entry_id is not None:
            params["last"] = last_entry_id
        target = f"/v1/ledgers/{ledger_id}/runs?{urlencode(params)}"
        read = self._runs.get(target, silence_s_max=SILENCE_S_MAX + wait_s)
        begun = False
        try:
            async with aclosing(read):
                async for runs in read:
                    begun = True
                    yield runs
        except (OSError, TimeoutError, BrokenHttpError) as error:
            raise RetryableError(
                f"{self._name} broke off a read of ledger {ledger_id}: {type(error).__name__}",
                # Before the first runs it may be that the node is elsewhere by now.
                reason=Reason.UNKNOWN if begun else Reason.UNAVAILABLE,
                remedy="Read on from there, or from another node",
            ) from error

    async def close(self) -> None:
        """Give the connections back."""
        await self._runs.close()
        await self._channel.close()


class RemoteStorageNode(RemoteStorageControl):
    """``StorageNodeClient`` of a node in another process."""

    def __init__(
        self,
        info: NodeInfo,
        wire: WireClient,
        pieces: Pieces | None = None,
        *,
        calling: Calling = PLAIN,
    ) -> None:
        super().__init__(info, pieces, calling=calling)
        self._wire = wire

    def add(self, run: Run, *, recovery: bool = False) -> Awaitable[None]:
        return self._wire.add(run, recovery=recovery)

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        self._wire.confirm(ledger_id, last_add_confirmed)

    async def close(self) -> None:
        try:
            # Given back it is once all is answered, or because the node says nothing any more.
            await self._wire.close(drain_s_max=0)
        finally:
            await super().close()


class ControlConnector:
    """Connects for reading only. Runs of all nodes are received into the same pieces."""

    def __init__(self, pieces: Pieces | None = None, *, calling: Calling = PLAIN) -> None:
        self._pieces = pieces if pieces is not None else receiving_pieces()
        self._calling = calling

    async def connect(self, info: NodeInfo) -> RemoteStorageControl:
        """Return a client; it connects at its first call."""
        return RemoteStorageControl(info, self._pieces, calling=self._calling)

    async def close(self, node: RemoteStorageControl) -> None:
        """Give a client back."""
        await node.close()


class WireConnector:
    """Connects for writing too; answers are read in tasks of ``tasks``."""

    def __init__(
        self,
        transport: Transport,
        hello: Hello,
        *,
        tasks: asyncio.TaskGroup,
        calling: Calling = PLAIN,
    ) -> None:
        self._calling = calling.within(hello.cluster_id)
        self._transport = transport
        self._hello = hello
        self._tasks = tasks
        self._pieces = receiving_pieces()

    async def connect(self, info: NodeInfo) -> RemoteStorageNode:
        """Connect to the node's wire address, or raise UNAVAILABLE."""
        wire = await WireClient.connect(
            self._transport, info.wire_address, self._hello, tasks=self._tasks
        )
        if wire.welcome.node_id != info.node_id:
            await wire.close(drain_s_max=0)
            raise RetryableError(
                f"node {wire.welcome.node_id} answers at {info.wire_address}, which was that of "
                f"storage node {info.node_id}",
                remedy="Start that node, or wait until it has registered with its new address",
                details={"node_id": info.node_id},
            )
        return RemoteStorageNode(info, wire, self._pieces, calling=self._calling)

    async def close(self, node: RemoteStorageNode) -> None:
        """Give a client back."""
        await node.close()
