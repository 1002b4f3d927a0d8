"""Adds: durable before they are answered, in their order, the same run once, nothing half-done."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.unit.storage.node_kit import (
    SMALL,
    make_run,
    new_disk,
    open_node,
    opened,
    outcome,
    read_all,
    reading_error,
    running,
    virtual,
)
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.model.errors import CorruptError, Reason, RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.files import DiskFailedError
from tierlog_ingest.storage.index.index_format import ENTRY_ID_MAX
from tierlog_ingest.storage.journal.replay import records, scan_journal
from tierlog_ingest.storage.journal.segments import list_segments
from tierlog_ingest.storage.state_file import read_states

L1, L2 = LedgerId(1), LedgerId(2)


@pytest.mark.covers("D05")
@virtual
async def test_a_run_that_comes_again_is_one_wherever_the_first_is():
    """In the buffer, in a log, in a log since an earlier life; and another one is refused there."""
    disk = new_disk()
    run, other = make_run(1, 4, count=3), make_run(1, 4, count=3, size=51)
    overlapping = make_run(1, 6, count=3)

    async def check(node):
        await node.add(run, recovery=True)
        for wrong in (other, overlapping):
            error = await outcome(node.add(wrong, recovery=True))
            assert isinstance(error, CorruptError)
            assert error.remedy
        assert await read_all(node, 1, 4) == [run]

    async with opened(disk) as node:
        await node.add(make_run(1, 20))
        await check(node)
        await node.checkpoint()
        await check(node)
    async with opened(disk) as node:
        await check(node)
        assert await node.last_add_confirmed(L1) == (19, 20, False)


@virtual
async def test_a_run_that_comes_again_is_not_answered_before_it_is_durable():
    faults = Faults(random.Random(1))
    node = await open_node(new_disk().mount(faults))
    async with running(node):
        await node.add(make_run(1, 0))
        faults.rates = FaultRates(delay_s_max=5)
        first, again = node.add(make_run(1, 1)), node.add(make_run(1, 1))
        for answer in (first, again):
            await asyncio.wait({answer}, timeout=0.01)
            assert not answer.done()
        await again
        assert first.done()


@virtual
async def test_adds_of_a_ledger_keep_their_order_while_the_disk_is_asked():
    disk = new_disk()
    async with opened(disk) as node:
        for first in range(5):
            await node.add(make_run(1, first))
    faults = Faults(random.Random(2), rates=FaultRates(delay_s_max=0.5))
    node = await open_node(disk.mount(faults))
    async with running(node):
        # The first must look up the ledger; those behind it need nothing, and wait all the same.
        runs = [make_run(1, first) for first in (5, 6, 2, 7, 0, 8)]
        answers = [node.add(run) for run in runs]
        conflict = node.add(make_run(1, 8, size=9))
        assert isinstance(await outcome(conflict), CorruptError)
        for answer in answers:
            await answer
        assert len(await read_all(node, 1)) == 9


@virtual
async def test_a_fence_overtakes_adds_that_wait_for_the_disk():
    disk = new_disk()
    async with opened(disk) as node:
        await node.add(make_run(1, 0))
    faults = Faults(random.Random(2), rates=FaultRates(delay_s_max=0.5))
    node = await open_node(disk.mount(faults))
    async with running(node):
        late = node.add(make_run(1, 1))
        fence = await node.fence(L1)
        error = await outcome(late)
        stored = error is None
        assert fence.last_entry_id == (1 if stored else 0)
        assert stored or error.reason is Reason.FENCED


@virtual
async def test_who_is_cancelled_leaves_the_others_alone():
    async with opened(new_disk()) as node, asyncio.TaskGroup() as tasks:

        async def add(first):
            await node.add(make_run(1, first))

        adding = [tasks.create_task(add(first)) for first in range(10)]
        await asyncio.sleep(0)
        for task in adding[::2]:
            task.cancel()
        await asyncio.wait(adding)
        assert [task.cancelled() for task in adding] == [True, False] * 5
        assert len(await read_all(node, 1)) == 10


@virtual
async def test_a_full_disk_takes_back_runs_and_fences_and_nothing_else():
    disk = new_disk()
    async with opened(disk) as node:
        for first in range(3):
            await node.add(make_run(1, first))
        await node.checkpoint()
        await node.add(make_run(1, 3))
        disk.capacity_bytes = 0
        runs = [make_run(1, first, size=60_000) for first in range(4, 12)]
        answers = [node.add(run) for run in runs]
        answers += [node.add(make_run(2, 0)), asyncio.ensure_future(node.fence(L2))]
        errors = [await outcome(answer) for answer in answers]
        stored = errors.index(next(one for one in errors if one is not None))
        assert stored < len(runs), "spares hold no more than this"
        for error in errors[stored:]:
            assert isinstance(error, RetryableError)
            assert error.reason is Reason.READ_ONLY
        assert node.read_only
        disk.capacity_bytes = 10**9
        await asyncio.sleep(30)
        assert not node.read_only
        assert (await node.last_add_confirmed(L1)).last_entry_id == 3 + stored
        assert (await node.last_add_confirmed(L2)).last_entry_id == -1
        await node.add(make_run(2, 0))
        other = make_run(1, 4 + stored, size=77)
        await node.add(other)
        assert (await read_all(node, 1))[-1] == other
        assert (await reading_error(node, 1, 5 + stored)).reason is Reason.NO_SUCH_ENTRY
    async with opened(disk) as node:
        assert (await read_all(node, 1))[-1] == other
        await node.add(make_run(2, 1))


@pytest.mark.covers("D33")
@virtual
async def test_journals_that_take_too_much_disk_force_a_mark():
    disk = new_disk()
    settings = SMALL.model_copy(
        update={"checkpoint_journal_bytes": 200_000, "checkpoint_interval_s": 10**6}
    )
    async with opened(disk, settings) as node:
        for first in range(300):
            await node.add(make_run(1, first, size=1000))
            assert len(await list_segments(disk.mount())) <= 6
            assert node.statistics()["journal_bytes_on_disk"] <= 6 * 64 * 1024
        assert len(await read_all(node, 1)) == 300


@virtual
async def test_many_small_records_force_a_mark():
    """So that a start has a bounded number of them to replay, however few their bytes."""
    disk = new_disk()
    settings = SMALL.model_copy(
        update={"checkpoint_journal_records": 50, "checkpoint_interval_s": 10**6}
    )
    async with opened(disk, settings) as node:
        for first in range(500):
            await node.add(make_run(1, first, size=10))
        await asyncio.sleep(1)
        state, _ = await read_states([disk.mount()], log_directories=1)
        assert state is not None
        replay = await scan_journal(disk.mount(), state.mark)
        assert len([one async for one in records(replay)]) <= 60
        assert len(await read_all(node, 1)) == 500


@pytest.mark.covers("D31")
@virtual
async def test_the_buffer_is_flushed_before_it_is_full():
    settings = SMALL.model_copy(update={"checkpoint_interval_s": 10**6})
    async with opened(new_disk(), settings) as node:
        for first in range(300):
            await node.ready()
            node.add(make_run(1, first, size=1000))
            assert node.statistics()["buffered_bytes"] <= SMALL.write_buffer_bytes_max + 4096
        await node.checkpoint()
        assert len(await read_all(node, 1)) == 300


@virtual
async def test_entries_beyond_an_index_are_refused_at_once():
    async with opened(new_disk()) as node:
        error = await outcome(node.add(make_run(1, ENTRY_ID_MAX + 1)))
        assert error.reason is Reason.TOO_LARGE


@virtual
async def test_a_lac_that_is_told_counts_also_for_a_ledger_that_was_not_used_yet():
    disk = new_disk()
    async with opened(disk) as node:
        for first in range(3):
            await node.add(make_run(1, first))
    async with opened(disk) as node:
        node.confirm(L1, EntryId(1))
        node.confirm(L1, EntryId(2))
        node.confirm(L2, EntryId(7))
        found = await read_all(node, 1, 2, recovery=False, wait_s=5)
        assert [run.first_entry_id for run in found] == [2]
        assert await node.last_add_confirmed(L2) == (-1, -1, False)
    async with opened(disk) as node:
        assert await node.list_ledgers() == [1]


@virtual
async def test_many_ledgers_cost_little_each():
    """By what is counted, not measured: no event, future or lock for a ledger that is idle."""
    async with opened(new_disk()) as node:
        for ledger_id in range(1, 2001):
            await node.ready()
            node.add(make_run(ledger_id, 0, size=10))
        await node.checkpoint()
        statistics = node.statistics()
        assert statistics["ledgers"] == statistics["ledgers_held"] == 2000
        assert statistics["index_pages"] <= 16
        assert not node._ledgers._moves
        assert not node._turns._waiting
        assert len(await read_all(node, 1234)) == 1


@virtual
async def test_nobody_waits_for_a_node_that_a_failed_disk_ended():
    """Neither for room in the buffer, nor for an add that had to look its ledger up."""
    disk, later = new_disk(), list(range(100, 120))
    async with opened(disk) as node:
        for ledger_id in later:
            await node.add(make_run(ledger_id, 0))
    node, is_failing, looked_up = await open_node(disk.mount()), asyncio.Event(), []

    def add_one():
        """Add at every turn of the loop; at one of them, all of the node's tasks are cancelled."""
        looked_up.append(node.add(make_run(later.pop(), 1)))
        if later:
            asyncio.get_running_loop().call_soon(add_one)

    async def fail(_durable_seq):
        await is_failing.wait()
        add_one()
        raise DiskFailedError("the disk failed")

    node._store.flush = fail
    life = asyncio.ensure_future(node.run(asyncio.Event()))
    await asyncio.sleep(0)
    for n in range(60):
        node.add(make_run(2, n, size=1000))
    waiting = asyncio.ensure_future(node.ready())
    await asyncio.sleep(1)
    assert not waiting.done()
    is_failing.set()
    async with asyncio.timeout(10):
        await asyncio.wait([life])
        await waiting
        while later:
            await asyncio.sleep(0)
        for answer in looked_up:
            assert isinstance(await outcome(answer), TierlogError)
    with pytest.raises(ExceptionGroup):
        await life


@virtual
async def test_fences_that_are_durable_are_not_waited_for_again():
    async with opened(new_disk()) as node:
        for ledger_id in range(500):
            await node.fence(LedgerId(ledger_id))
        assert "under way=" in repr(node._fences)
        assert len(node._fences) == 500
        assert len(node._fences._under_way) <= 64
