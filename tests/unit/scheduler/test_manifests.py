"""The gate: manifests follow the metadata, deletions wait for them; old metadata delete nothing.

Must hold (protocols.md section 3): a later generation never holds older metadata; a local copy
is deleted only when the newest manifest names the other one; metadata that came back from a
backup stop every deletion of the stream.
"""

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import (
    ENTRIES,
    Leader,
    manifests_of,
    named,
    newest,
    offloaded,
    store_of,
    trim,
)
from tierlog.adapters.memory.faults import Outcome, no_faults
from tierlog.format import manifest as fmt
from tierlog.format import paths, records
from tierlog.format.manifest import cluster_key, unkeep
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.model.ids import NodeId, StreamName
from tierlog.model.manifest import copy_of
from tierlog.model.offload import OffloadState
from tierlog.model.policy import Policy
from tierlog.offload.manifests import BucketGuard
from tierlog_scheduler.manifests import RESTORED


def test_a_manifest_names_what_is_complete_and_only_then_the_local_copy_may_go() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=5))
        leader = Leader(world)
        await leader.visit()
        head = (await newest(world)).head
        assert head is not None
        assert (head.stream, head.policy) == (STREAM, Policy(offload_time_ms=5))
        ledger_id = await offloaded(world, claimed)
        context = await world.context(ledger_id)
        assert not await leader.gate.may_delete_local(context)
        await leader.visit()
        assert await leader.gate.may_delete_local(context)
        known = await newest(world)
        assert unkeep(known.ledgers[ledger_id].packed).copy == copy_of(context)
        assert context.copy is not None
        other = replace(context, copy=replace(context.copy, index_sha256=b"x" * 32))
        assert not await leader.gate.may_delete_local(other)
        assert not await leader.gate.may_delete_local(replace(context, uuid=UUID(int=1)))

    run_virtual(main())


def test_digests_that_differ_are_written_anew() -> None:
    async def main() -> None:
        world, _, ledger_id, leader = await named()
        catalog = world.catalog()
        found = await catalog.contexts.get(ledger_id)
        assert found is not None
        assert found.copy is not None
        changed = replace(found, copy=replace(found.copy, data_sha256=b"y" * 32))
        await catalog.contexts.change(
            ledger_id, lambda _: changed, applied=lambda one: one == changed
        )
        assert not await leader.gate.may_delete_local(changed)
        await leader.visit()
        assert await leader.gate.may_delete_local(changed)

    run_virtual(main())


def test_nothing_is_written_and_nothing_asked_of_the_bucket_while_nothing_changes() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        await offloaded(world, claimed)
        counted = no_faults()
        leader = Leader(world, counted)
        await leader.visit()
        written = manifests_of(world)
        counted.calls = []
        for _ in range(10):
            await leader.visit()
        # An owner that comes and goes is no reason to write, and neither is a ledger not copied.
        await world.seal(await world.catalog().streams.claim(STREAM, NodeId("n2")), [b"more"])
        await leader.visit()
        assert not [name for name in counted.calls if name.startswith("objects.")]
        assert manifests_of(world) == written

    run_virtual(main())


@pytest.mark.parametrize("other_writes_first", [True, False])
def test_a_later_generation_never_holds_older_metadata(*, other_writes_first: bool) -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        first = await offloaded(world, claimed)
        slow, quick = Leader(world), Leader(world)
        await slow.visit()
        await slow.gate.look(STREAM)
        read = await slow.read()
        second = await offloaded(world, claimed)
        if other_writes_first:
            await quick.visit()
        # What is recorded was read before the second ledger was complete.
        read = (read[0], {first: replace(read[1][first], timestamp_ms=1)})
        await slow.catalog.streams.set_policy(STREAM, Policy(offload_time_ms=1))
        changed = replace(read[0].stream, policy=Policy(offload_time_ms=1))
        await slow.gate.record(replace(read[0], stream=changed), read[1])
        known = await newest(world)
        if other_writes_first:
            assert second in known.ledgers
            assert slow.gate.stopped(STREAM) is not None
        else:
            assert second not in known.ledgers
        # Whoever it was, the next look is at the newest, and ends the same.
        for leader in (slow, quick):
            for _ in range(2):
                await leader.visit()
            known = await newest(world)
            assert list(known.ledgers) == [first, second]
            assert known.head is not None
            assert known.head.policy == Policy(offload_time_ms=1)
            assert leader.gate.stopped(STREAM) is None

    run_virtual(main())


def test_a_deletion_asks_for_the_newest_at_that_very_moment() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        ledger_id = await offloaded(world, claimed)
        first, second = Leader(world), Leader(world)
        await first.visit()
        context = await world.context(ledger_id)
        assert await first.gate.may_delete_local(context)
        await offloaded(world, claimed)
        await second.visit()
        # Somebody else wrote: what this one knows may be too old.
        assert not await first.gate.may_delete_local(context)
        await first.visit()
        assert await first.gate.may_delete_local(context)

    run_virtual(main())


@pytest.mark.parametrize("verb", ["list", "get", "put"])
def test_a_bucket_that_does_not_answer_stops_deletions_and_nothing_else(verb: str) -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        given = no_faults()
        given.outages = {f"objects.{verb}"}
        leader = Leader(world, given)
        ledger_id = await offloaded(world, claimed)
        if verb == "get":
            await Leader(world).visit()
        await leader.visit()
        context = await world.context(ledger_id)
        assert not await leader.gate.may_delete_local(context)
        assert leader.gate.stopped(STREAM) is not None
        given.outages = set()
        await leader.visit()
        assert await leader.gate.may_delete_local(context)
        assert leader.gate.stopped(STREAM) is None

    run_virtual(main())


def test_a_question_that_the_bucket_does_not_answer_is_raised_and_stops_nothing_else() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        given = no_faults()
        leader = Leader(world, given)
        ledger_id = await offloaded(world, claimed)
        await leader.visit()
        context, gate = await world.context(ledger_id), leader.gate
        given.outages = {"objects.list"}
        with pytest.raises(RetryableError):
            await gate.may_delete_local(context)
        with pytest.raises(RetryableError):
            await gate.may_sweep(context, UUID(int=6))
        with pytest.raises(RetryableError):
            await gate.let_go(STREAM, claimed.incarnation, ledger_id)
        assert gate.stopped(STREAM) is None
        given.outages = set()
        assert await gate.may_delete_local(context)

    run_virtual(main())


def test_a_put_whose_answer_was_lost_is_found_by_looking() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        ledger_id = await offloaded(world, claimed)
        given = no_faults()
        given.next("objects.put", Outcome.REPLY_LOST)
        leader = Leader(world, given)
        await leader.visit()
        assert leader.gate.stopped(STREAM) is not None
        assert len(manifests_of(world)) == 1
        await leader.visit()
        assert leader.gate.stopped(STREAM) is None
        assert len(manifests_of(world)) == 1
        assert await leader.gate.may_delete_local(await world.context(ledger_id))

    run_virtual(main())


def test_a_damaged_manifest_stops_deletions_until_it_is_taken_away() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        ledger_id = await offloaded(world, claimed)
        await Leader(world).visit()
        (key,) = manifests_of(world)
        world.bucket.damage(key, 30)
        leader = Leader(world)
        context = await world.context(ledger_id)
        for _ in range(3):
            await leader.visit()
            assert not await leader.gate.may_delete_local(context)
            assert manifests_of(world) == [key]
        assert "digest" in (leader.gate.stopped(STREAM) or "")
        del world.bucket.objects[key]
        await leader.visit()
        assert await leader.gate.may_delete_local(context)

    run_virtual(main())


def test_a_leader_that_dies_at_any_step_of_a_pass_is_followed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fmt, "PART_LEDGERS", 2)

    async def main(steps: int) -> bool:
        world = World()
        claimed = await world.stream()
        ledgers = [await offloaded(world, claimed) for _ in range(5)]
        dying = no_faults()
        leader = Leader(world, dying)

        async def lead() -> None:
            await leader.gate.record_cluster()
            await leader.visit()
            await world.catalog().streams.set_policy(STREAM, Policy(offload_time_ms=1))
            await leader.visit()

        task = asyncio.create_task(lead())
        dying.on_crash = task.cancel
        dying.crash_after(steps)
        await asyncio.wait({task})
        if not dying.crashed:
            task.result()
        # What is half there is whole for whoever comes next, or is not there.
        known = await newest(world)
        assert list(known.ledgers) in ([], ledgers)
        follower = Leader(world)
        await follower.gate.record_cluster()
        await follower.visit()
        assert follower.gate.stopped(STREAM) is None
        for ledger_id in ledgers:
            assert await follower.gate.may_delete_local(await world.context(ledger_id))
        generation, manifest = await store_of(world).cluster(
            (await world.catalog().nodes.ensure_cluster()).cluster_id
        )
        assert (generation, manifest is not None) == (1, True)
        return dying.crashed

    steps = 1
    while run_virtual(main(steps)):
        steps += 1
    assert steps > 40


def test_a_trimmed_ledger_is_let_go_only_by_a_manifest_that_says_so() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        first, second = await offloaded(world, claimed), await offloaded(world, claimed)
        leader, early = Leader(world), Leader(world)
        await leader.visit()
        assert not await leader.gate.let_go(STREAM, claimed.incarnation, first)
        await trim(world, first)
        # A leader that lags behind, and knows the ledger not at all, is not asked.
        assert not await Leader(world).gate.let_go(STREAM, claimed.incarnation, first)
        assert not await leader.gate.let_go(STREAM, claimed.incarnation, first)
        await leader.visit()
        assert await leader.gate.let_go(STREAM, claimed.incarnation, first)
        assert not await leader.gate.let_go(STREAM, claimed.incarnation, second)
        assert not await leader.gate.let_go(STREAM, UUID(int=3), first)
        assert list((await newest(world)).ledgers) == [second]

        # What a manifest never named may be about to be named by one that is being written.
        third = await world.seal(claimed, ENTRIES)
        await early.visit()
        await trim(world, second)
        await trim(world, third)
        assert third not in (await newest(world)).ledgers
        assert not await early.gate.let_go(STREAM, claimed.incarnation, third)
        await early.visit()
        assert await early.gate.let_go(STREAM, claimed.incarnation, third)

    run_virtual(main())


def test_an_abandoned_attempt_is_swept_unless_a_manifest_could_name_it() -> None:
    async def main() -> None:
        world = World()
        claimed = await world.stream()
        ledger_id = await offloaded(world, claimed)
        leader = Leader(world)
        context = await world.context(ledger_id)
        await leader.gate.look(STREAM)
        await leader.gate.record((await leader.read())[0], {})
        assert context.uuid is not None
        assert not await leader.gate.may_sweep(context, context.uuid)
        # Before a manifest names the new copy, one that is being written could name the old one.
        repaired = replace(context, uuid=UUID(int=5))
        assert not await leader.gate.may_sweep(repaired, UUID(int=6))
        assert await leader.gate.may_sweep(context, UUID(int=6))
        trying = replace(context, complete=False, state=OffloadState.OFFLOADING)
        assert await leader.gate.may_sweep(trying, UUID(int=6))

    run_virtual(main())


def test_a_damaged_copy_is_named_until_there_is_a_new_one() -> None:
    async def main() -> None:
        world, claimed, ledger_id, leader = await named()
        whole = await world.context(ledger_id)
        assert whole.uuid is not None
        assert whole.location is not None
        catalog, offloader = world.catalog(), world.offloader()
        fresh = UUID(int=77)
        repairing = await catalog.contexts.begin_repair(
            ledger_id,
            damaged=whole.uuid,
            uuid=fresh,
            location=offloader.location(ledger_id, fresh),
            worker="w",
        )
        # A generation for another reason goes on naming it.
        await offloaded(world, claimed)
        await leader.visit()
        assert leader.gate.stopped(STREAM) is None
        known = await newest(world)
        assert (known.generation, known.names(ledger_id, whole.uuid)) == (2, True)
        metadata = await catalog.ledgers.get(ledger_id)
        assert metadata is not None
        copy = await offloader.offload(world.open_ledger(ledger_id, metadata), fresh, {})
        again = await catalog.contexts.complete_repair(ledger_id, uuid=fresh, copy=copy)
        assert not await leader.gate.may_sweep(again, whole.uuid)
        assert not await BucketGuard(store_of(world)).may_clean(again, whole.uuid)
        await leader.visit()
        assert await leader.gate.may_sweep(again, whole.uuid)
        # Metadata from before that: what repairs in them is the copy by now.
        path = paths.context_path(ledger_id)
        node = await catalog.store.get(path)
        assert node is not None
        await catalog.store.set(path, records.encode_context(repairing), version=node.version)
        await leader.visit()
        assert (leader.gate.stopped(STREAM) or "").startswith(RESTORED)

    run_virtual(main())


def test_a_stream_made_anew_has_manifests_of_its_own() -> None:
    async def main() -> None:
        world = World()
        await world.stream()
        leader = Leader(world)
        await leader.visit()
        store = world.catalog().store
        await store.delete(paths.stream_path(STREAM), version=-1)
        anew, _ = await world.catalog().streams.create(STREAM)
        await leader.visit()
        assert "made anew" in (leader.gate.stopped(STREAM) or "")
        await leader.visit()
        assert leader.gate.stopped(STREAM) is None
        assert len({key.split("/")[2] for key in manifests_of(world)}) == 2
        assert (await newest(world)).incarnation == anew.incarnation

    run_virtual(main())


def test_the_cluster_s_identity_and_policies_are_there_too() -> None:
    async def main() -> None:
        world = World()
        await world.stream()
        catalog = world.catalog()
        cluster = await catalog.nodes.ensure_cluster(ledger_id_base=50)
        store = store_of(world)
        leader = Leader(world)
        for _ in range(3):
            await leader.gate.record_cluster()
        generation, manifest = await store.cluster(cluster.cluster_id)
        assert manifest is not None
        assert (generation, manifest.cluster) == (1, cluster)
        await catalog.policies.set_level("ns", Policy(offload_time_ms=3))
        other = Leader(world)
        for one in (leader, other, leader):
            await one.gate.record_cluster()
        generation, manifest = await store.cluster(cluster.cluster_id)
        assert manifest is not None
        assert (generation, dict(manifest.levels.namespaces)) == (
            2,
            {"ns": Policy(offload_time_ms=3)},
        )

    run_virtual(main())


def test_a_damaged_manifest_of_the_cluster_is_written_anew_by_the_next_leader() -> None:
    async def main() -> None:
        world = World()
        await world.stream()
        cluster = await world.catalog().nodes.ensure_cluster()
        await Leader(world).gate.record_cluster()
        world.bucket.damage(cluster_key("", cluster.cluster_id, 1), 30)
        store = store_of(world)
        with pytest.raises(CorruptError):
            await store.cluster(cluster.cluster_id)
        await Leader(world).gate.record_cluster()
        generation, manifest = await store.cluster(cluster.cluster_id)
        assert manifest is not None
        assert (generation, manifest.cluster) == (2, cluster)

    run_virtual(main())


def test_a_stream_that_is_not_there_is_not_asked_for() -> None:
    async def main() -> None:
        world = World()
        await world.stream()
        leader = Leader(world)
        assert await leader.gate.look(StreamName("other"))
        assert leader.gate.stopped(StreamName("other")) is not None
        with pytest.raises(RefusedError):
            await leader.catalog.streams.get(StreamName("other"))

    run_virtual(main())
