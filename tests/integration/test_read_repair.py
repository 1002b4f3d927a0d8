"""A copy that went bad on a node's disk: read from another one, reported, and written anew.

"Reads choose the fastest replica, speculate on a slow one, repair a corrupt copy from a good one
and say so." Three real nodes, 3/3/2.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,union-attr"

import asyncio
import signal
import time

import pytest

from tierlog.adapters.rpc.storage_node import ControlConnector
from tierlog.client import open_client
from tierlog.format.run import Run
from tierlog.ledger.directory import NodeDirectory
from tierlog.model.errors import TierlogError
from tierlog.model.ids import EntryId, StreamName
from tierlog.wiring.build import open_catalog

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STREAM = StreamName("repaired")
COUNT = 200
NEEDLE = b"needle in a haystack"
QUICK = {
    "TIERLOG_INGEST__REPLICATION__INTERVAL_S": "0.5",
    "TIERLOG_INGEST__REPLICATION__BACKOFF_S_FIRST": "0.5",
    # Nothing is found by comparing in this test.
    "TIERLOG_INGEST__REPLICATION__CHECK_INTERVAL_S": "100000",
}


def event(number):
    return (NEEDLE if number == 77 else b"hay") + b" %06d" % number


async def all_of(client):
    return [one.payload async for one in client.reader(STREAM).events()]


def flip_needle(folder):
    """Change one byte of the needle wherever it lies; return how often it was there."""
    count = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.stat().st_size > 1 << 30:
            continue
        data = path.read_bytes()
        at = data.find(NEEDLE)
        while at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"N")
            count += 1
            at = data.find(NEEDLE, at + 1)
    return count


async def copies_of(catalog, ledger_id):
    """Return of each node whether all of its copy can be read."""
    nodes = NodeDirectory(catalog.nodes.live, ControlConnector())
    metadata = await catalog.ledgers.get(ledger_id)
    whole = {}
    try:
        for node_id in metadata.segments[-1].ensemble:
            client = await nodes.client(node_id)
            found: list[Run] = []
            try:
                async for runs in client.read(
                    ledger_id, EntryId(0), bytes_max=1 << 24, recovery=True
                ):
                    found += runs
            except TierlogError as error:
                print(node_id, error)
            whole[node_id] = bool(found) and found[-1].last_entry_id == metadata.last_entry_id
    finally:
        await nodes.close()
    return whole


async def read_from_it_alone(cluster, process, client, catalog):
    """Read all, the other nodes being stopped until the damage is told: readers ask the fastest."""
    others = [cluster.services.children[one] for one in cluster.nodes if one != process]

    async def reported():
        return await catalog.underreplicated.list() != []

    async with asyncio.TaskGroup() as tasks:
        for one in others:
            one.signal(signal.SIGSTOP)
        try:
            reading = tasks.create_task(all_of(client))
            await cluster.until(reported, what="the damaged copy is reported")
        finally:
            for one in others:
                one.signal(signal.SIGCONT)
    return reading.result()


@pytest.mark.covers("D03", "D17")
async def test_a_damaged_copy_is_read_around_reported_and_repaired(start_nodes):
    cluster = await start_nodes(3, **QUICK)
    async with open_client(cluster.settings) as client, open_catalog(cluster.settings) as catalog:
        async with client.writer(STREAM) as writer:
            for number in range(COUNT):
                await writer.send(event(number))
                if number % 20 == 0:
                    await writer.flush()
        await client.seal(STREAM)
        wanted = [event(number) for number in range(COUNT)]
        assert await all_of(client) == wanted
        (ledger,) = (await catalog.streams.snapshot(STREAM)).ledgers
        metadata = await catalog.ledgers.get(ledger.ledger_id)
        victim = metadata.write_set(EntryId(0))[0]
        process = f"ingest-{victim.rpartition('-')[2]}"
        # A restart flushes what is buffered, so that reads come from the disk.
        cluster.kill(process)
        await cluster.restart(process)
        assert flip_needle(cluster.data_dir(process)) >= 1
        assert (await copies_of(catalog, ledger.ledger_id))[victim] is False

        assert await read_from_it_alone(cluster, process, client, catalog) == wanted

        async def mended():
            assert await all_of(client) == wanted
            return all((await copies_of(catalog, ledger.ledger_id)).values())

        await cluster.until(mended, what="the damaged copy is written anew", timeout_s=60)

        async def struck_off():
            return await catalog.underreplicated.list() == []

        await cluster.until(struck_off, what="the queue is empty again")

        logged = "".join(path.read_text() for path in (cluster.state_dir / "logs").glob("reader*"))
        assert "damage.reported" in logged

        # A node that is stopped holds reads up for a moment, and no longer.
        for process in cluster.nodes:
            cluster.services.children[process].signal(signal.SIGSTOP)
            try:
                begun_s = time.monotonic()
                assert await all_of(client) == wanted
                took_s = time.monotonic() - begun_s
                print(f"\n[read] {took_s:.2f} s with {process} stopped")
                assert took_s < 10
            finally:
                cluster.services.children[process].signal(signal.SIGCONT)
