"""Levels of free space (protocols.md section 2).

"A full disk turns the node read-only … well before the journal can't be written, and it comes back
by itself"; with several directories, while none can take a new log or the journal's is low.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import SMALL, make_run, opened
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import Reason, TierlogError
from tierlog_ingest.storage.space import Level, Room, SpaceLimits, SpaceWatch, judge

LIMITS = SpaceLimits(free_bytes_min=100, free_bytes_resume=200, warn_free_share=0.1)
TOTAL = 10_000


def level(before, *free):
    return judge(before, [Room(one, TOTAL) for one in free], LIMITS)


@pytest.mark.parametrize(
    ("before", "free", "after"),
    [
        (Level.OK, (5000,), Level.OK),
        (Level.OK, (1000,), Level.OK),
        (Level.OK, (999,), Level.WARNING),
        (Level.WARNING, (1099,), Level.WARNING),
        (Level.WARNING, (1101,), Level.OK),
        (Level.WARNING, (100,), Level.WARNING),
        (Level.WARNING, (99,), Level.READ_ONLY),
        (Level.READ_ONLY, (199,), Level.READ_ONLY),
        (Level.READ_ONLY, (200,), Level.WARNING),
        (Level.READ_ONLY, (5000,), Level.OK),
        # The journal's directory is low: read-only, whatever the others have.
        (Level.OK, (99, 5000), Level.READ_ONLY),
        # Another one is low: new logs go elsewhere.
        (Level.OK, (5000, 99, 5000), Level.WARNING),
        (Level.OK, (5000, 999), Level.WARNING),
        (Level.WARNING, (5000, 1101), Level.OK),
        (Level.READ_ONLY, (5000, 0, 200), Level.WARNING),
        # No directory takes another log.
        (Level.OK, (5000, 99), Level.READ_ONLY),
        (Level.WARNING, (5000, 99, 0), Level.READ_ONLY),
        (Level.READ_ONLY, (5000, 199, 0), Level.READ_ONLY),
    ],
)
def test_levels(before, free, after):
    assert level(before, *free) is after


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.sampled_from(Level))
def test_a_level_is_not_left_where_it_was_entered(free, start):
    """Free space that wavers around a bound by less than the gap changes the level once."""
    now = start
    for one in free:
        before, now = now, level(now, one)
        assert level(now, one) is now, "judged twice, judged alike"
        if before is Level.READ_ONLY and now is not Level.READ_ONLY:
            assert one >= LIMITS.free_bytes_resume
        if now is Level.READ_ONLY and before is not Level.READ_ONLY:
            assert one < LIMITS.free_bytes_min


def test_what_is_about_to_be_taken_of_the_journals_disk_is_not_free():
    rooms = [Room(190, TOTAL), Room(5000, TOTAL)]
    limits = SpaceLimits(free_bytes_min=100, free_bytes_resume=100, warn_free_share=0)
    assert judge(Level.OK, rooms, limits, taken_bytes=90) is Level.OK
    assert judge(Level.OK, rooms, limits, taken_bytes=91) is Level.READ_ONLY
    assert judge(Level.OK, [rooms[1], rooms[0]], limits, taken_bytes=91) is Level.OK
    twice = [Room(200, TOTAL)]
    assert judge(Level.OK, twice, limits, taken_bytes=10**6) is Level.OK, "no more than is kept"


async def test_a_look_ahead_never_makes_it_writable():
    disk = MemoryDisk(random.Random(1), capacity_bytes=TOTAL)
    space = watch(disk)
    await space.look_ahead()
    assert space.level is Level.OK
    space.refused()
    await space.look_ahead()
    assert space.read_only, "what the disk refused counts more than what it says is free"
    await space.look()
    assert not space.read_only
    await fill(disk, TOTAL - 199)
    await space.look_ahead(100)
    assert space.read_only


@pytest.mark.parametrize("journal_spares_max", [0, 2])
@pytest.mark.parametrize("write_buffer_bytes_max", [32 * 1024, 10**7])
def test_a_disk_that_fills_between_two_looks_never_meets_the_journal(
    journal_spares_max, write_buffer_bytes_max
):
    """By time it does not look here: segments, spares and flushes, or the first two, let it."""
    settings = SMALL.model_copy(
        update={
            "space_check_s": 1e6,
            "free_bytes_min": 300_000,
            "free_bytes_resume": 400_000,
            "journal_spares_max": journal_spares_max,
            "write_buffer_bytes_max": write_buffer_bytes_max,
        }
    )

    async def run():
        disk = MemoryDisk(random.Random(1), capacity_bytes=2_000_000)
        async with opened(disk, settings) as node:
            refused = []
            node._space.on_refused = lambda: refused.append(disk.used_bytes)
            error = None
            for first in range(4000):
                await node.ready()
                try:
                    await node.add(make_run(1, first, size=900))
                except TierlogError as caught:
                    error = caught
                    break
            assert error is not None
            assert error.reason is Reason.READ_ONLY
            assert node.read_only, "others hear of it"
            assert refused == [], "no write met a full disk"
            assert disk.capacity_bytes - disk.used_bytes > settings.journal_segment_bytes
            await node.add(make_run(2, 0, size=900), recovery=True)

    run_virtual(run(), until_s=1000)


def test_no_share_and_no_bound_is_never_low():
    limits = SpaceLimits(free_bytes_min=0, free_bytes_resume=0, warn_free_share=0)
    assert judge(Level.OK, [Room(0, 0)], limits) is Level.OK


async def fill(disk, length):
    file = await disk.mount().open("filling", create=True)
    await file.truncate(length)


def watch(*disks, limits=LIMITS):
    return SpaceWatch([disk.mount() for disk in disks], limits)


def test_it_is_told_and_comes_back_by_itself():
    async def run():
        disk = MemoryDisk(random.Random(1), capacity_bytes=TOTAL)
        space = watch(disk)
        heard, lows = [], []
        space.on_low = lambda: lows.append(space.level)

        async def listen():
            while True:
                changed = space.changed
                heard.append(space.level)
                await changed.wait()

        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(listen()),
                tasks.create_task(space.run(interval_s=5)),
            ]
            for length in (0, 9500, 9950, 9850, 9000, 0):
                await fill(disk, length)
                await asyncio.sleep(10)
            for loop in loops:
                loop.cancel()
        assert heard == [Level.OK, Level.WARNING, Level.READ_ONLY, Level.WARNING, Level.OK]
        assert set(lows) == {Level.WARNING, Level.READ_ONLY}
        assert len(lows) == 8, "each look at a low disk asks for space"
        assert space.statistics() == {
            "space_level": 0,
            "read_only": 0,
            "directory_0_free_bytes": TOTAL,
            "directory_0_total_bytes": TOTAL,
        }

    run_virtual(run())


async def test_a_refused_write_counts_more_than_what_is_free():
    space = watch(MemoryDisk(random.Random(1), capacity_bytes=TOTAL))
    await space.look()
    changed, asked = space.changed, []
    space.on_low = lambda: asked.append(space.level)
    space.refused()
    space.refused()
    assert space.read_only
    assert changed.is_set()
    assert asked == [Level.READ_ONLY] * 2
    assert await space.look() is Level.OK


async def test_room_for_copies():
    disks = [MemoryDisk(random.Random(1), capacity_bytes=TOTAL) for _ in range(2)]
    space = watch(*disks)
    await fill(disks[0], 9000)
    await fill(disks[1], 8000)
    assert await space.copy_room() == 2000 - 100, "what keeps the node writable stays free"
    await fill(disks[0], 9950)
    await fill(disks[1], 9970)
    assert await space.look() is Level.READ_ONLY
    assert await space.copy_room() == 50 - 12
    await fill(disks[0], TOTAL)
    await fill(disks[1], TOTAL)
    assert await space.copy_room() == 0
