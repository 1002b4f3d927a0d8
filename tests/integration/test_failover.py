"""Streams go on when their owner is killed, stopped or drained: three real nodes, 3/3/2.

A writer appends all the while, through the client as an application uses it. What it was told is
there stays there, once; the longest time without an acknowledgement is printed. ADR-0016 wants
5 s at most, and 1 s for a drain; the bounds asserted here leave room for machines that do other
work beside.
"""

# mypy: disable-error-code="union-attr,var-annotated"

import asyncio
import contextlib
import itertools
import signal
import sys
from collections import Counter

import pytest

from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.catalog import Catalog
from tierlog.client import open_client
from tierlog.model.ids import StreamName
from tierlog.wiring.build import open_metadata
from tierlog.wiring.client import open_client_connections

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STREAM = StreamName("failover")
GAP_S_MAX = 5.0
"""What is promised; a killed owner costs a tenth of it."""
GAP_S_SURE = 15.0
"""Any longer, and something waited for a deadline or a session."""


class Meter:
    """Appends numbered events one batch after the other, and notes when each is acknowledged."""

    def __init__(self, client):
        self.client = client
        self.stop = asyncio.Event()
        self.sent = 0
        self.acked = 0
        self.acked_s = []

    async def run(self):
        loop = asyncio.get_running_loop()
        async with self.client.writer(STREAM) as writer:
            while not self.stop.is_set():
                for _ in range(5):
                    await writer.send(event(self.sent))
                    self.sent += 1
                await writer.flush()
                self.acked = self.sent
                self.acked_s.append(loop.time())
                await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def beside(self):
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.run())
            try:
                yield self
            finally:
                self.stop.set()
            await asyncio.wait({running})

    async def got(self, count, *, seconds=60.0):
        """Wait for so many more acknowledgements."""
        wanted = self.acked + count
        async with asyncio.timeout(seconds):
            while self.acked < wanted:
                await asyncio.sleep(0.02)

    def gap_s(self, since_s):
        """Return the longest time without an acknowledgement from ``since_s`` on."""
        times = [since_s, *(one for one in self.acked_s if one >= since_s)]
        return max(after - before for before, after in itertools.pairwise(times))


def event(number):
    return b"%08d" % number + b"x" * (number % 300)


class World:
    """Three nodes, a client that knows them all, and the metadata."""

    def __init__(self, cluster, client, catalog):
        self.cluster = cluster
        self.client = client
        self.catalog = catalog

    def process_of(self, node_id):
        return f"ingest-{node_id.rpartition('-')[2]}"

    async def owner(self):
        """Return the process that owns the stream."""
        owner = (await self.catalog.streams.get(STREAM)).owner
        return self.process_of(owner.node_id) if owner is not None else None

    def signal(self, process, number):
        self.cluster.services.children[process].signal(number)

    async def check(self, meter):
        """All that was acknowledged is there, in order and once; nothing that was not sent."""
        await self.client.seal(STREAM)
        found = [int(one.payload[:8]) async for one in self.client.reader(STREAM).events()]
        assert [n for n, count in Counter(found).items() if count > 1] == []
        assert sorted(found) == list(range(meter.sent))
        assert meter.acked == meter.sent
        snapshot = await self.catalog.streams.snapshot(STREAM)
        assert all(one.closed for one in snapshot.ledgers)


@pytest.fixture
async def world(start_nodes):
    cluster = await start_nodes(3)
    addresses = ",".join(cluster.address(node, "grpc") for node in cluster.nodes)
    settings = cluster.settings.model_copy(
        update={"client": cluster.settings.client.model_copy(update={"ingest_address": addresses})}
    )
    async with open_client(settings) as client, open_metadata(settings) as store:
        catalog = Catalog.over(store, clock=SystemClock(), ids=SystemIds())
        yield World(cluster, client, catalog)


async def break_owner(world, meter, how, *, capsys, gap_s_max):
    """Break the owner in the middle of appends; return who owned before, once appends go on."""
    loop = asyncio.get_running_loop()
    await meter.got(200)
    broken = await world.owner()
    since_s = loop.time()
    how(broken)
    await meter.got(100)
    gap_s = meter.gap_s(since_s)
    with capsys.disabled():
        print(
            f"\n[failover] {how.__name__} of {broken}: {gap_s:.2f} s without acknowledgement",
            file=sys.stderr,
        )
    assert gap_s < gap_s_max
    assert await world.owner() != broken
    return broken


@pytest.mark.covers("D03", "D18")
async def test_the_owner_is_killed(world, capsys):
    def kill(process):
        world.cluster.kill(process)

    meter = Meter(world.client)
    async with meter.beside():
        killed = await break_owner(world, meter, kill, capsys=capsys, gap_s_max=GAP_S_MAX)
        await world.cluster.restart(killed)
        await break_owner(world, meter, kill, capsys=capsys, gap_s_max=GAP_S_MAX)
    await world.check(meter)


@pytest.mark.covers("D03", "D18")
async def test_the_owner_is_stopped_and_wakes_up_again(world, capsys):
    def stop(process):
        world.signal(process, signal.SIGSTOP)

    meter = Meter(world.client)
    async with meter.beside():
        stopped = await break_owner(world, meter, stop, capsys=capsys, gap_s_max=GAP_S_SURE)
        before = await world.catalog.streams.get(STREAM)
        world.signal(stopped, signal.SIGCONT)
        await meter.got(300)
        # It does not take the stream back: its claim is void.
        after = await world.catalog.streams.get(STREAM)
        assert (after.owner, after.owner_epoch) == (before.owner, before.owner_epoch)
    await world.check(meter)


async def test_the_owner_is_drained(world, capsys):
    def drain(process):
        world.signal(process, signal.SIGTERM)

    meter = Meter(world.client)
    async with meter.beside():
        drained = await break_owner(world, meter, drain, capsys=capsys, gap_s_max=5.0)
        assert await world.cluster.services.children[drained].wait() == 0
        await meter.got(100)
    await world.check(meter)


async def test_a_ledger_that_a_killed_owner_left_open_is_closed_without_an_append(world):
    async with world.client.writer(STREAM) as writer:
        await writer.send(b"left behind")
    killed = await world.owner()
    world.cluster.kill(killed)
    async with asyncio.timeout(60):
        while not all(one.closed for one in (await world.catalog.streams.get(STREAM)).ledgers):
            await asyncio.sleep(0.2)
    assert await world.owner() != killed
    events = [one.payload async for one in world.client.reader(STREAM).events()]
    assert [bytes(one) for one in events] == [b"left behind"]


async def test_a_client_that_knows_one_node_alone_follows_to_the_owner(world):
    settings = world.cluster.settings
    names = [StreamName(f"spread-{number}") for number in range(12)]
    owners = set()
    for node in world.cluster.nodes:
        async with open_client_connections(
            settings,
            ingest_grpc=world.cluster.address(node, "grpc"),
            reader_http="127.0.0.1:1",
            scheduler_http="127.0.0.1:1",
        ) as one:
            for name in names:
                await one.control.create_stream(name, raw=True, policy=None, exist_ok=True)
                owners.add((name, (await one.control.find_owner(name)).node_id))
    # Whoever is asked, the answer is the same, and every node has its share.
    assert len(owners) == len(names)
    assert {owner for _, owner in owners} == {"node-1", "node-2", "node-3"}
