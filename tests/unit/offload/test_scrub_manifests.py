"""A scrub tells manifests that are not there, and none that are only about to be."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import (
    BOTH,
    DEEP,
    SAFETY_S,
    kinds,
    pass_ids,
    plant,
    scrub,
    write_cluster,
)
from tests.unit.offload.test_scrub import ENTRIES, offloaded, spoil, write_manifest
from tests.unit.offload.test_scrub_crew import both
from tests.unit.offload.world import CLUSTER, STREAM, World
from tests.unit.scheduler.manifests_kit import backup, manifests_of, restore, trim
from tests.unit.scheduler.test_scheduler import scheduler
from tierlog.adapters.memory.metadata import MemoryMetadataClient
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.catalog.ledgers import LedgerCatalog
from tierlog.catalog.scrubs import ScrubCatalog
from tierlog.format import paths
from tierlog.format.manifest import cluster_key
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.model.ids import StreamName
from tierlog.model.manifest import ClusterManifest
from tierlog.model.node import Cluster
from tierlog.model.policy import Policy
from tierlog.model.scrub import Finding, ScrubReport, ScrubWish
from tierlog.offload.scrub_manifests import ManifestLook
from tierlog_scheduler.manifests import BucketManifests


async def scrub_with(world: World, meanwhile: Callable[[], Awaitable[None]]) -> ScrubReport:
    """Scrub, with something that happens between the first look at a stream and the second."""
    look = ManifestLook.unnamed

    async def later(self: ManifestLook, name: StreamName, incarnation: UUID) -> Finding | None:
        await meanwhile()
        return await look(self, name, incarnation)

    with patch.object(ManifestLook, "unnamed", later):
        return await scrub(world)


async def one_more(world: World) -> None:
    """Offload one more ledger; no manifest names it yet."""
    stream = await world.catalog().streams.get(STREAM)
    ledger_id = await world.seal(stream, ENTRIES)
    await world.worker().handle(world.request(stream, ledger_id))


@pytest.mark.parametrize("which", ["all", "newest"])
def test_copies_that_no_manifest_names_are_told_and_nothing_is_deleted(which: str) -> None:
    async def main() -> None:
        world, _ = await offloaded(2)
        await one_more(world)
        await write_manifest(world)
        orphan = await plant(world, 5)
        for key in manifests_of(world)[-1 if which == "newest" else 0 :]:
            del world.bucket.objects[key]
        world.clock.advance(SAFETY_S + 1)
        report = await scrub(world, BOTH)
        assert kinds(report) == ["manifest-unreadable", "orphan-objects"]
        (finding,) = (one for one in report.findings if one.kind == "manifest-unreadable")
        assert (finding.stream, finding.key.split("/")[:2]) == (STREAM, ["streams", STREAM])
        assert ("none is there" if which == "all" else "1 is the newest") in finding.cause
        assert "missing" in report.deletions_stopped
        assert orphan in world.bucket.objects
        # Whoever looks with others tells the same, once.
        assert kinds((await both(world, ScrubWish()))[1]) == kinds(report)
        await write_manifest(world)
        assert kinds(await scrub(world, BOTH)) == ["orphan-objects"]
        assert orphan not in world.bucket.objects

    run_virtual(main())


def test_a_copy_that_a_leader_is_about_to_name_is_not_missed() -> None:
    async def main() -> None:
        world, _ = await offloaded()
        world.clock.advance(2 * SAFETY_S)
        await one_more(world)
        report = await scrub(world)
        assert (kinds(report), report.deletions_stopped) == ([], "")
        # Named between the two looks, however old it is.
        world.clock.advance(2 * SAFETY_S)
        report = await scrub_with(world, lambda: write_manifest(world))
        assert (kinds(report), report.deletions_stopped) == ([], "")
        # Trimmed between them.
        await one_more(world)
        world.clock.advance(2 * SAFETY_S)
        assert kinds(await scrub(world)) == ["manifest-unreadable"]
        report = await scrub_with(world, lambda: trim(world, max(world.ledgers)))
        assert (kinds(report), report.deletions_stopped) == ([], "")

    run_virtual(main())


def test_policies_of_old_metadata_are_told_and_nothing_is_deleted() -> None:
    async def main() -> None:
        world, _ = await offloaded()
        orphan = await plant(world, 5)
        world.clock.advance(SAFETY_S + 1)
        before = backup(world.metadata)
        await world.catalog().policies.set_level("ns", Policy(offload_time_ms=3))
        levels = await world.catalog().policies.levels()
        cluster = Cluster(cluster_id=CLUSTER, created_ms=1)
        await world.manifests().write_cluster(2, ClusterManifest(cluster=cluster, levels=levels))
        now = backup(world.metadata)
        restore(world.metadata, before)
        report = await scrub(world, BOTH)
        assert kinds(report) == ["metadata-older", "orphan-objects"]
        assert "the policy of namespace ns was changed at" in report.deletions_stopped
        assert orphan in world.bucket.objects
        restore(world.metadata, now)
        assert kinds(await scrub(world, BOTH)) == ["orphan-objects"]
        assert orphan not in world.bucket.objects

    run_virtual(main())


def test_a_manifest_of_the_cluster_that_is_not_there_is_told() -> None:
    async def main() -> None:
        world, _ = await offloaded()
        orphan = await plant(world, 5)
        del world.bucket.objects[cluster_key("", CLUSTER, 1)]
        # Of a cluster that is young, the leader may be about to write it.
        assert kinds(await scrub(world, BOTH)) == []
        world.clock.advance(SAFETY_S + 1)
        report = await scrub(world, BOTH)
        assert kinds(report) == ["manifest-unreadable", "orphan-objects"]
        (finding,) = (one for one in report.findings if one.kind == "manifest-unreadable")
        assert (finding.stream, finding.key) == ("", f"cluster/{CLUSTER}/")
        assert orphan in world.bucket.objects
        look = ManifestLook.no_cluster

        async def later(self: ManifestLook, *args: Any) -> Finding | None:
            await write_cluster(world)
            return await look(self, *args)

        with patch.object(ManifestLook, "no_cluster", later):
            assert kinds(await scrub(world)) == ["orphan-objects"]

    run_virtual(main())


@pytest.mark.parametrize("unread", [False, True])
def test_a_copy_that_is_repaired_while_others_are_read_makes_no_older_metadata(
    unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep scrub comes to a ledger hours after it read the manifest of its stream."""
    monkeypatch.setattr("tierlog.offload.scrub.CONTEXTS_AT_ONCE", 1)

    async def main() -> None:
        world, made = await offloaded(4)
        damaged, stop = await world.context(made[-1]), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            gate = BucketManifests(world.manifests(), world.catalog())
            group.create_task(scheduler(world, manifests=gate).run(stop))
            await asyncio.sleep(60)
            long = group.create_task(scrub(world, DEEP, bytes_per_s=0.3))
            await asyncio.sleep(60)
            spoil(world, damaged, "flipped")
            assert (await scrub(world, BOTH)).repaired
            await asyncio.sleep(1000)
            repaired = await world.context(made[-1])
            assert (repaired.uuid == damaged.uuid, repaired.abandoned) == (False, ())
            assert not long.done()
            if unread:
                info, _ = world.bucket.objects[manifests_of(world)[-1]]
                world.bucket.objects[manifests_of(world)[-1]] = (info, b"spoiled")
            report = await long
            stop.set()
        assert kinds(report) == (["manifest-unreadable"] if unread else [])
        assert bool(report.deletions_stopped) == unread

    run_virtual(main())


@pytest.mark.parametrize("later", [4, 6])
def test_an_id_that_is_still_to_be_given_stops_the_deletion_of_all_others(later: int) -> None:
    """Wherever its objects are listed: what else the metadata do not know, they may have forgotten.

    A ledger that was staged at the time of the backup, and attached since, has no context.
    """

    async def main() -> None:
        world, _ = await offloaded()
        kept = await plant(world, 5, ledger=7)
        given = await world.catalog().ledgers.next_id()
        nodes = backup(world.metadata)
        await plant(world, later, ledger=given)
        restore(world.metadata, nodes)
        world.clock.advance(2 * SAFETY_S)
        report = await scrub(world, BOTH)
        assert kinds(report) == ["metadata-older", "orphan-objects", "orphan-objects"]
        assert kept in world.bucket.objects
        assert not report.repaired

    run_virtual(main())


async def given_and_not(world: World) -> tuple[str, str]:
    """Leave objects of a ledger with a given id, and of one whose id is to be given once more."""
    kept = await plant(world, 5, ledger=7)
    given = await world.catalog().ledgers.next_id()
    nodes = backup(world.metadata)
    later = await plant(world, 6, ledger=given)
    restore(world.metadata, nodes)
    return kept, later


@pytest.mark.parametrize(
    ("whose", "what"),
    [(ScrubCatalog, "note_behind"), (LedgerCatalog, "next_id"), (MemoryObjectsClient, "head")],
)
def test_nor_is_any_deleted_where_that_could_not_be_told(
    whose: type, what: str, monkeypatch: Any
) -> None:
    """The first question fails once: whether the id was given, or leaving the mark behind it."""

    async def main() -> None:
        world, _ = await offloaded()
        lying = await given_and_not(world)
        world.clock.advance(2 * SAFETY_S)
        really, asked = getattr(whose, what), list[object]()

        async def fails_once(self: Any, *given: Any) -> Any:
            if not asked and given in ((), lying[1:]):
                asked.append(given)
                raise RetryableError("the connection is lost", remedy="Ask again")
            return await really(self, *given)

        monkeypatch.setattr(whose, what, fails_once)
        report = await scrub(world, BOTH)
        assert asked
        assert set(lying) <= world.bucket.objects.keys()
        assert not report.is_clean
        report = await scrub(world, BOTH)
        assert kinds(report) == ["metadata-older", "orphan-objects", "orphan-objects"]

    run_virtual(main())


def test_an_id_that_is_still_to_be_given_is_told_while_its_objects_are_young() -> None:
    """Before they are old ids may have passed it."""

    async def main() -> None:
        world, _ = await offloaded()
        await given_and_not(world)
        report = await scrub(world)
        assert kinds(report) == ["metadata-older"]
        assert await world.catalog().scrubs.is_restored()

    run_virtual(main())


def test_an_id_that_is_given_again_while_copies_are_read_was_still_to_be_given() -> None:
    """A deep scrub reads for hours, and ids go on meanwhile."""

    async def main() -> None:
        world, _ = await offloaded()
        lying = await given_and_not(world)
        world.clock.advance(2 * SAFETY_S)
        look = ManifestLook.no_cluster

        async def later(self: ManifestLook, *args: Any) -> Finding | None:
            await pass_ids(world, 1000)
            return await look(self, *args)

        with patch.object(ManifestLook, "no_cluster", later):
            report = await scrub(world, BOTH)
        assert kinds(report) == ["metadata-older", "orphan-objects", "orphan-objects"]
        assert set(lying) <= world.bucket.objects.keys()
        assert await world.catalog().scrubs.is_restored()

    run_virtual(main())


@pytest.mark.parametrize("arrives", [False, True])
def test_the_mark_is_left_also_where_the_answer_to_that_is_lost(
    arrives: bool, monkeypatch: Any
) -> None:
    """Nothing comes behind it that would tell whether it is there."""

    async def main() -> None:
        world, _ = await offloaded()
        await given_and_not(world)
        world.clock.advance(2 * SAFETY_S)
        really, lost = MemoryMetadataClient.create, list[str]()

        async def loses_an_answer(self: Any, path: str, data: bytes) -> None:
            if path != paths.RESTORED or lost:
                return await really(self, path, data)
            lost.append(path)
            if arrives:
                await really(self, path, data)
            raise IndeterminateError("the connection is lost", remedy="Look")

        monkeypatch.setattr(MemoryMetadataClient, "create", loses_an_answer)
        report = await scrub(world, BOTH)
        assert lost
        assert kinds(report) == ["metadata-older", "orphan-objects", "orphan-objects"]
        assert await world.catalog().scrubs.is_restored()

    run_virtual(main())
