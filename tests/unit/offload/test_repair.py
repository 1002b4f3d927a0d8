"""A damaged copy is repaired from whatever is left of the ledger; what is nowhere is named."""

import random
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import (
    BOTH,
    REPAIR,
    kinds,
    metadata,
    only_doubted,
    plant_upload,
    repairer,
    scrub,
)
from tests.unit.offload.test_scrub import ENTRIES, copy_arguments, spoil, write_manifest
from tests.unit.offload.world import BLOCK, STREAM, ListHandle, World, entries_of
from tests.unit.scheduler.test_scheduler import scheduler
from tierlog.adapters.memory.faults import Faults
from tierlog.format.entry import encode_entry
from tierlog.format.index import ObjectIndex
from tierlog.format.ledger_metadata import encode_bare
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import (
    KEY_BLOCK_SIZE,
    KEY_INCARNATION,
    KEY_LOST,
    KEY_RAW,
    KEY_STREAM,
    KEY_STRIPE_ENTRIES,
)
from tierlog.model.offload import AbandonedAttempt, OffloadContext, OffloadState
from tierlog.model.policy import Policy
from tierlog.model.scrub import FindingKind, ScrubReport, ScrubWish
from tierlog.offload.repair import AT_WORK
from tierlog.offload.scrub_rules import Survey
from tierlog.ports.objects import ObjectInfo
from tierlog.ports.throttle import TokenBucket
from tierlog_scheduler.manifests import BucketManifests

S = OffloadState
APPENDS = [
    encode_entry([bytes([number]) * number], publish_time_ms=1000 + number) for number in range(30)
]


async def offloaded(
    entries=ENTRIES, *, gone: bool = True, block_size: int = BLOCK, raw: bool = False, **settings
) -> tuple[World, OffloadContext]:
    """Return a world with a ledger in tier 2, and its context; ``gone``: there alone."""
    world = World(block_size=block_size)
    claimed = await world.stream(raw=raw)
    ledger_id = await world.seal(claimed, entries)
    await world.worker(**settings).handle(world.request(claimed, ledger_id))
    await write_manifest(world)
    if gone:
        await delete_locally(world, ledger_id)
    return world, await world.context(ledger_id)


async def delete_locally(world: World, ledger_id: LedgerId) -> None:
    catalog, context = world.catalog(), await world.context(ledger_id)
    assert context.uuid is not None
    begun = await catalog.contexts.begin_tier1_deletion(ledger_id, uuid=context.uuid)
    await catalog.ledgers.delete_tier1(ledger_id, begun)


async def read_back(world: World, ledger_id: LedgerId) -> list[bytes]:
    """Read all of a ledger's copy in tier 2."""
    context = await world.context(ledger_id)
    assert context.uuid is not None
    handle = await world.offloader().read_offloaded(
        ledger_id, context.uuid, context.location, copy=context.copy
    )
    return await entries_of(handle)


def flip(world: World, key: str, offset: int) -> None:
    world.bucket.damage(key, offset)


def cut(world: World, key: str, length: int) -> None:
    info, body = world.bucket.objects[key]
    world.bucket.objects[key] = (replace(info, size=length), body[:length])


async def repaired(world: World, was: OffloadContext, report: ScrubReport, source: str) -> None:
    """The copy was repaired, says the report, and so it is."""
    assert report.remaining == 0, report.findings
    assert [one.repaired for one in report.findings] == [f"copied anew, from {source}"]
    now = await world.context(was.ledger_id)
    assert (now.state, now.complete, now.repair) == (was.state, True, None)
    assert now.uuid != was.uuid
    assert was.uuid is not None
    assert now.swept_at(was.uuid) == 0
    assert await read_back(world, was.ledger_id) == world.ledgers[was.ledger_id]
    assert kinds(await scrub(world, BOTH)) == []


@pytest.mark.parametrize("role", ["index", "index flipped", "side", "side flipped", "both"])
def test_index_and_side_object_are_rebuilt_from_the_data_object_alone(role: str):
    async def main():
        world, was = await offloaded(data_sha256=True)
        assert was.location is not None
        for name, key in (("index", was.location.index_key), ("side", was.location.side_key)):
            if role == f"{name} flipped":
                flip(world, key, 50)
            elif role in {name, "both"}:
                del world.bucket.objects[key]
        with pytest.raises((CorruptError, RefusedError)):
            await read_back(world, was.ledger_id)
        report = await scrub(world, BOTH)
        await repaired(world, was, report, "what is good in tier 2")
        now = await world.context(was.ledger_id)
        assert now.copy is not None
        assert was.copy is not None
        # The same data; the index too, where the ledger's metadata were left in it.
        assert now.copy.data_sha256 in {b"", was.copy.data_sha256}
        assert now.copy.data_len == was.copy.data_len
        if "side" in role:
            assert now.copy.index_sha256 == was.copy.index_sha256

    run_virtual(main())


@pytest.mark.parametrize("raw", [False, True])
def test_an_index_that_is_made_of_the_list_alone_says_whether_its_stream_is_raw(raw: bool):
    """An export breaks up what is not: it would find no events in entries of a raw stream."""

    async def main():
        world, was = await offloaded(raw=raw, data_sha256=True)
        assert was.location is not None
        del world.bucket.objects[was.location.index_key]
        await repaired(world, was, await scrub(world, BOTH), "what is good in tier 2")
        now = await world.context(was.ledger_id)
        assert now.location is not None
        made = ObjectIndex.decode(world.bucket.objects[now.location.index_key][1])
        assert made.metadata.custom[KEY_RAW] == str(int(raw)).encode()

    run_virtual(main())


def test_without_a_side_object_the_entries_own_checksums_vouch_and_give_their_times():
    async def main():
        appends = [
            encode_entry([bytes(9000)], publish_time_ms=1000 + number) for number in range(30)
        ]
        world, was = await offloaded(appends, block_size=150_000)
        assert was.location is not None
        del world.bucket.objects[was.location.side_key]
        await repaired(world, was, await scrub(world, REPAIR), "what is good in tier 2")
        now = await world.context(was.ledger_id)
        assert now.uuid is not None
        handle = await world.offloader().read_offloaded(
            was.ledger_id, now.uuid, now.location, copy=now.copy
        )
        for number in (0, 7, 29):
            found = await handle.entry_at_time(1000 + number)
            assert found is not None
            # Of each 64 KiB its own times were found.
            assert number - 8 <= found <= number

    run_virtual(main())


@pytest.mark.parametrize("entries", [ENTRIES, APPENDS])
@pytest.mark.parametrize("sha256", [True, False])
def test_data_that_nothing_vouches_for_are_kept_and_not_called_good(entries, sha256: bool):
    async def main():
        world, was = await offloaded(entries, data_sha256=sha256)
        assert was.location is not None
        del world.bucket.objects[was.location.side_key]
        # In the last entry's payload: no frame says a word of it.
        flip(world, was.location.data_key, -1)
        report = await scrub(world, REPAIR)
        assert report.remaining == 1
        assert "no side object any more" in report.findings[0].kept
        assert "Bring" in report.findings[0].remedy
        await only_doubted(world, was)

    run_virtual(main())


@pytest.mark.parametrize("offset", [300, 700, -1])
def test_entries_that_are_in_no_copy_are_named_and_the_others_stay_readable(offset: int):
    async def main():
        world, was = await offloaded()
        assert was.location is not None
        assert was.copy is not None
        flip(world, was.location.data_key, offset)
        before = dict(world.bucket.objects)
        report = await scrub(world, BOTH)
        (found,) = report.findings
        assert (found.kind, report.remaining) == (FindingKind.DAMAGED_DATA, 1)
        lost = {one for first, last in found.lost for one in range(first, last + 1)}
        assert 0 < len(lost) == found.lost_count < len(ENTRIES)
        assert f"{len(lost)} entries are in no copy" in found.kept
        await only_doubted(world, was)
        assert world.bucket.objects == before
        assert was.uuid is not None
        handle = await world.offloader().read_offloaded(
            was.ledger_id, was.uuid, was.location, copy=was.copy
        )
        for one in range(len(ENTRIES)):
            if one not in lost:
                assert await entries_of(handle, one, one) == [ENTRIES[one]]

    run_virtual(main())


def test_of_a_data_object_that_was_cut_the_rest_is_named():
    async def main():
        world, was = await offloaded()
        assert was.location is not None
        assert was.copy is not None
        cut(world, was.location.data_key, was.copy.data_len // 2)
        report = await scrub(world, REPAIR)
        (found,) = report.findings
        assert found.kind is FindingKind.WRONG_OBJECT
        ((first, last),) = found.lost
        assert (first > 0, last) == (True, len(ENTRIES) - 1)
        assert found.lost_count == last + 1 - first
        del world.bucket.objects[was.location.data_key]
        report = await scrub(world, REPAIR)
        assert report.findings[0].lost == ((0, len(ENTRIES) - 1),)
        await only_doubted(world, was)

    run_virtual(main())


@pytest.mark.parametrize("what", ["data", "flipped", "index", "side"])
def test_what_is_good_in_either_tier_is_put_together(what: str):
    async def main():
        # The second half of the local copy is lost, and in tier 2 something of the first half.
        world, was = await offloaded(gone=False, data_sha256=True)
        spoil(world, was, what)
        report = await scrub(world, BOTH, damaged_locally=True)
        if what == "data":
            assert report.findings[0].lost == ((len(ENTRIES) // 2, len(ENTRIES) - 1),)
            await only_doubted(world, was)
            return
        await repaired(world, was, report, "what is good in both tiers")

    run_virtual(main())


async def with_older_attempt(world: World, was: OffloadContext) -> OffloadContext:
    """Return the context with an abandoned attempt, all of whose objects still lie there."""
    location = world.offloader().location(was.ledger_id, UUID(int=99))
    handle = ListHandle(was.ledger_id, world.ledgers[was.ledger_id])
    handle.ledger_metadata = (await index_of(world, was)).metadata
    await world.offloader().offload(handle, UUID(int=99), {})
    left = AbandonedAttempt(uuid=UUID(int=99), location=location, abandoned_ms=1)
    return await world.catalog().contexts.change(
        was.ledger_id,
        lambda context: replace(context, abandoned=(left,)),
        applied=lambda context: context.abandoned == (left,),
    )


async def index_of(world: World, context: OffloadContext) -> ObjectIndex:
    assert context.location is not None
    return ObjectIndex.decode(world.bucket.objects[context.location.index_key][1])


def test_an_older_attempt_that_still_lies_there_helps():
    async def main():
        world, was = await offloaded()
        found, wanted = await with_older_attempt(world, was), await index_of(world, was)
        assert was.location is not None
        # Each lacks something: one a grain and what stands beside it, the other another grain.
        flip(world, was.location.data_key, 300)
        del world.bucket.objects[was.location.side_key]
        del world.bucket.objects[was.location.index_key]
        flip(world, found.abandoned[0].location.data_key, 700)
        await repaired(world, found, await scrub(world, BOTH), "what is good in tier 2")
        # With what the stream's list does not know: where it lay, and all that was said of it.
        assert await index_of(world, await world.context(was.ledger_id)) == wanted

    run_virtual(main())


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize(
    ("text", "damaged"),
    [
        (b"logs", b"logw"),
        (b"tierlog/stream", b"tierlog/strean"),
        (b"tierlog/incarnation", b"tierlog/incarnatioo"),
        (b"512", b"513"),
        (b"1000000000", b"1000000001"),
    ],
)
def test_an_older_attempts_index_is_not_believed_against_what_is_known(text, damaged, gone: bool):
    async def main():
        world, was = await offloaded(gone=gone)
        found, wanted = await with_older_attempt(world, was), (await index_of(world, was)).metadata
        assert was.location is not None
        del world.bucket.objects[was.location.index_key]
        key = found.abandoned[0].location.index_key
        info, body = world.bucket.objects[key]
        assert text in body
        # Nothing but the entries says what an index must be: it has no checksum of its own.
        world.bucket.objects[key] = (info, body.replace(text, damaged))
        report = await scrub(world, BOTH, damaged_locally=not gone)
        source = "what is good in tier 2" if gone else "what is good in both tiers"
        await repaired(world, found, report, source)
        made = (await index_of(world, await world.context(was.ledger_id))).metadata
        if text == b"1000000000" and gone:
            # Nobody else knows how it was striped, and in tier 2 it matters to nobody.
            made = replace(made, custom={**made.custom, KEY_STRIPE_ENTRIES: text})
        if not gone or text == b"1000000000":
            assert made == wanted
            return
        assert (made.length, made.last_entry_id) == (wanted.length, wanted.last_entry_id)
        for name in (KEY_STREAM, KEY_INCARNATION, KEY_BLOCK_SIZE):
            assert made.custom[name] == wanted.custom[name]

    run_virtual(main())


def test_an_older_attempts_index_hides_no_entries():
    async def main():
        world, was = await offloaded()
        found = await with_older_attempt(world, was)
        assert was.location is not None
        del world.bucket.objects[was.location.index_key]
        key = found.abandoned[0].location.index_key
        info, body = world.bucket.objects[key]
        index = ObjectIndex.decode(body)
        custom = {**index.metadata.custom, KEY_LOST: b"1-2"}
        lossy = replace(index.metadata, custom=custom)
        index = replace(index, metadata=lossy, metadata_raw=encode_bare(lossy))
        world.bucket.objects[key] = (info, index.encode())
        await repaired(world, found, await scrub(world, BOTH), "what is good in tier 2")
        made = await index_of(world, await world.context(was.ledger_id))
        assert made.metadata.lost == ()

    run_virtual(main())


def test_a_local_copy_that_was_about_to_go_is_kept_and_the_copy_made_anew():
    async def main():
        world, context = await offloaded(gone=False)
        catalog = world.catalog()
        assert context.uuid is not None
        begun = await catalog.contexts.begin_tier1_deletion(context.ledger_id, uuid=context.uuid)
        spoil(world, context, "flipped")
        report = await scrub(world, BOTH)
        await repaired(world, replace(begun, state=S.COMPLETE), report, "the local copy")
        # Who was about to delete it, and slept, is refused.
        with pytest.raises(RefusedError):
            await catalog.ledgers.delete_tier1(context.ledger_id, begun)
        assert await catalog.ledgers.get(context.ledger_id) is not None

    run_virtual(main())


@pytest.mark.parametrize("superseded", [True, False])
def test_an_attempt_that_repairs_is_nobodys_orphan(superseded: bool):
    async def main():
        world, was = await offloaded()
        now = await begun(world, was, 5)
        assert now.repair is not None
        location = now.repair.location
        if superseded:
            await begun(world, was, 6)
        await world.bucket.connect().put(location.data_key, b"x", metadata=metadata())
        await plant_upload(world, location.data_key)
        before = set(world.bucket.objects)
        other = repairer(world)
        async with other._lock(was.ledger_id) as taken:
            assert taken
            report = await scrub(world, REPAIR, safety_age_s=0)
        assert (kinds(report), report.unread) == ([], [])
        assert (set(world.bucket.objects), len(world.bucket.uploads)) == (before, 1)
        # Nor at the first look.
        survey = Survey()
        for info in sorted((one for one, _ in world.bucket.objects.values()), key=key_of):
            survey.see_object(info)
        assert survey.see_context(await world.context(was.ledger_id)) is None
        assert list(survey.unnamed()) == []

    run_virtual(main())


def key_of(info: ObjectInfo) -> str:
    return info.key


async def begun(world: World, was: OffloadContext, uuid: int) -> OffloadContext:
    """Begin a repair, as someone who dies then does."""
    assert was.uuid is not None
    location = world.offloader().location(was.ledger_id, UUID(int=uuid))
    return await world.catalog().contexts.begin_repair(
        was.ledger_id, damaged=was.uuid, uuid=UUID(int=uuid), location=location, worker="dead"
    )


def test_while_a_copy_is_repaired_nobody_deletes_the_local_one_nor_offloads():
    async def main():
        world, was = await offloaded(gone=False)
        repairing = await begun(world, was, 5)
        catalog = world.catalog()
        assert was.uuid is not None
        with pytest.raises(RefusedError):
            await catalog.contexts.begin_tier1_deletion(was.ledger_id, uuid=was.uuid)
        claimed = await catalog.streams.get(STREAM)
        await world.worker().handle(world.request(claimed, was.ledger_id))
        assert await world.context(was.ledger_id) == repairing
        # The damaged copy is as readable as it was.
        assert repairing.complete
        assert await read_back(world, was.ledger_id) == ENTRIES

    run_virtual(main())


@pytest.mark.parametrize("gone", [True, False])
def test_a_repair_that_nobody_is_at_any_more_is_told_and_ended(gone: bool):
    async def main():
        world, was = await offloaded(gone=gone)
        repairing = await begun(world, was, 5)
        report = await scrub(world)
        assert kinds(report) == ["unfinished-repair"]
        assert await world.context(was.ledger_id) == repairing
        mended = await scrub(world, REPAIR)
        source = "what is good in tier 2" if gone else "the local copy"
        await repaired(world, was, mended, source)
        now = await world.context(was.ledger_id)
        assert now.swept_at(UUID(int=5)) == 0

    run_virtual(main())


def test_a_repair_that_has_lost_something_meanwhile_is_called_off():
    async def main():
        world, was = await offloaded()
        await begun(world, was, 5)
        spoil(world, was, "flipped")
        report = await scrub(world, BOTH)
        assert report.findings[0].lost
        now = await world.context(was.ledger_id)
        assert (now.state, now.uuid, now.repair) == (S.TIER1_DELETED, was.uuid, None)
        assert now.swept_at(UUID(int=5)) == 0
        assert "in no copy" in now.last_error

    run_virtual(main())


def test_who_holds_the_ledgers_lock_is_left_alone():
    async def main():
        world, was = await offloaded()
        repairing = await begun(world, was, 5)
        other = repairer(world)
        async with other._lock(was.ledger_id) as taken:
            assert taken
            assert kinds(await scrub(world, REPAIR)) == []
            spoil(world, was, "index")
            report = await scrub(world, REPAIR)
            assert [one.kept for one in report.findings] == [AT_WORK]
        await only_doubted(world, repairing)
        assert (await scrub(world, REPAIR)).remaining == 0

    run_virtual(main())


def test_of_two_repairs_only_the_one_that_began_last_completes():
    async def main():
        world, was = await offloaded()
        catalog, copy = world.catalog(), was.copy
        assert copy is not None
        await begun(world, was, 5)
        second = await begun(world, was, 6)
        assert second.swept_at(UUID(int=5)) == 0
        with pytest.raises(RefusedError, match="superseded"):
            await catalog.contexts.complete_repair(was.ledger_id, uuid=UUID(int=5), copy=copy)
        # Nor does its failure end the other one.
        assert (
            await catalog.contexts.give_up_repair(was.ledger_id, uuid=UUID(int=5), error="x")
        ) == second
        done = await catalog.contexts.complete_repair(was.ledger_id, uuid=UUID(int=6), copy=copy)
        assert (done.uuid, done.state) == (UUID(int=6), S.TIER1_DELETED)
        with pytest.raises(RefusedError):
            await catalog.contexts.complete_repair(was.ledger_id, uuid=UUID(int=5), copy=copy)

    run_virtual(main())


def test_a_ledger_that_is_trimmed_meanwhile_is_not_repaired_and_all_of_it_goes():
    async def main():
        world, was = await offloaded()
        catalog, copy = world.catalog(), was.copy
        assert copy is not None
        await begun(world, was, 5)
        stream = await catalog.streams.get(STREAM)
        await catalog.streams.set_policy(STREAM, Policy(retention_size_bytes=0))
        taken = await catalog.retention.begin_trim(
            STREAM, stream.incarnation, [was.ledger_id], grounds=await world.grounds()
        )
        assert taken == 1
        trimming = await world.context(was.ledger_id)
        assert (trimming.state, trimming.repair) == (S.TRIMMING, None)
        assert {one.uuid for one in trimming.abandoned} == {was.uuid, UUID(int=5)}
        with pytest.raises(RefusedError, match="TRIMMING"):
            await catalog.contexts.complete_repair(was.ledger_id, uuid=UUID(int=5), copy=copy)

    run_virtual(main())


def test_the_damaged_copy_is_swept_only_once_a_manifest_names_the_new_one():
    async def main():
        world, was = await offloaded()
        gate, catalog = BucketManifests(world.manifests(), world.catalog()), world.catalog()
        spoil(world, was, "index")
        await gate.look(STREAM)
        await gate.record(await catalog.streams.snapshot(STREAM), {was.ledger_id: was})
        assert (await scrub(world, REPAIR)).remaining == 0
        now = await world.context(was.ledger_id)
        assert was.uuid is not None
        assert now.uuid is not None
        assert not await gate.may_sweep(now, was.uuid)
        await gate.record(await catalog.streams.snapshot(STREAM), {was.ledger_id: now})
        assert gate.stopped(STREAM) is None
        assert await gate.may_sweep(now, was.uuid)
        assert not await gate.may_sweep(now, now.uuid)

    run_virtual(main())


def test_a_repair_that_fails_keeps_the_local_copy_until_another_one_succeeds():
    async def main():
        entries = [bytes([number]) * 300 for number in range(200)]
        world, was = await offloaded(entries, gone=False)
        assert was.location is not None
        # In a grain that no sample reads.
        flip(world, was.location.data_key, 30_000)
        await world.offloader().verify(*await copy_arguments(world, was.ledger_id))
        await world.catalog().policies.set_level(None, Policy(deletion_lag_ms=0))
        leader = scheduler(world, manifests=BucketManifests(world.manifests(), world.catalog()))
        given = Faults(random.Random(1))
        given.outages.add("objects.upload_part")
        pace = TokenBucket(world.clock, per_s=1e9)
        assert (await repairer(world, given).repair(was, "damaged", pace)).kept
        await leader.begin()
        for _ in range(3):
            await leader.run_pass()
        assert await world.catalog().ledgers.get(was.ledger_id) is not None
        # The next one need not be deep.
        await repaired(world, was, await scrub(world, REPAIR), "the local copy")
        for _ in range(3):
            await leader.run_pass()
        assert (await world.context(was.ledger_id)).state is S.TIER1_DELETED
        assert await read_back(world, was.ledger_id) == entries

    run_virtual(main())


def test_a_repair_that_fails_leaves_the_ledger_as_it_was():
    async def main():
        world, was = await offloaded()
        spoil(world, was, "index")
        given = Faults(random.Random(1))
        given.outages.add("objects.upload_part")
        pace = TokenBucket(world.clock, per_s=1e9)
        outcome = await repairer(world, given).repair(was, "missing", pace)
        assert outcome.kept
        now = await world.context(was.ledger_id)
        assert (now.state, now.uuid, now.copy) == (was.state, was.uuid, was.copy)
        assert len(now.abandoned) == 1
        assert now.last_error
        assert [one.outcome.name for one in now.history] == ["COMPLETE", "FAILED"]
        assert (await scrub(world, ScrubWish(repair=True))).remaining == 0

    run_virtual(main())
