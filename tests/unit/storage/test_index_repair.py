"""The index is derived (ADR-0014, point 3): what is torn or damaged is built anew from the logs,
and absence is answered only from an index that is whole.
"""

from __future__ import annotations

import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import (
    SMALL,
    CrashingNode,
    make_run,
    opened,
    outcome,
    read_all,
    reading_error,
)
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import CorruptError, Reason
from tierlog.model.ids import LedgerId
from tierlog_ingest.storage.entrylog.entry_log import log_path
from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN
from tierlog_ingest.storage.index.index_files import index_path
from tierlog_ingest.storage.marking import Marks

L1 = LedgerId(1)
RUNS = {ledger_id: [make_run(ledger_id, first) for first in range(12)] for ledger_id in (1, 2)}


async def filled(disk):
    """Fill two logs, by two lives, with runs of two ledgers."""
    for half in (slice(0, 6), slice(6, 12)):
        async with opened(disk) as node:
            for ledger_id in (1, 2):
                for run in RUNS[ledger_id][half]:
                    await node.add(run, recovery=True)


def damage(disk, path, at):
    data = bytearray(disk.read_whole(path))
    data[at] ^= 0x40
    disk.write_whole(path, bytes(data))


def checking(test):
    def run():
        async def with_disk():
            disk = MemoryDisk(random.Random(1))
            await filled(disk)
            await test(disk)

        run_virtual(with_disk(), until_s=1000)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@pytest.mark.covers("D27", "D28")
@checking
async def test_any_damaged_page_is_repaired_at_the_first_use(disk):
    index = disk.read_whole(index_path(1))
    for at in range(0, len(index), 97):
        disk.write_whole(index_path(1), index)
        damage(disk, index_path(1), at)
        async with opened(disk) as node:
            assert node.damages == []
            assert await read_all(node, 1) == RUNS[1]
            assert await read_all(node, 2) == RUNS[2]
            assert (await reading_error(node, 1, 12)).reason is Reason.NO_SUCH_ENTRY
            assert await node.last_add_confirmed(L1) == (10, 11, False)
        async with opened(disk) as node:
            assert await read_all(node, 1, 5) == RUNS[1][5:]


@checking
async def test_a_lost_or_cut_index_is_repaired_and_takes_adds(disk):
    index = disk.read_whole(index_path(1))
    for length in (0, 1, 4095, 4096, len(index) - 1, None):
        if length is None:
            await disk.mount().remove(index_path(1))
        else:
            disk.write_whole(index_path(1), index[:length])
        async with opened(disk) as node:
            await node.add(RUNS[1][3], recovery=True)
            other = make_run(1, 3, size=51)
            assert isinstance(await outcome(node.add(other, recovery=True)), CorruptError)
            assert await read_all(node, 1) == RUNS[1]
            assert (await reading_error(node, 1, 12)).reason is Reason.NO_SUCH_ENTRY
        assert disk.read_whole(index_path(1)) == index


@checking
async def test_a_flush_that_meets_a_damaged_index_has_it_repaired(disk):
    damage(disk, index_path(1), 5000)
    async with opened(disk) as node:
        await node.last_add_confirmed(L1)  # its header is good
        await node.add(make_run(1, 12), recovery=True)
        await node.checkpoint()
        assert node.statistics()["buffered_bytes"] == 0
        assert await read_all(node, 1) == [*RUNS[1], make_run(1, 12)]


@checking
async def test_replay_into_a_damaged_index_has_it_repaired(disk):
    crashing = CrashingNode(disk, 1)

    async def work(node):
        await node.add(make_run(1, 12))
        crashing.crashed.set()

    await crashing.live(work)
    damage(disk, index_path(1), 5000)
    async with opened(disk) as node:
        assert node.damages == []
        assert await read_all(node, 1) == [*RUNS[1], make_run(1, 12)]


@checking
async def test_what_a_damaged_log_lacks_is_unknown_once_its_index_is_built_anew(disk):
    """Also later on: the doubt is durable."""
    length = len(RUNS[1][0].encoded)
    damage(disk, log_path(1), LOG_HEADER_LEN + 2 * length + 100)
    damage(disk, index_path(1), 5000)
    for _ in range(3):
        async with opened(disk) as node:
            found = await read_all(node, 1, 3)
            assert found == RUNS[1][3:]
            for entry_id in (2, 12):
                assert (await reading_error(node, 1, entry_id)).reason is Reason.UNKNOWN
            assert (await reading_error(node, 2, 12)).reason is Reason.NO_SUCH_ENTRY
            assert await read_all(node, 2) == RUNS[2]
    async with opened(disk) as node:
        await node.add(RUNS[1][2], recovery=True)
        assert await read_all(node, 1) == RUNS[1], "another copy heals it"


@checking
async def test_a_lost_log_is_unknown_never_absent(disk):
    await disk.mount().remove(log_path(1))
    async with opened(disk) as node:
        assert node.damages
        for ledger_id in (1, 2):
            assert await read_all(node, ledger_id, 6) == RUNS[ledger_id][6:]
            for entry_id in range(6):
                error = await reading_error(node, ledger_id, entry_id)
                assert error.reason is Reason.UNKNOWN
        for run in RUNS[1][:6]:
            await node.add(run, recovery=True)
        assert await read_all(node, 1) == RUNS[1]


@checking
async def test_a_crash_at_each_step_of_a_repair(disk):
    """What was built in part is never taken for whole."""
    damage(disk, index_path(1), 5000)
    before = {path: disk.read_whole(path) for path in disk.paths()}
    step, finished = 0, False
    while not finished:
        step += 1
        copy = MemoryDisk(random.Random(step))
        for path, data in before.items():
            copy.make_directory(path.rpartition("/")[0]) if "/" in path else None
            copy.write_whole(path, data)
        crashing = CrashingNode(copy, step)
        crashing.faults.crash_after(step)

        async def work(node, crashing=crashing):
            nonlocal finished
            assert await read_all(node, 1) == RUNS[1]
            await node.checkpoint()
            finished = True
            crashing.crashed.set()

        await crashing.live(work, power_lost=step % 3 > 0)
        async with opened(copy) as node:
            assert await read_all(node, 1) == RUNS[1]
            assert await read_all(node, 2) == RUNS[2]
            assert (await reading_error(node, 1, 12)).reason is Reason.NO_SUCH_ENTRY
    assert step > 80


@checking
async def test_one_repair_for_many_who_meet_the_damage(disk):
    damage(disk, index_path(1), 5000)
    count = 0
    real = Marks._rebuild

    async def rebuild(self, ledger_id):
        nonlocal count
        count += 1
        return await real(self, ledger_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Marks, "_rebuild", rebuild)
        async with opened(disk, SMALL) as node:
            answers = [node.add(run, recovery=True) for run in RUNS[1]]
            assert await read_all(node, 1) == RUNS[1]
            for answer in answers:
                await answer
    assert count == 1
