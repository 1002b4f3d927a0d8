"""Who calls looks whom it reached (ADR-0007): a node of its own cluster, or nobody."""

import asyncio
from uuid import UUID

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.format.versions import Format, current
from tierlog.model.errors import RetryableError
from tierlog.proto.v1 import wire_pb2 as pb
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_OWNER

CLUSTER = UUID(int=7)
ADDRESS = "node:1"


@on_virtual_time
async def test_a_welcome_of_another_cluster_is_none():
    network = MemoryNetwork()

    async def serve(channel):
        await channel.receive()
        welcome = pb.WireWelcome(
            version=current(Format.WIRE), cluster_id=UUID(int=8).bytes, node_id="n1"
        )
        channel.send(pb.WireFrame(welcome=welcome).SerializeToString())
        await channel.receive()

    async with asyncio.TaskGroup() as tasks:
        listener = await network.transport("node").listen(ADDRESS, serve)
        with pytest.raises(RetryableError, match=f"{UUID(int=8)}, and not {CLUSTER}"):
            await WireClient.connect(
                network.transport("client"),
                ADDRESS,
                Hello(cluster_id=CLUSTER, role=ROLE_OWNER),
                tasks=tasks,
            )
        await listener.close()
