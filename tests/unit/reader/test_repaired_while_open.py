"""A damaged copy gets a new attempt in its place while readers have the ledger open (ADR-0025)."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, scrub
from tests.unit.offload.test_scrub import write_manifest
from tests.unit.reader.test_held_open import NEVER_AGAIN_S, A
from tests.unit.reader.world import STREAM, ReaderWorld, budget, payloads
from tests.unit.scheduler.test_scheduler import scheduler
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog_reader.places import Tier
from tierlog_reader.source import StreamSource
from tierlog_scheduler.manifests import BucketManifests

DAMAGED_S, REPAIRED_S, SWEPT_S = 100.0, 160.0, 220.0


async def read_slowly(
    source: StreamSource, entries: int, rest_s: float
) -> list[tuple[bytes, Tier]]:
    """Read all, a few entries at a time; return what came, and whence."""
    where: Position | Edge = Edge.EARLIEST
    found: list[tuple[bytes, Tier]] = []
    while len(found) < len(A):
        answer = await source.read(STREAM, where, budget(entries=entries))
        assert answer.chunk is not None
        tier = answer.chunk.tier
        found += [(payload, tier) for payload in payloads(answer)]
        where = answer.resume
        await asyncio.sleep(rest_s)
    return found


async def repaired_and_swept(world: ReaderWorld, ledger_id: LedgerId) -> None:
    """Damage a copy, have it repaired, and take away the old one and what is local."""
    before = await world.context(ledger_id)
    assert before.location is not None
    old = [key for key in world.bucket.objects if str(before.uuid) in key]
    await asyncio.sleep(DAMAGED_S)
    world.bucket.damage(before.location.data_key, 300)
    await asyncio.sleep(REPAIRED_S - DAMAGED_S)
    report = await scrub(world, BOTH)
    assert [one.repaired != "" for one in report.findings] == [True]
    assert (await world.context(ledger_id)).uuid != before.uuid
    await asyncio.sleep(SWEPT_S - REPAIRED_S)
    await write_manifest(world)
    await world.gone_locally(ledger_id)
    leader = scheduler(world, manifests=BucketManifests(world.manifests(), world.catalog()))
    await leader.begin()
    await leader.run_pass()
    assert not [key for key in old if key in world.bucket.objects]


@pytest.mark.parametrize("age_s", [0.5, NEVER_AGAIN_S])
def test_readers_go_on_without_an_error_or_a_wrong_byte(age_s: float) -> None:
    async def main() -> None:
        world = ReaderWorld()
        policy = Policy(offload_time_ms=0, deletion_lag_ms=-1, offloaded_read_priority="tier2")
        await world.start(policy=policy)
        ledger_id = await world.sealed(A)
        await world.offloaded(ledger_id)
        await write_manifest(world)
        async with AsyncExitStack() as held, asyncio.TaskGroup() as group:
            # Each is elsewhere when the copy is damaged, replaced, and taken away.
            paces = [(1, 5.0), (1, 8.3), (2, 11.0), (3, 30.0), (7, 47.0), (1, 3.1)]
            reading = []
            for pace in paces:
                source = await held.enter_async_context(world.reader(age_s=age_s))
                reading.append(group.create_task(read_slowly(source, *pace)))
            await repaired_and_swept(world, ledger_id)
            assert not all(task.done() for task in reading)
        for task in reading:
            assert [payload for payload, _ in task.result()] == A
            assert task.result()[0][1] is task.result()[-1][1] is Tier.TIER2

    run_virtual(main())
