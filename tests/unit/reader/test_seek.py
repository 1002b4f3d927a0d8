"""Times in ledgers of whose copies nobody noted any: the entries tell them."""

import pytest

from tests.unit.offload.test_single import driver_of
from tests.unit.reader.test_pages import stamped
from tests.unit.reader.test_tail import closed
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import NO_ENTRY
from tierlog.model.position import Edge
from tierlog_reader import seek
from tierlog_reader.seek import Time, TimeSeek, parse_start
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Shares
from tierlog_reader.trace import tracing

COUNT = 1500
ENTRIES = [stamped(number, 1_000_000 + 10 * number) for number in range(COUNT)]


def seek_of(source) -> TimeSeek:
    return TimeSeek(ServedReads(source, Shares(64 * 1024 * 1024, wait_s_max=5)))


@on_virtual_time
async def test_a_copy_in_one_object_is_searched_by_halves(monkeypatch):
    monkeypatch.setattr(seek, "STEP_ENTRIES", 8)
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(ENTRIES)
    await world.offloaded(ledger, driver_of(world))
    await world.gone_locally(ledger)
    async with world.reader() as source:
        times = seek_of(source)
        for entry in (0, 1, 7, 8, 9, 700, COUNT - 2, COUNT - 1):
            with tracing() as trace:
                assert await times.position_at(STREAM, 1_000_000 + 10 * entry) == at(ledger, entry)
                early = await times.position_at(STREAM, 1_000_000 + 10 * entry - 9)
            assert early == at(ledger, entry)
            assert sum(one.what == "tier2" for one in trace.steps) <= 2 * (11 + 1)
        _, end = await source.bounds(STREAM)
        assert await times.position_at(STREAM, 9_000_000) == end


@pytest.mark.parametrize("count", [0, 1, 40])
@on_virtual_time
async def test_an_open_ledger_without_times_is_searched_up_to_its_end(count):
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(ENTRIES[:count])
    async with world.reader() as source:
        times = seek_of(source)
        for entry in range(count):
            assert await times.position_at(STREAM, 1_000_000 + 10 * entry) == at(ledger, entry)
        _, end = await source.bounds(STREAM)
        assert await times.position_at(STREAM, 9_000_000) == end


@on_virtual_time
async def test_however_many_steps_lie_before_an_entry_it_is_found(monkeypatch):
    """What was noted says less than entries do: the search begins far before what it finds."""
    monkeypatch.setattr(seek, "STEP_ENTRIES", 5)
    world = ReaderWorld()
    await world.start()
    old = [stamped(number, 1_000_000) for number in range(1000)]
    late = stamped(1000, 3_000_000)
    ledger = await world.opened([*old, late], times=(1_000_000, 3_000_000))
    async with world.reader() as source:
        assert await seek_of(source).position_at(STREAM, 3_000_000) == at(ledger, 1000)


def times_of(first_ms: int) -> list[bytes]:
    return [stamped(number, first_ms + number) for number in range(3)]


OLD, NEW = times_of(1_000_000), times_of(2_000_000)
OLD_MS, NEW_MS = (1_000_000, 1_000_002), (2_000_000, 2_000_002)


@pytest.mark.parametrize("raw", [False, True])
def test_what_came_into_a_ledger_opened_since_the_last_look_is_found(raw):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start(raw=raw)
        first = await world.opened(OLD, times=OLD_MS)
        await closed(world, first, OLD)
        async with world.reader() as source:
            times = seek_of(source)
            await source.read(STREAM, at(first, 0), budget())
            second = await world.opened(NEW, times=NEW_MS)
            assert await times.position_at(STREAM, 2_000_000) == at(second, 0)
            assert await times.position_at(STREAM, 3_000_000) == at(second, 3)

    test()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rolls", [False, True])
def test_what_comes_while_the_last_ledger_is_searched_is_not_passed_over(rolls, count):
    """The end that is returned is one up to which all was searched."""

    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        ledger = await world.opened(OLD, times=OLD_MS)
        async with world.reader() as source:
            look = source._end

            async def later(stream):
                source._end = look
                await world.write(ledger, NEW[:count], first=3, times=NEW_MS)
                if rolls:
                    await closed(world, ledger, [*OLD, *NEW[:count]])
                    await world.opened(NEW, times=NEW_MS)
                return await look(stream)

            source._end = later
            assert await seek_of(source).position_at(STREAM, 2_000_000) == at(ledger, 3)

    test()


@on_virtual_time
async def test_a_ledger_that_left_tier_1_since_the_last_look_is_searched_in_tier_2():
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(OLD, times=OLD_MS)
    async with world.reader(age_s=1000) as source:
        assert await seek_of(source).position_at(STREAM, 1_000_001) == at(ledger, 1)
        await world.offloaded(ledger)
        await world.gone_locally(ledger)
        assert await seek_of(source).position_at(STREAM, 1_000_001) == at(ledger, 1)


@pytest.mark.parametrize("raw", [False, True])
def test_what_comes_meanwhile_and_is_older_is_not_what_was_sought(raw):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start(raw=raw)
        ledger = await world.opened(OLD, times=OLD_MS)
        async with world.reader() as source:
            look = source._end

            async def later(stream):
                source._end = look
                await world.write(ledger, OLD, first=3, times=OLD_MS)
                return await look(stream)

            source._end = later
            assert await seek_of(source).position_at(STREAM, 2_000_000) == at(ledger, 6)

    test()


@on_virtual_time
async def test_a_seek_looks_at_the_metadata_afresh_only_where_it_finds_nothing():
    world = ReaderWorld()
    await world.start()
    first = await world.sealed(OLD)
    second = await world.opened(NEW, times=NEW_MS)
    async with world.reader(age_s=1000) as source:
        times, looks = seek_of(source), source._views._streams
        await source.read(STREAM, at(first, 0), budget())
        before = looks._read_count
        for wanted_ms, found in ((0, at(first, 0)), (1_000_003, at(second, 0))):
            assert await times.position_at(STREAM, wanted_ms) == found
        assert looks._read_count == before
        # One at the tail, one for the end; and no ledger is searched a second time.
        with tracing() as trace:
            assert await times.position_at(STREAM, 3_000_000) == at(second, 3)
        assert looks._read_count == before + 2
        assert sum(one.where == f"ledger {second}, open" for one in trace.steps) == 2


async def begin_trim(world, *ledger_ids):
    await world.catalog().retention.begin_trim(
        STREAM, world.claimed.incarnation, ledger_ids, grounds=await world.grounds()
    )


@pytest.mark.parametrize("wholly", [False, True])
def test_a_ledger_trimmed_since_the_list_was_read_ends_no_search(wholly):
    """Nothing that was asked for is lost: it lies in a later ledger."""

    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        first, _, third = [
            await world.sealed(OLD),
            await world.sealed(OLD),
            await world.sealed(NEW),
        ]
        async with world.reader() as source:
            await source.bounds(STREAM)
            await begin_trim(world, first)
            if wholly:
                catalog, incarnation = world.catalog(), world.claimed.incarnation
                await catalog.retention.drop_tier1(first)
                await catalog.retention.finish_trim(STREAM, incarnation, first)
                del world.node.runs[first]
            assert await seek_of(source).position_at(STREAM, 2_000_000) == at(third, 0)

    test()


@on_virtual_time
async def test_an_open_ledger_that_was_closed_without_an_entry_ends_no_search():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened()
    async with world.reader() as source:
        assert await seek_of(source).position_at(STREAM, 2_000_000) == Edge.EARLIEST
        await world.catalog().ledgers.close(world.claimed, ledger, last_entry_id=NO_ENTRY, length=0)
        second = await world.opened(NEW, times=NEW_MS)
        assert await seek_of(source).position_at(STREAM, 2_000_000) == at(second, 0)


@pytest.mark.parametrize("raw", [False, True])
def test_a_time_behind_all_is_never_in_an_open_ledger_without_an_entry(raw):
    """Its id means nothing once it was closed: whoever was given it could not go on."""

    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start(raw=raw)
        first = await world.opened(OLD, times=OLD_MS)
        await closed(world, first, OLD)
        second = await world.opened()
        async with world.reader() as source:
            found = await seek_of(source).position_at(STREAM, 3_000_000)
            assert found == at(first, 3)
            await closed(world, second, [])
            third = await world.opened(NEW, times=NEW_MS)
            answer = await source.read(STREAM, found, budget())
            assert answer.chunk is not None
            assert (answer.chunk.ledger_id, answer.chunk.first_entry_id) == (third, 0)

    test()


@on_virtual_time
async def test_a_listed_ledger_that_no_tier_has_is_unknown_and_not_passed_over():
    world = ReaderWorld()
    await world.start()
    first = await world.sealed(OLD)
    await world.sealed(NEW)
    await world.offloaded(first)
    await world.gone_locally(first)
    context = await world.context(first)
    assert context.location is not None
    del world.bucket.objects[context.location.data_key]
    del world.bucket.objects[context.location.index_key]
    async with world.reader() as source:
        for asked in (
            seek_of(source).position_at(STREAM, 2_000_000),
            source.read(STREAM, at(first, 0), budget()),
        ):
            with pytest.raises(RetryableError) as caught:
                await asked
            assert caught.value.reason is Reason.UNKNOWN


@on_virtual_time
async def test_a_ledger_whose_objects_are_gone_and_whose_nodes_are_away_is_not_said_to_be_gone():
    world = ReaderWorld()
    await world.start()
    first = await world.sealed(OLD)
    await world.offloaded(first)
    context = await world.context(first)
    assert context.location is not None
    del world.bucket.objects[context.location.index_key]
    world.node.down = True
    async with world.reader() as source:
        for asked in (
            seek_of(source).position_at(STREAM, 1_000_000),
            source.read(STREAM, at(first, 0), budget()),
        ):
            with pytest.raises(RetryableError) as caught:
                await asked
            assert caught.value.reason is Reason.UNKNOWN
        world.node.down = False
        assert await seek_of(source).position_at(STREAM, 1_000_000) == at(first, 0)


@pytest.mark.parametrize("times", [(0, 0), OLD_MS])
def test_a_search_holds_no_room_once_it_has_ended(times):
    """By halves where no times are known, and then entry by entry."""

    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        await world.opened(OLD, times=times)
        async with world.reader() as source:
            shares = Shares(64 * 1024 * 1024, wait_s_max=5)
            await TimeSeek(ServedReads(source, shares)).position_at(STREAM, 1_000_001)
            assert shares.most_used_bytes > 0
            assert shares.used_bytes == 0

    test()


@on_virtual_time
async def test_a_copy_that_a_search_finds_gone_is_kept_open_nowhere():
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(OLD, times=OLD_MS)
    await world.offloaded(ledger)
    await world.gone_locally(ledger)
    context = await world.context(ledger)
    assert context.location is not None
    async with world.reader() as source:
        tier2 = source._tier2
        assert await seek_of(source).position_at(STREAM, 1_000_001) == at(ledger, 1)
        assert (len(tier2._handles), len(world.cache.values)) == (1, 2)
        del world.bucket.objects[context.location.side_key]
        tier2.side_pages.forget(context.location.side_key)
        (listed,) = (await source.snapshot(STREAM)).ledgers
        with pytest.raises(RefusedError):
            await tier2.entry_at_time(listed, context, 1_000_001)
        assert (len(tier2._handles), world.cache.values) == (0, {})


def test_where_to_begin_is_read():
    assert parse_start("earliest") is Edge.EARLIEST
    assert parse_start("12:3") == at(12, 3)
    assert parse_start("time:1769860800000") == Time(1769860800000)
    for text in ("2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", "2026-01-31T12:00:00"):
        assert parse_start(f"time:{text}") == Time(1769860800000)
    # As a float of seconds it is a millisecond early; within one, what was published then is older.
    assert parse_start("time:2039-02-01T01:10:26.003Z") == Time(2180135426003)
    assert parse_start("time:2026-01-31T12:00:00.000001Z") == Time(1769860800001)
    assert parse_start("time:0001-01-01T00:00:00+14:00") == Time(0)
    assert parse_start("time:9999-12-31T23:59:59.999-14:00") == Time(253402351199999)
    for text in ("time:", "time:yesterday", "x", "time:-5"):
        with pytest.raises(RefusedError) as caught:
            parse_start(text)
        assert "time:" in caught.value.remedy
