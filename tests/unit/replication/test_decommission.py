"""Emptying a node for good: it ends when no ledger names the node, nor ever can, and the node holds
nothing, whatever happens meanwhile; and what is shown of nodes and of ledgers that lack copies.
"""

# mypy: disable-error-code="arg-type,union-attr,attr-defined"

import asyncio
from unittest.mock import patch

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.replication.kit import N1, N2, N3, N4, SETTINGS, LackingCluster
from tierlog.catalog import DrainingCatalog
from tierlog.client.cluster import node_documents, underreplicated_documents
from tierlog.model.errors import RefusedError
from tierlog.model.ids import NodeId
from tierlog.model.replication import CopyTrouble, Draining
from tierlog_ingest.replication.decommission import Progress, decommission, ledgers_on
from tierlog_ingest.replication.service import Replication
from tierlog_ingest.replication.worker import Owning
from tierlog_ingest.storage.emptying import Emptying


class Recovering(LackingCluster):
    """One process's auditor and worker at work; each live node empties itself when it is to."""

    async def decommission(self, node_id: NodeId, *, tell) -> Draining:
        catalog = self.catalog()
        return await decommission(catalog, self.directory(catalog), node_id, tell=tell)

    def emptying(self, node_id: NodeId) -> Emptying:
        return Emptying(self.nodes[node_id], self.catalog(), node_id)

    def replication(self, *, node_id: NodeId = N1, enabled: bool = True) -> Replication:
        async def seal(_stream):
            return None

        async def recover_bare(_ledger_id):
            return None

        catalog = self.catalog()
        return Replication(
            catalog,
            self.directory(catalog),
            Owning(node_id=node_id, seal=seal, recover_bare=recover_bare),
            clock=self.clock,
            ids=self.ids,
            settings=SETTINGS.model_copy(update={"enabled": enabled}),
        )


@pytest.mark.covers("D17")
@pytest.mark.parametrize("lives", [True, False])
@on_virtual_time
async def test_it_ends_when_no_ledger_names_the_node_and_the_id_is_barred(lives):
    cluster = Recovering()
    catalog = await cluster.begin()
    ids = [await cluster.ledger(catalog) for _ in range(5)]
    running = asyncio.create_task(cluster.replication().run())
    emptying = asyncio.create_task(cluster.emptying(N2).run())
    if not lives:
        await cluster.lose(catalog, N2)
    told: list[Progress] = []
    done = await cluster.decommission(N2, tell=told.append)
    assert done.done_ms
    assert done.said_empty is lives, "who is gone can't be asked"
    assert bool(cluster.nodes[N2].runs) is not lives
    assert told[0].ledgers_left == 5
    assert told[0].first_left == ids[0]
    assert await ledgers_on(catalog, N2) == []
    for ledger_id in ids:
        assert not await cluster.lacks(catalog, ledger_id)
    assert N2 not in await catalog.draining.known_nodes()
    again = await cluster.decommission(N2, tell=told.append)
    assert again == done, "once more is no more"
    for task in (running, emptying):
        task.cancel()
    await asyncio.wait({running, emptying})


@on_virtual_time
async def test_it_waits_while_a_ledger_names_the_node_and_says_why():
    cluster = Recovering(3)
    catalog = await cluster.begin()
    await cluster.ledger(catalog)
    running = asyncio.create_task(cluster.replication().run())
    told: list[Progress] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await cluster.decommission(N2, tell=told.append)
    assert told[-1].trouble == "no other node can take what n2 held"
    assert N2 in await catalog.draining.known_nodes()
    running.cancel()
    await asyncio.wait({running})
    with pytest.raises(RefusedError, match="knows no storage node n9"):
        await cluster.decommission(NodeId("n9"), tell=told.append)


@on_virtual_time
async def test_whoever_waits_hears_that_it_was_called_off():
    cluster = Recovering(3)
    catalog = await cluster.begin()
    await cluster.ledger(catalog)
    told: list[Progress] = []
    waiting = asyncio.create_task(cluster.decommission(N2, tell=told.append))
    await asyncio.sleep(5)
    await catalog.draining.cancel(N2)
    with pytest.raises(RefusedError, match="called off"):
        async with asyncio.timeout(30):
            await waiting


@pytest.mark.covers("D17")
@on_virtual_time
async def test_it_waits_until_the_node_says_that_it_holds_nothing():
    cluster = Recovering()
    catalog = await cluster.begin()
    ids = [await cluster.ledger(catalog) for _ in range(3)]
    running = asyncio.create_task(cluster.replication().run())
    told: list[Progress] = []
    ending = asyncio.create_task(cluster.decommission(N2, tell=told.append))
    await asyncio.sleep(120)
    assert not ending.done(), "its bytes are still there"
    assert told[-1] == Progress(ledgers_left=3, first_left=ids[0], trouble="", retired=True)
    assert await ledgers_on(catalog, N2) == []
    assert N2 in await catalog.draining.known_nodes()
    with pytest.raises(RefusedError, match="frees what it holds"):
        await catalog.draining.cancel(N2)
    cluster.nodes[N2].down = True  # its process hangs, its session lives
    await asyncio.sleep(60)
    assert "can't be reached" in told[-1].trouble
    assert not ending.done(), "not known is not nothing"
    cluster.nodes[N2].down = False
    assert await cluster.emptying(N2).collect() == ids
    assert (await ending).said_empty
    running.cancel()
    await asyncio.wait({running})


@on_virtual_time
async def test_a_node_that_is_away_for_a_moment_is_waited_for():
    cluster = Recovering()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    running = asyncio.create_task(cluster.replication().run())
    ending = asyncio.create_task(cluster.decommission(N2, tell=lambda _: None))
    while not await catalog.draining.is_retired(N2):
        await asyncio.sleep(1)
    await cluster.lose(catalog, N2)
    await asyncio.sleep(10)
    await cluster.come_back(catalog, N2)
    await asyncio.sleep(30)
    assert not ending.done()
    assert await cluster.emptying(N2).collect() == [ledger_id]
    assert (await ending).said_empty
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.covers("D17")
@on_virtual_time
async def test_a_ledger_that_was_made_to_name_the_node_just_before_it_was_retired_is_waited_for():
    cluster = Recovering()
    catalog = await cluster.begin()
    retire, made = DrainingCatalog.retire, []

    async def raced(self, node):
        made.append(await cluster.ledger(catalog))  # after the look that found none
        return await retire(self, node)

    with patch.object(DrainingCatalog, "retire", raced):
        ending = asyncio.create_task(cluster.decommission(N2, tell=lambda _: None))
        await asyncio.sleep(30)
    assert not ending.done()
    assert await ledgers_on(catalog, N2) == made
    assert await cluster.emptying(N2).collect() == [], "what names the node is kept"
    running = asyncio.create_task(cluster.replication().run())
    emptying = asyncio.create_task(cluster.emptying(N2).run())
    assert (await ending).said_empty
    assert not await cluster.lacks(catalog, made[0])
    for task in (running, emptying):
        task.cancel()
    await asyncio.wait({running, emptying})


@on_virtual_time
async def test_a_node_learns_that_it_is_to_be_emptied_whatever_becomes_of_its_session():
    cluster = Recovering()
    catalog = await cluster.begin()
    told: list[bool] = []
    replication = cluster.replication(node_id=N2)
    telling = asyncio.create_task(replication.tell_draining(told.append))
    await asyncio.sleep(1)
    assert told == [False]
    await catalog.draining.begin(N2)
    await asyncio.sleep(1)
    assert told == [False, True]
    replication._catalog.store.expire_session()
    await catalog.draining.cancel(N2)
    await asyncio.sleep(5)
    assert told[-1] is False
    telling.cancel()
    await asyncio.wait({telling})


@on_virtual_time
async def test_what_is_switched_off_does_nothing():
    cluster = Recovering()
    catalog = await cluster.begin()
    await cluster.ledger(catalog, lacking={N2})
    await asyncio.wait_for(cluster.replication(enabled=False).run(), 1)
    assert cluster.replication().statistics()["queue_ledgers"] == 0


@on_virtual_time
async def test_nodes_and_ledgers_are_shown_as_they_are():
    cluster = Recovering()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    await cluster.lose(catalog, N2)
    await catalog.draining.begin(N3)
    await catalog.draining.begin(N4)
    await catalog.draining.finish(N4)
    shown = {row["node_id"]: row for row in await node_documents(catalog)}
    states = {name: row["state"] for name, row in shown.items()}
    assert states == {N1: "live", N2: "away", N3: "draining", N4: "decommissioned"}
    assert (shown[N2]["live"], shown[N3]["live"]) == (False, True)
    assert shown[N1]["wire"] == "n1:1"
    assert await underreplicated_documents(catalog) == []
    await catalog.underreplicated.add(
        ledger_id, reason=CopyTrouble.DAMAGED, nodes=[N1], entries=(1, 2)
    )
    (row,) = await underreplicated_documents(catalog)
    assert (row["ledger_id"], row["reasons"], row["nodes"]) == (ledger_id, ["damaged"], [N1])
    assert row["complaints"] == [{"node_id": N1, "reason": "damaged", "entries": [1, 2]}]
    assert (row["tries"], row["last_error"]) == (0, None)
