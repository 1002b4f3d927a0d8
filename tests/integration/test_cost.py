"""``tierlog cost show`` over real services: what an offload and a read asked of S3, by stream."""

import orjson
import pytest

from tierlog.client import open_client
from tierlog.model.policy import MIB, Policy
from tierlog.model.prices import CLASSES, offload_requests

pytestmark = [pytest.mark.integration]

STREAM = "cost-of-this"


async def offloaded(cluster) -> int:
    """Offload a ledger of two blocks; return its length in S3."""
    async with open_client(cluster.settings) as client:
        await client.create_stream(STREAM, policy=Policy(block_size=5 * MIB))
        async with client.writer(STREAM) as writer:
            for number in range(6000):
                await writer.send(b"%08d" % number * 125)
        await client.seal(STREAM)
        await client.offload(STREAM)

        async def done():
            return all(one["complete"] for one in (await client.stream(STREAM))["ledgers"])

        await cluster.until(done, what="offloaded")
        ledger_id = (await client.stream(STREAM))["ledgers"][0]["ledger_id"]
        length: int = (await client.ledger(ledger_id))["offload"]["data_len"]
        assert len([one async for one in client.reader(STREAM).events()]) == 6000
        return length


async def test_what_was_asked_of_s3_is_shown_by_stream_cause_and_operation(cli, cluster):
    length = await offloaded(cluster)
    words = ("cost", "show", "--stream", STREAM, "-o", "json")
    done = (await cli(*words, state_dir=cluster.state_dir)).check(0)
    rows = orjson.loads(done.stdout)
    counted = {(row["cause"], row["operation"]): row["requests"] for row in rows}
    expected = offload_requests(length, 5 * MIB)
    assert {what: counted.get(what) for what in expected if what[0] == "offload"} == {
        what: count for what, count in expected.items() if what[0] == "offload"
    }
    assert counted["verify", "get_object"] >= expected["verify", "get_object"]
    assert counted["read", "get_object"] >= 1
    sent = sum(row["bytes_sent"] for row in rows if row["operation"] == "upload_part")
    assert sent == length
    assert all(row["operation"] in CLASSES for row in rows)
    assert sum(row["price"] for row in rows) > 0
    # Attributes of its writer are kept in the bucket, by ingest.
    of_ingest = [row for row in rows if row["service"].startswith("ingest ")]
    assert sum(row["requests"] for row in of_ingest if row["cause"] == "attributes") > 0
