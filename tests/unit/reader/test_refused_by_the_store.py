"""A store that refuses the reader's own keys: what tier 1 still has is read all the same.

So is what tier 2 has of a ledger whose key the reader lacks (ADR-0015, point 3).

Protocols section 5: a place that fails is left for the other one.
"""

import pytest

from tests.unit.reader.test_seek import OLD, seek_of
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.ledger.keys import LedgerKeys
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.policy import Policy


async def refused(*_asked, **_more):
    raise RefusedError(
        "AccessDenied", reason=Reason.PERMISSION_DENIED, remedy="Check the keys in the settings"
    )


def test_what_the_store_refuses_is_read_from_tier_1_and_told_where_that_has_it_no_more(monkeypatch):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        ledger = await world.sealed(OLD)
        await world.offloaded(ledger)
        for name in ("get", "get_range", "get_range_into", "head"):
            monkeypatch.setattr(MemoryObjectsClient, name, refused)
        async with world.reader() as source:
            answer = await source.read(STREAM, at(ledger, 0), budget())
            assert payloads(answer) == OLD
            assert await seek_of(source).position_at(STREAM, 1_000_000) == at(ledger, 0)
        await world.gone_locally(ledger)
        async with world.reader() as source:
            for asked in (
                source.read(STREAM, at(ledger, 0), budget()),
                seek_of(source).position_at(STREAM, 1_000_000),
            ):
                with pytest.raises(RefusedError) as caught:
                    await asked
                assert caught.value.reason is Reason.PERMISSION_DENIED

    test()


@pytest.mark.parametrize("priority", ["tier1", "tier2"])
def test_a_ledger_whose_key_is_lacking_is_read_from_tier_2_whose_trouble_passes(
    priority, monkeypatch
):
    def lacking(*_asked):
        raise RefusedError("signed with a key", reason=Reason.PERMISSION_DENIED, remedy="Give it")

    async def away(*_asked, **_more):
        raise RetryableError("the store is away", remedy="Wait")

    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start(policy=Policy(offloaded_read_priority=priority))
        ledger = await world.sealed(OLD)
        await world.offloaded(ledger)
        monkeypatch.setattr(LedgerKeys, "of", lacking)
        async with world.reader() as source:
            assert payloads(await source.read(STREAM, at(ledger, 0), budget())) == OLD
        for name in ("get", "get_range", "get_range_into", "head"):
            monkeypatch.setattr(MemoryObjectsClient, name, away)
        async with world.reader() as source:
            for asked in (
                source.read(STREAM, at(ledger, 0), budget()),
                seek_of(source).position_at(STREAM, 1_000_000),
            ):
                with pytest.raises(RetryableError, match="away"):
                    await asked

    test()
