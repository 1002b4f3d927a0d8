"""The reader's APIs over real processes: following into the tail, entries, times, explanations."""

import asyncio
import io
import json
import struct

import aiohttp
import grpc
import pyarrow as pa
import pytest

from tests.integration.test_exactly_once import tierlog
from tests.integration.test_reader_tiers import append, numbered, offloaded_and_gone
from tierlog.client import Position, open_client
from tierlog.model.policy import MIB, Policy
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog.proto.v1 import reader_pb2_grpc

pytestmark = [pytest.mark.integration]

MOVING = Policy(
    ledger_bytes_max=1 * MIB, block_size=5 * MIB, offload_size_bytes=0, deletion_lag_ms=300
)


def base_url(cluster):
    return f"http://{cluster.address('reader', 'http')}/v1/streams"


async def gauge(cluster, name):
    url = f"http://{cluster.address('reader', 'http')}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(name))


@pytest.fixture
async def small_cache(cluster):
    """A reader whose cache is a third of what is followed."""
    await cluster.restart("reader", TIERLOG_READER__CACHE_BYTES_MAX=str(4 * MIB))
    yield
    await cluster.restart("reader")


@pytest.mark.covers("A02", "C02", "C07")
@pytest.mark.usefixtures("small_cache")
async def test_followers_from_the_first_entry_run_into_the_tail_while_ledgers_move(cluster):
    """By the client and by `tierlog read --follow`: appended, offloaded and deleted beside them."""
    events = numbered(0, 12_000)
    async with open_client(cluster.settings) as client:
        await client.create_stream("moving", policy=MOVING)
        await append(client, "moving", events[:6000])

        async def in_tier_2_alone():
            ledgers = (await client.stream("moving"))["ledgers"]
            return sum(one["complete"] and not one["tier1"] for one in ledgers)

        async def first_ledgers_are():
            return await in_tier_2_alone() >= 2

        await cluster.until(first_ledgers_are, what="ledgers in tier 2 alone")
        before = await in_tier_2_alone()
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(_followed(client, len(events))) for _ in range(2)]
            printing = group.create_task(_printed(cluster, len(events)))
            async with client.writer("moving") as writer:
                for number in range(6000, len(events), 50):
                    for event in events[number : number + 50]:
                        await writer.send(event)
                    await writer.flush()
                    await asyncio.sleep(0.02)
        for reader in readers:
            found, tiers = reader.result()
            assert found == events
            assert {"tier2", "memory"} <= tiers
        assert printing.result() == events
        assert await in_tier_2_alone() > before, "ledgers went while they were read"
    assert await gauge(cluster, "tierlog_cache_overflow_bytes") == 0
    assert await gauge(cluster, "tierlog_cache_evictions_total") > 0, "not all of it fits"
    assert await gauge(cluster, "tierlog_reader_tail_hit_bytes_total") > 0


async def _followed(client, count):
    found, tiers = [], set()
    async for event in client.reader("moving", follow=True).events():
        found.append(event.payload)
        tiers.add(event.tier)
        if len(found) == count:
            return found, tiers
    raise AssertionError("a follower does not end")


async def _printed(cluster, count):
    arguments = ["read", "moving", "--from", "earliest", "--follow", "-n", str(count)]
    process = await tierlog(*arguments, state_dir=cluster.state_dir)
    try:
        out, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, told) == (0, b"")
    return out.splitlines()


async def test_entries_in_each_type_with_a_token_that_goes_on(cluster):
    events = numbered(0, 300)
    async with open_client(cluster.settings) as client:
        await client.create_stream("entries", policy=MOVING)
        await append(client, "entries", events, batch_bytes=5000)
        await offloaded_and_gone(cluster, client, "entries")
    url = f"{base_url(cluster)}/entries/entries"
    async with aiohttp.ClientSession() as session:
        found: list[dict[str, object]] = []
        token = "earliest"
        while True:
            async with session.get(url, params={"from": token, "limit": "7"}) as answer:
                token = answer.headers["Tierlog-Next"]
                if answer.status == 204:
                    break
                assert answer.headers["Content-Type"] == "application/x-ndjson"
                found += [json.loads(line) for line in (await answer.read()).splitlines()]
        assert [str(one["payload"]).encode() for one in found] == events
        assert {one["tier"] for one in found} == {"tier2"}
        octets = {"Accept": "application/octet-stream"}
        async with session.get(url, headers=octets) as answer:
            body, payloads = io.BytesIO(await answer.read()), []
            while head := body.read(4):
                payloads.append(body.read(struct.unpack(">I", head)[0]))
            assert payloads == events
        arrow = {"Accept": "application/vnd.apache.arrow.stream"}
        async with session.get(url, headers=arrow) as answer:
            table = pa.ipc.open_stream(await answer.read()).read_all()
            assert table.column("payload").to_pylist() == events


async def test_server_sent_events_follow_and_go_on_where_they_broke_off(cluster):
    async with open_client(cluster.settings) as client:
        await append(client, "sse", [b"one", b"two"])
        url = f"{base_url(cluster)}/sse/entries"
        headers = {"Accept": "text/event-stream"}
        async with aiohttp.ClientSession() as session:
            async with session.get(url, headers=headers) as answer:
                assert answer.headers["Content-Type"].startswith("text/event-stream")
                first = await _sse(answer, 2)
                await append(client, "sse", [b"three"])
                third = await _sse(answer, 1)
            assert [one["payload"] for _, one in first + third] == ["one", "two", "three"]
            await append(client, "sse", [b"four"])
            headers["Last-Event-ID"] = third[-1][0]
            async with session.get(url, headers=headers) as answer:
                assert [one["payload"] for _, one in await _sse(answer, 1)] == ["four"]


async def _sse(answer, count):
    found: list[tuple[str, dict[str, str]]] = []
    token = ""
    while len(found) < count:
        line = (await asyncio.wait_for(answer.content.readline(), 20)).decode().rstrip("\n")
        if line.startswith("id: "):
            token = line[4:]
        elif line.startswith("data: "):
            found.append((token, json.loads(line[6:])))
    return found


async def test_grpc_follows_and_its_token_goes_on_over_http(cluster):
    async with open_client(cluster.settings) as client:
        await append(client, "grpc-follow", [b"one", b"two"], raw=True)
        async with grpc.aio.insecure_channel(cluster.address("reader", "grpc")) as channel:
            stub = reader_pb2_grpc.ReaderStub(channel)
            call = stub.Follow(pb.FollowRequest(stream="grpc-follow", entries_max=3))
            found, token = [], ""
            async for answer in call:
                found += [entry.data for entry in answer.entries]
                token = answer.resume
                if len(found) == 2:
                    await append(client, "grpc-follow", [b"three", b"four"], raw=True)
            assert found == [b"one", b"two", b"three"]
            rest = stub.Follow(
                pb.FollowRequest(stream="grpc-follow", resume=token, stop_at_end=True)
            )
            assert [e.data async for answer in rest for e in answer.entries] == [b"four"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Follow(pb.FollowRequest(stream="nowhere")):
                    pass
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        url = f"{base_url(cluster)}/grpc-follow/entries"
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, params={"from": token}) as page,
        ):
            assert json.loads(await page.read())["payload"] == "four"


async def test_times_ranges_and_explanations(cluster):
    events = numbered(0, 200)
    async with open_client(cluster.settings) as client:
        await client.create_stream("times", policy=MOVING)
        await append(client, "times", events[:100])
        await asyncio.sleep(0.05)
        await append(client, "times", events[100:], batch_bytes=3000)
        found = [event async for event in client.reader("times").events()]
        middle = next(one for one in found if one.payload == events[100])
        for gone in (False, True):
            if gone:
                await offloaded_and_gone(cluster, client, "times")
            where = await client.position_at("times", str(middle.publish_time_ms))
            assert where == middle.position
            end = await client.position_at("times", "2100-01-01T00:00:00Z")
            assert isinstance(end, Position)
            assert end > middle.position
        told = await client.explain_read("times", str(middle.position))
        assert (told["tier"], told["first"]) == ("tier2", str(middle.position))
        assert told["requests"] + (told["cached_bytes"] > 0) >= 1
        assert any(step["what"] == "metadata" for step in told["steps"])
        raw = [b"%05d" % number for number in range(50)]
        await append(client, "raw-range", raw, raw=True)
        await client.seal("raw-range")
        ledger = (await client.stream("raw-range"))["ledgers"][0]
    url = f"{base_url(cluster)}/raw-range/ledgers/{ledger['ledger_id']}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers={"Range": "entries=10-12"}) as answer,
    ):
        assert (answer.status, await answer.read()) == (206, b"000100001100012")
        assert answer.headers["Content-Range"] == "entries 10-12/50"


async def test_the_command_line_seeks_explains_and_follows(cli, cluster):
    state = cluster.state_dir
    (await cli("append", "cli-seek", stdin=b"one\ntwo\n", state_dir=state)).check(0)
    lines = (await cli("read", "cli-seek", "-o", "jsonl", state_dir=state)).check(0).stdout
    published = json.loads(lines.splitlines()[0])["publish_time_ms"]
    at_time = ("read", "cli-seek", "--from", f"time:{published}")
    assert (await cli(*at_time, state_dir=state)).check(0).stdout == b"one\ntwo\n"
    later = ("read", "cli-seek", "--from", "time:2100-01-01T00:00:00Z")
    assert (await cli(*later, state_dir=state)).check(0).stdout == b""
    told = (await cli("read", "explain", "cli-seek", "-o", "json", state_dir=state)).check(0)
    document = json.loads(told.stdout)
    assert (document["tier"], document["tier_reason"]) == ("tier1", "the ledger is open")
    assert document["took_us"] >= document["steps"][0]["took_us"]
    table = (await cli("read", "explain", "cli-seek", state_dir=state)).check(0).stdout
    assert b"the ledger is open" in table
    assert b"metadata" in table
    (await cli("read", "other", "cli-seek", state_dir=state)).check(2, "two streams")
    (await cli("read", "cli-seek", "--from", "time:never", state_dir=state)).check(2, "not a time")
    followed = ("read", "cli-seek", "--follow", "-n", "2")
    assert (await cli(*followed, state_dir=state)).check(0).stdout == b"one\ntwo\n"
