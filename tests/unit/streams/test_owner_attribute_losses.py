"""Entries that no tier gives: a stream waits for them, and goes on without them once an admin says.

Must hold: nothing is given up without that, nor what may come back, nor what tier 2 that is away
may have; and what was given up once is never counted.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM
from tests.unit.streams.attribute_world import KEY, W1, AttributeCluster, key_of, plus, send
from tests.unit.streams.test_owner_attribute_troubles import trim
from tests.unit.streams.test_owners import running
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.attribute_record import GivenUp
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import LedgerId

ENTRIES = 6
KEYS = [key_of(W1), key_of(KEY), EVENT_COUNT]
WHOLE = {key_of(W1): ENTRIES, key_of(KEY): ENTRIES, EVENT_COUNT: ENTRIES}


def no_flush():
    """Return the faults of a process that can't reach tier 2 to write."""
    faults = no_faults()
    faults.outages.add("attributes.flush")
    return faults


async def written(cluster):
    """Write a ledger of entries that no checkpoint has; return the catalog and the stream."""
    catalog = await cluster.start()
    owners = cluster.owners(faults=no_flush())
    async with running(owners, drain=False):
        for number in range(1, ENTRIES + 1):
            await send(owners, STREAM, W1, number, updates=(plus(1),))
        await owners.seal(STREAM)
    stream = await catalog.streams.get(STREAM)
    await catalog.attributes.declare(stream)
    return catalog, stream


def damage(cluster, first, last):
    cluster.nodes["n1"].damaged |= {(LedgerId(0), one) for one in range(first, last + 1)}


async def given_up(catalog):
    return (await catalog.attributes.get(STREAM)).given_up


def asking(owners):
    return asyncio.create_task(owners.get_attributes(STREAM, KEYS))


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 3), (1, 4), (3, 5), (5, 5), (0, 5)])
def test_what_no_tier_gives_is_given_up_when_an_admin_accepts_it(first, last):
    async def main():
        cluster = AttributeCluster()
        catalog, stream = await written(cluster)
        damage(cluster, first, last)
        owners = cluster.owners()
        async with running(owners):
            asked = asking(owners)
            await asyncio.sleep(3600)
            assert not asked.done()
            await catalog.attributes.accept_loss(stream, by="admin")
            async with asyncio.timeout(60):
                found = (await asked).values
            left = ENTRIES - (last - first + 1)
            number = first if last == ENTRIES - 1 else ENTRIES
            some = {key_of(W1): number, key_of(KEY): left} if left else {}
            assert found == {**some, EVENT_COUNT: left}
            assert await given_up(catalog) == (GivenUp(0, first, last),)
            # The checkpoint that follows has the loss behind it.
            await send(owners, STREAM, W1, number + 1)
        (newest,) = cluster.index.newest.values()
        assert newest.through.ledger_id == 1
        assert newest.core[EVENT_COUNT] == left + 1

    run_virtual(main())


def test_a_stream_whose_last_entries_are_given_up_gets_a_checkpoint_of_its_end():
    async def main():
        cluster = AttributeCluster(checkpoint_interval_s=60)
        catalog, stream = await written(cluster)
        damage(cluster, 4, 5)
        await catalog.attributes.accept_loss(stream, by="admin")
        owners = cluster.owners()
        async with running(owners, drain=False):
            await asking(owners)
            await asyncio.sleep(100)
        (newest,) = cluster.index.newest.values()
        assert str(newest.through) == "0:5"

    run_virtual(main())


def test_nothing_is_given_up_that_comes_back_in_time():
    async def main():
        cluster = AttributeCluster()
        catalog, stream = await written(cluster)
        damage(cluster, 2, 3)
        await catalog.attributes.accept_loss(stream, by="admin")
        owners = cluster.owners()
        async with running(owners):
            asked = asking(owners)
            await asyncio.sleep(8)
            cluster.nodes["n1"].damaged.clear()
            async with asyncio.timeout(60):
                assert (await asked).values == WHOLE
            assert await given_up(catalog) == ()

    run_virtual(main())


def test_nothing_is_given_up_while_tier_2_is_away():
    async def main():
        cluster = AttributeCluster()
        catalog, stream = await written(cluster)
        damage(cluster, 2, 3)
        await catalog.attributes.accept_loss(stream, by="admin")
        trouble: list[TierlogError] = [RetryableError("the bucket is away", remedy="Wait")]

        async def open_copy(ledger_id):
            raise trouble[0]

        owners = cluster.owners(open_copy=open_copy)
        async with running(owners):
            asked = asking(owners)
            await asyncio.sleep(3600)
            assert not asked.done()
            assert await given_up(catalog) == ()
            trouble[0] = CorruptError("the copy is damaged", remedy="Repair it")
            async with asyncio.timeout(60):
                assert (await asked).values[EVENT_COUNT] == ENTRIES - 2
            assert await given_up(catalog) == (GivenUp(0, 2, 3),)

    run_virtual(main())


def test_what_was_given_up_is_not_counted_when_it_can_be_read_again():
    async def main():
        cluster = AttributeCluster()
        catalog, stream = await written(cluster)
        damage(cluster, 2, 3)
        await catalog.attributes.accept_loss(stream, by="admin")
        told = []
        for _ in range(2):
            owners = cluster.owners(faults=no_flush())
            async with running(owners, drain=False):
                told.append((await owners.get_attributes(STREAM, KEYS)).values)
            cluster.nodes["n1"].damaged.clear()
        assert told[0] == told[1] == {key_of(W1): 6, key_of(KEY): 4, EVENT_COUNT: 4}

    run_virtual(main())


def test_damage_ends_the_owner_and_names_the_way_on():
    async def main():
        cluster = AttributeCluster()
        catalog, stream = await written(cluster)

        async def open_ledger(ledger_id):
            raise CorruptError("the index object is damaged", remedy="Repair the copy")

        owners = cluster.owners(open_ledger=open_ledger)
        async with running(owners):
            for ask in (asking(owners), send(owners, STREAM, W1, 7)):
                with pytest.raises(CorruptError, match="can't be rebuilt") as caught:
                    await ask
                assert f"tierlog attributes rebuild {STREAM} --accept-loss" in caught.value.remedy
            assert await given_up(catalog) == ()
            await catalog.attributes.accept_loss(stream, by="admin")
            async with asyncio.timeout(60):
                assert (await asking(owners)).values == {EVENT_COUNT: 0}
            assert await given_up(catalog) == (GivenUp(0, 0, 5),)

    run_virtual(main())


def test_a_ledger_that_was_trimmed_meanwhile_is_not_given_up():
    async def main():
        cluster = AttributeCluster()
        catalog, stream = await written(cluster)
        await catalog.attributes.accept_loss(stream, by="admin")

        async def open_ledger(ledger_id):
            raise RefusedError("it is gone", reason=Reason.LEDGER_NOT_FOUND, remedy="Look again")

        owners = cluster.owners(open_ledger=open_ledger)
        async with running(owners, drain=False):
            asked = asking(owners)
            await asyncio.sleep(5)
            assert not asked.done()
            await catalog.retention.begin_stream_deletion(STREAM)
            await trim(catalog, 0)
            async with asyncio.timeout(60):
                assert (await asked).values == {EVENT_COUNT: 0}
            assert await given_up(catalog) == ()

    run_virtual(main())


def test_nothing_is_given_up_without_consent_nor_consented_to_where_there_is_nothing():
    async def main():
        cluster = AttributeCluster()
        catalog = await cluster.start()
        stream = await catalog.streams.claim(STREAM, "n1")
        with pytest.raises(RefusedError, match="has no attributes"):
            await catalog.attributes.accept_loss(stream, by="admin")
        await catalog.attributes.declare(stream)
        with pytest.raises(RefusedError, match="nobody accepted"):
            await catalog.attributes.give_up(stream, GivenUp(0, 1, 2))
        cluster.clock.advance(5)
        accepted = await catalog.attributes.accept_loss(stream, by="admin")
        again = await catalog.attributes.accept_loss(stream, by="another")
        assert again == accepted
        assert accepted.loss_accepted.endswith(" admin")
        record = await catalog.attributes.give_up(stream, GivenUp(0, 1, 2))
        assert record.given_up == (GivenUp(0, 1, 2),)
        other = await catalog.streams.claim(STREAM, "n1")
        with pytest.raises(RefusedError) as caught:
            await catalog.attributes.give_up(stream, GivenUp(0, 3, 3))
        assert caught.value.reason is Reason.FENCED
        await catalog.attributes.give_up(other, GivenUp(0, 3, 3))
        assert await given_up(catalog) == (GivenUp(0, 1, 3),)

    run_virtual(main())
