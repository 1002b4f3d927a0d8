"""A bucket arrives whole in another one, whoever dies on the way and however often it is begun.

Must hold: what a manifest in the target names is there, whole; a run that is done changes nothing;
nothing in the source is changed; a copy that is damaged there is named, and goes nowhere.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest

from tests.contracts.attributes_suite import all_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_attribute_restore import index_of
from tests.unit.offload.world import STREAM
from tests.unit.spark.moving_kit import (
    BACK,
    COPY,
    PREFIX,
    begun,
    lose,
    outcomes,
    without_manifests,
)
from tierlog.adapters.memory.faults import FaultRates, Faults, no_faults
from tierlog.adapters.memory.objects import MemoryObjects, MemoryObjectsClient
from tierlog.format.keys import export_key, parse_key
from tierlog.format.manifest import is_manifest_key, keep, unkeep
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.stream import StreamLifecycle
from tierlog.offload.manifests import KnownManifest
from tierlog.offload.moving import check_same_stream, pieces
from tierlog.offload.restore import Verdict
from tierlog.ports.objects import Part
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.moving import move_one, mover_of
from tierlog_spark.jobs.moving_plan import (
    BROUGHT,
    FAILED,
    MISSING,
    NOT_IN_SOURCE,
    OTHER_COPY,
    THERE,
    Moved,
    MoveItem,
    StreamPair,
    also_there,
    best,
    dying,
    living,
    strays,
    to_restore,
    unbacked,
)


def test_a_bucket_arrives_byte_for_byte_and_comes_back_from_there() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        world = life.site.world
        before = dict(world.bucket.objects)
        dry = await buckets.move(COPY, dry_run=True)
        assert outcomes(dry) == [MISSING] * 4
        assert not buckets.other.objects
        assert outcomes(await buckets.move(COPY)) == [BROUGHT] * 4
        assert world.bucket.objects == before
        assert without_manifests(buckets.other, f"{PREFIX}/") == without_manifests(world.bucket, "")
        assert not buckets.other.uploads
        for key, (info, _) in buckets.other.objects.items():
            if key.removeprefix(f"{PREFIX}/") in before and "-ledger-" in key:
                assert info.etag == before[key.removeprefix(f"{PREFIX}/")][0].etag

        assert buckets.written() > 0
        assert outcomes(await buckets.move(COPY)) == [THERE] * 4
        assert buckets.written() == 0, "a second run does only what is missing"

        plan = await buckets.restored_from_other()
        assert [one.verdict for one in plan.findings] == [Verdict.LOST]
        world.bucket, entries = buckets.other, dict(world.ledgers)
        life.site.lose_metadata()
        restorer = life.site.restorer(prefix=PREFIX, bucket="t")
        await restorer.apply(await restorer.plan(), world.catalog())
        for ledger_id in ids:
            assert await life.site.read(ledger_id) == entries[ledger_id]
        last = max(one for one in life.as_of if one.ledger_id == ids[-1])
        claimed = await world.catalog().streams.claim(STREAM, NodeId("n9"))
        index = index_of(life.site, prefix=PREFIX)
        found = await index.load(claimed)
        assert await all_of(index, found) == life.as_of[last]

    run_virtual(main(), until_s=1000)


def test_what_is_new_is_brought_and_what_was_trimmed_leaves_the_manifest() -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(COPY)
        new = await life.ledger(9)
        await life.site.write_manifests()
        moved = await buckets.move(COPY)
        assert outcomes(moved) == [THERE] * 4 + [BROUGHT]
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await places.newest(STREAM, life.claimed.incarnation)
        assert sorted(known.ledgers) == [*ids, new]
        for kept in known.ledgers.values():
            copy = unkeep(kept.packed).copy
            assert copy is not None
            assert copy.location.bucket == "t"
            assert copy.location.data_key.startswith(f"{PREFIX}/")
        assert known.head is not None
        assert known.head.attributes is not None
        named = [one.key for one in known.head.attributes.chunks]
        named += [one.key for one in known.head.attributes.objects]
        assert named
        assert all(key.startswith(f"{PREFIX}/streams/") for key in named)

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("layout", [None, "single-object"])
def test_a_crash_anywhere_leaves_nothing_that_a_manifest_calls_whole(layout) -> None:
    async def main() -> None:
        life, buckets, _ = await begun()
        move = replace(COPY, layout=layout)
        steps = 0
        for _ in range(200):
            steps += 3 if layout is None else 29
            faults = no_faults()
            buckets.other = MemoryObjects(life.site.world.clock)
            faults.crash_after(steps)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(100):
                    await buckets.move(move, faults)
            if not faults.crashed:
                break
            places = buckets.manifests(buckets.store(COPY.target), COPY.target)
            if await places.streams():
                await buckets.restored_from_other()
            moved = await buckets.move(move)
            assert FAILED not in outcomes(moved)
            assert (await buckets.restored_from_other()).streams[0].ledgers
            await buckets.move(move)
        else:
            raise AssertionError("it never came to the end")
        assert steps > 20

    run_virtual(main(), until_s=10**6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", [None, "single-object"])
def test_two_at_once_bring_the_same(seed: int, layout) -> None:
    async def main() -> None:
        _, buckets, _ = await begun()
        move = replace(COPY, layout=layout)
        slow = [
            Faults(random.Random(seed * 2 + one), rates=FaultRates(delay_s_max=0.3))
            for one in range(2)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(buckets.move(move, one)) for one in slow]
        told = [one for task in tasks for one in task.result()]
        assert set(outcomes(best(told))) <= {BROUGHT, THERE}
        assert len((await buckets.restored_from_other()).streams[0].ledgers) == 4
        assert not buckets.other.uploads
        before = dict(buckets.other.objects)
        assert outcomes(await buckets.move(move)) == [THERE] * 4
        assert buckets.other.objects == before

    run_virtual(main(), until_s=10**5)


@pytest.mark.parametrize("seed", range(6))
def test_a_store_that_fails_now_and_then_is_asked_again_by_the_next_run(seed: int) -> None:
    async def main() -> None:
        life, buckets, _ = await begun()
        rates = FaultRates(refused=0.02, request_lost=0.02, reply_lost=0.02)
        faults = Faults(random.Random(seed), rates=rates)
        for _ in range(100):
            with contextlib.suppress(TierlogError):
                if set(outcomes(await buckets.move(COPY, faults))) == {THERE}:
                    break
        await buckets.restored_from_other()
        assert without_manifests(buckets.other, f"{PREFIX}/") == without_manifests(
            life.site.world.bucket, ""
        )

    run_virtual(main(), until_s=10**5)


def test_a_copy_that_is_damaged_is_named_and_its_stream_has_no_manifest() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        context = await life.site.world.context(ids[1])
        assert context.location is not None
        life.site.world.bucket.damage(context.location.data_key, 700)
        moved = await buckets.move(COPY)
        assert outcomes(moved) == [BROUGHT, FAILED, BROUGHT, BROUGHT]
        for word in (f"ledger {ids[1]}", context.location.data_key, "bucket b", "scrub --repair"):
            assert word in moved[1].error
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        assert not await places.streams()
        assert not await places.clusters()
        assert not any(
            key.endswith("-index") and f"-ledger-{ids[1]}-" in key for key in buckets.other.objects
        )
        life.site.world.bucket.damage(context.location.data_key, 700)
        assert outcomes(await buckets.move(COPY)) == [THERE, BROUGHT, THERE, THERE]
        await buckets.restored_from_other()

    run_virtual(main(), until_s=1000)


class Spoiling(MemoryObjectsClient):
    """A store that flips a byte of the first object that comes in parts."""

    def __init__(self, bucket: MemoryObjects) -> None:
        super().__init__(bucket, no_faults(), CostMeter())
        self._spoilt = bucket
        self.spoils = 1

    async def complete_upload(self, key: str, upload_id: str, parts: Sequence[Part]) -> None:
        await super().complete_upload(key, upload_id, parts)
        if self.spoils:
            self.spoils -= 1
            self._spoilt.damage(key, 700)


def test_what_arrives_damaged_is_sent_again() -> None:
    async def main() -> None:
        life, buckets, _ = await begun()
        spoiling = Spoiling(buckets.other)
        assert outcomes(await buckets.move(COPY, target=spoiling)) == [BROUGHT] * 4
        assert spoiling.spoils == 0
        assert without_manifests(buckets.other, f"{PREFIX}/") == without_manifests(
            life.site.world.bucket, ""
        )
        spoiling.spoils = 100
        buckets.other.objects.clear()
        moved = await buckets.move(COPY, target=spoiling)
        assert outcomes(moved) == [FAILED] * 4
        assert not any(key.endswith("-index") for key in buckets.other.objects)

    run_virtual(main(), until_s=1000)


def test_what_is_missing_or_damaged_comes_back_as_it_was() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        world = life.site.world
        await buckets.move(COPY)
        before = dict(world.bucket.objects)
        lost = [await world.context(one) for one in ids]
        locations = [one.location for one in lost if one.location is not None]
        del world.bucket.objects[locations[0].data_key]
        world.bucket.damage(locations[1].data_key, 900)
        del world.bucket.objects[locations[2].index_key]
        attributes = [key for key in world.bucket.objects if "/attributes/" in key]
        del world.bucket.objects[attributes[0]]
        world.bucket.damage(attributes[1], 4)
        dry = await buckets.move(BACK, dry_run=True)
        assert outcomes(dry) == [MISSING, MISSING, MISSING, THERE]
        assert outcomes(await buckets.move(BACK)) == [BROUGHT, BROUGHT, BROUGHT, THERE]
        assert {key: body for key, (_, body) in world.bucket.objects.items()} == {
            key: body for key, (_, body) in before.items()
        }
        assert outcomes(await buckets.move(BACK)) == [THERE] * 4
        # Manifests too, where all of them are gone.
        for key in [key for key in world.bucket.objects if is_manifest_key("", key)]:
            del world.bucket.objects[key]
        assert outcomes(await buckets.move(BACK)) == [THERE] * 4
        life.site.lose_metadata()
        await life.site.restore()
        for ledger_id in ids:
            assert await life.site.read(ledger_id) == world.ledgers[ledger_id]

    run_virtual(main(), until_s=1000)


def test_a_restore_looks_at_all_data_unless_it_is_told_not_to() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        await buckets.move(COPY)
        context = await life.site.world.context(ids[1])
        assert context.location is not None
        life.site.world.bucket.damage(context.location.data_key, 900)
        # The length is right: that is all that this looks at.
        assert outcomes(await buckets.move(replace(BACK, deep=False))) == [THERE] * 4
        assert outcomes(await buckets.move(BACK)) == [THERE, BROUGHT, THERE, THERE]
        assert not COPY.compares_all

    run_virtual(main(), until_s=1000)


def test_what_was_trimmed_or_copied_anew_is_not_brought_back() -> None:
    async def main() -> None:
        _, buckets, _ = await begun()
        await buckets.move(COPY)
        origins = buckets.manifests(buckets.store(COPY.target), COPY.target)
        places = buckets.manifests(buckets.store(COPY.source), COPY.source)
        (name,) = await origins.streams()
        pair = StreamPair(await origins.newest(*name), await places.newest(*name))
        ids = [one.ledger_id for one in to_restore([pair])]
        assert len(ids) == 4
        assert pair.target.head is not None
        trimmed = replace(pair.target.head, trimmed_through=ids[0])
        kept = dict(pair.target.ledgers)
        kept[ids[1]] = kept[ids[1]]._replace(uuid=UUID(int=5))
        del kept[ids[2]]
        target = replace(pair.target, head=trimmed, ledgers=kept)
        assert [one.ledger_id for one in to_restore([pair._replace(target=target)])] == ids[2:]

    run_virtual(main(), until_s=1000)


def test_nothing_comes_back_of_a_stream_that_is_being_deleted() -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(COPY)
        places = buckets.manifests(buckets.store(COPY.source), COPY.source)
        known = await places.newest(STREAM, life.claimed.incarnation)
        assert known.head is not None
        gone = replace(known.head, lifecycle=StreamLifecycle.DELETING, attributes=None)
        await places.write(known, gone, put={}, removed=ids[:1])
        lose(buckets, ids[0])
        attributes = [key for key in life.site.world.bucket.objects if "/attributes/" in key]
        del life.site.world.bucket.objects[attributes[0]]
        before = dict(life.site.world.bucket.objects)
        assert await buckets.move(BACK) == []
        assert life.site.world.bucket.objects == before

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_a_backup_of_another_layout_can_not_bring_back_is_told(dry_run: bool) -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(replace(COPY, layout="single-object"))
        assert outcomes(await buckets.move(BACK)) == [OTHER_COPY] * 4
        lose(buckets, ids[1])
        before = dict(life.site.world.bucket.objects)
        location = (await life.site.world.context(ids[1])).location
        assert location is not None
        gone = f"object {location.index_key} is not there"
        for back in (BACK, replace(BACK, deep=False)):
            moved = await buckets.move(back, dry_run=dry_run)
            assert outcomes(moved) == [OTHER_COPY, FAILED, OTHER_COPY, OTHER_COPY]
            for word in (f"ledger {ids[1]}", "missing or damaged", "another copy", gone):
                assert word in moved[1].error
            assert "scrub --repair" in moved[1].error
        assert life.site.world.bucket.objects == before

    run_virtual(main(), until_s=1000)


def test_what_a_backup_does_not_have_is_looked_at_all_the_same() -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(COPY)
        new = await life.ledger(9)
        await life.site.write_manifests()
        lose(buckets, ids[0])
        moved = await buckets.move(BACK)
        assert outcomes(moved) == [BROUGHT, THERE, THERE, THERE, NOT_IN_SOURCE]
        lose(buckets, new)
        lost_attributes = [key for key in life.site.world.bucket.objects if "/attributes/" in key]
        del life.site.world.bucket.objects[lost_attributes[0]]
        moved = await buckets.move(BACK)
        assert outcomes(moved) == [THERE] * 4 + [FAILED]
        assert "no copy of it" in moved[4].error
        # That keeps back nothing of what the backup has.
        assert lost_attributes[0] in life.site.world.bucket.objects
        # Nor is a stream left out that the backup has not heard of, or that is being deleted there.
        places = buckets.manifests(buckets.store(COPY.source), COPY.source)
        known = await places.newest(STREAM, life.claimed.incarnation)
        assert known.head is not None
        nothing = KnownManifest(stream=STREAM, incarnation=life.claimed.incarnation)
        dying = replace(known.head, lifecycle=StreamLifecycle.DELETING)
        items = unbacked([StreamPair(nothing, known)])
        assert [(one.ledger_id, one.unbacked) for one in items] == [
            (one, NOT_IN_SOURCE) for one in (*ids, new)
        ]
        assert unbacked([StreamPair(replace(known, head=dying), known)]) == items
        assert unbacked([StreamPair(nothing, replace(known, head=dying))]) == []
        tape = unkeep(known.ledgers[ids[0]].packed)
        assert tape.copy is not None
        location = replace(tape.copy.location, driver="tape")
        packed = keep(replace(tape, copy=replace(tape.copy, location=location))).packed
        mover = mover_of(
            BACK, buckets.store(BACK.source), buckets.store(BACK.target), items[0].cluster_id
        )
        told = await move_one(mover, BACK, replace(items[0], packed=packed), dry_run=False)
        assert (told.outcome, "'tape'" in told.error) == (NOT_IN_SOURCE, True)

    run_virtual(main(), until_s=1000)


def test_of_both_buckets_all_streams_are_looked_at_or_those_that_are_named() -> None:
    names = [
        (StreamName(name), UUID(int=1)) for name in ("a", "b", "b-partition-2", "b-partition-x")
    ]
    assert also_there(names[:1], names, ()) == names
    # A partition has a number: what is called -partition-x is a stream of its own.
    assert also_there(names[1:2], names, [names[1][0]]) == names[1:3]
    assert also_there(names[:1], [(names[0][0], UUID(int=2)), names[1]], [names[0][0]]) == [
        names[0],
        (names[0][0], UUID(int=2)),
    ]


def test_export_copies_come_along() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        context = await life.site.world.context(ids[0])
        assert context.location is not None
        key = export_key(context.location)
        await life.site.world.bucket.connect().put(key, b"lines" * 9, metadata={"role": "export"})
        await buckets.move(COPY)
        assert buckets.other.objects[f"{PREFIX}/{key}"][1] == b"lines" * 9
        assert sum(size for _, size in pieces(40 * 2**20)) == 40 * 2**20
        assert pieces(0) == []

    run_virtual(main(), until_s=1000)


def test_a_target_that_has_gone_on_by_itself_is_refused() -> None:
    async def main() -> None:
        _, buckets, _ = await begun()
        await buckets.move(COPY)
        origins = buckets.manifests(buckets.store(COPY.source), COPY.source)
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        (name,) = await origins.streams()
        source, target = await origins.newest(*name), await places.newest(*name)
        check_same_stream(source, target)
        check_same_stream(source, KnownManifest(stream=name[0], incarnation=name[1]))
        assert target.head is not None
        for other, words in (
            (replace(target, cluster_id=UUID(int=3)), "is of cluster"),
            (
                replace(target, head=replace(target.head, owner_epoch=99)),
                "gone on by itself",
            ),
            (
                replace(target, head=replace(target.head, trimmed_through=LedgerId(0))),
                "gone on by itself",
            ),
        ):
            with pytest.raises(RefusedError, match=words):
                check_same_stream(source, other)
        assert source.head is not None
        dying = replace(source, head=replace(source.head, lifecycle=StreamLifecycle.DELETING))
        assert living([StreamPair(dying, target)]) == []

    run_virtual(main(), until_s=1000)


def test_a_stream_that_is_being_deleted_is_so_in_the_copy_made_before() -> None:
    async def main() -> None:
        life, buckets, _ = await begun(uncopied=0)
        await buckets.move(COPY)
        origins = buckets.manifests(buckets.store(COPY.source), COPY.source)
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await origins.newest(STREAM, life.claimed.incarnation)
        there = await places.newest(STREAM, life.claimed.incarnation)
        assert known.head is not None
        gone = replace(known.head, lifecycle=StreamLifecycle.DELETING, attributes=None)
        await origins.write(known, gone, put={}, removed=sorted(known.ledgers))
        before = without_manifests(buckets.other, f"{PREFIX}/")
        assert await buckets.move(COPY) == []
        assert await buckets.move(COPY) == []
        last = await places.newest(STREAM, life.claimed.incarnation)
        assert last.generation == there.generation + 1, "the second changes nothing"
        assert there.head is not None
        assert last.head == replace(there.head, lifecycle=StreamLifecycle.DELETING)
        assert last.ledgers == there.ledgers
        assert without_manifests(buckets.other, f"{PREFIX}/") == before, "nothing is deleted"
        plan = await buckets.restored_from_other()
        assert plan.streams == ()
        assert [one.verdict for one in plan.findings] == [Verdict.SKIPPED]

    run_virtual(main(), until_s=1000)


def test_a_stream_that_the_source_does_not_know_is_told_and_left_alone() -> None:
    async def main() -> None:
        life, buckets, _ = await begun()
        await buckets.move(COPY)
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        there = await places.newest(STREAM, life.claimed.incarnation)
        assert there.head is not None
        nothing = StreamPair(KnownManifest(stream=STREAM, incarnation=UUID(int=1)), there)

        def living_one(stream: StreamName, created_ms: int) -> StreamPair:
            assert there.head is not None
            head = replace(there.head, stream=stream, created_ms=created_ms)
            known = replace(there, stream=stream, head=head)
            return StreamPair(known, known)

        other = living_one(StreamName("other"), there.head.created_ms + 5)
        older = living_one(STREAM, there.head.created_ms - 5)
        for pairs in ([nothing, other], [older, nothing]):
            assert strays(pairs) == [there]
            assert dying(pairs) == []
        # A stream of that name was made since: that one is what comes back.
        anew = living_one(STREAM, there.head.created_ms + 5)
        assert strays([older, anew, nothing]) == []
        foreign = nothing._replace(target=replace(there, cluster_id=UUID(int=9)))
        assert strays([foreign, other]) == []
        ended = replace(there, head=replace(there.head, lifecycle=StreamLifecycle.DELETING))
        assert strays([nothing._replace(target=ended), other]) == []

    run_virtual(main(), until_s=1000)


def test_a_bucket_is_not_moved_onto_itself() -> None:
    with pytest.raises(RefusedError, match="both source and target"):
        replace(COPY, target=S3Settings(bucket="b", key_prefix="/")).check()
    COPY.check()
    replace(COPY, target=S3Settings(bucket="b", key_prefix="x")).check()


def test_what_another_driver_wrote_is_refused_by_name() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        world = life.site.world
        origins = buckets.manifests(buckets.store(COPY.source), COPY.source)
        known = await origins.newest(STREAM, life.claimed.incarnation)
        ledger = unkeep(known.ledgers[ids[0]].packed)
        assert ledger.copy is not None
        foreign = replace(ledger.copy, location=replace(ledger.copy.location, driver="tape"))
        assert life.site.cluster is not None
        mover = mover_of(
            COPY,
            buckets.store(COPY.source),
            buckets.store(COPY.target),
            life.site.cluster.cluster_id,
        )
        with pytest.raises(RefusedError, match="tape"):
            await mover.bring(replace(ledger, copy=foreign), {})
        missing = parse_key("", ledger.copy.location.data_key)
        assert missing is not None
        del world.bucket.objects[ledger.copy.location.side_key]
        with pytest.raises(CorruptError, match=f"ledger {ids[0]} is damaged where it comes from"):
            await mover.bring(ledger, {})

    run_virtual(main(), until_s=1000)


def test_of_a_task_that_ran_twice_each_ledger_is_told_once() -> None:
    item = MoveItem(
        cluster_id=UUID(int=1),
        stream=STREAM,
        incarnation=UUID(int=2),
        ledger_id=LedgerId(3),
        packed=b"",
        known=None,
        data_len=1,
    )
    rows = [Moved(item=item, outcome=one) for one in (FAILED, THERE, BROUGHT)]
    assert outcomes(best(rows)) == [BROUGHT]
