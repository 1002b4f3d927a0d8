"""Power cuts at every operation of the journal alone: segments, spares, recycling, the mark.

The same search as for the whole node, on a workload that the journal makes by itself, so that many
more of its states are seen. What counts: every record behind the durable mark that was answered is
replayed, in order, once; nothing else is, except the next ones in order; nothing is called damaged.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Any

import pytest
import structlog

from tests.crash_states.model import State, cuts
from tests.crash_states.ram import RamFiles
from tests.crash_states.recorder import Mark, Recording, recorded_ram
from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.ids import SeededIds
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.journal.format import JournalPosition, Kind
from tierlog_ingest.storage.journal.journal import Journal
from tierlog_ingest.storage.journal.replay import cut_tail, records, scan_journal

pytestmark = pytest.mark.covers("D22", "D35", "D37")

SETTINGS = StorageSettings(
    journal_segment_bytes=16 * 1024, journal_spares_max=2, group_bytes_max=6000, free_bytes_min=0
)
MARK = Struct(">qqq")
"""A position, and the highest record before it."""
NUMBER = Struct(">q")
STATES_PER_CUT = 40
SECOND_LIVES = 8


@dataclass
class Known:
    """What was asked, answered, and passed by a durable mark, until some moment."""

    asked: dict[int, bytes] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)
    marked: int = -1
    seen: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def follow(self, operations):
        for one in operations:
            if isinstance(one, Mark):
                self._take(one.what, one.subject)

    def _take(self, what, subject):
        if what == "asked":
            self.asked[subject[0]] = subject[1]
        elif what == "marked":
            self.marked = max(self.marked, subject)
        else:
            getattr(self, what).add(subject)

    def copy(self):
        return Known(
            dict(self.asked), set(self.stored), self.marked, set(self.seen), set(self.gone)
        )

    def check(self, found, damages):
        assert damages == []
        numbers = [number for number, _ in found]
        assert numbers == sorted(set(numbers)), "each once, and in order"
        for number, payload in found:
            assert self.asked[number] == payload
        assert not set(numbers) & self.gone, "what was cut is back"
        wanted = {one for one in self.stored | self.seen if one > self.marked}
        assert wanted <= set(numbers), f"lost {sorted(wanted - set(numbers))}"
        possible = [one for one in self.asked if one not in self.gone and one > self.marked]
        assert [one for one in numbers if one > self.marked] == possible[
            : sum(one > self.marked for one in numbers)
        ]


async def recover(files):
    """Replay, cut, and start a journal; return it with what was found."""
    data = b""
    if await files.exists("mark"):
        file = await files.open("mark")
        data = await file.read(0, MARK.size)
        await file.close()
    *position, passed = MARK.unpack(data) if data else (1, 0, -1)
    mark = JournalPosition(*position) if data else None
    replay = await scan_journal(files, mark)
    found = []
    async for one in records(replay):
        body = bytes(one.payload)
        found.append((NUMBER.unpack_from(body)[0], body))
    await cut_tail(replay)
    journal = Journal(files, SeededIds(random.Random(len(found))), SimClock(), SETTINGS)
    await journal.start(replay.next_segment_id, synced=replay.end)
    return journal, found, replay.damages, passed


async def write_mark(files, position, passed):
    file = await files.open("mark.new", create=True)
    await file.truncate(0)
    await file.write_and_sync(0, [MARK.pack(*position, passed)])
    await file.close()
    await files.rename("mark.new", "mark")
    await files.sync_directory("")


async def live(recording, rng, *, steps, first):
    (files,) = recorded_ram(recording, ["d"])
    journal, found, _, _ = await recover(files)
    for number, _ in found:
        recording.mark("seen", number)
    number = first
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(journal.run())
        done = None
        for _ in range(steps):
            for _ in range(rng.randint(1, 3)):
                body = NUMBER.pack(number) + rng.randbytes(rng.choice((0, 20, 900, 3000)))
                recording.mark("asked", (number, body))
                done = journal.append(Kind.RUN, [body]).done
                done.add_done_callback(lambda _, one=number: recording.mark("stored", one))
                number += 1
            if rng.random() < 0.3:
                assert done is not None
                await done
                position, passed = journal.durable_position, number - 1
                await write_mark(files, position, passed)
                recording.mark("marked", passed)
                await journal.release_before(position.segment_id)
            await asyncio.sleep(rng.choice((0, 0.0005, 0.1)))
        journal.stop()


def record(rng, base, directories, *, steps, first):
    recording = Recording(base, directories)
    run_virtual(live(recording, rng, steps=steps, first=first), until_s=1000)
    return recording


def look_at(state: State):
    async def look():
        files = RamFiles(dict(state.files), root="d")
        files.directories.update(state.directories)
        return (await recover(files))[1:]

    with structlog.testing.capture_logs():
        return run_virtual(look(), until_s=1000)


def search(recording, before, rng, seen, *, wanted):
    """Check every cut; return a few states to go on from."""
    places = sum(1 for _ in cuts(recording))
    chosen_at = set(rng.sample(range(places), min(places, wanted)))
    chosen = []
    for number, (cut, model) in enumerate(cuts(recording)):
        known = before.copy()
        known.follow(recording.operations[: cut.last])
        for state in model.states(rng, states_max=STATES_PER_CUT):
            if state.digest not in seen:
                seen[state.digest] = look_at(state)
            found, damages, passed = seen[state.digest]
            assert passed >= known.marked, "a mark went back"
            durable = replace(known, marked=passed)
            durable.check(found, damages)
            if number in chosen_at:
                chosen_at.discard(number)
                chosen.append((state, durable.copy(), {one for one, _ in found}))
    return chosen


@pytest.mark.parametrize("seed", range(6))
def test_no_power_cut_loses_a_record(seed):
    rng = random.Random(seed)
    seen: dict[bytes, Any] = {}
    recording = record(rng, {}, frozenset(), steps=12, first=0)
    chosen = search(recording, Known(), rng, seen, wanted=SECOND_LIVES)
    for state, known, found in chosen:
        known.gone |= {one for one in known.asked if one not in found and one > known.marked}
        first = max(known.asked, default=-1) + 1
        following = record(rng, state.files, state.directories, steps=4, first=first)
        search(following, known, rng, seen, wanted=0)
    assert len(seen) > 500
