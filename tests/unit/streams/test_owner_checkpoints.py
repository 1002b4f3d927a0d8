"""Idle streams that nobody owns, and whose retention waits for a checkpoint, get one.

Their owner ended before its last flush was through. Must hold: nobody's stream is claimed for
nothing, and one that has an owner is left to it.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM
from tests.unit.streams.attribute_world import W1, AttributeCluster, send
from tests.unit.streams.test_owner_attribute_losses import no_flush
from tests.unit.streams.test_owners import running
from tierlog.catalog.attributes import Publication
from tierlog.model.attribute_record import KeptRoot
from tierlog.model.policy import Policy
from tierlog.model.position import Position

TRIMS = Policy(retention_size_bytes=0)
INTERVAL_S = 60


async def left_without_checkpoint(cluster, policy, *, is_declared=True):
    """Write to a stream, and drain its owner while tier 2 takes nothing; return the catalog."""
    catalog = await cluster.start(policy=policy)
    owners = cluster.owners(faults=no_flush())
    async with running(owners):
        await send(owners, STREAM, W1, 1)
    stream = await catalog.streams.get(STREAM)
    assert (stream.owner, stream.ledgers[-1].closed) == (None, True)
    assert cluster.index.newest == {}
    if is_declared:
        await catalog.attributes.declare(stream)
    return catalog


@contextlib.asynccontextmanager
async def seeing_to(*owners):
    """Run owners that see to checkpoints."""
    async with running(*owners, drain=False), asyncio.TaskGroup() as tasks:
        seeing = [tasks.create_task(one.see_to_checkpoints()) for one in owners]
        yield
        for one in seeing:
            one.cancel()


def test_a_stream_whose_last_flush_failed_is_owned_until_it_has_its_checkpoint():
    async def main():
        cluster = AttributeCluster(2, checkpoint_interval_s=INTERVAL_S)
        catalog = await left_without_checkpoint(cluster, TRIMS)
        owners = [cluster.owners(name) for name in ("n1", "n2")]
        async with seeing_to(*owners):
            await asyncio.sleep(3 * INTERVAL_S)
            (newest,) = cluster.index.newest.values()
            assert newest.through == Position(0, 0)
            # One of them claimed it, once.
            assert (await catalog.streams.get(STREAM)).owner_epoch == 2
            assert sum(len(one.statistics()) for one in owners) == 1

    run_virtual(main())


@pytest.mark.parametrize("why", ["no limit", "not declared", "a checkpoint", "an owner", "drains"])
def test_a_stream_is_not_claimed_for_nothing(why):
    async def main():
        cluster = AttributeCluster(2, checkpoint_interval_s=INTERVAL_S)
        policy = Policy() if why == "no limit" else TRIMS
        catalog = await left_without_checkpoint(cluster, policy, is_declared=why != "not declared")
        if why == "a checkpoint":
            stream = await catalog.streams.get(STREAM)
            record = await catalog.attributes.get(STREAM)
            after = KeptRoot(through=Position(0, 0))
            made = Publication(base=record.newest, generation=record.generation, after=after)
            await catalog.attributes.publish(stream, made)
        if why == "an owner":
            await catalog.streams.claim(STREAM, "n2")
        before = await catalog.streams.get(STREAM)
        owners = cluster.owners("n1")
        async with seeing_to(owners):
            if why == "drains":
                owners.hand_over()
            await asyncio.sleep(20 * INTERVAL_S)
            assert owners.statistics() == []
        assert await catalog.streams.get(STREAM) == before

    run_virtual(main())
