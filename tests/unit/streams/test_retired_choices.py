"""A node that was chosen and is retired before it is named: the choice is made again (ADR-0016)."""

# mypy: disable-error-code="arg-type,union-attr,var-annotated"

import asyncio
from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.client.test_ledgers import THREE, using
from tests.unit.ledger.small_cluster import SmallCluster, bare_metadata
from tests.unit.streams.test_owner_ensembles import append, lone_owners, segments
from tests.unit.streams.test_owners import read_stream, running
from tierlog.catalog import BareLedgerCatalog, LedgerCatalog
from tierlog.format import paths, records
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.ledger.ensemble_change import Ensembles
from tierlog.model.errors import RetryableError
from tierlog.model.ids import NodeId
from tierlog.model.ledger import LedgerState
from tierlog.model.node import Cookie

pytestmark = pytest.mark.covers("D17")


class Retiring(SmallCluster):
    """A cluster whose nodes have identities, so that they can be retired."""

    async def begin(self):
        catalog = await self.start()
        cluster = await catalog.nodes.ensure_cluster()
        for name in self.names:
            cookie = Cookie(
                cluster_id=cluster.cluster_id, node_id=name, instance_id=self.ids.uuid()
            )
            await catalog.store.create(paths.cookie_path(name), records.encode_cookie(cookie))
        return catalog

    async def retire(self, name, *, told=True):
        catalog = self.catalog()
        await catalog.draining.begin(name)
        await catalog.draining.retire(name)
        if told:
            await catalog.nodes.amend(replace(self.info(name), draining=True))

    def once(self, change, chosen):
        """Retire the node that ``chosen`` names just before the first such change."""
        retired = []

        async def late(*arguments, **named):
            if not retired:
                retired.append(chosen(*arguments, **named))
                await self.retire(retired[0])
            return await change(*arguments, **named)

        return retired, late


@pytest.mark.parametrize("count", [3, 4])
def test_an_owner_opens_its_ledger_on_other_nodes(count):
    async def main():
        cluster = Retiring(count)
        await cluster.begin()
        retired, late = cluster.once(
            LedgerCatalog.open,
            lambda _self, _claimed, _id, metadata, **_: metadata.segments[0].ensemble[-1],
        )
        owners = lone_owners(cluster)
        with patch.object(LedgerCatalog, "open", late):
            async with running(owners):
                appending = asyncio.create_task(append(owners, 0))
                await asyncio.sleep(3)
                if count == 3:
                    assert not appending.done(), "two nodes are too few; the third is no stand-in"
                    appending.cancel()
                    return
                assert await appending == [(0, 0, 0)]
        ((_, ensemble),) = await segments(cluster, 0)
        assert ensemble == set(cluster.names) - set(retired)
        assert await read_stream(cluster) == [b"0"]

    run_virtual(main())


def test_a_writer_goes_on_without_the_node_and_asks_for_another():
    async def main():
        cluster = Retiring(5)
        await cluster.begin()
        owners = lone_owners(cluster)
        async with running(owners):
            await append(owners, 0)
            ((_, ensemble),) = await segments(cluster, 0)
            gone = max(ensemble - {"n1"})
            retired, late = cluster.once(
                LedgerCatalog.change_ensemble,
                lambda _self, _claimed, _id, before, after: (
                    set(after.segments[-1].ensemble) - set(before.segments[-1].ensemble)
                ).pop(),
            )
            with patch.object(LedgerCatalog, "change_ensemble", late):
                cluster.nodes[gone].down = True
                assert await append(owners, 1) == [(0, 1, 1)]
                await asyncio.sleep(5)
                assert await append(owners, 2) == [(0, 2, 2)]
        named = set().union(*(one for _, one in await segments(cluster, 0)))
        assert retired
        assert named.isdisjoint(retired)
        assert len(named) == 4, "another took the place"
        assert await read_stream(cluster) == [b"0", b"1", b"2"]

    run_virtual(main())


def test_a_recovery_is_done_again_over_other_nodes():
    async def main():
        cluster = Retiring(5)
        catalog = await cluster.begin()
        metadata = bare_metadata({0: ["n1", "n2", "n3"]}, (3, 3, 2))
        ledger_id = await catalog.bare.create(metadata)
        frames, offsets = pack_entries([b"entry"], 0)
        run = build_run(frames, offsets, ledger_id=ledger_id, first_entry_id=0, ledger_len=5)
        for name in ("n1", "n2"):
            await cluster.nodes[NodeId(name)].add(run)
        cluster.nodes[NodeId("n3")].down = True
        retired, late = cluster.once(
            BareLedgerCatalog.close,
            lambda *_, segments, **__: (set(segments[-1].ensemble) - {"n1", "n2", "n3"}).pop(),
        )
        with patch.object(BareLedgerCatalog, "close", late):
            closed = await cluster.recovery(catalog).recover(None, ledger_id)
        assert (closed.state, closed.last_entry_id) == (LedgerState.CLOSED, 0)
        assert retired
        assert closed.named_nodes.isdisjoint(retired)

    run_virtual(main())


def test_an_application_makes_its_ledger_on_other_nodes():
    async def main():
        cluster = Retiring(4)
        await cluster.begin()
        retired, late = cluster.once(
            BareLedgerCatalog.create, lambda _self, metadata, **_: metadata.segments[0].ensemble[0]
        )
        with patch.object(BareLedgerCatalog, "create", late):
            async with using(cluster) as ledgers:
                ledger = await ledgers.create(THREE)
                assert await ledger.append(b"one") == 0
                closed = await ledger.close()
        assert closed.named_nodes == set(cluster.names) - set(retired)

    run_virtual(main())


def test_a_retired_node_does_not_stand_in_for_one_that_is_missing():
    async def main():
        cluster = Retiring(3)
        catalog = await cluster.begin()
        ensembles = Ensembles(catalog, cluster.directory(catalog))
        await cluster.retire(NodeId("n3"))
        await catalog.store.delete(paths.available_path(NodeId("n3")), version=-1)
        with pytest.raises(RetryableError, match="needs"):
            await ensembles.open(ensemble_size=3, write_quorum=3, ack_quorum=2, seed=b"s")

    run_virtual(main())
