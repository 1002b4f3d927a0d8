"""ADR-0016, "Partitions": events of a key are in one partition in order; a read is of all."""

import asyncio
import contextlib
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.adapters.memory.admin import MemoryAdministration
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.reads import MemoryReads
from tierlog.adapters.memory.streams import (
    MemoryAppendChannel,
    MemoryStreamControl,
    MemoryStreams,
)
from tierlog.client import Client, Edge, Position, StructuredEvent
from tierlog.client.partitioned import PartitionedWriter
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.partitions import partition_names, partition_of
from tierlog.runtime.settings import ClientSettings, Settings
from tierlog.wiring.compression import decompressors

ORDERS = StreamName("orders")


class Connections:
    """What a client talks through, in memory."""

    def __init__(self, **client: Any) -> None:
        self.settings = Settings(client=ClientSettings(**client))
        self.streams = MemoryStreams()
        self.control = MemoryStreamControl(self.streams)
        self.reads = MemoryReads(self.streams)
        self.admin = MemoryAdministration(self.streams)
        self.clock = SimClock()
        self.ids = SeededIds(random.Random(1))
        self.decompressors = decompressors()

    async def connect_owner(self, owner, tasks):
        return MemoryAppendChannel(self.streams)


@dataclass
class Opened:
    """A client, and what is behind it."""

    client: Client
    streams: MemoryStreams
    reads: MemoryReads


def opened(**client):
    connections = Connections(**client)
    return Opened(Client(cast("Any", connections)), connections.streams, connections.reads)


async def payloads(client, name, **options):
    return [one async for one in client.reader(name, **options).events()]


@pytest.mark.covers("A05")
@on_virtual_time
async def test_events_of_one_key_are_in_one_partition_in_order():
    on = opened(batch_bytes=30)
    await on.client.create_stream("orders", partitions=3)
    keys = [b"key-%d" % number for number in range(7)]
    async with on.client.writer("orders") as writer:
        assert isinstance(writer, PartitionedWriter)
        for number in range(100):
            key = keys[number % len(keys)]
            await writer.send(StructuredEvent(payload=b"%05d" % number, key=key))
        await writer.flush()
        assert (writer.acked_events, writer.acked_bytes, writer.in_flight_events) == (100, 500, 0)
        assert set(writer.last_positions) <= set(partition_names(ORDERS, 3))
    seen = defaultdict(list)
    for event in await payloads(on.client, "orders"):
        assert event.partition == partition_of(event.key, 3)
        seen[event.key].append(event.payload)
    for index, key in enumerate(keys):
        assert seen[key] == [b"%05d" % number for number in range(index, 100, len(keys))]


@on_virtual_time
async def test_a_key_can_be_given_beside_a_raw_event():
    on = opened()
    await on.client.create_stream("orders", raw=True, partitions=4)
    async with on.client.writer("orders", raw=True) as writer:
        await writer.send(b"x", key=b"one")
    (event,) = await payloads(on.client, "orders")
    assert (event.partition, event.payload) == (partition_of(b"one", 4), b"x")


@on_virtual_time
async def test_events_without_a_key_take_turns_and_share_entries():
    on = opened(batch_bytes=100 * 1000)
    await on.client.create_stream("orders", partitions=2)
    async with on.client.writer("orders") as writer:
        for number in range(400):
            await writer.send(b"%05000d" % number)
    found = await payloads(on.client, "orders")
    counts = [sum(one.partition == index for one in found) for index in range(2)]
    assert sorted(one.payload for one in found) == [b"%05000d" % number for number in range(400)]
    assert min(counts) >= 150
    assert len({one.position for one in found}) <= 100


@on_virtual_time
async def test_turns_are_what_they_were_when_a_state_was_stored():
    """By another measure, writers of earlier versions would pass over events that are nowhere."""
    on = opened()
    await on.client.create_stream("orders", partitions=3)
    async with on.client.writer("orders") as writer:
        for number in range(13):
            await writer.send(b"%0100000d" % number)
    found = {int(one.payload[-4:]): one.partition for one in await payloads(on.client, "orders")}
    assert [found[number] for number in range(13)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 1]


@on_virtual_time
async def test_a_partition_is_a_stream_like_any_other():
    on = opened()
    await on.client.create_stream("orders", partitions=2)
    async with on.client.writer("orders-partition-1") as writer:
        await writer.send(b"x")
    (event,) = await payloads(on.client, "orders-partition-1")
    assert event.partition is None
    assert await on.client.partitions("orders-partition-1") == ["orders-partition-1"]
    assert await on.client.partitions("orders") == partition_names(ORDERS, 2)
    assert await on.client.seal("orders-partition-1") == event.position.ledger_id


@on_virtual_time
async def test_names_and_writers_need_no_end_that_is_known_while_the_owner_is_gone():
    on = opened()
    await on.client.create_stream("orders-partition-1")

    async def no_end(stream):
        raise RetryableError(f"the end of {stream} is not known", remedy="Wait")

    on.reads.bounds = no_end
    assert await on.client.partitions("orders-partition-1") == ["orders-partition-1"]
    async with on.client.writer("orders-partition-1") as writer:
        await writer.send(b"y")
        assert await writer.flush() is not None


@on_virtual_time
async def test_a_raw_writer_does_not_get_into_partitions_that_are_not():
    on = opened()
    await on.client.create_stream("orders", partitions=2)
    with pytest.raises(RefusedError):
        async with on.client.writer("orders", raw=True):
            pass


async def filled(on, counts):
    await on.client.create_stream("orders", raw=True, partitions=len(counts))
    for name, count in zip(partition_names(ORDERS, len(counts)), counts, strict=True):
        if count:
            on.streams.store(name, [b"%s %d" % (name[-1].encode(), one) for one in range(count)])


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5, 9, 100])
def test_a_limit_counts_entries_of_all_partitions(limit):
    @on_virtual_time
    async def test():
        on = opened()
        await filled(on, [3, 0, 4])
        found = [one.payload for one in await payloads(on.client, "orders", limit=limit)]
        assert found == [b"0 0", b"0 1", b"0 2", b"2 0", b"2 1", b"2 2", b"2 3"][:limit]

    test()


@on_virtual_time
async def test_a_position_is_one_of_a_single_partition():
    on = opened()
    await filled(on, [1, 1])
    place = Position(LedgerId(0), EntryId(0))
    for options in ({"start": place}, {"until": place}):
        with pytest.raises(RefusedError) as caught:
            await payloads(on.client, "orders", **options)
        assert caught.value.reason is Reason.PARTITIONED
    with pytest.raises(RefusedError):
        await on.client.bounds("orders")


@on_virtual_time
async def test_following_gives_what_comes_to_any_partition_and_leaves_no_task():
    on = opened()
    await filled(on, [1, 1, 0])
    before = asyncio.all_tasks()
    reader = on.client.reader("orders", start=Edge.LATEST, follow=True, limit=3)
    async with asyncio.TaskGroup() as tasks, contextlib.aclosing(reader.events()) as events:

        async def append():
            for index in (2, 0, 2, 1):
                await asyncio.sleep(1)
                on.streams.store(partition_names(ORDERS, 3)[index], [b"new"])

        tasks.create_task(append())
        found = [(event.partition, event.payload) async for event in events]
    assert found == [(2, b"new"), (0, b"new"), (2, b"new")]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@on_virtual_time
async def test_whoever_follows_and_has_enough_leaves_no_task():
    on = opened()
    await filled(on, [1, 1])
    before = asyncio.all_tasks()
    async with contextlib.aclosing(on.client.reader("orders", follow=True).answers()) as answers:
        async for _ in answers:
            break
    assert asyncio.all_tasks() == before


@on_virtual_time
async def test_what_goes_wrong_in_one_partition_is_told():
    on = opened(timeout_s=1.0)
    await filled(on, [1, 1])
    del on.streams.by_name[partition_names(ORDERS, 2)[1]]
    for follow in (False, True):
        with pytest.raises(RefusedError) as caught:
            await payloads(on.client, "orders", follow=follow)
        assert caught.value.reason is Reason.STREAM_NOT_FOUND


@on_virtual_time
async def test_progress_is_that_of_all_partitions():
    told = []
    on = opened()
    await on.client.create_stream("orders", partitions=3)
    async with on.client.writer("orders", progress=lambda *one: told.append(one)) as writer:
        for number in range(30):
            await writer.send(StructuredEvent(payload=b"x", key=b"%d" % number))
    assert told[-1][1] == 30
    assert [one[1] for one in told] == sorted(one[1] for one in told)
