"""What a node says that it holds: buffer and index together, across pages, restarts and gaps."""

# mypy: disable-error-code="arg-type"

import asyncio
import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import make_run, opened
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import Reason, TierlogError
from tierlog_ingest.storage.index.index_format import SLOTS_PER_PAGE

RUNS = [(0, 3), (3, 1), (10, 5), (SLOTS_PER_PAGE - 2, 6), (5 * SLOTS_PER_PAGE, 1)]
HELD = [
    (0, 3),
    (10, 14),
    (SLOTS_PER_PAGE - 2, SLOTS_PER_PAGE + 3),
    (5 * SLOTS_PER_PAGE, 5 * SLOTS_PER_PAGE),
]


@pytest.mark.covers("D13")
def test_entries_are_held_whether_buffered_or_indexed_and_after_a_restart():
    async def main():
        disk = MemoryDisk(random.Random(1))
        async with opened(disk) as node:
            assert await node.held_entries(1) == []
            for first, count in RUNS[::2]:
                await node.add(make_run(1, first, count=count), recovery=True)
            await node.checkpoint()
            for first, count in RUNS[1::2]:
                await node.add(make_run(1, first, count=count), recovery=True)
            await node.add(make_run(2, 7))
            assert await node.held_entries(1) == HELD
            await node.checkpoint()
            assert await node.held_entries(1) == HELD
        disk.crash()
        async with opened(disk) as node:
            assert await node.held_entries(1) == HELD
            assert await node.held_entries(2) == [(7, 7)]

    run_virtual(main())


def test_nothing_is_missed_while_runs_move_from_the_buffer_to_the_index():
    async def main():
        async with opened(MemoryDisk(random.Random(1))) as node:
            for first in range(200):
                await node.add(make_run(1, first))
            async with asyncio.TaskGroup() as tasks:
                flush = tasks.create_task(node.checkpoint())
                while not flush.done():
                    assert await node.held_entries(1) == [(0, 199)]
                    await asyncio.sleep(0)

    run_virtual(main())


def test_a_quarantined_ledger_is_unknown_and_a_freed_one_is_gone():
    async def main():
        async with opened(MemoryDisk(random.Random(1))) as node:
            await node.add(make_run(1, 0))
            node.quarantine(1)
            with pytest.raises(TierlogError) as unknown:
                await node.held_entries(1)
            assert unknown.value.reason is Reason.UNKNOWN
            node.restore(1)
            assert await node.held_entries(1) == [(0, 0)]
            await node.free(1)
            with pytest.raises(TierlogError) as gone:
                await node.held_entries(1)
            assert gone.value.reason is Reason.LEDGER_NOT_FOUND

    run_virtual(main())
