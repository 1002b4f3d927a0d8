"""Bare ledgers on three real nodes: written, read, recovered and deleted by an application.

"The two APIs can also both be used within a single application." (seeds/003)
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def"

import asyncio
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.test_reader_tiers import (
    SMALL,
    append,
    numbered,
    offloaded_and_gone,
    payloads,
)
from tierlog.client import LedgerShape, SyncLedgers, open_client, open_ledgers
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import LedgerState
from tierlog.runtime.settings import Settings, ZooKeeperSettings
from tierlog.wiring.build import open_catalog
from tierlog.wiring.objects import open_bucket

pytestmark = [pytest.mark.integration]

STRIPED = LedgerShape(ensemble_size=3, write_quorum=2, ack_quorum=2, stripe_entries=4)


async def entries_of(ledgers, ledger_id, *, recover=False):
    reader = await ledgers.open(ledger_id, recover=recover)
    return [entry.data async for entry in reader.entries()]


async def outcome(work):
    try:
        return await work
    except TierlogError as error:
        return error


@pytest.mark.covers("D01", "D02", "D05", "D07", "D09", "D11", "D14")
@pytest.mark.parametrize("shape", [None, STRIPED])
async def test_the_life_of_a_ledger(three_nodes, shape):
    wanted = [b"%d" % number for number in range(5000)]
    async with open_ledgers(three_nodes.settings) as ledgers:
        async with await ledgers.create(shape, custom={"purpose": b"test"}) as ledger:
            assert await ledger.append(wanted[0]) == 0
            for entry in wanted[1:]:
                await ledger.send(entry)
            assert await ledger.flush() == 4999
        metadata = (await ledgers.open(ledger.ledger_id)).metadata
        quorums = (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        assert quorums == ((3, 2, 2) if shape else (3, 3, 2))
        assert metadata.custom["purpose"] == b"test"
        assert await entries_of(ledgers, ledger.ledger_id) == wanted
        await ledgers.delete(ledger.ledger_id)
        error = await outcome(ledgers.open(ledger.ledger_id))
        assert isinstance(error, RefusedError)
        assert error.reason is Reason.LEDGER_NOT_FOUND


@pytest.mark.covers("D12")
async def test_one_application_uses_streams_and_ledgers_at_once(three_nodes):
    """Streams roll over, go to tier 2 and leave tier 1; the ledger beside them stays as it is."""
    cluster = three_nodes
    events, entries = numbered(0, 6000), [b"entry %d" % number for number in range(3000)]
    async with open_client(cluster.settings) as client, open_ledgers(cluster.settings) as ledgers:
        await client.create_stream("beside", policy=SMALL)

        async def write_ledger():
            async with await ledgers.create() as ledger:
                for entry in entries:
                    await ledger.send(entry)
            return ledger.ledger_id

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(append(client, "beside", events))
            writing = tasks.create_task(write_ledger())
        ledger_id = writing.result()
        await offloaded_and_gone(cluster, client, "beside")
        assert await payloads(client, "beside") == events
        assert await entries_of(ledgers, ledger_id) == entries
        listed = [one["ledger_id"] for one in (await client.stream("beside"))["ledgers"]]
        assert ledger_id not in listed
        assert ledger_id in await ledgers.ledgers()
        assert not set(listed) & set(await ledgers.ledgers())
        for one in listed:
            assert isinstance(await outcome(ledgers.delete(one)), RefusedError)
    async with open_catalog(cluster.settings) as catalog:
        assert await catalog.contexts.get(LedgerId(ledger_id)) is None
    async with open_bucket(cluster.settings, cluster.settings.s3.bucket) as bucket:
        keys = [one.key async for one in bucket.list("")]
        assert keys
        assert not [key for key in keys if re.search(rf"ledger-{ledger_id}(-|$)", key)]


@pytest.mark.covers("D17")
async def test_a_node_dies_in_the_middle_and_nothing_is_lost(three_nodes):
    cluster = three_nodes
    wanted = [b"%d" % number for number in range(2000)]
    async with open_ledgers(cluster.settings) as ledgers:
        ledger = await ledgers.create()
        for entry in wanted[:1000]:
            await ledger.send(entry)
        await ledger.flush()
        cluster.kill("ingest-2")
        try:
            for entry in wanted[1000:]:
                await ledger.append(entry)
            metadata = await ledger.close()
            assert metadata.last_entry_id == 1999
            assert await entries_of(ledgers, ledger.ledger_id) == wanted
            # A new one begins with a place for the node that is away.
            async with await ledgers.create() as other:
                await other.append(b"without it")
            shape = (await ledgers.open(other.ledger_id)).metadata
            assert (shape.ensemble_size, shape.ack_quorum) == (3, 2)
        finally:
            await cluster.restart("ingest-2")
        assert await entries_of(ledgers, ledger.ledger_id) == wanted
        assert await entries_of(ledgers, other.ledger_id) == [b"without it"]


WRITER = """
import asyncio, sys
from tierlog.client import open_ledgers
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.settings import Settings, ZooKeeperSettings

async def main():
    settings = Settings(zookeeper=ZooKeeperSettings(hosts=sys.argv[1]))
    configure_logging(settings.log, service="writer")
    async with open_ledgers(settings) as ledgers:
        ledger = await ledgers.create()
        print(ledger.ledger_id, flush=True)
        number = 0
        while True:
            answers = [await ledger.send(b"%d" % one) for one in range(number, number + 10)]
            for answer in answers:
                print(await answer, flush=True)
            number += 10

asyncio.run(main())
"""


@pytest.mark.covers("D09", "D18")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_recovery_keeps_what_a_dead_or_stopped_writer_was_told(three_nodes, blow):
    """A stopped writer that wakes up again gets nothing acknowledged any more."""
    hosts = three_nodes.settings.zookeeper.hosts
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WRITER, hosts),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path.cwd(),
    )
    assert process.stdout is not None
    ledger_id = int(await process.stdout.readline())
    told = [int(await process.stdout.readline()) for _ in range(500)]
    process.send_signal(blow)
    async with open_ledgers(three_nodes.settings) as ledgers:
        found = await entries_of(ledgers, ledger_id, recover=True)
        if blow == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
        rest, _ = await process.communicate()
        told += [int(line) for line in rest.split()]
        assert told == list(range(len(told)))
        assert len(told) <= len(found)
        assert found == [b"%d" % number for number in range(len(found))]
        reader = await ledgers.open(ledger_id)
        assert reader.metadata.state is LedgerState.CLOSED
        assert await entries_of(ledgers, ledger_id) == found


async def test_two_that_recover_at_once_end_in_one_result(three_nodes):
    settings = three_nodes.settings
    async with open_ledgers(settings) as one, open_ledgers(settings) as other:
        ledger = await one.create()
        for number in range(1000):
            await ledger.send(b"%d" % number)
        async with asyncio.TaskGroup() as tasks:
            ends = [
                tasks.create_task(ledgers.recover(ledger.ledger_id)) for ledgers in (one, other) * 2
            ]
        assert len({end.result().last_entry_id for end in ends}) == 1
        assert len({end.result().segments for end in ends}) == 1


def test_programs_without_a_loop(three_nodes):
    wanted = [b"%d" % number for number in range(10_000)]
    with SyncLedgers(three_nodes.settings) as ledgers:
        with ledgers.create() as ledger:
            assert ledger.append(wanted[0]) == 0
            assert ledger.append_all(wanted[1:]) == 9999
            reader = ledgers.open(ledger.ledger_id)
            assert not reader.closed
            assert [one.data for one in reader.entries(9990, 9999)] == wanted[9990:]
        reader = ledgers.open(ledger.ledger_id)
        assert reader.closed
        assert [one.data for one in reader.entries()] == wanted
        made = ledgers.make()
        with ledgers.write(made) as ledger:
            ledger.append(b"one")
        assert {made, reader.ledger_id} <= set(ledgers.ledgers())
        assert ledgers.open(made, recover=True).last_add_confirmed() == 0
        ledgers.delete(made)
        with pytest.raises(RefusedError):
            ledgers.open(made)


async def test_a_place_without_a_cluster_is_told(servers):
    zookeeper = ZooKeeperSettings(hosts=servers.endpoints.zookeeper_hosts)
    with pytest.raises(RetryableError, match="no cluster"):
        async with open_ledgers(Settings(zookeeper=zookeeper)):
            pass


async def test_the_command_line(cli, three_nodes):
    state = three_nodes.state_dir
    made = (await cli("ledger", "create", "-o", "json", state_dir=state)).check(0)
    number = str(json.loads(made.stdout)["ledger_id"])
    text = b"one\ntwo\nthree\n"
    done = await cli("ledger", "append", number, "-o", "json", stdin=text, state_dir=state)
    shown = json.loads(done.check(0).stdout)
    assert (shown["state"], shown["entries"], shown["length"]) == ("CLOSED", 3, 11)
    assert shown["quorums"] == "3/3/2"
    assert (await cli("ledger", "read", number, state_dir=state)).check(0).stdout == text
    done = await cli(
        *("ledger", "read", number, "--from", "1", "--to", "1", "-o", "jsonl"), state_dir=state
    )
    assert json.loads(done.check(0).stdout) == {"entry_id": 1, "bytes": 3, "data": "two"}
    shown = json.loads((await cli("ledger", "show", number, "-o", "json", state_dir=state)).stdout)
    assert (shown["stream"], shown["metadata"]["state"]) == (None, "CLOSED")
    done = await cli("ledger", "read", number, "--to", "3", state_dir=state)
    done.check(3, "NO_SUCH_ENTRY")
    done = await cli("ledger", "append", number, stdin=text, state_dir=state)
    done.check(4, "one writer in its life")
    done = await cli("ledger", "ls", "-o", "jsonl", state_dir=state)
    rows = [json.loads(line) for line in done.check(0).stdout.splitlines()]
    assert number in {str(row["ledger_id"]) for row in rows}
    made = (await cli("ledger", "create", "--ack-quorum", "3", state_dir=state)).check(0)
    empty = re.findall(rb"\d+", made.stdout)[-1].decode()
    done = await cli("ledger", "close", empty, "-o", "json", state_dir=state)
    shown = json.loads(done.check(0).stdout)
    assert (shown["state"], shown["entries"], shown["quorums"]) == ("CLOSED", 0, "3/3/3")
    for one in (number, empty):
        (await cli("ledger", "delete", one, state_dir=state)).check(0)
        (await cli("ledger", "delete", one, state_dir=state)).check(3, "LEDGER_NOT_FOUND")
        (await cli("ledger", "read", one, state_dir=state)).check(3, "LEDGER_NOT_FOUND")
    done = await cli(
        "ledger", "create", "--write-quorum", "2", "--ack-quorum", "3", state_dir=state
    )
    done.check(2, "do not fit")
