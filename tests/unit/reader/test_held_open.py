"""Readers that stay open while what they read goes to tier 2 and leaves tier 1 (B3)."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import repairer
from tests.unit.reader.test_source import numbered
from tests.unit.reader.world import STREAM, ReaderWorld, budget, payloads
from tests.unit.scheduler.test_scheduler import running, states
from tierlog.model.offload import OffloadContext
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog.ports.throttle import TokenBucket
from tierlog_reader.places import Tier
from tierlog_reader.source import StreamSource

A, B = numbered(0, 60), numbered(100, 40)
OFFLOAD_S, LAG_S = 600, 1800
NEVER_AGAIN_S = 10.0**6
"""Nothing is looked up anew only because it is old."""


async def collected(world: ReaderWorld) -> None:
    """Be a storage node's garbage collector that loses no moment."""
    catalog = world.catalog()
    while True:
        for ledger_id in list(world.node.runs):
            if await catalog.ledgers.get(ledger_id) is None:
                del world.node.runs[ledger_id]
        await asyncio.sleep(0.5)


async def read_slowly(source: StreamSource, entries: int, rest_s: float) -> dict[bytes, Tier]:
    """Read everything, a few entries at a time; return what came, in its order, and whence."""
    where: Position | Edge = Edge.EARLIEST
    found: dict[bytes, Tier] = {}
    while len(found) < len(A) + len(B):
        answer = await source.read(STREAM, where, budget(entries=entries))
        assert answer.chunk is not None
        for payload in payloads(answer):
            assert payload not in found
            found[payload] = answer.chunk.tier
        where = answer.resume
        await asyncio.sleep(rest_s)
    assert (await source.read(STREAM, where, budget())).chunk is None
    return found


@pytest.mark.covers("A09", "A28")
@pytest.mark.parametrize("age_s", [0.5, NEVER_AGAIN_S])
@pytest.mark.parametrize("priority", ["tier1", "tier2"])
def test_readers_held_open_see_no_gap_and_no_error_when_their_ledgers_move(age_s, priority):
    async def main():
        world = ReaderWorld()
        await world.start(
            policy=Policy(
                offload_time_ms=OFFLOAD_S * 1000,
                deletion_lag_ms=LAG_S * 1000,
                offloaded_read_priority=priority,
            )
        )
        for entries in (A, B):
            await world.sealed(entries)
        async with running(world), AsyncExitStack() as held, asyncio.TaskGroup() as group:
            collecting = group.create_task(collected(world))
            # Each is elsewhere in the first ledger when it is copied, and when it leaves tier 1.
            paces = [(1, 50.0), (1, 61.5), (2, 101.0), (3, 170.0), (7, 390.0), (1, 44.7)]
            sources = [await held.enter_async_context(world.reader(age_s=age_s)) for _ in paces]
            async with asyncio.TaskGroup() as reading:
                tasks = [
                    reading.create_task(read_slowly(source, *pace))
                    for source, pace in zip(sources, paces, strict=True)
                ]
            assert await states(world) == ["TIER1_DELETED"] * 2
            assert not world.node.runs
            collecting.cancel()
        for task in tasks:
            assert list(task.result()) == A + B
            assert set(task.result().values()) == {Tier.TIER1, Tier.TIER2}
            tiers = list(task.result().values())
            assert tiers.index(Tier.TIER2) == tiers.count(Tier.TIER1), "there is one way only"

    run_virtual(main())


async def in_tier2_alone(world: ReaderWorld) -> OffloadContext:
    """Have a ledger that is in tier 2 and nowhere else."""
    await world.start()
    ledger_id = await world.sealed(A)
    await world.offloaded(ledger_id)
    await world.gone_locally(ledger_id)
    return await world.context(ledger_id)


async def replace_copy(world: ReaderWorld, was: OffloadContext) -> None:
    """Repair a copy as if it were damaged, and sweep it."""
    assert was.uuid is not None
    pace = TokenBucket(world.clock, per_s=1e9)
    assert (await repairer(world).repair(was, "seen damaged", pace)).repaired
    await world.offloader().delete_offloaded(was.ledger_id, was.uuid, was.location)


@pytest.mark.parametrize("age_s", [0.5, NEVER_AGAIN_S])
def test_a_reader_held_open_goes_on_in_the_copy_that_a_repair_put_in_its_place(age_s):
    """The objects that it reads are replaced under it, and swept (B10).

    Who knows only the copy that is gone looks again, and finds the new one.
    """

    async def main():
        world = ReaderWorld()
        was = await in_tier2_alone(world)
        async with world.reader(age_s=age_s) as source:
            answer = await source.read(STREAM, Edge.EARLIEST, budget(entries=5))
            found = payloads(answer)
            await replace_copy(world, was)
            await asyncio.sleep(1)
            while answer.chunk is not None:
                answer = await source.read(STREAM, answer.resume, budget(entries=5))
                found += payloads(answer) if answer.chunk is not None else []
        assert found == A
        assert (await world.context(was.ledger_id)).uuid != was.uuid

    run_virtual(main())


def test_a_time_is_looked_for_in_the_copy_that_a_repair_put_in_place_of_another():
    async def main():
        world = ReaderWorld()
        was = await in_tier2_alone(world)
        async with world.reader(age_s=NEVER_AGAIN_S) as source, world.reader() as fresh:
            (ledger,) = (await source.snapshot(STREAM)).ledgers
            assert await source.why(STREAM, was.ledger_id, Tier.TIER2), "it looked the copy up"
            await replace_copy(world, was)
            wanted = await fresh.entry_at_time(STREAM, ledger, 0)
            assert await source.entry_at_time(STREAM, ledger, 0) == wanted

    run_virtual(main())
