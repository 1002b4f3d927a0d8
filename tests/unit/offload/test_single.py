"""The single-object layout in a bucket: what is written, what is read of it, what damage does."""

import asyncio
import hashlib
import itertools
from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.format.test_single_property import naive_entries
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import (
    CLUSTER,
    SMALL_RANGES,
    ListHandle,
    World,
    entries_of,
    metadata_of,
)
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.faults import FaultRates, Faults, Outcome, no_faults
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.format.single import SingleIndex
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.offload.driver import Tier2Settings
from tierlog.offload.single_driver import SINGLE_DRIVER, SingleObjectOffloader
from tierlog.offload.verify import ReadBack

LEDGER = LedgerId(7)
UUID_1 = UUID(int=1)
BLOCK = 200
BIGGEST = BLOCK - 140
INDEX = 600
KEY = f"{UUID_1}-ledger-7-single"
ENTRIES = [bytes([number]) * (number * 37 % 60) for number in range(1, 40)]

entry_lists = st.lists(
    st.integers(0, 40).map(bytes) | st.sampled_from([BIGGEST - 1, BIGGEST]).map(bytes),
    min_size=1,
    max_size=40,
)


def driver_of(
    world: World,
    faults: Faults | None = None,
    *,
    index_len_min: int = INDEX,
    read_back: ReadBack = ReadBack.SAMPLE,
    cache: MemoryCache | None = None,
) -> SingleObjectOffloader:
    """Return the driver over the world's bucket."""
    return SingleObjectOffloader(
        world.bucket.connect(faults or no_faults()),
        Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES, read_back=read_back),
        index_len_min=index_len_min,
        cache=cache.connect() if cache is not None else None,
    )


async def copied(world: World, entries: list[bytes], *, run_bytes_max: int = 100):
    """Offload entries; return the copy."""
    metadata = metadata_of(entries, block_size=BLOCK)
    handle = ListHandle(LEDGER, entries, metadata, run_bytes_max=run_bytes_max)
    return await driver_of(world).offload(handle, UUID_1, {"ManagedLedgerName": "logs"})


@pytest.mark.covers("B13", "B15", "B16", "B19", "B20", "B21", "B22", "B24")
@settings(max_examples=80, deadline=None)
@given(entry_lists, st.integers(13, 400))
def test_the_object_is_that_of_the_first_text(entries: list[bytes], run_bytes_max: int):
    async def main():
        world = World()
        copy = await copied(world, entries, run_bytes_max=run_bytes_max)
        assert set(world.bucket.objects) == {KEY}
        assert not world.bucket.uploads
        raw = world.bucket.objects[KEY][1]
        index = SingleIndex.decode(raw, len(raw))
        assert (index.index_len, copy.index_len) == (INDEX, INDEX)
        assert copy.index_sha256 == hashlib.sha256(raw[: index.used_len]).digest()
        assert copy.data_sha256 == hashlib.sha256(raw[INDEX:]).digest()
        assert (copy.data_len, copy.entry_count) == (len(raw), len(entries))
        found: list[bytes] = []
        for number, block in enumerate(index.blocks()):
            assert block.part_number == number + 2
            assert block.offset == INDEX + number * BLOCK
            assert block.first_entry_id == len(found)
            found += naive_entries(raw[block.offset : block.offset + block.length])
        assert found == entries

    run_virtual(main())


@pytest.mark.covers("B13", "B26")
def test_the_index_is_a_part_that_s3_takes_and_reading_does_not_fetch_its_padding():
    async def main():
        world = World()
        world.bucket = MemoryObjects(world.clock, part_bytes_min=5 * 1024 * 1024)
        handle = ListHandle(LEDGER, [b"abc"], metadata_of([b"abc"], block_size=BLOCK))
        writing = driver_of(world, index_len_min=5 * 1024 * 1024)
        copy = await writing.offload(handle, UUID_1, {})
        assert copy.index_len == 5 * 1024 * 1024
        parts = world.bucket.objects[KEY][0].etag.rpartition("-")[2]
        assert parts.strip('"') == "2"
        faults = no_faults()
        faults.calls = []
        reading = driver_of(world, faults, index_len_min=5 * 1024 * 1024)
        found = await reading.read_offloaded(LEDGER, UUID_1, copy=copy)
        assert await entries_of(found) == [b"abc"]
        assert reading.ranges.bytes_fetched < 1024
        assert [call.partition(".")[2] for call in faults.calls[:2]] == ["head", "get_range"]

    run_virtual(main())


@settings(max_examples=60, deadline=None)
@given(entry_lists, st.data())
def test_reading_the_copy_is_identical(entries: list[bytes], data: st.DataObject):
    async def main():
        world = World()
        copy = await copied(world, entries)
        tier2 = await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)
        assert await entries_of(tier2) == entries
        first = data.draw(st.integers(0, len(entries) - 1))
        last = data.draw(st.integers(first, len(entries) - 1))
        assert await entries_of(tier2, first, last) == entries[first : last + 1]
        size = data.draw(st.integers(1, 500))
        some = data.draw(st.none() | st.integers(1, 5))
        read = await tier2.read_frames(EntryId(first), size, entries_max=some)
        assert read.first_entry_id == first
        assert len(read.offsets) == read.last_entry_id - first + 1 >= 1
        assert some is None or len(read.offsets) <= some
        assert len(read.frames) <= max(size, 12 + len(entries[first]))
        await tier2.prefetch(EntryId(first), size)
        with pytest.raises(RefusedError) as refused:
            await tier2.read_frames(EntryId(len(entries)), 100)
        assert refused.value.reason is Reason.NO_SUCH_ENTRY

    run_virtual(main())


def test_a_read_anywhere_fetches_its_block_up_to_the_entry_and_no_other_block():
    async def main():
        world = World()
        copy = await copied(world, ENTRIES)
        driver = driver_of(world)
        tier2 = await driver.read_offloaded(LEDGER, UUID_1, copy=copy)
        block = tier2.index.block_of(30)
        await entries_of(tier2, 30, 30)
        assert driver.ranges.bytes_fetched <= block.length + 2 * SMALL_RANGES.range_bytes

    run_virtual(main())


@pytest.mark.covers("B14")
def test_names_and_user_metadata():
    async def main():
        world = World()
        await copied(world, [b"x"])
        location = driver_of(world).location(LEDGER, UUID_1)
        assert (location.driver, location.is_single) == (SINGLE_DRIVER, True)
        assert location.keys == (KEY,)
        metadata = world.bucket.objects[KEY][0].metadata
        assert metadata["role"] == "single"
        assert metadata["s3managedledgeroffloaderformatversion"] == "201804"
        assert metadata["managedledgername"] == "logs"

    run_virtual(main())


def test_an_object_of_another_version_is_refused():
    async def main():
        world = World()
        copy = await copied(world, [b"x"])
        info, raw = world.bucket.objects[KEY]
        store = world.bucket.connect()
        for version, error in (("1", RefusedError), ("", CorruptError)):
            name = "s3managedledgeroffloaderformatversion"
            await store.put(KEY, raw, metadata={**info.metadata, name: version})
            with pytest.raises(error):
                await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)

    run_virtual(main())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_corrupt_or_in_a_payload_and_a_full_verification_finds_all_of_it(
    data: st.DataObject,
):
    async def main():
        world = World()
        copy = await copied(world, ENTRIES)
        at = data.draw(st.integers(0, len(world.bucket.objects[KEY][1]) - 1))
        before = world.bucket.objects[KEY][1]
        world.bucket.damage(KEY, at)
        assert world.bucket.objects[KEY][1] != before
        with pytest.raises(CorruptError) as found:
            await driver_of(world, read_back=ReadBack.FULL).verify(LEDGER, UUID_1, None, copy)
        assert found.value.details["object"] == KEY
        try:
            tier2 = await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)
            read = await entries_of(tier2)
        except CorruptError:
            return
        # Nothing but one payload, a word of padding, or nothing that says anything.
        assert len(read) == len(ENTRIES)
        assert list(map(len, read)) == list(map(len, ENTRIES))
        assert sum(one != other for one, other in zip(read, ENTRIES, strict=True)) <= 1

    run_virtual(main())


def test_a_cached_index_is_believed_only_with_its_digest():
    async def main():
        world = World()
        cache = MemoryCache(world.clock)
        copy = await copied(world, ENTRIES)
        for _ in range(2):
            driver = driver_of(world, cache=cache)
            tier2 = await driver.read_offloaded(LEDGER, UUID_1, copy=copy)
            assert await entries_of(tier2) == ENTRIES
        # From the cache alone: the object is not asked for its index.
        del world.bucket.objects[KEY]
        await driver_of(world, cache=cache).read_offloaded(LEDGER, UUID_1, copy=copy)
        with pytest.raises(RefusedError):
            await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)
        # What somebody else put there is not believed.
        (name,) = cache.values
        cache.put(name, b"anything", 60)
        with pytest.raises(RefusedError):
            await driver_of(world, cache=cache).read_offloaded(LEDGER, UUID_1, copy=copy)

    run_virtual(main())


def spoilt(world: World, at: int, raw: bytes) -> None:
    """Write other bytes into the object."""
    info, before = world.bucket.objects[KEY]
    assert before[at : at + len(raw)] != raw
    world.bucket.objects[KEY] = (info, before[:at] + raw + before[at + len(raw) :])


@pytest.mark.parametrize(
    ("at", "raw"),
    [
        (8, b"\x00\x00\x00\x02"),  # block_entry_count: fewer than there are
        (4, b"\x00\x00\x00\xc0"),  # block_len
        (12, bytes(7) + b"\x01"),  # first_entry_id
    ],
)
def test_a_block_that_is_not_what_the_index_says_is_not_read(at: int, raw: bytes):
    async def main():
        world = World()
        copy = await copied(world, ENTRIES)
        spoilt(world, INDEX + at, raw)
        tier2 = await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)
        with pytest.raises(CorruptError, match="another block than the index says"):
            await tier2.read_frames(EntryId(1), 10)

    run_virtual(main())


@pytest.mark.parametrize("raw", [b"\xde\xad\x12\x34", b"\x7f\x00\x00\x00"])
def test_entries_that_end_before_their_block_does_are_never_taken_for_all(raw: bytes):
    async def main():
        world = World()
        copy = await copied(world, [b"abc", b"def", b"ghi"])
        # The length of the second entry: padding, and more than there is.
        spoilt(world, INDEX + 20 + 7, raw)
        tier2 = await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)
        for first, size in ((0, 1000), (1, 1000), (2, 1000)):
            with pytest.raises(CorruptError) as found:
                await tier2.read_frames(EntryId(first), size)
            assert found.value.details == {"object": KEY, "offset": str(INDEX + 27)}

    run_virtual(main())


def test_one_flipped_length_gives_nobody_another_entry():
    async def main():
        world = World()
        entries = [bytes([65 + number]) * 12 for number in range(24)]
        copy = await copied(world, entries)
        info, whole = world.bucket.objects[KEY]
        tier2 = await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)
        first_block = tier2.index.block_of(EntryId(0))
        refused: list[str] = []
        for number, bit in itertools.product(range(first_block.last_entry_id + 1), range(32)):
            at = first_block.offset + 20 + 16 * number + 3 - bit // 8
            spoilt(world, at, bytes([whole[at] ^ 1 << bit % 8]))
            for entry_id in range(first_block.last_entry_id + 1):
                tier2 = await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)
                try:
                    read = await tier2.read_frames(EntryId(entry_id), 1, entries_max=1)
                except CorruptError as error:
                    refused.append(error.details["object"])
                else:
                    assert bytes(read.frames[12:]) == entries[entry_id]
            world.bucket.objects[KEY] = (info, whole)
        assert refused == [KEY] * 32 * (first_block.last_entry_id + 1) ** 2

    run_virtual(main())


def test_the_lengths_of_a_block_are_walked_once_for_all_who_read_it():
    async def main():
        world = World()
        entries = [bytes([65 + number]) * 12 for number in range(24)]
        copy = await copied(world, entries)
        driver = driver_of(world)
        tier2 = await driver.read_offloaded(LEDGER, UUID_1, copy=copy)
        block = tier2.index.block_of(EntryId(0))
        async with asyncio.TaskGroup() as group:
            for entry_id in range(block.last_entry_id + 1):
                group.create_task(tier2.read_frames(EntryId(entry_id), 1))
        assert driver.ranges.bytes_fetched <= block.length + 2 * SMALL_RANGES.range_bytes
        before = driver.ranges.fetches
        driver.ranges.forget(KEY)
        await tier2.read_frames(EntryId(0), 1)
        assert driver.ranges.fetches - before == 1
        # What turned out damaged is walked again.
        tier2._forget()
        await tier2.read_frames(EntryId(0), 1)
        assert driver.ranges.fetches - before > 2

    run_virtual(main())


def test_all_who_waited_for_a_walk_are_told_how_it_ended():
    async def main():
        world = World()
        entries = [bytes([65 + number]) * 12 for number in range(24)]
        copy = await copied(world, entries)
        driver = driver_of(world)
        tier2 = await driver.read_offloaded(LEDGER, UUID_1, copy=copy)
        block = tier2.index.block_of(EntryId(0))
        _, whole = world.bucket.objects[KEY]
        at = block.offset + 20 + 16 * block.last_entry_id + 3
        spoilt(world, at, bytes([whole[at] ^ 1]))

        async def read(entry_id: EntryId) -> None:
            with pytest.raises(CorruptError):
                await tier2.read_frames(entry_id, 1)

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(read(EntryId(0)))
        assert driver.ranges.bytes_fetched <= block.length + 2 * SMALL_RANGES.range_bytes
        # Who comes later looks again.
        spoilt(world, at, whole[at : at + 1])
        assert await entries_of(tier2) == entries
        assert not tier2._walks

    run_virtual(main())


def test_a_walk_whose_reader_goes_is_done_by_the_next_one():
    async def main():
        world = World()
        entries = [bytes([65 + number]) * 12 for number in range(24)]
        copy = await copied(world, entries)
        slow = no_faults()
        slow.rates_by_prefix = {"": FaultRates(delay_s_max=1)}
        tier2 = await driver_of(world, slow).read_offloaded(LEDGER, UUID_1, copy=copy)
        first = asyncio.create_task(tier2.read_frames(EntryId(0), 1))
        await asyncio.sleep(0.01)
        others = [asyncio.create_task(tier2.read_frames(EntryId(1), 1)) for _ in range(3)]
        await asyncio.sleep(0.01)
        first.cancel()
        for one in others:
            assert (await one).first_entry_id == 1
        assert not tier2._walks

    run_virtual(main())


def test_a_walk_that_ends_with_its_block_and_lacks_entries_is_corrupt():
    async def main():
        world = World()
        entries = [bytes([65 + number]) * 12 for number in range(8)]
        copy = await copied(world, entries)
        tier2 = await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)
        block = tier2.index.block_of(EntryId(7))
        # One bit of a length: the entry is as long as those up to the block's end together.
        at = block.offset + 20 + 3
        info, whole = world.bucket.objects[KEY]
        lengths = {one for one in (12 ^ 1 << bit for bit in range(8)) if (one + 4) % 16 == 0}
        found = set()
        for length in lengths:
            spoilt(world, at, bytes([length]))
            for entry_id in range(block.first_entry_id + 1, block.last_entry_id + 1):
                with suppress(TierlogError):
                    await tier2.read_frames(EntryId(entry_id), 40)
                try:
                    await tier2.read_frames(EntryId(entry_id), 40)
                except CorruptError as error:
                    found.add(error.message.partition(": ")[2] or error.message)
            world.bucket.objects[KEY] = (info, whole)
        assert any("missing at its block's end" in one for one in found), found
        # What was damaged on its way is read again.
        assert await entries_of(tier2) == entries

    run_virtual(main())


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.REQUEST_LOST, Outcome.REPLY_LOST])
def test_an_attempt_that_fails_anywhere_leaves_nothing_that_a_deletion_does_not_take(
    outcome: Outcome,
):
    async def main():
        entries = ENTRIES[:8]
        for broken in range(30):
            world, faults = World(), no_faults()
            for _ in range(broken):
                faults.next("", Outcome.ANSWERED)
            faults.next("", outcome)
            faults.calls = []
            handle = ListHandle(LEDGER, entries, metadata_of(entries, block_size=BLOCK))
            try:
                copy = await driver_of(world, faults).offload(handle, UUID_1, {})
            except RetryableError:
                await driver_of(world).delete_offloaded(LEDGER, UUID_1)
                assert (world.bucket.objects, world.bucket.uploads) == ({}, {})
            else:
                await driver_of(world, read_back=ReadBack.FULL).verify(LEDGER, UUID_1, None, copy)
                if len(faults.calls) <= broken:
                    return
        raise AssertionError("more requests than a ledger of so few blocks takes")

    run_virtual(main())


def test_another_ledgers_index_is_not_taken_for_this_one():
    async def main():
        world = World()
        copy = await copied(world, ENTRIES)
        other = World()
        await copied(other, ENTRIES[:-1])
        info, raw = other.bucket.objects[KEY]
        await world.bucket.connect().put(KEY, raw, metadata=info.metadata)
        with pytest.raises(TierlogError):
            await driver_of(world).read_offloaded(LEDGER, UUID_1, copy=copy)

    run_virtual(main())
