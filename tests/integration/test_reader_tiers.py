"""Protocols section 5, over real processes: append, seal, offload, local deletion, read back."""

import asyncio

import aiohttp
import grpc
import pytest

from tierlog.client import Edge, Position, open_client
from tierlog.client.reading import events_of
from tierlog.format.checksum import crc32c
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.policy import MIB, Policy
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog.proto.v1 import reader_pb2_grpc

pytestmark = [pytest.mark.integration]

SMALL = Policy(ledger_bytes_max=6 * MIB, block_size=5 * MIB, deletion_lag_ms=500)


def numbered(first, count, size=1000):
    return [f"{number:08d}".encode() * (size // 8) for number in range(first, first + count)]


async def append(client, stream, events, **named):
    async with client.writer(stream, **named) as writer:
        for event in events:
            await writer.send(event)
        return await writer.flush()


async def payloads(client, stream, **named):
    return [event.payload async for event in client.reader(stream, **named).events()]


async def offloaded_and_gone(cluster, client, stream):
    await client.seal(stream)
    await client.offload(stream)

    async def done():
        ledgers = (await client.stream(stream))["ledgers"]
        return all(one["complete"] and not one["tier1"] for one in ledgers)

    await cluster.until(done, what=f"{stream} in tier 2 alone")


@pytest.mark.covers("A02", "A04", "A09", "A19", "A33")
async def test_what_was_appended_reads_the_same_from_tier_1_and_from_tier_2_alone(cluster):
    events = numbered(0, 15_000)
    async with open_client(cluster.settings) as client:
        await client.create_stream("tiers", policy=SMALL)
        await append(client, "tiers", events)
        assert await payloads(client, "tiers") == events
        await offloaded_and_gone(cluster, client, "tiers")
        tiers = set()
        found = []
        async for event in client.reader("tiers").events():
            tiers.add(event.tier)
            found.append(event.payload)
        assert found == events
        assert tiers == {"tier2"}
        # And it goes on in tier 1, behind what is in tier 2.
        await append(client, "tiers", [b"more"])
        assert (await payloads(client, "tiers"))[-1] == b"more"


async def test_any_position_of_an_offloaded_ledger_can_be_read_alone(cluster):
    events = numbered(0, 2000, size=4000)
    async with open_client(cluster.settings) as client:
        await client.create_stream("random", raw=True, policy=SMALL)
        await append(client, "random", events, raw=True)
        await offloaded_and_gone(cluster, client, "random")
        ledgers = (await client.stream("random"))["ledgers"]
        assert len(ledgers) >= 2
        for ledger, number in ((0, 0), (0, 1311), (0, 700), (1, 0), (1, 400)):
            ledger_id = LedgerId(ledgers[ledger]["ledger_id"])
            before = sum(one["entries"] for one in ledgers[:ledger])
            start = Position(ledger_id, EntryId(number))
            assert (
                await payloads(client, "random", start=start, limit=3)
                == (events[before + number : before + number + 3])
            )


async def gauges(cluster):
    """Return the reader's metrics that have no labels."""
    url = f"http://{cluster.address('reader', 'http')}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        lines = (await answer.text()).splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


async def test_what_was_read_once_of_an_offloaded_stream_is_in_the_cache(cluster):
    events = numbered(0, 10_000)
    async with open_client(cluster.settings) as client:
        await client.create_stream("again", policy=SMALL)
        await append(client, "again", events)
        await offloaded_and_gone(cluster, client, "again")
        assert await payloads(client, "again") == events
        before = await gauges(cluster)
        assert await payloads(client, "again") == events
        after = await gauges(cluster)
    grown = {name: after[name] - before[name] for name in before if name.startswith("tierlog")}
    assert grown["tierlog_reader_range_bytes_fetched_total"] == 0
    assert grown["tierlog_cache_miss_bytes_total"] == grown["tierlog_cache_misses_total"] == 0
    assert grown["tierlog_cache_hits_total"] > 0
    assert grown['tierlog_read_duration_seconds_count{tier="tier2"}'] > 0
    assert grown["tierlog_cache_hit_bytes_total"] >= sum(map(len, events))
    used, limit = after['tierlog_cache_bytes{state="used"}'], after["tierlog_cache_limit_bytes"]
    assert sum(map(len, events)) < used <= limit
    assert after["tierlog_cache_generation"] >= before["tierlog_cache_generation"] >= 0


async def test_http_says_what_it_sends_and_problems_are_told(cluster):
    async with open_client(cluster.settings) as client:
        last = await append(client, "http", [b"one", b"two"])
    base = f"http://{cluster.address('reader', 'http')}/v1/streams"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{base}/http/runs", params={"from": "earliest"}) as answer:
            body = await answer.read()
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "application/vnd.tierlog.frames"
            assert answer.headers["Tierlog-Crc32c"] == f"{crc32c(body):08x}"
            assert answer.headers["Tierlog-Ledger-Id"] == str(last.ledger_id)
            assert answer.headers["Tierlog-Tier"] == "tier1"
            following = answer.headers["Tierlog-Next"]
        async with session.get(f"{base}/http/runs", params={"from": following}) as answer:
            assert (answer.status, await answer.read()) == (204, b"")
            assert answer.headers["Tierlog-Next"] == following
        problems = [
            (f"{base}/nowhere/runs", {}, 404, "STREAM_NOT_FOUND"),
            (f"{base}/http/runs", {"from": "999999:0"}, 404, "LEDGER_NOT_FOUND"),
            (f"{base}/http/runs", {"from": "x"}, 400, "INVALID_ARGUMENT"),
            (f"{base}/http/runs", {"bytes_max": "0"}, 400, "INVALID_ARGUMENT"),
            (f"{base}/bad%20name/bounds", {}, 400, "INVALID_ARGUMENT"),
        ]
        for url, params, status, reason in problems:
            async with session.get(url, params=params) as answer:
                problem = await answer.json(content_type="application/problem+json")
                assert (answer.status, problem["reason"]) == (status, reason)
                assert problem["remedy"]
        async with session.get(f"http://{cluster.address('reader', 'http')}/metrics") as answer:
            assert 'tierlog_read_entries_total{tier="tier1"}' in await answer.text()


async def test_grpc_reads_entries_and_bounds(cluster):
    async with open_client(cluster.settings) as client:
        last = await append(client, "grpc", [b"one"])
    async with grpc.aio.insecure_channel(cluster.address("reader", "grpc")) as channel:
        stub = reader_pb2_grpc.ReaderStub(channel)
        found = await stub.Read(pb.ReadRequest(stream="grpc"))
        assert len(found.entries) == 1
        assert found.next.entry_id == last.entry_id + 1
        bounds = await stub.GetBounds(pb.GetBoundsRequest(stream="grpc"))
        assert (bounds.first.ledger_id, bounds.next.entry_id) == (last.ledger_id, 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Read(pb.ReadRequest(stream="nowhere"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.covers("A02")
async def test_a_follower_sees_what_is_appended_while_it_reads(cluster):
    async with open_client(cluster.settings) as client, client.writer("follow") as writer:
        await writer.send(b"before")
        await writer.flush()
        found = []
        reader = client.reader("follow", start=Edge.EARLIEST, follow=True)
        async for event in reader.events():
            found.append(event.payload)
            if len(found) == 3:
                break
            await writer.send(b"after %d" % len(found))
            await writer.flush()
            await client.seal("follow")
    assert found == [b"before", b"after 1", b"after 2"]


async def test_what_is_wrong_with_a_position_is_told_apart(cluster):
    async with open_client(cluster.settings) as client:
        last = await append(client, "places", [b"one"])
        beyond = Position(last.ledger_id, EntryId(7))
        with pytest.raises(RetryableError) as not_yet:
            await payloads(client, "places", start=beyond)
        assert not_yet.value.reason is Reason.NOT_YET
        await client.seal("places")
        with pytest.raises(RefusedError) as caught:
            await payloads(client, "places", start=beyond)
        assert caught.value.reason is Reason.NO_SUCH_ENTRY


async def test_reading_goes_on_without_redis(cluster, servers):
    events = numbered(0, 100)
    async with open_client(cluster.settings) as client:
        await client.create_stream("no-redis", policy=SMALL)
        await append(client, "no-redis", events)
        await offloaded_and_gone(cluster, client, "no-redis")
        servers.kill("redis")
        try:
            assert await payloads(client, "no-redis") == events
        finally:
            await servers.restart("redis")
        assert await payloads(client, "no-redis") == events


async def test_an_ingest_that_is_killed_in_mid_append_loses_and_doubles_nothing(cluster):
    events = numbered(0, 20_000)
    async with open_client(cluster.settings) as client:
        await client.create_stream("crash", policy=SMALL)
        async with client.writer("crash") as writer:
            killed = False
            for event in events:
                await writer.send(event)
                if not killed and writer.acked_events > 5000 and writer.in_flight_events:
                    cluster.kill("ingest")
                    killed = True
                    await cluster.restart("ingest")
            await writer.flush()
        assert killed
        found = [
            event.payload
            async for entry in client.reader("crash").entries()
            for event in events_of(entry)
        ]
        assert found == events


async def test_reading_waits_out_an_object_store_that_is_away(cluster, servers):
    events = numbered(0, 3000)
    async with open_client(cluster.settings) as client:
        await client.create_stream("s3-away", policy=SMALL)
        await append(client, "s3-away", events)
        await offloaded_and_gone(cluster, client, "s3-away")
        # Another reader process, with nothing in its memory.
        await cluster.restart("reader")
        servers.kill("s3")
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(payloads(client, "s3-away"))
                await asyncio.sleep(3)
                assert not reading.done(), "away is neither empty nor an error at once"
                await servers.restart("s3")
            assert reading.result() == events
        finally:
            if not reading.done():
                await servers.restart("s3")


async def test_a_reader_of_a_stream_whose_owner_is_dead_gets_what_is_known(cluster):
    async with open_client(cluster.settings) as client:
        await append(client, "dead-owner", [b"one", b"two"])
        cluster.kill("ingest")
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(payloads(client, "dead-owner"))
                await asyncio.sleep(1)
                assert not reading.done(), "away is neither empty nor an error at once"
                await cluster.restart("ingest")
            assert reading.result() == [b"one", b"two"]
        finally:
            await cluster.restart("ingest")
