"""Emptying a node for good: it ends when no ledger names the node, whatever happens meanwhile; and
what is shown of nodes and of ledgers that lack copies.
"""

# mypy: disable-error-code="arg-type,union-attr,attr-defined"

import asyncio

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.replication.kit import N1, N2, N3, N4, SETTINGS, LackingCluster
from tierlog.client.cluster import node_documents, underreplicated_documents
from tierlog.model.errors import RefusedError
from tierlog.model.ids import NodeId
from tierlog.model.replication import CopyTrouble
from tierlog_ingest.replication.decommission import Progress, decommission, ledgers_on
from tierlog_ingest.replication.service import Replication
from tierlog_ingest.replication.worker import Owning


class Recovering(LackingCluster):
    """One process's auditor and worker at work."""

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
    if not lives:
        await cluster.lose(catalog, N2)
    told: list[Progress] = []
    done = await decommission(cluster.catalog(), N2, tell=told.append)
    assert done.done_ms
    assert told[0].ledgers_left == 5
    assert told[0].first_left == ids[0]
    assert await ledgers_on(catalog, N2) == []
    for ledger_id in ids:
        assert not await cluster.lacks(catalog, ledger_id)
    assert N2 not in await catalog.draining.known_nodes()
    again = await decommission(cluster.catalog(), N2, tell=told.append)
    assert again == done, "once more is no more"
    running.cancel()
    await asyncio.wait({running})


@on_virtual_time
async def test_it_waits_while_a_ledger_names_the_node_and_says_why():
    cluster = Recovering(3)
    catalog = await cluster.begin()
    await cluster.ledger(catalog)
    running = asyncio.create_task(cluster.replication().run())
    told: list[Progress] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await decommission(cluster.catalog(), N2, tell=told.append)
    assert told[-1].trouble == "no other node can take what n2 held"
    assert N2 in await catalog.draining.known_nodes()
    running.cancel()
    await asyncio.wait({running})
    with pytest.raises(RefusedError, match="knows no storage node n9"):
        await decommission(cluster.catalog(), NodeId("n9"), tell=told.append)


@pytest.mark.parametrize("late_s", [0.5, 5.0])
@on_virtual_time
async def test_a_ledger_that_comes_between_two_looks_is_waited_for(late_s):
    cluster = Recovering()
    catalog = await cluster.begin()
    ending = asyncio.create_task(decommission(cluster.catalog(), N2, tell=lambda _: None))
    await asyncio.sleep(late_s)
    await cluster.ledger(catalog)
    await asyncio.sleep(30)
    assert not ending.done()
    running = asyncio.create_task(cluster.replication().run())
    await ending
    assert await ledgers_on(catalog, N2) == []
    running.cancel()
    await asyncio.wait({running})


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
