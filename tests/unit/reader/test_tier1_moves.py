"""A ledger may go on, or its runs move, to other nodes at any time (ADR-0016)."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,dict-item,union-attr"

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster
from tests.unit.ledger.test_recovery import cut, left_behind
from tierlog.ledger.ensemble_change import with_replacements
from tierlog.model.errors import Reason, TierlogError
from tierlog.model.position import Position
from tierlog_reader.chunk import Budget
from tierlog_reader.source import StreamSource
from tierlog_reader.tier1 import StorageNodeTier
from tierlog_reader.views import Views

BUDGET = Budget(entries_max=10, bytes_max=1000, wait_s=0)


def test_runs_that_moved_are_found_by_a_fresh_look_at_the_metadata():
    async def main():
        cluster = SmallCluster(2)
        where = [((0, (b"a", b"bb"), -1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        await cluster.recovery(catalog).recover(claimed, ledger_id)
        views = Views(catalog, age_s_max=3600, entries_max=10)
        damages = []
        tier = StorageNodeTier(
            views, cluster.directory(catalog), on_damage=lambda *damage: damages.append(damage)
        )
        (listed,) = (await catalog.streams.snapshot(STREAM)).ledgers
        assert (await tier.read(listed, 0, BUDGET)).count == 2

        await cluster.nodes["n2"].add(cluster.nodes["n1"].runs.pop(ledger_id)[0], recovery=True)
        await catalog.underreplicated.replace_member(
            ledger_id, first_entry_id=0, leaving="n1", joining="n2"
        )
        assert (await tier.read(listed, 0, BUDGET)).count == 2
        assert damages == [(ledger_id, "n1", None)]

        # Where nothing has moved, there is nothing to look for elsewhere.
        cluster.nodes["n2"].down = True
        with pytest.raises(TierlogError) as caught:
            await tier.read(listed, 0, BUDGET)
        assert caught.value.reason is Reason.UNKNOWN

    run_virtual(main())


def test_the_end_is_asked_of_the_nodes_that_a_ledger_has_now():
    async def main():
        cluster = SmallCluster(4)
        where = [((0, (b"a",), -1), ["n1", "n2", "n3"])]
        catalog, claimed, ledger_id, metadata = await left_behind(
            cluster, quorums=(3, 3, 2), where=where
        )
        cluster.nodes["n2"].confirm(ledger_id, 0)
        views = Views(catalog, age_s_max=3600, entries_max=10)
        source = StreamSource(views, StorageNodeTier(views, cluster.directory(catalog)), None)
        assert (await source.bounds(STREAM))[1] == Position(ledger_id, 1)

        # Another node comes in; it and one more acknowledge, and that one goes.
        changed = with_replacements(metadata, {"n1": "n4"}, 1)
        await catalog.ledgers.change_ensemble(claimed, ledger_id, metadata, changed)
        for name in ("n3", "n4"):
            await cluster.nodes[name].add(cut(ledger_id, 1, b"b", lac=0))
            cluster.nodes[name].confirm(ledger_id, 1)
        cluster.nodes["n3"].down = True
        assert (await source.bounds(STREAM))[1] == Position(ledger_id, 2)

    run_virtual(main())
