"""An entry that is longer than was asked for is not fetched before there is room for it."""

import asyncio
from typing import Any

import pytest

from tests.unit.offload.side_kit import copied, data_of, put_data
from tests.unit.offload.test_single import driver_of
from tests.unit.offload.world import World
from tests.unit.reader.test_tail import tails_of
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId
from tierlog.offload.ranges import Ranges
from tierlog.offload.tier2_reader import EntryTooLongError
from tierlog_reader.pages import read_page
from tierlog_reader.served import ROOM_BYTES_MIN, ServedReads
from tierlog_reader.shares import Shares
from tierlog_reader.tail import TailMemory

LONG = 400_000
FRAME = LONG + 12
LAYOUTS = [ReaderWorld.offloader, driver_of]
SMALL = b"a" * 100


async def offloaded(offloader, *entries):
    world = ReaderWorld(block_size=1024 * 1024)
    await world.start()
    ledger = await world.sealed(list(entries))
    await world.offloaded(ledger, offloader(world))
    await world.gone_locally(ledger)
    return world, ledger


@pytest.fixture
def asked(monkeypatch):
    """What is asked of objects: how long each buffer is, and what is being put together."""
    lengths: list[int] = []
    going: list[int] = []
    read = Ranges.read

    async def noting(self, source, start, end, *, exact=False):
        lengths.append(end - start)
        going.append(end - start)
        try:
            return await read(self, source, start, end, exact=exact)
        finally:
            going.remove(end - start)

    monkeypatch.setattr(Ranges, "read", noting)
    return lengths, going


@pytest.mark.parametrize("offloader", LAYOUTS)
def test_no_more_is_read_at_once_than_there_is_room_for(offloader, asked):
    lengths, going = asked

    @on_virtual_time
    async def test():
        world, ledger = await offloaded(offloader, SMALL, bytes(LONG), SMALL)
        shares = Shares(5 * FRAME, wait_s_max=60)  # two of them at once
        async with world.reader() as source:
            served = ServedReads(source, shares)
            beyond = []
            whole = Ranges.read

            async def noting(self, *place, **how):
                start, end = place[1:]
                beyond.append(sum(going) + end - start - shares.used_bytes)
                return await whole(self, *place, **how)

            async def one(number: int) -> None:
                answer, room = await served.read(
                    f"client {number}", STREAM, at(ledger, 1), budget(entries=1, size=1000)
                )
                assert payloads(answer) == [bytes(LONG)]
                await asyncio.sleep(1)
                room.leave()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Ranges, "read", noting)
                lengths.clear()
                await asyncio.gather(*(one(number) for number in range(8)))
            assert max(beyond) <= 0
            assert sum(length >= LONG for length in lengths) == 8, "and each reads it once"
        assert shares.used_bytes == 0

    test()


@pytest.mark.parametrize("offloader", LAYOUTS)
def test_what_fits_the_room_is_read_as_without_one(offloader, asked):
    lengths, _ = asked

    @on_virtual_time
    async def test():
        known = []
        for room in (False, True):
            world, ledger = await offloaded(offloader, SMALL, bytes(ROOM_BYTES_MIN - 12), SMALL)
            async with world.reader() as source:
                reads: Any = ServedReads(source, Shares(10**7, wait_s_max=5)) if room else source
                lengths.clear()
                for number in range(3):
                    who = (f"c{number}",) if room else ()
                    await reads.read(*who, STREAM, at(ledger, number), budget(entries=1, size=1))
                known.append(list(lengths))
        assert known[0] == known[1]

    test()


@pytest.mark.parametrize("offloader", LAYOUTS)
def test_a_page_fetches_no_entry_that_it_has_no_bytes_left_for(offloader, asked):
    lengths, _ = asked

    @on_virtual_time
    async def test():
        world, ledger = await offloaded(offloader, SMALL, bytes(LONG), SMALL)
        async with world.reader() as source:
            lengths.clear()
            page = await read_page(source, STREAM, at(ledger, 0), budget(size=1000))
            assert [one.position for one in page.entries] == [at(ledger, 0)]
            assert (page.resume, page.at_end) == (at(ledger, 1), False)
            assert max(lengths) <= 1000

    test()


@on_virtual_time
async def test_nor_is_it_copied_from_the_tail(monkeypatch):
    shares = Shares(10**7, wait_s_max=5)
    lengths, beyond = [], []
    copied_of = TailMemory._copied

    def noting(self, held, offset, length_max):
        lengths.append(length_max)
        beyond.append(length_max - shares.used_bytes)
        return copied_of(self, held, offset, length_max)

    world = ReaderWorld()
    await world.start()
    ledger = await world.opened([SMALL])
    async with world.reader(tails=tails_of()) as source, asyncio.TaskGroup() as group:
        served = ServedReads(source, shares)
        following = group.create_task(source.read(STREAM, at(ledger, 1), budget(wait_s=60)))
        await asyncio.sleep(1)
        await world.write(ledger, [bytes(LONG)], first=1)
        await following
        monkeypatch.setattr(TailMemory, "_copied", noting)
        answer, room = await served.read("c", STREAM, at(ledger, 1), budget(entries=1, size=1000))
        assert payloads(answer) == [bytes(LONG)]
        room.leave()
    assert max(lengths) == FRAME, "it came from memory"
    assert max(beyond) <= 0


@on_virtual_time
async def test_beside_damage_its_header_alone_is_read_first(asked):
    lengths, _ = asked
    world = World()
    entries = [SMALL, bytes(LONG), SMALL]
    handle, *_ = await copied(world, entries, grain_len=1024, block_size=1024 * 1024)
    raw = data_of(world)
    put_data(world, raw[:5000] + b"x" + raw[5001:])
    lengths.clear()
    with pytest.raises(EntryTooLongError) as told:
        await handle.read_frames(EntryId(1), 10_000, entries_max=1, alone_max=10_000)
    assert (told.value.entry_id, told.value.frame_len) == (1, FRAME)
    assert max(lengths) <= 10_000
    with pytest.raises(CorruptError):
        await handle.read_frames(EntryId(1), FRAME, entries_max=1, alone_max=FRAME)
    read = await handle.read_frames(EntryId(0), 10_000, entries_max=1, alone_max=10_000)
    assert bytes(read.frames[12:112]) == SMALL
