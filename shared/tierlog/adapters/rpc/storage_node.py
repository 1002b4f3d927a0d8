"""A storage node of another process: small calls by gRPC, runs by HTTP, adds on the wire.

Invariants:
    * Every run's checksum is verified before it is handed on.
    * What came whole before a damaged run, or before a cut, is handed on; then comes the error.
    * A body of runs that was cut raises UNKNOWN; it never passes as a short one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Final

import aiohttp
import grpc

from tierlog.format.run import RUN_PREFIX_LEN, Run, take_runs
from tierlog.format.run_stream import END_MAGIC, END_MARK_LEN, check_end_mark
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.node import NodeInfo
from tierlog.ports.storage_node import LacAnswer
from tierlog.ports.transport import Transport
from tierlog.proto.v1 import ingest_pb2 as pb
from tierlog.proto.v1 import ingest_pb2_grpc as rpc
from tierlog.runtime.errors import error_of_grpc, error_of_problem
from tierlog.runtime.rpc import open_channel
from tierlog.wire.connection import Hello, WireClient

CALL_S_MAX: Final = 10.0
CONNECT_S_MAX: Final = 5.0
SILENCE_S_MAX: Final = 30.0
READ_BUFFER_BYTES: Final = 1024 * 1024
RUN_BYTES_MAX: Final = 2**31
PIECE_BYTES: Final = 1024 * 1024


class RemoteStorageControl:
    """``StorageNodeControl`` of a node in another process."""

    def __init__(self, info: NodeInfo) -> None:
        self._name = f"storage node {info.node_id}"
        self._base = f"http://{info.http_address}"
        self._channel = open_channel(info.grpc_address)
        self._calls = rpc.StorageNodeStub(self._channel)
        self._session = aiohttp.ClientSession(read_bufsize=READ_BUFFER_BYTES)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} {self._base}>"

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
        return LacAnswer(EntryId(answer.last_add_confirmed), EntryId(answer.last_entry_id))

    async def list_ledgers(self) -> list[LedgerId]:
        try:
            answer = await self._calls.ListLedgers(pb.ListLedgersRequest(), timeout=CALL_S_MAX)
        except grpc.aio.AioRpcError as error:
            raise error_of_grpc(error, source=self._name, changes=False) from error
        return [LedgerId(one) for one in answer.ledger_ids]

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
            "first": str(first_entry_id),
            "bytes_max": str(bytes_max),
            "wait_ms": str(int(wait_s * 1000)),
            "recovery": str(recovery).lower(),
        }
        if last_entry_id is not None:
            params["last"] = str(last_entry_id)
        timeout = aiohttp.ClientTimeout(connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX + wait_s)
        url = f"{self._base}/v1/ledgers/{ledger_id}/runs"
        try:
            async with self._session.get(url, params=params, timeout=timeout) as answer:
                if answer.status != 200:
                    body = await answer.content.read(READ_BUFFER_BYTES)
                    raise error_of_problem(body, status=answer.status, source=self._name)
                async for runs in _runs(answer.content):
                    yield runs
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise RetryableError(
                f"{self._name} broke off a read of ledger {ledger_id}: {type(error).__name__}",
                reason=Reason.UNKNOWN,
                remedy="Read on from there, or from another node",
            ) from error

    async def close(self) -> None:
        """Give the connections back."""
        await self._session.close()
        await self._channel.close()


async def _runs(content: aiohttp.StreamReader) -> AsyncIterator[list[Run]]:
    """Cut a body into runs, which stay views of the pieces in which it came."""
    count, rest = 0, memoryview(b"")
    while True:
        if len(rest) < END_MARK_LEN:
            rest = await _filled(content, rest, END_MARK_LEN)
        if bytes(rest[: len(END_MAGIC)]) == END_MAGIC:
            check_end_mark(bytes(rest[:END_MARK_LEN]), count)
            return
        taken = take_runs(rest, len_max=RUN_BYTES_MAX)
        if taken.runs:
            rest = rest[taken.length :]
            count += len(taken.runs)
            yield taken.runs
        elif taken.error is not None:
            raise taken.error
        else:
            wanted = RUN_PREFIX_LEN
            if len(rest) >= RUN_PREFIX_LEN:
                wanted = Run.encoded_len(rest[:RUN_PREFIX_LEN], len_max=RUN_BYTES_MAX)
            rest = await _filled(content, rest, wanted)


async def _filled(content: aiohttp.StreamReader, rest: memoryview, wanted: int) -> memoryview:
    """Return ``rest`` and what follows it: ``wanted`` bytes at least, else ``PIECE_BYTES``.

    Large pieces, since a run that is kept keeps its piece, with the cut run at the piece's end.
    """
    pieces: list[bytes | memoryview] = [rest]
    length = len(rest)
    while length < max(wanted, PIECE_BYTES):
        try:
            piece = await content.readany()
        except (aiohttp.ClientError, TimeoutError):
            if length < wanted:
                raise
            break  # what came is whole; the next read tells the error again
        if not piece:
            if length < wanted:
                raise asyncio.IncompleteReadError(b"", wanted - length)
            break
        pieces.append(piece)
        length += len(piece)
    return memoryview(b"".join(pieces))


class RemoteStorageNode(RemoteStorageControl):
    """``StorageNodeClient`` of a node in another process."""

    def __init__(self, info: NodeInfo, wire: WireClient) -> None:
        super().__init__(info)
        self._wire = wire

    def add(self, run: Run, *, recovery: bool = False) -> Awaitable[None]:
        return self._wire.add(run, recovery=recovery)

    def confirm(self, ledger_id: LedgerId, last_add_confirmed: EntryId) -> None:
        self._wire.confirm(ledger_id, last_add_confirmed)

    async def close(self) -> None:
        await self._wire.close()
        await super().close()


class ControlConnector:
    """Connects for reading only."""

    async def connect(self, info: NodeInfo) -> RemoteStorageControl:
        """Return a client; it connects at its first call."""
        return RemoteStorageControl(info)

    async def close(self, node: RemoteStorageControl) -> None:
        """Give a client back."""
        await node.close()


class WireConnector:
    """Connects for writing too; answers are read in tasks of ``tasks``."""

    def __init__(self, transport: Transport, hello: Hello, *, tasks: asyncio.TaskGroup) -> None:
        self._transport = transport
        self._hello = hello
        self._tasks = tasks

    async def connect(self, info: NodeInfo) -> RemoteStorageNode:
        """Connect to the node's wire address, or raise UNAVAILABLE."""
        wire = await WireClient.connect(
            self._transport, info.wire_address, self._hello, tasks=self._tasks
        )
        return RemoteStorageNode(info, wire)

    async def close(self, node: RemoteStorageNode) -> None:
        """Give a client back."""
        await node.close()
