"""Open ledgers that go, or are gone, while they are asked how far they are confirmed."""

import asyncio
from dataclasses import replace

import pytest

from tests.unit.reader.test_tail import closed
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.format import paths
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import EntryId
from tierlog.model.position import Edge
from tierlog.ports.metadata import Delete
from tierlog_reader.source import TAIL_GRACE_S

A = [b"%d" % number for number in range(5)]


@pytest.mark.parametrize("ask", ["read", "latest", "bounds"])
def test_an_open_ledger_that_the_metadata_lack_is_told_and_not_asked_for_without_end(ask):
    """The list has it, and nothing else: nobody knows where it ends."""

    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        ledger = await world.opened(A)
        store = world.catalog().ledgers._store
        found = await store.get(paths.ledger_path(ledger))
        assert found is not None
        await store.transact([Delete(paths.ledger_path(ledger), found.version)])
        async with world.reader() as source, asyncio.timeout(60):
            last_confirmed = source._tier1.last_confirmed

            async def slowly(ledger_id):
                await asyncio.sleep(0.01)  # time passes, and what asks without end is seen to
                return await last_confirmed(ledger_id)

            source._tier1.last_confirmed = slowly
            asked = {
                "read": lambda: source.read(STREAM, Edge.LATEST, budget()),
                "latest": lambda: source.latest(STREAM),
                "bounds": lambda: source.bounds(STREAM),
            }
            with pytest.raises(RetryableError) as caught:
                await asked[ask]()
            assert caught.value.reason is Reason.UNKNOWN

    test()


@on_virtual_time
async def test_a_ledger_closed_without_an_entry_while_its_end_is_asked_for_is_looked_up_again():
    world = ReaderWorld()
    await world.start()
    first = await world.sealed(A)
    second = await world.opened()
    async with world.reader(age_s=0) as source:
        last_confirmed = source._tier1.last_confirmed

        async def later(ledger_id):
            source._tier1.last_confirmed = last_confirmed
            await closed(world, second, [])
            return await last_confirmed(ledger_id)

        source._tier1.last_confirmed = later
        answer = await source.read(STREAM, at(first, len(A)), budget())
        assert (answer.chunk, answer.resume) == (None, at(first, len(A)))
        await world.opened(A)
        assert payloads(await source.read(STREAM, answer.resume, budget())) == A


@on_virtual_time
async def test_where_latest_is_is_told_without_an_entry_that_nobody_has_room_for():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(A)
    async with world.reader() as source:
        last_confirmed = source._tier1.last_confirmed

        async def and_then_more_comes(ledger_id):
            last = await last_confirmed(ledger_id)
            await world.write(ledger, [bytes(100_000)], first=last + 1)
            return last

        async def unread(*_):
            raise AssertionError

        source._tier1.last_confirmed = and_then_more_comes
        source._tier1.read = unread
        assert await source.latest(STREAM) == at(ledger, len(A))


@on_virtual_time
async def test_what_failed_of_a_ledger_trimmed_since_the_last_look_is_no_word_on_the_next_one():
    world = ReaderWorld()
    await world.start()
    first, _ = await world.sealed(A), await world.sealed(A[:2])
    async with world.reader(age_s=1000) as source:
        await source.snapshot(STREAM)
        retention, incarnation = world.catalog().retention, world.claimed.incarnation
        await retention.begin_trim(STREAM, incarnation, [first], grounds=await world.grounds())
        await retention.drop_tier1(first)
        await retention.finish_trim(STREAM, incarnation, first)
        del world.node.runs[first]
        assert payloads(await source.read(STREAM, Edge.EARLIEST, budget())) == A[:2]


@pytest.mark.parametrize("asked", ["end", Edge.EARLIEST])
def test_what_was_acknowledged_a_moment_before_the_nodes_hear_of_it_is_found(asked):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        ledger = await world.opened(A, lac=-1 if asked is Edge.EARLIEST else 2)
        where = asked if asked is Edge.EARLIEST else at(ledger, 3)
        async with world.reader() as source, asyncio.TaskGroup() as group:
            reading = group.create_task(source.read(STREAM, where, budget()))
            await asyncio.sleep(TAIL_GRACE_S / 2)
            world.node.confirm(ledger, EntryId(len(A) - 1))
        assert payloads(reading.result()) == (A if asked is Edge.EARLIEST else A[3:])

    test()


@on_virtual_time
async def test_an_end_of_which_too_few_nodes_tell_is_unknown():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(A)
    async with world.reader() as source:
        end = source._tier1.end

        async def of_few(ledger_id):
            return replace(await end(ledger_id), covered=False)

        source._tier1.end = of_few
        with pytest.raises(RetryableError) as caught:
            await source.bounds(STREAM)
        assert caught.value.reason is Reason.UNKNOWN
        source._tier1.end = end
        assert await source.bounds(STREAM) == (at(ledger, 0), at(ledger, len(A)))


@on_virtual_time
async def test_an_end_that_moves_into_a_shorter_ledger_while_it_is_looked_for_is_told():
    world = ReaderWorld()
    await world.start()
    first = await world.opened(A, lac=-1)
    async with world.reader() as source, asyncio.TaskGroup() as group:
        asked = group.create_task(source.bounds(STREAM))
        await asyncio.sleep(1)
        assert not asked.done()
        await closed(world, first, A)
        second = await world.opened(A[:1])
    assert asked.result() == (at(first, 0), at(second, 1))
