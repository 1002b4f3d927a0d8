"""Compaction through the whole node (checklist D26, D39 to D47; ADR-0014, point 6).

Four fifths of interleaved ledgers are deleted; rounds by the clock, for space, and at every step
of a crash give the space back, and every entry that is left reads as it was written.
"""

from __future__ import annotations

import asyncio
import copy
import random

import pytest
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import (
    SMALL,
    CrashingNode,
    make_run,
    open_node,
    opened,
    outcome,
    read_all,
    running,
)
from tests.unit.storage.test_crashes import LEDGERS as MODEL_LEDGERS
from tests.unit.storage.test_crashes import Model
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import CorruptError, Reason, TierlogError
from tierlog.model.ids import LedgerId
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.compaction.throttle import TokenBucket

LEDGERS = range(1, 11)
LIVE = (1, 2)
DELETED = range(3, 11)

TINY = SMALL.model_copy(
    update={
        "journal_segment_bytes": 8 * 1024,
        "write_buffer_bytes_max": 8 * 1024,
        "entry_log_bytes_max": 16 * 1024,
        "ledger_cache_bytes_max": 16 * 4096,
    }
)


def new_disk(seed=1, **how):
    return MemoryDisk(random.Random(seed), **how)


def written(*, runs=40, size=200):
    """Runs of all ledgers, in the order in which they are added: interleaved."""
    return [make_run(ledger, 3 * n, count=3, size=size) for n in range(runs) for ledger in LEDGERS]


async def add_all(node, runs):
    for run in runs:
        await node.ready()
        await node.add(run)


async def delete_most(node):
    for ledger_id in DELETED:
        await node.free(LedgerId(ledger_id))


async def check(node, runs, *, live=LIVE):
    for ledger_id in live:
        wanted = [run for run in runs if run.header.ledger_id == ledger_id]
        assert await read_all(node, ledger_id) == wanted
    for ledger_id in set(LEDGERS) - set(live):
        error = await outcome(read_all(node, ledger_id))
        assert error.reason is Reason.LEDGER_NOT_FOUND
    assert await node.list_ledgers() == sorted(live)


def log_bytes(disk):
    return sum(len(disk.read_whole(path)) for path in disk.paths() if path.startswith("logs/"))


def live_bytes(runs, live=LIVE):
    return sum(len(run.encoded) for run in runs if run.header.ledger_id in live)


@pytest.mark.covers("D40", "D42", "D43", "D44", "D45")
def test_minor_and_major_rounds_give_the_space_back():
    async def run():
        disk, runs = new_disk(), written()
        settings = StorageSettings(
            **{**StorageSettings().model_dump(), **TINY.model_dump(), "gc_interval_s": 30}
        )
        async with opened(disk, settings) as node:
            await add_all(node, runs)
            await node.checkpoint()
            before = log_bytes(disk)
            for ledger_id in (3, 4, 5, 6):
                await node.free(LedgerId(ledger_id))
            await asyncio.sleep(3700)
            assert log_bytes(disk) == before, "60 % are live: not for a minor round"
            for ledger_id in (7, 8, 9, 10, 2):
                await node.free(LedgerId(ledger_id))
            await asyncio.sleep(3600)
            assert log_bytes(disk) < before * 0.3, "10 % are live"
            await check(node, runs, live=(1,))
            found = node.statistics()
            assert found["compaction_rounds_minor"] == 2
            more = [make_run(ledger, 0, size=1000) for ledger in (20, 21) for _ in (0,)]
            more += [make_run(ledger, n, size=1000) for n in range(1, 40) for ledger in (20, 21)]
            await add_all(node, more)
            await node.checkpoint()
            grown = log_bytes(disk)
            await node.free(LedgerId(20))
            await asyncio.sleep(3600)
            assert log_bytes(disk) == grown, "half of it is live"
            await asyncio.sleep(86400)
            assert node.statistics()["compaction_rounds_major"] == 1
            assert log_bytes(disk) < grown * 0.75
            assert await read_all(node, 21) == [one for one in more if one.header.ledger_id == 21]
            assert await read_all(node, 1) == [one for one in runs if one.header.ledger_id == 1]

    run_virtual(run())


@pytest.mark.covers("D39", "D47")
def test_most_is_deleted_and_the_rest_reads_the_same():
    async def run():
        disk, runs = new_disk(), written()
        async with opened(disk, TINY) as node:
            await add_all(node, runs)
            await node.checkpoint()
            await delete_most(node)
            await node.compactor.compact(threshold=0.8)
            assert log_bytes(disk) < live_bytes(runs) * 1.2 + 16 * 1024
            await check(node, runs)
            assert node.damages == []
        async with opened(disk, TINY) as node:
            assert node.damages == []
            await check(node, runs)
            await node.compactor.compact(threshold=0.8)
            await check(node, runs)

    run_virtual(run())


@pytest.mark.covers("D26")
def test_all_is_deleted_and_all_space_comes_back():
    async def run():
        disk, runs = new_disk(), written()
        async with opened(disk, TINY) as node:
            await add_all(node, runs)
            await node.checkpoint()
            for ledger_id in LEDGERS:
                await node.free(LedgerId(ledger_id))
            await asyncio.sleep(70)
            assert log_bytes(disk) == 0
            assert node.statistics()["compaction_read_bytes"] == 0
            await check(node, runs, live=())

    run_virtual(run())


def test_who_reads_and_writes_meanwhile_notices_nothing():
    async def run():
        disk, runs = new_disk(), written()
        async with opened(disk, TINY) as node:
            node.compactor._bucket = TokenBucket(SimClock(), bytes_per_s=100_000)  # no burst
            await add_all(node, runs)
            await node.checkpoint()
            reads = 0

            async def read_on(ledger_id):
                nonlocal reads
                wanted = [run for run in runs if run.header.ledger_id == ledger_id]
                while True:
                    assert await read_all(node, ledger_id, recovery=True) == wanted
                    reads += 1
                    await asyncio.sleep(0.01)

            async def write_on():
                for n in range(10**6):
                    await node.ready()
                    await node.add(make_run(30, n, size=300))
                    await asyncio.sleep(0.02)

            await delete_most(node)
            async with asyncio.TaskGroup() as tasks:
                others = [tasks.create_task(read_on(ledger_id)) for ledger_id in LIVE]
                others.append(tasks.create_task(write_on()))
                await node.compactor.compact(threshold=0.8)
                for other in others:
                    other.cancel()
            assert reads > 20
            assert node.statistics()["compaction_logs_compacted"] > 5
            assert await read_all(node, 30)

    run_virtual(run())


def test_who_adds_again_what_compaction_just_moved_is_compared_with_it():
    """A log that goes between the look into the index and the read is no absence."""

    async def run():
        disk, runs = new_disk(), written()
        async with opened(disk, TINY) as node:
            await add_all(node, runs)
            await node.checkpoint()
            await delete_most(node)
            slots = node._store.cache.slots
            moved: list[tuple[object, ...]] = []

            async def slots_then_move(*args):
                found = await slots(*args)
                if not moved:
                    moved.append(args)
                    await node.compactor.compact(threshold=0.8)
                return found

            node._store.cache.slots = slots_then_move
            error = await outcome(node.add(make_run(1, 0, count=3, size=199)))
            assert isinstance(error, CorruptError), "other bytes under the same ids"
            assert moved
            assert node.statistics()["compaction_logs_removed"] > 0
            for ledger_id in LIVE:
                wanted = [one for one in runs if one.header.ledger_id == ledger_id]
                assert await read_all(node, ledger_id) == wanted

    run_virtual(run())


@pytest.mark.parametrize(
    ("left", "is_flushed"),
    [(0, True), (1000, True), (5000, True), (20_000, True), (90_000, True), (90_000, False)],
)
def test_a_full_disk_comes_back_once_ledgers_are_deleted(left, is_flushed):
    """Deletes and reads go on; no space comes but from compaction."""

    async def run():
        disk, runs = new_disk(), written()
        settings = TINY.model_copy(
            update={
                "journal_segment_bytes": 64 * 1024,
                "free_bytes_min": 100_000,
                "free_bytes_resume": 200_000,
            }
        )
        async with opened(disk, settings) as node:
            await add_all(node, runs)
            if is_flushed:
                await node.checkpoint()
            disk.capacity_bytes = disk.used_bytes + left
            await asyncio.sleep(10)
            assert node.read_only
            for ledger_id in LIVE:
                assert await read_all(node, ledger_id)
            await delete_most(node)
            async with asyncio.timeout(60):
                while node.read_only:
                    changed = node.state_changed
                    await changed.wait()
            await node.add(make_run(40, 0))
            for ledger_id in LIVE:
                wanted = [run for run in runs if run.header.ledger_id == ledger_id]
                assert await read_all(node, ledger_id) == wanted

    run_virtual(run())


def test_a_disk_that_refuses_gets_the_spare_segments_back():
    async def run():
        disk = new_disk()

        def spares():
            return [path for path in disk.paths() if path.endswith(".spare")]

        async with opened(disk, TINY) as node:
            await node.add(make_run(1, 0))
            await asyncio.sleep(1)
            assert spares()
            node._space.refused()
            await asyncio.sleep(1)
            assert spares() == []
            await asyncio.sleep(10)
            assert not node.read_only
            await add_all(node, [make_run(2, n, size=1000) for n in range(20)])
            await asyncio.sleep(1)
            assert spares(), "there is space for them again"
            assert len(await read_all(node, 2)) == 20

    run_virtual(run())


# Crashes


async def compaction_day(node):
    await outcome(node.checkpoint())
    for ledger_id in DELETED:
        await node.free(LedgerId(ledger_id))
    await node.compactor.compact(threshold=0.8)
    await outcome(node.checkpoint())


FEW = written(runs=10, size=150)


def fill():
    async def run():
        disk = new_disk()
        async with opened(disk, TINY) as node:
            await add_all(node, FEW)
        return disk

    return run_virtual(run())


FILLED = fill()


def filled_disk(seed):
    disk = copy.deepcopy(FILLED)
    disk._rng = random.Random(seed)
    return disk


def steps_of_a_day():
    async def run():
        counted = []
        disk = filled_disk(0)
        crashing = CrashingNode(disk, 0, TINY)

        async def work(node):
            await compaction_day(node)
            counted.append(crashing.faults.steps)
            crashing.faults.crash_after(1)

        await crashing.live(work)
        return counted[0]

    return run_virtual(run())


STEPS = steps_of_a_day()
PARTS = 8


@pytest.mark.covers("D37")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_crash_at_any_step_loses_nothing(part):
    """Every step once, from the start on; a second crash in what follows; then all is checked."""

    async def day(crash_at):
        disk = filled_disk(crash_at)
        for life in range(2):
            crashing = CrashingNode(disk, crash_at * 10 + life, TINY)
            rng = random.Random(crash_at)
            crashing.faults.crash_after(crash_at if life == 0 else rng.randint(1, STEPS))
            await crashing.live(quiet(compaction_day), power_lost=crash_at % 4 != 0)
        async with opened(disk, TINY, seed=crash_at) as node:
            assert node.damages == []
            for ledger_id in DELETED:
                await outcome(node.free(LedgerId(ledger_id)))
            await check(node, FEW)
            await node.compactor.compact(threshold=0.8)
            await check(node, FEW)
            assert node.compactor.unsettled == set()
            await node.compactor.compact(threshold=0.8)
            await node.checkpoint()
            assert log_bytes(disk) < live_bytes(FEW) * 1.5 + 4096

    for crash_at in range(1 + part, STEPS, PARTS):
        run_virtual(day(crash_at))


def quiet(work):
    """What a crashed process meets is of no interest."""

    async def done(node):
        try:
            await work(node)
        except TierlogError:
            await asyncio.Event().wait()

    return done


class Compacted(Model):
    """The model of ``test_crashes``, whose nodes are compacted all the time."""

    async def work(self, node):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.rng.randint(20, 80)):
                draw = self.rng.random()
                if draw < 0.78:
                    tasks.create_task(self.add(node))
                elif draw < 0.85:
                    tasks.create_task(outcome(node.checkpoint()))
                elif draw < 0.93:
                    threshold = self.rng.choice((0.3, 0.9, 1.0))
                    tasks.create_task(outcome(node.compactor.compact(threshold=threshold)))
                elif draw < 0.95:
                    tasks.create_task(self.free(node, self.rng.choice(MODEL_LEDGERS)))
                else:
                    await asyncio.sleep(self.rng.choice((0, 0.1, 40)))


@pytest.mark.covers("D47")
@pytest.mark.parametrize("batch", range(4))
def test_random_lives(batch):
    """Adds, marks, frees and compaction at once, and crashes anywhere; four lives each."""

    async def lives(seed):
        rng = random.Random(seed)
        disk, model = MemoryDisk(random.Random(seed)), Compacted(rng)
        for life in range(4):
            crashing = CrashingNode(disk, seed * 10 + life, TINY)
            crashing.faults.crash_after(rng.randint(50, 900))
            await crashing.live(model.work, power_lost=rng.random() < 0.7)
            async with opened(disk, TINY, seed=seed) as node:
                await model.check(node)
                await node.compactor.compact(threshold=1.0)
                await model.check(node)
                moved.append(node.statistics()["compaction_copied_runs"])

    moved: list[float] = []
    for seed in range(batch * 8, batch * 8 + 8):
        run_virtual(lives(seed))
    assert sum(moved) > 0


def test_several_directories():
    async def run():
        disks = [new_disk(seed) for seed in range(3)]
        runs = written()

        async def node_of():
            folders = [disk.mount() for disk in disks]
            return await open_node(folders[0], TINY, ledger_dirs=folders[1:])

        node = await node_of()
        async with running(node):
            await add_all(node, runs)
            await node.checkpoint()
            await delete_most(node)
            await node.compactor.compact(threshold=0.8)
            assert sum(map(log_bytes, disks)) < live_bytes(runs) * 1.2 + 16 * 1024
            await check(node, runs)
        for disk in disks:
            disk.crash()
        node = await node_of()
        assert node.damages == []
        async with running(node):
            await check(node, runs)

    run_virtual(run())


def test_a_stop_in_the_middle_of_compaction_still_ends_with_a_mark():
    """A write to an index that was cut short would make the last mark fail."""
    settings = TINY.model_copy(update={"ledger_cache_bytes_max": 2 * 4096})
    runs = [
        make_run(ledger, 600 * n, count=1, size=100) for n in range(12) for ledger in range(1, 9)
    ]

    async def life(steps):
        disk = new_disk()
        node = await open_node(disk.mount(), settings)
        stop = asyncio.Event()
        with capture_logs() as logs:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(node.run(stop))
                await asyncio.sleep(0)
                await add_all(node, runs)
                await node.checkpoint()
                await node.free(LedgerId(8))
                node.compactor.want()
                compacting = tasks.create_task(node.compactor.compact(threshold=1.0))
                for _ in range(steps):
                    await asyncio.sleep(0)
                is_done = compacting.done()
                stop.set()
                compacting.cancel()
        assert not [one for one in logs if one["event"] == "checkpoint.failed"]
        async with opened(disk, settings) as again:
            for run in runs:
                ledger_id = run.header.ledger_id
                if ledger_id != 8:
                    assert await read_all(again, ledger_id, run.first_entry_id) == [run]
        return is_done

    ended = [run_virtual(life(steps)) for steps in range(0, 1500, 50)]
    assert ended[-1]
    assert not ended[10]
