"""Protocols.md section 1: "only an audited accept-loss ends such a wait, recording the lost range,
which readers get as CORRUPT".
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import SmallCluster, payloads
from tests.unit.ledger.test_recovery import left_behind
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ledger import LedgerState


async def accepted(cluster, recovery, claimed, ledger_id):
    """Recover; accept the loss once the recovery has waited for a while."""
    async with asyncio.TaskGroup() as tasks:
        recovering = tasks.create_task(recovery.recover(claimed, ledger_id))
        await asyncio.sleep(30)
        assert not recovering.done()
        assert recovery.waiting[ledger_id]
        recovery.accept_loss(ledger_id)
    assert recovery.waiting == {}
    return recovering.result()


async def read(cluster, catalog, ledger_id, first, last):
    metadata = await catalog.ledgers.get(ledger_id)
    assert metadata.state is LedgerState.CLOSED
    handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
    return payloads([run async for runs in handle.read_runs(first, last) for run in runs])


def test_a_damaged_run_is_given_up_and_what_follows_it_is_kept():
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"]), ((1, (b"b", b"bb"), -1), ["n1"])]
        where += [((3, (b"c",), 0), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        cluster.nodes["n1"].damaged.add((ledger_id, 1))
        closed = await accepted(cluster, cluster.recovery(catalog), claimed, ledger_id)
        assert (closed.last_entry_id, closed.length) == (3, 5)
        metadata = await catalog.ledgers.get(ledger_id)
        assert metadata.lost == ((1, 2),)
        assert metadata.custom["tierlog/lost"] == b"1-2"
        assert await read(cluster, catalog, ledger_id, 0, 0) == [b"a"]
        assert await read(cluster, catalog, ledger_id, 3, 3) == [b"c"]
        for first, last in [(0, 3), (1, 1), (2, 3)]:
            with pytest.raises(CorruptError) as caught:
                await read(cluster, catalog, ledger_id, first, last)
            assert caught.value.details["first_entry_id"] == "1"
            assert caught.value.details["last_entry_id"] == "2"

    run_virtual(main())


def test_what_is_known_to_have_been_acknowledged_is_recorded_up_to_the_lac():
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        cluster.nodes["n1"].lacs[ledger_id] = 3
        recovery = cluster.recovery(catalog)
        closed = await accepted(cluster, recovery, claimed, ledger_id)
        assert (closed.last_entry_id, closed.length) == (3, 1)
        assert (await catalog.ledgers.get(ledger_id)).lost == ((1, 3),)

    run_virtual(main())


def test_a_ledger_whose_only_node_is_gone_ends_with_a_loss_that_readers_meet():
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        cluster.nodes["n1"].down = True
        closed = await accepted(cluster, cluster.recovery(catalog), claimed, ledger_id)
        assert (closed.last_entry_id, closed.length) == (0, 0)
        with pytest.raises(CorruptError):
            await read(cluster, catalog, ledger_id, 0, 0)

    run_virtual(main())


def test_one_copy_will_do_once_the_loss_of_the_others_was_accepted():
    async def main():
        cluster = SmallCluster(3)
        where = [((0, (b"a",), -1), ["n1", "n2"]), ((1, (b"b",), 0), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        cluster.nodes["n2"].down = cluster.nodes["n3"].hung = True
        closed = await accepted(cluster, cluster.recovery(catalog), claimed, ledger_id)
        # Two of three are gone: whether there was an entry 2, nobody can tell any more.
        assert closed.last_entry_id == 2
        assert (await catalog.ledgers.get(ledger_id)).lost == ((2, 2),)
        assert await read(cluster, catalog, ledger_id, 0, 1) == [b"a", b"b"]
        (queued,) = await catalog.underreplicated.list()
        assert queued.nodes == ("n2", "n3")

    run_virtual(main())


def test_only_a_recovery_that_is_under_way_here_can_be_told_to_give_up():
    async def main():
        cluster = SmallCluster()
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=[])
        recovery = cluster.recovery(catalog)
        with pytest.raises(RefusedError):
            recovery.accept_loss(ledger_id)
        await recovery.recover(claimed, ledger_id)
        with pytest.raises(RefusedError):
            recovery.accept_loss(ledger_id)

    run_virtual(main())
