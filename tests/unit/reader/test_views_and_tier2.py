"""What the reader keeps: metadata no older than its bound, ledgers and ranges within theirs."""

import asyncio
import gc
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.unit.offload.test_single import driver_of
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.model.ids import EntryId
from tierlog.model.position import Edge, Position
from tierlog.offload.ranges import RangeLimits
from tierlog.offload.tier2_reader import FEW_ENTRIES_MAX
from tierlog_reader import tier2
from tierlog_reader.tier2 import FETCHES_AHEAD_MAX, ObjectTier
from tierlog_reader.views import LISTED_BYTES, VALUE_BYTES, AgedCache, Views

ENTRIES = [b"%04d" % number * 12 for number in range(60)]


class Counted:
    """A source of values that counts how often it was read."""

    def __init__(self, delay_s=0.0):
        self.reads = 0
        self.delay_s = delay_s
        self.fails = False

    async def read(self, key):
        self.reads += 1
        number = self.reads
        await asyncio.sleep(self.delay_s)
        if self.fails:
            raise RetryableError("away", remedy="wait")
        return f"{key}{number}"


@on_virtual_time
async def test_a_value_is_read_again_once_it_is_too_old():
    source = Counted()
    cache = AgedCache(source.read, age_s_max=0.5, entries_max=10)
    assert await cache.get("a") == "a1"
    await asyncio.sleep(0.4)
    assert await cache.get("a") == "a1"
    await asyncio.sleep(0.2)
    assert await cache.get("a") == "a2"


@on_virtual_time
async def test_fresh_is_never_what_was_read_before_the_call():
    source = Counted()
    cache = AgedCache(source.read, age_s_max=1000, entries_max=10)
    assert await cache.get("a") == "a1"
    assert await cache.get("a", fresh=True) == "a2"
    assert await cache.get("a") == "a2"


@on_virtual_time
async def test_calls_at_once_cause_one_read():
    source = Counted(delay_s=0.1)
    cache = AgedCache(source.read, age_s_max=1, entries_max=10)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(cache.get("a")) for _ in range(20)]
    assert {task.result() for task in tasks} == {"a1"}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
@on_virtual_time
async def test_nobody_waits_for_turns_at_a_store_that_is_slow_or_away(fresh, fails):
    """A reading takes longer than its value lasts; who comes meanwhile waits for one more."""
    source = Counted(delay_s=3.0)
    source.fails = fails
    cache = AgedCache(source.read, age_s_max=0.5, entries_max=10)
    loop = asyncio.get_running_loop()

    async def ask(after_s):
        await asyncio.sleep(after_s)
        asked_s = loop.time()
        outcome = await asyncio.gather(cache.get("a", fresh=fresh), return_exceptions=True)
        assert loop.time() - asked_s <= 6
        return outcome[0]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(number % 20 * 0.1)) for number in range(100)]
    assert source.reads == 2
    assert {isinstance(one.result(), RetryableError) for one in tasks} == {fails}


@pytest.mark.parametrize("ticks", range(4))
@on_virtual_time
async def test_a_reading_that_was_given_up_is_made_by_one_who_waits(ticks):
    source = Counted(delay_s=0.1)
    cache = AgedCache(source.read, age_s_max=1, entries_max=10)
    tasks = [asyncio.create_task(cache.get("a")) for _ in range(20)]
    await asyncio.sleep(0.05)
    tasks.pop(0).cancel()
    for _ in range(ticks):
        await asyncio.sleep(0)
    tasks.append(asyncio.create_task(cache.get("a")))
    assert {await one for one in tasks} == {"a2"}
    assert not cache._reading


@on_virtual_time
async def test_what_failed_before_a_call_is_not_told_to_it():
    source = Counted(delay_s=0.1)
    source.fails = True
    cache = AgedCache(source.read, age_s_max=1, entries_max=10)
    first = asyncio.create_task(cache.get("a"))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(cache.get("a"))
    await asyncio.wait({first})
    source.fails = False
    assert isinstance(first.exception(), RetryableError)
    assert await second == "a2"


@on_virtual_time
async def test_a_failed_read_is_told_and_keeps_nothing(caplog):
    source = Counted()
    source.fails = True
    cache = AgedCache(source.read, age_s_max=1, entries_max=10)
    with pytest.raises(RetryableError):
        await cache.get("a")
    gc.collect()
    assert "never retrieved" not in caplog.text
    source.fails = False
    assert await cache.get("a") == "a2"


@on_virtual_time
async def test_no_more_names_are_kept_than_allowed():
    source = Counted()
    cache = AgedCache(source.read, age_s_max=1000, entries_max=3)
    for key in "abcd":
        await cache.get(key)
    assert await cache.get("d") == "d4"
    assert await cache.get("a") == "a5"


@on_virtual_time
async def test_what_is_kept_stays_within_its_bytes_and_one_alone_may_be_larger():
    sizes = {"a1": 40, "b2": 40, "c3": 40, "d4": 500, "c5": 30}
    source = Counted()
    cache = AgedCache(
        source.read, age_s_max=1000, entries_max=10, bytes_max=100, size_of=sizes.__getitem__
    )
    for key, held in [("a", 40), ("b", 80), ("c", 80), ("d", 500), ("c", 30)]:
        await cache.get(key)
        assert cache.size_bytes == held
    assert await cache.get("c", fresh=False) == "c5"
    sizes["c6"] = 70
    assert await cache.get("c", fresh=True) == "c6"
    assert cache.size_bytes == 70, "what is read again counts once"


@on_virtual_time
async def test_views_count_what_lists_of_ledgers_take():
    world, ledgers = await offloaded_world(count=3)
    assert LISTED_BYTES >= 272, "what one takes"
    catalog = world.catalog()
    views = Views(catalog, age_s_max=1000, entries_max=10)
    snapshot = await views.stream(STREAM)
    assert (
        views.size_bytes
        == VALUE_BYTES + 3 * LISTED_BYTES
        == VALUE_BYTES + LISTED_BYTES * len(snapshot.ledgers)
    )
    for ledger in ledgers:
        await views.ledger(ledger)
        await views.context(ledger)
    assert views.size_bytes > 7 * VALUE_BYTES
    small = Views(catalog, age_s_max=1000, entries_max=10, bytes_max=8 * 2 * VALUE_BYTES)
    for ledger in ledgers:
        await small.ledger(ledger)
        await small.context(ledger)
    assert small.size_bytes <= 4 * VALUE_BYTES, "a part for each kind"


async def offloaded_world(count=1, entries=ENTRIES):
    world = ReaderWorld()
    await world.start()
    ledgers = []
    for _ in range(count):
        ledgers.append(await world.sealed(entries))
        await world.offloaded(ledgers[-1])
    return world, ledgers


@on_virtual_time
async def test_who_goes_on_finds_the_next_ranges_fetched():
    world, (ledger,) = await offloaded_world()
    async with world.reader() as source:
        first = await source.read(STREAM, at(ledger, 0), budget(size=100))
        await asyncio.sleep(1)
        fetches = source._tier2._ranges.fetches
        second = await source.read(STREAM, first.resume, budget(size=100))
        assert payloads(first) + payloads(second) == ENTRIES[:2]
        assert fetches >= 3
        assert source._tier2._ranges.fetches - fetches <= 4, "those are read ahead for the third"


@on_virtual_time
async def test_who_reads_on_and_on_is_fetched_ahead_for_by_longer_requests():
    entries = [b"%05d" % number * 20 for number in range(600)]
    world, (ledger,) = await offloaded_world(entries=entries)
    lengths = {}
    for growth_max in (1, 4):
        limits = RangeLimits(
            range_bytes=256, in_flight_max=4, kept_bytes_max=20_000, growth_max=growth_max
        )
        async with world.reader(limits=limits) as source:
            ranges = source._tier2._ranges
            where: Position | Edge = at(ledger, 0)
            found: list[bytes] = []
            while len(found) < len(entries):
                answer = await source.read(STREAM, where, budget(size=200))
                where = answer.resume
                found += payloads(answer)
                await asyncio.sleep(1)
                if len(found) == 5:
                    assert ranges.bytes_fetched / ranges.fetches <= 256, "nobody has read on yet"
            assert found == entries
            lengths[growth_max] = ranges.bytes_fetched / ranges.fetches
    assert lengths[1] <= 256
    assert lengths[4] > 512


SLOW = RangeLimits(range_bytes=256, in_flight_max=8, kept_bytes_max=50_000, growth_max=8)


async def grown_lengths(world, ledgers, entries) -> float:
    """Read ledgers beside each other from a slow store; return how long requests were at last."""
    faults = Faults(world.rng, rates=FaultRates(delay_s_max=2.0))
    async with world.reader(limits=SLOW, objects_faults=faults) as source:
        ranges = source._tier2._ranges

        async def read(ledger):
            where: Position | Edge = at(ledger, 0)
            for number in range(len(entries) // 2):
                answer = await source.read(STREAM, where, budget(entries=1))
                assert payloads(answer) == entries[number : number + 1]
                where = answer.resume

        async with asyncio.TaskGroup() as group:
            for ledger in ledgers:
                group.create_task(read(ledger))
        return float(ranges.bytes_fetched / ranges.fetches)


@on_virtual_time
async def test_those_who_read_beside_each_other_share_how_long_requests_grow():
    entries = [b"%05d" % number * 20 for number in range(600)]
    world, ledgers = await offloaded_world(count=4, entries=entries)
    alone = await grown_lengths(world, ledgers[:1], entries)
    beside = await grown_lengths(world, ledgers, entries)
    assert beside < 0.7 * alone, (beside, alone)


@on_virtual_time
async def test_the_next_is_fetched_ahead_before_the_last_has_come_and_a_few_at_once():
    entries = [b"%05d" % number * 20 for number in range(600)]
    world, (ledger,) = await offloaded_world(entries=entries)
    faults = Faults(world.rng, rates=FaultRates(delay_s_max=2.0))
    seen = set()
    async with world.reader(limits=SLOW, objects_faults=faults) as source:
        where: Position | Edge = at(ledger, 0)
        for _ in range(300):
            answer = await source.read(STREAM, where, budget(entries=1))
            where = answer.resume
            seen.add(sum(map(len, source._tier2._ahead.values())))
        await asyncio.sleep(100)
        assert source._tier2._ahead == {}
    assert max(seen) == FETCHES_AHEAD_MAX


@on_virtual_time
async def test_who_comes_to_a_ledgers_end_finds_the_next_one_opened_and_fetched():
    world, ledgers = await offloaded_world(count=3, entries=ENTRIES[:10])
    faults = Faults(world.rng)
    async with world.reader(objects_faults=faults) as source:
        first = await source.read(STREAM, at(ledgers[0], 0), budget(size=100))
        assert payloads(first) == ENTRIES[:1]
        await asyncio.sleep(1)
        faults.calls = []
        second = await source.read(STREAM, at(ledgers[1], 0), budget(size=100))
        assert payloads(second) == ENTRIES[:1]
        assert faults.calls == [], "no request was to be waited for"
        await asyncio.sleep(1)
        faults.calls.clear()
        assert payloads(await source.read(STREAM, at(ledgers[2], 0), budget(size=100)))
        assert faults.calls == []


@on_virtual_time
async def test_a_ledger_that_is_read_from_tier_1_is_not_fetched_ahead():
    world = ReaderWorld()
    await world.start()
    ledgers = [await world.sealed(ENTRIES[:10]) for _ in range(3)]
    await world.offloaded(ledgers[0])
    await world.offloaded(ledgers[2])
    async with world.reader() as source:
        await source.read(STREAM, at(ledgers[0], 0), budget(size=100))
        await asyncio.sleep(1)
        assert len(source._tier2._handles) == 1


@on_virtual_time
async def test_few_entries_of_much_that_was_read_keep_only_their_bytes():
    world = ReaderWorld(block_size=64 * 1024)
    await world.start()
    ledger = await world.sealed(ENTRIES * 20)
    await world.offloaded(ledger)
    await world.gone_locally(ledger)
    async with world.reader() as source:
        for first in (0, 500, 1100):
            wanted = budget(entries=FEW_ENTRIES_MAX + 1, size=50_000)
            answer = await source.read(STREAM, at(ledger, first), wanted)
            assert payloads(answer) == (ENTRIES * 20)[first : first + FEW_ENTRIES_MAX + 1]
            (frames,) = answer.chunk.frames
            assert len(memoryview(frames.obj)) <= 2 * answer.chunk.frames_len


@on_virtual_time
async def test_who_jumps_about_is_not_read_ahead_for():
    world, (ledger,) = await offloaded_world()
    async with world.reader() as source:
        for number in (40, 0, 20, 0, 50):
            await source.read(STREAM, at(ledger, number), budget(entries=1, size=10))
        assert source._tier2._ahead == {}


@on_virtual_time
async def test_who_begins_with_few_entries_is_read_ahead_for_once_it_goes_on():
    world, (ledger,) = await offloaded_world()
    await world.gone_locally(ledger)
    async with world.reader() as source:
        first = await source.read(STREAM, at(ledger, 0), budget(entries=FEW_ENTRIES_MAX, size=100))
        assert source._tier2._ahead == {}
        await source.read(STREAM, first.resume, budget(entries=1, size=100))
        assert source._tier2._ahead != {}
    async with world.reader() as source:
        many = budget(entries=FEW_ENTRIES_MAX + 1, size=100)
        await source.read(STREAM, at(ledger, 0), many)
        assert source._tier2._ahead != {}


@on_virtual_time
async def test_open_ledgers_stay_within_their_limit_and_all_stay_readable():
    world, ledgers = await offloaded_world(count=7)
    async with world.reader() as source:
        for ledger in [*ledgers, *reversed(ledgers)]:
            answer = await source.read(STREAM, at(ledger, 3), budget(entries=1))
            assert payloads(answer) == ENTRIES[3:4]
            assert len(source._tier2._handles) <= 4


@on_virtual_time
async def test_a_prefetch_that_fails_is_nobodys_trouble():
    world, (ledger,) = await offloaded_world()
    await world.gone_locally(ledger)
    faults = Faults(world.rng)
    async with world.reader(objects_faults=faults) as source:
        first = await source.read(STREAM, at(ledger, 0), budget(size=10))
        faults.outages.add("objects")
        await asyncio.sleep(1)
        faults.outages.clear()
        assert payloads(await source.read(STREAM, first.resume, budget(entries=1))) == ENTRIES[1:2]


@on_virtual_time
async def test_a_bug_of_a_driver_met_while_fetching_ahead_is_told_and_ends_nothing(monkeypatch):
    world = ReaderWorld()
    await world.start()
    ledgers = [await world.sealed(ENTRIES) for _ in range(2)]
    for ledger in ledgers:
        await world.offloaded(ledger)
        await world.gone_locally(ledger)
    async with world.reader() as source:
        opened = ObjectTier._opened

        async def buggy(self, ledger, context, location):
            if ledger.ledger_id == ledgers[1]:
                raise KeyError("a driver's bug")
            return await opened(self, ledger, context, location)

        monkeypatch.setattr(ObjectTier, "_opened", buggy)
        with capture_logs() as logs:
            found: list[bytes] = []
            where = at(ledgers[0], 0)
            while len(found) < len(ENTRIES):
                answer = await source.read(STREAM, where, budget(size=600))
                found, where = found + payloads(answer), answer.resume
                await asyncio.sleep(0.1)
        assert found == ENTRIES
        told = [one for one in logs if one["event"] == "unexpected_error"]
        assert told
        assert {one["log_level"] for one in told} == {"error"}
        assert {one["ledger_id"] for one in told} <= set(ledgers)
        monkeypatch.undo()
        assert payloads(await source.read(STREAM, at(ledgers[1], 0), budget()))[0] == ENTRIES[0]


@pytest.mark.parametrize(
    ("offloader", "kinds"),
    [(ReaderWorld.offloader, {"index", "side"}), (driver_of, {"single"})],
)
@on_virtual_time
async def test_a_copy_that_is_gone_is_taken_from_what_readers_share(offloader, kinds):
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(ENTRIES)
    await world.offloaded(ledger, offloader(world))
    await world.gone_locally(ledger)
    async with world.reader() as source:
        assert (await source.read(STREAM, at(ledger, 0), budget(entries=1))).chunk is not None
    shared = {key.partition(":")[0] for key in world.cache.values}
    assert shared == kinds
    context = await world.context(ledger)
    assert context.location is not None
    del world.bucket.objects[context.location.data_key]
    async with world.reader() as source:
        with pytest.raises((RefusedError, RetryableError)):
            await source.read(STREAM, at(ledger, 0), budget(entries=1))
    assert world.cache.values == {}


@pytest.mark.parametrize("offloader", [ReaderWorld.offloader, driver_of])
@on_virtual_time
async def test_a_copy_that_ends_elsewhere_than_its_ledger_is_damaged(offloader):
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(ENTRIES)
    await world.offloaded(ledger, offloader(world))
    async with world.reader() as source:
        (listed,) = (await source.snapshot(STREAM)).ledgers
        longer = replace(listed, last_entry_id=EntryId(listed.last_entry_id + 1))
        context = await world.context(ledger)
        with pytest.raises(CorruptError, match=f"ends with entry {listed.last_entry_id}"):
            await source._tier2.read(longer, context, EntryId(0), budget())


@on_virtual_time
async def test_of_where_reads_ended_no_more_is_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(tier2, "ENDS_MAX", 3)
    world, (ledger,) = await offloaded_world()
    async with world.reader() as source:
        for number in range(10):
            await source.read(STREAM, at(ledger, number), budget(entries=1))
        assert [entry_id for _, entry_id in source._tier2._ends] == [8, 9, 10]


@on_virtual_time
async def test_however_short_ledgers_are_few_are_opened_ahead():
    world = ReaderWorld()
    await world.start()
    ledgers = [await world.sealed([b"alone"]) for _ in range(6)]
    for ledger in ledgers:
        await world.offloaded(ledger)
    async with world.reader(handles_max=10) as source:
        await source.read(STREAM, at(ledgers[0], 0), budget())
        await asyncio.sleep(10)
        assert len(source._tier2._handles) == 1 + tier2.LEDGERS_AHEAD_MAX


@pytest.mark.parametrize("opened", [False, True])
@on_virtual_time
async def test_a_store_that_is_away_is_asked_once_for_all_who_wait(opened):
    """Who waits for what fails does not take turns at failing: the last would wait for hours."""
    world, (ledger,) = await offloaded_world()
    await world.gone_locally(ledger)
    faults = Faults(world.rng)
    async with world.reader(objects_faults=faults) as source:
        if opened:
            await source.read(STREAM, at(ledger, 0), budget(entries=1))
            await asyncio.sleep(1)
            source._tier2.side_pages.forget(next(iter(source._tier2.side_pages._kept)).key)
        faults.outages.add("objects")
        faults.rates = FaultRates(delay_s_max=10.0)
        faults.calls = []
        begun_s = asyncio.get_running_loop().time()
        reads = [
            asyncio.create_task(source.read(STREAM, at(ledger, 40), budget(entries=1)))
            for _ in range(20)
        ]
        await asyncio.wait(reads)
        assert all(isinstance(one.exception(), RetryableError) for one in reads)
        assert asyncio.get_running_loop().time() - begun_s < 30
        assert len(faults.calls) <= 2
