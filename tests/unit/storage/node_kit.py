"""What the storage node's tests share: small runs, a node over a memory disk, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import asynccontextmanager

from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.model.errors import TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.files import DiskFailedError
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.node import StorageNode

SMALL = StorageSettings(
    journal_segment_bytes=64 * 1024,
    group_bytes_max=16 * 1024,
    write_buffer_bytes_max=32 * 1024,
    ledger_cache_bytes_max=16 * 4096,
    entry_log_bytes_max=128 * 1024,
    read_ahead_bytes_max=16 * 1024,
    open_files_max=4,
    free_bytes_min=0,
    free_bytes_resume=0,
    checkpoint_interval_s=30,
    read_bytes=4096,
)


def virtual(test):
    """Run a test on virtual time; pytest sees no coroutine."""

    def run():
        run_virtual(test(), until_s=200_000)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def new_disk(**how) -> MemoryDisk:
    return MemoryDisk(random.Random(1), **how)


def make_run(
    ledger_id: int, first: int, *, count: int = 1, size: int = 50, lac: int | None = None
) -> Run:
    rng = random.Random(f"{ledger_id}/{first}/{size}")
    entries = [rng.randbytes(size) for _ in range(count)]
    frames, offsets = pack_entries(entries, first)
    return build_run(
        frames,
        offsets,
        ledger_id=ledger_id,
        first_entry_id=first,
        last_add_confirmed=first - 1 if lac is None else lac,
        owner_epoch=1,
    )


async def open_node(files, settings: StorageSettings = SMALL, *, seed: int = 1, **how):
    ids = SeededIds(random.Random(seed))
    return await StorageNode.open(files, ids, settings, clock=SimClock(), **how)


@asynccontextmanager
async def running(node: StorageNode):
    """Run a node, and stop it in order."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.run(stop))
        await asyncio.sleep(0)
        try:
            yield node
        finally:
            stop.set()


@asynccontextmanager
async def opened(disk: MemoryDisk, settings: StorageSettings = SMALL, *, seed: int = 1):
    node = await open_node(disk.mount(), settings, seed=seed)
    async with running(node):
        yield node


class CrashingNode:
    """A node whose process crashes at a step of its disk."""

    def __init__(self, disk: MemoryDisk, seed: int, settings: StorageSettings = SMALL) -> None:
        self.disk = disk
        self.faults = Faults(random.Random(seed))
        self.crashed = asyncio.Event()
        self.faults.on_crash = self.crashed.set
        self._seed = seed
        self._settings = settings

    async def live(self, work, *, power_lost: bool = True) -> None:
        """Open the node and do ``work(node)`` until the crash, or until the work is done."""
        async with asyncio.TaskGroup() as tasks:
            life = tasks.create_task(self._life(work))
            crash = tasks.create_task(self.crashed.wait())
            await asyncio.wait([life, crash], return_when=asyncio.FIRST_COMPLETED)
            self.disk.crash(power_lost=power_lost)
            life.cancel()
            crash.cancel()

    async def _life(self, work) -> None:
        try:
            await self._serve(work)
        except BaseExceptionGroup as group:
            # What a crashed process thinks after its end tells nothing.
            if not self.crashed.is_set() or group.split((TierlogError, DiskFailedError))[1]:
                raise

    async def _serve(self, work) -> None:
        files = self.disk.mount(self.faults)
        node = await open_node(files, self._settings, seed=self._seed)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run(stop))
            await asyncio.sleep(0)
            await work(node)
            await asyncio.Event().wait()


async def read_all(node: StorageNode, ledger_id: int, first: int = 0, **how) -> list[Run]:
    how = {"bytes_max": 10**8, "recovery": True, **how}
    return [
        run async for runs in node.read(LedgerId(ledger_id), EntryId(first), **how) for run in runs
    ]


async def outcome(work):
    """Return the result, or the error, of ``work``."""
    try:
        return await work
    except TierlogError as error:
        return error


async def reading_error(node: StorageNode, ledger_id: int, first: int = 0, **how) -> TierlogError:
    """Return the error of a read that must fail."""
    with contextlib.suppress(StopAsyncIteration):
        try:
            await read_all(node, ledger_id, first, **how)
        except TierlogError as error:
            return error
    raise AssertionError("the read did not fail")
