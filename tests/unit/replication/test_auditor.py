"""The auditor (protocols.md 1, "Auto-recovery"): lost nodes are noticed after the delay, ledgers
that name them are queued, and every copy is compared now and then.
"""

# mypy: disable-error-code="arg-type,union-attr"

import asyncio
import random

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.ledger.small_cluster import STREAM
from tests.unit.replication.kit import N1, N2, N3, SETTINGS, LackingCluster
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format import paths
from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.replication import CopyTrouble
from tierlog_ingest.replication.checking import Checker
from tierlog_ingest.replication.plan import named_nodes


async def _queue(catalog):
    return {one.ledger_id: one for one in await catalog.underreplicated.list()}


async def _rounds(cluster, auditor, seconds: int) -> None:
    for _ in range(seconds):
        await auditor.look_once()
        cluster.clock.advance(1)


@pytest.mark.covers("D17")
@on_virtual_time
async def test_a_lost_node_is_noticed_after_the_delay_and_what_it_held_is_queued():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    named = [await cluster.ledger(catalog) for _ in range(3)]
    other = await cluster.ledger(catalog, quorums=(1, 1, 1))
    auditor = cluster.auditor()
    await cluster.lose(catalog, N2)
    await _rounds(cluster, auditor, 30)
    assert await _queue(catalog) == {}, "it may come back for so long"
    await _rounds(cluster, auditor, 2)
    queue = await _queue(catalog)
    assert sorted(queue) == named
    assert other not in queue
    assert all((one.nodes, one.reasons) == ((N2,), ("lost",)) for one in queue.values())


@on_virtual_time
async def test_a_node_that_comes_back_in_time_is_not_lost():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    await cluster.ledger(catalog)
    auditor = cluster.auditor()
    for _ in range(3):
        await cluster.lose(catalog, N2)
        await _rounds(cluster, auditor, 28)
        await cluster.come_back(catalog, N2)
        await _rounds(cluster, auditor, 1)
    assert await _queue(catalog) == {}


@on_virtual_time
async def test_an_open_ledger_is_queued_after_the_grace_time():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, closed=False)
    auditor = cluster.auditor()
    await cluster.lose(catalog, N2)
    await _rounds(cluster, auditor, 49)
    assert await _queue(catalog) == {}
    await _rounds(cluster, auditor, 3)
    assert sorted(await _queue(catalog)) == [ledger_id]


@on_virtual_time
async def test_ledgers_of_a_node_that_is_emptied_are_queued_later_ones_too():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ids = [await cluster.ledger(catalog)]
    await catalog.draining.begin(N3)
    auditor = cluster.auditor()
    await _rounds(cluster, auditor, 1)
    queue = await _queue(catalog)
    assert sorted(queue) == ids
    assert (queue[ids[0]].nodes, queue[ids[0]].reasons) == ((N3,), ("draining",))
    ids.append(await cluster.ledger(catalog, closed=False))
    await _rounds(cluster, auditor, 7)
    assert sorted(await _queue(catalog)) == ids


@on_virtual_time
async def test_a_node_without_identity_is_known_by_the_ledgers_that_lack_it():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    await cluster.lose(catalog, N2)
    await catalog.draining.begin(N2)
    await catalog.draining.finish(N2)
    await catalog.underreplicated.add(ledger_id, reason="missing", nodes=[N2])
    await _rounds(cluster, cluster.auditor(), 33)
    assert (await _queue(catalog))[ledger_id].reasons == ("lost", "missing")


@pytest.mark.covers("D17")
@on_virtual_time
async def test_one_auditor_at_a_time_and_another_when_it_goes():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    await cluster.ledger(catalog)
    auditors = [cluster.auditor() for _ in range(3)]
    running = [asyncio.create_task(one.run()) for one in auditors]
    await asyncio.sleep(1)
    assert sum(one.leading for one in auditors) == 1
    first = next(at for at, one in enumerate(auditors) if one.leading)
    running[first].cancel()
    await asyncio.wait({running[first]})
    await auditors[first].resign()
    await asyncio.sleep(1)
    assert sum(one.leading for one in auditors) == 1
    await cluster.lose(catalog, N2)
    await asyncio.sleep(40)
    assert len(await _queue(catalog)) == 1
    for task in running:
        task.cancel()
    await asyncio.wait(running)


@pytest.mark.parametrize("seed", range(5))
@on_virtual_time
async def test_an_auditor_goes_on_whatever_the_metadata_answers(seed):
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ids = [await cluster.ledger(catalog) for _ in range(3)]
    rates = FaultRates(refused=0.02, request_lost=0.02, reply_lost=0.02)
    auditor = cluster.auditor(Faults(random.Random(seed), rates=rates))
    running = asyncio.create_task(auditor.run())
    await cluster.lose(catalog, N2)
    await asyncio.sleep(200)
    running.cancel()
    await asyncio.wait({running})
    assert sorted(await _queue(catalog)) == ids


def _checker(cluster, catalog) -> Checker:
    return Checker(
        catalog,
        cluster.directory(catalog),
        clock=cluster.clock,
        settings=SETTINGS.model_copy(update={"check_interval_s": 100.0}),
    )


@pytest.mark.covers("D17")
@on_virtual_time
async def test_the_full_check_finds_copies_that_nobody_reported():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    whole = await cluster.ledger(catalog, quorums=(3, 2, 2), stripe_entries=1)
    lacking = await cluster.ledger(catalog, lacking={N1})
    one_entry = await cluster.ledger(catalog, quorums=(3, 2, 2), stripe_entries=1)
    del cluster.nodes[N2].runs[one_entry][1]
    await cluster.ledger(catalog, closed=False, lacking={N3})
    assert await _checker(cluster, catalog).check_all() == 2
    queue = await _queue(catalog)
    assert {key: one.nodes for key, one in queue.items()} == {lacking: (N1,), one_entry: (N2,)}
    assert whole not in queue


@on_virtual_time
async def test_a_node_that_can_not_be_asked_is_no_complaint():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    await cluster.ledger(catalog)
    cluster.nodes[N2].down = True
    assert await _checker(cluster, catalog).check_all() == 0


@on_virtual_time
async def test_the_full_check_finds_what_lies_on_a_node_that_the_cluster_no_longer_knows():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    await catalog.store.delete(paths.cookie_path(N2), version=-1)
    assert await _checker(cluster, catalog).check_all() == 0, "it still serves"
    await cluster.lose(catalog, N2)
    await _rounds(cluster, cluster.auditor(), 60)
    assert await _queue(catalog) == {}, "who looks for lost nodes goes by their identities"
    assert await _checker(cluster, catalog).check_all() == 1
    (one,) = (await _queue(catalog)).values()
    assert (one.ledger_id, one.nodes, one.reasons) == (ledger_id, (N2,), (CopyTrouble.LOST,))
    await cluster.worker().round()
    assert N2 not in named_nodes(await cluster.metadata_of(catalog, ledger_id))
    assert not await cluster.lacks(catalog, ledger_id)


@on_virtual_time
async def test_a_ledger_that_can_not_be_read_keeps_no_other_from_being_checked():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    first, second = [await cluster.ledger(catalog, lacking={N1}) for _ in range(2)]
    await catalog.store.set(paths.ledger_path(first), b"damaged", version=-1)
    assert await _checker(cluster, catalog).check_all() == 1
    assert sorted(await _queue(catalog)) == [second]


@on_virtual_time
async def test_the_full_check_comes_once_an_interval_whoever_is_auditor():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, lacking={N1})

    async def run_for(seconds: int) -> None:
        running = asyncio.create_task(_checker(cluster, cluster.catalog()).run())
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.wait({running})

    await run_for(60)
    assert await _queue(catalog) == {}
    await run_for(60)
    assert sorted(await _queue(catalog)) == [ledger_id]
    (one,) = (await _queue(catalog)).values()
    begun = await catalog.underreplicated.begin(one, worker="w")
    await catalog.underreplicated.remove(LedgerId(one.ledger_id), begun.version)
    await run_for(60)
    assert await _queue(catalog) == {}


@on_virtual_time
async def test_a_ledger_that_can_not_be_read_keeps_no_other_from_being_found():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    first, second = [await cluster.ledger(catalog) for _ in range(2)]
    await catalog.store.set(paths.ledger_path(first), b"damaged", version=-1)
    await cluster.lose(catalog, NodeId("n2"))
    await _rounds(cluster, cluster.auditor(), 32)
    assert sorted(await _queue(catalog)) == [second]
    assert (await catalog.streams.snapshot(STREAM)).ledgers
