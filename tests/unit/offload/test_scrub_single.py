"""Scrubs, repairs and restores of a bucket with copies of several drivers."""

from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, DEEP, REPAIR, SAFETY_S, kinds, metadata, scrub
from tests.unit.offload.test_drivers import DrivenWorld, Shelf
from tests.unit.offload.test_restore import Site
from tests.unit.offload.test_scrub import write_manifest
from tests.unit.offload.world import CLUSTER, SMALL_RANGES, World, entries_of
from tierlog.format.keys import object_keys
from tierlog.model.ids import LedgerId
from tierlog.model.scrub import ScrubWish
from tierlog.offload.driver import DRIVER, Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers
from tierlog.offload.restore import Verdict
from tierlog.offload.single_driver import SINGLE_DRIVER

ENTRIES = [bytes([number]) * (number * 37 % 200) for number in range(10)]


def drivers_of(world: World, writes: str) -> Drivers:
    """Return the drivers of a process whose settings name this one."""
    settings = Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES)
    parts = DriverParts(objects=world.bucket.connect(), settings=settings)
    return Drivers(parts, writes=writes)


async def offloaded() -> tuple[DrivenWorld, str]:
    """Return a world with a ledger of each layout, and the single object's key."""
    world, key = DrivenWorld(), ""
    claimed = await world.stream()
    for name in (DRIVER, SINGLE_DRIVER):
        world.driven_by = drivers_of(world, name)
        ledger_id = await world.seal(claimed, ENTRIES)
        await world.worker().handle(world.request(claimed, ledger_id))
        context = await world.context(ledger_id)
        assert context.complete
        assert context.location is not None
        assert context.location.driver == name
        key = context.location.data_key
    await write_manifest(world)
    return world, key


@pytest.mark.parametrize("writes", [DRIVER, SINGLE_DRIVER, "none"])
def test_both_layouts_are_as_they_should_be_whichever_is_written(writes: str):
    async def main():
        world, _ = await offloaded()
        world.driven_by = drivers_of(world, writes)
        world.clock.advance(10 * SAFETY_S)
        report = await scrub(world, BOTH, safety_age_s=0.001)
        assert (kinds(report), report.remaining, report.unread) == ([], 0, [])
        assert (report.copies_checked, report.elsewhere) == (2, 0)

    run_virtual(main())


@pytest.mark.parametrize(
    ("damage", "wish", "kind"),
    [
        ("gone", ScrubWish(), "points-nowhere"),
        ("cut", ScrubWish(), "wrong-object"),
        ("payload", DEEP, "damaged-data"),
        ("index", DEEP, "damaged-data"),
    ],
)
def test_damage_is_found(damage: str, wish: ScrubWish, kind: str):
    async def main():
        world, key = await offloaded()
        info, raw = world.bucket.objects[key]
        if damage == "gone":
            del world.bucket.objects[key]
        elif damage == "cut":
            await world.bucket.connect().put(key, raw[:-1], metadata=info.metadata)
        else:
            world.bucket.damage(key, len(raw) - 1 if damage == "payload" else 20)
        report = await scrub(world, wish)
        assert kinds(report) == [kind]

    run_virtual(main())


def test_a_single_object_that_nobody_names_is_an_orphan_once_it_is_old():
    async def main():
        world, _ = await offloaded()
        await world.catalog().nodes.ensure_cluster(ledger_id_base=902)  # ids that were given once
        store = world.bucket.connect()
        key = object_keys("", UUID(int=5), LedgerId(900)).single
        await store.put(key, b"bytes", metadata=metadata())
        await store.create_upload(
            object_keys("", UUID(int=6), LedgerId(901)).single, metadata={}, content_type="x"
        )
        world.clock.advance(SAFETY_S - 1)
        assert kinds(await scrub(world, REPAIR)) == []
        world.clock.advance(2)
        before = set(world.bucket.objects)
        report = await scrub(world, REPAIR)
        assert kinds(report) == ["orphan-objects", "orphan-upload"]
        assert before - set(world.bucket.objects) == {key}
        assert not world.bucket.uploads

    run_virtual(main())


@pytest.mark.parametrize("writes", ["none", Shelf.name])
def test_a_copy_is_judged_also_where_the_driver_was_changed_since(writes: str):
    async def main():
        world, key = await offloaded()
        del world.bucket.objects[key]
        world.driven_by = Drivers(
            DriverParts(
                objects=world.bucket.connect(),
                settings=Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES),
            ),
            writes=writes,
            others={Shelf.name: lambda _: Shelf()},
        )
        report = await scrub(world)
        assert kinds(report) == ["points-nowhere"]
        assert (report.copies_checked, report.elsewhere) == (2, 0)

    run_virtual(main())


def test_a_copy_of_a_driver_that_is_not_here_is_counted_and_not_judged():
    async def main():
        world, shelf = DrivenWorld(), Shelf()
        claimed = await world.stream()
        world.driven_by = Drivers(
            DriverParts(
                objects=world.bucket.connect(),
                settings=Tier2Settings(bucket="b", cluster_id=CLUSTER),
            ),
            writes=Shelf.name,
            others={Shelf.name: lambda _: shelf},
        )
        ledger_id = await world.seal(claimed, ENTRIES)
        await world.worker().handle(world.request(claimed, ledger_id))
        assert (await world.context(ledger_id)).complete
        report = await scrub(world, BOTH)
        assert (kinds(report), report.elsewhere, report.copies_checked) == ([], 1, 0)
        assert len(shelf.kept) == 1

    run_virtual(main())


def test_a_damaged_single_object_is_copied_anew_from_the_local_copy():
    async def main():
        world, key = await offloaded()
        world.bucket.damage(key, len(world.bucket.objects[key][1]) - 1)
        report = await scrub(world, BOTH)
        assert [one.repaired for one in report.findings] == ["copied anew, from the local copy"]
        ledger_id = list(world.ledgers)[-1]
        context = await world.context(ledger_id)
        assert context.uuid is not None
        assert context.location is not None
        assert context.location.data_key != key
        assert context.location.is_single
        found = await world.driven_by.read_offloaded(
            ledger_id, context.uuid, context.location, copy=context.copy
        )
        assert await entries_of(found) == ENTRIES
        assert kinds(await scrub(world, BOTH)) == []

    run_virtual(main())


@pytest.mark.parametrize("prefix", ["", "moved/here"])
def test_a_single_object_comes_back_with_its_stream_wherever_the_bucket_is_now(prefix: str):
    async def main():
        site, world = Site(), DrivenWorld()
        site.world = world
        claimed = await site.start()
        world.driven_by = drivers_of(world, SINGLE_DRIVER)
        ledger_id = await site.copied(claimed, ENTRIES)
        await site.write_manifests()
        site.lose_metadata()
        if prefix:
            moved = {f"{prefix}/{key}": one for key, one in world.bucket.objects.items()}
            world.bucket.objects = {
                key: (replace(info, key=key), raw) for key, (info, raw) in moved.items()
            }
        restorer = site.restorer(prefix=prefix)
        plan = await restorer.plan()
        assert plan.findings == ()
        await restorer.apply(plan, world.catalog())
        context = await world.context(ledger_id)
        assert context.uuid is not None
        assert context.location is not None
        assert context.location.is_single
        assert context.location.data_key in world.bucket.objects
        found = await world.driven_by.read_offloaded(
            ledger_id, context.uuid, context.location, copy=context.copy
        )
        assert await entries_of(found) == ENTRIES

    run_virtual(main())


def test_a_restore_says_that_it_can_not_look_at_the_copies_of_a_driver_that_is_not_here():
    async def main():
        site, world, shelf = Site(), DrivenWorld(), Shelf()
        site.world = world
        claimed = await site.start()
        world.driven_by = drivers_of(world, DRIVER)
        await site.copied(claimed, ENTRIES)
        world.driven_by = Drivers(
            DriverParts(
                objects=world.bucket.connect(),
                settings=Tier2Settings(bucket="b", cluster_id=CLUSTER),
            ),
            writes=Shelf.name,
            others={Shelf.name: lambda _: shelf},
        )
        await site.copied(claimed, ENTRIES)
        await site.write_manifests()
        site.lose_metadata()
        plan = await site.restorer().plan()
        (finding,) = plan.findings
        assert finding.verdict is Verdict.DAMAGED
        assert "driver 'shelf'" in finding.cause

    run_virtual(main())
