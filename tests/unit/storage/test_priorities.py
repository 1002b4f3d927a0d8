"""Who goes to the disk first (append, tail read, compaction, catch-up read), and how fast.

"Priorities: append before tail read before compaction before catch-up read", with ageing, so that
nobody starves; compaction is "throttled by bytes/s".
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.clock import SimClock
from tierlog_ingest.storage.compaction.throttle import TokenBucket
from tierlog_ingest.storage.priorities import DiskGate, Work


def make_gate(*, width=1, age_s=1.0):
    return DiskGate(SimClock(), width=width, age_s=age_s)


async def use(gate, work, seconds, done, name=None):
    async with gate.turn(work):
        await asyncio.sleep(seconds)
    done.append(name if name is not None else work)


def test_of_those_that_wait_the_lowest_rank_goes_first():
    async def run():
        done: list[object] = []
        gate = make_gate()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(use(gate, Work.CATCH_UP_READ, 0.5, done, "first"))
            await asyncio.sleep(0.1)
            for work in (Work.CATCH_UP_READ, Work.COMPACTION, Work.TAIL_READ, Work.APPEND):
                tasks.create_task(use(gate, work, 0.01, done))
                await asyncio.sleep(0.01)
        assert done == ["first", *Work]
        assert gate.statistics()["disk_turns_taken"] == 0
        assert gate.waiting == 0

    run_virtual(run())


def test_within_a_rank_the_first_goes_first():
    async def run():
        done: list[object] = []
        gate = make_gate()
        async with asyncio.TaskGroup() as tasks:
            for name in range(20):
                tasks.create_task(use(gate, Work.TAIL_READ, 0.1, done, name))
        assert done == list(range(20))

    run_virtual(run())


@pytest.mark.parametrize("work", [Work.TAIL_READ, Work.COMPACTION, Work.CATCH_UP_READ])
def test_nothing_starves(work):
    """Appends keep the disk busy without a gap; everything else still comes to its turn."""

    async def appends(gate):
        while True:
            await use(gate, Work.APPEND, 0.3, [])

    async def run():
        gate = make_gate(age_s=1.0)
        clock = SimClock()
        async with asyncio.TaskGroup() as tasks:
            busy = [tasks.create_task(appends(gate)) for _ in range(4)]
            await asyncio.sleep(1)
            asked_s = clock.monotonic_s()
            await use(gate, work, 0.0, [])
            waited_s = clock.monotonic_s() - asked_s
            for task in busy:
                task.cancel()
        # Its age, and what was due before: one append of each of the four, and the one under way.
        assert work * 1.0 <= waited_s + 0.3
        assert waited_s <= work * 1.0 + 5 * 0.3 + 1e-6

    run_virtual(run())


@pytest.mark.parametrize("seed", range(20))
def test_what_is_owed_is_paid_whoever_goes(seed):
    """Never more turns than the width, none lost to cancellation, nobody left waiting."""

    async def run():
        rng = random.Random(seed)
        width = rng.randint(1, 3)
        gate = make_gate(width=width, age_s=0.2)
        inside = 0

        async def one(work):
            nonlocal inside
            async with gate.turn(work):
                inside += 1
                try:
                    assert inside <= width
                    await asyncio.sleep(rng.choice((0, 0.01, 0.3)))
                finally:
                    inside -= 1

        async with asyncio.TaskGroup() as tasks:
            made = []
            for _ in range(100):
                made.append(tasks.create_task(one(rng.choice(list(Work)))))
                if rng.random() < 0.3:
                    rng.choice(made).cancel()
                await asyncio.sleep(rng.choice((0, 0, 0.01)))
        assert gate.waiting == 0
        assert gate.statistics()["disk_turns_taken"] == 0
        await asyncio.wait_for(one(Work.CATCH_UP_READ), 1)

    run_virtual(run())


def test_a_turn_that_was_given_to_a_cancelled_one_goes_on():
    async def run():
        gate = make_gate()
        done: list[object] = []
        async with asyncio.TaskGroup() as tasks:
            await gate.take(Work.APPEND)
            gone = tasks.create_task(use(gate, Work.APPEND, 0, done, "gone"))
            next_one = tasks.create_task(use(gate, Work.COMPACTION, 0, done, "next"))
            await asyncio.sleep(0)
            gate.give_back()
            gone.cancel()
            await next_one
        assert done == ["next"]

    run_virtual(run())


@pytest.mark.covers("A02")
@pytest.mark.parametrize("work", Work)
def test_waiting_shows_in_the_metrics_of_its_kind_of_work_alone(work):
    async def run():
        gate = make_gate()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(use(gate, work, 2.0, []))
        found = gate.statistics()
        for other in Work:
            name = f"disk_{other.name.lower()}"
            assert found[f"{name}_turns"] == (2 if other is work else 0)
            assert found[f"{name}_wait_s"] == pytest.approx(2 if other is work else 0)
            assert found[f"{name}_wait_s_max"] == pytest.approx(2 if other is work else 0)
        assert "taken=0 of 1" in repr(gate)

    run_virtual(run())


@pytest.mark.parametrize("takes", [[1000] * 50, [1] * 300, [64_000], [10, 5000, 0, 7]])
def test_so_many_bytes_a_second(takes):
    async def run():
        clock = SimClock()
        bucket = TokenBucket(clock, bytes_per_s=1000)
        for count in takes:
            await bucket.take(count)
        assert clock.monotonic_s() == pytest.approx(sum(takes) / 1000)
        assert bucket.waited_s == pytest.approx(sum(takes) / 1000)

    run_virtual(run())


def test_a_burst_is_saved_up_and_no_more():
    async def run():
        clock = SimClock()
        bucket = TokenBucket(clock, bytes_per_s=1000, burst_bytes=500)
        await bucket.take(500)
        assert clock.monotonic_s() == 0
        await bucket.take(100)
        assert clock.monotonic_s() == pytest.approx(0.1)
        await asyncio.sleep(1000)
        before_s = clock.monotonic_s()
        await bucket.take(500)
        await bucket.take(1000)
        assert clock.monotonic_s() - before_s == pytest.approx(1.0)

    run_virtual(run())


def test_several_share_the_rate():
    async def run():
        clock = SimClock()
        bucket = TokenBucket(clock, bytes_per_s=1000)

        async def taker():
            for _ in range(10):
                await bucket.take(100)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(taker())
        assert clock.monotonic_s() == pytest.approx(5.0)

    run_virtual(run())
