"""A back-fill takes what has no copy, and is patient with whoever is at work on the same ledger.

Must hold: whoever is told that a ledger is done finds it complete, however many try at once; in
the end the bucket holds what the metadata name, and nothing else.
"""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tests.unit.offloader.test_worker import ENTRIES, check_whole, sweep
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.catalog.election import CourtesyLock
from tierlog.format import paths
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadState
from tierlog.model.stream import ListedLedger, OffloadPause, StreamLifecycle
from tierlog.runtime.settings import Settings
from tierlog_spark.jobs import bulk_offload
from tierlog_spark.jobs.bulk_offload import (
    BackFill,
    Patience,
    count_complete,
    plan_streams,
    throttled,
)
from tierlog_spark.jobs.frame import JobRun, Unread
from tierlog_spark.jobs.offload_plan import OffloadItem, Outcome, best, sealed, wanting

SLOW = FaultRates(delay_s_max=0.2)


async def made(count: int = 1) -> tuple[World, list[OffloadItem]]:
    world = World()
    claimed = await world.stream()
    for _ in range(count):
        await world.seal(claimed, ENTRIES)
    snapshot = await world.catalog().streams.snapshot(STREAM)
    return world, list(sealed(snapshot.stream, snapshot.ledgers))


def patience(world: World, faults: Faults | None = None, *, wait_s_max: float = 100) -> Patience:
    return Patience(world.worker(faults), world.clock, world.ids, wait_s_max=wait_s_max)


def test_what_is_sealed_and_has_no_complete_copy_is_taken():
    async def main():
        world, items = await made(4)
        claimed = await world.catalog().streams.get(STREAM)
        await world.seal(claimed, ENTRIES, close=False)
        done = await patience(world).offload(items[0])
        assert (done.outcome, done.bytes > 0) == ("completed", True)
        snapshot = await world.catalog().streams.snapshot(STREAM)
        found = list(sealed(snapshot.stream, snapshot.ledgers))
        assert found == items, "an open ledger is not sealed"
        contexts = {one.ledger_id: await world.context(one.ledger_id) for one in items[:3]}
        assert wanting(items, contexts) == items[1:3], "one without a context is left alone"
        stream = snapshot.stream
        for other in (
            replace(stream, offload_pause=OffloadPause(since_ms=1)),
            replace(stream, lifecycle=StreamLifecycle.DELETING),
        ):
            assert list(sealed(other, snapshot.ledgers)) == []
        ages = [replace(one, closed_ms=number) for number, one in enumerate(snapshot.ledgers)]
        old = sealed(stream, ages, closed_before_ms=2)
        assert [one.ledger_id for one in old] == [one.ledger_id for one in items[:2]]
        empty = ListedLedger(
            ledger_id=LedgerId(99), opened_ms=1, block_size=512, owner_epoch=1, closed=True
        )
        assert list(sealed(stream, [empty])) == []

    run_virtual(main())


def test_a_stream_that_goes_while_all_are_planned_is_left_out():
    async def main():
        world, items = await made(2)
        catalog, gone = world.catalog(), StreamName("gone")
        assert await plan_streams(catalog, [gone, STREAM], BackFill()) == (items, [], [])
        with pytest.raises(RefusedError) as caught:
            await plan_streams(catalog, [gone, STREAM], BackFill(streams=(gone, STREAM)))
        assert caught.value.reason is Reason.STREAM_NOT_FOUND

    run_virtual(main())


async def forget(world: World, ledger_id: LedgerId) -> None:
    """Take a ledger's context out of the metadata."""
    store, path = world.catalog().store, paths.context_path(ledger_id)
    found = await store.get(path)
    assert found is not None
    await store.delete(path, version=found.version)


def test_a_listed_ledger_without_a_context_is_not_taken_for_complete():
    async def main():
        world, items = await made(3)
        catalog = world.catalog()
        assert (await patience(world).offload(items[0])).outcome == "completed"
        await forget(world, items[1].ledger_id)
        plan = await plan_streams(catalog, [STREAM], BackFill())
        assert plan == ([items[2]], [items[1]], [])
        # Nor one that loses it while others are offloaded.
        assert await count_complete(catalog, items) == 1

    run_virtual(main())


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_is_left_out_has_a_row_and_is_counted(monkeypatch, dry_run):
    item = OffloadItem(STREAM, World().ids.uuid(), LedgerId(3), 10)
    left_out = Unread(StreamName("other"), "it is damaged")

    async def planned(*_):
        return bulk_offload.Plan([], [item], [left_out])

    async def none(*_):
        return 0

    for name, instead in (("_plan", planned), ("_complete", none), ("run_tasks", lambda *_: [])):
        monkeypatch.setattr(bulk_offload, name, instead)
    for name in ("pace_of_task", "slots_of"):
        monkeypatch.setattr(bulk_offload, name, lambda *_: 1)
    spark: Any = None
    report = bulk_offload.bulk_offload(JobRun(spark=spark, dry_run=dry_run), Settings())
    rows = [(row["stream"], row["ledger_id"], row["outcome"]) for row in report.rows]
    assert rows == [("other", None, "failed"), (STREAM, 3, "failed")]
    assert "has no context" in report.rows[1]["error"]
    assert (report.counts["ledgers"], report.counts["streams_failed"]) == (1, 1)
    if not dry_run:
        assert [report.counts[one] for one in ("failed", "complete", "incomplete")] == [1, 0, 1]


def test_a_ledger_that_was_trimmed_meanwhile_needs_no_copy():
    async def main():
        world, items = await made(2)
        catalog, first = world.catalog(), items[0]
        assert (await patience(world).offload(first)).outcome == "completed"
        await catalog.retention.begin_trim(
            STREAM, first.incarnation, [first.ledger_id], grounds=await world.grounds()
        )
        await forget(world, first.ledger_id)
        assert await count_complete(catalog, items) == 1

    run_virtual(main())


def test_a_stream_that_was_named_and_may_not_be_offloaded_is_told():
    async def main():
        world, _ = await made(1)
        catalog, other = world.catalog(), StreamName("other")
        whole, one = StreamName("parted"), StreamName("parted-partition-1")
        await world.stream(other)
        await catalog.streams.create(whole, partitions=2)
        for name in (STREAM, whole, one):
            await catalog.streams.pause_offload(name, "audit")
        await catalog.retention.begin_stream_deletion(other)
        named = (STREAM, other, whole, one)
        plan = await plan_streams(catalog, named, BackFill(streams=named))
        assert plan[:2] == ([], [])
        told = {row.stream: row.error for row in plan.left_out}
        assert len(plan.left_out) == len(told)
        assert set(told) == {STREAM, other, one}, "the whole has no ledgers of its own"
        assert "paused: audit" in told[STREAM]
        assert f"tierlog offload resume {STREAM}" in told[STREAM]
        assert "is being deleted" in told[other]
        # Who names none asks for what may be offloaded.
        everything = await plan_streams(catalog, named, BackFill())
        assert everything == ([], [], [])

    run_virtual(main())


@pytest.mark.parametrize("seed", range(10))
def test_several_at_once_make_one_copy_and_all_find_it_complete(seed):
    async def main():
        world, items = await made()
        found = [
            patience(world, Faults(random.Random(seed + number), rates=SLOW)) for number in range(3)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.offload(items[0])) for one in found]
        outcomes = sorted(task.result().outcome for task in tasks)
        assert outcomes == ["already_complete", "already_complete", "completed"]
        await sweep(world)
        await check_whole(world, items[0].ledger_id)

    run_virtual(main())


def test_a_lock_that_a_dead_worker_left_is_waited_for():
    async def main():
        world, items = await made()
        path = paths.ledger_lock_path(items[0].ledger_id)
        store = world.catalog().store
        dead = CourtesyLock(store, path, world.ids.uuid())
        assert await dead.take()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(patience(world).offload(items[0]))
            await asyncio.sleep(20)
            assert not waiting.done()
            assert await dead.release()
        assert waiting.result().outcome == "completed"

    run_virtual(main())


def test_what_can_not_be_done_now_is_said_with_its_cause():
    async def main():
        world, items = await made()
        catalog = world.catalog()
        await catalog.streams.pause_offload(STREAM, "audit")
        assert (await patience(world).offload(items[0])).outcome == "paused"
        await catalog.streams.resume_offload(STREAM)
        other = items[0]._replace(incarnation=world.ids.uuid())
        refused = await patience(world).offload(other)
        assert (refused.outcome, "belongs to" in refused.error) == ("refused", True)
        down = patience(world, Faults(random.Random(1), rates=FaultRates(refused=1.0)))
        failed = await down.offload(items[0])
        assert (failed.outcome, bool(failed.error)) == ("failed", True)
        held = CourtesyLock(
            catalog.store, paths.ledger_lock_path(items[0].ledger_id), world.ids.uuid()
        )
        assert await held.take()
        locked = await patience(world, wait_s_max=30).offload(items[0])
        assert (locked.outcome, "another worker" in locked.error) == ("failed", True)

    run_virtual(main())


def test_a_ledger_whose_data_are_damaged_fails_and_is_as_it_was(monkeypatch):
    async def main():
        world, items = await made()
        worker = world.worker()

        async def damaged(*args, **kwargs):
            raise CorruptError("entry 3 is damaged on every node", remedy="tierlog node check")

        monkeypatch.setattr(worker._offloader, "offload", damaged)
        failed = await Patience(worker, world.clock, world.ids, wait_s_max=100).offload(items[0])
        assert failed.outcome == "failed"
        assert "entry 3 is damaged" in failed.error
        assert "node check" in failed.error
        context = await world.context(items[0].ledger_id)
        assert (context.state, context.complete) == (OffloadState.OFFLOADING, False)
        monkeypatch.undo()
        assert (await patience(world).offload(items[0])).outcome == "completed"
        await sweep(world)
        await check_whole(world, items[0].ledger_id)

    run_virtual(main())


def test_of_a_task_that_ran_twice_each_ledger_is_told_once():
    item = OffloadItem(StreamName("a"), World().ids.uuid(), LedgerId(3), 10)
    other = item._replace(ledger_id=LedgerId(2))
    rows = [
        Outcome(item=item, outcome="already_complete"),
        Outcome(item=item, outcome="completed", bytes=12),
        Outcome(item=other, outcome="failed", error="x"),
    ]
    assert best(rows) == [rows[2], rows[1]]


def test_a_process_sends_at_its_pace():
    settings = Settings()
    assert throttled(settings, 0) is settings
    assert throttled(settings, 20.0).s3.bytes_per_s_max == 20.0
