"""What the storage node's benchmarks share: a node in this process, and what its disk was asked.

``running_node`` is the one place that knows how a node is opened and run. ``CountingFiles`` stands
between the node and the real disk and writes down groups of the journal and reads.

Invariants:
    * Counting changes nothing of what the disk is asked, and asks it nothing itself.
    * Runs are made before the clock starts, as they come to a node from elsewhere.
"""

import asyncio
import contextlib
import gc
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from common import POOL_BYTES, due_times, note_latency, random_pool
from tierlog.adapters.files import DiskFiles
from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.files import Buffer, File
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.interpreter import set_up_interpreter
from tierlog_ingest.storage.node import StorageNode

JOURNAL_PREFIX: Final = "journal/"
EVERYTHING: Final = 2**62
GROUP_MAGIC: Final = b"TLJG"
POLITE_BYTES: Final = 8192
"""Who adds more at once asks each time whether there is room."""


@dataclass(slots=True)
class DiskCounts:
    """What was asked of the disk since ``clear``."""

    groups: list[tuple[float, int]] = field(default_factory=list)
    """When each group of the journal was begun, and its bytes."""
    group_ms: list[float] = field(default_factory=list)
    reads: int = 0
    read_bytes: int = 0
    other_write_bytes: int = 0

    def clear(self) -> None:
        """Begin anew."""
        self.groups.clear()
        self.group_ms.clear()
        self.reads = self.read_bytes = self.other_write_bytes = 0


class CountingFiles(DiskFiles):
    """The real disk, and what was asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.counts = DiskCounts()

    async def open(  # type: ignore[override]
        self, path: str, *, create: bool = False, direct: bool = False
    ) -> "CountingFile":
        file = await super().open(path, create=create, direct=direct)
        return CountingFile(file, path, self.counts)


class CountingFile:
    """One open file."""

    def __init__(self, file: File, path: str, counts: DiskCounts) -> None:
        self._file = file
        self._journal = path.startswith(JOURNAL_PREFIX)
        self._counts = counts
        self.truncate = file.truncate
        self.size = file.size
        self.sync = file.sync
        self.close = file.close

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if not self._journal:  # zeros for a segment are no bytes of anybody
            self._counts.other_write_bytes += sum(map(len, buffers))
        await self._file.write(offset, buffers)

    async def write_and_sync(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if not self._journal or bytes(buffers[0][: len(GROUP_MAGIC)]) != GROUP_MAGIC:
            await self._file.write_and_sync(offset, buffers)
            return
        started_s = time.perf_counter()
        self._counts.groups.append((started_s, sum(map(len, buffers))))
        await self._file.write_and_sync(offset, buffers)
        self._counts.group_ms.append((time.perf_counter() - started_s) * 1000)

    async def read(self, offset: int, length: int) -> Buffer:
        data = await self._file.read(offset, length)
        self._counts.reads += 1
        self._counts.read_bytes += len(data)
        return data


@contextlib.asynccontextmanager
async def running_node(
    files: DiskFiles, settings: StorageSettings
) -> AsyncIterator[tuple[StorageNode, asyncio.Event]]:
    """Open a node, run it, and stop it in order: then everything is in its place, durably.

    Setting the event stops it before.
    """
    set_up_interpreter()
    node = await StorageNode.open(files, SystemIds(), settings, clock=SystemClock())
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(node.run(stop))
        await asyncio.sleep(0)
        try:
            yield node, stop
        finally:
            stop.set()
            await running


async def read_bytes_of(node: StorageNode, ledger_id: int) -> int:
    """Read a whole ledger; return the payload bytes of it."""
    found = 0
    runs = node.read(LedgerId(ledger_id), EntryId(0), bytes_max=EVERYTHING, recovery=False)
    async for got in runs:
        for run in got if isinstance(got, list) else [got]:
            found += run.payload_len
    return found


async def read_entry(node: StorageNode, ledger_id: int, entry_id: int) -> int:
    """Read one entry; return its length."""
    wanted = EntryId(entry_id)
    async for got in node.read(LedgerId(ledger_id), wanted, last_entry_id=wanted, bytes_max=1):
        for run in got if isinstance(got, list) else [got]:
            return len(run.entry(entry_id))
    raise AssertionError("nothing was read")


class RunMaker:
    """Runs of one ledger after another, of random bytes."""

    def __init__(self, *, pool_bytes: int = POOL_BYTES) -> None:
        self._pool = memoryview(random_pool(pool_bytes))
        self._at = 0

    def runs(self, ledger_id: int, *, entry_size: int, entries: int, count: int = 1) -> list[Run]:
        """Return a ledger's ``entries``, ``count`` of them in a run."""
        made = []
        for first in range(0, entries, count):
            few = min(count, entries - first)
            frames, offsets = pack_entries([self._bytes(entry_size) for _ in range(few)], first)
            made.append(
                build_run(
                    frames,
                    offsets,
                    ledger_id=ledger_id,
                    first_entry_id=first,
                    # everything up to the entry may be read: nobody else writes
                    last_add_confirmed=first + few - 1,
                    owner_epoch=1,
                )
            )
        return made

    def _bytes(self, size: int) -> memoryview:
        if self._at + size > len(self._pool):
            self._at = (self._at * 7919 + 1) % (len(self._pool) - size)
        self._at += size
        return self._pool[self._at - size : self._at]


async def add_all(node: StorageNode, runs: Sequence[Run], latencies: list[float]) -> None:
    """Add one after the other, each once the one before is answered."""
    await add_side_by_side(node, [runs], latencies)


async def add_side_by_side(
    node: StorageNode, work: Sequence[Sequence[Run]], latencies: list[float]
) -> None:
    """Do so for several producers at once.

    Answers are taken as the wire takes them, by a callback each: a task for each producer would
    cost as much as the node does.
    """
    left, answered = [iter(runs) for runs in work], asyncio.Event()
    idle, busy = deque(left), 0
    trouble: list[BaseException] = []

    def note(runs: Iterator[Run], started_s: float, answer: "asyncio.Future[None]") -> None:
        nonlocal busy
        busy -= 1
        latencies.append(time.perf_counter() - started_s)
        error = answer.exception()
        if error is None:
            idle.append(runs)
        else:
            trouble.append(error)
        answered.set()

    while idle or busy:
        await node.ready()
        while idle and not trouble:
            runs = idle.popleft()
            run = next(runs, None)
            if run is not None:
                busy += 1
                node.add(run).add_done_callback(partial(note, runs, time.perf_counter()))
                if len(run.encoded) > POLITE_BYTES:
                    await node.ready()
        if trouble:
            raise trouble[0]
        if busy:
            await answered.wait()
            answered.clear()


async def add_paced(
    node: StorageNode,
    runs: Sequence[Run],
    latencies: list[float],
    *,
    begin_s: float,
    interval_s: float,
) -> None:
    """Add one every so often, answered or not; each counts from the time when it was due."""
    answers = []
    left = iter(runs)
    async for started_s in due_times(begin_s, interval_s, len(runs)):
        await node.ready()
        answer = node.add(next(left))
        answer.add_done_callback(partial(note_latency, latencies, started_s))
        answers.append(answer)
    for answer in answers:
        await answer


def settle_memory() -> None:
    """Keep the collector of garbage away from what was made for the benchmark."""
    gc.collect()
    gc.freeze()


def drop_page_cache(folder: Path) -> int:
    """Let the system forget every page of the files below ``folder``; return their bytes.

    Everything is written back first: only clean pages can be dropped. What a disk or a hypervisor
    keeps for itself stays. All is read once before: where the host gives a virtual machine its
    memory page by page, a fresh page costs ten times what reading it does, and who wrote past the
    cache would pay for pages that who wrote through it has already.
    """
    os.sync()
    fill_page_cache(folder)
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                total += os.fstat(fd).st_size
            finally:
                os.close(fd)
    return total


def fill_page_cache(folder: Path) -> int:
    """Read every file below ``folder`` once; return their bytes."""
    piece, total = bytearray(1024 * 1024), 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while got := file.readinto(piece):
                    total += got
    return total


def device_read_bytes() -> int:
    """Return how many bytes this process made the device read: 0 more means a warm cache."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    raise AssertionError("no read_bytes in /proc/self/io")
