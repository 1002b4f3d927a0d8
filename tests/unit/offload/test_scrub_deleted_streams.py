"""A stream whose deletion was accepted when the metadata were lost: what its manifest names goes.

It goes as orphans go: not before it is old enough, of this cluster alone, by a repair that somebody
asked for, and never while the stream may be there.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, REPAIR, SAFETY_S, kinds, runner, scrub, write_cluster
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import Leader, offloaded
from tests.unit.scheduler.test_scrub_metrics import run_for
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.format import paths
from tierlog.model.scrub import FindingKind
from tierlog.offload.restore import Restorer
from tierlog_scheduler.scrubs import ScrubSchedule

LEDGERS = 3


async def deleting(*, paused: bool = False) -> World:
    """Return a cluster whose bucket says that its stream is being deleted."""
    world = World()
    await write_cluster(world)
    claimed = await world.stream()
    for _ in range(LEDGERS):
        await offloaded(world, claimed)
    leader = Leader(world)
    await leader.visit()
    if paused:
        await world.catalog().streams.pause_offload(STREAM)
    await world.catalog().retention.begin_stream_deletion(STREAM)
    await leader.visit()
    return world


async def restored(world: World) -> None:
    """Lose the metadata, and make them anew from the bucket."""
    world.metadata = MemoryMetadata()
    found = Restorer(
        world.bucket.connect(no_faults()),
        world.manifests(),
        bucket="b",
        endpoint_name="default",
        ledger_id_margin=1000,
    )
    plan = await found.plan()
    plan.check(accept_loss=False, accept_damage=False)
    await found.apply(plan, world.catalog())
    assert await world.catalog().streams.names() == []


def copies(world: World) -> list[str]:
    return [key for key in world.bucket.objects if "-ledger-" in key]


def test_what_was_to_be_deleted_when_the_metadata_were_lost_is_an_orphan() -> None:
    async def main() -> None:
        world = await deleting()
        await restored(world)
        young = await scrub(world, BOTH)
        assert (kinds(young), young.counts[FindingKind.TOO_YOUNG]) == ([], LEDGERS)
        world.clock.advance(10 * SAFETY_S)
        found = await scrub(world)
        assert kinds(found) == ["orphan-objects"] * LEDGERS
        assert {one.stream for one in found.findings} == {STREAM}
        before = copies(world)
        # Nobody has asked for a repair yet.
        schedule = ScrubSchedule(interval_s=3600, first_s=0)
        await run_for(runner(world, schedule), 60)
        assert (copies(world), len(before)) == (before, LEDGERS * 3)
        mended = await scrub(world, BOTH)
        assert (mended.remaining, mended.deletions_stopped, copies(world)) == (0, "", [])
        assert kinds(await scrub(world, BOTH)) == []
        # Its manifest stays: by it a restore knows that the stream is not to come back.
        await restored(world)

    run_virtual(main())


async def still_there(world: World) -> None:
    """It is in the metadata: its leader deletes it."""


async def unreadable(world: World) -> None:
    """Nobody can tell whether it is in the metadata."""
    store = world.catalog().store
    await store.set(paths.stream_path(STREAM), b"\xff" * 20, version=-1)


async def older(world: World) -> None:
    """The metadata are of a backup, in which the name was another, older stream's."""
    created_ms = (await world.catalog().streams.get(STREAM)).created_ms
    await restored(world)
    await world.catalog().streams.create(STREAM)
    await world.catalog().streams.change(
        STREAM,
        lambda one: replace(one, created_ms=created_ms - 1),
        applied=lambda one: one.created_ms == created_ms - 1,
    )


async def known_by_a_context(world: World) -> None:
    """The stream's record went, and those of its ledgers did not."""
    store = world.catalog().store
    for child in await store.children(paths.stream_path(STREAM)) or ():
        await store.delete(f"{paths.stream_path(STREAM)}/{child}", version=-1)
    await store.delete(paths.stream_path(STREAM), version=-1)


@pytest.mark.parametrize("why", [still_there, unreadable, older, known_by_a_context])
def test_what_somebody_may_know_of_is_kept(why: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = await deleting()
        await why(world)
        world.clock.advance(10 * SAFETY_S)
        before = copies(world)
        report = await scrub(world, REPAIR)
        assert "orphan-objects" not in kinds(report)
        assert copies(world) == before

    run_virtual(main())


def test_one_that_was_paused_is_told_and_kept() -> None:
    async def main() -> None:
        world = await deleting(paused=True)
        await restored(world)
        world.clock.advance(10 * SAFETY_S)
        before = copies(world)
        report = await scrub(world, BOTH)
        assert kinds(report) == ["orphan-objects"] * LEDGERS
        assert {one.kept for one in report.findings} == {"the stream is paused"}
        assert copies(world) == before

    run_virtual(main())


def test_what_is_made_anew_under_the_name_stays() -> None:
    async def main() -> None:
        world = await deleting()
        await restored(world)
        world.clock.advance(10 * SAFETY_S)
        gone = set(copies(world))
        claimed = await world.stream()
        await offloaded(world, claimed)
        await Leader(world).visit()
        world.clock.advance(10 * SAFETY_S)
        report = await scrub(world, BOTH)
        assert (kinds(report), report.remaining) == (["orphan-objects"] * LEDGERS, 0)
        left = copies(world)
        assert (len(left), gone & set(left)) == (3, set())
        assert kinds(await scrub(world, BOTH)) == []

    run_virtual(main())


def test_one_that_was_made_anew_since_is_not_the_one_that_was_paused() -> None:
    async def main() -> None:
        world = await deleting(paused=True)
        await restored(world)
        world.clock.advance(1)
        ledger_id = await offloaded(world, await world.stream())
        await Leader(world).visit()
        world.clock.advance(10 * SAFETY_S)
        report = await scrub(world, BOTH)
        assert {one.kept for one in report.findings} == {""}
        context = await world.context(ledger_id)
        assert {key for key in copies(world) if str(context.uuid) not in key} == set()

    run_virtual(main())
