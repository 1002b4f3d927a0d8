"""The journal's writing side (ADR-0014 points 1 and 7, protocols.md section 2).

"All records of one group share one future and one sequence number range: answers are cumulative.
[…] a group that the full disk refused is taken back from memory alone." "Journal segments are
zero-filled when made and recycled by renaming."
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.journal.journal_kit import (
    SMALL,
    add_all,
    found,
    make_journal,
    restarted,
    running,
    started,
)
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import IndeterminateError, Reason, RetryableError
from tierlog.ports.files import DiskFailedError
from tierlog_ingest.storage.journal.format import JournalPosition, Kind
from tierlog_ingest.storage.journal.journal import Appended, GroupFuture


def payload(number, size=100):
    return random.Random(number).randbytes(size)


def new_disk(**how):
    return MemoryDisk(random.Random(1), **how)


def test_records_of_a_group_share_a_future_and_are_numbered():
    async def check():
        async with started(new_disk()) as journal:
            answers = [journal.append(Kind.RUN, [payload(n, 3000)]) for n in range(6)]
            assert [one.seq for one in answers] == [1, 2, 3, 4, 5, 6]
            groups = [one.done for one in answers]
            assert groups[0] is groups[1]
            assert groups[2] is groups[3]
            assert groups[1] is not groups[2], "a group takes no more than group_bytes_max"
            assert journal.durable_seq == 0
            await groups[0]
            assert journal.durable_seq == 2
            assert not groups[-1].done()
            await groups[-1]
            assert journal.durable_seq == 6
            assert journal.group_count == 3
            assert journal.queued_bytes == 0

    run_virtual(check())


def test_everything_up_to_durable_seq_lies_before_durable_position():
    disk = new_disk()

    async def check():
        async with started(disk) as journal:
            for n in range(0, 60, 3):
                await add_all(journal, [payload(m, 1000) for m in range(n, n + 3)])
                position, seq = journal.durable_position, journal.durable_seq
                behind, _ = await found(disk.mount(), position)
                assert behind == []
                assert seq == n + 3
            assert journal.segment_id > 2, "it rolled by size"

    run_virtual(check())


@pytest.mark.covers("D22")
def test_a_group_is_answered_only_when_it_is_durable():
    disk = new_disk()

    async def check():
        async with started(disk) as journal:
            for n in range(30):
                appended = journal.append(Kind.RUN, [payload(n, 700)])
                appended.done.add_done_callback(lambda _done: None)
                await appended.done
                lost = MemoryDisk(random.Random(0))
                lost.make_directory("journal")
                for path, inode in disk._durable_names.items():
                    lost.write_whole(path, bytes(inode.durable))
                payloads, replay = await found(lost.mount())
                assert payloads == [payload(m, 700) for m in range(n + 1)]
                assert not replay.damages

    run_virtual(check())


def test_one_who_is_cancelled_leaves_the_others_alone():
    async def check():
        async with started(new_disk()) as journal:
            done = journal.append(Kind.RUN, [b"a"]).done

            async def wait():
                await done

            async with asyncio.TaskGroup() as tasks:
                cancelled = tasks.create_task(wait())
                other = tasks.create_task(wait())
                await asyncio.sleep(0)
                cancelled.cancel()
                await asyncio.wait([cancelled])
            assert cancelled.cancelled()
            assert not other.cancelled()
            assert done.done()
            assert not done.cancelled()
            again = journal.append(Kind.RUN, [b"b"]).done
            assert not again.cancel()
            await again
            await again, "a second time, when it is over"

    run_virtual(check())


def test_a_failed_group_future_raises_for_everyone():
    async def check():
        done = GroupFuture(loop=asyncio.get_running_loop())
        done.set_exception(RetryableError("no", remedy="none"))
        for _ in range(2):
            with pytest.raises(RetryableError):
                await done

    run_virtual(check())


def test_a_full_disk_takes_back_exactly_what_was_not_stored_and_later_appends_work():
    settings = SMALL.model_copy(update={"journal_spares_max": 0})
    disk = new_disk()
    told: list[int] = []

    async def check():
        async with started(disk, settings=settings) as journal:
            journal.on_rollback = told.append
            await add_all(journal, [payload(n, 1000) for n in range(5)])
            disk.capacity_bytes = disk.used_bytes + 4096
            fits = journal.append(Kind.RUN, [payload(5, 3000)])
            late = [journal.append(Kind.RUN, [payload(n, 7000)]) for n in (6, 7, 8)]
            await fits.done
            for one in late:
                with pytest.raises(RetryableError) as caught:
                    await one.done
                assert caught.value.reason is Reason.READ_ONLY
            assert told == [late[0].seq]
            assert journal.durable_seq == fits.seq
            assert journal.queued_bytes == 0
            disk.capacity_bytes = 2**40
            (more,) = await add_all(journal, [payload(9, 100)])
            assert more.seq > late[-1].seq, "numbers are not given again"
            assert journal.durable_seq == more.seq
        payloads, replay = await found(disk.mount())
        sizes = [(n, 1000) for n in range(5)] + [(5, 3000), (9, 100)]
        assert payloads == [payload(*one) for one in sizes]
        assert not replay.damages

    run_virtual(check())


def test_a_disk_that_is_full_at_roll_over_rolls_back_too():
    settings = SMALL.model_copy(update={"journal_spares_max": 0})
    disk = new_disk()
    told: list[int] = []

    async def check():
        async with started(disk, settings=settings) as journal:
            journal.on_rollback = told.append
            answers: list[Appended] = []
            while journal.durable_position.offset + 4096 <= 32 * 1024:
                answers += await add_all(journal, [payload(len(answers))])
            disk.capacity_bytes = disk.used_bytes
            late = journal.append(Kind.RUN, [b"late"])
            with pytest.raises(RetryableError):
                await late.done
            assert told == [late.seq]
            assert journal.segment_id == 1
            disk.capacity_bytes = 2**40
            await add_all(journal, [b"later"])
            assert journal.segment_id == 2
        payloads, replay = await found(disk.mount())
        assert payloads == [*(payload(n) for n in range(len(answers))), b"later"]
        assert not replay.damages

    run_virtual(check())


def test_a_failed_sync_ends_the_writer_and_tells_nobody_more_than_is_known():
    disk = new_disk()

    async def check():
        settings = SMALL.model_copy(update={"journal_spares_max": 0})
        journal = make_journal(disk.mount(), settings=settings)
        await journal.start(1, synced=JournalPosition(0, 0))
        waiting = []
        with pytest.RaisesGroup(DiskFailedError, flatten_subgroups=True):
            async with running(journal):
                await add_all(journal, [b"a"])
                disk.fail_syncs = True
                waiting += [journal.append(Kind.RUN, [b"b"]), journal.append(Kind.RUN, [b"c"])]
                await asyncio.sleep(1)
        for one in waiting:
            with pytest.raises(IndeterminateError):
                await one.done
        assert journal.durable_seq == 1
        with pytest.raises(RetryableError):
            await journal.append(Kind.RUN, [b"d"]).done

    run_virtual(check())


def test_the_queue_pushes_back():
    settings = SMALL.model_copy(update={"journal_queue_bytes_max": 4000})

    async def check():
        async with started(new_disk(), settings=settings) as journal:
            journal.append(Kind.RUN, [payload(1, 5000)])
            assert journal.queued_bytes > 4000
            await journal.ready()
            assert journal.queued_bytes < 4000

    run_virtual(check())


@pytest.mark.covers("D23")
def test_spares_are_filled_kept_and_used():
    disk = new_disk()
    settings = SMALL.model_copy(update={"journal_spares_max": 2})

    def spares():
        return [path for path in disk.paths() if path.endswith(".spare")]

    async def check():
        async with started(disk, settings=settings) as journal:
            await asyncio.sleep(1)
            (spare,) = spares()
            assert disk.read_whole(spare) == bytes(32 * 1024), "zeros, synced"
            number = 0
            while journal.segment_id < 5:
                number += 1
                await add_all(journal, [payload(number, 3000)])
                await asyncio.sleep(0.01)
            assert journal.bytes_on_disk >= 5 * 28 * 1024
            later = [f"journal/{one:016x}.journal" for one in range(2, 6)]
            for path in later:
                assert len(disk.read_whole(path)) == 32 * 1024, "was a spare before"
            await journal.release_before(4)
            await asyncio.sleep(1)
            assert len(spares()) == 2, "journal_spares_max"
            assert journal.bytes_on_disk == 2 * 32 * 1024
            assert any(b"TLJG" in disk.read_whole(one) for one in spares()), "recycled as it was"
            assert all(len(disk.read_whole(one)) == 32 * 1024 for one in spares())
            while journal.segment_id < 12:
                number += 1
                await add_all(journal, [payload(number, 3000)])
            mark = JournalPosition(4, 0)
            payloads, replay = await found(disk.mount(), mark)
            first = number - len(payloads) + 1
            assert payloads == [payload(n, 3000) for n in range(first, number + 1)]
            assert not replay.damages

    run_virtual(check())


def test_no_spare_is_made_of_the_last_free_bytes():
    settings = SMALL.model_copy(update={"free_bytes_min": 50_000, "free_bytes_resume": 50_000})
    disk = new_disk(capacity_bytes=80_000)

    async def check():
        async with started(disk, settings=settings) as journal:
            await asyncio.sleep(1)
            assert not [path for path in disk.paths() if path.endswith(".spare")]
            for n in range(11):
                await add_all(journal, [payload(n, 3000)])
            assert journal.segment_id == 2, "it grows then"

    run_virtual(check())


def test_leftover_spares_are_finished_or_removed():
    disk = new_disk()
    disk.make_directory("journal")
    for number, data in enumerate([b"", b"x" * 100, bytes(50_000), bytes(32 * 1024)], 1):
        disk.write_whole(f"journal/{number:016x}.spare", data)
    disk.write_whole("journal/whatever", b"is not ours")

    async def check():
        async with started(disk) as journal:
            await asyncio.sleep(1)
            spares = [path for path in disk.paths() if path.endswith(".spare")]
            assert len(spares) == 2 or journal.segment_id == 1
            assert all(len(disk.read_whole(one)) == 32 * 1024 for one in spares)

    run_virtual(check())
    assert disk.read_whole("journal/whatever") == b"is not ours"


def test_a_slow_sync_is_counted():
    class SlowClock(SimClock):
        def monotonic_s(self):
            self.advance(0.15)
            return super().monotonic_s()

    settings = SMALL.model_copy(update={"slow_sync_s": 0.1, "idle_marker_s": 60.0})

    async def check():
        disk = new_disk()
        journal = make_journal(disk.mount(), settings=settings)
        journal._clock = SlowClock()
        await journal.start(1, synced=JournalPosition(0, 0))
        async with running(journal):
            await add_all(journal, [b"a"])
            await add_all(journal, [b"b"])
        assert journal.slow_sync_count == 2
        assert journal.sync_s_max == pytest.approx(0.15)
        assert journal.sync_s_total == pytest.approx(0.3)

    run_virtual(check())


def test_the_longest_wait_collects_a_group():
    settings = SMALL.model_copy(update={"group_wait_ms": 20.0})

    async def check():
        async with started(new_disk(), settings=settings) as journal:
            first = journal.append(Kind.RUN, [b"a"])
            await asyncio.sleep(0.01)
            second = journal.append(Kind.RUN, [b"b"])
            assert first.done is second.done
            await second.done

    run_virtual(check())


@pytest.mark.covers("D23")
def test_each_start_begins_a_segment():
    disk = new_disk()

    async def check():
        for life in range(1, 5):
            payloads, replay, journal = await restarted(disk.mount(), seed=life)
            assert payloads == [bytes([n]) for n in range(1, life)]
            assert not replay.damages
            assert journal.segment_id == life
            async with running(journal):
                await add_all(journal, [bytes([life])])

    run_virtual(check())


def test_appends_survive_delays_of_the_disk():
    async def check():
        disk = new_disk()
        faults = Faults(random.Random(3), rates=FaultRates(delay_s_max=0.01))
        journal = make_journal(disk.mount(faults))
        await journal.start(1, synced=JournalPosition(0, 0))
        async with running(journal):
            answers = []
            for n in range(200):
                answers.append(journal.append(Kind.RUN, [payload(n, 50)]))
                if n % 7 == 0:
                    await asyncio.sleep(0.004)
            for one in answers:
                await one.done
            assert journal.group_count < 100, "what waits while a sync runs is one group"
        payloads, _ = await found(disk.mount())
        assert payloads == [payload(n, 50) for n in range(200)]

    run_virtual(check())
