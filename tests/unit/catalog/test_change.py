"""Protocols, first rule: "a compare-and-set whose answer was lost is resolved by sync() and
reading back; until then nothing is told".
"""

import pytest

from tests.unit.catalog.world import NODE, ORDERS, World, on_virtual_time
from tierlog.adapters.memory.faults import FaultRates, Outcome
from tierlog.model.errors import IndeterminateError, RetryableError


@on_virtual_time
async def test_a_lost_reply_is_read_back_and_the_change_is_made_once():
    world = World()
    process = world.process()
    await process.catalog.streams.create(ORDERS)
    process.faults.next("metadata.set", Outcome.REPLY_LOST)
    claimed = await process.catalog.streams.claim(ORDERS, NODE)
    assert claimed.owner_epoch == 1
    assert (await process.catalog.streams.snapshot(ORDERS)).stream == claimed


@on_virtual_time
async def test_a_lost_request_is_read_back_and_made_again():
    world = World()
    process = world.process()
    await process.catalog.streams.create(ORDERS)
    process.faults.next("metadata.set", Outcome.REQUEST_LOST)
    assert (await process.catalog.streams.claim(ORDERS, NODE)).owner_epoch == 1


@on_virtual_time
async def test_a_lost_reply_is_followed_by_sync_before_anything_is_read():
    world = World()
    process = world.process()
    await process.catalog.streams.create(ORDERS)
    process.faults.next("metadata.set", Outcome.REPLY_LOST)
    process.faults.calls = []
    await process.catalog.streams.claim(ORDERS, NODE)
    assert process.faults.calls == [
        "metadata.get",
        "metadata.set",
        "metadata.sync",
        "metadata.get",
    ]


@pytest.mark.parametrize("unreachable", ["metadata", "metadata.sync", "metadata.get"])
def test_an_outcome_that_stays_unknown_is_told_as_unknown(unreachable):
    """A lost answer, and then no read succeeds: neither success nor failure is claimed."""

    @on_virtual_time
    async def main():
        world = World()
        process = world.process()
        await process.catalog.streams.create(ORDERS)

        class Lost:
            """Loses the answer to a change; from then on the store can't be read."""

            def __getattr__(self, name):
                return getattr(process.client, name)

            async def set(self, path, data, *, version):
                process.faults.next("metadata.set", Outcome.REPLY_LOST)
                process.faults.outages.add(unreachable)
                return await process.client.set(path, data, version=version)

        process.catalog.streams._store = Lost()
        with pytest.raises(IndeterminateError, match="unknown"):
            await process.catalog.streams.claim(ORDERS, NODE)
        process.faults.outages.clear()
        snapshot = await world.process().catalog.streams.snapshot(ORDERS)
        assert snapshot.stream.owner_epoch == 1

    main()


@on_virtual_time
async def test_an_unreachable_store_is_retryable_and_changes_nothing():
    world = World()
    process = world.process()
    await process.catalog.streams.create(ORDERS)
    process.faults.outages.add("metadata")
    with pytest.raises(RetryableError, match="did not settle"):
        await process.catalog.streams.claim(ORDERS, NODE)
    process.faults.outages.clear()
    assert (await process.catalog.streams.snapshot(ORDERS)).stream.owner_epoch == 0


@on_virtual_time
async def test_one_who_is_overtaken_plans_anew_from_what_is_there():
    world = World()
    first, second = world.process(), world.process()
    await first.catalog.streams.create(ORDERS)
    overtaken = False

    class Overtaken:
        def __getattr__(self, name):
            return getattr(first.client, name)

        async def set(self, path, data, *, version):
            nonlocal overtaken
            if not overtaken:
                overtaken = True
                await second.catalog.streams.claim(ORDERS, NODE)
            return await first.client.set(path, data, version=version)

    first.catalog.streams._store = Overtaken()
    claimed = await first.catalog.streams.claim(ORDERS, NODE)
    assert claimed.owner_epoch == 2


@pytest.mark.parametrize("seed", range(20))
def test_under_any_faults_each_of_many_claims_raises_the_epoch_by_one(seed):
    @on_virtual_time
    async def main():
        world = World()
        for _ in range(seed):
            world.process()
        process = world.process()
        await process.catalog.streams.create(ORDERS)
        process.faults.rates = FaultRates(refused=0.1, request_lost=0.15, reply_lost=0.15)
        for claim in range(1, 21):
            assert (await process.catalog.streams.claim(ORDERS, NODE)).owner_epoch == claim

    main()
