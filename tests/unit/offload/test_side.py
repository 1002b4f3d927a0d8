"""The third object at work: every grain that is read is checked, and few bytes are read for it.

Small grains where every edge must come soon; grains of 64 KiB where requests are counted.
"""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.oracle import naive_read
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.side_kit import (
    ENTRIES,
    LEDGER,
    MIB,
    UUID_1,
    copied,
    data_of,
    opened,
    put_data,
    written,
)
from tests.unit.offload.world import (
    BLOCK,
    ListHandle,
    World,
    entries_of,
)
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.frame import pack_entries
from tierlog.format.grains import GRAIN_LEN
from tierlog.format.side import PAGE_LEN
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId
from tierlog.offload.driver import BlockOffloader
from tierlog.offload.groups import Outlasting
from tierlog.offload.ranges import RANGE_BYTES, RangeLimits
from tierlog.offload.side_reader import PAGE_BYTES, PAGES_AHEAD, SidePages, open_side
from tierlog.ports.objects import ObjectReads

# What an entry of up to 64 KiB costs: two grains and two pages. One grain more where a border cuts
# its header, since part of a grain can't be checked, and where only padding tells where it ends.
FEW_BYTES = 2 * GRAIN_LEN + 2 * PAGE_LEN
assert FEW_BYTES < 200_000

lengths_lists = st.lists(st.integers(0, 90) | st.sampled_from([150, 372]), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(
    lengths_lists,
    st.sampled_from([64, 128, 512, 1024, 65536]),
    st.integers(1, 900),
    st.none() | st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_frames_from_anywhere(lengths, grain_len, bytes_max, entries_max, rng):
    entries = [bytes([number % 256]) * length for number, length in enumerate(lengths)]

    async def main():
        handle, *_ = await copied(World(), entries, grain_len=grain_len)
        for _ in range(5):
            first = rng.randrange(len(entries))
            read = await handle.read_frames(EntryId(first), bytes_max, entries_max=entries_max)
            assert read.first_entry_id == first
            assert read.last_entry_id - first + 1 == len(read.offsets) >= 1
            assert len(read.frames) <= max(bytes_max, 12 + lengths[first])
            expected, _ = pack_entries(entries[first : read.last_entry_id + 1], first)
            assert bytes(read.frames) == bytes(expected)
        assert await entries_of(handle) == entries

    run_virtual(main())


def bytes_of_frames(whole: bytes) -> set[int]:
    """Return which bytes of a data object are neither a block's header nor padding."""
    return {
        offset
        for block in naive_read(whole)
        for offset in range(block.offset + 128, block.offset + block.block_len - len(block.padding))
    }


@pytest.mark.parametrize("grain_len", [64, BLOCK])
def test_every_flipped_byte_is_found_on_every_read(grain_len):
    async def main():
        world = World()
        copy = await written(world, ENTRIES, grain_len=grain_len)
        whole = data_of(world)
        # Small grains that hold no byte of a frame are not even fetched.
        read = {offset // grain_len for offset in bytes_of_frames(whole)}
        for offset in range(len(whole)):
            put_data(world, whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
            grain = offset // grain_len
            if grain in read:
                with pytest.raises(CorruptError) as found:
                    await entries_of((await opened(world, copy)).handle)
                details = found.value.details
                assert details["object"] == f"{UUID_1}-ledger-7"
                assert (details["offset"], details["grain"]) == (str(grain * grain_len), str(grain))
            if offset % 7:
                continue
            # Whoever reads one entry gets the right one or none.
            handle = (await opened(world, copy)).handle
            for entry_id, entry in enumerate(ENTRIES):
                try:
                    frames = await handle.read_frames(EntryId(entry_id), 1000, entries_max=1)
                except CorruptError:
                    continue
                assert bytes(frames.frames[12 : 12 + len(entry)]) == entry

    run_virtual(main(), until_s=10_000)


def test_it_is_there_before_the_index_is():
    async def main():
        world = World()
        offloader = world.offloader()
        put, written_keys = offloader._objects.put, []

        async def noting(key: str, *arguments: Any, **options: Any) -> Any:
            written_keys.append(key)
            return await put(key, *arguments, **options)

        setattr(offloader._objects, "put", noting)  # noqa: B010 - mypy
        await offloader.offload(ListHandle(LEDGER, ENTRIES), UUID_1, {})
        location = offloader.location(LEDGER, UUID_1)
        assert written_keys == [location.side_key, location.index_key]

    run_virtual(main())


def test_what_was_damaged_on_its_way_is_fetched_once_more():
    async def main():
        world = World()
        handle, reading, _, _ = await copied(world, ENTRIES)
        get_range = reading.ranges._objects.get_range
        damaged: set[int] = set()

        async def flipping(key: str, start: int, length: int) -> bytes | None:
            body: bytes | None = await get_range(key, start, length)
            if body is None or start in damaged or key.endswith("-side"):
                return body
            damaged.add(start)
            return bytes([body[0] ^ 1]) + body[1:]

        setattr(reading.ranges._objects, "get_range", flipping)  # noqa: B010 - mypy
        assert await entries_of(handle) == ENTRIES
        assert reading.ranges.mismatches == len(damaged) > 3

    run_virtual(main())


def test_another_ledgers_bytes_under_the_key_are_refused():
    async def main():
        world = World()
        other = World()
        copy = await written(world, ENTRIES)
        await written(other, [one.lower() for one in ENTRIES])
        put_data(world, data_of(other))
        with pytest.raises(CorruptError, match="grain"):
            await entries_of((await opened(world, copy)).handle)

    run_virtual(main())


@pytest.mark.parametrize("entry_len", [100, 1000, 30_000, 65_536])
def test_an_entry_anywhere_takes_two_requests_and_140_kb(entry_len):
    async def main():
        world = World()
        rng = random.Random(1)
        count = 20 * MIB // (entry_len + 12)
        entries = [rng.randbytes(8) * (entry_len // 8 + 1) for _ in range(count)]
        entries = [one[:entry_len] for one in entries]
        # A longer one now and then, so that the others begin everywhere.
        entries[10::50] = [bytes(entry_len + 7)] * len(entries[10::50])
        copy = await written(world, entries, grain_len=65536, block_size=5 * MIB)
        places = [rng.randrange(count) for _ in range(150)]
        for entry_id in [0, count - 1, *places]:
            handle, reading, _, faults = await opened(world, copy, ranges=RangeLimits())
            # The header is at hand, its pages are not.
            handle._side.forget()  # type: ignore[union-attr]
            side_key = handle.location.side_key
            asked = noted(reading)
            assert faults.calls is not None
            faults.calls.clear()
            read = await handle.read_frames(EntryId(entry_id), 4 * MIB, entries_max=1)
            assert bytes(read.frames[12 : 12 + len(entries[entry_id])]) == entries[entry_id]
            if len(entries[entry_id]) <= 65_536:
                assert len(asked) <= 2, asked
                assert [key for key, _, _ in asked].count(side_key) <= 1
                assert sum(length for _, _, length in asked) <= FEW_BYTES
            # Another one nearby is no beginning of reading on.
            asked.clear()
            nearby = min(entry_id + 65_536 // entry_len, count - 1)
            read = await handle.read_frames(EntryId(nearby), 4 * MIB, entries_max=1)
            if len(entries[nearby]) <= 65_536:
                assert len(asked) <= 2, asked
                assert sum(length for _, _, length in asked) <= FEW_BYTES

    run_virtual(main(), until_s=10_000)


@pytest.mark.parametrize(("before_end", "grains"), [(12, 2), (11, 3), (1, 3), (0, 2)])
def test_where_a_border_of_grains_cuts_its_header_the_longest_takes_a_grain_more(
    before_end, grains
):
    async def main():
        world = World()
        sizes = [GRAIN_LEN - 128 - 12 - before_end, 65_536, *[MIB] * 17]
        copy = await written(
            world, [bytes(size) for size in sizes], grain_len=GRAIN_LEN, block_size=5 * MIB
        )
        handle, reading, *_ = await opened(world, copy, ranges=RangeLimits())
        handle._side.forget()  # type: ignore[union-attr]
        asked = noted(reading)
        assert (await handle.read_frames(EntryId(1), 4 * MIB, entries_max=1)).last_entry_id == 1
        lengths = sorted(length for _, _, length in asked)
        assert lengths == [2 * PAGE_LEN, grains * GRAIN_LEN]
        assert sum(lengths) <= 200 * 1024

    run_virtual(main())


def test_padding_is_not_fetched_for_the_entry_before_it():
    async def main():
        world = World()
        # The long one leaves most of the first block to padding.
        long_len = 5 * MIB - 140
        entries = [*([bytes(1000)] * 100), bytes(long_len), bytes(10)]
        copy = await written(world, entries, grain_len=65536, block_size=5 * MIB)
        handle, reading, _, _ = await opened(world, copy, ranges=RangeLimits())
        asked = noted(reading)
        read = await handle.read_frames(EntryId(99), 8 * MIB, entries_max=1)
        assert read.last_entry_id == 99
        assert sum(length for _, _, length in asked) <= FEW_BYTES + GRAIN_LEN
        # The long one comes whole, and little more than that.
        asked.clear()
        read = await handle.read_frames(EntryId(100), 8 * MIB, entries_max=1)
        assert len(read.frames) == long_len + 12
        assert sum(length for _, _, length in asked) <= long_len + FEW_BYTES

    run_virtual(main())


def noted(reading: BlockOffloader) -> list[tuple[str, int, int]]:
    """Note which ranges an offloader asks for from now on."""
    asked: list[tuple[str, int, int]] = []
    objects = reading._objects
    get_range = objects.get_range

    async def noting(key: str, start: int, length: int) -> bytes | None:
        asked.append((key, start, length))
        return await get_range(key, start, length)

    setattr(objects, "get_range", noting)  # noqa: B010 - mypy
    return asked


@pytest.mark.covers("A79")
def test_reading_on_fetches_whole_ranges_each_once():
    async def main():
        world = World()
        entries = [bytes([number % 256]) * 1000 for number in range(7000)]
        handle, reading, copy, _ = await copied(
            world, entries, grain_len=65536, block_size=5 * MIB, ranges=RangeLimits()
        )
        asked, at = noted(reading), 0
        while at < len(entries):
            read = await handle.read_frames(EntryId(at), 100_000)
            at = read.last_entry_id + 1
        lengths = [length for _, _, length in asked]
        # The first read can't know that there is a second one.
        assert lengths[0] == 2 * 65536
        assert max(lengths) == RANGE_BYTES
        assert sum(lengths) == copy.data_len
        assert len(lengths) <= copy.data_len // RANGE_BYTES + 2

    run_virtual(main())


def test_a_long_read_fetches_whole_ranges_from_its_start():
    async def main():
        world = World()
        entries = [bytes([number % 256]) * 1000 for number in range(7000)]
        handle, reading, copy, _ = await copied(
            world, entries, grain_len=65536, block_size=5 * MIB, ranges=RangeLimits()
        )
        asked = noted(reading)
        assert await entries_of(handle) == entries
        assert len(asked) == -(-copy.data_len // RANGE_BYTES)

    run_virtual(main())


def test_readers_share_fetches_of_grains_and_pages():
    async def main():
        world = World()
        entries = [bytes([number % 256]) * 60 for number in range(900)]
        ranges = RangeLimits(range_bytes=256, in_flight_max=4, kept_bytes_max=10**6)
        handle, reading, copy, _ = await copied(world, entries, ranges=ranges)
        side = handle._side
        assert side is not None
        side.forget()
        asked = noted(reading)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(entries_of(handle)) for _ in range(5)]
        assert all(task.result() == entries for task in tasks)
        for key, all_bytes in (
            (handle.location.data_key, set(range(copy.data_len))),
            (handle.location.side_key, set(range(side.header.header_len, copy.side_len))),
        ):
            spans = [(start, start + length) for name, start, length in asked if name == key]
            fetched = [byte for span in spans for byte in range(*span)]
            assert len(fetched) == len(set(fetched))
            assert set(fetched) <= all_bytes
            # Grains of nothing but a block's header, or of padding, are left out.
            assert len(fetched) > 0.7 * len(all_bytes)

    run_virtual(main())


def test_pages_in_memory_are_bounded():
    async def main():
        world = World()
        entries = [bytes(200)] * 2500
        copy = await written(world, entries)
        pages = SidePages(world.bucket.connect(), bytes_max=PAGES_AHEAD * PAGE_BYTES)
        index = (await opened(world, copy)).handle.index
        location = world.offloader().location(LEDGER, UUID_1)
        side = await open_side(world.bucket.connect(), location, index, pages, copy=copy)
        assert side is not None
        assert side.header.page_count > 3 * PAGES_AHEAD
        rng = random.Random(1)
        ids = [*range(0, 2500, 5), *(rng.randrange(2500) for _ in range(500))]
        for entry_id in ids:
            place = await side.place_before(EntryId(entry_id))
            assert place.entry_id <= entry_id
            assert pages.size_bytes <= PAGES_AHEAD * PAGE_BYTES
        assert not pages._flying

    run_virtual(main(), until_s=10_000)


class Watched:
    """A bucket that is slow, and notes what pages take while it is asked for some."""

    def __init__(self, objects):
        self._objects = objects
        self.pages: SidePages | None = None
        self.sizes: list[int] = []
        self.at_once = self.at_once_max = 0

    async def get_range(self, key, start, length):
        if self.pages is None:
            return await self._objects.get_range(key, start, length)
        self.at_once += -(-length // PAGE_LEN)
        self.at_once_max = max(self.at_once_max, self.at_once)
        try:
            for _ in range(10):
                self.sizes.append(self.pages.size_bytes)
                assert self.pages.size_bytes >= self.at_once * PAGE_BYTES
                await asyncio.sleep(0.1)
            return await self._objects.get_range(key, start, length)
        finally:
            self.at_once -= -(-length // PAGE_LEN)


@pytest.mark.parametrize("outlasting", [False, True])
def test_pages_on_their_way_have_their_room_before_they_are_asked_for(outlasting):
    """Many more are wanted at once than there is room for: all come, and none is refused."""

    async def main():
        world = World()
        copy = await written(world, [bytes(200)] * 2500)
        index = (await opened(world, copy)).handle.index
        objects, work = Watched(world.bucket.connect()), Outlasting()
        bytes_max = PAGES_AHEAD * PAGE_BYTES
        pages = SidePages(cast("ObjectReads", objects), bytes_max=bytes_max, outlasting=work)
        location = world.offloader().location(LEDGER, UUID_1)
        side = await open_side(world.bucket.connect(), location, index, pages, copy=copy)
        assert side is not None
        objects.pages = pages
        async with AsyncExitStack() as stack:
            if outlasting:
                await stack.enter_async_context(work.run())
            for first in (0, 3):  # the second time some of them are kept
                ids = list(range(first, 2500, 7))
                asked = [asyncio.create_task(side.place_before(EntryId(one))) for one in ids]
                await asyncio.sleep(0.05)
                assert pages._rooms.taken > 0
                for one in asked[::5]:
                    one.cancel()
                for number, one in enumerate(asked):
                    if number % 5:
                        assert (await one).entry_id <= ids[number]
                assert max(objects.sizes) <= bytes_max
            assert objects.at_once_max == PAGES_AHEAD
            await asyncio.sleep(100)
            assert (pages._rooms.taken, pages._flying) == (0, {})
            assert pages.size_bytes <= bytes_max

    run_virtual(main(), until_s=10_000)


def test_a_page_whose_fetch_was_given_up_is_fetched_by_who_waited_for_it():
    async def main():
        world = World()
        entries = [bytes(200)] * 2500
        copy = await written(world, entries)
        faults = Faults(world.rng)
        pages = SidePages(world.bucket.connect(faults))
        index = (await opened(world, copy)).handle.index
        location = world.offloader().location(LEDGER, UUID_1)
        side = await open_side(world.bucket.connect(), location, index, pages, copy=copy)
        assert side is not None
        faults.rates = FaultRates(delay_s_max=5.0)
        asked = [asyncio.create_task(side.place_before(EntryId(100))) for _ in range(3)]
        await asyncio.sleep(0.01)
        asked[0].cancel()
        await asyncio.wait(asked, timeout=60)
        assert asked[1].result() == asked[2].result()
        assert pages.fetches == 1
        assert not pages._flying

    run_virtual(main())


class TestSideObjectsThatAreNotAsTheyShouldBe:
    def test_a_missing_one_is_never_done_without(self):
        async def main():
            world = World()
            copy = await written(world, ENTRIES)
            del world.bucket.objects[f"{UUID_1}-ledger-7-side"]
            with pytest.raises(RefusedError) as gone:
                await opened(world, copy)
            assert gone.value.reason is Reason.LEDGER_NOT_FOUND

        run_virtual(main())

    @pytest.mark.parametrize("entries", [ENTRIES, [bytes(200)] * 800])
    def test_a_damaged_one_is_found_at_its_byte_and_never_believed(self, entries):
        async def main():
            world = World()
            copy = await written(world, entries)
            key = f"{UUID_1}-ledger-7-side"
            info, raw = world.bucket.objects[key]
            for offset in range(0, len(raw), 1 + len(raw) // 50):
                damaged = raw[:offset] + bytes([raw[offset] ^ 8]) + raw[offset + 1 :]
                world.bucket.objects[key] = (info, damaged)
                with pytest.raises(CorruptError) as found:
                    await entries_of((await opened(world, copy, ranges=RangeLimits())).handle)
                assert found.value.details["object"] == key
            world.bucket.objects[key] = (info, raw[:-5])
            with pytest.raises(CorruptError, match="ends at byte"):
                await entries_of((await opened(world, copy)).handle)
            world.bucket.objects[key] = (info, raw)
            assert await entries_of((await opened(world, copy)).handle) == entries

        run_virtual(main(), until_s=10_000)

    def test_damage_is_not_remembered(self):
        async def main():
            world = World()
            handle, *_ = await copied(world, [bytes(200)] * 800)
            key = f"{UUID_1}-ledger-7-side"
            whole = world.bucket.objects[key]
            world.bucket.damage(key, len(whole[1]) - 5)
            with pytest.raises(CorruptError):
                await entries_of(handle)
            world.bucket.objects[key] = whole
            assert await entries_of(handle) == [bytes(200)] * 800

        run_virtual(main(), until_s=10_000)

    def test_a_page_that_memory_spoilt_is_read_anew(self):
        async def main():
            world = World()
            handle, reading, *_ = await copied(world, ENTRIES)
            (rows,) = reading._side_pages._kept.values()
            rows.crcs[5] ^= 1
            assert await entries_of(handle) == ENTRIES
            assert reading.ranges.mismatches == 1
            (again,) = reading._side_pages._kept.values()
            assert again is not rows

        run_virtual(main())

    def test_one_of_another_attempt_is_refused(self):
        async def main():
            world = World()
            copy = await written(world, ENTRIES)
            other = UUID(int=2)
            handle = ListHandle(LEDGER, ENTRIES)
            second = await world.offloader(grain_len=64).offload(handle, other, {})
            objects = world.bucket.objects
            objects[f"{UUID_1}-ledger-7-side"] = objects[f"{other}-ledger-7-side"]
            with pytest.raises(CorruptError, match="digest"):
                await opened(world, copy)
            # Nor where nobody kept digests.
            without = replace(second, side_sha256=b"", side_header_sha256=b"")
            with pytest.raises(CorruptError, match="is of attempt"):
                await opened(world, without)

        run_virtual(main())


class TestSharedCache:
    @pytest.mark.parametrize("entries", [ENTRIES, [bytes(200)] * 800])
    def test_a_hit_asks_the_bucket_for_nothing(self, entries):
        async def main():
            world = World()
            cache = MemoryCache(world.clock)
            copy = await written(world, entries)
            await opened(world, copy, cache=cache.connect())
            assert len(cache.values) == 2
            again = await opened(world, copy, cache=cache.connect())
            assert again.faults.calls == []
            assert await entries_of(again.handle) == entries

        run_virtual(main(), until_s=10_000)

    def test_a_poisoned_value_is_refused_and_read_again(self):
        async def main():
            world = World()
            cache = MemoryCache(world.clock)
            copy = await written(world, ENTRIES)
            await opened(world, copy, cache=cache.connect())
            (name,) = [one for one in cache.values if one.startswith("side:")]
            good, end_s = cache.values[name]
            for poison in (b"", good[:-1], good[:20] + b"\1" + good[21:], good + b"\0"):
                cache.values[name] = (poison, end_s)
                handle = (await opened(world, copy, cache=cache.connect())).handle
                assert await entries_of(handle) == ENTRIES
                assert cache.values[name][0] == good

        run_virtual(main())

    def test_without_a_digest_it_is_not_used(self):
        async def main():
            world = World()
            cache = MemoryCache(world.clock)
            copy = await written(world, [bytes(200)] * 800)
            without = replace(copy, side_header_sha256=b"")
            await opened(world, without, cache=cache.connect())
            assert not [one for one in cache.values if one.startswith("side:")]

        run_virtual(main())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), min_size=1, max_size=80),
    st.integers(0, 70),
)
def test_seeking_by_time_skips_nothing_and_little(rows, wanted_ms):
    entries = [bytes(length) for length, _ in rows]
    times = [time for _, time in rows]

    async def main():
        handle, *_ = await copied(World(), entries, times=times)
        found = await handle.entry_at_time(wanted_ms)
        assert found is not None
        # Nothing before it is as late as that.
        assert all(time < wanted_ms for time in times[:found])
        late = [entry_id for entry_id, time in enumerate(times) if time >= wanted_ms]
        if not late:
            assert found == len(entries) or max(times) < wanted_ms
            return
        # It is in the same run, or in the same grain, as the first that is.
        assert found <= late[0]
        between = sum(len(entry) + 12 for entry in entries[found : late[0] // 3 * 3])
        assert between <= 64 + 200 + 12 + 128

    run_virtual(main())


def test_without_times_or_without_a_side_object_nothing_is_told():
    async def main():
        world = World()
        handle, _, copy, _ = await copied(world, ENTRIES)
        assert await handle.entry_at_time(5) is None
        plain = await opened(world, replace(copy, side_len=0))
        assert await plain.handle.entry_at_time(5) is None
        assert await entries_of(plain.handle) == ENTRIES

    run_virtual(main())
