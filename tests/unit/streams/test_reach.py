"""Whether a node answers: by its greeting, within a second, whatever is registered."""

import asyncio
import uuid

from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.model.errors import RetryableError
from tierlog.model.ids import NodeId
from tierlog.model.node import NodeInfo
from tierlog.ports.transport import Channel
from tierlog.wire.auth import OpenAuthenticator, TokenAuthenticator
from tierlog.wire.connection import Hello
from tierlog.wire.messages import ROLE_OWNER
from tierlog.wire.server import WireServer
from tierlog_ingest.streams.reach import KNOWN_S_MAX, Reach

CLUSTER = uuid.UUID(int=1)


class Handler:
    """Takes no requests: nobody gets further than WELCOME here."""

    async def ready(self, *, appends):
        pass

    def append(self, stream, draft, *, deadline_s, condition):
        raise RetryableError("no")

    def add_run(self, run, *, recovery):
        raise RetryableError("no")

    def lac(self, ledger_id, last_add_confirmed):
        pass


class World:
    """One node that listens, and one that asks."""

    def __init__(self):
        self.network = MemoryNetwork()
        self.connections = 0
        self.silent: list[NodeId] = []
        self.reach = Reach(
            self.network.transport("asks"),
            Hello(cluster_id=CLUSTER, role=ROLE_OWNER),
            on_silent=self.silent.append,
        )
        self.info = NodeInfo(
            node_id=NodeId("n1"), wire_address="n1:1", grpc_address="n1:2", http_address="n1:3"
        )

    async def listen(self, *, authenticator=None, name="n1", cluster_id=CLUSTER):
        server = WireServer(
            Handler(),
            cluster_id=cluster_id,
            node_id=NodeId(name),
            authenticator=authenticator or OpenAuthenticator(),
        )

        async def serve(channel: Channel) -> None:
            self.connections += 1
            await server.serve(channel)

        return await self.network.transport("n1").listen("n1:1", serve)

    async def listen_in_silence(self):
        async def serve(channel: Channel) -> None:
            self.connections += 1
            await channel.receive()
            await asyncio.sleep(1000)

        return await self.network.transport("n1").listen("n1:1", serve)

    async def ask(self):
        """Return the answer and how long it took."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        answered = await self.reach.answers(self.info)
        return answered, round(loop.time() - begun_s, 1)


def test_a_node_that_greets_answers():
    async def main():
        world = World()
        listener = await world.listen()
        assert await world.ask() == (True, 0)
        await asyncio.sleep(1)
        assert len(world.network.channels) == 0
        await listener.close()

    run_virtual(main())


def test_a_node_that_is_gone_is_told_at_once_and_a_silent_one_within_a_second():
    async def main():
        world = World()
        assert await world.ask() == (False, 0)
        await asyncio.sleep(KNOWN_S_MAX)
        listener = await world.listen_in_silence()
        assert await world.ask() == (False, 1)
        assert world.silent == ["n1", "n1"]
        await listener.close()

    run_virtual(main())


def test_a_node_that_says_no_is_there():
    async def main():
        world = World()
        listener = await world.listen(authenticator=TokenAuthenticator(b"secret"))
        assert await world.ask() == (True, 0)
        await listener.close()

    run_virtual(main())


def test_another_node_at_the_address_is_not_the_one_that_was_asked_for():
    async def main():
        world = World()
        listener = await world.listen(name="n2")
        assert await world.ask() == (False, 0)
        await listener.close()

    run_virtual(main())


def test_a_node_of_another_cluster_at_the_address_is_not_the_one_that_was_asked_for():
    async def main():
        world = World()
        listener = await world.listen(cluster_id=uuid.UUID(int=2))
        assert await world.ask() == (False, 0)
        await listener.close()

    run_virtual(main())


def test_many_that_ask_at_once_cause_one_greeting_and_later_ones_another():
    async def main():
        world = World()
        listener = await world.listen_in_silence()
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(world.ask()) for _ in range(20)]
        assert {task.result() for task in asking} == {(False, 1)}
        assert world.connections == 1
        await listener.close()
        listener = await world.listen()
        await asyncio.sleep(KNOWN_S_MAX)
        assert await world.ask() == (True, 0)
        assert world.connections == 2
        await listener.close()

    run_virtual(main())
