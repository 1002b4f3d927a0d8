"""Crashes of the storage node at every step of its disk (protocols.md section 2).

"An acknowledged entry is never lost": what was answered before a crash is there after it, the
same bytes; fences and freed ids hold; nothing is there that nobody sent; and an honest disk's
crash is never reported as corruption. The disk loses names and sectors as it may.
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import SMALL, CrashingNode, make_run, opened, outcome, read_all
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import Reason, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog_ingest.storage.entrylog.entry_log import EntryLogs
from tierlog_ingest.storage.index.ledger_cache import LedgerCache
from tierlog_ingest.storage.journal.journal import GroupFuture, Journal
from tierlog_ingest.storage.marking import Marks

pytestmark = pytest.mark.covers("D03", "D22", "D35", "D37")

LEDGERS = (1, 2, 3, 4, 5, 6)


class Model:
    """What was sent, what was answered."""

    def __init__(self, rng):
        self.rng = rng
        self.sent = {}
        self.stored = {}
        self.next = dict.fromkeys(LEDGERS, 0)
        self.fenced = set()
        self.maybe_fenced = set()
        self.freed = set()
        self.maybe_freed = set()

    async def work(self, node):
        """Do things until the crash."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.rng.randint(5, 60)):
                draw = self.rng.random()
                if draw < 0.85:
                    tasks.create_task(self.add(node))
                elif draw < 0.90:
                    tasks.create_task(outcome(node.checkpoint()))
                elif draw < 0.94:
                    tasks.create_task(self.fence(node, self.rng.choice(LEDGERS)))
                elif draw < 0.95:
                    tasks.create_task(self.free(node, self.rng.choice(LEDGERS)))
                else:
                    await asyncio.sleep(self.rng.choice((0, 0.1, 40)))

    async def add(self, node):
        ledger_id = self.rng.choice(LEDGERS)
        again = [key for key in self.sent if key[0] == ledger_id]
        if again and self.rng.random() < 0.1:
            run = self.sent[self.rng.choice(again)]
        else:
            count, size = self.rng.randint(1, 4), self.rng.choice((0, 10, 600, 3000))
            run = make_run(ledger_id, self.next[ledger_id], count=count, size=size)
            self.next[ledger_id] += count + self.rng.choice((0, 0, 0, 5))
        key = (ledger_id, run.first_entry_id)
        self.sent[key] = run
        recovery = ledger_id in self.maybe_fenced
        if await outcome(node.add(run, recovery=recovery)) is None:
            self.stored[key] = run

    async def fence(self, node, ledger_id):
        self.maybe_fenced.add(ledger_id)
        if not isinstance(await outcome(node.fence(LedgerId(ledger_id))), TierlogError):
            self.fenced.add(ledger_id)

    async def free(self, node, ledger_id):
        self.maybe_freed.add(ledger_id)
        if await outcome(node.free(LedgerId(ledger_id))) is None:
            self.freed.add(ledger_id)

    async def check(self, node):
        """Compare a node that was opened after the crash with what is known."""
        assert node.damages == []
        for ledger_id in LEDGERS:
            fence = await outcome(node.fence(LedgerId(ledger_id)))
            gone = isinstance(fence, RefusedError) and fence.reason is Reason.LEDGER_NOT_FOUND
            if gone:
                assert ledger_id in self.maybe_freed
                self.freed.add(ledger_id)
                continue
            assert ledger_id not in self.freed
            self.fenced.add(ledger_id)
            self.maybe_fenced.add(ledger_id)
            for key, run in self.sent.items():
                if key[0] != ledger_id:
                    continue
                found = await outcome(read_all(node, ledger_id, key[1], bytes_max=1))
                if key in self.stored:
                    assert found == [run], f"{run} was acknowledged and is lost: {found}"
                else:
                    absent = isinstance(found, RefusedError)
                    assert absent or found == [run]
                    if not absent:
                        self.stored[key] = run
            last = fence.last_entry_id
            beyond = await outcome(read_all(node, ledger_id, last + 1, bytes_max=1))
            assert beyond.reason is Reason.NO_SUCH_ENTRY

    async def check_fences(self, node):
        """Fences hold without being asked for again."""
        for ledger_id in self.fenced | self.freed:
            error = await outcome(node.add(make_run(ledger_id, 10**6)))
            assert error.reason is Reason.FENCED


async def lives(seed, *, disk=None):
    rng = random.Random(seed)
    disk = disk or MemoryDisk(random.Random(seed))
    model = Model(rng)
    for life in range(4):
        crashing = CrashingNode(disk, seed * 10 + life)
        crashing.faults.crash_after(rng.randint(1, 250))
        await crashing.live(model.work, power_lost=rng.random() < 0.7)
        if rng.random() < 0.5:
            # The next start may crash too, before it serves anything.
            again = CrashingNode(disk, seed)
            again.faults.crash_after(rng.randint(1, 60))
            await again.live(lambda _node: asyncio.sleep(0), power_lost=rng.random() < 0.7)
        async with opened(disk, seed=seed) as node:
            await model.check_fences(node)
            await model.check(node)
    return model


@pytest.mark.parametrize("batch", range(10))
def test_random_lives(batch):
    stored = 0
    for seed in range(batch * 20, batch * 20 + 20):
        try:
            model = run_virtual(lives(seed), until_s=10_000)
        except BaseException:
            print(f"seed {seed}")
            raise
        stored += len(model.stored)
    assert stored > 300


def test_a_power_cut_while_starting_after_a_kill():
    """Replay once acted on records that only the system's cache had."""
    run_virtual(lives(1222), until_s=10_000)


async def scenario(node, model):
    """Add, roll, checkpoint, fence, free: in a fixed order."""
    for first in range(6):
        await model.add_one(node, 1, first, 3000)
    await node.checkpoint()
    model.checkpoints += 1
    await asyncio.sleep(1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.checkpoint())
        for first in range(6):
            tasks.create_task(model.add_one(node, 2, first, 2000))
    await model.fence(node, 1)
    await model.add_one(node, 3, 0, 10)
    await model.free(node, 3)
    for first in range(6, 12):
        await model.add_one(node, 2, first, 9000)
    await node.checkpoint()


class Fixed(Model):
    def __init__(self):
        super().__init__(random.Random(0))
        self.checkpoints = 0

    async def add_one(self, node, ledger_id, first, size):
        run = self.sent[ledger_id, first] = make_run(ledger_id, first, size=size)
        if await outcome(node.add(run)) is None:
            self.stored[ledger_id, first] = run


async def crash_at(step, seed, *, power_lost):
    disk, model = MemoryDisk(random.Random(seed)), Fixed()
    crashing = CrashingNode(disk, seed)
    crashing.faults.crash_after(step)
    finished = False

    async def work(node):
        nonlocal finished
        await scenario(node, model)
        finished = True
        crashing.crashed.set()

    await crashing.live(work, power_lost=power_lost)
    async with opened(disk) as node:
        await model.check_fences(node)
        await model.check(node)
    return finished


@pytest.mark.parametrize("power_lost", [True, False])
def test_a_crash_at_every_step(power_lost):
    step = 0
    finished = False
    while not finished:
        step += 1
        finished = run_virtual(crash_at(step, step, power_lost=power_lost), until_s=10_000)
    assert step > 150


def _lost_in_some_life(seeds=60):
    for seed in range(seeds):
        try:
            run_virtual(lives(seed), until_s=10_000)
        except (AssertionError, BaseExceptionGroup):
            return True
    return False


class TestTheseTestsBite:
    """Each way of cheating is found by the tests above."""

    def test_answers_before_the_sync(self, monkeypatch):
        real = Journal.append

        def append(self, kind, payload):
            appended = real(self, kind, payload)
            answer = GroupFuture()
            answer.set_result(None)
            return appended._replace(done=answer)

        monkeypatch.setattr(Journal, "append", append)
        assert _lost_in_some_life()

    def test_a_disk_that_lies(self):
        lost = False
        for seed in range(30):
            disk = MemoryDisk(random.Random(seed))
            disk.lying_syncs = True
            try:
                run_virtual(lives(seed, disk=disk), until_s=10_000)
            except (AssertionError, BaseExceptionGroup, FileNotFoundError, TierlogError):
                lost = True
        assert lost

    def test_no_sync_of_directories(self, monkeypatch):
        monkeypatch.setattr(MemoryDisk, "sync_directory", lambda _self, _directory: None)
        assert _lost_in_some_life()

    def test_no_sync_of_entry_logs_at_marks(self, monkeypatch):
        async def sync(self):
            await self._seal_full()
            for log in self._logs.values():
                log.end_sync(log.begin_sync())

        monkeypatch.setattr(EntryLogs, "sync", sync)
        assert _lost_in_some_life()

    def test_no_flush_of_the_index_at_some_marks(self, monkeypatch):
        """At none: then there is no index, and that is found and repaired."""
        real = LedgerCache.flush
        turns = itertools.cycle((True, False))

        async def flush(self):
            if next(turns):
                await real(self)

        monkeypatch.setattr(LedgerCache, "flush", flush)
        assert _lost_in_some_life()

    def test_the_mark_before_the_flush(self, monkeypatch):
        real = Marks.flush

        async def flush(self, durable_seq):
            await self._write(self._journal.durable_position, self._fences.fenced)
            await self._journal.release_before(self._journal.segment_id)
            await real(self, durable_seq)

        monkeypatch.setattr(Marks, "flush", flush)
        assert _lost_in_some_life()

    def test_a_mark_behind_what_was_flushed(self, monkeypatch):
        real = Marks.flush

        async def flush(self, durable_seq):
            await real(self, durable_seq - 1)

        monkeypatch.setattr(Marks, "flush", flush)
        assert _lost_in_some_life()


def test_disk_full_at_random_times():
    for seed in range(30):
        run_virtual(_full_lives(seed), until_s=10_000)


async def _full_lives(seed):
    rng = random.Random(seed)
    disk = MemoryDisk(random.Random(seed), capacity_bytes=rng.randint(20_000, 90_000))
    model = Model(rng)
    for life in range(3):
        disk.capacity_bytes = disk.used_bytes + rng.randint(20_000, 60_000)
        crashing = CrashingNode(disk, seed * 10 + life)
        crashing.faults.crash_after(rng.randint(50, 300))

        async def work(node):
            for _ in range(4):
                await model.work(node)
                disk.capacity_bytes += rng.choice((0, 0, 50_000))
                await asyncio.sleep(rng.choice((1, 20)))

        try:
            await crashing.live(work, power_lost=rng.random() < 0.7)
        except* TierlogError:
            disk.crash()  # the start found no space
        disk.capacity_bytes = 10**9
        async with opened(disk, SMALL, seed=seed) as node:
            await model.check_fences(node)
            await model.check(node)
            await node.add(make_run(7, life * 10), recovery=True)
            assert len(await read_all(node, 7, life * 10, last_entry_id=EntryId(10**6))) == 1
