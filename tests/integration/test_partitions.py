"""Partitioned streams on the command line and in the blocking client (ADR-0016, "Partitions")."""

import orjson
import pytest

from tierlog.client import StructuredEvent, SyncClient
from tierlog.model.ids import StreamName
from tierlog.model.partitions import partition_names, partition_of

pytestmark = [pytest.mark.integration]

PARTS = StreamName("cli-parts")
KEYED = b"".join(b"user-%d:event %d\n" % (number % 5, number) for number in range(500))


async def shown(cli, *arguments, state_dir):
    done = (await cli(*arguments, "-o", "json", state_dir=state_dir)).check(0)
    return orjson.loads(done.stdout)


@pytest.mark.covers("A05")
async def test_the_command_line_routes_by_key_and_reads_all(cli, cluster):
    state = cluster.state_dir
    made = await shown(cli, "stream", "create", "cli-parts", "--partitions", "3", state_dir=state)
    assert made == {"stream": "cli-parts", "created": True, "partitions": 3}
    arguments = ("append", "cli-parts", "--key-separator", ":", "-o", "json")
    done = (await cli(*arguments, stdin=KEYED, state_dir=state)).check(0)
    told = orjson.loads(done.stdout)
    used = {partition_of(b"user-%d" % number, 3) for number in range(5)}
    assert (told["events"], set(told["last_positions"])) == (
        500,
        {f"cli-parts-partition-{index}" for index in used},
    )

    done = (await cli("read", "cli-parts", "-o", "jsonl", state_dir=state)).check(0)
    found = [orjson.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 500
    for number in range(5):
        own = [one for one in found if one["key"] == f"user-{number}"]
        assert {one["partition"] for one in own} == {partition_of(b"user-%d" % number, 3)}
        assert [one["payload"] for one in own] == [f"event {n}" for n in range(number, 500, 5)]

    listed = await shown(cli, "stream", "ls", state_dir=state)
    assert {one["stream"]: one["partitions"] for one in listed}["cli-parts"] == 3
    found = await shown(cli, "stream", "show", "cli-parts", state_dir=state)
    assert [one["stream"] for one in found["partition_streams"]] == partition_names(PARTS, 3)
    table = (await cli("stream", "show", "cli-parts", state_dir=state)).check(0).stdout
    assert b"cli-parts-partition-2" in table
    ledgers = await shown(cli, "ledger", "ls", "cli-parts", state_dir=state)
    assert {one["stream"] for one in ledgers} == {f"cli-parts-partition-{i}" for i in used}
    table = (await cli("ledger", "ls", "cli-parts", state_dir=state)).check(0).stdout
    rows = [line.split(b"|") for line in table.splitlines() if b"OPEN" in line]
    assert len(rows) == len(used)
    assert all(b"-partition-" in row[1] for row in rows)
    assert all(row[4].strip() == row[5].strip() == b"-" for row in rows), "not known while open"
    sealed = await shown(cli, "stream", "seal", "cli-parts", state_dir=state)
    assert sum(one["sealed_ledger"] is not None for one in sealed) == len(used)
    wished = (await cli("offload", "run", "cli-parts", "--wait", state_dir=state)).check(0)
    assert b"ledgers (ids)" in wished.stdout
    found = await shown(cli, "stream", "show", "cli-parts", state_dir=state)
    assert sum(one["entries"] for one in found["partition_streams"]) > 0
    for one in found["partition_streams"]:
        assert one["tier2_bytes"] == one["bytes"]


async def test_what_does_not_go_is_said(cli, cluster):
    state = cluster.state_dir
    (await cli("stream", "create", "cli-count", "--partitions", "2", state_dir=state)).check(0)
    done = await cli("stream", "create", "cli-count", "--partitions", "3", state_dir=state)
    done.check(2, "another shape")
    done = await cli("read", "cli-count", "--from", "1:0", state_dir=state)
    done.check(2, "has 2 partitions", "cli-count-partition-1")
    done = await cli("append", "cli-count", "--key-separator", ":", stdin=b"x", state_dir=state)
    done.check(2, "has no b':'")
    both = ("--key-separator", ":", "--key-field", "a")
    (await cli("append", "cli-count", *both, state_dir=state)).check(2, "two places")
    raw = ("--key-field", "a", "--raw")
    (await cli("append", "cli-count", *raw, state_dir=state)).check(2, "no place for a key")
    done = await cli("append", "cli-count", "--raw", stdin=b"x", state_dir=state)
    done.check(2, "another shape")


def test_the_blocking_client(cluster):
    with SyncClient(cluster.settings) as client:
        assert client.create_stream("sync-parts", partitions=2)
        with client.writer("sync-parts") as writer:
            for number in range(100):
                writer.send(StructuredEvent(payload=b"%d" % number, key=b"%d" % (number % 3)))
            assert writer.flush() is None
            assert writer.acked_events == 100
            assert set(writer.last_positions) <= set(client.partitions("sync-parts"))
        found = list(client.events("sync-parts"))
        assert sorted(int(one.payload) for one in found) == list(range(100))
        assert all(one.partition == partition_of(one.key or b"", 2) for one in found)
        assert client.set_policy("sync-parts", {"ledger_entries_max": 9})
        own = client.policy("sync-parts-partition-1")["own"]
        assert own["ledger_entries_max"] == 9
