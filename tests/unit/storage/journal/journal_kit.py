"""What the journal's tests share: a journal over a memory disk, and what a restart finds."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.model.errors import TierlogError
from tierlog.ports.files import DiskFailedError
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.journal.format import JournalPosition, Kind
from tierlog_ingest.storage.journal.journal import Journal
from tierlog_ingest.storage.journal.replay import cut_tail, records, scan_journal

SMALL = StorageSettings(
    journal_segment_bytes=32 * 1024,
    group_bytes_max=8 * 1024,
    free_bytes_min=0,
    free_bytes_resume=0,
)


def make_journal(files, *, seed=1, settings=SMALL):
    return Journal(files, SeededIds(random.Random(seed)), SimClock(), settings)


@asynccontextmanager
async def running(journal: Journal):
    """Keep a journal's writer going, and stop it in order."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(journal.run())
        try:
            yield journal
        finally:
            journal.stop()


@asynccontextmanager
async def started(disk: MemoryDisk, *, seed=1, settings=SMALL, segment_id=1):
    journal = make_journal(disk.mount(), seed=seed, settings=settings)
    await journal.start(segment_id, synced=JournalPosition(0, 0))
    async with running(journal):
        yield journal


async def found(files, mark=None):
    """Return the payloads that a restart finds, and the replay."""
    replay = await scan_journal(files, mark)
    payloads = [bytes(record.payload) async for record in records(replay)]
    return payloads, replay


async def restarted(files, *, mark=None, seed=2, settings=SMALL):
    """Replay, cut and begin again; return what was found, and the journal, not yet running."""
    payloads, replay = await found(files, mark)
    await cut_tail(replay)
    journal = make_journal(files, seed=seed, settings=settings)
    await journal.start(replay.next_segment_id, synced=replay.end)
    return payloads, replay, journal


def copy_of(disk: MemoryDisk, **changed: bytes) -> MemoryDisk:
    """Return a disk with the same durable files, but for some."""
    copy = MemoryDisk(random.Random(2))
    for path in disk.paths():
        copy.make_directory(path.rpartition("/")[0])
        copy.write_whole(path, changed.get(path, disk.read_whole(path)))
    return copy


async def crashing(disk, seed, work, *, crash_after=None, power_lost=True):
    """Run ``work(files)`` as a process until it ends or crashes; then the disk crashes."""
    faults = Faults(random.Random(seed))
    crashed = asyncio.Event()
    faults.on_crash = crashed.set
    if crash_after is not None:
        faults.crash_after(crash_after)

    async def life():
        try:
            await work(disk.mount(faults))
        except BaseExceptionGroup as group:
            if not crashed.is_set() or group.split((TierlogError, DiskFailedError))[1]:
                raise

    async with asyncio.TaskGroup() as tasks:
        living = tasks.create_task(life())
        crash = tasks.create_task(crashed.wait())
        await asyncio.wait([living, crash], return_when=asyncio.FIRST_COMPLETED)
        disk.crash(power_lost=power_lost)
        living.cancel()
        crash.cancel()


async def add_all(journal, payloads):
    """Append, wait for all, and return the answers."""
    answers = [journal.append(Kind.RUN, [one]) for one in payloads]
    for answer in answers:
        await answer.done
    return answers
