"""Core attributes that an owner derives when it is asked, of policy and record (ADR-0027).

Must hold: they are as of now, whoever owns the stream; nothing keeps them, and no append asks for
what they are made of.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
from uuid import UUID

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.ledger.small_cluster import STREAM, draft
from tests.unit.streams.attribute_world import (
    W1,
    W2,
    AttributeCluster,
    entry,
    key_of,
    one_owner,
    plus,
    send,
)
from tests.unit.streams.test_owners import running
from tierlog.format.entry import AttributeUpdate, Verb
from tierlog.model.attributes import (
    CREATION_TIME,
    EVENT_COUNT,
    INDEX_ROOT_LENGTH,
    INDEX_ROOT_OFFSET,
    ROLL_OVER_AGE_MS,
    ROLL_OVER_BYTES,
    ROLL_OVER_ENTRIES,
)
from tierlog.model.core_attributes import CORE_NAMES, DERIVED
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.policy import CLUSTER_DEFAULT, Policy
from tierlog.ports.streams import FIRST_KEY, LAST_KEY

CORE = sorted(CORE_NAMES)


async def core_of(owners):
    """Return the core attributes, read by key, by range and one after the other."""
    by_key = await owners.get_attributes(STREAM, CORE)
    assert await owners.list_attributes(STREAM, CORE[0], CORE[-1], 100) == by_key
    first, iterated = CORE[0], {}
    while True:
        found = (await owners.list_attributes(STREAM, first, LAST_KEY, 3)).values
        iterated |= found
        if len(found) < 3:
            break
        first = type(first)((int.from_bytes(max(found)) + 1).to_bytes(16))
    assert {key: value for key, value in iterated.items() if key in CORE_NAMES} == by_key.values
    assert list(by_key.values) == CORE
    return by_key.values


@pytest.mark.covers("E13")
@on_virtual_time
async def test_limits_are_as_of_now_at_every_level():
    async with one_owner(policy=Policy(ledger_entries_max=9)) as (cluster, owners):
        catalog = cluster.catalog()
        limits = (ROLL_OVER_BYTES, ROLL_OVER_ENTRIES, ROLL_OVER_AGE_MS)
        default = CLUSTER_DEFAULT

        async def said():
            found = await core_of(owners)
            return [found[key] for key in limits]

        assert await said() == [default.ledger_bytes_max, 9, default.ledger_age_ms_max]
        await catalog.policies.set_level(None, Policy(ledger_bytes_max=5, ledger_entries_max=6))
        assert await said() == [5, 9, default.ledger_age_ms_max]
        await catalog.streams.set_policy(STREAM, Policy(ledger_age_ms_max=7))
        assert await said() == [5, 6, 7]


@pytest.mark.covers("E13")
@on_virtual_time
async def test_the_root_is_that_of_the_newest_checkpoint_and_the_next_owner_tells_the_same():
    cluster = AttributeCluster(2)
    catalog = await cluster.start()
    owners = cluster.owners("n1", catalog=catalog)
    async with running(owners, drain=False):
        found = await core_of(owners)
        assert (found[INDEX_ROOT_OFFSET], found[INDEX_ROOT_LENGTH]) == (-1, 0)
        roots = []
        for number in (1, 2):
            await send(owners, STREAM, W1, number)
            await owners.seal(STREAM)
            await asyncio.sleep(1)
            (published,) = cluster.index.newest.values()
            found = await core_of(owners)
            roots.append((found[INDEX_ROOT_OFFSET], found[INDEX_ROOT_LENGTH]))
            assert roots[-1] == (published.root.root_offset, published.root.root_length)
            # What is derived is in no checkpoint, as it was in none before.
            assert set(published.core) == {EVENT_COUNT, CREATION_TIME}
        assert roots[0] != roots[1]
    await catalog.streams.claim(STREAM, "n2")
    successor = cluster.owners("n2", catalog=cluster.catalog())
    async with running(successor):
        assert await core_of(successor) == found


@on_virtual_time
async def test_neither_appends_nor_other_attributes_ask_for_what_they_are_made_of():
    cluster = AttributeCluster(cached_max=3)
    policies = (catalog := await cluster.start()).policies
    owners = cluster.owners(catalog=catalog)
    async with running(owners):
        await send(owners, STREAM, W1, 1)
        asked = []
        levels = policies.levels

        async def away():
            asked.append(1)
            raise RetryableError("the metadata are away", remedy="wait")

        policies.levels = away
        await send(owners, STREAM, W1, 2, updates=(plus(1),))
        await owners.submit(STREAM, draft(entry(W2, 1)))
        found = await owners.get_attributes(STREAM, [key_of(W1), EVENT_COUNT])
        assert found.values == {EVENT_COUNT: 3, key_of(W1): 2}
        await owners.list_attributes(STREAM, key_of(W1), LAST_KEY, 100)
        assert not asked
        for ask in (
            owners.get_attributes(STREAM, [ROLL_OVER_BYTES]),
            owners.list_attributes(STREAM, FIRST_KEY, LAST_KEY, 100),
        ):
            with pytest.raises(RetryableError):
                await ask
        policies.levels = levels
        await core_of(owners)
        # They take no room where values are kept.
        (one,) = owners.statistics()
        assert one["attributes_cached"] + one["attributes_unflushed"] <= 3


@pytest.mark.covers("E13")
@on_virtual_time
async def test_no_entry_sets_them():
    async with one_owner() as (_, owners):
        before = await core_of(owners)
        for key in DERIVED:
            for verb in Verb:
                one = AttributeUpdate(key=UUID(bytes=key), verb=verb, value=1, expected=0)
                with pytest.raises(RefusedError, match=CORE_NAMES[key]) as caught:
                    await owners.submit(STREAM, draft(entry(None, 0, updates=(one,))))
                assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert await core_of(owners) == before
