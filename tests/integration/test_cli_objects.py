"""``tierlog object inspect``, on objects that a real offload wrote, and on what is none."""

import os

import orjson
import pytest

from tierlog.client import open_client
from tierlog.model.policy import MIB, Policy
from tierlog.wiring.objects import open_bucket

pytestmark = [pytest.mark.integration]


async def offloaded(cluster, stream):
    """Offload a ledger of 6 MB; return its context as REST tells it."""
    async with open_client(cluster.settings) as client:
        await client.create_stream(stream, policy=Policy(block_size=5 * MIB))
        async with client.writer(stream) as writer:
            for number in range(6000):
                await writer.send(b"%08d" % number * 125)
        await client.seal(stream)
        await client.offload(stream)

        async def done():
            return all(one["complete"] for one in (await client.stream(stream))["ledgers"])

        await cluster.until(done, what="offloaded")
        ledger_id = (await client.stream(stream))["ledgers"][0]["ledger_id"]
        return (await client.ledger(ledger_id))["offload"]


@pytest.mark.covers("A39", "A40")
async def test_objects_in_s3_and_copies_of_them_that_are_damaged(cli, cluster, tmp_path):
    state = cluster.state_dir
    found = await offloaded(cluster, "cli-inspect")
    documents = {}
    for name in ("data_key", "index_key", "side_key"):
        target = f"s3://{found['bucket']}/{found[name]}"
        done = (await cli("object", "inspect", target, "-o", "json", state_dir=state)).check(0)
        documents[name] = orjson.loads(done.stdout)
    data, index = documents["data_key"], documents["index_key"]
    assert (data["kind"], data["sound"], len(data["blocks"])) == ("data", True, 2)
    assert (index["kind"], index["sound"]) == ("index", True)
    side = documents["side_key"]
    assert (side["kind"], side["sound"]) == ("side", True)
    assert {"offset": 0, "length": 4, "name": "index_magic_word", "value": "de47de47"} in (
        index["fields"]
    )
    target = f"s3://{found['bucket']}/{found['index_key']}"
    table = (
        (await cli("object", "inspect", target, "--hexdump", state_dir=state))
        .check(0)
        .stdout.decode()
    )
    assert "index_magic_word" in table
    assert "00000000  de 47 de 47" in table
    async with open_bucket(cluster.settings, found["bucket"]) as objects:
        got = await objects.get(found["data_key"])
        assert got is not None
        body = got[1]
    path = tmp_path / "object"
    for damaged in (
        body[:-1],  # cut
        body[:130] + b"\x7f" + body[131:],  # a frame's length
        body[:17] + b"\x40" + body[18:],  # the block's length
    ):
        path.write_bytes(damaged)
        (await cli("object", "inspect", str(path), state_dir=state)).check(6, "CORRUPT", "at byte")
    path.write_bytes(b"not an object of ours at all, but long enough to be looked at")
    (await cli("object", "inspect", str(path), state_dir=state)).check(2, "neither")
    path.write_bytes(b"")
    (await cli("object", "inspect", str(path), state_dir=state)).check(2)


async def test_targets_that_name_nothing(cli, cluster, tmp_path):
    state = cluster.state_dir
    (await cli("object", "inspect", "s3://bucket-only", state_dir=state)).check(
        2, "s3://BUCKET/KEY"
    )
    (await cli("object", "inspect", str(tmp_path), state_dir=state)).check(2, "is a directory")
    os.mkfifo(pipe := tmp_path / "pipe")
    (await cli("object", "inspect", str(pipe), state_dir=state)).check(2, "no regular file")
