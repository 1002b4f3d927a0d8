"""Attribute indexes in a scrub: unneeded objects go, missing and damaged ones are faults."""

import pytest

from tests.contracts.attributes_suite import all_of, at, key_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, DEEP, REPAIR, SAFETY_S, kinds, scrub
from tests.unit.offload.test_scrub import offloaded, write_manifest
from tests.unit.offload.world import CLUSTER, STREAM, World
from tierlog.adapters.memory.faults import no_faults
from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache
from tierlog.attributes.store import IndexLimits, Tier2AttributeIndex
from tierlog.attributes.update import Shape
from tierlog.model.attributes import AttributeKey, Checkpoint
from tierlog.model.ids import NodeId
from tierlog.model.scrub import FindingKind


def index_of(world: World) -> Tier2AttributeIndex:
    objects = IndexObjects(world.bucket.connect(no_faults()), cluster_id=CLUSTER, ids=world.ids)
    return Tier2AttributeIndex(
        world.catalog().attributes,
        objects,
        PageCache(limit_bytes=1 << 20),
        limits=IndexLimits(chunk_objects_max=3),
        shape=Shape(page_bytes=256),
    )


async def grown() -> tuple[World, Checkpoint, dict[AttributeKey, int]]:
    """A stream with a ledger in the bucket, and an index with objects that nothing needs."""
    world, _ = await offloaded()
    claimed = await world.catalog().streams.claim(STREAM, NodeId("n2"))
    index = index_of(world)
    base, values = await index.load(claimed), dict[AttributeKey, int]()
    for number in range(12):
        changes = {key_of(one): number for one in range(0, 200, 1 + number % 4)}
        values |= changes
        base = await index.flush(claimed, base, changes=changes, core={}, through=at(0, number))
    return world, base, values


def test_what_no_checkpoint_needs_is_told_and_deleted_once_it_is_old() -> None:
    async def main() -> None:
        world, base, values = await grown()
        young = await scrub(world)
        assert (kinds(young), young.counts[FindingKind.FOREIGN]) == ([], 0)
        assert young.counts[FindingKind.TOO_YOUNG] > 3
        world.clock.advance(SAFETY_S + 1)
        found = await scrub(world)
        assert kinds(found) == ["orphan-objects"]
        assert "attribute index" in found.findings[0].cause
        before = len(world.bucket.objects)
        await world.catalog().streams.pause_offload(STREAM)
        paused = await scrub(world, REPAIR)
        assert (paused.remaining, paused.findings[0].kept) == (1, "the stream is paused")
        assert len(world.bucket.objects) == before
        await world.catalog().streams.resume_offload(STREAM)
        mended = await scrub(world, BOTH)
        assert (kinds(mended), mended.remaining, mended.unread) == (["orphan-objects"], 0, [])
        assert len(world.bucket.objects) < before
        assert kinds(await scrub(world, BOTH)) == []
        assert await all_of(index_of(world), base) == values

    run_virtual(main(), until_s=1e6)


def test_what_is_missing_or_damaged_of_an_index_is_a_fault_that_no_repair_hides() -> None:
    async def main() -> None:
        world, base, _ = await grown()
        one = base.objects[-1]
        body = world.bucket.objects[one.key]
        world.bucket.damage(one.key, 9)
        assert kinds(await scrub(world)) == []
        deep = await scrub(world, DEEP)
        assert kinds(deep) == ["damaged-data"]
        assert deep.findings[0].key == one.key
        del world.bucket.objects[one.key]
        gone = await scrub(world, BOTH)
        assert (kinds(gone), gone.remaining) == (["missing-object"], 1)
        assert "Bring the object back" in gone.findings[0].remedy
        world.bucket.objects[one.key] = body
        assert kinds(await scrub(world, DEEP)) == []

    run_virtual(main(), until_s=1e6)


@pytest.mark.parametrize("made_anew", [False, True])
def test_the_index_of_a_stream_that_is_gone_goes_with_the_safety_age(*, made_anew: bool) -> None:
    async def main() -> None:
        world, _, _ = await grown()
        catalog = world.catalog()
        stream = await catalog.streams.get(STREAM)
        # As if a flush had landed behind the deletion of its stream.
        index = {key: one for key, one in world.bucket.objects.items() if "/attributes/" in key}
        await catalog.retention.begin_stream_deletion(STREAM)
        await write_manifest(world)
        snapshot = await catalog.streams.snapshot(STREAM)
        ids = [one.ledger_id for one in snapshot.ledgers]
        await catalog.retention.begin_trim(
            STREAM, stream.incarnation, ids, grounds=await world.grounds()
        )
        for ledger_id in ids:
            await catalog.retention.drop_tier1(ledger_id)
            context = await world.context(ledger_id)
            for attempt in context.abandoned:
                await catalog.contexts.strike_off(ledger_id, attempt.uuid)
            await catalog.retention.finish_trim(STREAM, stream.incarnation, ledger_id)
        await catalog.retention.remove_stream(STREAM, stream.incarnation)
        manifests = {one: kept for one, kept in world.bucket.objects.items() if "manifest" in one}
        assert manifests
        world.bucket.objects.clear()
        world.bucket.objects.update(manifests | index)
        anew, values = Checkpoint(), {key_of(1): 5}
        if made_anew:
            claimed = await world.stream()
            first = await index_of(world).load(claimed)
            anew = await index_of(world).flush(
                claimed, first, changes=values, core={}, through=at(7, 0)
            )
        count = len(index) + len(anew.objects)
        assert (await scrub(world, REPAIR)).counts[FindingKind.TOO_YOUNG] == len(index)
        assert len(world.bucket.objects) == len(manifests) + count
        world.clock.advance(SAFETY_S + 1)
        swept = await scrub(world, REPAIR)
        assert (kinds(swept), swept.remaining) == (["orphan-objects"], 0)
        assert not index.keys() & world.bucket.objects.keys()
        assert len(world.bucket.objects) == len(manifests) + len(anew.objects)
        if made_anew:
            assert await all_of(index_of(world), anew) == values

    run_virtual(main(), until_s=1e6)
