"""What a retired node frees: ledgers that live on without it, for certain; all else it keeps."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from tests.unit.storage.node_kit import make_run, new_disk, opened, virtual
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.catalog import Catalog
from tierlog.format import paths, records
from tierlog.model.errors import Reason, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import COMPONENT_BARE, KEY_COMPONENT, LedgerMetadata, Segment
from tierlog.model.node import Cookie
from tierlog_ingest.storage.emptying import Emptying

pytestmark = pytest.mark.covers("D17")

HERE, THERE = NodeId("here"), NodeId("there")


class Leaving:
    """A node on a memory disk, with ledgers here, elsewhere, of both, and of nobody."""

    def __init__(self) -> None:
        self.disk = new_disk()
        self.faults = Faults(random.Random(1))
        ids, clock = SeededIds(random.Random(2)), SimClock()
        self.store = MemoryMetadata().connect(self.faults)
        self.catalog = Catalog.over(self.store, clock=clock, ids=ids)
        self.ids = ids
        self.made: dict[str, LedgerId] = {}
        self.wanted = 0

    async def begin(self) -> None:
        cluster = await self.catalog.nodes.ensure_cluster()
        for name in (HERE, THERE):
            cookie = Cookie(
                cluster_id=cluster.cluster_id, node_id=name, instance_id=self.ids.uuid()
            )
            await self.store.create(paths.cookie_path(name), records.encode_cookie(cookie))
        for what, ensembles in {
            "here": [HERE],
            "there": [THERE],
            "both": [HERE, THERE],
            "back": [THERE, HERE],
        }.items():
            segments = tuple(
                Segment(first_entry_id=EntryId(10 * at), ensemble=(one,))
                for at, one in enumerate(ensembles)
            )
            self.made[what] = await self.catalog.bare.create(
                LedgerMetadata(
                    ensemble_size=1,
                    write_quorum=1,
                    ack_quorum=1,
                    segments=segments,
                    custom={KEY_COMPONENT: COMPONENT_BARE},
                )
            )
        self.made["nobody's"] = LedgerId(self.made["back"] + 7)

    @asynccontextmanager
    async def node(self):
        async with opened(self.disk) as node:
            for ledger_id in self.made.values():
                if not node.is_freed(ledger_id):
                    await node.add(make_run(ledger_id, 0))
            yield node, Emptying(node, self.catalog, HERE, on_freed=self.want)

    def want(self) -> None:
        self.wanted += 1


@virtual
async def test_only_what_lives_elsewhere_is_freed_and_only_once_the_node_is_retired():
    leaving = Leaving()
    await leaving.begin()
    async with leaving.node() as (node, emptying):
        held = await node.list_ledgers()
        assert await emptying.collect() == []
        await leaving.catalog.draining.begin(HERE)
        assert await emptying.collect() == [], "it may still be chosen"
        assert await node.list_ledgers() == held
        await leaving.catalog.draining.retire(HERE)
        there = leaving.made["there"]
        assert await emptying.collect() == [there]
        assert await node.list_ledgers() == [one for one in held if one != there]
        assert await emptying.collect() == []
        assert leaving.wanted == 1
        with pytest.raises(RefusedError) as caught:
            await node.add(make_run(there, 0), recovery=True)
        assert caught.value.reason is Reason.FENCED, "who copies it here is told"
        with pytest.raises(RefusedError) as caught:
            await node.held_entries(there)
        assert caught.value.reason is Reason.LEDGER_NOT_FOUND
    async with leaving.node() as (node, _):
        assert there not in await node.list_ledgers()
        assert node.is_freed(there)


@virtual
async def test_a_ledger_whose_metadata_cannot_be_read_is_kept_and_holds_up_no_other():
    leaving = Leaving()
    await leaving.begin()
    await leaving.catalog.draining.begin(HERE)
    await leaving.catalog.draining.retire(HERE)
    damaged = leaving.made["here"]
    await leaving.store.set(paths.ledger_path(damaged), b"not a ledger", version=-1)
    async with leaving.node() as (node, emptying):
        assert await emptying.collect() == [leaving.made["there"]]
        assert damaged in await node.list_ledgers()


@pytest.mark.parametrize("call", ["metadata.sync", "metadata.get"])
@pytest.mark.parametrize("nth", range(8))
def test_an_answer_that_does_not_come_frees_nothing_more(call, nth):
    @virtual
    async def run():
        leaving = Leaving()
        await leaving.begin()
        await leaving.catalog.draining.begin(HERE)
        await leaving.catalog.draining.retire(HERE)
        async with leaving.node() as (node, emptying):
            before = await node.list_ledgers()
            for _ in range(nth):
                leaving.faults.next(call, Outcome.ANSWERED)
            leaving.faults.next(call, Outcome.REFUSED)
            try:
                await emptying.collect()
            except TierlogError:
                freed = set(before).difference(await node.list_ledgers())
                assert freed <= {leaving.made["there"]}
            else:
                assert nth > 4, "an error ends the round"

    run()


@virtual
async def test_it_waits_for_the_day_and_outlives_sessions():
    leaving = Leaving()
    await leaving.begin()
    async with leaving.node() as (node, emptying):
        running = asyncio.create_task(emptying.run())
        await asyncio.sleep(5)
        leaving.store.expire_session()
        await asyncio.sleep(5)
        await leaving.catalog.draining.begin(HERE)
        await asyncio.sleep(5)
        assert leaving.made["there"] in await node.list_ledgers()
        await leaving.catalog.draining.retire(HERE)
        await asyncio.sleep(5)
        assert leaving.made["there"] not in await node.list_ledgers()
        assert leaving.made["nobody's"] in await node.list_ledgers(), "garbage collection's"
        running.cancel()
        await asyncio.wait({running})
