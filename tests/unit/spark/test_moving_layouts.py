"""Copies that get another layout on their way say what the ones they are made of said.

Must hold: a new layout, which has checksums of its own, is made only of what was compared with
what was written; damage stays where it is found, and is named.
"""

from dataclasses import replace
from typing import Literal
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, entries_of
from tests.unit.spark.moving_kit import (
    COPY,
    PREFIX,
    Buckets,
    begun,
    outcomes,
    without_manifests,
)
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.format.manifest import is_manifest_key, keep, unkeep
from tierlog.model.errors import RefusedError
from tierlog.model.manifest import ManifestLedger
from tierlog.offload.driver import Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers
from tierlog.offload.manifests import KnownManifest
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.moving import Move, move_one, mover_of
from tierlog_spark.jobs.moving_plan import BROUGHT, FAILED, MISSING, THERE, StreamPair, to_move


async def entries_at(buckets: Buckets, ledger: ManifestLedger) -> list[bytes]:
    """Read a copy in the other bucket, by whichever driver wrote it."""
    assert ledger.copy is not None
    drivers = Drivers(
        DriverParts(
            objects=buckets.store(COPY.target),
            settings=Tier2Settings(bucket="t", cluster_id=UUID(int=1), key_prefix=PREFIX),
        )
    )
    copy = ledger.copy
    handle = await drivers.read_offloaded(
        ledger.listed.ledger_id, copy.uuid, copy.location, copy=copy.copy
    )
    return await entries_of(handle)


def test_copies_may_have_another_layout_where_they_go() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        single = replace(COPY, layout="single-object")
        assert outcomes(await buckets.move(single)) == [BROUGHT] * 4
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await places.newest(STREAM, life.claimed.incarnation)
        for ledger_id in ids:
            moved = unkeep(known.ledgers[ledger_id].packed)
            assert moved.copy is not None
            assert moved.copy.location.is_single
            assert await entries_at(buckets, moved) == life.site.world.ledgers[ledger_id]
        assert (await buckets.restored_from_other()).streams[0].ledgers
        buckets.written()
        assert outcomes(await buckets.move(single)) == [THERE] * 4
        assert buckets.written() == 0
        # What has the layout already stays what it is.
        same = replace(COPY, layout="two-objects")
        buckets.other = MemoryObjects(life.site.world.clock)
        await buckets.move(same)
        assert without_manifests(buckets.other, f"{PREFIX}/") == without_manifests(
            life.site.world.bucket, ""
        )

    run_virtual(main(), until_s=1000)


def test_a_single_object_that_is_damaged_gets_no_new_layout() -> None:
    async def main() -> None:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(replace(COPY, layout="single-object"))
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await places.newest(STREAM, life.claimed.incarnation)
        copy = unkeep(known.ledgers[ids[1]].packed).copy
        assert copy is not None
        entry = life.site.world.ledgers[ids[1]][0]
        key = copy.location.data_key
        last_byte = buckets.other.objects[key][1].index(entry) + len(entry) - 1
        buckets.other.damage(key, last_byte)
        back = Move(
            source=COPY.target,
            target=S3Settings(bucket="b", key_prefix="new"),
            layout="two-objects",
        )
        moved = await buckets.move(back)
        assert outcomes(moved) == [BROUGHT, FAILED, BROUGHT, BROUGHT]
        for word in (f"ledger {ids[1]} is damaged where it comes from", key):
            assert word in moved[1].error
        anew = buckets.manifests(buckets.store(back.target), back.target)
        assert not await anew.streams()
        objects = life.site.world.bucket.objects
        assert not [one for one in objects if "new/" in one and f"-ledger-{ids[1]}" in one]
        buckets.other.damage(key, last_byte)
        assert BROUGHT in outcomes(await buckets.move(back))
        assert await anew.streams()

    run_virtual(main(), until_s=1000)


def test_of_what_nothing_vouches_for_no_other_layout_is_made() -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        origins = buckets.manifests(buckets.store(COPY.source), COPY.source)
        known = await origins.newest(STREAM, life.claimed.incarnation)
        ledger = unkeep(known.ledgers[ids[0]].packed)
        assert ledger.copy is not None
        bare = replace(ledger.copy.copy, side_len=0, side_sha256=b"", side_header_sha256=b"")
        ledger = replace(ledger, copy=replace(ledger.copy, copy=bare))
        stores = buckets.store(COPY.source), buckets.store(COPY.target)
        mover = mover_of(replace(COPY, layout="single-object"), *stores, UUID(int=1))
        with pytest.raises(RefusedError, match="nothing says what the data"):
            await mover.bring(ledger, {})
        assert not buckets.other.objects
        await mover_of(COPY, *stores, UUID(int=1)).bring(ledger, {})

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("layout", ["two-objects", "single-object"])
def test_what_can_not_be_moved_fails_in_a_dry_run_too(
    layout: Literal["two-objects", "single-object"], dry_run: bool
) -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        origins = buckets.manifests(buckets.store(COPY.source), COPY.source)
        known = await origins.newest(STREAM, life.claimed.incarnation)
        ledger = unkeep(known.ledgers[ids[0]].packed)
        copy = ledger.copy
        assert copy is not None
        bare = replace(copy.copy, side_len=0, side_sha256=b"", side_header_sha256=b"")
        foreign = replace(copy.location, driver="tape")
        nothing = KnownManifest(stream=STREAM, incarnation=life.claimed.incarnation)
        move = replace(COPY, layout=layout)
        mover = mover_of(move, buckets.store(COPY.source), buckets.store(COPY.target), UUID(int=1))
        found = []
        for one in (replace(copy, location=foreign), replace(copy, copy=bare)):
            changed = {ids[0]: keep(replace(ledger, copy=one))}
            (item,) = to_move([StreamPair(replace(known, ledgers=changed), nothing)])
            found.append(await move_one(mover, move, item, dry_run=dry_run))
        as_it_is = MISSING if dry_run else BROUGHT
        assert outcomes(found) == [FAILED, FAILED if layout == "single-object" else as_it_is]
        assert "tape" in found[0].error

    run_virtual(main(), until_s=1000)


@pytest.mark.parametrize("manifests_lost", [False, True])
def test_single_objects_that_a_manifest_names_are_not_read_again_by_each_run(
    manifests_lost: bool,
) -> None:
    async def main() -> None:
        life, buckets, ids = await begun()
        single = replace(COPY, layout="single-object")
        await buckets.move(single)
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await places.newest(STREAM, life.claimed.incarnation)
        copies = [unkeep(known.ledgers[one].packed).copy for one in ids]
        keys = {copy.location.data_key: copy.copy.data_len for copy in copies if copy is not None}
        back = Move(source=COPY.target, target=S3Settings(bucket="t", key_prefix="new"))
        await buckets.move(back)
        if manifests_lost:
            for key in [key for key in buckets.other.objects if is_manifest_key("new", key)]:
                del buckets.other.objects[key]
        target, read = buckets.store(back.target), dict.fromkeys(keys, 0)
        get_range = target.get_range

        async def counted(key: str, start: int, length: int) -> bytes | None:
            body = await get_range(key, start, length)
            if (name := key.replace("new", PREFIX, 1)) in read:
                read[name] += len(body or b"")
            return body

        target.get_range = counted  # type: ignore[method-assign]
        assert outcomes(await buckets.move(back, target=target)) == [THERE] * 4
        for key, length in keys.items():
            assert (read[key] >= length) == manifests_lost

    run_virtual(main(), until_s=1000)
