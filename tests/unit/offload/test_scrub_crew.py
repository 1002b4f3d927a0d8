"""A scrub with a crew finds what one alone finds; what nobody asks for is left as it is."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, DEEP, SAFETY_S, kinds, plant, plant_upload, scrubber
from tests.unit.offload.test_scrub import offloaded, write_manifest
from tests.unit.offload.world import STREAM, World
from tierlog.format import paths
from tierlog.format.keys import ObjectRole, object_keys, parse_key
from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.scrub import FindingKind, ScrubReport, ScrubState, ScrubWish
from tierlog.offload.scrub import NOT_ASKED, Scrubber
from tierlog.offload.scrub_crew import ListedAttempt, Listing, StreamLook
from tierlog_scheduler.scrubs_api import ScrubWishDocument


def new_report(world: World, wish: ScrubWish) -> ScrubReport:
    return ScrubReport(
        scrub_id=world.ids.uuid(), wish=wish, started_ms=world.clock.wall_ms(), findings_max=100
    )


class InProcess:
    """A crew that is one process, and looks at each ledger by itself, the last one twice."""

    def __init__(self, world: World, found: Scrubber, wish: ScrubWish) -> None:
        self._world = world
        self._scrubber = found
        self._wish = wish

    async def listing(self) -> Listing:
        found = Listing()
        sizes: dict[tuple[UUID, LedgerId], list[tuple[ObjectRole, int]]] = {}
        async for info in self._world.bucket.connect().list(""):
            found.objects += 1
            parsed = parse_key("", info.key)
            if parsed is not None:
                at = (parsed.uuid, parsed.ledger_id)
                sizes.setdefault(at, []).append((parsed.role, info.size))
            elif not info.key.startswith(("streams/", "cluster/")):
                found.foreign += 1
        # In no order at all, as many tasks bring it.
        found.attempts = [
            ListedAttempt(uuid, ledger_id, tuple(some))
            for (uuid, ledger_id), some in reversed(sizes.items())
        ]
        return found

    async def looks(self, names: Sequence[StreamName]) -> AsyncIterator[StreamLook]:
        for name in names:
            ids = [LedgerId(0)]
            with contextlib.suppress(CorruptError):
                snapshot = await self._world.catalog().streams.snapshot(name)
                ids = [one.ledger_id for one in snapshot.ledgers]
            for one in [*ids, *ids[-1:]]:
                report = new_report(self._world, self._wish)
                yield await self._scrubber.look(report, name, {one})


async def both(world: World, wish: ScrubWish) -> tuple[ScrubReport, ScrubReport]:
    """Scrub alone and with a crew; what either does to metadata the other bears."""
    alone, found = new_report(world, wish), scrubber(world)
    await found.run(alone)
    crewed = new_report(world, wish)
    await found.run(crewed, crew=InProcess(world, found, wish))
    for one in (alone, crewed):
        one.state = ScrubState.DONE
    return alone, crewed


def told(report: ScrubReport) -> list[tuple[object, ...]]:
    return sorted(
        (one.kind.value, one.stream, one.ledger_id or 0, str(one.uuid), one.key, one.cause)
        for one in report.findings
    )


def spoil(world: World, key: str) -> None:
    world.bucket.damage(key, 700)


@pytest.mark.parametrize("deep", [False, True])
def test_it_finds_the_same_as_one_process(deep):
    async def main():
        world, made = await offloaded(5)
        contexts = [await world.context(one) for one in made]
        await plant(world, 5)
        await plant(world, 6, 901, cluster_id=UUID(int=3))
        await plant_upload(world, object_keys("", UUID(int=7), LedgerId(902)).data)
        await world.bucket.connect().put("holiday.jpg", b"x", metadata={})
        locations = [one.location for one in contexts]
        assert locations[1] is not None
        assert locations[4] is not None
        spoil(world, locations[1].data_key)
        await world.bucket.connect().delete(locations[4].side_key)
        world.clock.advance(2 * SAFETY_S)
        alone, crewed = await both(world, DEEP if deep else ScrubWish())
        expected = ["missing-object", "orphan-objects", "orphan-upload"]
        if deep:
            expected.insert(0, "damaged-data")
        # In a bucket that is shared an upload may be anybody's.
        expected.remove("orphan-upload")
        assert kinds(alone) == expected
        assert told(crewed) == told(alone)
        assert crewed.counts == alone.counts
        for name in ("objects", "uploads", "streams", "remaining", "unread"):
            assert getattr(crewed, name) == getattr(alone, name)
        for one in (made[4], *(made[1:2] if deep else ())):
            assert (await world.context(one)).doubt is not None

    run_virtual(main())


def test_what_had_no_room_in_a_part_of_the_report_is_counted():
    class Brief(InProcess):
        """Looks at all of a stream in one, and keeps two findings of it."""

        async def looks(self, names: Sequence[StreamName]) -> AsyncIterator[StreamLook]:
            streams = self._world.catalog().streams
            for name in names:
                ids = {one.ledger_id for one in (await streams.snapshot(name)).ledgers}
                report = replace(new_report(self._world, self._wish), findings_max=2)
                yield await self._scrubber.look(report, name, ids)

    async def main():
        world, made = await offloaded(5)
        for one in made:
            location = (await world.context(one)).location
            assert location is not None
            await world.bucket.connect().delete(location.side_key)
        world.clock.advance(2 * SAFETY_S)
        wish = ScrubWish()
        crewed, found = new_report(world, wish), scrubber(world)
        await found.run(crewed, crew=Brief(world, found, wish))
        assert crewed.counts[FindingKind.MISSING_OBJECT] == len(made) == 5
        assert (len(crewed.findings), crewed.findings_left_off) == (2, 3)

    run_virtual(main())


def test_metadata_that_are_older_than_a_manifest_are_told_once():
    async def main():
        world, made = await offloaded(3)
        await plant(world, 5)
        catalog = world.catalog()
        kept = await world.context(made[1])
        old = replace(kept, uuid=UUID(int=99))
        await catalog.contexts.change(
            made[1], lambda _: old, applied=lambda context: context.uuid == old.uuid
        )
        world.clock.advance(2 * SAFETY_S)
        alone, crewed = await both(world, ScrubWish())
        assert alone.counts[FindingKind.METADATA_OLDER] == 1
        assert told(crewed) == told(alone)
        assert bool(crewed.deletions_stopped)

    run_virtual(main())


def test_a_stream_that_can_not_be_read_is_said_and_the_others_are_looked_at():
    async def main():
        world, _ = await offloaded(2)
        await plant(world, 5)
        await world.catalog().store.set(paths.stream_path(STREAM), b"damaged", version=-1)
        world.clock.advance(2 * SAFETY_S)
        alone, crewed = await both(world, ScrubWish())
        assert alone.unread
        assert crewed.unread[0] == alone.unread[0]
        assert told(crewed) == told(alone)
        assert bool(crewed.deletions_stopped)
        assert not crewed.is_clean

    run_virtual(main())


def test_what_nobody_asked_for_is_told_and_left_as_it_is():
    async def main():
        world, made = await offloaded(3)
        await write_manifest(world)
        contexts = [await world.context(one) for one in made]
        for one in contexts:
            assert one.location is not None
            spoil(world, one.location.data_key)
        assert contexts[1].location is not None
        await world.bucket.connect().delete(contexts[1].location.side_key)
        orphans = [await plant(world, 5, 900), await plant(world, 6, 901)]
        world.clock.advance(2 * SAFETY_S)
        wish = replace(BOTH, ledgers=frozenset({made[0], LedgerId(901)}))
        report = new_report(world, wish)
        await scrubber(world).run(report)
        found = {(one.kind.value, one.ledger_id): one for one in report.findings}
        assert set(found) == {
            ("damaged-data", made[0]),
            ("missing-object", made[1]),
            ("orphan-objects", 900),
            ("orphan-objects", 901),
        }, "data of those that were not asked for are not read"
        assert found["damaged-data", made[0]].repaired
        assert found["missing-object", made[1]].kept == NOT_ASKED
        assert found["orphan-objects", LedgerId(900)].kept == NOT_ASKED
        there = [one in world.bucket.objects for one in orphans]
        assert there == [True, False]
        assert (await world.context(made[1])).uuid == contexts[1].uuid

    run_virtual(main())


def test_the_api_takes_ledgers_by_their_numbers():
    asked = ScrubWishDocument.model_validate({"repair": True, "ledgers": [3, 4]}).wish()
    assert asked == ScrubWish(repair=True, ledgers=frozenset({LedgerId(3), LedgerId(4)}))
    assert ScrubWishDocument().wish().asks_for(LedgerId(1))
    assert not asked.asks_for(None)
    for bad in ([-1], ["x"], [2**70], list(range(10_001))):
        with pytest.raises(ValueError, match="ledgers"):
            ScrubWishDocument.model_validate({"ledgers": bad})
