"""What a scrub finds and mends, and that it leaves alone what is young, foreign or in use."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import (
    BOTH,
    DEEP,
    REPAIR,
    SAFETY_S,
    kinds,
    metadata,
    only_doubted,
    plant,
    plant_upload,
    repairer,
    scrub,
    write_cluster,
)
from tests.unit.offload.world import CLUSTER, STREAM, World, metadata_of
from tierlog.format import paths, records
from tierlog.format.keys import object_keys
from tierlog.format.manifest import cluster_key, keep
from tierlog.model.ids import LedgerId
from tierlog.model.manifest import ManifestLedger, copy_of, head_of
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.scrub import FindingKind, ScrubWish
from tierlog.ports.objects import ObjectInfo, ObjectStore
from tierlog.ports.throttle import TokenBucket

ENTRIES = [bytes([number]) * (number * 37 % 200) for number in range(10)]
K = FindingKind


async def offloaded(count: int = 1) -> tuple[World, list[LedgerId]]:
    """Return a world with ledgers that were offloaded, and whose bucket says so."""
    world = World()
    claimed = await world.stream()
    made = []
    for _ in range(count):
        ledger_id = await world.seal(claimed, ENTRIES)
        await world.worker().handle(world.request(claimed, ledger_id))
        made.append(ledger_id)
    await write_manifest(world)
    return world, made


async def write_manifest(world: World) -> None:
    """Write the next manifest of the stream from its metadata, and the cluster's, if it lacks."""
    catalog, store = world.catalog(), world.manifests()
    if not await store.newest_of_cluster(CLUSTER):
        await write_cluster(world)
    snapshot = await catalog.streams.snapshot(STREAM)
    known = await store.newest(STREAM, snapshot.stream.incarnation)
    put = {
        one.ledger_id: keep(
            ManifestLedger(listed=one, copy=copy_of(await world.context(one.ledger_id)))
        )
        for one in snapshot.ledgers
        if one.closed
    }
    await store.write(known, head_of(snapshot.stream, snapshot.ledgers, known.head), put=put)


def test_a_bucket_that_is_as_it_should_be_has_no_findings():
    async def main():
        world, _ = await offloaded(3)
        world.clock.advance(10 * SAFETY_S)
        report = await scrub(world, BOTH, safety_age_s=0.001)
        assert (kinds(report), report.remaining, report.unread) == ([], 0, [])
        assert (report.streams, report.ledgers, report.copies_checked) == (1, 3, 3)
        assert report.objects == len(world.bucket.objects)
        assert report.bytes_read > 0

    run_virtual(main())


@pytest.mark.parametrize("old", [False, True])
def test_orphans_are_found_and_deleted_once_they_are_old_enough(old: bool):
    async def main():
        world, _ = await offloaded()
        before = set(world.bucket.objects)
        key = await plant(world, 5)
        other = object_keys("", UUID(int=6), LedgerId(901)).data
        await plant_upload(world, other)
        world.clock.advance(SAFETY_S + 1 if old else SAFETY_S - 1)
        found = await scrub(world)
        assert kinds(found) == (["orphan-objects", "orphan-upload"] if old else [])
        assert found.counts[K.TOO_YOUNG] == (0 if old else 2)
        assert key in world.bucket.objects
        objects = world.bucket.objects
        planted = [len(objects[one][1]) for one in objects.keys() - before]
        left = (len(planted), sum(planted)) if old else (0, 0)
        assert (found.orphan_objects, found.orphan_bytes) == left
        mended = await scrub(world, REPAIR)
        assert (mended.remaining, mended.orphan_objects, mended.orphan_bytes) == (0, 0, 0)
        if old:
            assert (set(world.bucket.objects), len(world.bucket.uploads)) == (before, 0)
            assert kinds(await scrub(world)) == []
        else:
            assert key in world.bucket.objects
            assert len(world.bucket.uploads) == 1

    run_virtual(main())


def test_what_is_of_another_cluster_or_of_nobody_is_left_alone():
    async def main():
        world, _ = await offloaded()
        await plant(world, 5, cluster_id=UUID(int=3))
        store = world.bucket.connect()
        found = object_keys("", UUID(int=7), LedgerId(902))
        await store.put(found.data, b"of Pulsar", metadata={"role": "data"})
        await store.put("holiday.jpg", b"x", metadata={})
        # Whose it is, an upload does not say: here it may be anybody's.
        await plant_upload(world, object_keys("", UUID(int=8), LedgerId(903)).data)
        own = await plant(world, 9, 904)
        world.clock.advance(2 * SAFETY_S)
        before = set(world.bucket.objects)
        report = await scrub(world, REPAIR)
        assert kinds(report) == ["orphan-objects"]
        assert report.counts[K.FOREIGN] == 4
        assert before - set(world.bucket.objects) == {own, f"{own}-index"}
        assert len(world.bucket.uploads) == 1

    run_virtual(main())


def test_an_attempt_of_two_owners_is_kept():
    async def main():
        world, _ = await offloaded()
        key = await plant(world, 5)
        await world.bucket.connect().put(f"{key}-side", b"x", metadata=metadata(UUID(int=3)))
        world.clock.advance(2 * SAFETY_S)
        report = await scrub(world, REPAIR)
        assert kinds(report) == []
        assert key in world.bucket.objects

    run_virtual(main())


def test_an_upload_beside_a_complete_copy_is_what_a_lost_answer_left():
    async def main():
        world, made = await offloaded()
        context = await world.context(made[0])
        assert context.location is not None
        await plant_upload(world, context.location.data_key)
        world.clock.advance(2 * SAFETY_S)
        report = await scrub(world, REPAIR)
        assert [(one.kind, one.repaired) for one in report.findings] == [
            (K.ORPHAN_UPLOAD, "aborted")
        ]
        assert not world.bucket.uploads
        assert context.location.data_key in world.bucket.objects

    run_virtual(main())


def test_an_attempt_at_work_and_one_to_be_swept_are_nobodys_orphans():
    async def main():
        world, _ = await offloaded()
        claimed = await world.catalog().streams.get(STREAM)
        ledger_id = await world.seal(claimed, ENTRIES)
        catalog, offloader = world.catalog(), world.offloader()
        for number in (1, 2):
            uuid = UUID(int=number)
            location = offloader.location(ledger_id, uuid)
            await catalog.contexts.begin_attempt(
                ledger_id, uuid=uuid, location=location, worker="w"
            )
            await world.bucket.connect().put(location.data_key, b"x", metadata=metadata())
            await plant_upload(world, location.data_key)
        before = set(world.bucket.objects)
        report = await scrub(world, REPAIR, safety_age_s=0)
        # It says what takes so long, and leaves it to those at work.
        assert kinds(report) == ["stalled-attempt"]
        assert (set(world.bucket.objects), len(world.bucket.uploads)) == (before, 2)

    run_virtual(main())


def test_an_attempt_that_ends_while_other_copies_are_read_back_is_not_stalled():
    async def main():
        world, made = await offloaded()
        claimed = await world.catalog().streams.get(STREAM)
        ledger_id = await world.seal(claimed, ENTRIES)
        copied = (await world.context(made[0])).copy
        assert copied is not None

        async def attempt() -> None:
            contexts, uuid = world.catalog().contexts, UUID(int=1)
            location = world.offloader().location(ledger_id, uuid)
            await contexts.begin_attempt(ledger_id, uuid=uuid, location=location, worker="w")
            handle = world.open_ledger(ledger_id, metadata_of(ENTRIES))
            copy = await world.offloader().offload(handle, uuid, {})
            await asyncio.sleep(10)
            await contexts.complete_attempt(ledger_id, uuid=uuid, copy=copy)

        async with asyncio.TaskGroup() as group:
            group.create_task(attempt())
            await asyncio.sleep(5)
            # Both contexts are read at once, and the first copy takes a minute.
            pace = copied.data_len / 60
            report = await scrub(world, DEEP, safety_age_s=30, bytes_per_s=pace)
        assert (kinds(report), (await world.context(ledger_id)).complete) == ([], True)

    run_virtual(main())


@pytest.mark.parametrize("role", ["data", "index", "side", "all", "short", "flipped"])
def test_a_damaged_copy_is_made_anew_from_the_local_one(role: str):
    async def main():
        world, made = await offloaded()
        context = await world.context(made[0])
        assert context.uuid is not None
        kind = spoil(world, context, role)
        deep = ScrubWish(deep=role == "flipped")
        found = await scrub(world, deep)
        assert [(one.kind, one.uuid) for one in found.findings] == [(kind, context.uuid)]
        await only_doubted(world, context)
        mended = await scrub(world, replace(deep, repair=True))
        assert mended.remaining == 0
        assert mended.findings[0].repaired == "copied anew, from the local copy"
        again = await world.context(made[0])
        assert (again.state, again.complete) == (OffloadState.COMPLETE, True)
        assert again.uuid != context.uuid
        # Its objects are the scheduler's to sweep, once the manifest names the new copy.
        assert again.swept_at(context.uuid) == 0
        assert kinds(await scrub(world, BOTH)) == []

    run_virtual(main())


def spoil(world: World, context: OffloadContext, role: str) -> FindingKind:
    """Do something to a copy, and return what it is called."""
    location = context.location
    assert location is not None
    objects = world.bucket.objects
    if role == "all":
        for key in location.keys:
            del objects[key]
        return K.POINTS_NOWHERE
    if role == "short":
        info, body = objects[location.data_key]
        objects[location.data_key] = (replace(info, size=info.size - 1), body[:-1])
        return K.WRONG_OBJECT
    if role == "flipped":
        world.bucket.damage(location.data_key, 300)
        return K.DAMAGED_DATA
    del objects[getattr(location, f"{role}_key")]
    return K.MISSING_OBJECT


def test_metadata_from_a_backup_stop_every_deletion():
    async def main():
        world, made = await offloaded(2)
        orphan = await plant(world, 5)
        await plant_upload(world, object_keys("", UUID(int=6), LedgerId(901)).data)
        # As in a backup from before the first ledger was offloaded.
        path = paths.context_path(made[0])
        store = world.catalog().store
        node = await store.get(path)
        assert node is not None
        old = replace(
            await world.context(made[0]),
            state=OffloadState.LOCAL,
            uuid=None,
            location=None,
            copy=None,
            complete=False,
        )
        await store.set(path, records.encode_context(old), version=node.version)
        world.clock.advance(2 * SAFETY_S)
        before = set(world.bucket.objects)
        report = await scrub(world, REPAIR)
        assert kinds(report) == ["metadata-older", "orphan-objects", "orphan-upload"]
        assert report.deletions_stopped
        assert (set(world.bucket.objects), len(world.bucket.uploads)) == (before, 1)
        assert orphan in before

    run_virtual(main())


def test_what_only_a_manifest_names_is_kept_and_a_stream_unknown_to_the_metadata_stops_it():
    async def main():
        world, made = await offloaded()
        orphan = await plant(world, 5)
        store = world.catalog().store
        for path in (paths.context_path(made[0]), paths.stream_path(STREAM)):
            for child in await store.children(path) or ():
                await store.delete(f"{path}/{child}", version=-1)
            node = await store.get(path)
            assert node is not None
            await store.delete(path, version=node.version)
        world.clock.advance(2 * SAFETY_S)
        before = set(world.bucket.objects)
        report = await scrub(world, REPAIR)
        assert kinds(report) == ["metadata-older", "orphan-objects"]
        assert [one.key for one in report.findings if one.kind is K.ORPHAN_OBJECTS] == [orphan]
        assert set(world.bucket.objects) == before

    run_virtual(main())


def test_a_damaged_manifest_stops_every_deletion():
    async def main():
        world, _ = await offloaded()
        await plant(world, 5)
        world.clock.advance(2 * SAFETY_S)
        manifest = next(key for key in world.bucket.objects if key.startswith("streams/"))
        world.bucket.damage(manifest, 20)
        before = set(world.bucket.objects)
        report = await scrub(world, REPAIR)
        assert kinds(report) == ["manifest-unreadable"]
        assert report.deletions_stopped
        # What it may name is not known, so the planted one is not called an orphan either.
        assert len(report.unread) == 1
        assert not report.is_clean
        assert set(world.bucket.objects) == before

    run_virtual(main())


def test_a_damaged_manifest_of_the_cluster_is_told_and_stops_deletions():
    async def main():
        world, _ = await offloaded()
        orphan = await plant(world, 5)
        world.clock.advance(2 * SAFETY_S)
        assert kinds(await scrub(world)) == ["orphan-objects"]
        key = cluster_key("", CLUSTER, 1)
        world.bucket.damage(key, 30)
        report = await scrub(world, REPAIR)
        assert kinds(report) == ["manifest-unreadable", "orphan-objects"]
        assert [one.key for one in report.findings][:1] == [key]
        assert "leads" in report.findings[0].remedy
        assert report.deletions_stopped
        assert orphan in world.bucket.objects

    run_virtual(main())


def test_a_deep_scrub_that_runs_out_of_time_goes_on_where_it_was():
    async def main():
        world, made = await offloaded(4)
        spoil(world, await world.context(made[3]), "flipped")
        length = (await world.context(made[0])).copy
        assert length is not None
        pace = length.data_len / 10  # ten seconds each
        first = await scrub(world, DEEP, bytes_per_s=pace, deep_s_max=15)
        assert (kinds(first), first.deep_next is not None) == ([], True)
        assert first.deep_next is not None
        assert first.deep_next.ledger_id == made[2]
        second = await scrub(world, DEEP, deep_from=first.deep_next)
        assert (kinds(second), second.deep_next) == (["damaged-data"], None)
        assert second.bytes_read == 2 * length.data_len

    run_virtual(main())


def test_a_paused_stream_is_looked_at_and_left_as_it_is():
    async def main():
        world, made = await offloaded()
        await plant(world, 5)
        context = await world.context(made[0])
        spoil(world, context, "index")
        world.clock.advance(2 * SAFETY_S)
        await world.catalog().streams.pause_offload(STREAM)
        before = set(world.bucket.objects)
        report = await scrub(world, REPAIR)
        assert kinds(report) == ["missing-object", "orphan-objects"]
        assert {one.kept for one in report.findings} == {"the stream is paused"}
        assert set(world.bucket.objects) == before
        await only_doubted(world, context)
        await world.catalog().streams.resume_offload(STREAM)
        assert (await scrub(world, REPAIR)).remaining == 0

    run_virtual(main())


def test_a_stream_that_is_paused_after_it_was_looked_at_is_left_as_it_is():
    async def main():
        world, made = await offloaded()
        await plant(world, 5)
        key = await plant_upload(world, f"{UUID(int=6)}-ledger-{made[0]}")
        context = await world.context(made[0])
        spoil(world, context, "index")
        world.clock.advance(2 * SAFETY_S)
        before = set(world.bucket.objects)

        async def pause() -> None:
            if not (await world.catalog().streams.get(STREAM)).offload_pause:
                await world.catalog().streams.pause_offload(STREAM)

        report = await scrub(world, REPAIR, objects=BeforeHead(world.bucket.connect(), pause))
        assert kinds(report) == ["missing-object", "orphan-objects", "orphan-upload"]
        assert {one.kept for one in report.findings} == {"the stream is paused"}
        assert set(world.bucket.objects) == before
        assert key in world.bucket.uploads
        await only_doubted(world, context)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(3))
def test_what_is_offloaded_while_the_bucket_is_listed_is_no_fault(seed: int):
    async def main():
        world, made = await offloaded()
        claimed = await world.catalog().streams.get(STREAM)
        ledger_id = await world.seal(claimed, ENTRIES)

        going = await plant(world, 5)

        async def meanwhile() -> None:
            for key in (going, f"{going}-index"):
                del world.bucket.objects[key]
            await world.worker().handle(world.request(claimed, ledger_id))
            assert (await world.context(ledger_id)).complete
            # The copy that was listed is replaced, swept and struck off, all at once.
            context, catalog = await world.context(made[0]), world.catalog()
            assert context.uuid is not None
            pace = TokenBucket(world.clock, per_s=1e9)
            assert (await repairer(world).repair(context, "seen damaged", pace)).repaired
            if seed == 0:
                return
            await write_manifest(world)
            await world.offloader().delete_offloaded(made[0], context.uuid, context.location)
            if seed == 1:
                await catalog.contexts.strike_off(made[0], context.uuid)

        listed = AfterListing(world.bucket.connect(), meanwhile)
        report = await scrub(world, REPAIR, safety_age_s=0, objects=listed)
        assert (kinds(report), report.unread) == ([], [])
        assert listed.done
        await world.offloader().verify(*(await copy_arguments(world, ledger_id)))

    run_virtual(main())


async def copy_arguments(world: World, ledger_id: LedgerId):
    context = await world.context(ledger_id)
    assert context.uuid is not None
    assert context.copy is not None
    return ledger_id, context.uuid, context.location, context.copy


class AfterListing:
    """A store at which something happens as soon as its objects were listed for the first time."""

    def __init__(self, store: ObjectStore, what: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._what = what
        self.done = False

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    async def list(self, prefix: str = ""):
        async for info in self._store.list(prefix):
            yield info
        if not self.done:
            self.done = True
            await self._what()


class BeforeHead:
    """A store at which something happens before each look at an object."""

    def __init__(self, store: ObjectStore, what: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._what = what

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    async def head(self, key: str) -> ObjectInfo | None:
        await self._what()
        return await self._store.head(key)


def test_findings_are_bounded_and_counted():
    async def main():
        world, _ = await offloaded()
        for number in range(10):
            await plant(world, 100 + number, 900 + number)
        world.clock.advance(2 * SAFETY_S)
        report = await scrub(world, findings_max=3)
        assert (len(report.findings), report.findings_left_off, report.remaining) == (3, 7, 10)

    run_virtual(main())
