"""Attributes of an owner when something moves on beside it: checkpoints, trims, deletions, timers.

Must hold: a rebuild goes on from what is there now; what is confirmed is flushed without another
append; nothing is started once the owner ends.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.catalog.world import on_virtual_time
from tests.unit.ledger.small_cluster import STREAM, NoConnector
from tests.unit.streams.attribute_world import (
    KEY,
    W1,
    AttributeCluster,
    key_of,
    one_owner,
    plus,
    send,
)
from tests.unit.streams.test_owners import running
from tierlog.adapters.memory.attributes import MemoryAttributeIndex
from tierlog.adapters.memory.faults import FaultRates, no_faults
from tierlog.adapters.memory.storage_node import MemoryStorageNode
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.position import Position
from tierlog.model.trimming import TrimGrounds
from tierlog.ports.spending import Cause, Purpose, purpose


def newest(cluster):
    (checkpoint,) = cluster.index.newest.values()
    return checkpoint


async def filled(cluster, *, ledgers=3):
    """Write a ledger an event; no checkpoint of them is published."""
    faults = no_faults()
    faults.outages.add("attributes.flush")
    owners = cluster.owners(faults=faults)
    async with running(owners, drain=False):
        for number in range(1, ledgers + 1):
            await send(owners, STREAM, W1, number)
            await owners.seal(STREAM)


async def trim(catalog, *ledger_ids):
    """Take the oldest ledgers of the stream, as retention does."""
    stream = await catalog.streams.get(STREAM)
    grounds = TrimGrounds.of(stream, await catalog.policies.levels())
    wanted = [LedgerId(one) for one in ledger_ids]
    await catalog.retention.begin_trim(STREAM, stream.incarnation, wanted, grounds=grounds)
    for ledger_id in wanted:
        await catalog.retention.drop_tier1(ledger_id)
        await catalog.retention.finish_trim(STREAM, stream.incarnation, ledger_id)


def test_a_rebuild_goes_on_from_a_checkpoint_that_is_published_meanwhile():
    async def main():
        cluster = AttributeCluster()
        catalog = await cluster.start()
        await filled(cluster)
        node = cluster.nodes["n1"]
        node.down = True
        owners = cluster.owners()
        async with running(owners):
            asked = asyncio.create_task(owners.get_attributes(STREAM, [key_of(W1)]))
            await asyncio.sleep(30)
            # A flush of before arrives late, and retention takes all that it has.
            stream = await catalog.streams.get(STREAM)
            cluster.index.flush(
                stream,
                cluster.index.load(stream),
                changes={key_of(W1): 2},
                core={},
                through=Position(1, 0),
            )
            await trim(catalog, 0, 1)
            node.down = False
            async with asyncio.timeout(600):
                assert (await asked).values == {key_of(W1): 3}
            await send(owners, STREAM, W1, 4)

    run_virtual(main())


def test_a_stream_that_is_deleted_during_its_rebuild_ends_its_owner():
    async def main():
        cluster = AttributeCluster()
        catalog = await cluster.start()
        await filled(cluster)
        cluster.nodes["n1"].down = True
        owners = cluster.owners()
        async with running(owners):
            asked = asyncio.create_task(owners.get_attributes(STREAM, [key_of(W1)]))
            await asyncio.sleep(30)
            stream = await catalog.retention.begin_stream_deletion(STREAM)
            await trim(catalog, 0, 1, 2)
            await catalog.retention.remove_stream(STREAM, stream.incarnation)
            with pytest.raises(RefusedError) as caught:
                async with asyncio.timeout(600):
                    await asked
            assert caught.value.reason is Reason.STREAM_NOT_FOUND

    run_virtual(main())


def test_a_fetch_from_a_base_that_was_swept_goes_on_from_the_newest(monkeypatch):
    async def main():
        cluster = AttributeCluster(cached_max=3)
        await cluster.start()
        writers = [UUID(int=(number + 1) << 100) for number in range(5)]
        get, swept = MemoryAttributeIndex.get, []

        async def get_unless_swept(index, checkpoint, keys):
            if checkpoint in swept:
                raise CorruptError("a page is not there", remedy="Load the checkpoint again")
            return await get(index, checkpoint, keys)

        monkeypatch.setattr(MemoryAttributeIndex, "get", get_unless_swept)
        owners = cluster.owners()
        async with running(owners):
            for writer in writers:
                await send(owners, STREAM, writer, 1)
                await owners.seal(STREAM)
                await asyncio.sleep(1)
            await send(owners, STREAM, writers[-1], 2)
            # Published by a flush that the owner does not know of.
            base = newest(cluster)
            swept.append(base)
            stream = await cluster.catalog().streams.get(STREAM)
            cluster.index.flush(
                stream, base, changes={key_of(writers[-1]): 2}, core={}, through=Position(5, 0)
            )
            async with asyncio.timeout(4):
                await send(owners, STREAM, writers[0], 2)

    run_virtual(main())


@on_virtual_time
async def test_what_is_confirmed_during_a_flush_is_flushed_without_another_append():
    faults = no_faults()
    faults.rates_by_prefix = {"attributes.flush": FaultRates(delay_s_max=100)}
    async with one_owner(faults=faults, checkpoint_updates=2, checkpoint_interval_s=60) as (
        cluster,
        owners,
    ):
        await send(owners, STREAM, W1, 1)
        await send(owners, STREAM, W1, 2)
        await asyncio.sleep(0.5)
        await send(owners, STREAM, W1, 3)
        await asyncio.sleep(600)
        assert newest(cluster).through == Position(0, 2)


@on_virtual_time
async def test_the_last_checkpoint_has_what_was_confirmed_during_the_flush_before():
    faults = no_faults()
    faults.rates_by_prefix = {"attributes.flush": FaultRates(delay_s_max=10)}
    async with one_owner(faults=faults, checkpoint_updates=1, checkpoint_timeout_s=60) as (
        cluster,
        owners,
    ):
        for number in range(1, 4):
            await send(owners, STREAM, W1, number)
    assert newest(cluster).through == Position(0, 2)


def test_an_owner_that_is_cut_off_starts_nothing_any_more():
    async def main():
        cluster = AttributeCluster(checkpoint_interval_s=1)
        await cluster.start()
        trouble = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: trouble.append(told))
        owners = cluster.owners()
        async with running(owners, drain=False):
            await send(owners, STREAM, W1, 1)
            # Its writer takes its time to end.
            (owner,) = owners._owners.values()
            held = asyncio.create_task(asyncio.sleep(5))

            async def slow_end():
                try:
                    await asyncio.sleep(1000)
                finally:
                    await asyncio.shield(held)

            owner._keeper._tasks.create_task(slow_end())
            await asyncio.sleep(0.5)
        assert trouble == []

    run_virtual(main())


@pytest.mark.parametrize("trouble", ["down", "damaged", "lost in the middle"])
def test_a_rebuild_reads_the_copy_of_what_the_nodes_do_not_give(trouble):
    async def main():
        cluster = AttributeCluster()
        await cluster.start()
        faults = no_faults()
        faults.outages.add("attributes.flush")
        owners = cluster.owners(faults=faults)
        async with running(owners, drain=False):
            for number in range(1, 7):
                await send(owners, STREAM, W1, number, updates=(plus(1),))
            await owners.seal(STREAM)
        catalog, node, asked = cluster.catalog(), cluster.nodes["n1"], []
        # The copy: as the node had it all.
        copy = MemoryStorageNode(NodeId("n1"))
        copy.runs = {LedgerId(0): dict(node.runs[LedgerId(0)])}
        copies = NodeDirectory(catalog.nodes.live, NoConnector(), local={NodeId("n1"): copy})
        if trouble == "down":
            node.down = True
        first = 0 if trouble == "damaged" else max(node.runs[LedgerId(0)])
        if trouble != "down":
            node.damaged.add((LedgerId(0), first))

        purposes = set()

        async def open_copy(ledger_id):
            asked.append(ledger_id)
            purposes.add(purpose())
            if len(asked) == 1:
                raise RefusedError(
                    "no copy yet", reason=Reason.LEDGER_NOT_FOUND, remedy="Ask again"
                )
            return Tier1ReadHandle(ledger_id, await catalog.ledgers.get(ledger_id), copies)

        owners = cluster.owners(open_copy=open_copy)
        async with running(owners, drain=False):
            async with asyncio.timeout(60):
                found = await owners.get_attributes(STREAM, [key_of(W1), key_of(KEY), EVENT_COUNT])
            assert found.values == {key_of(W1): 6, key_of(KEY): 6, EVENT_COUNT: 6}
            assert asked == [0, 0]
            assert purposes == {Purpose(Cause.ATTRIBUTES, STREAM)}, "what it costs is told so"

    run_virtual(main())


def test_an_outage_of_a_day_ends_no_owner_and_what_waited_for_its_end_is_flushed():
    async def main():
        cluster, faults = AttributeCluster(), no_faults()
        await cluster.start()
        owners = cluster.owners(faults=faults)
        async with running(owners):
            await send(owners, STREAM, W1, 1)
            faults.outages.add("attributes.flush")
            (owner,) = owners._owners.values()
            owner._keeper.flush_soon()
            await asyncio.sleep(86_400)
            await send(owners, STREAM, W1, 2)
            assert owners._owners == {STREAM: owner}
            faults.outages.clear()
            await asyncio.sleep(60)
            assert str(newest(cluster).through) == "1:0", "its ledger has rolled since"

    run_virtual(main())
