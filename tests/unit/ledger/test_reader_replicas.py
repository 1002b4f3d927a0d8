"""Reads choose the fastest replica, speculate on a slow one, and report a bad copy (ADR-0016)."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
from dataclasses import replace

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import THREE, SmallCluster, bare_metadata, now_s, payloads
from tests.unit.ledger.test_recovery import cut, left_behind
from tierlog.ledger.damage import DamageLimits, DamageReports
from tierlog.ledger.reader import ReaderLimits, Tier1ReadHandle
from tierlog.model.errors import Reason, RetryableError, TierlogError
from tierlog.model.replication import CopyTrouble

SIX = [
    ((0, (b"a", b"b"), -1), THREE),
    ((2, (b"c", b"d"), 1), THREE),
    ((4, (b"e",), 3), THREE),
    ((5, (b"f",), 3), THREE),
]
ALL = [b"a", b"b", b"c", b"d", b"e", b"f"]


async def closed_ledger(cluster, **more):
    catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=SIX)
    await cluster.recovery(catalog).recover(claimed, ledger_id)
    metadata = await catalog.ledgers.get(ledger_id)
    for node in cluster.nodes.values():
        node.confirm(ledger_id, 5)
    return Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog), **more)


async def read(handle, first=0, last=5):
    found = payloads([run async for runs in handle.read_runs(first, last) for run in runs])
    assert len(asyncio.all_tasks()) == 1
    return found


def test_a_replica_that_is_silent_costs_half_a_second_and_then_nothing():
    async def main():
        cluster = SmallCluster(3)
        handle = await closed_ledger(cluster)
        cluster.nodes["n1"].hung = True
        begun_s = now_s()
        assert await read(handle) == ALL
        assert 0.5 <= now_s() - begun_s < 0.6
        begun_s = now_s()
        assert await read(handle) == ALL
        assert now_s() - begun_s < 0.01

    run_virtual(main())


def test_the_fastest_replica_is_asked_first():
    async def main():
        cluster = SmallCluster(3)
        handle = await closed_ledger(cluster)
        cluster.nodes["n1"].read_delay_s = 0.4
        cluster.nodes["n2"].read_delay_s = 0.2
        cluster.nodes["n3"].read_delay_s = 0.1
        took_s = []
        for _ in range(5):
            begun_s = now_s()
            assert await read(handle) == ALL
            took_s.append(round(now_s() - begun_s, 3))
        # Each is tried once; from then on the fastest comes first.
        assert took_s[0] == 0.4
        assert took_s[-2:] == [0.1, 0.1]

    run_virtual(main())


def test_of_two_that_are_asked_the_first_answer_counts_and_comes_once():
    async def main():
        cluster = SmallCluster(3)
        handle = await closed_ledger(cluster)
        cluster.nodes["n1"].read_delay_s = 0.6
        cluster.nodes["n2"].read_delay_s = 0.2
        begun_s = now_s()
        assert await read(handle) == ALL
        assert round(now_s() - begun_s, 3) == 0.6
        cluster.nodes["n1"].read_delay_s = 5.0
        begun_s = now_s()
        assert await read(handle) == ALL
        assert now_s() - begun_s < 2.3

    run_virtual(main())


def test_of_two_that_answer_at_the_same_moment_one_is_let_go():
    async def main():
        cluster = SmallCluster(3)
        handle = await closed_ledger(cluster)
        cluster.nodes["n1"].read_delay_s = 0.6
        cluster.nodes["n2"].read_delay_s = 0.1  # asked half a second later
        found = []
        async for runs in handle.read_runs(0, 5):
            found += payloads(runs)
            assert [one.reads_open for one in cluster.nodes.values()] in ([1, 0, 0], [0, 1, 0])
        assert found == ALL
        assert [one.reads_open for one in cluster.nodes.values()] == [0, 0, 0]

    run_virtual(main())


def test_one_that_stops_in_the_middle_is_left_and_the_read_goes_on_without_a_gap():
    async def main():
        cluster = SmallCluster(3)
        handle = await closed_ledger(cluster)
        found = []
        begun_s = now_s()
        async for runs in handle.read_runs(0, 5):
            found += payloads(runs)
            cluster.nodes["n1"].hung = True
        assert found == ALL
        assert now_s() - begun_s < 6

    run_virtual(main())


@pytest.mark.covers("D03")
def test_a_damaged_and_a_missing_copy_are_passed_over_and_reported():
    async def main():
        cluster = SmallCluster(3)
        damages = []
        handle = await closed_ledger(cluster, on_damage=lambda *damage: damages.append(damage))
        ledger_id = handle.ledger_id
        cluster.nodes["n1"].damaged.add((ledger_id, 2))
        assert await read(handle) == ALL
        assert damages == [(ledger_id, "n1", 2)]
        damages.clear()
        cluster.nodes["n1"].damaged.clear()
        await asyncio.sleep(20)
        del cluster.nodes["n1"].runs[ledger_id][0]
        assert await read(handle) == ALL
        assert damages == [(ledger_id, "n1", None)]

    run_virtual(main())


def test_where_each_copy_lost_another_third_all_is_read():
    async def main():
        cluster = SmallCluster(3)
        damages = []
        handle = await closed_ledger(cluster, on_damage=lambda *damage: damages.append(damage))
        ledger_id = handle.ledger_id
        names = ("n1", "n2", "n3")
        runs = cluster.nodes["n1"].runs[ledger_id].values()
        lost = {(names[at % 3], run.first_entry_id) for at, run in enumerate(runs)}
        assert len({name for name, _ in lost}) == 3
        for name, entry_id in lost:
            cluster.nodes[name].damaged.add((ledger_id, entry_id))
        assert await read(handle) == ALL
        assert damages
        assert {(name, entry_id) for _, name, entry_id in damages} <= lost

    run_virtual(main())


def test_a_node_that_can_not_be_reached_is_no_damage():
    async def main():
        cluster = SmallCluster(3)
        damages = []
        handle = await closed_ledger(cluster, on_damage=lambda *damage: damages.append(damage))
        cluster.nodes["n1"].down = True
        assert await read(handle) == ALL
        cluster.nodes["n2"].down = cluster.nodes["n3"].down = True
        with pytest.raises(TierlogError) as caught:
            await read(handle)
        assert caught.value.reason is Reason.UNKNOWN
        assert damages == []

    run_virtual(main())


def test_where_an_open_ledger_ends_no_silent_node_delays_for_long():
    async def main():
        cluster = SmallCluster(3)
        catalog, _, ledger_id, metadata = await left_behind(cluster, quorums=(3, 3, 2), where=SIX)
        handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
        cluster.nodes["n3"].confirm(ledger_id, 4)
        assert await handle.last_add_confirmed() == 4
        cluster.nodes["n2"].hung = True
        begun_s = now_s()
        assert await handle.last_add_confirmed() == 4
        assert 0.1 < now_s() - begun_s <= 0.2
        begun_s = now_s()
        assert await handle.last_add_confirmed() == 4
        assert now_s() == begun_s
        cluster.nodes["n1"].down = cluster.nodes["n3"].down = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await handle.last_add_confirmed()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


@pytest.mark.parametrize(
    ("quorums", "away", "covered"),
    [
        ((3, 3, 2), (), True),
        ((3, 3, 2), ("n1",), True),
        ((3, 3, 2), ("n1", "n2"), False),
        ((3, 2, 2), ("n1",), True),
        ((3, 2, 2), ("n1", "n2"), False),
        ((3, 3, 3), ("n1", "n2"), True),
        ((3, 2, 1), ("n1",), False),
    ],
)
def test_an_end_is_covered_when_no_ack_quorum_can_hide_behind_those_that_are_away(
    quorums, away, covered
):
    async def main():
        cluster = SmallCluster(3)
        where = SIX[:2]
        catalog, _, ledger_id, metadata = await left_behind(cluster, quorums=quorums, where=where)
        for name in away:
            cluster.nodes[name].down = True
        handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
        end = await handle.end()
        assert (end.last_add_confirmed, end.last_entry_id, end.covered) == (1, 3, covered)

    run_virtual(main())


def test_a_node_that_may_have_lost_entries_covers_none():
    async def main():
        cluster = SmallCluster(3)
        where = [((0, (b"a",), -1), ["n2"])]
        catalog, _, ledger_id, metadata = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
        cluster.nodes["n1"].doubtful.add(ledger_id)
        assert (await handle.end()).covered
        cluster.nodes["n2"].down = True
        assert not (await handle.end()).covered
        cluster.nodes["n1"].doubtful.clear()
        assert (await handle.end()).covered

    run_virtual(main())


def test_the_lac_is_not_waited_for_where_only_the_end_needs_more_answers():
    async def main():
        cluster = SmallCluster(3)
        catalog, _, ledger_id, metadata = await left_behind(cluster, quorums=(3, 3, 1), where=SIX)
        handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
        cluster.nodes["n2"].hung = True
        assert not (await handle.end()).covered
        begun_s = now_s()
        assert await handle.last_add_confirmed() == 3
        assert now_s() == begun_s

    run_virtual(main())


def test_what_is_before_the_last_segment_is_confirmed_whatever_its_nodes_were_told():
    async def main():
        cluster = SmallCluster(3)
        catalog, _, ledger_id, metadata = await left_behind(cluster, quorums=(3, 3, 2), where=[])
        segment = replace(metadata.segments[0], first_entry_id=7)
        metadata = replace(metadata, segments=(*metadata.segments, segment))
        handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
        end = await handle.end()
        assert (end.last_add_confirmed, end.last_entry_id) == (6, 6)

    run_virtual(main())


def test_each_segment_is_read_from_its_own_nodes():
    async def main():
        cluster = SmallCluster(3)
        catalog = await cluster.start()
        metadata = bare_metadata({0: ["n1"], 1: ["n2"], 3: ["n3"]})
        ledger_id = await catalog.bare.create(metadata)
        for first, name in enumerate(["n1", "n2", "n2", "n3"]):
            run = cut(ledger_id, first, b"%d" % first, length_before=first)
            await cluster.nodes[name].add(run)
        # What a replaced node still has is no business of readers.
        await cluster.nodes["n1"].add(cut(ledger_id, 1, b"1", length_before=1))
        await catalog.bare.close(ledger_id, last_entry_id=3, length=4)
        metadata = await catalog.ledgers.get(ledger_id)
        handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
        assert await read(handle, 0, 3) == [b"0", b"1", b"2", b"3"]
        cluster.nodes["n2"].down = True
        for last in (3, 1):
            with pytest.raises(TierlogError):
                await read(handle, 0, last)
        assert await read(handle, 0, 0) == [b"0"]

    run_virtual(main())


def test_a_tail_read_outlives_the_node_that_it_waits_at():
    async def main():
        cluster = SmallCluster(3)
        catalog, _, ledger_id, metadata = await left_behind(cluster, quorums=(3, 3, 2), where=SIX)
        limits = ReaderLimits(wait_speculate_s_max=0.3)
        handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog), limits=limits)
        cluster.nodes["n1"].hung = True
        async with asyncio.TaskGroup() as tasks:

            async def confirm():
                await asyncio.sleep(0.2)
                for node in cluster.nodes.values():
                    node.confirm(ledger_id, 5)

            tasks.create_task(confirm())
            begun_s = now_s()
            runs = [run async for runs in handle.read_runs(4, 5, wait_s=0.3) for run in runs]
        assert payloads(runs) == [b"e", b"f"]
        assert now_s() - begun_s < 1.0

    run_virtual(main())


def test_damage_is_put_into_the_queue_once_even_if_it_can_not_be_at_first():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start()
        refusals = 2

        async def add(ledger_id, **more):
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise RetryableError("no metadata", remedy="wait")
            await catalog.underreplicated.add(ledger_id, **more)

        reports = DamageReports(add, limits=DamageLimits(waiting_max=3))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(reports.run())
            for entry_id in (7, 7, 9, None, 11, 12):
                reports(5, "n1", entry_id)
            await asyncio.sleep(60)
            (queued,) = await catalog.underreplicated.list()
            found = {(one.reason, one.entries) for one in queued.complaints}
            assert found == {(CopyTrouble.DAMAGED, (7, 9)), (CopyTrouble.MISSING, None)}
            reports(5, "n1", 12)
            await asyncio.sleep(1)
            (queued,) = await catalog.underreplicated.list()
            assert (CopyTrouble.DAMAGED, (7, 12)) in {
                (one.reason, one.entries) for one in queued.complaints
            }
            running.cancel()

    run_virtual(main())
