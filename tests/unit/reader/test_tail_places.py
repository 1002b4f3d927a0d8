"""How many tails are followed at once, and what they ask of tier 1: places, and who has them."""

import asyncio

import pytest

from tests.unit.reader.test_tail import MIB, EndlessTier, listed, tails_of
from tests.unit.reader.world import on_virtual_time
from tierlog.format.frame import pack_entries
from tierlog.model.ids import EntryId, LedgerId
from tierlog_reader.chunk import Chunk
from tierlog_reader.places import Tier
from tierlog_reader.tail import HELD_BYTES, TAKE_BYTES_MIN, TailLimits, TailMemory, asked_bytes_max


@pytest.mark.parametrize("count", [1, 30, 500])
def test_what_subscriptions_ask_for_at_once_is_bounded_and_each_may_ask(count):
    @on_virtual_time
    async def test():
        tier1, memory = EndlessTier(), tails_of(16 * MIB)
        limits = TailLimits(ledgers_max=count)
        async with TailMemory(tier1, memory.store, memory.manager, limits).run() as tail:
            for one in range(count):
                tail.follow(listed(one), EntryId(0))
            await asyncio.sleep(0.5)
            assert len(tier1.asked) == count
            assert tail.asked_bytes == sum(tier1.asked) <= asked_bytes_max(count)
            assert tier1.asked[0] == MIB, "as long as few ask"
            assert min(tier1.asked) >= TAKE_BYTES_MIN
            await asyncio.sleep(30)
            assert (tail.subscriptions, tail.asked_bytes) == (0, 0)
            assert len(tier1.asked) >= 4 * count
            tail.follow(listed(0), EntryId(0))
            await asyncio.sleep(0.5)
            assert tier1.asked[-1] == tail.asked_bytes == MIB

    test()


@on_virtual_time
async def test_more_ledgers_than_there_are_places_do_not_take_each_others_in_turns():
    tier1, memory = EndlessTier(), tails_of(16 * MIB)
    limits = TailLimits(ledgers_max=2)
    async with (
        TailMemory(tier1, memory.store, memory.manager, limits).run() as tail,
        asyncio.TaskGroup() as group,
    ):
        for one in (0, 1):
            tail.follow(listed(one), EntryId(0))
        slow = group.create_task(tail.wait(LedgerId(0), EntryId(0), 3.5))
        for _ in range(8):
            await asyncio.sleep(0.3)
            assert await tail.wait(LedgerId(1), EntryId(0), 0.1)
            tail.follow(listed(2), EntryId(0))
            assert [tail.awaited(LedgerId(one)) for one in range(3)] == [0, 0, None]
        assert await slow
        assert await tail.wait(LedgerId(0), EntryId(0), 0.9)
        # Nobody was at the second one for a second: what was asked for it is over at once.
        tail.follow(listed(2), EntryId(0))
        await asyncio.sleep(0)
        assert [tail.awaited(LedgerId(one)) for one in range(3)] == [0, None, 0]
        assert tail.subscriptions == 2
        await asyncio.sleep(0.01)
        assert tail.asked_bytes <= asked_bytes_max(2)
        assert len(tail._tasks) == 2


@on_virtual_time
async def test_no_more_ledgers_are_held_than_allowed_and_the_one_used_longest_ago_goes():
    memory = tails_of()
    limits = TailLimits(ledgers_max=2)
    async with TailMemory(EndlessTier(), memory.store, memory.manager, limits).run() as tail:
        for one in range(3):
            tail.follow(listed(one), EntryId(0))
            await asyncio.sleep(0.6)
        assert [tail.awaited(LedgerId(one)) for one in range(3)] == [None, 0, 0]
        assert tail.subscriptions == 2
        assert memory.manager.owners_bytes == 2 * HELD_BYTES


@on_virtual_time
async def test_what_comes_for_a_ledger_that_is_held_no_more_takes_nothing():
    class SlowTier:
        async def read(self, ledger, first_entry_id, budget):
            await asyncio.sleep(1)
            frames, _ = pack_entries([b"late"])
            return Chunk(
                ledger_id=ledger.ledger_id,
                first_entry_id=first_entry_id,
                count=1,
                frames=(frames,),
                tier=Tier.TIER1,
            )

    memory = tails_of()
    async with TailMemory(SlowTier(), memory.store, memory.manager).run() as tail:
        tail.follow(listed(1), EntryId(0))
        await asyncio.sleep(0.5)
        tail._drop(LedgerId(1))
        await asyncio.sleep(10)
        assert (memory.manager.owners_bytes, memory.store.entries) == (0, 0)
