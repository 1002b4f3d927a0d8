"""Reading (issue: "≤ 2 disk reads each with a cold index, 1 with a warm one"; checks each run's
checksum; reads ahead within a budget).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from itertools import pairwise

import pytest

from tests.unit.storage.node_kit import (
    SMALL,
    make_run,
    open_node,
    opened,
    read_all,
    reading_error,
    running,
    virtual,
)
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import Reason
from tierlog.model.ids import EntryId, LedgerId
from tierlog_ingest.storage.entrylog.entry_log import log_path

L1 = LedgerId(1)
WIDE = SMALL.model_copy(
    update={"read_bytes": 256 * 1024, "entry_log_bytes_max": 8 * 2**20, "open_files_max": 64}
)


class Disk:
    """A disk that counts the reads of a node on it."""

    def __init__(self, settings=WIDE, **rates):
        self.disk = MemoryDisk(random.Random(1))
        self.settings = settings
        self.faults = Faults(random.Random(1), rates=FaultRates(**rates))
        self.faults.calls = []

    @contextlib.asynccontextmanager
    async def node(self):
        node = await open_node(self.disk.mount(self.faults), self.settings)
        async with running(node):
            yield node

    def reads(self):
        """Return how many reads there were since the last time."""
        calls, self.faults.calls = self.faults.calls, []
        return (calls or []).count("files.read")


async def fill(node, runs):
    for run in runs:
        await node.ready()
        await node.add(run, recovery=True)
    await node.checkpoint()


@virtual
async def test_an_entry_costs_two_reads_cold_and_one_warm():
    sizes = (0, 100, 4000, 70_000, 300_000)
    runs = [make_run(1, at, size=size) for at, size in enumerate(sizes)]
    # Not at the beginning of a page of the index: who reads on gets several at once there.
    far = [make_run(1, 508 * page + 9, size=100) for page in range(1, 40)]
    disk = Disk()
    async with disk.node() as node:
        await fill(node, [*runs, *far])
    async with disk.node() as node:
        await node.fence(L1)
        disk.reads()
        for run in far:
            assert await read_all(node, 1, run.first_entry_id, bytes_max=1) == [run]
            assert disk.reads() == 2
        for run in runs:
            await read_all(node, 1, run.first_entry_id, bytes_max=1)
            disk.reads()
            assert await read_all(node, 1, run.first_entry_id, bytes_max=1) == [run]
            assert disk.reads() == 1


@virtual
async def test_a_range_is_read_in_large_windows():
    runs = [make_run(ledger, at, size=1000) for at in range(1200) for ledger in (1, 2)]
    disk = Disk()
    async with disk.node() as node:
        await fill(node, runs)
    async with disk.node() as node:
        await node.fence(L1)
        disk.reads()
        assert await read_all(node, 1) == runs[::2]
        # 1.3 MB in a few flushes, each of which put the ledger's runs together: 256 KiB at once.
        flushes = 2 * 1200 * 2100 // (SMALL.write_buffer_bytes_max // 2)
        assert disk.reads() < flushes + 10


@virtual
async def test_runs_over_several_pages_come_back_whole():
    runs = [make_run(1, at, count=1300, size=0) for at in range(0, 5200, 1300)]
    async with opened(MemoryDisk(random.Random(1)), WIDE) as node:
        await fill(node, runs)
        assert await read_all(node, 1) == runs
        for entry_id in (0, 507, 508, 1299, 1300, 3000, 5199):
            found = await read_all(node, 1, entry_id)
            assert found == runs[entry_id // 1300 :]
        assert (await reading_error(node, 1, 5200)).reason is Reason.NO_SUCH_ENTRY


@virtual
async def test_runs_that_came_in_any_order_are_read_in_their_own():
    rng = random.Random(4)
    runs = [make_run(1, at, count=rng.choice((1, 3))) for at in range(0, 600, 3)]
    mixed = rng.sample(runs, len(runs))
    async with opened(MemoryDisk(random.Random(1))) as node:
        for at, run in enumerate(mixed):
            await node.add(run, recovery=True)
            if at % 23 == 0:
                await node.checkpoint()
        for run in runs:
            found = await read_all(node, 1, run.first_entry_id)
            assert found[0] == run
            for before, after in pairwise(found):
                assert after.first_entry_id == before.last_entry_id + 1
            behind = found[-1].last_entry_id + 1
            assert not any(one.first_entry_id == behind for one in runs)


@virtual
async def test_readers_meet_the_flush_and_miss_nothing():
    disk = Disk(SMALL, delay_s_max=0.002)
    runs = [make_run(1, at, size=300) for at in range(400)]
    async with disk.node() as node, asyncio.TaskGroup() as tasks:

        async def write():
            for run in runs:
                await node.ready()
                await node.add(run)
            node.confirm(L1, EntryId(399))

        async def read():
            entry_id = 0
            while entry_id < 400:
                how = {"bytes_max": 20_000, "wait_s": 60.0}
                async for some in node.read(L1, EntryId(entry_id), **how):
                    for run in some:
                        assert run == runs[entry_id]
                        entry_id += 1

        async def mark():
            for _ in range(40):
                await asyncio.sleep(0.05)
                await node.checkpoint()

        tasks.create_task(write())
        tasks.create_task(mark())
        for _ in range(5):
            tasks.create_task(read())


@virtual
async def test_reading_ahead_keeps_to_its_budget_and_ends_with_its_reader():
    disk = Disk(WIDE.model_copy(update={"read_bytes": 4096, "read_ahead_bytes_max": 3 * 4096}))
    runs = [make_run(1, at, size=1000) for at in range(200)]
    async with disk.node() as node:
        await fill(node, runs)
        await node.fence(L1)
        readers = [node.read(L1, EntryId(0), bytes_max=10**9, recovery=True) for _ in range(10)]
        highest = 0
        for _ in range(8):
            for reader in readers:
                assert await anext(reader)
                ahead = node.statistics()["read_ahead_bytes"]
                assert ahead <= 3 * 4096
                highest = max(highest, ahead)
        assert highest == 3 * 4096
        for reader in readers:
            await reader.aclose()
        assert node.statistics()["read_ahead_bytes"] == 0
        assert await read_all(node, 1) == runs


@pytest.mark.covers("D08")
@virtual
async def test_every_flip_in_a_log_is_found_when_it_is_read():
    disk = MemoryDisk(random.Random(1))
    runs = [make_run(1, at, size=60) for at in range(4)]
    async with opened(disk) as node:
        await fill(node, runs)
        data = disk.read_whole(log_path(1))
        for at in range(32, len(data), 7):
            flipped = bytearray(data)
            flipped[at] ^= 0x08
            disk.write_whole(log_path(1), bytes(flipped))
            bad = (at - 32) // len(runs[0].encoded)
            found = await read_all(node, 1) if bad else []
            assert found == runs[:bad]
            assert (await reading_error(node, 1, bad)).reason is Reason.UNKNOWN
            if bad < 3:
                assert await read_all(node, 1, bad + 1) == runs[bad + 1 :]
        disk.write_whole(log_path(1), data)
        assert await read_all(node, 1) == runs
