"""Protocols.md section 1: "only an audited accept-loss ends such a wait, recording the lost range,
which readers get as CORRUPT".
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import SmallCluster, payloads
from tests.unit.ledger.test_recovery import left_behind
from tierlog.format.ledger_metadata import decode_znode, encode_znode
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ledger import KEY_LOST, LedgerMetadata, LedgerState, Segment


async def accepted(cluster, recovery, claimed, ledger_id):
    """Recover; accept the loss once the recovery has waited for a while."""
    catalog = cluster.catalog()
    async with asyncio.TaskGroup() as tasks:
        recovering = tasks.create_task(recovery.recover(claimed, ledger_id))
        await asyncio.sleep(30)
        assert not recovering.done()
        assert recovery.waiting[ledger_id]
        note = b"%d an admin" % cluster.clock.wall_ms()
        await catalog.ledgers.accept_loss(ledger_id, by="an admin")
    assert recovery.waiting == {}
    assert (await catalog.ledgers.get(ledger_id)).custom["tierlog/loss-accepted"] == note
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


def test_a_node_that_came_back_just_before_the_loss_was_accepted_is_asked_again():
    async def main():
        cluster = SmallCluster(3)
        where = [((0, (b"a",), -1), ["n1", "n2"]), ((1, (b"b",), 0), ["n1", "n2"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        for node in cluster.nodes.values():
            node.down = True
        async with asyncio.TaskGroup() as tasks:
            recovery = cluster.recovery(catalog)
            tasks.create_task(recovery.recover(claimed, ledger_id))
            await asyncio.sleep(100)
            cluster.nodes["n1"].down = False
            await catalog.ledgers.accept_loss(ledger_id, by="an admin")
        assert (await catalog.ledgers.get(ledger_id)).lost == ((2, 2),)
        assert await read(cluster, catalog, ledger_id, 0, 1) == [b"a", b"b"]

    run_virtual(main())


def test_a_survivor_that_fails_now_and_then_loses_nothing():
    async def main():
        cluster = SmallCluster(3)
        where = [((0, (b"a",), -1), ["n1", "n2"]), ((1, (b"b",), 0), ["n1", "n2"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        cluster.nodes["n2"].down = cluster.nodes["n3"].down = True
        survivor = cluster.nodes["n1"]

        async def come_and_go():
            while True:
                survivor.down = not survivor.down
                await asyncio.sleep(3.0 if survivor.down else 0.5)

        async with asyncio.TaskGroup() as tasks:
            recovery = cluster.recovery(catalog)
            recovering = tasks.create_task(recovery.recover(claimed, ledger_id))
            await asyncio.sleep(30)
            await catalog.ledgers.accept_loss(ledger_id, by="an admin")
            flapping = tasks.create_task(come_and_go())
            await asyncio.wait({recovering})
            flapping.cancel()
        survivor.down = False
        assert (await catalog.ledgers.get(ledger_id)).lost == ((2, 2),)
        assert await read(cluster, catalog, ledger_id, 0, 1) == [b"a", b"b"]

    run_virtual(main())


def test_only_where_a_recovery_waits_is_there_a_loss_to_accept():
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        with pytest.raises(RefusedError) as caught:
            await catalog.ledgers.accept_loss(ledger_id, by="an admin")
        assert "OPEN" in str(caught.value)
        await cluster.recovery(catalog).recover(claimed, ledger_id)
        with pytest.raises(RefusedError) as caught:
            await catalog.ledgers.accept_loss(ledger_id, by="an admin")
        assert "CLOSED" in str(caught.value)
        with pytest.raises(RefusedError) as caught:
            await catalog.ledgers.accept_loss(ledger_id + 1, by="an admin")
        assert caught.value.reason is Reason.LEDGER_NOT_FOUND

    run_virtual(main())


def test_a_loss_that_was_accepted_holds_for_whoever_recovers_next():
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"]), ((1, (b"b",), -1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        cluster.nodes["n1"].damaged.add((ledger_id, 1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20):
                await cluster.recovery(catalog).recover(claimed, ledger_id)
        await catalog.ledgers.accept_loss(ledger_id, by="an admin")
        await catalog.ledgers.accept_loss(ledger_id, by="another")
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert closed.last_entry_id == 1
        metadata = await catalog.ledgers.get(ledger_id)
        assert metadata.lost == ((1, 1),)
        assert metadata.custom["tierlog/loss-accepted"].endswith(b" an admin")

    run_virtual(main())


@given(st.lists(st.integers(0, 2**62), min_size=2, max_size=12, unique=True))
def test_losses_are_read_back_from_the_znode_as_they_were_recorded(bounds):
    bounds = sorted(bounds)
    lost = tuple(zip(bounds[::2], bounds[1::2], strict=False))
    metadata = LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=0, ensemble=("n1",)),),
    )
    assert metadata.lost == ()
    again = decode_znode(encode_znode(metadata.with_loss(lost)))
    assert again.lost == lost


@pytest.mark.parametrize(
    "text", [b"", b"1", b"1-", b"-2", b"1-2,", b"1-2;3-4", "\u0661-\u0662".encode()]
)
def test_a_loss_that_can_not_be_read_is_no_loss_that_is_passed_over(text):
    metadata = LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=0, ensemble=("n1",)),),
        custom={KEY_LOST: text},
    )
    with pytest.raises(CorruptError):
        decode_znode(encode_znode(metadata))
