"""What an admin asks to be offloaded: kept, asked for now, and asked for again until it is done."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, TOPICS, World
from tests.unit.scheduler.test_scheduler import ENTRIES, running, scheduler, states
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position


class Stuck:
    """A queue that takes nothing: each request hangs, or fails."""

    def __init__(self, trouble):
        self.trouble = trouble

    async def publish(self, topic, *, key, value, headers):
        if self.trouble == "slow":
            await asyncio.sleep(30)
        raise RetryableError("the brokers are away", remedy="Look after them")

    async def mark(self, topic):
        raise RetryableError("the brokers are away", remedy="Look after them")


async def prefix(answering, before):
    [done] = await answering.offload_prefix([STREAM], before)
    return done


class TestPrefix:
    """asyncOffloadPrefix: everything sealed before a position, kept until it is done."""

    @pytest.mark.covers("A26", "A27", "A33")
    def test_it_is_asked_for_now_and_by_any_leader_later(self):
        async def main():
            world = World()
            claimed = await world.stream()
            ledgers = [await world.seal(claimed, ENTRIES) for _ in range(3)]
            await world.seal(claimed, [b"open"], close=False)
            answering = scheduler(world)
            done = await prefix(answering, Position(ledgers[2], EntryId(3)))
            assert done.selected == done.requested == tuple(ledgers[:2])
            assert done.position == Position(ledgers[2], EntryId(0))
            # The queue is lost; a leader that never heard of it asks again.
            world.queue.wipe()
            async with running(world):
                await asyncio.sleep(200)
                assert await states(world) == ["COMPLETE", "COMPLETE", "LOCAL", "LOCAL"]
            again = await prefix(answering, Position(ledgers[1], EntryId(0)))
            assert again.selected == (ledgers[0],)
            assert again.requested == ()
            assert again.position == Position(ledgers[1], EntryId(0))
            everything = await prefix(answering, None)
            assert everything.requested == (ledgers[2],)
            # A smaller wish does not undo a larger one.
            await prefix(answering, Position(ledgers[1], EntryId(0)))
            stream = (await world.catalog().streams.snapshot(STREAM)).stream
            assert stream.offload_through == ledgers[2]

        run_virtual(main())

    @pytest.mark.parametrize("leading", [True, False])
    def test_what_was_asked_for_is_remembered_by_a_leader_alone(self, leading):
        async def main():
            world = World()
            claimed = await world.stream()
            ledger_id = await world.seal(claimed, ENTRIES)
            answering = scheduler(world)
            answering.leading = leading
            done = await prefix(answering, None)
            assert done.requested == (ledger_id,)
            assert list(answering._memory.asked) == ([ledger_id] if leading else [])

        run_virtual(main())

    def test_a_position_that_the_stream_does_not_have_is_refused_and_nothing_is_wanted(self):
        async def main():
            world = World()
            claimed = await world.stream()
            await world.seal(await world.stream(StreamName("other")), ENTRIES)
            first = await world.seal(claimed, ENTRIES)
            await world.seal(claimed, ENTRIES)
            last = await world.seal(claimed, [b"open"], close=False)
            answering = scheduler(world)
            for ledger_id, entry_id, reason in (
                (99, 0, Reason.NO_SUCH_ENTRY),
                (first, len(ENTRIES) + 1, Reason.NO_SUCH_ENTRY),
                (first - 1, 0, Reason.TRIMMED),
            ):
                where = Position(LedgerId(ledger_id), EntryId(entry_id))
                with pytest.raises(RefusedError, match=f"has no position {where}") as caught:
                    await prefix(answering, where)
                assert caught.value.reason is reason
                assert f"tierlog ledger ls {STREAM}" in caught.value.remedy
            stream = (await world.catalog().streams.snapshot(STREAM)).stream
            assert not stream.offload_through
            assert not world.queue.events(TOPICS.requested)
            behind = Position(first, EntryId(len(ENTRIES)))
            assert (await prefix(answering, behind)).selected == (first,)
            grows = Position(last, EntryId(1000))
            assert len((await prefix(answering, grows)).selected) == 2

        run_virtual(main())

    @pytest.mark.parametrize("trouble", ["slow", "refused"])
    def test_a_queue_that_takes_nothing_costs_neither_the_wish_nor_the_answer(self, trouble):
        async def main():
            world = World()
            claimed = await world.stream()
            first = await world.seal(claimed, ENTRIES)
            last = await world.seal(claimed, [b"open"], close=False)
            began_s = asyncio.get_running_loop().time()
            done = await prefix(scheduler(world, publisher=Stuck(trouble)), None)
            assert asyncio.get_running_loop().time() - began_s <= 5
            assert (done.selected, done.requested) == ((first,), ())
            assert done.position == Position(last, EntryId(0))
            async with running(world):
                await asyncio.sleep(200)
                assert await states(world) == ["COMPLETE", "LOCAL"]

        run_virtual(main())

    def test_a_stream_without_ledgers(self):
        async def main():
            world = World()
            await world.stream()
            with pytest.raises(RefusedError, match="has no position 1:0"):
                await prefix(scheduler(world), Position(LedgerId(1), EntryId(0)))
            done = await prefix(scheduler(world), None)
            assert (done.position, done.selected, done.requested) == (None, (), ())

        run_virtual(main())
