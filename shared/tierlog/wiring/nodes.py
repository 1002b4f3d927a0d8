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
from tierlog.runtime.settings import WireSettings
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


def open_transport(settings: WireSettings) -> Transport:
    """Return TCP within the wire's limits."""
    frames = FrameLimits(
        frame_len_max=settings.frame_bytes_max, header_len_max=settings.header_bytes_max
    )
    return TcpTransport(limits=TcpLimits(frames=frames))


def wire_connector(
    transport: Transport,
) -> Callable[[Hello, asyncio.TaskGroup], NodeConnector[StorageNodeClient]]:
    """Return what makes clients of storage nodes that can write."""

    def connect(hello: Hello, tasks: asyncio.TaskGroup) -> NodeConnector[StorageNodeClient]:
        return _RemoteNodes(WireConnector(transport, hello, tasks=tasks))

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
