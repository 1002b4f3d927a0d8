"""Reading from S3 (seeds/000): index once, binary search, 1 MiB ranges, some offsets remembered.

Damage in the structure ends in an error that names object and byte: a walk never loops and never
comes back short in silence. Payload bytes carry no checksum in these two objects: test_side.py
is about the third.
"""

import asyncio
import random
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_repair import offloaded
from tests.unit.offload.world import BLOCK, CLUSTER, ListHandle, World, entries_of
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.block import BLOCK_HEADER_LEN, PADDING
from tierlog.format.frame import FRAME_HEADER_LEN, pack_entries
from tierlog.format.index import INDEX_LEN_MAX
from tierlog.format.keys import FORMAT_VERSION
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.index_loader import load_index
from tierlog.offload.offsets import NOTE_BYTES, OBJECT_BYTES, OffsetsCache
from tierlog.offload.range_memory import LastRanges
from tierlog.offload.ranges import RangeLimits, Ranges, Source
from tierlog.offload.verify import verify_copy

LEDGER = LedgerId(7)
UUID_1 = UUID(int=1)


async def copied(world, entries, *, faults=None, cache=None, ranges=None, block_size=BLOCK):
    """Offload entries with one offloader, and return a handle of another one, and its parts.

    It reads as if there were no side object, as with the objects of others.
    """
    from tests.unit.offload.world import SMALL_RANGES, metadata_of

    handle = ListHandle(LEDGER, entries, metadata_of(entries, block_size=block_size))
    copy = replace(await world.offloader().offload(handle, UUID_1, {}), side_len=0)
    reading = BlockOffloader(
        world.bucket.connect(faults),
        Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=ranges or SMALL_RANGES),
        cache=cache,
    )
    return await reading.read_offloaded(LEDGER, UUID_1, copy=copy), reading, copy


def counting() -> Faults:
    faults = Faults(random.Random(1))
    faults.calls = []
    return faults


sizes = st.lists(st.integers(0, 90) | st.sampled_from([150, 372]), min_size=1, max_size=60)


@pytest.mark.covers("A78", "A81")
@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 900), st.randoms(use_true_random=False))
def test_frames_from_anywhere(lengths, bytes_max, rng):
    entries = [bytes([number % 256]) * length for number, length in enumerate(lengths)]

    async def main():
        world = World()
        handle, _, _ = await copied(world, entries)
        for _ in range(5):
            first = rng.randrange(len(entries))
            read = await handle.read_frames(EntryId(first), bytes_max)
            assert read.first_entry_id == first
            assert read.last_entry_id - first + 1 == len(read.offsets) >= 1
            assert len(read.frames) <= max(bytes_max, FRAME_HEADER_LEN + lengths[first])
            bounds = [*map(int, read.offsets), len(read.frames)]
            for number in range(len(read.offsets)):
                frame = bytes(read.frames[bounds[number] : bounds[number + 1]])
                entry = entries[first + number]
                expected = len(entry).to_bytes(4, "big") + (first + number).to_bytes(8, "big")
                assert frame == expected + entry

    run_virtual(main())


@pytest.mark.covers("A79", "B01")
def test_ranges_are_of_one_mebibyte_unless_told_otherwise():
    async def main():
        world = World()
        entries = [bytes(100_000)] * 25
        limits = RangeLimits()
        assert limits.range_bytes == 2**20
        handle, reading, _ = await copied(world, entries, ranges=limits, block_size=5 * 2**20)
        asked: list[tuple[int, int]] = []
        get_range = reading.ranges._objects.get_range

        async def noted(key: str, start: int, length: int) -> bytes | None:
            asked.append((start, length))
            body: bytes | None = await get_range(key, start, length)
            return body

        setattr(reading.ranges._objects, "get_range", noted)  # noqa: B010 - mypy
        assert await entries_of(handle) == entries
        assert sorted(asked)[:2] == [(0, 2**20), (2**20, 2**20)]
        assert max(length for _, length in asked) == 2**20

    run_virtual(main())


@pytest.mark.covers("A77", "A79", "A82")
def test_sequential_reading_fetches_the_index_once_and_each_range_once():
    entries = [bytes([number % 256]) * (number % 70) for number in range(400)]

    async def main():
        world = World()
        faults = counting()
        handle, reading, _ = await copied(world, entries, faults=faults)
        assert faults.calls == ["objects.get"]
        at, found = 0, 0
        while at < len(entries):
            read = await handle.read_frames(EntryId(at), 100)
            found += len(read.offsets)
            at = read.last_entry_id + 1
        assert found == len(entries)
        size = handle.index.data_len
        assert reading.ranges.bytes_fetched == size
        assert faults.calls.count("objects.get_range") == -(-size // 64) == reading.ranges.fetches

    run_virtual(main())


@pytest.mark.covers("A81", "A82")
def test_what_was_walked_over_once_is_found_at_once_afterwards():
    entries = [b"x" * 40] * 200

    async def main():
        world = World()
        limits = RangeLimits(range_bytes=1000, in_flight_max=1, kept_bytes_max=1000)
        handle, reading, _ = await copied(world, entries, ranges=limits, block_size=20_000)
        # The block's end: walked from its start, the first time.
        await handle.read_frames(EntryId(190), 100)
        walked = reading.ranges.fetches
        assert walked > 8
        # Now nearby, before and after: at most two ranges, as an entry may cross their border.
        for entry_id in (190, 191, 189, 195):
            before = reading.ranges.fetches
            await handle.read_frames(EntryId(entry_id), 60)
            assert reading.ranges.fetches - before <= 3

    run_virtual(main())


def test_readers_of_one_handle_share_fetches_and_never_disturb_each_other():
    entries = [bytes([number % 256]) * 30 for number in range(300)]

    async def main():
        world = World()
        faults = Faults(random.Random(1), rates=FaultRates(delay_s_max=0.1))
        handle, reading, _ = await copied(
            world,
            entries,
            faults=faults,
            ranges=RangeLimits(range_bytes=64, in_flight_max=4, kept_bytes_max=10**6),
        )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(entries_of(handle)) for _ in range(5)]
        assert all(task.result() == entries for task in tasks)
        assert reading.ranges.bytes_fetched == handle.index.data_len

    run_virtual(main())


def test_a_cancelled_reader_leaves_the_others_their_bytes():
    async def main():
        world = World()
        faults = Faults(random.Random(1), rates=FaultRates(delay_s_max=1.0))
        handle, reading, _ = await copied(world, [b"x" * 30] * 50, faults=faults)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(handle.read_frames(EntryId(0), 60))
            await asyncio.sleep(0.01)
            second = group.create_task(handle.read_frames(EntryId(0), 60))
            await asyncio.sleep(0.01)
            first.cancel()
        assert second.result().last_entry_id == 0
        assert not reading.ranges._flying

    run_virtual(main())


def test_at_most_so_many_ranges_fly():
    async def main():
        world = World()
        flying = peak = 0
        entries = [bytes(372)] * 50
        handle, reading, _ = await copied(
            world,
            entries,
            ranges=RangeLimits(range_bytes=32, in_flight_max=3, kept_bytes_max=4096),
        )
        get_range = reading.ranges._objects.get_range

        async def counted(key, start, length):
            nonlocal flying, peak
            flying += 1
            peak = max(peak, flying)
            await asyncio.sleep(1)
            flying -= 1
            assert length <= 32
            body: bytes | None = await get_range(key, start, length)
            return body

        reading.ranges._objects.get_range = counted
        assert await entries_of(handle) == entries
        assert peak == 3
        memory = reading.ranges._memory
        assert isinstance(memory, LastRanges)
        assert memory.kept_bytes <= 4096

    run_virtual(main())


def damaged_reading(entries, damage):
    """Read a whole ledger whose data object went through ``damage``; return what came of it."""

    async def main():
        world = World()
        handle, _, _ = await copied(world, entries)
        key = handle.location.data_key
        info, raw = world.bucket.objects[key]
        world.bucket.objects[key] = (info, damage(raw))
        try:
            return await entries_of(handle)
        except CorruptError as error:
            named, offset = error.details["object"], int(error.details["offset"])
        assert named == key
        assert 0 <= offset <= len(raw)
        return None

    return run_virtual(main(), until_s=1000)


ENTRIES = [bytes([65 + number]) * length for number, length in enumerate([60, 0, 200, 90, 5, 372])]


def structure_offsets() -> set[int]:
    """Where the data object of ``ENTRIES`` has no payload, no padding and no reserved bytes."""
    from tests.golden.objects import offload

    offsets, base = set(), 0
    for block in offload(ENTRIES, BLOCK).blocks:
        offsets |= set(range(base, base + 28))
        at = 128
        while at + 12 <= len(block) and block[at] < 0x80:
            offsets |= set(range(base + at, base + at + 12))
            at += 12 + int.from_bytes(block[at : at + 4], "big")
        base += len(block)
    return offsets


def test_every_flipped_byte_of_the_structure_is_seen():
    structure = structure_offsets()
    assert len(structure) == 3 * 28 + 6 * 12
    # The length of entry 4, the last of its block, grown by whole words of the padding: 5 became…
    length_offset = BLOCK + 128 + 102
    untold = {(length_offset + 2, 0x01): 5 + 256, (length_offset + 3, 0x80): 5 + 128}
    seen = 0
    for offset in sorted(structure | set(range(0, 1536, 17))):
        for bits in (0x01, 0x80, 0xFF):

            def flip(raw: bytes, offset: int = offset, bits: int = bits) -> bytes:
                if offset >= len(raw):
                    return raw
                return raw[:offset] + bytes([raw[offset] ^ bits]) + raw[offset + 1 :]

            found = damaged_reading(ENTRIES, flip)
            if (offset, bits) in untold:
                assert found is not None
                assert len(found[4]) == untold[offset, bits]
                seen += 1
            elif offset in structure:
                assert found is None, (offset, bits)
                seen += 1
            elif found is not None:
                # A payload byte: nothing in these objects guards it, and nothing else moves.
                assert [len(one) for one in found] == [len(one) for one in ENTRIES]
    assert seen == 3 * len(structure)


def test_every_cut_is_seen():
    length = run_virtual(_data_len())
    for cut in range(0, length, 7):
        assert damaged_reading(ENTRIES, lambda raw, cut=cut: raw[:cut]) is None


def test_what_a_walk_fetches_ahead_fails_no_read_of_what_lies_before_it():
    """Of an object that was cut all is read that is left in whole ranges, wherever it begins."""
    entries = [bytes([number]) * 40 for number in range(60)]
    limits = RangeLimits(range_bytes=64, in_flight_max=8, kept_bytes_max=2048)

    async def read_alone(number: int, left: int) -> bytes:
        world = World()
        handle, _, _ = await copied(world, entries, ranges=limits, block_size=2**16)
        key = handle.location.data_key
        info, raw = world.bucket.objects[key]
        world.bucket.objects[key] = info, raw[:left]
        read = await handle.read_frames(EntryId(number), 1)
        return bytes(read.frames[FRAME_HEADER_LEN:])

    frame_len, ranges = FRAME_HEADER_LEN + 40, 32
    whole = (ranges * limits.range_bytes - BLOCK_HEADER_LEN) // frame_len
    left = ranges * limits.range_bytes + 7
    for number in range(whole):
        assert run_virtual(read_alone(number, left)) == entries[number]
    for number in (whole, whole + 1, 59):
        with pytest.raises(CorruptError, match=f"ends at byte {left} of"):
            run_virtual(read_alone(number, left))


@pytest.mark.parametrize("size", [28, 64, 512])
def test_zeros_in_the_middle_are_never_taken_for_the_end(size: int):
    """As a page that a disk lost (B12); a payload alone is guarded by side objects, not here."""
    length, told = run_virtual(_data_len()), 0
    for start in range(0, length, 13):

        def zero(raw: bytes, start: int = start) -> bytes:
            return raw[:start] + bytes(len(raw[start : start + size])) + raw[start + size :]

        found = damaged_reading(ENTRIES, zero)
        if found is None:
            told += 1
        else:
            assert [len(one) for one in found] == [len(one) for one in ENTRIES], start
    assert told > 20


async def _data_len() -> int:
    handle, _, _ = await copied(World(), ENTRIES)
    return int(handle.index.data_len)


def test_what_was_damaged_on_its_way_is_read_anew():
    async def main():
        world = World()
        handle, _, _ = await copied(world, ENTRIES)
        key = handle.location.data_key
        whole = world.bucket.objects[key]
        world.bucket.damage(key, 128 + 11)
        with pytest.raises(CorruptError):
            await entries_of(handle)
        world.bucket.objects[key] = whole
        assert await entries_of(handle) == ENTRIES

    run_virtual(main())


def test_where_a_damaged_length_said_that_entries_lie_is_not_remembered():
    async def main():
        world = World()
        handle, _, _ = await copied(world, ENTRIES)
        key = handle.location.data_key
        info, raw = world.bucket.objects[key]
        at = 128 + 3  # the length of entry 0, behind which entry 1 lies
        world.bucket.objects[key] = info, raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
        await handle.read_frames(EntryId(0), 1)
        with pytest.raises(CorruptError):
            await handle.read_frames(EntryId(1), 1)
        world.bucket.objects[key] = info, raw
        for number in (2, 1, 0):
            read = await handle.read_frames(EntryId(number), 1)
            assert bytes(read.frames[12 : 12 + len(ENTRIES[number])]) == ENTRIES[number]

    run_virtual(main())


def test_an_entry_behind_the_last_of_its_block_is_never_given():
    async def main():
        world = World()
        handle, _, _ = await copied(world, ENTRIES)
        info, raw = world.bucket.objects[handle.location.data_key]
        # Entry 5 begins the third block; here it lies in the padding of the second one, too.
        frames, _ = pack_entries(ENTRIES[3:5], 3)
        another, _ = pack_entries([b"another"], 5)
        at = BLOCK + BLOCK_HEADER_LEN + len(frames)
        damaged = raw[:at] + another + raw[at + len(another) :]
        world.bucket.objects[handle.location.data_key] = info, damaged
        # The budget ends the walk behind it, where nothing more tells.
        with pytest.raises(CorruptError, match="behind 4, the last of its block"):
            await handle.read_frames(EntryId(3), len(frames) + len(another))

    run_virtual(main())


def test_a_last_entry_that_lost_its_end_is_seen_also_where_that_looks_like_padding():
    entries = [b"x", PADDING * 10]
    at = BLOCK_HEADER_LEN + FRAME_HEADER_LEN + 1
    shorter = (5 * len(PADDING)).to_bytes(4, "big")
    assert damaged_reading(entries, lambda raw: raw[:at] + shorter + raw[at + 4 :]) is None


def test_a_missing_object_is_told_as_such():
    async def main():
        world = World()
        handle, _, _ = await copied(world, ENTRIES)
        del world.bucket.objects[handle.location.data_key]
        with pytest.raises(RefusedError) as gone:
            await handle.read_frames(EntryId(0), 100)
        assert gone.value.reason is Reason.LEDGER_NOT_FOUND

    run_virtual(main())


@pytest.mark.parametrize("with_digest", [True, False])
def test_an_index_that_is_too_long_is_refused_before_its_bytes_are_taken(with_digest: bool):
    async def main():
        world, was = await offloaded()
        assert was.location is not None
        assert was.copy is not None
        key, copy = was.location.index_key, was.copy if with_digest else None
        most = was.copy.index_len if with_digest else INDEX_LEN_MAX
        info, body = world.bucket.objects[key]
        store = world.bucket.connect()
        await load_index(store, was.location, copy=copy)
        world.bucket.objects[key] = (info, body + bytes(most + 1 - len(body)))
        with pytest.raises(CorruptError, match="more than the"):
            await load_index(store, was.location, copy=copy)
        with pytest.raises(CorruptError, match="more than the"):
            await verify_copy(store, was.location, was.copy)

    run_virtual(main())


def test_an_index_that_says_another_format_version_is_refused():
    async def main():
        world, was = await offloaded()
        assert was.location is not None
        key = was.location.index_key
        info, body = world.bucket.objects[key]
        metadata = {**info.metadata, FORMAT_VERSION: "99"}
        world.bucket.objects[key] = (replace(info, metadata=metadata), body)
        with pytest.raises(RefusedError, match="99"):
            await load_index(world.bucket.connect(), was.location)

    run_virtual(main())


def test_an_unreachable_store_is_retryable():
    async def main():
        world = World()
        faults = counting()
        handle, _, _ = await copied(world, ENTRIES, faults=faults)
        faults.outages.add("objects.")
        with pytest.raises(RetryableError):
            await handle.read_frames(EntryId(0), 100)
        faults.outages.clear()
        assert await entries_of(handle) == ENTRIES

    run_virtual(main())


class TestSharedIndexCache:
    def test_a_hit_asks_the_bucket_for_nothing(self):
        async def main():
            world = World()
            cache = MemoryCache(world.clock)
            _, reading, copy = await copied(world, ENTRIES, cache=cache.connect())
            assert len(cache.values) == 1
            faults = counting()
            second = BlockOffloader(
                world.bucket.connect(faults), reading._settings, cache=cache.connect()
            )
            handle = await second.read_offloaded(LEDGER, UUID_1, copy=copy)
            assert faults.calls == []
            assert await entries_of(handle) == ENTRIES

        run_virtual(main())

    def test_a_poisoned_value_is_refused_and_read_again(self):
        async def main():
            world = World()
            cache = MemoryCache(world.clock)
            _, reading, copy = await copied(world, ENTRIES, cache=cache.connect())
            (name,) = cache.values
            good, end_s = cache.values[name]
            for poison in (b"", good[:-1], good[:9] + b"\1" + good[10:], good + b"\0"):
                cache.values[name] = (poison, end_s)
                handle = await reading.read_offloaded(LEDGER, UUID_1, copy=copy)
                assert await entries_of(handle) == ENTRIES
                assert cache.values[name][0] == good

        run_virtual(main())

    def test_without_a_digest_it_is_not_believed(self):
        async def main():
            world = World()
            cache = MemoryCache(world.clock)
            _, reading, copy = await copied(world, ENTRIES, cache=cache.connect())
            (name,) = cache.values
            cache.values[name] = (b"rubbish", cache.values[name][1])
            handle = await reading.read_offloaded(LEDGER, UUID_1)
            assert await entries_of(handle) == ENTRIES
            assert copy.block_count == 3

        run_virtual(main())

    def test_a_bucket_that_differs_from_the_context_is_corrupt(self):
        async def main():
            world = World()
            _, reading, copy = await copied(world, ENTRIES)
            world.bucket.damage(f"{UUID_1}-ledger-7-index", 31)
            with pytest.raises(CorruptError, match="another digest"):
                await reading.read_offloaded(LEDGER, UUID_1, copy=copy)

        run_virtual(main())


@pytest.mark.covers("A82")
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400), st.booleans()), max_size=300)
)
def test_offsets_are_bounded_and_the_nearest_is_found(steps):
    bytes_max = OBJECT_BYTES + 20 * NOTE_BYTES
    cache = OffsetsCache(bytes_max=bytes_max)
    told: dict[str, set[int]] = {}
    for key, entry_id, asks in steps:
        if asks:
            note = cache.floor(key, entry_id)
            if note is not None:
                assert note.entry_id <= entry_id
                assert note.offset == note.entry_id * 100
                assert note.entry_id in told[key]
        else:
            cache.note(key, entry_id, entry_id * 100)
            told.setdefault(key, set()).add(entry_id)
        kept = cache._by_key
        assert cache.size_bytes == sum(notes.size_bytes for notes in kept.values()) <= bytes_max
        assert all(notes.entry_ids == sorted(set(notes.entry_ids)) for notes in kept.values())


def test_offsets_that_were_forgotten_take_no_room():
    cache = OffsetsCache()
    cache.note("a", 1, 100)
    cache.forget("a")
    assert cache.size_bytes == 0
    assert cache.floor("a", 1) is None


def test_warming_is_bounded_by_what_is_kept():
    async def main():
        world = World()
        limits = RangeLimits(range_bytes=64, in_flight_max=4, kept_bytes_max=512)
        await world.bucket.connect().put("k", bytes(10_000), metadata={})
        ranges = Ranges(world.bucket.connect(), limits)
        await ranges.warm(Source("k", 10_000), 0, 10_000)
        assert ranges.bytes_fetched == 256
        await ranges.read(Source("k", 10_000), 0, 256)
        assert ranges.bytes_fetched == 256

    run_virtual(main())
