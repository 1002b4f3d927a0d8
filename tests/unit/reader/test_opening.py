"""Opening copies: once for all who ask, though they go; closed once nobody reads them."""

import asyncio
import contextlib
import gc
import random
from dataclasses import replace

import pytest

from tests.unit.offload.test_drivers import DrivenReaderWorld, Lent, Shelf, drivers_of
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.model.errors import RetryableError
from tierlog.model.ids import EntryId
from tierlog.model.offload import OffloadContext
from tierlog.model.stream import ListedLedger
from tierlog_reader.tier2 import HANDLE_BYTES

ENTRIES = [b"%04d" % number * 12 for number in range(60)]
SLOW = FaultRates(delay_s_max=5.0)


async def offloaded_world(count=1):
    """Return a world with ledgers in tier 2 alone."""
    world = ReaderWorld()
    await world.start()
    ledgers = [await world.sealed(ENTRIES) for _ in range(count)]
    for ledger in ledgers:
        await world.offloaded(ledger)
        await world.gone_locally(ledger)
    return world, ledgers


async def copies_of(world, source) -> list[tuple[ListedLedger, OffloadContext]]:
    listed = (await source._views.stream(STREAM)).ledgers
    return [(one, await world.context(one.ledger_id)) for one in listed]


async def read_one(source, ledger) -> list[bytes]:
    return payloads(await source.read(STREAM, at(ledger, 40), budget(entries=1)))


async def give_up_soon(reading) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await reading


@pytest.mark.parametrize("opened", [False, True])
@on_virtual_time
async def test_what_was_begun_for_who_has_gone_is_there_for_the_next(opened):
    """Index, header and pages come at the store's pace, whoever waits for them meanwhile."""
    world, (ledger,) = await offloaded_world()
    faults = Faults(world.rng)
    async with world.reader(objects_faults=faults) as source:
        pages = source._tier2.side_pages
        if opened:
            await source.read(STREAM, at(ledger, 0), budget(entries=1))
            await asyncio.sleep(1)
            pages.forget(next(iter(pages._kept)).key)
        faults.rates, faults.calls = SLOW, []
        for _ in range(20):
            await give_up_soon(read_one(source, ledger))
        assert len(faults.calls) == 1
        await asyncio.sleep(60)
        begun = ["objects.get_range"] if opened else ["objects.get", "objects.get_range"]
        assert faults.calls == begun, "pages of an opened one, else index and header"
        fetches = pages.fetches
        assert await read_one(source, ledger) == ENTRIES[40:41]
        assert faults.calls.count("objects.get") == begun.count("objects.get")
        assert pages.fetches == fetches


@pytest.mark.parametrize("first_goes", [False, True])
@pytest.mark.parametrize("ticks", range(8))
@on_virtual_time
async def test_a_copy_is_opened_once_and_used_by_those_who_are_still_there(ticks, first_goes):
    """One goes at any step around its landing, whoever began it."""
    world, _ = await offloaded_world()
    faults = Faults(world.rng)
    faults.calls = []
    async with world.reader(objects_faults=faults) as source:
        tier2 = source._tier2
        (copy,) = await copies_of(world, source)
        tasks = [asyncio.create_task(tier2._open(*copy)) for _ in range(2)]
        while not tier2._handles:
            await asyncio.sleep(0)
        (opened,) = tier2._handles.values()
        for _ in range(ticks):
            await asyncio.sleep(0)
        tasks[not first_goes].cancel()
        tasks.append(asyncio.create_task(tier2._open(*copy)))
        await asyncio.wait(tasks)
        stayed = [one for one in tasks if not one.cancelled()]
        assert {one.result() for one in stayed} == {opened}
        assert opened.users == len(stayed)
        assert faults.calls.count("objects.get") == 1
        assert tier2.index_bytes == opened.index_bytes
        assert not tier2._opening


async def driven_world(count):
    """Return a world whose ledgers only a driver of somebody else's has."""
    world, shelf = DrivenReaderWorld(), Shelf()
    await world.start()
    world.driven_by = drivers_of(world, Shelf.name, shelf)
    ledgers = [await world.sealed(ENTRIES) for _ in range(count)]
    for ledger in ledgers:
        await world.offloaded(ledger)
        await world.gone_locally(ledger)
    return world, shelf, ledgers


@pytest.mark.parametrize("handles_max", [1, 2])
@pytest.mark.parametrize("seed", range(5))
@on_virtual_time
async def test_few_handles_and_many_who_ask_at_once_and_go(handles_max, seed):
    world, shelf, _ = await driven_world(4)
    rng, lent, used = random.Random(seed), [], []

    async def open_other(context):
        await asyncio.sleep(rng.random())
        lent.append(Lent(shelf.kept[context.uuid]))
        return lent[-1]

    async with world.reader(open_other=open_other, handles_max=handles_max) as source:
        tier2 = source._tier2

        async def ask(copy) -> None:
            await asyncio.sleep(rng.random() * 10)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 5):
                    used.append(await tier2._open(*copy))
                    async with tier2._using(used[-1]) as handle:
                        read = await handle.read_frames(EntryId(40), 1000)
                        assert ENTRIES[40] in bytes(read.frames)
            assert len(tier2._handles) <= handles_max

        async with asyncio.TaskGroup() as group:
            for copy in await copies_of(world, source):
                for _ in range(20):
                    group.create_task(ask(copy))
        await asyncio.sleep(30)
        assert len(used) > 40
        assert {one.users for one in used} == {0}
        assert sum(one.closed for one in lent) == len(lent) - len(tier2._handles)
        assert not tier2._opening
    assert {one.closed for one in lent} == {1}


@on_virtual_time
async def test_who_asks_for_one_of_few_handles_has_it_without_asking_twice():
    """None of those who wait finds its copy closed again by who waits for another one."""
    world, _ = await offloaded_world(count=5)
    faults = Faults(world.rng, rates=SLOW)
    faults.calls = []
    async with world.reader(objects_faults=faults, handles_max=1) as source:
        tier2 = source._tier2
        copies = await copies_of(world, source)
        tasks = [asyncio.create_task(tier2._open(*copy)) for copy in copies for _ in range(10)]
        found = [await one for one in tasks]
        assert faults.calls.count("objects.get") == len(copies)
        assert [one.handle.ledger_id for one in found] == [
            copy[0].ledger_id for copy in copies for _ in range(10)
        ]
        assert [one.users for one in found] == [10] * 50
        assert len(tier2._handles) == 1


@on_virtual_time
async def test_who_was_put_aside_counts_until_the_last_who_uses_it_has_let_it_go():
    world, shelf, _ = await driven_world(3)
    lent: list[Lent] = []

    async def open_other(context):
        lent.append(Lent(shelf.kept[context.uuid]))
        return lent[-1]

    async with world.reader(open_other=open_other, handles_max=1) as source:
        tier2 = source._tier2
        first, second, third = await copies_of(world, source)
        held = await tier2._open(*first)
        assert await tier2._open(*first) is held
        await tier2._open(*second)
        assert (held.aside, tier2.index_bytes) == (True, 2 * HANDLE_BYTES)
        await tier2._let_go(held)
        assert tier2.index_bytes == 2 * HANDLE_BYTES, "one still reads it"
        await tier2._let_go(held)
        assert (tier2.index_bytes, lent[0].closed) == (HANDLE_BYTES, 1)
        await tier2._disown(second[1])
        assert tier2.index_bytes == HANDLE_BYTES
        await tier2._open(*third)
        assert tier2.index_bytes == 2 * HANDLE_BYTES


@on_virtual_time
async def test_of_too_many_one_goes_that_nobody_uses_though_another_was_used_longer_ago():
    world, shelf, _ = await driven_world(3)

    async def open_other(context):
        return Lent(shelf.kept[context.uuid])

    async with world.reader(open_other=open_other, handles_max=2) as source:
        tier2 = source._tier2
        first, second, third = await copies_of(world, source)
        used, unused = await tier2._open(*first), await tier2._open(*second)
        await tier2._let_go(unused)
        await tier2._let_go(await tier2._open(*third))
        assert (used.aside, unused.aside) == (False, True)
        await tier2._let_go(used)


@on_virtual_time
async def test_what_was_put_aside_before_it_was_read_ahead_of_is_closed_once():
    world, shelf, _ = await driven_world(1)
    lent: list[Lent] = []

    async def open_other(context):
        lent.append(Lent(shelf.kept[context.uuid]))
        return lent[-1]

    async with world.reader(open_other=open_other) as source:
        tier2 = source._tier2
        ((listed, context),) = await copies_of(world, source)
        await tier2.read(listed, context, EntryId(0), budget(entries=100))
        assert tier2._ahead, "it was begun, and did not take a step yet"
        await tier2._disown(context)
        await asyncio.sleep(1)
        assert (lent[0].closed, tier2.index_bytes) == (1, 0)


@on_virtual_time
async def test_what_is_in_use_takes_its_bytes_from_what_is_kept_unused():
    """So a copy that many read is not opened anew beside itself, and all end within the bound."""
    world, ledgers = await offloaded_world(count=4)
    async with world.reader(handles_max=10) as source:
        tier2 = source._tier2
        copies = await copies_of(world, source)
        used = [await tier2._open(*copy) for copy in copies[:2]]
        each = used[0].index_bytes
        tier2._limits = replace(tier2._limits, index_bytes_max=2 * each + each // 2)
        for ledger in ledgers[2:]:
            assert await read_one(source, ledger) == ENTRIES[40:41]
            await asyncio.sleep(10)
            assert [one.aside for one in used] == [False, False]
            assert tier2.index_bytes == 2 * each, "whoever came last found no room beside them"
        more = [await tier2._open(*copy) for copy in copies[2:]]
        assert tier2.index_bytes == 4 * each, "those in use count, whatever the bound"
        for one in [*used, *more]:
            await tier2._let_go(one)
        assert tier2.index_bytes == 2 * each
        assert tier2._handles.keys() == {copy[1].uuid for copy in copies[2:]}
        tier2._limits = replace(tier2._limits, index_bytes_max=each // 2)
        assert await read_one(source, ledgers[3]) == ENTRIES[40:41]
        await asyncio.sleep(10)
        assert tier2.index_bytes == each, "one alone may be larger"


@on_virtual_time
async def test_what_was_read_ahead_of_is_let_go():
    world, ledgers = await offloaded_world(count=3)
    async with world.reader() as source:
        assert await world.read_all(source, size=100) == ENTRIES * 3
        await asyncio.sleep(10)
        tier2 = source._tier2
        assert [one.users for one in tier2._handles.values()] == [0] * len(ledgers)
        assert source._tier2._ahead == {}


@on_virtual_time
async def test_a_failure_to_open_is_told_to_all_who_wait_and_is_not_kept(caplog):
    world, (ledger,) = await offloaded_world()
    faults = Faults(world.rng, rates=SLOW)
    async with world.reader(objects_faults=faults) as source:
        (copy,) = await copies_of(world, source)
        faults.outages.add("objects")
        faults.calls = []
        asked = [asyncio.create_task(source._tier2._open(*copy)) for _ in range(20)]
        await give_up_soon(asyncio.shield(asked[0]))
        asked.pop(0).cancel()
        await asyncio.wait(asked)
        assert {type(one.exception()) for one in asked} == {RetryableError}
        assert len(faults.calls) == 1
        await give_up_soon(source._tier2._open(*copy))
        await asyncio.sleep(60)  # nobody hears of this one
        gc.collect()
        assert "never retrieved" not in caplog.text
        faults.outages.clear()
        assert await read_one(source, ledger) == ENTRIES[40:41]


@on_virtual_time
async def test_at_the_end_what_is_being_opened_is_given_up():
    world, (ledger, _) = await offloaded_world(count=2)
    faults = Faults(world.rng, rates=SLOW)
    faults.calls = []
    loop = asyncio.get_running_loop()
    async with world.reader(objects_faults=faults) as source:
        await give_up_soon(read_one(source, ledger))
        _, other = await copies_of(world, source)
        late = asyncio.create_task(source._tier2._open(*other))
        await asyncio.sleep(0.01)
        assert faults.calls == ["objects.get"] * 2
        ends_s = loop.time()
    assert loop.time() == ends_s, "the end waits for nothing"
    assert list(source._tier2._opening) == [other[1].uuid], "who is still there opens it"
    opened = await late
    assert (opened.users, opened.handle.ledger_id) == (1, other[0].ledger_id)
    await asyncio.sleep(60)
    assert faults.calls.count("objects.get") == 3


class Stuck(Lent):
    async def close(self) -> None:
        raise OSError("it is stuck")


@on_virtual_time
async def test_a_handle_that_can_not_be_closed_is_nobodys_trouble():
    world, shelf, ledgers = await driven_world(2)

    async def open_other(context):
        return Stuck(shelf.kept[context.uuid])

    async with world.reader(open_other=open_other, handles_max=1) as source:
        for ledger in [*ledgers, *ledgers]:
            assert await read_one(source, ledger) == ENTRIES[40:41]
