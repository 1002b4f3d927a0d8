"""A bucket is brought back out of its copy, wherever a restore dies on the way."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any, Literal

import pytest

from tests.contracts.attributes_suite import all_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_attribute_restore import index_of
from tests.unit.offload.world import STREAM
from tests.unit.spark.moving_kit import BACK, COPY, PREFIX, begun, outcomes
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.format.attribute_page import new_page, seal
from tierlog.format.keys import export_key
from tierlog.format.manifest import is_manifest_key, parse_cluster_key, unkeep
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.model.ids import LedgerId, NodeId
from tierlog.offload.moving import write_manifest
from tierlog.offload.restore import Verdict
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.moving import Move
from tierlog_spark.jobs.moving_plan import BROUGHT, FAILED, THERE


@pytest.mark.parametrize("manifests_lost", [False, True])
def test_a_crash_anywhere_spoils_nothing_and_the_next_run_brings_the_rest(
    manifests_lost: bool,
) -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        bucket = life.site.world.bucket
        await buckets.move(COPY)
        before = dict(bucket.objects)
        contexts = [await life.site.world.context(one) for one in ids]
        first, second, third, _ = [one.location for one in contexts if one.location is not None]
        attributes = [key for key in before if "/attributes/" in key]
        gone = [first.data_key, third.index_key, attributes[0]]
        if manifests_lost:
            gone += [key for key in before if is_manifest_key("", key)]
        hurt = {*gone, second.data_key, attributes[1]}

        def bodies() -> dict[str, bytes]:
            return {
                key: body
                for key, (_, body) in bucket.objects.items()
                if not (manifests_lost and is_manifest_key("", key))
            }

        whole = bodies()
        for steps in range(1, 600, 3):
            bucket.objects.clear()
            bucket.objects.update((key, one) for key, one in before.items() if key not in gone)
            bucket.damage(second.data_key, 900)
            bucket.damage(attributes[1], 4)
            faults = no_faults()
            faults.crash_after(steps)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(100):
                    await buckets.move(BACK, faults)
            left = bodies()
            assert [key for key in whole.keys() - hurt if left.get(key) != whole[key]] == []
            moved = outcomes(await buckets.move(BACK))
            assert set(moved) <= {BROUGHT, THERE}
            assert bodies() == whole
            assert outcomes(await buckets.move(BACK)) == [THERE] * 4
            if not faults.crashed:
                break
            assert not manifests_lost or any(is_manifest_key("", key) for key in bucket.objects)
        else:
            raise AssertionError("it never came to the end")
        assert steps > 20
        life.site.lose_metadata()
        await life.site.restore()
        for ledger_id in ids:
            assert await life.site.read(ledger_id) == life.site.world.ledgers[ledger_id]

    run_virtual(main(), until_s=10**6)


async def of_a_later_checkpoint(life: Any, buckets: Any) -> list[str]:
    """Copy twice; return the attribute objects that came along the second time.

    The manifest does not name their checkpoint yet.
    """
    await buckets.move(COPY)
    first = set(buckets.other.objects)
    for number in range(5, 7):
        await life.ledger(number)
    await buckets.move(COPY)
    return sorted(key for key in set(buckets.other.objects) - first if "/attributes/" in key)


@pytest.mark.parametrize("is_list", [False, True])
def test_a_damaged_object_of_a_later_checkpoint_takes_the_place_of_no_sound_one(
    is_list: bool,
) -> None:
    async def main() -> None:
        life, buckets, _ = await begun(uncopied=0)
        bucket = life.site.world.bucket
        later = await of_a_later_checkpoint(life, buckets)
        hurt = [key for key in later if key.endswith(".list") is is_list]
        await life.site.write_manifests()
        before = dict(bucket.objects)
        for key in hurt:
            buckets.other.damage(key, 30)
        del bucket.objects[hurt[0].removeprefix(f"{PREFIX}/")]
        await buckets.move(BACK)
        del before[hurt[0].removeprefix(f"{PREFIX}/")]
        assert bucket.objects == before
        for key in hurt:
            buckets.other.damage(key, 30)
        bucket.damage(hurt[-1].removeprefix(f"{PREFIX}/"), 30)
        await buckets.move(BACK)
        for key in hurt:
            _, body = bucket.objects[key.removeprefix(f"{PREFIX}/")]
            assert body == buckets.other.objects[key][1]

    run_virtual(main(), until_s=10**6)


def test_a_later_object_that_was_cut_takes_the_place_of_no_sound_one() -> None:
    async def main() -> None:
        life, buckets, _ = await begun(uncopied=0)
        bucket = life.site.world.bucket
        later = await of_a_later_checkpoint(life, buckets)
        before = dict(bucket.objects)
        for key in later:
            info, _ = buckets.other.objects[key]
            buckets.other.objects[key] = (replace(info, size=0), b"")
        await buckets.move(BACK)
        assert later
        assert bucket.objects == before

    run_virtual(main(), until_s=10**6)


def test_an_object_of_a_later_version_that_no_checkpoint_needs_comes_along() -> None:
    async def main() -> None:
        life, buckets, _ = await begun(uncopied=0)
        await buckets.move(COPY)
        first = set(buckets.other.objects)
        await life.ledger(5)
        await buckets.move(COPY)
        later = sorted(set(buckets.other.objects) - first)
        key = next(one for one in later if "/attributes/" in one and not one.endswith(".list"))
        await life.site.write_manifests()
        page = new_page(0, bytes(24))
        page[4] = 255
        seal(page, int(key.rpartition("/")[2].partition("-")[0]), len(page))
        info, _ = buckets.other.objects[key]
        buckets.other.objects[key] = (replace(info, size=len(page)), bytes(page))
        here = key.removeprefix(f"{PREFIX}/")
        del life.site.world.bucket.objects[here]
        await buckets.move(BACK)
        assert life.site.world.bucket.objects[here][1] == page

    run_virtual(main(), until_s=10**6)


@pytest.mark.parametrize("hurt", ["data_key", "side_key"])
def test_a_damaged_backup_takes_the_place_of_no_sound_data(hurt: str) -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        bucket = life.site.world.bucket
        await buckets.move(COPY)
        location = (await life.site.world.context(ids[1])).location
        assert location is not None
        backup = f"{PREFIX}/{getattr(location, hurt)}"
        buckets.other.damage(backup, 60)
        del bucket.objects[location.index_key]
        before = dict(bucket.objects)
        moved = await buckets.move(BACK)
        assert outcomes(moved) == [THERE, FAILED, THERE, THERE]
        assert backup in moved[1].error
        assert bucket.objects == before
        buckets.other.damage(backup, 60)
        assert outcomes(await buckets.move(BACK)) == [THERE, BROUGHT, THERE, THERE]

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("lost", ["data", "copy", "copy and manifests"])
@pytest.mark.parametrize("layout", ["two-objects", "single-object"])
def test_a_damaged_backup_takes_not_even_the_place_of_what_is_missing(
    layout: Literal["two-objects", "single-object"], lost: str
) -> None:
    """Readers look there, and nothing tells them of a payload that it is bad."""

    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(replace(COPY, layout=layout))
        backup = Move(source=COPY.target, target=S3Settings(bucket="b", key_prefix="new"))
        await buckets.move(backup)
        back = Move(source=backup.target, target=backup.source, restores=True)
        places = buckets.manifests(buckets.store(back.target), back.target)
        known = await places.newest(STREAM, life.claimed.incarnation)
        copy = unkeep(known.ledgers[ids[1]].packed).copy
        assert copy is not None
        key, entry = copy.location.data_key, life.site.world.ledgers[ids[1]][0]
        body = buckets.other.objects.pop(key)[1]
        if lost != "data":
            for one in copy.location.keys:
                buckets.other.objects.pop(one, None)
        if lost == "copy and manifests":
            for one in [one for one in buckets.other.objects if is_manifest_key(PREFIX, one)]:
                del buckets.other.objects[one]
        hurt = key.replace(PREFIX, "new", 1), body.index(entry) + len(entry) - 1
        life.site.world.bucket.damage(*hurt)
        before = dict(buckets.other.objects)
        moved = await buckets.move(back)
        assert outcomes(moved) == [THERE, FAILED, THERE, THERE]
        assert hurt[0] in moved[1].error
        after = dict(buckets.other.objects)
        assert after.items() >= before.items()
        # Policies above streams come back whatever else is lost.
        more = after.keys() - before.keys()
        assert [key for key in more if parse_cluster_key(PREFIX, key) is None] == []
        life.site.world.bucket.damage(*hurt)
        assert outcomes(await buckets.move(back)) == [THERE, BROUGHT, THERE, THERE]
        assert buckets.other.objects[key][1] == body

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("layout", ["two-objects", "single-object"])
def test_what_a_restore_brings_is_read_once_in_the_backup(
    layout: Literal["two-objects", "single-object"],
) -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(replace(COPY, layout=layout))
        backup = Move(source=COPY.target, target=S3Settings(bucket="b", key_prefix="new"))
        await buckets.move(backup)
        back = Move(source=backup.target, target=backup.source, restores=True)
        places = buckets.manifests(buckets.store(back.target), back.target)
        known = await places.newest(STREAM, life.claimed.incarnation)
        copy = unkeep(known.ledgers[ids[1]].packed).copy
        assert copy is not None
        whole = dict(buckets.other.objects)
        for key in copy.location.keys:
            del buckets.other.objects[key]
        key, read = copy.location.data_key.replace(PREFIX, "new", 1), list[int]()
        source = buckets.store(back.source)
        get_range = source.get_range

        async def counted(one: str, start: int, length: int) -> bytes | None:
            if one == key:
                read.append(length)
            return await get_range(one, start, length)

        store = buckets.store
        source.get_range = counted  # type: ignore[method-assign, assignment]
        buckets.store = lambda s3, *rest: (  # type: ignore[method-assign]
            source if s3 is back.source else store(s3, *rest)
        )
        assert outcomes(await buckets.move(back)) == [THERE, BROUGHT, THERE, THERE]
        assert buckets.other.objects[copy.location.data_key][1] == whole[copy.location.data_key][1]
        # Beside that, of a single object, its index.
        assert sum(read) < 1.5 * copy.copy.data_len

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("manifests_lost", [False, True])
def test_an_index_that_outlived_its_data_calls_nothing_damaged_arrived(
    manifests_lost: bool,
) -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(COPY)
        location = (await life.site.world.context(ids[1])).location
        assert location is not None
        del buckets.other.objects[f"{PREFIX}/{location.data_key}"]
        if manifests_lost:
            for one in [one for one in buckets.other.objects if is_manifest_key(PREFIX, one)]:
                del buckets.other.objects[one]
        life.site.world.bucket.damage(location.data_key, 900)
        for _ in range(2):
            assert outcomes(await buckets.move(COPY)) == [THERE, FAILED, THERE, THERE]
        life.site.world.bucket.damage(location.data_key, 900)
        assert outcomes(await buckets.move(COPY)) == [THERE, BROUGHT, THERE, THERE]

    run_virtual(main(), until_s=1000)


def test_a_manifest_that_was_written_during_a_restore_stays() -> None:
    async def main() -> None:
        life, buckets, _ = await begun()
        bucket = life.site.world.bucket
        await buckets.move(COPY)
        backup = buckets.manifests(buckets.store(BACK.source), BACK.source)
        place = buckets.manifests(buckets.store(BACK.target), BACK.target)
        (name,) = await backup.streams()
        known = await backup.newest(*name)
        assert known.head is not None
        # The metadata live, and know more than the backup.
        await life.ledger(9)
        await life.site.write_manifests()
        newest = await place.newest(*name)
        before = dict(bucket.objects)
        ledgers = [unkeep(one.packed) for one in known.ledgers.values()]
        with pytest.raises(RetryableError, match="of its own meanwhile"):
            await write_manifest(place, known.head, ledgers, first=BACK.restores)
        assert bucket.objects == before
        # It says the same as somebody else wants: nothing is to be done.
        assert newest.head is not None
        same = [unkeep(one.packed) for one in newest.ledgers.values()]
        assert not await write_manifest(place, newest.head, same, first=True)

    run_virtual(main(), until_s=1000)


def test_a_copy_that_began_before_another_one_takes_no_name_away_that_it_brought() -> None:
    async def main() -> None:
        life, buckets, _ = await begun(uncopied=0)
        origins = buckets.manifests(buckets.store(COPY.source), COPY.source)
        (name,) = await origins.streams()
        known = await origins.newest(*name)
        assert known.head is not None
        await life.ledger(9)
        await life.site.write_manifests()
        await buckets.move(COPY)
        before = dict(buckets.other.objects)
        place = buckets.manifests(buckets.store(COPY.target), COPY.target)
        ledgers = [unkeep(one.packed) for one in known.ledgers.values()]
        with pytest.raises(RetryableError, match="got a newer manifest meanwhile"):
            await write_manifest(place, known.head, ledgers)
        assert buckets.other.objects == before

    run_virtual(main(), until_s=1000)


def test_an_export_copy_that_is_made_after_the_copy_comes_along_with_the_next() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        await buckets.move(COPY)
        location = (await life.site.world.context(ids[0])).location
        assert location is not None
        key = export_key(location)
        await life.site.world.bucket.connect().put(key, b"lines", metadata={"role": "export"})
        assert outcomes(await buckets.move(COPY)) == [THERE] * 4
        assert buckets.other.objects[f"{PREFIX}/{key}"][1] == b"lines"

    run_virtual(main(), until_s=1000)


def test_an_export_copy_that_was_made_anew_since_the_backup_stays() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        bucket = life.site.world.bucket
        location = (await life.site.world.context(ids[0])).location
        assert location is not None
        key = export_key(location)
        await bucket.connect().put(key, b"lines", metadata={"role": "export"})
        await buckets.move(COPY)
        await bucket.connect().put(key, b"lines with more in them", metadata={"role": "export"})
        await buckets.move(BACK)
        assert bucket.objects[key][1] == b"lines with more in them"
        del bucket.objects[key]
        await buckets.move(BACK)
        assert bucket.objects[key][1] == b"lines"
        # What is copied is what counts, the other way.
        await bucket.connect().put(key, b"lines with more in them", metadata={"role": "export"})
        await buckets.move(COPY)
        assert buckets.other.objects[f"{PREFIX}/{key}"][1] == b"lines with more in them"

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("layout", [None, "single-object"])
def test_one_ledger_that_can_not_be_copied_keeps_none_behind_it_without_a_name(layout) -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        move = replace(COPY, layout=layout)
        await buckets.move(move)
        new = [await life.ledger(number) for number in (9, 10)]
        await life.site.write_manifests()
        hurt = (await life.site.world.context(new[0])).location
        lost = (await life.site.world.context(ids[1])).location
        assert hurt is not None
        assert lost is not None
        # Never copied the one; of the other one the copy is not whole any more.
        life.site.world.bucket.damage(hurt.data_key, 700)
        life.site.world.bucket.damage(lost.data_key, 700)
        for key in [key for key in buckets.other.objects if f"-ledger-{ids[1]}" in key]:
            del buckets.other.objects[key]
        for brought in (BROUGHT, THERE):
            assert outcomes(await buckets.move(move)) == [
                *(THERE, FAILED, THERE, THERE, FAILED),
                brought,
            ]
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await places.newest(STREAM, life.claimed.incarnation)
        assert [one for one, kept in known.ledgers.items() if kept.uuid is None] == [new[0]]
        with pytest.raises(CorruptError, match=f"ledger {ids[1]} of "):
            await buckets.restored_from_other()
        life.site.world.bucket.damage(lost.data_key, 700)
        await buckets.move(move)
        # What is missing is told: nobody steps over it in silence.
        with pytest.raises(RefusedError, match="1 ledgers in the middle"):
            await buckets.restored_from_other()
        life.site.world.bucket.damage(hurt.data_key, 700)
        await buckets.move(move)
        assert len((await buckets.restored_from_other()).streams[0].ledgers) == 6

    run_virtual(main(), until_s=1000)


def test_what_a_ledger_without_a_copy_had_stands_in_no_attribute_that_a_restore_brings() -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(COPY)
        new = [await life.ledger(number) for number in (9, 10)]
        await life.site.write_manifests()
        hurt = (await life.site.world.context(new[0])).location
        assert hurt is not None
        life.site.world.bucket.damage(hurt.data_key, 700)
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)

        async def through() -> LedgerId:
            known = await places.newest(STREAM, life.claimed.incarnation)
            assert known.head is not None
            assert known.head.attributes_through is not None
            return known.head.attributes_through.ledger_id

        for _ in range(2):
            assert FAILED in outcomes(await buckets.move(COPY))
            assert await through() == ids[-1]
        life.site.world.bucket.damage(hurt.data_key, 700)
        repaired = MemoryObjects(life.site.world.clock)
        repaired.objects.update(buckets.other.objects)
        await buckets.move(COPY)
        assert await through() == new[1]

        world = life.site.world
        world.bucket = repaired
        life.site.lose_metadata()
        restorer = life.site.restorer(prefix=PREFIX, bucket="t")
        plan = await restorer.plan()
        assert [(one.verdict, one.ledger_id) for one in plan.findings] == [(Verdict.LOST, new[0])]
        await restorer.apply(plan, world.catalog())
        claimed = await world.catalog().streams.claim(STREAM, NodeId("n9"))
        index = index_of(life.site, prefix=PREFIX)
        last = max(one for one in life.as_of if one.ledger_id == ids[-1])
        assert await all_of(index, await index.load(claimed)) == life.as_of[last]

    run_virtual(main(), until_s=1000)
