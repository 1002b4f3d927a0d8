"""A closed ledger's runs may move to other nodes at any time (ADR-0016, auto-recovery)."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr"

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster
from tests.unit.ledger.test_recovery import left_behind
from tierlog.model.errors import Reason, TierlogError
from tierlog_reader.chunk import Budget
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
