"""ZooKeeper came back from an old backup, and the bucket's manifests are lost: nobody can tell.

docs/how-to/metadata-from-a-backup.md: what is the only whole copy of a ledger is deleted by no
leader, no worker and no scrub by schedule.
"""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import pass_ids, runner, scrub
from tests.unit.offload.world import ListHandle, World
from tests.unit.scheduler.manifests_kit import backup, manifests_of, restore
from tests.unit.scheduler.test_leaders_and_manifests import Judged
from tests.unit.scheduler.test_scheduler import ENTRIES, HOUR
from tierlog.adapters.memory.metadata import MemoryMetadataClient
from tierlog.catalog.ledgers import LedgerCatalog
from tierlog.catalog.scrubs import ScrubCatalog
from tierlog.format import paths
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.offload import GONE_FROM_TIER1
from tierlog.model.policy import Policy
from tierlog.model.scrub import FindingKind, ScrubState, ScrubWish
from tierlog.model.stream import Stream
from tierlog.offload.scrub import Scrubber

POLICY = Policy(offload_time_ms=0, deletion_lag_ms=60_000)
DAY = 24 * HOUR


class GoneHandle(ListHandle):
    """A ledger of which no storage node has anything any more."""

    def read_runs(self, *_: object, **__: object) -> Any:
        raise RetryableError("no node has it", remedy="Bring the nodes back")


async def begin(world: World, ledger_id: LedgerId, uuid: UUID) -> None:
    location = world.offloader().location(ledger_id, uuid)
    await world.catalog().contexts.begin_attempt(
        ledger_id, uuid=uuid, location=location, worker="w"
    )


async def end(world: World, ledger_id: LedgerId, uuid: UUID) -> None:
    metadata = await world.catalog().ledgers.get(ledger_id)
    assert metadata is not None
    handle = world.open_ledger(ledger_id, metadata)
    copy = await world.offloader().offload(handle, uuid, {})
    await world.catalog().contexts.complete_attempt(ledger_id, uuid=uuid, copy=copy)


async def lost(judged: Judged, monkeypatch: Any) -> tuple[Stream, dict[str, Any]]:
    """Metadata of before three ledgers went to the bucket, with no manifest and no local copy.

    They know one of the ledgers, and of another one the attempt; the third was made since.
    """
    world = judged.world
    claimed = await world.stream(policy=POLICY)
    known, under_way = [await world.seal(claimed, ENTRIES) for _ in range(2)]
    await begin(world, under_way, UUID(int=9))
    kept = backup(world.metadata)
    await end(world, under_way, UUID(int=9))
    later = await world.seal(claimed, ENTRIES)
    async with judged.running(leaders=1):
        await asyncio.sleep(600)
    for ledger_id in (known, under_way, later):
        assert (await world.context(ledger_id)).state in GONE_FROM_TIER1
    copies = {key: body for key, body in world.bucket.objects.items() if "-ledger-" in key}
    for key in manifests_of(world):
        del world.bucket.objects[key]
    judged.rules._chains.clear()
    restore(world.metadata, kept)

    def open_ledger(ledger_id: LedgerId, metadata: LedgerMetadata) -> ListHandle:
        return GoneHandle(ledger_id, world.ledgers[ledger_id], metadata)

    monkeypatch.setattr(world, "open_ledger", open_ledger)
    return claimed, copies


def test_what_is_the_only_copy_by_no_metadata_is_deleted_by_nobody(monkeypatch: Any) -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        _, copies = await lost(judged, monkeypatch)
        assert len(copies) >= 6
        async with judged.running(leaders=2):
            await asyncio.sleep(HOUR)
        assert manifests_of(world), "a leader has begun anew"
        assert copies.items() <= world.bucket.objects.items()
        world.clock.advance(2 * DAY)
        found = await scrub(world, ScrubWish(repair=True))
        assert found.counts[FindingKind.METADATA_OLDER] == 1
        assert copies.items() <= world.bucket.objects.items()

    run_virtual(main(), until_s=1e7)


def test_nor_once_ids_have_passed_what_was_given_but_for_who_asks_for_it(monkeypatch: Any) -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        await lost(judged, monkeypatch)
        world.clock.advance(2 * DAY)
        keys = [key for key in world.bucket.objects if key.endswith("-ledger-2")]
        assert len(keys) == 1
        scrubs, stop = runner(world), asyncio.Event()
        # Who asks before they know repairs nothing, and has not asked for what comes then.
        found = await scrubs.ask(ScrubWish(repair=True))
        async with asyncio.TaskGroup() as group:
            group.create_task(scrubs.run(stop))
            await asyncio.sleep(60)
            assert found.counts[FindingKind.METADATA_OLDER] == 1
            await pass_ids(world, 1000)
            await asyncio.sleep(DAY)
            stop.set()
        assert [one.wish.repair for one in await scrubs.reports()] == [False, True]
        assert keys[0] in world.bucket.objects
        asked = await scrub(world, ScrubWish(repair=True))
        assert keys[0] not in world.bucket.objects
        # Of ledgers that the metadata do know nothing goes, whoever asks.
        kept = {one.ledger_id for one in asked.findings if "no other copy" in one.kept}
        assert kept == {0}

    run_virtual(main(), until_s=1e7)


def test_nor_where_ids_were_made_to_pass_it_before_any_scrub_has_seen_it(monkeypatch: Any) -> None:
    """The how-to has the base raised before services start: each id was given from then on."""

    async def main() -> None:
        judged = Judged()
        world = judged.world
        _, copies = await lost(judged, monkeypatch)
        world.clock.advance(2 * DAY)
        await world.catalog().nodes.ensure_cluster(ledger_id_base=1000)
        scrubs, stop = runner(world), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(scrubs.run(stop))
            await asyncio.sleep(DAY)
            stop.set()
        assert [one.wish.repair for one in await scrubs.reports()] == [False]
        assert copies.items() <= world.bucket.objects.items()

    run_virtual(main(), until_s=1e7)


@pytest.mark.parametrize(
    ("whose", "what", "is_marked"),
    [(ScrubCatalog, "note_behind", False), (LedgerCatalog, "next_id", True)],
)
def test_nor_does_who_asks_lift_the_mark_by_a_scrub_that_could_not_tell(
    whose: type, what: str, is_marked: bool, monkeypatch: Any
) -> None:
    """The answer is lost once: it deleted nothing then, and nobody has asked for what comes."""

    async def main() -> None:
        judged = Judged()
        world = judged.world
        await lost(judged, monkeypatch)
        world.clock.advance(2 * DAY)
        keys = [key for key in world.bucket.objects if key.endswith("-ledger-2")]
        if is_marked:
            await world.catalog().scrubs.note_behind()
        really, asked = getattr(whose, what), list[object]()

        async def loses_an_answer(self: Any, *given: Any) -> Any:
            answer = await really(self, *given)
            if not asked:
                asked.append(answer)
                raise RetryableError("the connection is lost", remedy="Ask again")
            return answer

        monkeypatch.setattr(whose, what, loses_an_answer)
        scrubs, stop = runner(world), asyncio.Event()
        found = await scrubs.ask(ScrubWish(repair=True))
        async with asyncio.TaskGroup() as group:
            group.create_task(scrubs.run(stop))
            await asyncio.sleep(60)
            assert asked
            assert found.state is ScrubState.DONE
            await pass_ids(world, 1000)
            await asyncio.sleep(DAY)
            stop.set()
        assert keys[0] in world.bucket.objects

    run_virtual(main(), until_s=1e7)


def test_nor_does_who_asked_before_it_was_found_lift_the_mark(monkeypatch: Any) -> None:
    """The backup takes its place while a scrub is at work, and a storage node finds it."""

    async def main() -> None:
        world = World()
        await world.stream()
        scrubs, stop = runner(world), asyncio.Event()
        marks = world.catalog().scrubs
        really = Scrubber.run

        async def found_meanwhile(self: Scrubber, *given: Any, **named: Any) -> None:
            await really(self, *given, **named)
            await marks.note_behind()

        monkeypatch.setattr(Scrubber, "run", found_meanwhile)
        async with asyncio.TaskGroup() as group:
            group.create_task(scrubs.run(stop))
            for _ in range(2):
                found = await scrubs.ask(ScrubWish(repair=True))
                await asyncio.sleep(60)
                assert found.state is ScrubState.DONE
                assert not found.deletions_stopped
                assert await marks.is_restored()
                assert not found.is_clean, "it is told"
            monkeypatch.setattr(Scrubber, "run", really)
            found = await scrubs.ask(ScrubWish(repair=True))
            await asyncio.sleep(60)
            assert found.is_clean
            assert not await marks.is_restored()
            stop.set()

    run_virtual(main(), until_s=1e7)


@pytest.mark.parametrize("lost", [1, 100])
def test_a_mark_that_could_not_be_lifted_is_lifted_or_told(lost: int, monkeypatch: Any) -> None:
    """One lost connection kept scrubs by schedule from repairing for ever, and who asked was told
    that all is done.
    """

    async def main() -> None:
        world = World()
        await world.stream()
        scrubs, stop = runner(world), asyncio.Event()
        marks = world.catalog().scrubs
        await marks.note_behind()
        really, left = MemoryMetadataClient.delete, [lost]

        async def loses_it(self: Any, path: str, **named: Any) -> None:
            if path == paths.RESTORED and left[0]:
                left[0] -= 1
                raise IndeterminateError("the connection is lost", remedy="Look")
            await really(self, path, **named)

        monkeypatch.setattr(MemoryMetadataClient, "delete", loses_it)
        found = await scrubs.ask(ScrubWish(repair=True))
        async with asyncio.TaskGroup() as group:
            group.create_task(scrubs.run(stop))
            await asyncio.sleep(300)
            stop.set()
        assert found.state is ScrubState.DONE
        assert found.is_clean is not await marks.is_restored()

    run_virtual(main(), until_s=1e7)


@pytest.mark.parametrize("is_marked", [False, True])
def test_of_a_mark_that_could_not_be_read_who_asks_is_told_only_where_it_is_there(
    is_marked: bool, monkeypatch: Any
) -> None:
    """ZooKeeper was away when the scrub began, and most clusters never had a mark."""

    async def main() -> None:
        world = World()
        await world.stream()
        scrubs, stop = runner(world), asyncio.Event()
        marks = world.catalog().scrubs
        if is_marked:
            await marks.note_behind()
        really, asked = ScrubCatalog.mark, list[object]()

        async def is_away_once(self: ScrubCatalog) -> int | None:
            asked.append(self)
            if len(asked) == 1:
                raise RetryableError("ZooKeeper is away", remedy="Ask again")
            return await really(self)

        monkeypatch.setattr(ScrubCatalog, "mark", is_away_once)
        found = await scrubs.ask(ScrubWish(repair=True))
        async with asyncio.TaskGroup() as group:
            group.create_task(scrubs.run(stop))
            await asyncio.sleep(60)
            stop.set()
        assert asked
        assert found.state is ScrubState.DONE
        assert await marks.is_restored() is is_marked, "of which nobody asked, as far as is known"
        assert ["ZooKeeper is away" in one for one in found.unread] == [True] * is_marked
        assert found.is_clean is not is_marked

    run_virtual(main(), until_s=1e7)


def test_what_an_attempt_left_that_seemed_to_be_the_last_goes_behind_a_complete_one() -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        await begin(world, ledger_id, UUID(int=9))
        metadata = await world.catalog().ledgers.get(ledger_id)
        assert metadata is not None
        # It died between its last byte and the metadata.
        await world.offloader().offload(world.open_ledger(ledger_id, metadata), UUID(int=9), {})
        worker = world.worker()
        await worker.handle(world.request(claimed, ledger_id))
        assert (await world.context(ledger_id)).complete
        assert [key for key in world.bucket.objects if str(UUID(int=9)) in key]
        async with judged.running(leaders=1):
            await asyncio.sleep(HOUR)
        assert not [key for key in world.bucket.objects if str(UUID(int=9)) in key]
        assert not (await world.context(ledger_id)).abandoned

    run_virtual(main())
