"""Reading tier 1 through ``ReadHandle``: any replica, no gap, unknown is not empty."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import SmallCluster, payloads
from tests.unit.ledger.test_recovery import left_behind
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import Reason, TierlogError

THREE = [
    ((0, (b"a", b"b"), -1), ["n1", "n2"]),
    ((2, (b"c", b"d"), 1), ["n1", "n2"]),
    ((4, (b"e",), 3), ["n1", "n2"]),
]


async def closed_ledger(cluster):
    catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(2, 2, 2), where=THREE)
    await cluster.recovery(catalog).recover(claimed, ledger_id)
    metadata = await catalog.ledgers.get(ledger_id)
    return Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))


@pytest.mark.covers("D11", "A09")
def test_whole_runs_that_hold_the_entries():
    async def main():
        handle = await closed_ledger(SmallCluster(2))
        assert await handle.last_add_confirmed() == 4
        runs = [run async for runs in handle.read_runs(1, 3) for run in runs]
        assert [run.first_entry_id for run in runs] == [0, 2]
        runs = [run async for runs in handle.read_runs(0, 4, bytes_max=1) for run in runs]
        assert [run.first_entry_id for run in runs] == [0]

    run_virtual(main())


def test_what_came_is_paid_for_before_more_is_asked_for():
    async def main():
        cluster, came, paid = SmallCluster(2), 0, []
        ledger = await closed_ledger(cluster)

        async def pay(length):
            assert sum(paid) + length == came
            await asyncio.sleep(1)
            paid.append(length)

        handle = Tier1ReadHandle(
            ledger.ledger_id, ledger.ledger_metadata, cluster.directory(cluster.catalog()), pace=pay
        )
        begun_s = asyncio.get_running_loop().time()
        async for runs in handle.read_runs(0, 4):
            came += sum(len(run.encoded) for run in runs)
        assert sum(paid) == came > 0
        assert asyncio.get_running_loop().time() - begun_s >= len(paid)

    run_virtual(main())


@pytest.mark.covers("D03")
def test_a_lost_node_or_a_damaged_run_is_read_from_the_other_replica():
    async def main():
        cluster = SmallCluster(2)
        handle = await closed_ledger(cluster)
        cluster.nodes["n1"].damaged.add((handle.ledger_id, 2))
        cluster.nodes["n2"].damaged.add((handle.ledger_id, 4))
        runs = [run async for runs in handle.read_runs(0, 4) for run in runs]
        assert payloads(runs) == [b"a", b"b", b"c", b"d", b"e"]
        cluster.nodes["n1"].damaged.clear()
        cluster.nodes["n2"].down = True
        assert len([run async for runs in handle.read_runs(0, 4) for run in runs]) == 3

    run_virtual(main())


def test_reading_what_a_node_knows_to_be_confirmed_writes_nothing_there():
    async def main():
        cluster = SmallCluster(2)
        handle = await closed_ledger(cluster)
        for node in cluster.nodes.values():
            node.fenced.clear()
            node.confirm(handle.ledger_id, 3)
        assert len([run async for runs in handle.read_runs(0, 3) for run in runs]) == 2
        assert all(not node.fenced for node in cluster.nodes.values())
        assert len([run async for runs in handle.read_runs(0, 4) for run in runs]) == 3
        assert any(node.fenced for node in cluster.nodes.values())

    run_virtual(main())


def test_what_no_replica_gives_is_unknown_and_behind_the_end_is_no_such_entry():
    async def main():
        cluster = SmallCluster(2)
        handle = await closed_ledger(cluster)
        for node in cluster.nodes.values():
            del node.runs[handle.ledger_id][2]
        with pytest.raises(TierlogError) as caught:
            _ = [run async for runs in handle.read_runs(0, 4) for run in runs]
        assert caught.value.reason is Reason.UNKNOWN
        with pytest.raises(TierlogError) as caught:
            _ = [run async for runs in handle.read_runs(0, 5) for run in runs]
        assert caught.value.reason is Reason.NO_SUCH_ENTRY

    run_virtual(main())


def test_an_open_ledger_ends_at_the_lac_and_can_be_waited_for():
    async def main():
        cluster = SmallCluster(1)
        catalog, _, ledger_id, metadata = await left_behind(
            cluster, quorums=(1, 1, 1), where=[((0, (b"a",), -1), ["n1"])]
        )
        node = cluster.nodes["n1"]
        handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
        assert await handle.last_add_confirmed() == -1
        with pytest.raises(TierlogError) as caught:
            _ = [run async for runs in handle.read_runs(0, 0) for run in runs]
        assert caught.value.reason is Reason.NOT_YET
        async with asyncio.TaskGroup() as tasks:

            async def confirm():
                await asyncio.sleep(0.5)
                node.confirm(ledger_id, 0)

            tasks.create_task(confirm())
            runs = [run async for runs in handle.read_runs(0, 0, wait_s=1.0) for run in runs]
        assert payloads(runs) == [b"a"]

    run_virtual(main())
