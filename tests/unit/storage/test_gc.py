"""Garbage collection (protocols.md section 1, "Delete"; BookKeeper's flat collector, seeds/003).

"A snapshot of the ledgers it holds first, then sync() and list, then confirms each candidate by a
read of its own, then quarantines before it frees, and stops with an alarm above a share of its
ledgers. Never on an error or an empty answer."
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.catalog.world import NODE, Process, World, backup_of, one_node, put_back
from tests.unit.storage.node_kit import CrashingNode, make_run, opened, outcome, read_all
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import FaultRates
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.format import paths
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import LedgerId
from tierlog_ingest.storage.gc import (
    FEW_LEDGERS,
    Alarm,
    CatalogLedgers,
    GarbageCollector,
    decide,
)
from tierlog_ingest.storage.seen_ids import NOTHING_SEEN, SeenIds, judged, trusting

pytestmark = pytest.mark.covers("D58", "D59")


class Ledgers:
    """The metadata store's side, with switches."""

    def __init__(self, living):
        self.living = set(living)
        self.hidden = set()
        self.recorded = set()
        self.fails = False
        self.next = 10**6
        self.tallied = -1
        self.counter_fails = False
        self.noted_behind = False
        self.on_list = lambda: None
        self.forgotten = []

    async def list_ids(self):
        self._check()
        found = sorted(self.living - self.hidden)
        self.on_list()
        return found

    async def get(self, ledger_id):
        self._check()
        return ledger_id if ledger_id in self.living else None

    async def next_id(self):
        self._check()
        if self.counter_fails:
            raise RetryableError("no answer", remedy="wait")
        return self.next

    async def tally(self):
        self._check()
        return self.tallied

    async def count(self):
        self._check()
        self.tallied += 1
        return self.tallied

    async def note_behind(self):
        self._check()
        self.noted_behind = True

    async def deletion_on_record(self, ledger_id):
        self._check()
        return ledger_id in self.recorded

    async def forget_deletions(self, *, before_ms):
        self._check()
        self.forgotten.append(before_ms)

    def _check(self):
        if self.fails:
            raise RetryableError("no answer", remedy="wait")


def collecting(test):
    def run():
        async def with_node():
            async with opened(MemoryDisk(random.Random(1))) as node:
                ledgers = Ledgers(range(1, 21))
                for ledger_id in range(1, 21):
                    await node.add(make_run(ledger_id, 0))
                collector = GarbageCollector(
                    node, ledgers, SimClock(), share_max=0.5, quarantine_s=10
                )
                await test(node, ledgers, collector)

        run_virtual(with_node(), until_s=10_000)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@collecting
async def test_a_deleted_ledger_goes_after_its_quarantine(node, ledgers, collector):
    ledgers.living -= {3}
    assert await collector.collect() == []
    assert (await outcome(read_all(node, 3))).reason is Reason.UNKNOWN
    await asyncio.sleep(5)
    assert await collector.collect() == []
    await asyncio.sleep(6)
    assert await collector.collect() == [3]
    assert (await outcome(read_all(node, 3))).reason is Reason.LEDGER_NOT_FOUND
    assert await collector.collect() == []
    assert len(await node.list_ledgers()) == 19


@collecting
async def test_a_ledger_that_comes_back_is_served_again(node, ledgers, collector):
    ledgers.living -= {3}
    await collector.collect()
    ledgers.living |= {3}
    await asyncio.sleep(100)
    assert await collector.collect() == []
    assert len(await read_all(node, 3)) == 1


@collecting
async def test_a_list_that_lacks_a_ledger_proves_nothing(node, ledgers, collector):
    ledgers.hidden = {3}
    for _ in range(4):
        assert await collector.collect() == []
        await asyncio.sleep(100)
    assert len(await read_all(node, 3)) == 1


@collecting
async def test_never_on_an_error_nor_on_an_empty_answer(node, ledgers, collector):
    ledgers.living -= {3}
    await collector.collect()
    await asyncio.sleep(100)
    ledgers.fails = True
    assert isinstance(await outcome(collector.collect()), RetryableError)
    ledgers.fails = False
    living, ledgers.living = ledgers.living, set()
    assert await collector.collect() == []
    assert collector.alarm is Alarm.EMPTY_LIST
    ledgers.living = living
    assert len(await node.list_ledgers()) == 20
    assert await collector.collect() == [3]
    assert collector.alarm is None


@collecting
async def test_too_many_at_once_stop_with_an_alarm(node, ledgers, collector):
    gone = set(range(1, 13))
    ledgers.living -= gone
    for _ in range(3):
        assert await collector.collect() == []
        assert collector.alarm is Alarm.TOO_MANY
        await asyncio.sleep(100)
    ledgers.recorded = set(range(1, 8))
    await collector.collect()
    assert collector.alarm is None, "their deletion is on record"
    await asyncio.sleep(100)
    assert set(await collector.collect()) == gone


@collecting
async def test_fences_of_ledgers_that_never_had_an_entry_stop_nothing_and_excuse_nothing(
    node, ledgers, collector
):
    fences = set(range(100, 150))
    for ledger_id in fences:
        await node.fence(ledger_id)
    assert (await collector.collect(), collector.alarm) == ([], None)
    ledgers.living -= set(range(1, 13))
    await asyncio.sleep(100)
    assert await collector.collect() == []
    assert collector.alarm is Alarm.TOO_MANY, "twelve of twenty, whatever else is fenced"
    ledgers.living |= set(range(1, 13))
    assert set(await collector.collect()) == fences
    for ledger_id in fences:
        assert (await outcome(node.add(make_run(ledger_id, 0)))).reason is Reason.FENCED


@collecting
async def test_a_store_from_an_older_backup_stops_it(node, ledgers, collector):
    await collector.collect()
    ledgers.living -= {20}
    ledgers.next = 15
    for _ in range(3):
        assert await collector.collect() == []
        assert collector.alarm is Alarm.OLD_BACKUP
        await asyncio.sleep(100)
    assert len(await read_all(node, 20)) == 1
    ledgers.next = 2 * 10**6
    ledgers.tallied += 10
    ledgers.recorded = {20}
    for _ in range(3):
        assert await collector.collect() == []
        assert collector.alarm is Alarm.OLD_BACKUP, "it does not wear off"
        await asyncio.sleep(100)
    assert "tierlog node trust-metadata" in collector.alarm.message
    assert "newer metadata" in collector.alarm.message


@collecting
async def test_a_ledger_held_above_the_counter_is_enough(node, ledgers, collector):
    ledgers.next = 20
    assert await collector.collect() == []
    assert collector.alarm is Alarm.OLD_BACKUP


@collecting
async def test_ids_that_went_on_meanwhile_hide_no_backup(node, ledgers, collector):
    ledgers.next = 21
    await collector.collect()
    ledgers.next = 22
    await collector.collect()
    assert (collector.alarm, ledgers.tallied) == (None, 1)
    ledgers.living -= {3}
    ledgers.next, ledgers.tallied = 50, 0
    for _ in range(3):
        assert await collector.collect() == []
        assert collector.alarm is Alarm.OLD_BACKUP
        await asyncio.sleep(100)
    assert ledgers.tallied == 0, "a node that distrusts the store leaves its tally as it is"


@collecting
async def test_a_tally_is_written_when_ids_went_on_and_only_then(node, ledgers, collector):
    for _ in range(3):
        await collector.collect()
        assert ledgers.tallied == 0
    ledgers.next += 1
    for _ in range(3):
        await collector.collect()
        assert ledgers.tallied == 1
    # An answer that was lost leaves the store ahead, and that is no harm.
    ledgers.tallied += 1
    ledgers.living -= {3}
    await collector.collect()
    await asyncio.sleep(100)
    assert await collector.collect() == [3]


@collecting
async def test_what_was_in_quarantine_is_served_again_once_the_store_is_in_doubt(
    node, ledgers, collector
):
    ledgers.living -= {3}
    await collector.collect()
    assert (await outcome(read_all(node, 3))).reason is Reason.UNKNOWN
    ledgers.next = 15
    await collector.collect()
    assert len(await read_all(node, 3)) == 1
    assert not collector.quarantined


@collecting
async def test_a_counter_that_can_not_be_read_frees_nothing(node, ledgers, collector):
    ledgers.living -= {3}
    await collector.collect()
    await asyncio.sleep(100)
    ledgers.counter_fails = True
    for _ in range(3):
        assert isinstance(await outcome(collector.collect()), RetryableError)
        assert not node.is_freed(3)
    ledgers.counter_fails = False
    assert await collector.collect() == [3]


async def rounds(process, node):
    ledgers = CatalogLedgers(process.catalog, NODE)
    collector = GarbageCollector(node, ledgers, SimClock(), share_max=1, quarantine_s=10)
    freed = []
    for _ in range(4):
        freed += await collector.collect()
        await asyncio.sleep(11)
    return freed, collector.alarm


@pytest.mark.parametrize("then", ["nothing", "ids-go-on", "base-raised", "empty"])
def test_no_ledger_that_only_a_lost_store_knew_is_freed_before_an_operator_says_so(then):
    async def main():
        world = World()
        process = world.process()
        nodes, bare = process.catalog.nodes, process.catalog.bare
        await nodes.ensure_cluster()
        disk, empty = MemoryDisk(random.Random(1)), backup_of(World().server)

        old = [await bare.create(one_node()) for _ in range(3)]
        async with opened(disk) as node:
            backup = backup_of(world.server)
            young = [await bare.create(one_node()) for _ in range(3)]
            for ledger_id in (*old, *young):
                await node.add(make_run(ledger_id, 0))
            assert await rounds(process, node) == ([], None)
            put_back(world.server, empty if then == "empty" else backup)
            if then == "ids-go-on":
                for _ in range(9):
                    again = await bare.create(one_node())
                    if again in young:
                        await bare.delete(again)
            elif then == "base-raised":
                await nodes.ensure_cluster(ledger_id_base=1000)
            assert await rounds(process, node) == ([], Alarm.OLD_BACKUP)
            assert await process.catalog.scrubs.is_restored(), "nor does a scrub that is not asked"
        put_back(world.server, backup)
        await nodes.ensure_cluster(ledger_id_base=2000)
        for _ in range(2):
            async with opened(disk) as node:
                assert node.seen_ids.behind
                assert await rounds(process, node) == ([], Alarm.OLD_BACKUP)
                assert [len(await read_all(node, one)) for one in (*old, *young)] == [1] * 6
        async with opened(disk) as node:
            await node.keep_seen_ids(trusting(node.seen_ids, await node.list_ledgers()))
        async with opened(disk) as node:
            assert await rounds(process, node) == (young, None)
            assert await node.list_ledgers() == old
            put_back(world.server, backup)
            assert await rounds(process, node) == ([], Alarm.OLD_BACKUP), "a second time"

    run_virtual(main(), until_s=10_000)


def test_a_node_that_is_in_doubt_leaves_the_mark_in_whatever_takes_the_place_of_the_store():
    """In another backup it is not, nor where a release that left none found the store behind."""

    async def main():
        world = World()
        process = world.process()
        bare, scrubs = process.catalog.bare, process.catalog.scrubs
        await process.catalog.nodes.ensure_cluster()
        old = backup_of(world.server)
        async with opened(MemoryDisk(random.Random(1))) as node:
            await node.add(make_run(await bare.create(one_node()), 0))
            newer = backup_of(world.server)
            await bare.create(one_node())
            assert await rounds(process, node) == ([], None)
            for backup in (old, newer):
                put_back(world.server, backup)
                assert not await scrubs.is_restored()
                assert await rounds(process, node) == ([], Alarm.OLD_BACKUP)
                assert await scrubs.is_restored()

    run_virtual(main(), until_s=10_000)


def test_looking_takes_no_id():
    async def main():
        process = World().process()
        await process.catalog.nodes.ensure_cluster()
        first = await process.catalog.ledgers.new_id()
        async with opened(MemoryDisk(random.Random(1))) as node:
            ledgers = CatalogLedgers(process.catalog, NODE)
            collector = GarbageCollector(node, ledgers, SimClock(), share_max=0.5, quarantine_s=10)
            await node.add(make_run(first, 0))
            for _ in range(5):
                await collector.collect()
        assert await process.catalog.ledgers.new_id() == first + 1

    run_virtual(main(), until_s=10_000)


@pytest.mark.parametrize("seed", range(30))
def test_a_store_that_loses_answers_and_a_node_that_crashes_are_never_taken_for_a_backup(seed):
    async def main():
        world, disk, alive = World(), MemoryDisk(random.Random(seed)), []
        maker, process = world.process(), Process(world.server, seed)
        await maker.catalog.nodes.ensure_cluster()
        lossy = FaultRates(refused=0.1, request_lost=0.2, reply_lost=0.3)
        process.faults.rates_by_prefix = {"metadata.set": lossy, "metadata.create": lossy}
        rng = random.Random(seed)
        for life in range(4):
            crashing = CrashingNode(disk, seed + life)

            async def work(node, crashing=crashing):
                collector = GarbageCollector(
                    node,
                    CatalogLedgers(process.catalog, NODE),
                    SimClock(),
                    share_max=1,
                    quarantine_s=10,
                )
                crashing.faults.crash_after(rng.randrange(10, 300))
                while True:
                    made = await maker.catalog.bare.create(one_node())
                    await node.add(make_run(made, 0))
                    await outcome(collector.collect())
                    assert collector.alarm is None
                    alive.append(node.seen_ids.tally)

            await crashing.live(work)
        assert max(alive) > 1, "nothing was tried"

    run_virtual(main(), until_s=10_000)


@collecting
async def test_a_ledger_made_after_the_snapshot_is_no_candidate(node, ledgers, collector):
    def make():
        ledgers.on_list = lambda: None
        node.add(make_run(99, 0))

    ledgers.on_list = make
    for _ in range(2):
        await collector.collect()
        assert 99 not in collector.quarantined
        ledgers.living |= {99}
        await asyncio.sleep(100)


@collecting
async def test_the_loop_goes_on_after_errors(node, ledgers, collector):
    ledgers.fails = True
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(collector.run(interval_s=5))
        await asyncio.sleep(22)
        ledgers.fails = False
        ledgers.living -= {4}
        await asyncio.sleep(30)
        running.cancel()
    assert 4 not in await node.list_ledgers()


@collecting
async def test_records_of_deletions_are_dropped_once_a_day_and_only_old_ones(
    node, ledgers, collector
):
    clock = SimClock()
    collector = GarbageCollector(node, ledgers, clock, share_max=0.5, quarantine_s=10)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(collector.run(interval_s=1))
        await asyncio.sleep(0.5)
        for hour in range(1, 72):
            assert len(ledgers.forgotten) == (hour - 1) // 24
            clock.advance(3600)
            await asyncio.sleep(1)
        running.cancel()
    now_ms = clock.wall_ms()
    assert all(now_ms - one > 30 * 24 * 3600 * 1000 for one in ledgers.forgotten)


@pytest.mark.parametrize("in_order", [True, False])
def test_many_bare_ledgers_that_were_deleted_go_and_many_that_vanished_do_not(in_order):
    async def main():
        process = World().process()
        bare = process.catalog.bare
        await process.catalog.nodes.ensure_cluster()
        kept, *deleted = [await bare.create(one_node()) for _ in range(21)]
        async with opened(MemoryDisk(random.Random(1))) as node:
            for ledger_id in (kept, *deleted):
                await node.add(make_run(ledger_id, 0))
            collector = GarbageCollector(
                node,
                CatalogLedgers(process.catalog, NODE),
                SimClock(),
                share_max=0.5,
                quarantine_s=10,
            )
            assert await collector.collect() == []
            assert collector.alarm is None
            for ledger_id in deleted:
                if in_order:
                    await bare.delete(ledger_id)
                else:
                    await process.client.delete(paths.ledger_path(ledger_id), version=-1)
            assert await collector.collect() == []
            await asyncio.sleep(11)
            assert await collector.collect() == (deleted if in_order else [])
            assert collector.alarm is (None if in_order else Alarm.TOO_MANY)
            assert len(await read_all(node, kept)) == 1

    run_virtual(main(), until_s=10_000)


def test_what_was_found_stands_and_ledgers_from_before_an_operators_word_prove_nothing():
    found = judged(NOTHING_SEEN, [30], next_id=12, tally=-1)
    assert (found.behind_at, found.next_id) == (12, 31)
    assert judged(found, [30], next_id=1000, tally=9) == found
    trusted = trusting(found, [30])
    assert trusted == SeenIds(trusted_to=30)
    assert judged(trusted, [30], next_id=12, tally=-1) == trusted
    assert judged(trusted, [31], next_id=12, tally=-1).behind


@given(st.lists(st.sampled_from(["give", "look", "back up", "put back"]), max_size=30))
def test_forgotten_ids_are_noticed_however_many_were_given_since(steps):
    next_id, tally, seen = 0, -1, NOTHING_SEEN
    backup, is_put_back, is_forgotten = (next_id, tally), False, False
    for step in [*steps, "look"]:
        if step == "give":
            next_id += 1
        elif step == "back up":
            backup = next_id, tally
        elif step == "put back":
            next_id, tally = backup
            is_put_back, is_forgotten = True, is_forgotten or next_id < seen.next_id
        else:
            seen = judged(seen, (), next_id=next_id, tally=tally)
            if not seen.behind and next_id > seen.next_id:
                tally += 1
                seen = replace(seen, next_id=next_id, tally=tally)
        assert is_put_back or not seen.behind
    assert seen.behind or not is_forgotten


ids = st.frozensets(st.integers(1, 40).map(LedgerId))


@given(ids, ids, ids, st.floats(0.01, 1))
def test_decisions(held, living, accounted_for, share_max):
    decision = decide(held, living, accounted_for=accounted_for, share_max=share_max)
    assert set(decision.candidates) <= held - living
    if decision.alarm is not None:
        assert decision.candidates == ()
        assert held - living
    else:
        assert set(decision.candidates) == held - living
        fresh = held - living - accounted_for
        assert len(fresh) <= max(FEW_LEDGERS, share_max * len(held))
    if not living:
        assert decision.candidates == ()
