"""Drivers as the services choose them, and export copies, over real servers.

One cluster that first writes single objects, then Pulsar's two: what the first settings wrote is
read, exported and deleted after they changed.
"""

import uuid

import orjson
import pytest

from tests.unit.offload.test_drivers import Shelf
from tierlog.client import open_client
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.policy import MIB, Policy
from tierlog.wiring.objects import open_bucket
from tierlog.wiring.offload import open_offload_parts

pytestmark = [pytest.mark.integration]

STREAM = "driven"
EVENTS = [b"%08d" % number * 125 for number in range(6000)]
FEW = EVENTS[:10]


async def offloaded(client, events):
    """Append, seal and offload; return the ledger's context as REST tells it."""
    async with client.writer(STREAM) as writer:
        for event in events:
            await writer.send(event)
    await client.seal(STREAM)
    assert await client.offload_prefix(STREAM, timeout_s=120) is not None
    ledgers = [one for one in (await client.stream(STREAM))["ledgers"] if one["complete"]]
    return (await client.ledger(ledgers[-1]["ledger_id"]))["offload"]


async def until_local_copies_are_gone(cluster, client, count):
    async def gone():
        ledgers = [one for one in (await client.stream(STREAM))["ledgers"] if one["complete"]]
        states = [(await client.ledger(one["ledger_id"]))["offload"]["state"] for one in ledgers]
        return states == ["TIER1_DELETED"] * count

    await cluster.until(gone, what="the local copies are deleted")


async def lines_of(objects, key):
    found = await objects.get(key)
    assert found is not None
    return [orjson.loads(line) for line in found[1].splitlines()]


async def check_exports(cli, cluster, client, objects, single, two):
    """Look at the export of the setting, then make one by hand of what was copied before it."""
    exported = await lines_of(objects, f"{two['data_key']}-export.ndjson")
    assert [one["value"].encode() for one in exported] == FEW
    first = (await client.stream(STREAM))["ledgers"][0]["ledger_id"]
    state = cluster.state_dir
    done = await cli("offload", "export", str(first), "-o", "json", state_dir=state)
    told = orjson.loads(done.check(0).stdout)
    assert (told["events"], told["bucket"]) == (len(EVENTS), single["bucket"])
    assert told["bytes_sent"] >= told["length"]
    assert told["requests_sent"] > 3  # its upload alone takes three
    assert told["key"] == single["data_key"].removesuffix("-single") + "-export.ndjson"
    exported = await lines_of(objects, told["key"])
    assert [one["value"].encode() for one in exported] == EVENTS
    (await cli("offload", "export", "987654", state_dir=state)).check(3, "no ledger 987654")


@pytest.mark.covers("A21", "A22")
async def test_drivers_by_name_and_through_the_api(corner):
    async def writes(s3, **named):
        settings = corner.model_copy(update={"s3": corner.s3.model_copy(update=s3)})
        async with open_offload_parts(settings, **named) as parts:
            return parts.offloader.location(LedgerId(1), uuid.uuid4()).driver

    shelf = Shelf()
    assert await writes({}) == "aws-s3"
    assert await writes({"layout": "single-object"}) == "aws-s3-single-object"
    assert await writes({"driver": "S3", "export_events": True}) == "aws-s3"
    assert await writes({"driver": "shelf"}, drivers={"shelf": lambda _: shelf}) == "shelf"
    with pytest.raises(RefusedError, match="no offloader is configured"):
        await writes({"driver": "none"})
    with pytest.raises(RefusedError, match="there is no driver 'shelf'; there are S3, aws-s3"):
        await writes({"driver": "shelf"})


@pytest.mark.covers("B11", "B12", "B13", "B24")
async def test_a_stream_outlives_its_driver(cli, start_nodes):
    cluster = await start_nodes(1, TIERLOG_S3__LAYOUT="single-object")
    async with (
        open_client(cluster.settings) as client,
        open_bucket(cluster.settings, cluster.settings.s3.bucket) as objects,
    ):
        policy = Policy(block_size=5 * MIB, deletion_lag_ms=500)
        await client.create_stream(STREAM, policy=policy)
        single = await offloaded(client, EVENTS)
        assert single["data_key"] == single["index_key"]
        assert single["data_key"].endswith("-single")
        env = {"TIERLOG_S3__LAYOUT": "two-objects", "TIERLOG_S3__EXPORT_EVENTS": "true"}
        for service in ("offloader", "scheduler"):
            await cluster.restart(service, **env)
        two = await offloaded(client, FEW)
        assert two["index_key"] == f"{two['data_key']}-index"

        await until_local_copies_are_gone(cluster, client, 2)
        events = client.reader(STREAM).events()
        assert [bytes(one.payload) async for one in events] == [*EVENTS, *FEW]

        target = f"s3://{single['bucket']}/{single['data_key']}"
        done = await cli("object", "inspect", target, "-o", "json", state_dir=cluster.state_dir)
        report = orjson.loads(done.check(0).stdout)
        assert (report["kind"], report["sound"], len(report["blocks"])) == ("single", True, 2)
        assert report["blocks"][0]["offset"] == 5 * MIB

        await check_exports(cli, cluster, client, objects, single, two)
        done = await cli("scrub", "--deep", "-o", "json", state_dir=cluster.state_dir)
        assert orjson.loads(done.check(0).stdout)["findings"] == []
        await client.delete_stream(STREAM)

        async def all_gone():
            return not [info.key async for info in objects.list() if "-ledger-" in info.key]

        await cluster.until(all_gone, what="objects and exports are deleted", timeout_s=120)
