"""Policies of metadata that came back from a backup: by them nothing is trimmed nor deleted.

Must hold: what levels above streams said before they were changed takes no ledger, and no manifest
that knows better is replaced by it; whoever sets what is to hold now ends that.
"""

# What is None fails the test anyway.
# mypy: disable-error-code="union-attr,method-assign"

import asyncio
from dataclasses import replace

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import (
    Leader,
    backup,
    newest,
    offloaded,
    restore,
    store_of,
)
from tests.unit.scheduler.test_scheduler import scheduler
from tierlog.adapters.memory.faults import Outcome, no_faults
from tierlog.format import paths, records
from tierlog.format.manifest import cluster_key
from tierlog.model.ids import LedgerId
from tierlog.model.policy import NEVER, Policy
from tierlog_scheduler.manifests import RESTORED, UNREAD
from tierlog_scheduler.scheduler import Scheduler

SHORT = Policy(offload_time_ms=0, retention_size_bytes=1)
LONG = Policy(offload_time_ms=0, retention_size_bytes=NEVER)


async def leading(world: World, leader: Leader) -> Scheduler:
    found = scheduler(world, manifests=leader.gate)
    await found.begin()
    await found.run_pass()
    return found


async def listed(world: World) -> list[LedgerId]:
    return [one.ledger_id for one in (await world.catalog().streams.snapshot(STREAM)).ledgers]


async def levels_in_bucket(world: World) -> Policy:
    cluster = await world.catalog().nodes.ensure_cluster()
    _, manifest = await store_of(world).cluster(cluster.cluster_id)
    assert manifest is not None
    return manifest.levels.cluster


async def kept_for_longer(world: World) -> list[LedgerId]:
    """Change what is kept, have a leader write it down, and bring back metadata from before."""
    catalog = world.catalog()
    await catalog.nodes.ensure_cluster()
    claimed = await world.stream()
    ledgers = [await offloaded(world, claimed) for _ in range(3)]
    await catalog.policies.set_level(None, SHORT)
    before = backup(world.metadata)
    # Which of two is the newer one no clock says that was set back meanwhile.
    world.clock.jump_wall(-3600)
    await catalog.policies.set_level(None, LONG)
    await leading(world, Leader(world))
    assert await listed(world) == ledgers
    restore(world.metadata, before)
    return ledgers


def test_a_retention_from_before_a_change_takes_nothing():
    async def main():
        world = World()
        ledgers = await kept_for_longer(world)
        leader = Leader(world)
        found = await leading(world, leader)
        for _ in range(2):
            await found.run_pass()
            assert await listed(world) == ledgers
            assert leader.gate.stopped(STREAM).startswith(RESTORED)
            assert leader.gate.stopped_streams() == {RESTORED: 1, UNREAD: 0}
            assert not leader.gate.reads_again(STREAM)
            context = await world.context(ledgers[0])
            assert not await leader.gate.may_delete_local(context)
            assert await levels_in_bucket(world) == LONG
            leader = Leader(world)
            found = await leading(world, leader)
        # Somebody sets what is to hold.
        await world.catalog().policies.set_level(None, LONG)
        await found.run_pass()
        assert leader.gate.stopped(STREAM) is None
        assert leader.gate.stopped_streams() == {RESTORED: 0, UNREAD: 0}
        assert await listed(world) == ledgers
        await world.catalog().policies.set_level(None, SHORT)
        await found.run_pass()
        await found.run_pass()
        assert await listed(world) == ledgers[-1:]

    run_virtual(main())


def test_neither_does_a_retention_that_a_stream_itself_had_before():
    async def main():
        world = World()
        catalog = world.catalog()
        claimed = await world.stream()
        ledgers = [await offloaded(world, claimed) for _ in range(3)]
        await catalog.streams.set_policy(STREAM, SHORT)
        before = backup(world.metadata)
        world.clock.jump_wall(-3600)
        await catalog.streams.set_policy(STREAM, LONG)
        await leading(world, Leader(world))
        restore(world.metadata, before)
        leader = Leader(world)
        found = await leading(world, leader)
        await found.run_pass()
        assert await listed(world) == ledgers
        assert leader.gate.stopped(STREAM).startswith(RESTORED)
        head = (await newest(world)).head
        assert head is not None
        assert head.policy == LONG
        await catalog.streams.set_policy(STREAM, LONG)
        await found.run_pass()
        assert leader.gate.stopped(STREAM) is None
        assert await listed(world) == ledgers

    run_virtual(main())


def test_what_another_level_says_now_makes_an_older_one_no_newer():
    """Whoever sets it may know nothing of the backup."""

    async def main():
        world = World()
        ledgers = await kept_for_longer(world)
        world.clock.jump_wall(2 * 3600)
        await world.catalog().policies.set_level("other", Policy(block_size=2**23))
        for _ in range(2):
            leader = Leader(world)
            found = await leading(world, leader)
            await found.run_pass()
            assert await listed(world) == ledgers
            assert leader.gate.stopped(STREAM).startswith(
                f"{RESTORED}: by the cluster's manifest the policy of the cluster"
            )
        assert await levels_in_bucket(world) == LONG

    run_virtual(main())


def test_nor_is_a_namespace_older_that_says_nothing_any_more():
    async def main():
        world = World()
        catalog = world.catalog()
        await world.stream()
        await catalog.policies.set_level("gone", SHORT)
        before = backup(world.metadata)
        await leading(world, Leader(world))
        await catalog.policies.set_level("gone", Policy())
        leader = Leader(world)
        await leading(world, leader)
        assert leader.gate.stopped(STREAM) is None
        # By what it said before, it is.
        restore(world.metadata, before)
        leader = Leader(world)
        await leading(world, leader)
        assert leader.gate.stopped(STREAM).startswith(
            f"{RESTORED}: by the cluster's manifest the policy of namespace gone"
        )

    run_virtual(main())


def test_what_was_said_again_is_newer_than_what_was_said_in_between():
    async def main():
        world = World()
        catalog = world.catalog()
        await catalog.nodes.ensure_cluster()
        claimed = await world.stream()
        ledgers = [await offloaded(world, claimed) for _ in range(3)]
        await catalog.policies.set_level(None, LONG)
        leader = Leader(world)
        found = await leading(world, leader)
        await catalog.policies.set_level(None, SHORT)
        before = backup(world.metadata)
        await catalog.policies.set_level(None, LONG)
        await found.run_pass()
        restore(world.metadata, before)
        leader = Leader(world)
        await leading(world, leader)
        assert leader.gate.stopped(STREAM).startswith(RESTORED)
        assert await listed(world) == ledgers

    run_virtual(main())


def test_who_forgets_when_a_policy_was_changed_stops_nothing_by_that():
    """A release before does, with each change of a stream."""

    async def main():
        world = World()
        catalog = world.catalog()
        await world.stream(policy=SHORT)
        await catalog.streams.set_policy(STREAM, LONG)
        await leading(world, Leader(world))
        written = await newest(world)
        await catalog.streams.change(
            STREAM,
            lambda one: replace(one, policy_changed_ms=0),
            applied=lambda one: not one.policy_changed_ms,
        )
        leader = Leader(world)
        await leading(world, leader)
        assert leader.gate.stopped(STREAM) is None
        assert await newest(world) == written

    run_virtual(main())


def test_nor_does_the_bucket_forget_it_of_levels_that_are_as_they_were():
    async def main():
        world = World()
        ledgers, catalog = await kept_for_longer(world), world.catalog()
        before = backup(world.metadata)
        world.clock.jump_wall(2 * 3600)
        await catalog.policies.set_level(None, LONG)
        await leading(world, Leader(world))
        # As a release before does, with each change of any level.
        levels = (await catalog.policies.levels()).with_level("other", Policy(block_size=2**23))
        forgotten = replace(levels, changed_ms=0, level_changed_ms={})
        found = await catalog.store.get(paths.POLICIES)
        data = records.encode_levels(forgotten)
        await catalog.store.set(paths.POLICIES, data, version=found.version)
        leader = Leader(world)
        await leading(world, leader)
        assert leader.gate.stopped(STREAM) is None
        restore(world.metadata, before)
        leader = Leader(world)
        await leading(world, leader)
        assert leader.gate.stopped(STREAM).startswith(f"{RESTORED}: by the cluster's manifest")
        assert await listed(world) == ledgers

    run_virtual(main())


def test_a_leader_that_can_not_compare_trims_nothing_until_it_can():
    async def main():
        world, given = World(), no_faults()
        ledgers = await kept_for_longer(world)
        leader = Leader(world, given)
        read = leader.gate._store.cluster

        async def unread(cluster_id):
            given.outages = {"objects.get"}
            try:
                return await read(cluster_id)
            finally:
                given.outages = set()

        leader.gate._store.cluster = unread
        found = await leading(world, leader)
        assert await listed(world) == ledgers
        assert leader.gate.stopped(STREAM).startswith(UNREAD)
        leader.gate._store.cluster = read
        await found.run_pass()
        assert leader.gate.stopped(STREAM).startswith(RESTORED)
        assert await listed(world) == ledgers
        # What one term has compared says nothing of the next.
        await world.catalog().policies.set_level(None, LONG)
        await found.run_pass()
        assert leader.gate.stopped(STREAM) is None
        leader.gate._store.cluster = unread
        await found.begin()
        await found.run_pass()
        assert leader.gate.stopped(STREAM).startswith(UNREAD)

    run_virtual(main())


def test_what_the_cluster_s_manifest_said_is_not_forgotten_when_it_is_gone():
    async def main():
        world, given = World(), no_faults()
        ledgers = await kept_for_longer(world)
        leader = Leader(world, given)
        found = await leading(world, leader)
        cluster = await world.catalog().nodes.ensure_cluster()
        store = store_of(world)
        for compare in (False, True):
            given.outages = {"metadata.get"}
            await leader.gate.record_cluster()
            given.outages = set()
            world.bucket.objects.pop(cluster_key("", cluster.cluster_id, 1), None)
            await leader.gate.record_cluster(compare=compare)
        for _ in range(2):
            await found.run_pass()
        assert leader.gate.stopped(STREAM).startswith(RESTORED)
        assert await listed(world) == ledgers
        assert await store.newest_of_cluster(cluster.cluster_id) == 0
        await world.catalog().policies.set_level(None, LONG)
        given.next("objects.put", Outcome.REQUEST_LOST)
        for _ in range(2):
            await leader.gate.record_cluster()
        assert await store.newest_of_cluster(cluster.cluster_id) == 2
        assert await levels_in_bucket(world) == LONG
        assert leader.gate.stopped(STREAM) is None

    run_virtual(main())


def test_one_that_another_leader_wrote_behind_a_gap_is_read():
    async def main():
        world, given = World(), no_faults()
        await kept_for_longer(world)
        leader, store = Leader(world, given), store_of(world)
        cluster = await world.catalog().nodes.ensure_cluster()
        await leader.gate.record_cluster()
        world.clock.jump_wall(2 * 3600)
        await world.catalog().policies.set_level(None, LONG)
        await leader.gate.record_cluster()
        del world.bucket.objects[cluster_key("", cluster.cluster_id, 2)]
        given.next("objects.put", Outcome.REQUEST_LOST)
        await leader.gate.record_cluster(compare=True)
        await world.catalog().policies.set_level(None, SHORT)
        await Leader(world).gate.record_cluster()
        # Of the number that was lost, and another.
        assert await store.newest_of_cluster(cluster.cluster_id) == 2
        for _ in range(2):
            await leader.gate.record_cluster()
        assert await store.newest_of_cluster(cluster.cluster_id) == 2

    run_virtual(main())


def test_policies_that_were_changed_while_nobody_led_are_no_sign_of_a_backup():
    async def main():
        world = World()
        catalog = world.catalog()
        await catalog.nodes.ensure_cluster()
        claimed = await world.stream()
        ledgers = [await offloaded(world, claimed) for _ in range(3)]
        await catalog.policies.set_level(None, LONG)
        await leading(world, Leader(world))
        await catalog.policies.set_level(None, SHORT)
        leader = Leader(world)
        found = await leading(world, leader)
        assert leader.gate.stopped(STREAM) is None
        await asyncio.sleep(1)
        await found.run_pass()
        assert await listed(world) == ledgers[-1:]
        assert await levels_in_bucket(world) == SHORT

    run_virtual(main())
