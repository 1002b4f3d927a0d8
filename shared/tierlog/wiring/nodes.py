"""What a storage node, and whoever talks to one, stands on: disk, TCP, clients of other nodes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from tierlog.adapters.files import DiskFiles
from tierlog.adapters.rpc.storage_node import RemoteStorageNode, WireConnector
from tierlog.adapters.tcp import TcpLimits, TcpTransport
from tierlog.ledger.directory import NodeConnector
from tierlog.model.node import NodeInfo
from tierlog.ports.files import Files
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.ports.transport import Transport
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.sections import WireSettings
from tierlog.runtime.tls import ServerTls
from tierlog.wire.codec import FrameLimits
from tierlog.wire.connection import Hello


@contextlib.asynccontextmanager
async def open_files(root: Path) -> AsyncIterator[Files]:
    """Give the folder ``root``, made when it is missing, to this process alone."""
    files = DiskFiles(root)
    try:
        files.lock()
        yield files
    finally:
        files.close()


@contextlib.asynccontextmanager
async def open_all_files(roots: Sequence[Path]) -> AsyncIterator[tuple[Files, ...]]:
    """``open_files`` for several folders."""
    async with contextlib.AsyncExitStack() as stack:
        yield tuple([await stack.enter_async_context(open_files(root)) for root in roots])


def open_transport(
    settings: WireSettings, *, calling: Calling = PLAIN, tls: ServerTls | None = None
) -> Transport:
    """Return TCP within the wire's limits: calls as ``calling`` says, listens with ``tls``."""
    frames = FrameLimits(
        frame_len_max=settings.frame_bytes_max, header_len_max=settings.header_bytes_max
    )
    return TcpTransport(
        limits=TcpLimits(frames=frames),
        client_tls=calling.tls.context if calling.tls is not None else None,
        server_tls=tls.context(required=True) if tls is not None else None,
    )


def wire_connector(
    transport: Transport, calling: Calling = PLAIN
) -> Callable[[Hello, asyncio.TaskGroup], NodeConnector[StorageNodeClient]]:
    """Return what makes clients of storage nodes that can write."""

    def connect(hello: Hello, tasks: asyncio.TaskGroup) -> NodeConnector[StorageNodeClient]:
        return _RemoteNodes(WireConnector(transport, hello, tasks=tasks, calling=calling))

    return connect


class _RemoteNodes:
    """Closes what it connected, which is all that a directory hands back to it."""

    def __init__(self, connector: WireConnector) -> None:
        self._connector = connector

    async def connect(self, info: NodeInfo) -> StorageNodeClient:
        return await self._connector.connect(info)

    async def close(self, node: StorageNodeClient) -> None:
        assert isinstance(node, RemoteStorageNode)
        await self._connector.close(node)
