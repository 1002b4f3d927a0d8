"""What a restart makes of the journal's bytes (protocols.md section 2).

"A bad record below a position known to be synced is corruption. […] A bad record above it is a
torn tail and is cut." The segments here were used before, and hold groups of older lives.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.journal.journal_kit import (
    SMALL,
    add_all,
    copy_of,
    crashing,
    found,
    make_journal,
    restarted,
    running,
    started,
)
from tierlog.adapters.memory.files import SECTOR_LEN, MemoryDisk
from tierlog.model.errors import TierlogError
from tierlog_ingest.storage.journal.format import (
    ALIGNMENT,
    GroupHeader,
    JournalPosition,
    Kind,
    SegmentHeader,
)
from tierlog_ingest.storage.journal.replay import cut_tail, records, scan_journal
from tierlog_ingest.storage.journal.segments import segment_path

pytestmark = pytest.mark.covers("D37")

QUIET = SMALL.model_copy(update={"idle_marker_s": 3600.0})


def payload(number, size=1500):
    return random.Random(number).randbytes(size)


def written(*, settings=QUIET, groups=4):
    """Return a disk whose last segment is a recycled one with a few groups, the mark, the payloads.

    Behind the groups lie whole groups of the segment's older life.
    """
    disk = MemoryDisk(random.Random(1))

    async def work():
        async with started(disk, settings=settings) as journal:
            number = 0
            while journal.segment_id < 6:
                number += 1
                await add_all(journal, [payload(-number, 3000)])
                if journal.segment_id >= 3:
                    await journal.release_before(journal.segment_id - 1)
                    await asyncio.sleep(0.01)
            mark = journal.durable_position
            payloads = []
            for group in range(groups):
                members = [payload(10 * group + n) for n in range(2)]
                payloads.append(members)
                await add_all(journal, members)
            if settings is not QUIET:
                await asyncio.sleep(1)
        return mark, payloads

    mark, payloads = run_virtual(work())
    return disk, mark, payloads


def last_path(disk):
    return [path for path in disk.paths() if path.endswith(".journal")][-1]


def group_offsets(data, mark):
    """Return where groups lie from the mark on."""
    segment_id = mark.segment_id
    salt = SegmentHeader.unpack(data[:ALIGNMENT]).salt
    places = range(mark.offset, len(data), ALIGNMENT)
    found_at = [
        GroupHeader.unpack(data[at : at + 32], salt, JournalPosition(segment_id, at))
        for at in places
    ]
    return [one.position.offset for one in found_at if one is not None]


def look(disk, mark):
    return run_virtual(found(disk.mount(), mark))


def test_groups_of_an_older_life_are_there_and_are_not_found():
    disk, mark, payloads = written()
    data = disk.read_whole(last_path(disk))
    mine = group_offsets(data, mark)
    others = [at for at in range(mine[-1] + 1, len(data)) if data[at : at + 4] == b"TLJG"]
    assert others, "the rest of the segment holds groups of its older life"
    seen, replay = look(disk, mark)
    assert seen == [one for group in payloads for one in group]
    assert not replay.damages
    assert not replay.torn
    assert replay.next_segment_id == mark.segment_id + 1


def test_only_the_generation_tells_when_the_segment_id_is_the_same():
    """As if an older life of the file had had the same id, and groups at the same places."""
    disk, mark, payloads = written()
    data = bytearray(disk.read_whole(last_path(disk)))
    mine = group_offsets(data, mark)
    salt = SegmentHeader.unpack(bytes(data[:ALIGNMENT])).salt
    at = replay_end = mine[-1] + ALIGNMENT
    old = GroupHeader(records_len=0, record_count=0, position=JournalPosition(mark.segment_id, at))
    data[at : at + 32] = old.pack(salt ^ 1)
    seen, replay = look(copy_of(disk, **{last_path(disk): bytes(data)}), mark)
    assert seen == [one for group in payloads for one in group]
    assert replay.end.offset == replay_end
    assert not replay.damages
    data[at : at + 32] = old.pack(salt)
    _, replay = look(copy_of(disk, **{last_path(disk): bytes(data)}), mark)
    assert replay.end.offset == at + ALIGNMENT, "with the salt it would be a group"


def test_a_spare_never_passes_for_a_segment():
    disk, mark, payloads = written()
    spares = [path for path in disk.paths() if path.endswith(".spare")]
    assert any(disk.read_whole(one)[:4] == b"TLJS" for one in spares), "with a segment's header"
    seen, replay = look(disk, mark)
    assert len(seen) == 8
    assert len(replay.segments) == 1
    assert payloads


def test_a_tail_torn_at_any_sector_is_cut_with_its_whole_group():
    disk, mark, payloads = written()
    path = last_path(disk)
    data = disk.read_whole(path)
    offsets = group_offsets(data, mark)
    last, kept = offsets[-1], [one for group in payloads[:-1] for one in group]
    before = written(groups=3)[0].read_whole(path)
    sectors = range(last, last + ALIGNMENT, SECTOR_LEN)
    assert before[:last] == data[:last], "the same but for the last group"
    for pattern in range(2 ** len(sectors)):
        torn = bytearray(before)
        for bit, at in enumerate(sectors):
            if pattern >> bit & 1:
                torn[at : at + SECTOR_LEN] = data[at : at + SECTOR_LEN]
        copy = copy_of(disk, **{path: bytes(torn)})
        whole = torn[last : last + 3100] == data[last : last + 3100]
        seen, replay = look(copy, mark)
        assert not replay.damages
        assert seen == (kept + payloads[-1] if whole else kept)
        assert replay.end.offset == last + ALIGNMENT * whole
        header_survived = pattern & 1
        assert replay.torn is bool(header_survived and not whole)


def test_a_growing_segment_cut_at_any_byte_looks_like_a_torn_tail():
    """ "A clean cut … is the one thing that only replicas can show": of a segment that grows."""
    disk, mark, payloads = written(settings=QUIET.model_copy(update={"journal_spares_max": 0}))
    path = last_path(disk)
    data = disk.read_whole(path)
    assert SegmentHeader.unpack(data[:ALIGNMENT]).filled_len == 0
    last = group_offsets(data, mark)[-1]
    kept = [one for group in payloads[:-1] for one in group]
    for cut in [*range(last, last + 60), *range(last + 60, last + 3056, 31)]:
        seen, replay = look(copy_of(disk, **{path: data[:cut]}), mark)
        assert seen == kept
        assert not replay.damages


def test_a_filled_segment_cut_anywhere_is_found():
    disk, mark, payloads = written()
    path = last_path(disk)
    data = disk.read_whole(path)
    assert SegmentHeader.unpack(data[:ALIGNMENT]).filled_len == len(data)
    last = group_offsets(data, mark)[-1]
    every = [one for group in payloads for one in group]
    cuts = [0, 1, 51, 52, ALIGNMENT - 1, ALIGNMENT, mark.offset - 1, mark.offset]
    cuts += [*range(last - 5, last + ALIGNMENT + 5), *range(0, len(data), 1021), len(data) - 1]
    for cut in cuts:
        seen, replay = look(copy_of(disk, **{path: data[:cut]}), mark)
        assert replay.damages, cut
        assert seen == every[: len(seen)]


def test_a_flip_in_the_last_group_without_its_marker_is_taken_for_a_torn_tail():
    """The one window left, as documented."""
    disk, mark, payloads = written()
    path = last_path(disk)
    data = bytearray(disk.read_whole(path))
    data[group_offsets(data, mark)[-1] + 100] ^= 1
    seen, replay = look(copy_of(disk, **{path: bytes(data)}), mark)
    assert seen == [one for group in payloads[:-1] for one in group]
    assert not replay.damages
    assert replay.torn


def test_a_flip_below_what_is_known_to_be_synced_is_found():
    disk, mark, payloads = written(settings=SMALL)
    path = last_path(disk)
    data = disk.read_whole(path)
    offsets = group_offsets(data, mark)
    assert len(offsets) == 5, "the idle marker"
    everything = [one for group in payloads for one in group]
    places = [at for at in range(44) if at]
    for start in offsets[:-1]:
        length = 32 + int.from_bytes(data[start + 4 : start + 8], "big")
        places += [*range(start, start + 60), *range(start + 60, start + length, 37)]
    for at in places:
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        seen, replay = look(copy_of(disk, **{path: bytes(flipped)}), mark)
        assert replay.damages, at
        assert [one for one in everything if one in seen] == seen, "never other bytes"
        if at > ALIGNMENT:
            hurt = next(n for n, start in enumerate(offsets) if at < start + ALIGNMENT)
            lost = set(everything) - set(seen)
            assert lost <= set(payloads[hurt]), "what is behind is still read"


def test_zeroed_and_swapped_pages_below_what_is_known_are_found():
    disk, mark, _ = written(settings=SMALL)
    path = last_path(disk)
    data = disk.read_whole(path)
    first, *_, marker = group_offsets(data, mark)
    pages = list(range(first, marker, ALIGNMENT))
    changed = [data[:at] + bytes(ALIGNMENT) + data[at + ALIGNMENT :] for at in pages]
    for one in pages:
        for other in pages:
            if one < other:
                swapped = bytearray(data)
                swapped[one : one + ALIGNMENT] = data[other : other + ALIGNMENT]
                swapped[other : other + ALIGNMENT] = data[one : one + ALIGNMENT]
                changed.append(bytes(swapped))
    assert len(changed) > 8
    for bad in changed:
        _, replay = look(copy_of(disk, **{path: bad}), mark)
        assert replay.damages


def test_the_mark_alone_proves_what_was_durable():
    disk, mark, _ = written()
    path = last_path(disk)
    data = disk.read_whole(path)
    end = group_offsets(data, mark)[-1] + ALIGNMENT
    late = JournalPosition(mark.segment_id, end)
    for bad in (data[: end - ALIGNMENT], data[: end - 1], data[:100]):
        _, replay = look(copy_of(disk, **{path: bad}), late)
        assert replay.damages
    copy = copy_of(disk)
    run_virtual(copy.mount().remove(path))
    _, replay = look(copy, late)
    assert replay.damages
    assert replay.next_segment_id > mark.segment_id, "the lost one's id is not used again"


def test_a_missing_segment_and_a_damaged_header_are_found():
    disk = MemoryDisk(random.Random(1))

    async def work():
        async with started(disk, settings=QUIET) as journal:
            while journal.segment_id < 4:
                await add_all(journal, [payload(1, 3000)])
        return journal.segment_id

    run_virtual(work())
    assert not look(disk, None)[1].damages
    for lost in (1, 2, 3):
        copy = copy_of(disk)
        run_virtual(copy.mount().remove(segment_path(lost)))
        assert look(copy, None)[1].damages
    for hurt in (1, 2, 3, 4):
        path = segment_path(hurt)
        data = bytearray(disk.read_whole(path))
        data[20] ^= 1
        seen, replay = look(copy_of(disk, **{path: bytes(data)}), None)
        assert replay.damages
        assert seen


def test_what_was_cut_never_comes_to_light_again():
    """A torn group is cut durably; a later life neither reads it nor takes it for damage."""
    disk, mark, payloads = written()
    path = last_path(disk)
    data = disk.read_whole(path)
    last = group_offsets(data, mark)[-1]
    torn = bytearray(data)
    torn[last + 1000] ^= 1
    copy = copy_of(disk, **{path: bytes(torn)})
    kept = [one for group in payloads[:-1] for one in group]

    async def check():
        seen, replay, journal = await restarted(copy.mount(), mark=mark)
        assert seen == kept
        assert replay.torn
        assert last == replay.end.offset
        assert len(copy.read_whole(path)) == len(data), "a filled segment keeps its length"
        assert copy.read_whole(path)[last : last + ALIGNMENT] == bytes(ALIGNMENT)
        async with running(journal):
            await add_all(journal, [b"next life"])
        copy.crash()
        assert copy.read_whole(path)[last : last + ALIGNMENT] == bytes(ALIGNMENT), "durably"
        seen, replay = await found(copy.mount(), mark)
        assert seen == [*kept, b"next life"]
        assert not replay.damages
        # Even if the cut were undone, the next life's header says where it ended.
        back = copy_of(copy, **{path: bytes(torn)})
        seen, replay = await found(back.mount(), mark)
        assert seen == [*kept, b"next life"]
        assert not replay.damages

    run_virtual(check())


def several_segments():
    """Return a disk with groups in four segments and a marker behind them, and their payloads."""
    disk = MemoryDisk(random.Random(1))
    settings = SMALL.model_copy(update={"idle_marker_s": 1.0})

    async def work():
        payloads: list[bytes] = []
        async with started(disk, settings=settings) as journal:
            while journal.segment_id < 4:
                payloads.append(payload(len(payloads), 100 + 700 * (len(payloads) % 9)))
                await add_all(journal, payloads[-1:])
            await asyncio.sleep(10)
        return payloads

    return disk, run_virtual(work())


def test_the_next_header_proves_the_last_group_of_a_segment():
    disk, payloads = several_segments()
    for segment_id in (1, 2, 3):
        path = segment_path(segment_id)
        data = disk.read_whole(path)
        last = group_offsets(data, JournalPosition(segment_id, ALIGNMENT))[-1]
        for at in (last + 10, last + 50):
            flipped = bytearray(data)
            flipped[at] ^= 1
            seen, replay = look(copy_of(disk, **{path: bytes(flipped)}), None)
            assert len(replay.damages) == 1
            assert len(seen) == len(payloads) - 1


SEVERAL = several_segments()


@given(st.data())
def test_any_damage_below_what_is_known_is_found_and_costs_only_what_it_hit(data):
    """Flips, zeroed and swapped pages, in any segment: never other bytes, never a hang."""
    disk, payloads = SEVERAL
    assert len(set(payloads)) == len(payloads)
    changed = {path: bytearray(disk.read_whole(path)) for path in disk.paths() if "jour" in path}
    changed = {path: one for path, one in changed.items() if path.endswith(".journal")}
    touched = set()
    for _ in range(data.draw(st.integers(1, 4), "how many")):
        path = data.draw(st.sampled_from(sorted(changed)), "file")
        content = changed[path]
        marker = group_offsets(disk.read_whole(path), JournalPosition(int(path[8:24], 16), 4096))
        pages = st.integers(0, (marker[-1] if "4.j" in path else len(content)) // ALIGNMENT - 1)
        page = data.draw(pages, "page") * ALIGNMENT
        how = data.draw(st.sampled_from(["flip", "zero", "swap"]))
        if how == "flip":
            content[page + data.draw(st.integers(0, ALIGNMENT - 1))] ^= data.draw(
                st.integers(1, 255)
            )
        elif how == "zero":
            content[page : page + ALIGNMENT] = bytes(ALIGNMENT)
        else:
            other = data.draw(pages, "other page") * ALIGNMENT
            one, two = content[page : page + ALIGNMENT], content[other : other + ALIGNMENT]
            content[page : page + ALIGNMENT], content[other : other + ALIGNMENT] = two, one
            touched.add((path, other))
        touched.add((path, page))
    copy = copy_of(disk, **{path: bytes(one) for path, one in changed.items()})
    seen, replay = look(copy, None)
    kept = [one for one in payloads if one in set(seen)]
    assert seen == kept, "in order, each once, nothing else"
    missing = set(payloads) - set(seen)
    assert bool(replay.damages) or not missing
    headers = {path for path, page in touched if page == 0}
    for path in set(changed) - headers:
        original = disk.read_whole(path)
        for one in payloads:
            at = original.find(one)
            pages_of_it = range((at - 44) // ALIGNMENT, (at + len(one) - 1) // ALIGNMENT + 1)
            if at >= 0 and not any((path, page * ALIGNMENT) in touched for page in pages_of_it):
                assert one in seen, "what was not hit is still read"


class Model:
    """What was appended, and what was answered, over several lives."""

    def __init__(self, seed, disk):
        self.rng = random.Random(seed)
        self.disk = disk
        self.sent: list[bytes] = []
        self.stored: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.mark = None
        self.below_mark: set[bytes] = set()

    async def life(self, files):
        self.disk.capacity_bytes = 2**40
        journal = await self.reopened(files)
        before = set(self.stored)
        numbers: dict[int, bytes] = {}

        def roll_back(seq):
            for number, one in list(numbers.items()):
                if number >= seq:
                    self.refused.add(one)
                    del numbers[number]

        journal.on_rollback = roll_back
        async with running(journal), asyncio.TaskGroup() as tasks:
            for _ in range(self.rng.randint(1, 60)):
                draw = self.rng.random()
                if draw < 0.75:
                    self.append(journal, tasks, numbers)
                elif draw < 0.85:
                    await asyncio.sleep(self.rng.choice((0, 0.001, 0.1)))
                elif draw < 0.95:
                    durable = {one for n, one in numbers.items() if n <= journal.durable_seq}
                    durable |= before
                    mark = journal.durable_position
                    await asyncio.sleep(0)
                    self.mark = mark
                    self.below_mark |= durable
                    await journal.release_before(mark.segment_id)
                elif draw < 0.97:
                    self.disk.capacity_bytes = self.disk.used_bytes + self.rng.randint(0, 9000)
                else:
                    self.disk.capacity_bytes = 2**40

    def append(self, journal, tasks, numbers):
        one = self.rng.randbytes(8) + bytes(self.rng.choice((0, 10, 500, 3000, 9000)))
        appended = journal.append(Kind.RUN, [one])
        numbers[appended.seq] = one
        self.sent.append(one)

        async def wait():
            try:
                await appended.done
            except TierlogError:
                return
            self.stored.add(one)

        tasks.create_task(wait())

    async def reopened(self, files):
        replay = await scan_journal(files, self.mark)
        seen = [bytes(one.payload) async for one in records(replay)]
        self.check(seen, replay)
        await cut_tail(replay)
        journal = make_journal(files, seed=self.rng.randint(0, 2**30))
        await journal.start(replay.next_segment_id, synced=replay.end)
        return journal

    def check(self, seen, replay):
        assert replay.damages == [], "an honest disk's crash is never called corruption"
        assert len(set(seen)) == len(seen)
        order = {one: n for n, one in enumerate(self.sent)}
        assert [order[one] for one in seen] == sorted(order[one] for one in seen)
        assert not (self.refused | self.below_mark) & set(seen)
        assert self.stored <= set(seen) | self.below_mark
        # What was seen may have been acted upon: it must stay; what was not must not appear.
        self.stored |= set(seen)
        self.refused |= set(self.sent) - set(seen) - self.below_mark


def lives(seed):
    async def run():
        disk = MemoryDisk(random.Random(seed))
        model = Model(seed, disk)
        for life in range(5):
            steps = model.rng.randint(1, 150) if model.rng.random() < 0.9 else None
            power_lost = model.rng.random() < 0.7
            await crashing(disk, life, model.life, crash_after=steps, power_lost=power_lost)
        disk.capacity_bytes = 2**40
        await model.reopened(disk.mount())

    run_virtual(run())


@pytest.mark.parametrize("hundred", range(4))
def test_lives_that_end_in_crashes(hundred):
    for seed in range(hundred * 100, hundred * 100 + 100):
        try:
            lives(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
