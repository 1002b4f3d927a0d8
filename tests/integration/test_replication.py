"""Auto-recovery with real processes: a machine gone for good, a node that is emptied, and what the
command line tells of it. In the end every entry of every ledger lies on as many nodes as it should.
"""

# mypy: disable-error-code="union-attr,var-annotated"

import asyncio
import json
import os
import sys

import pytest

from tierlog.adapters.rpc.storage_node import ControlConnector
from tierlog.client import open_client
from tierlog.client.cluster import open_cluster
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.shares import share_of
from tierlog.model.errors import RetryableError
from tierlog.model.ids import NodeId
from tierlog.model.ledger import LedgerState
from tierlog.model.spans import without
from tierlog_ingest.replication.decommission import ledgers_on

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

REPLICATION = "TIERLOG_INGEST__REPLICATION__"
QUICK = {
    f"{REPLICATION}INTERVAL_S": "0.5",
    f"{REPLICATION}LOST_NODE_DELAY_S": "2",
    f"{REPLICATION}GRACE_S": "1",
    f"{REPLICATION}SCAN_INTERVAL_S": "1",
    f"{REPLICATION}BACKOFF_S_FIRST": "0.5",
    f"{REPLICATION}BACKOFF_S_MAX": "2",
}
LOST = NodeId("node-2")
STREAM = "replicated"


async def _append(client, count, *, base):
    async with client.writer(STREAM) as writer:
        for number in range(base, base + count):
            await writer.send(_event(number))
        await writer.flush()


def _event(number):
    return b"%06d" % number + b"r" * (number % 400)


async def _run(cluster, *arguments):
    """Run a command line in a process of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TIERLOG_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tierlog.cli.main",
        *arguments,
        env={**env, "TIERLOG_STATE_DIR": str(cluster.state_dir)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert b"Traceback" not in stderr, stderr.decode()
    return process.returncode, stdout, stderr.decode()


async def _json(cluster, *arguments):
    code, stdout, stderr = await _run(cluster, *arguments, "-o", "json")
    assert code == 0, stderr
    return json.loads(stdout)


async def _lacking(catalog):
    """Ask each node of each closed ledger for what it holds; return what is not there."""
    nodes = NodeDirectory(catalog.nodes.live, ControlConnector())
    found = []
    try:
        for ledger_id in await catalog.ledgers.list_ids():
            metadata = await catalog.ledgers.get(ledger_id)
            if metadata.state is not LedgerState.CLOSED:
                continue
            for at, segment in enumerate(metadata.segments):
                for place, node_id in enumerate(segment.ensemble):
                    share = share_of(metadata, at, place)
                    held = await (await nodes.client(node_id)).held_entries(ledger_id)
                    found += [(ledger_id, node_id, one) for one in without(share, held)]
    finally:
        await nodes.close()
    return found


async def _held(catalog, node_id):
    """Ask a node which ledgers it holds entries of."""
    nodes = NodeDirectory(catalog.nodes.live, ControlConnector())
    try:
        return await (await nodes.client(node_id)).list_ledgers()
    finally:
        await nodes.close()


async def _check_all(client, count):
    found = [event.payload async for event in client.reader(STREAM).events()]
    assert found == [_event(number) for number in range(count)]


@pytest.mark.covers("A01", "D02", "D03", "D17")
async def test_a_lost_machine_and_one_that_is_emptied_leave_every_entry_with_all_its_copies(
    start_nodes,
):
    cluster = await start_nodes(5, **QUICK)
    async with open_client(cluster.settings) as client, open_cluster(cluster.settings) as catalog:
        await client.create_stream(STREAM)
        for part in range(4):
            await _append(client, 100, base=100 * part)
            await client.seal(STREAM)
        await _append(client, 100, base=400)
        # Whichever node most ledgers lie on; it may own the stream.
        assert await ledgers_on(catalog, LOST)
        cluster.kill("ingest-2")

        async def moved():
            return not await ledgers_on(catalog, LOST) and not await catalog.underreplicated.list()

        await cluster.until(moved, what="nothing lies on the lost node", timeout_s=90)
        assert await _lacking(catalog) == []
        await _append(client, 100, base=500)
        await _check_all(client, 600)
        rows = {row["node_id"]: row for row in await _json(cluster, "cluster", "nodes")}
        assert rows[LOST]["state"] == "away"
        assert await _json(cluster, "cluster", "underreplicated") == []
        code, stdout, stderr = await _run(cluster, "node", "decommission", LOST, "-o", "json")
        assert code == 0, stderr
        assert json.loads(stdout)["holds"] == "unknown", "it is gone, and can't be asked"
        assert "what its disk holds is not known" in stderr

        leaving = NodeId("node-4")
        assert await _held(catalog, leaving)
        code, stdout, stderr = await _run(
            cluster, "node", "decommission", leaving, "--timeout", "120", "-o", "json"
        )
        assert code == 0, stderr
        assert json.loads(stdout)["state"] == "decommissioned"
        assert json.loads(stdout)["holds"] == "nothing"
        assert await _held(catalog, leaving) == [], "its bytes are freed, not only given up"
        assert await ledgers_on(catalog, leaving) == []
        assert await _lacking(catalog) == []
        cluster.kill("ingest-4")
        await _append(client, 50, base=600)
        await _check_all(client, 650)
        rows = {row["node_id"]: row["state"] for row in await _json(cluster, "cluster", "nodes")}
        assert rows == {
            "node-1": "live",
            LOST: "decommissioned",
            "node-3": "live",
            leaving: "decommissioned",
            "node-5": "live",
        }


@pytest.mark.covers("D17")
async def test_a_node_that_was_away_gets_what_it_missed_and_an_unknown_one_is_refused(start_nodes):
    cluster = await start_nodes(3, **QUICK | {f"{REPLICATION}LOST_NODE_DELAY_S": "60"})
    async with open_client(cluster.settings) as client, open_cluster(cluster.settings) as catalog:
        await client.create_stream(STREAM)
        await _append(client, 100, base=0)
        cluster.kill("ingest-3")
        await _append(client, 200, base=100)
        await client.seal(STREAM)
        await cluster.until(
            lambda: _is_queued(catalog), what="what lacks copies is queued", timeout_s=30
        )
        (row, *_) = await _json(cluster, "cluster", "underreplicated")
        assert row["nodes"] == ["node-3"]
        await cluster.restart("ingest-3")

        async def whole():
            return not await catalog.underreplicated.list()

        async def nothing_lacks():
            try:
                return not await _lacking(catalog)
            except RetryableError:
                return False  # its old registration, where nobody listens any more

        await cluster.until(whole, what="the node has what it missed", timeout_s=60)
        await cluster.until(nothing_lacks, what="every copy is whole", timeout_s=30)
        await _check_all(client, 300)
        code, _, stderr = await _run(cluster, "node", "decommission", "node-9")
        assert (code, "knows no storage node node-9" in stderr) == (2, True)
        code, _, stderr = await _run(cluster, "node", "decommission", "node-3", "--timeout", "3")
        assert code == 5, "three nodes are what its ledgers need"
        assert "ledgers are left" in stderr
        await _run(cluster, "node", "decommission", "node-3", "--cancel")
        rows = {row["node_id"]: row["state"] for row in await _json(cluster, "cluster", "nodes")}
        assert rows["node-3"] == "live"


async def _is_queued(catalog):
    return bool(await catalog.underreplicated.list())
