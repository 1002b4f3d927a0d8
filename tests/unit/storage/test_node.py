"""The storage node (protocols.md section 2; section 1, "Fencing and recovery")."""

from __future__ import annotations

import asyncio

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
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.files import DiskFailedError
from tierlog_ingest.storage.entrylog.entry_log import log_path
from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN
from tierlog_ingest.storage.index.index_files import index_path
from tierlog_ingest.storage.journal.segments import list_segments

L1, L2 = LedgerId(1), LedgerId(2)


@virtual
async def test_what_is_added_is_read_before_and_after_a_restart():
    disk = new_disk()
    runs = [make_run(1, first, count=3) for first in range(0, 300, 3)]
    async with opened(disk) as node:
        for answer in [node.add(run) for run in runs]:
            await answer
        assert await read_all(node, 1) == runs
        assert await node.list_ledgers() == [1]
        assert await node.last_add_confirmed(L1) == (296, 299, False)
    async with opened(disk) as node:
        assert await read_all(node, 1, 100) == runs[33:]
        assert await node.last_add_confirmed(L1) == (296, 299, False)
        assert node.statistics()["journal_written_bytes"] >= 0


@pytest.mark.covers("D06")
@virtual
async def test_ordinary_reads_end_at_the_lac():
    async with opened(new_disk()) as node:
        for first in range(5):
            await node.add(make_run(1, first))
        assert len(await read_all(node, 1, recovery=False)) == 4
        node.confirm(L1, EntryId(4))
        node.confirm(L1, EntryId(2))
        assert len(await read_all(node, 1, recovery=False)) == 5
        error = await reading_error(node, 1, 5, recovery=False)
        assert error.reason is Reason.NOT_YET
        error = await reading_error(node, 1, 5, recovery=False, last_entry_id=EntryId(9))
        assert error.reason is Reason.NOT_YET
        assert len(await read_all(node, 1, recovery=False, last_entry_id=EntryId(1))) == 2
        assert len(await read_all(node, 1, recovery=False, last_entry_id=EntryId(9))) == 5
        await node.add(make_run(1, 5, count=3, lac=4))
        assert len(await read_all(node, 1, recovery=False, last_entry_id=EntryId(9))) == 5
        runs = await read_all(node, 1, recovery=False, bytes_max=1)
        assert len(runs) == 1
        assert len(await read_all(node, 1, last_entry_id=EntryId(2))) == 3
        assert len(await read_all(node, 1)) == 6


@virtual
async def test_readers_wait_for_the_lac():
    async with opened(new_disk()) as node:
        await node.add(make_run(1, 0))
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read_all(node, 1, recovery=False, wait_s=20))
            early = tasks.create_task(read_all(node, 2, recovery=False, wait_s=20))
            await asyncio.sleep(5)
            assert not reading.done()
            await node.add(make_run(1, 1))
            await node.add(make_run(2, 0))
            node.confirm(L2, EntryId(0))
        assert (await reading)[0].last_entry_id == 0
        assert (await early)[0].last_entry_id == 0
        started = loop.time()
        assert (await reading_error(node, 1, 1, recovery=False, wait_s=7)).reason is Reason.NOT_YET
        assert loop.time() - started == pytest.approx(7, abs=0.5)
        assert (await reading_error(node, 3, 0, recovery=False)).reason is Reason.NOT_YET
        assert node.statistics()["ledgers"] == 2


@pytest.mark.covers("D18")
@virtual
async def test_the_four_answers_are_never_confused():
    disk = new_disk()
    async with opened(disk) as node:
        await node.add(make_run(1, 0))
        await node.add(make_run(1, 5))
        assert (await reading_error(node, 1, 2)).reason is Reason.NO_SUCH_ENTRY
        assert (await reading_error(node, 1, 6)).reason is Reason.NO_SUCH_ENTRY
        assert (await reading_error(node, 9)).reason is Reason.NO_SUCH_ENTRY
        error = await outcome(node.add(make_run(1, 6)))
        assert error.reason is Reason.FENCED
        assert len(await read_all(node, 1)) == 1, "a read stops at a gap"
        await node.free(L1)
        assert (await reading_error(node, 1)).reason is Reason.LEDGER_NOT_FOUND


@pytest.mark.covers("D18")
@virtual
async def test_fences_hold_for_ever_and_for_unknown_ledgers():
    disk = new_disk()
    async with opened(disk) as node:
        await node.add(make_run(1, 0))
        assert await node.fence(L1) == (-1, 0, False)
        assert await node.fence(L2) == (-1, -1, False)
        for ledger_id in (1, 2):
            error = await outcome(node.add(make_run(ledger_id, 1)))
            assert error.reason is Reason.FENCED
        await node.add(make_run(2, 0), recovery=True)
    for _ in range(3):
        async with opened(disk) as node:
            for ledger_id in (1, 2):
                error = await outcome(node.add(make_run(ledger_id, 1)))
                assert error.reason is Reason.FENCED
            assert await node.list_ledgers() == [1, 2]
            await asyncio.sleep(100)


@virtual
async def test_a_freed_ledger_stays_fenced_and_is_gone():
    disk = new_disk()
    async with opened(disk) as node:
        for ledger_id in (1, 2, 3, 7):
            await node.add(make_run(ledger_id, 0))
            await node.free(LedgerId(ledger_id))
            await node.free(LedgerId(ledger_id))
        assert await node.list_ledgers() == []
        await node.checkpoint()
    for _ in range(2):
        async with opened(disk) as node:
            for ledger_id in (1, 7):
                for recovery in (False, True):
                    error = await outcome(node.add(make_run(ledger_id, 0), recovery=recovery))
                    assert error.reason is Reason.FENCED
                assert (await outcome(node.fence(LedgerId(ledger_id)))).reason is (
                    Reason.LEDGER_NOT_FOUND
                )
            assert (await outcome(node.add(make_run(4, 0)))) is None
    assert [path for path in disk.paths() if path.endswith(".idx")] == [index_path(4)]


@pytest.mark.covers("D05", "D09")
@virtual
async def test_the_same_run_twice_is_one_and_another_is_refused():
    disk = new_disk()
    async with opened(disk) as node:
        run = make_run(1, 0, count=4)
        for _ in range(3):
            await node.add(run)
        for other in (make_run(1, 0, count=4, size=51), make_run(1, 3), make_run(1, 2, count=9)):
            error = await outcome(node.add(other))
            assert isinstance(error, CorruptError)
        await node.add(make_run(1, 10))
        await node.add(make_run(1, 6))
        assert await read_all(node, 1) == [run]
        assert [one.first_entry_id for one in await read_all(node, 1, 6)] == [6]
    async with opened(disk) as node:
        await node.add(run, recovery=True)
        assert await read_all(node, 1) == [run]


def open_files(node):
    """Files of ended logs and of indexes, the latter besides those in use."""
    store = node._store
    return store.cache.statistics().open_files + len(store.logs._open_files)


@virtual
async def test_many_ledgers_with_few_open_files():
    disk = new_disk()
    async with opened(disk) as node:
        for round_number in range(6):
            for ledger_id in range(1, 31):
                await node.add(make_run(ledger_id, round_number, size=300))
            await node.checkpoint()
            statistics = node.statistics()
            assert statistics["buffered_bytes"] == 0
            assert statistics["index_pages"] <= 16
            assert statistics["index_pages_dirty"] == 0
            assert open_files(node) <= 4 + 2
    async with opened(disk) as node:
        for ledger_id in range(1, 31):
            assert len(await read_all(node, ledger_id)) == 6
            await node.add(make_run(ledger_id, 6), recovery=True)
            assert len(await read_all(node, ledger_id)) == 7


@virtual
async def test_adds_while_a_ledger_is_loaded_keep_their_place():
    disk = new_disk()
    async with opened(disk) as node:
        await node.add(make_run(1, 0))
    async with opened(disk) as node:
        answers = [node.add(make_run(1, first)) for first in range(1, 9)]
        for answer in answers:
            await answer
        assert len(await read_all(node, 1)) == 9


@virtual
async def test_journals_are_removed_once_they_are_needless():
    disk = new_disk()
    async with opened(disk) as node:
        for first in range(400):
            await node.add(make_run(1, first, size=500))
        assert len(await list_segments(disk.mount())) > 2
        await node.checkpoint()
        assert len(await list_segments(disk.mount())) == 1
        await asyncio.sleep(120)
        assert len(await list_segments(disk.mount())) == 1


@virtual
async def test_a_full_disk_refuses_and_comes_back():
    disk = new_disk(capacity_bytes=60_000)
    async with opened(disk) as node:
        stored = []
        for first in range(200):
            error = await outcome(node.add(make_run(1, first, size=1000)))
            if error is not None:
                assert error.reason is Reason.READ_ONLY
                break
            stored.append(first)
        assert stored
        assert node.read_only
        error = await outcome(node.add(make_run(2, 0)))
        assert error.reason is Reason.READ_ONLY
        assert error.remedy
        node.confirm(L1, EntryId(stored[-1]))
        runs = await read_all(node, 1, recovery=False)
        assert [one.first_entry_id for one in runs] == stored
        changed = node.state_changed
        disk.capacity_bytes = 10**9
        await asyncio.wait_for(changed.wait(), 30)
        assert not node.read_only
        for first in range(len(stored), len(stored) + 20):
            await node.add(make_run(1, first, size=1000))
        await node.checkpoint()
    async with opened(disk) as node:
        assert len(await read_all(node, 1)) == len(stored) + 20


@virtual
async def test_a_nearly_full_disk_still_takes_fences():
    settings = SMALL.model_copy(update={"free_bytes_min": 50_000, "free_bytes_resume": 60_000})
    disk = new_disk(capacity_bytes=40_000)
    async with opened(disk, settings) as node:
        await asyncio.sleep(10)
        assert node.read_only
        assert (await outcome(node.add(make_run(1, 0)))).reason is Reason.READ_ONLY
        await node.fence(L1)
        await node.add(make_run(1, 0), recovery=True)


@virtual
async def test_a_failing_sync_ends_the_process():
    disk = new_disk()
    node = await open_node(disk.mount())
    failed = False
    try:
        async with running(node):
            await node.add(make_run(1, 0))
            disk.fail_syncs = True
            error = await outcome(node.add(make_run(1, 1)))
            assert error.reason is Reason.APPEND_INDETERMINATE
            await asyncio.sleep(10)
    except* DiskFailedError:
        failed = True
    assert failed
    assert isinstance(await outcome(node.add(make_run(1, 2))), RetryableError)


@pytest.mark.covers("D03", "D08")
@virtual
async def test_a_damaged_run_is_unknown_and_never_served():
    disk = new_disk()
    runs = [make_run(1, first, size=3000) for first in range(4)]
    async with opened(disk) as node:
        for run in runs:
            await node.add(run)
    path = log_path(1)
    data = bytearray(disk.read_whole(path))
    length = len(runs[0].encoded)
    async with opened(disk) as node:
        assert len(await read_all(node, 1)) == 4
        data[LOG_HEADER_LEN + 2 * length + 1000] ^= 1
        disk.write_whole(path, bytes(data))
        assert await read_all(node, 1) == runs[:2]
        assert (await reading_error(node, 1, 2)).reason is Reason.UNKNOWN
        assert await read_all(node, 1, 3) == runs[3:]
        assert (await reading_error(node, 1, 9)).reason is Reason.NO_SUCH_ENTRY, "the index knows"
    index = bytearray(disk.read_whole(index_path(1)))
    index[5000] ^= 1
    disk.write_whole(index_path(1), bytes(index))
    for _ in range(2):  # the second time with an index that was built anew, from a damaged log
        async with opened(disk) as node:
            assert await read_all(node, 1, 3) == runs[3:], "found again behind the damage"
            assert (await reading_error(node, 1, 2)).reason is Reason.UNKNOWN
            assert (await reading_error(node, 1, 9)).reason is Reason.UNKNOWN


@virtual
async def test_quarantine_hides_and_gives_back():
    async with opened(new_disk()) as node:
        await node.add(make_run(1, 0))
        node.quarantine(L1)
        assert (await reading_error(node, 1)).reason is Reason.UNKNOWN
        node.restore(L1)
        assert len(await read_all(node, 1)) == 1
        await node.fence(L2)
        assert node.held_ledgers() == [1, 2]


@virtual
async def test_back_pressure():
    disk = new_disk()
    settings = SMALL.model_copy(update={"journal_queue_bytes_max": 20_000})
    async with opened(disk, settings) as node:
        answers = [node.add(make_run(1, first, size=900)) for first in range(100)]
        refused = [one for one in answers if one.done()]
        assert refused
        assert refused[0].exception().reason is Reason.RESOURCE_EXHAUSTED
        await node.ready()
        assert node.statistics()["journal_queued_bytes"] < 20_000
        for first in range(100, 200):
            await node.ready()
            node.add(make_run(1, first, size=900))
        await node.checkpoint()


@virtual
async def test_nothing_is_served_before_and_after():
    node = await open_node(new_disk().mount())
    for work in (node.add(make_run(1, 0)), node.fence(L1), node.list_ledgers()):
        assert isinstance(await outcome(work), RetryableError)
    async with running(node):
        await node.add(make_run(1, 0))
    assert isinstance(await outcome(node.add(make_run(1, 0))), RetryableError)


@virtual
async def test_a_node_state_that_is_damaged_is_refused():
    disk = new_disk()
    async with opened(disk) as node:
        await node.fence(L1)
    data = disk.read_whole("state")
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 4
        disk.write_whole("state", bytes(flipped))
        with pytest.raises((CorruptError, RefusedError)):
            await open_node(disk.mount())


@pytest.mark.covers("D23", "D33")
@virtual
async def test_a_new_journal_at_the_start_by_size_and_when_they_take_too_much():
    disk = new_disk()
    settings = SMALL.model_copy(update={"checkpoint_journal_bytes": 600_000})

    async def segments():
        return await list_segments(disk.mount())

    async with opened(disk, settings) as node:
        first = await segments()
        assert len(first) == 1
        await node.add(make_run(1, 0, size=100))
        assert await segments() == first
        for number in range(1, 100):
            await node.add(make_run(1, number, size=1500))
        by_size = await segments()
        assert by_size[0] == first[0]
        assert len(by_size) > 2
        for number in range(100, 400):
            await node.add(make_run(1, number, size=1500))
        await asyncio.sleep(1)
        after = await segments()
        assert first[0] not in after, "the checkpoint made the older ones needless"
    last = await segments()
    async with opened(disk, settings) as node:
        (fresh,) = await segments()
        assert fresh > last[-1]
        assert len(await read_all(node, 1)) == 400


@pytest.mark.covers("D38")
@virtual
async def test_an_orderly_end_leaves_nothing_in_buffers():
    disk = new_disk()
    runs = [make_run(1, first) for first in range(20)]
    async with opened(disk) as node:
        for run in runs:
            await node.add(run)
        assert node.statistics()["buffered_bytes"] > 0
    stored = b"".join(run.encoded for run in runs)
    assert disk.read_whole(log_path(1))[LOG_HEADER_LEN:] == stored
    disk.crash()
    assert disk.read_whole(log_path(1))[LOG_HEADER_LEN:] == stored
