"""Entry logs over crashes: what ``state`` lists is there, whatever else a crash left or took.

"Entry logs are cut to the length that ``state`` names, unlisted ones are removed" (ADR-0014).
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.unit.storage.log_kit import (
    RUN_LEN,
    RUNS,
    State,
    all_runs,
    make_logs,
    opened_logs,
    read_run,
)
from tierlog.adapters.memory.faults import Faults
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.format.run import Run
from tierlog.model.errors import RetryableError, TierlogError
from tierlog.ports.files import DiskFailedError
from tierlog_ingest.storage.entrylog.entry_log import Location


class Life:
    """A process that writes logs, notes what its state would list durably, and crashes."""

    def __init__(self, disks, state):
        self.disks = disks
        self.state = state
        self.listed: list[tuple[Run, Location]] = []
        """Runs with their places, as of ``state``."""
        self.appended: list[tuple[Run, Location]] = []

    async def work(self, *folders):
        logs = make_logs(*folders, log_bytes_max=1000)
        assert await logs.open(*self.state) == []
        await self._note(logs)
        for start in range(0, 15, 5):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._append(logs, RUNS[start : start + 5], "flush"))
                tasks.create_task(self._append(logs, RUNS[start + 20 : start + 22], "compaction"))
            await logs.seal("compaction")
            await self._note(logs)
        first = logs.logs()[0].log_id
        logs.retire(first)
        self.listed = [one for one in self.listed if one[1].log_id != first]
        self.appended = [one for one in self.appended if one[1].log_id != first]
        await self._note(logs)
        await logs.remove(first)
        await self._append(logs, RUNS[40:42], "flush")
        await self._note(logs)

    async def _append(self, logs, runs, writer):
        places = await logs.append(runs, writer=writer)
        self.appended += zip(runs, places, strict=True)

    async def _note(self, logs):
        appended = list(self.appended)
        await logs.sync()
        self.state, self.listed = State.of(logs, len(self.disks)), appended

    async def check(self):
        logs, damages = await opened_logs(self.state, *(disk.mount() for disk in self.disks))
        assert damages == []
        for run, place in self.listed:
            assert await read_run(logs, place) == run
        assert logs.damaged_logs == {}
        found = await all_runs(logs)
        assert sorted(map(repr, found)) == sorted(repr(run) for run, _ in self.listed)
        assert logs.damaged_logs == {}
        live = {info.log_id: info.live_bytes for info in logs.logs()}
        assert sum(live.values()) == len(found) * RUN_LEN
        lengths = {one.log_id: one for lengths in self.state.lengths for one in lengths}
        await logs.sync()
        for at in range(len(self.disks)):
            for one in logs.lengths(at):
                assert one == lengths[one.log_id]._replace(sealed=True)
        names = [path for disk in self.disks for path in disk.paths()]
        assert len(names) == len(lengths), "nothing is left behind"
        await logs.close()


async def live(life, *, crash_after, seed, power_lost):
    """Return whether the work was done before the crash."""
    faults = Faults(random.Random(seed))
    crashed = asyncio.Event()
    faults.on_crash = crashed.set
    faults.crash_after(crash_after)
    work = asyncio.create_task(life.work(*(disk.mount(faults) for disk in life.disks)))
    crash = asyncio.create_task(crashed.wait())
    await asyncio.wait([work, crash], return_when=asyncio.FIRST_COMPLETED)
    done = work.done()
    for disk in life.disks:
        disk.crash(power_lost=power_lost)
    for task in (work, crash):
        task.cancel()
    await asyncio.wait([work, crash])
    if done:
        work.result()
    else:
        assert work.cancelled() or isinstance(
            work.exception(), (TierlogError, DiskFailedError, BaseExceptionGroup)
        )
    return done


@pytest.mark.covers("D37", "D38")
@pytest.mark.parametrize("power_lost", [True, False])
@pytest.mark.parametrize("directories", [1, 2])
async def test_a_crash_at_each_step(directories, power_lost):
    step, done = 0, False
    while not done:
        step += 1
        disks = [MemoryDisk(random.Random(step * 31 + at)) for at in range(directories)]
        life = Life(disks, State([[] for _ in disks], {}))
        done = await live(life, crash_after=step, seed=step, power_lost=power_lost)
        await life.check()
    assert step > 80


async def test_crashes_of_the_start():
    """Cutting and sealing what a crash left is itself cut short, again and again."""
    disk = MemoryDisk(random.Random(5))
    life = Life([disk], State([[]], {}))
    await live(life, crash_after=70, seed=1, power_lost=True)
    assert life.listed
    step, done = 0, False
    while not done:
        step += 1
        again = Start([disk], life.state)
        done = await live(again, crash_after=step, seed=step, power_lost=True)
        logs, damages = await opened_logs(life.state, disk.mount())
        assert damages == []
        for run, place in life.listed:
            assert await read_run(logs, place) == run
        disk.crash()
    assert step > 10
    await life.check()


class Start(Life):
    async def work(self, *folders):
        logs = make_logs(*folders)
        assert await logs.open(*self.state) == []
        await logs.sync()


async def test_a_full_disk_at_any_size():
    """Whatever the disk takes: what was appended is there, and what was refused left nothing."""
    for capacity in range(0, 9000, 90):
        disk = MemoryDisk(random.Random(capacity), capacity_bytes=capacity)
        logs = make_logs(disk.mount(), log_bytes_max=1000)
        await logs.open([[]], {})
        kept: list[tuple[Run, Location]] = []
        for at in range(0, 30, 3):
            try:
                places = await logs.append(RUNS[at : at + 3], writer="flush")
            except RetryableError:
                continue
            kept += zip(RUNS[at : at + 3], places, strict=True)
        await logs.sync()
        assert disk.used_bytes <= capacity
        state = State.of(logs)
        assert sum(one.length - 32 for one in state.lengths[0]) == len(kept) * RUN_LEN
        disk.crash()
        logs, damages = await opened_logs(state, disk.mount(), log_bytes_max=1000)
        assert damages == []
        assert await all_runs(logs) == [run for run, _ in kept]
        for run, place in kept:
            assert await read_run(logs, place) == run
        await logs.sync()
        disk.capacity_bytes = 2**40
        await logs.sync()
        assert all(one.sealed for one in logs.lengths(0)), "once there is room"
        assert len(disk.paths()) == len(logs.lengths(0))
