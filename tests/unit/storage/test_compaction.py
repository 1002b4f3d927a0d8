"""Compaction (checklist D26, D39 to D47; ADR-0014, point 6).

"Once the bookie determines that a ledger has been deleted, the ledger will be removed from the
entry log metadata and the size of the entry log reduced. If the remaining size reaches a specified
threshold, the entries of active ledgers will be copied to a new entry log file. Once all valid
entries have been copied, the old entry log file is deleted."
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.compaction_kit import NEVER, MiniNode, Store, life
from tierlog.model.errors import CorruptError, RetryableError
from tierlog_ingest.storage.compaction.compaction_plan import Rule, Rules
from tierlog_ingest.storage.compaction.throttle import TokenBucket
from tierlog_ingest.storage.entrylog.entry_log import log_path
from tierlog_ingest.storage.space import Level, SpaceLimits

LEDGERS = range(1, 11)
DELETED = range(3, 11)
"""80 % of the ledgers."""


def filled(seed=1, *, runs=10, **how):
    store = Store(seed, **how)
    store.fill(LEDGERS, runs=runs)
    return store


async def opened(store, **how):
    return await MiniNode(store, **how).open()


async def delete_most(node):
    for ledger_id in DELETED:
        await node.free(ledger_id)


@pytest.mark.covers("D39", "D47")
async def test_space_of_deleted_ledgers_comes_back():
    store = filled()
    node = await opened(store)
    before = node.logs.bytes_on_disk
    await delete_most(node)
    await node.compactor.compact(threshold=0.8)
    await node.check()
    assert node.logs.bytes_on_disk < before * 0.3
    assert node.logs.bytes_on_disk < node.live_bytes() * 1.1 + 4096
    found = node.compactor.statistics()
    assert found["compaction_copied_bytes"] == node.live_bytes()
    assert found["compaction_logs_removed"] > 5
    assert found["compaction_freed_bytes"] > found["compaction_copied_bytes"]
    assert found["compaction_logs_unsettled"] == 0
    assert node.compactor.unsettled == set()
    store.crash()
    await (await opened(store)).check()


@pytest.mark.covers("D26")
async def test_a_log_without_live_ledgers_goes_without_copying():
    store = filled()
    node = await opened(store)
    for ledger_id in LEDGERS:
        await node.free(ledger_id)
    await node.compactor.work()
    assert node.logs.logs() == []
    found = node.compactor.statistics()
    assert found["compaction_read_bytes"] == 0
    assert found["compaction_copied_bytes"] == 0
    for at, disk in enumerate(store.disks):
        assert [path for path in disk.paths() if path.startswith("logs/")] == [], at


@pytest.mark.covers("D39")
async def test_one_live_ledger_keeps_a_log_until_compaction():
    """ "A file with one live ledger would never go": without compaction, it doesn't."""
    store = filled()
    off = Rules(minor=Rule(threshold=0, interval_s=1), major=Rule(threshold=0.8, interval_s=0))
    node = await opened(store, rules=off)
    before = node.logs.bytes_on_disk
    for ledger_id in LEDGERS[1:]:
        await node.free(ledger_id)
    await asyncio.sleep(0)
    await node.compactor.work()
    kept = {log_id for log_id, ledgers in node.logs.usage.items() if 1 in ledgers}
    assert {one.log_id for one in node.logs.logs()} == kept
    await node.compactor.compact(threshold=0.2)
    assert node.logs.bytes_on_disk < before * 0.15
    await node.check()


async def test_what_was_copied_once_is_not_copied_again():
    node = await opened(filled())
    await delete_most(node)
    await node.compactor.compact(threshold=0.8)
    before = node.compactor.statistics()["compaction_copied_bytes"]
    for _ in range(3):
        await node.compactor.compact(threshold=1.0)
    assert node.compactor.statistics()["compaction_copied_bytes"] == before


async def test_batches_may_be_small():
    """A batch that is full in the middle of a log is settled, and the log goes on."""
    node = await opened(filled(), moves_max=2)
    await delete_most(node)
    await node.compactor.compact(threshold=0.8)
    await node.check()
    assert node.logs.bytes_on_disk < node.live_bytes() * 1.5


def test_a_ledger_that_is_freed_meanwhile_is_garbage_in_the_copy_too():
    async def run():
        store = filled()
        clock_rate = 20_000
        node = MiniNode(store)
        node.how["bucket"] = TokenBucket(node.clock, bytes_per_s=clock_rate)
        await node.open()
        await delete_most(node)
        async with asyncio.TaskGroup() as tasks:
            compacting = tasks.create_task(node.compactor.compact(threshold=0.8))
            await asyncio.sleep(0.8)
            assert not compacting.done()
            await node.free(1)
        await node.compactor.compact(threshold=0.8)
        await node.check()
        assert all(1 not in ledgers for ledgers in node.logs.usage.values())
        assert node.logs.bytes_on_disk < node.live_bytes() * 1.3 + 4096

    run_virtual(run())


def test_what_is_written_meanwhile_is_not_lost():
    """Runs that lie in a sealed log before the index knows them: a mark comes first."""

    async def run():
        rng = random.Random(3)
        store = filled()
        node = MiniNode(store)
        node.how["bucket"] = TokenBucket(node.clock, bytes_per_s=30_000)
        await node.open()

        async def write():
            for n in range(30):
                for ledger_id in rng.sample((1, 2, 11, 12), 2):
                    store.fill([ledger_id], runs=1)
                if n % 3 == 0:
                    await node.mark()
                await asyncio.sleep(rng.choice((0, 0.1)))

        await delete_most(node)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            for _ in range(3):
                await node.compactor.compact(threshold=0.9)
        await node.mark()
        await node.check()
        store.crash()
        await (await opened(store)).check()

    run_virtual(run())


# When


@pytest.mark.covers("D40")
def test_minor_and_major_rounds_come_by_the_clock():
    async def run():
        rules = Rules(
            minor=Rule(threshold=0.2, interval_s=3600), major=Rule(threshold=0.8, interval_s=86400)
        )
        node = await opened(filled(), rules=rules)
        for ledger_id in (3, 4, 5):
            await node.free(ledger_id)
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(node.compactor.run(interval_s=30))
            before = node.logs.bytes_on_disk
            await asyncio.sleep(3 * 3600 + 60)
            found = node.compactor.statistics()
            assert (found["compaction_rounds_minor"], found["compaction_rounds_major"]) == (3, 0)
            assert node.logs.bytes_on_disk == before, "70 % are live: not for a minor one"
            await asyncio.sleep(21 * 3600)
            assert node.compactor.statistics()["compaction_rounds_major"] == 1
            assert node.logs.bytes_on_disk < before * 0.8
            loop.cancel()
        await node.check()

    run_virtual(run())


def test_the_rate_holds():
    async def run():
        node = MiniNode(filled())
        node.how["bucket"] = TokenBucket(node.clock, bytes_per_s=5000)
        await node.open()
        await delete_most(node)
        begun_s = node.clock.monotonic_s()
        await node.compactor.compact(threshold=0.8)
        took_s = node.clock.monotonic_s() - begun_s
        found = node.compactor.statistics()
        moved = found["compaction_read_bytes"] + found["compaction_copied_bytes"]
        assert took_s >= moved / 5000 * 0.999
        assert found["compaction_throttled_s"] == pytest.approx(moved / 5000)

    run_virtual(run())


# Space


def tight(**how):
    return SpaceLimits(**{"free_bytes_min": 3000, "free_bytes_resume": 6000, **how})


def test_a_nearly_full_disk_asks_for_space_at_once():
    async def run():
        store = filled(directories=1)
        node = await opened(store, limits=tight(warn_free_share=0.0))
        await delete_most(node)
        store.disks[0].capacity_bytes = store.used_bytes + 2500
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(node.compactor.run(interval_s=10**6)),
                tasks.create_task(node.space.run(interval_s=5)),
            ]
            heard: list[Level] = []
            while not heard or heard[-1] is not Level.OK:
                await node.space.changed.wait()
                heard.append(node.space.level)
            assert heard == [Level.READ_ONLY, Level.OK]
            assert node.clock.monotonic_s() < 5, "and does not wait for the next look"
            for loop in loops:
                loop.cancel()
        assert node.compactor.statistics()["compaction_rounds_space"] > 0
        await node.check()

    run_virtual(run())


async def test_only_what_fits_is_copied():
    """The cheapest first: each frees what the next one needs."""
    store = filled(directories=1, runs=30)
    node = await opened(store, limits=tight(warn_free_share=0.0))
    for ledger_id in (4, 5, 6, 7, 8, 9, 10):
        await node.free(ledger_id)
    disk = store.disks[0]
    disk.capacity_bytes = disk.used_bytes + 2900
    assert await node.space.look() is Level.READ_ONLY
    before = node.logs.bytes_on_disk
    for _ in range(20):
        await node.compactor.work()
        if await node.space.look() is Level.OK:
            break
    assert node.space.level is Level.OK
    assert node.logs.bytes_on_disk < before
    await node.check()


async def test_a_full_disk_loses_nothing():
    """However little is left: no round breaks anything, and space that comes is used."""
    for left in (0, 100, 300, 600, 1000, 2000, 4000):
        store = filled(directories=1)
        node = await opened(store, limits=tight(warn_free_share=0.0, free_bytes_min=100))
        await delete_most(node)
        disk = store.disks[0]
        disk.capacity_bytes = disk.used_bytes + left
        await node.space.look()
        for _ in range(3):
            try:
                await node.compactor.compact(threshold=0.9)
            except RetryableError:
                await node.space.look()
        disk.capacity_bytes = 10**9
        await node.check()
        await node.compactor.compact(threshold=0.9)
        await node.check()
        assert node.logs.bytes_on_disk < node.live_bytes() * 1.1 + 4096
        await node.check_no_copies()
        store.crash()
        await (await opened(store)).check()


# Damage


def flip(disk, path, offset):
    disk._names[path].data[offset] ^= 1
    disk._names[path].durable[offset] ^= 1


async def find_run(node, ledger_id, first=0):
    """Return directory, log and offset of a run."""
    for info in node.logs.logs():
        async for window in node.logs.scan(info.log_id):
            for offset, run in window:
                if run.header.ledger_id == ledger_id and run.first_entry_id == first:
                    return info.directory, info.log_id, offset
    raise AssertionError("no such run")


async def test_a_log_with_a_damaged_live_run_is_kept():
    store = filled()
    node = await opened(store)
    await delete_most(node)
    directory, log_id, offset = await find_run(node, 1)
    flip(store.disks[directory], log_path(log_id), offset + 100)
    await node.compactor.compact(threshold=0.8)
    assert log_id in {one.log_id for one in node.logs.logs()}
    assert node.compactor.statistics()["compaction_logs_kept"] == 1
    with pytest.raises(CorruptError):
        await node.read(1, 0)
    store.runs[1] = store.runs[1][1:]
    await node.check()
    read = node.compactor.statistics()["compaction_read_bytes"]
    await node.compactor.compact(threshold=0.8)
    assert node.compactor.statistics()["compaction_read_bytes"] == read, "not again and again"
    await node.free(1)
    await node.compactor.compact(threshold=0.8)
    assert log_id not in {one.log_id for one in node.logs.logs()}, "its last reader has gone"


async def test_damage_to_what_is_dead_holds_nothing_up():
    store = filled()
    node = await opened(store)
    directory, log_id, offset = await find_run(node, 7)
    await delete_most(node)
    flip(store.disks[directory], log_path(log_id), offset + 100)
    await node.compactor.compact(threshold=0.8)
    assert log_id not in {one.log_id for one in node.logs.logs()}
    await node.check()


async def test_a_damaged_index_is_rebuilt_not_believed():
    store = filled()
    node = await opened(store)
    await delete_most(node)
    await node.mark()
    store.crash()
    for disk in store.disks:
        for path in disk.paths():
            if path.startswith("index/") and path.endswith(f"{1:016x}.idx"):
                flip(disk, path, 4096 + 30)
    node = await opened(store)
    await node.compactor.compact(threshold=0.8)
    await node.check()
    await node.compactor.compact(threshold=0.8)
    assert node.logs.bytes_on_disk < node.live_bytes() * 1.2 + 4096


async def test_a_lost_index_is_rebuilt_not_believed():
    store = filled()
    node = await opened(store)
    await delete_most(node)
    await node.mark()
    store.crash()
    for disk in store.disks:
        for path in list(disk.paths()):
            if path.endswith(f"{2:016x}.idx"):
                del disk._names[path], disk._durable_names[path]
    node = await opened(store)
    await node.compactor.compact(threshold=0.8)
    await node.check()


async def test_a_log_whose_map_is_damaged_is_scanned():
    store = filled()
    node = await opened(store)
    await delete_most(node)
    info = next(one for one in node.logs.logs() if one.sealed)
    store.crash()
    flip(store.disks[info.directory], log_path(info.log_id), info.length + 3)
    node = await opened(store)
    assert node.logs.unmapped == {info.log_id}
    node.damages.clear()
    await node.compactor.compact(threshold=0.8)
    assert info.log_id not in {one.log_id for one in node.logs.logs()}
    await node.check()


async def test_a_rebuild_meanwhile_puts_the_end_of_a_log_off():
    """Its slots may name the old place again: the log is looked through once more."""
    store = filled()
    node = await opened(store)
    await delete_most(node)
    replace = node.cache.replace
    rebuilt: list[int] = []

    async def replace_while_rebuilding(ledger_id, *args):
        if not rebuilt:
            rebuilt.append(ledger_id)
            await node.rebuild_index(ledger_id)
        return await replace(ledger_id, *args)

    node.cache.replace = replace_while_rebuilding
    before = {one.log_id for one in node.logs.logs()}
    await node.compactor.compact(threshold=0.8)
    assert node.compactor.unsettled, "and not forgotten"
    await node.check()
    await node.compactor.compact(threshold=0.0)
    await node.check()
    assert before.isdisjoint(one.log_id for one in node.logs.logs())
    assert node.compactor.unsettled == set()


# Crashes


async def compaction_day(node):
    """Delete most, then two rounds, with writing in between."""
    await delete_most(node)
    await node.compactor.compact(threshold=0.8)
    store = node.store
    if len(store.runs[1]) < 6:
        store.fill([1, 2], runs=1)
    await node.mark()
    await node.compactor.work()


def small(seed):
    store = Store(seed, directories=1 + seed % 2)
    store.fill(LEDGERS, runs=4)
    return store


def steps_of_a_day():
    async def run():
        counted = []

        async def work(node):
            await compaction_day(node)
            counted.append(node.faults.steps)

        assert not await life(small(0), work)
        return counted[0]

    return run_virtual(run())


STEPS = steps_of_a_day()


@pytest.mark.covers("D37", "D47")
@pytest.mark.parametrize("part", range(8))
def test_a_crash_at_any_step_loses_nothing_and_leaks_nothing(part):
    """Every step of the disk once; a second crash during what follows; then all is as it was."""
    assert STEPS > 300

    async def day(crash_at):
        store = small(crash_at)
        moves_max = (3, 1000)[crash_at % 3 == 0]
        first = await life(
            store, compaction_day, crash_at=crash_at, seed=crash_at, moves_max=moves_max
        )
        if first and crash_at % 2:
            rng = random.Random(crash_at)
            await life(store, compaction_day, crash_at=rng.randint(1, STEPS), seed=crash_at + 1)

        async def check(node):
            await node.check()
            await compaction_day(node)
            await node.check()
            await node.compactor.compact(threshold=0.8)
            await node.check()
            # Nothing that an interrupted round copied stays behind.
            await node.check_no_copies()
            assert node.compactor.unsettled == set()
            listed = {log_path(one.log_id) for one in node.logs.logs()}
            found = {
                path for disk in store.disks for path in disk.paths() if path.startswith("logs/")
            }
            assert found == listed

        await life(store, check, seed=crash_at)

    for crash_at in range(1 + part, STEPS, 8):
        run_virtual(day(crash_at))


async def test_these_tests_would_notice():
    """A log that goes before the index knows the copies, durably: something is lost."""
    lost = 0
    for seed in range(12):
        store = small(seed)
        node = await opened(store)
        await delete_most(node)
        flush = node.cache.flush

        async def lie():
            pass

        node.cache.flush = lie
        await node.compactor.compact(threshold=0.8)
        node.cache.flush = flush
        store.crash()
        try:
            await (await opened(store)).check()
        except (AssertionError, CorruptError):
            lost += 1
    assert lost > 0
    assert NEVER.minor.enabled
