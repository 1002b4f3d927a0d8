"""Ledgers that a scrub can't read, or that go under it: what becomes of the look at all others."""

from typing import Any
from unittest.mock import patch

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, REPAIR, SAFETY_S, kinds, plant, scrub
from tests.unit.offload.test_scrub import offloaded, write_manifest
from tests.unit.offload.test_scrub import spoil as damage
from tests.unit.offload.world import World
from tests.unit.scheduler.manifests_kit import backup, manifests_of, restore
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.format import paths
from tierlog.model.errors import RetryableError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.scrub import FindingKind
from tierlog.model.trimming import TrimGrounds
from tierlog.offload.scrub_copies import CopyLook

GONE, BAD, LAST = StreamName("a.gone"), StreamName("a.bad"), StreamName("zebra")
K = FindingKind


async def spoil(world: World, path: str) -> None:
    store = world.catalog().store
    found = await store.get(path)
    assert found is not None
    await store.set(path, b"\xff\xff", version=found.version)


async def with_an_orphan() -> tuple[World, list[LedgerId], str]:
    """Return a world with two copies, and an attempt in the bucket that nobody names."""
    world, made = await offloaded(2)
    return world, made, await plant(world, 5)


@pytest.mark.parametrize(("path", "deletes"), [("context", False), ("ledger", True)])
def test_a_record_that_cannot_be_read_is_told_and_all_else_is_looked_at(path, deletes):
    async def main():
        world, (first, _), orphan = await with_an_orphan()
        bad = await world.seal(await world.stream(BAD), [b"x"] * 3)
        await world.seal(await world.stream(LAST), [b"x"] * 3)
        context = await world.context(first)
        assert context.location is not None
        await world.bucket.connect().delete(context.location.index_key)
        world.clock.advance(SAFETY_S + 1)
        await spoil(world, paths.context_path(bad) if path == "context" else paths.ledger_path(bad))
        report = await scrub(world, BOTH)
        assert report.streams == 3
        assert report.ledgers == 4
        (told,) = report.unread
        assert told.startswith(f"ledger {bad} of {BAD}: ")
        assert not report.is_clean
        assert report.counts[K.MISSING_OBJECT] == 1, "damage elsewhere is told"
        # What is unknown may name what nothing else does; what is known names what it does.
        assert report.counts[K.ORPHAN_OBJECTS] == 1
        assert (orphan not in world.bucket.objects) == deletes
        stopped = f"the context of ledger {bad} could not be read"
        assert report.deletions_stopped == ("" if deletes else stopped)

    run_virtual(main())


def test_a_stream_that_is_deleted_under_a_scrub_ends_nothing_of_it():
    async def main():
        world, _, orphan = await with_an_orphan()
        claimed = await world.stream(GONE)
        mine = [await world.seal(claimed, [b"x"] * 3) for _ in range(3)]
        world.clock.advance(SAFETY_S + 1)
        whole, done = CopyLook.contexts_of, list[StreamName]()

        async def between(self, name, some, report):
            if name == GONE and not done:
                done.append(name)
                retention, grounds = world.catalog().retention, TrimGrounds(policy=None)
                await retention.begin_stream_deletion(GONE)
                await retention.begin_trim(GONE, claimed.incarnation, mine, grounds=grounds)
                for one in mine:
                    await retention.drop_tier1(one)
                    await retention.finish_trim(GONE, claimed.incarnation, one)
                await retention.remove_stream(GONE, claimed.incarnation)
            return await whole(self, name, some, report)

        with patch.object(CopyLook, "contexts_of", between):
            report = await scrub(world, BOTH)
        assert done
        assert kinds(report) == [K.ORPHAN_OBJECTS.value]
        assert (report.unread, report.deletions_stopped) == ([], "")
        assert orphan not in world.bucket.objects

    run_virtual(main())


def test_a_copy_that_could_not_be_looked_at_is_not_sound_for_that(monkeypatch: Any) -> None:
    """By metadata from a backup the ledger has the copy that was replaced, and swept, since."""

    async def main() -> None:
        world, (ledger_id,) = await offloaded()
        kept, before = backup(world.metadata), await world.context(ledger_id)
        damage(world, before, "data")
        assert (await scrub(world, REPAIR)).repaired
        damage(world, before, "index")
        damage(world, before, "side")
        only = (await world.context(ledger_id)).location
        assert only is not None
        # Manifests are lost too, and a leader has begun anew.
        for key in manifests_of(world):
            del world.bucket.objects[key]
        restore(world.metadata, kept)
        await write_manifest(world)
        world.clock.advance(2 * SAFETY_S)
        really, failed = MemoryObjectsClient.head, list[str]()

        async def fails_once(self: Any, key: str) -> Any:
            if before.location is not None and key in before.location.keys and not failed:
                failed.append(key)
                raise RetryableError("the connection is lost", remedy="Ask again")
            return await really(self, key)

        monkeypatch.setattr(MemoryObjectsClient, "head", fails_once)
        report = await scrub(world, REPAIR)
        assert failed
        assert kinds(report) == [K.ORPHAN_OBJECTS.value]
        assert not report.deletions_stopped
        assert world.bucket.objects.keys() >= set(only.keys)
        assert kinds(await scrub(world)) == [K.ORPHAN_OBJECTS.value, K.POINTS_NOWHERE.value]

    run_virtual(main())
