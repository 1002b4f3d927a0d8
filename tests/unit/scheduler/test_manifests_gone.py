"""Manifests that were taken out of the bucket: nothing is deleted by them, and they are made anew.

Must hold (protocols.md section 3): a local copy goes only when a manifest that can be read names
the other one. A leader's memory of a manifest is none.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.gates import leader_of
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import (
    ENTRIES,
    Leader,
    backup,
    manifests_of,
    named,
    newest,
    offloaded,
    restore,
    store_of,
    trim,
)
from tierlog.adapters.memory.faults import Outcome, no_faults
from tierlog.format import manifest as fmt
from tierlog.format.manifest import cluster_key
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import Position
from tierlog.offload.manifests import KnownManifest, ManifestStore
from tierlog_scheduler.manifests import RESTORED
from tierlog_scheduler.mirror import Mirror
from tierlog_scheduler.scheduler import SchedulerLimits

NAMES = [StreamName(f"shop.s{number}") for number in range(4)]


def lose(world: World, which: Callable[[list[str]], list[str]] = lambda keys: keys) -> None:
    """Take manifests out of the bucket, all of them or some."""
    for key in which(manifests_of(world)):
        del world.bucket.objects[key]


async def read_by_another(world: World) -> KnownManifest:
    """Return the newest manifest, which another leader reads without complaint."""
    other = Leader(world)
    await other.visit()
    assert other.gate.stopped(STREAM) is None
    return await newest(world)


@pytest.mark.parametrize("which", ["all", "first", "newest"])
def test_no_change_is_left_behind_a_gap(which: str) -> None:
    async def main() -> None:
        world, claimed, first, leader = await named()
        second = await offloaded(world, claimed)
        await leader.visit()
        assert len(manifests_of(world)) == 2
        some = {"all": slice(None), "first": slice(1), "newest": slice(1, None)}[which]
        lose(world, lambda keys: keys[some])
        third = await offloaded(world, claimed)
        await leader.visit()
        known = await read_by_another(world)
        assert list(known.ledgers) == [first, second, third]
        assert known.snapshot_generation == known.generation == 4
        for ledger_id in known.ledgers:
            assert await leader.gate.may_delete_local(await world.context(ledger_id))

    run_virtual(main())


def test_what_is_written_behind_a_gap_and_not_made_good_is_so_at_the_next_pass() -> None:
    async def main(outcome: Outcome) -> None:
        world, claimed, first, _ = await named()
        given = no_faults()
        leader = Leader(world, given)
        await leader.visit()
        second = await offloaded(world, claimed)
        context = await world.context(second)
        lose(world)
        given.next("objects.put", Outcome.ANSWERED)
        given.next("objects.put", outcome)
        await leader.visit()
        assert leader.gate.stopped(STREAM) is not None
        assert not await leader.gate.may_delete_local(context)
        await leader.visit()
        assert list((await read_by_another(world)).ledgers) == [first, second]
        assert leader.gate.stopped(STREAM) is None
        assert await leader.gate.may_delete_local(context)
        assert len(manifests_of(world)) == 2

    for outcome in (Outcome.REQUEST_LOST, Outcome.REPLY_LOST):
        run_virtual(main(outcome))


@pytest.mark.parametrize("dies", [True, False])
def test_a_leader_that_dies_behind_a_gap_leaves_it_to_the_next_one(dies: bool) -> None:
    """Nothing but the bucket and the metadata say that a snapshot is due."""

    async def main() -> None:
        world, claimed, first, _ = await named()
        given = no_faults()
        leader = Leader(world, given)
        second = await offloaded(world, claimed)
        await leader.visit()
        lose(world, lambda keys: keys[:1])
        third = await offloaded(world, claimed)
        if dies:
            given.next("objects.put", Outcome.ANSWERED)
            given.next("objects.put", Outcome.REQUEST_LOST)
            await leader.visit()
        assert len(manifests_of(world)) == 1 + dies
        other = Leader(world)
        await other.visit()
        assert list((await newest(world)).ledgers) == [first, second, third]
        assert other.gate.stopped(STREAM) is None
        for ledger_id in (first, second, third):
            assert await other.gate.may_delete_local(await world.context(ledger_id))
        await read_by_another(world)

    run_virtual(main())


def test_what_is_behind_a_gap_still_says_that_the_metadata_are_older() -> None:
    async def main() -> None:
        world, claimed, _, leader = await named()
        kept = backup(world.metadata)
        await offloaded(world, claimed)
        await leader.visit()
        # The newest says nothing of ledgers.
        await leader.catalog.streams.set_policy(STREAM, Policy(offload_time_ms=7))
        await leader.visit()
        lose(world, lambda keys: keys[:1])
        before = manifests_of(world)
        restore(world.metadata, kept)
        other = Leader(world)
        for _ in range(3):
            await other.visit()
            assert (other.gate.stopped(STREAM) or "").startswith(RESTORED)
        assert manifests_of(world) == before

    run_virtual(main())


def test_what_was_trimmed_before_a_gap_is_not_missed_behind_it() -> None:
    async def main() -> None:
        world, claimed, first, leader = await named()
        await offloaded(world, claimed)
        await leader.visit()
        await trim(world, first)
        await leader.visit()
        await leader.catalog.streams.set_policy(STREAM, Policy(offload_time_ms=7))
        await leader.visit()
        assert len(manifests_of(world)) == 4
        await leader.catalog.streams.change(
            STREAM, lambda one: replace(one, deleting=()), applied=lambda one: not one.deleting
        )
        # The one that says that it was trimmed.
        lose(world, lambda keys: keys[2:3])
        await read_by_another(world)
        assert first not in (await newest(world)).ledgers

    run_virtual(main())


@pytest.mark.parametrize("all_gone", [True, False])
def test_a_manifest_that_is_made_anew_says_how_far_was_trimmed(all_gone: bool) -> None:
    """By it an export, a streaming read, a copy and a restore tell what nobody will ever read."""

    async def main() -> None:
        world, claimed, first, leader = await named()
        await offloaded(world, claimed)
        end = Position(first, EntryId(len(ENTRIES)))
        await trim(world, first)
        await leader.visit()
        await leader.catalog.streams.change(
            STREAM,
            lambda one: replace(one, deleting=(), trimmed_end=end),
            applied=lambda one: one.trimmed_end == end,
        )
        before = (await newest(world)).head
        assert before is not None
        assert (before.trimmed_through, before.trimmed_end) == (first, end)
        lose(world, lambda keys: keys if all_gone else keys[-1:])
        head = (await read_by_another(world)).head
        assert head is not None
        assert (head.trimmed_through, head.trimmed_end) == (first, end)
        assert head.ledger_id_max == before.ledger_id_max
        await read_by_another(world)
        assert len(manifests_of(world)) == (1 if all_gone else 2)

    run_virtual(main())


def test_each_deletion_asks_whether_the_manifest_is_there_at_all() -> None:
    async def main() -> None:
        world, claimed, first, leader = await named()
        second = await offloaded(world, claimed)
        await trim(world, first)
        await leader.visit()
        context = await world.context(second)

        gate = leader.gate
        questions: list[Callable[[], Awaitable[bool]]] = [
            lambda: gate.may_delete_local(context),
            lambda: gate.may_sweep(context, UUID(int=6)),
            lambda: gate.let_go(STREAM, claimed.incarnation, first),
        ]
        for begin in range(3):
            turn = questions[begin:] + questions[:begin]
            assert [await ask() for ask in turn] == [True, True, True]
            lose(world)
            assert [await ask() for ask in turn] == [False, False, False]
            await leader.visit()

    run_virtual(main())


def test_memory_of_a_manifest_that_is_gone_ends_with_the_one_of_another_leader() -> None:
    async def main() -> None:
        world, claimed, first, leader = await named()
        context = await world.context(first)
        await leader.catalog.streams.set_policy(STREAM, Policy(offload_time_ms=7))
        await leader.visit()
        lose(world)
        assert not await leader.gate.may_delete_local(context)
        # Who has no memory of it begins anew, with a lower number than the one remembered.
        other = Leader(world)
        await other.visit()
        assert (await newest(world)).generation == 1
        await leader.visit()
        assert (await newest(world)).generation == 3
        second = await offloaded(world, claimed)
        for _ in range(2):
            await other.visit()
        assert list((await newest(world)).ledgers) == [first, second]
        assert await other.gate.may_delete_local(context)
        assert not await leader.gate.may_delete_local(context)
        await leader.visit()
        assert await leader.gate.may_delete_local(context)

    run_virtual(main())


def test_the_slow_round_finds_what_is_gone_of_quiet_streams_with_one_list_each() -> None:
    async def main() -> None:
        world = World()
        ledgers = {}
        for name in NAMES:
            ledgers[name] = await offloaded(world, await world.stream(name))
        counted = no_faults()
        leader = Leader(world, counted)
        mirror = Mirror(leader.catalog, leader.gate, streams_in_flight_max=2, reread_s=80.0)

        async def asked(passes: int) -> list[str]:
            counted.calls = []
            for _ in range(passes):
                await mirror.refresh(10.0)
            return [name for name in counted.calls if name.startswith("objects.")]

        await mirror.refresh(0)
        assert await asked(8) == ["objects.list"] * len(NAMES)
        gone = [key for key in manifests_of(world) if f"/{NAMES[2]}/" in key]
        lose(world, lambda _: gone)
        assert sorted(await asked(8)) == ["objects.list"] * (len(NAMES) + 1) + ["objects.put"]
        assert list((await newest(world, NAMES[2])).ledgers) == [ledgers[NAMES[2]]]
        assert await asked(8) == ["objects.list"] * len(NAMES)
        # Another leader wrote: that is news, and nothing is gone.
        await leader.catalog.streams.set_policy(NAMES[1], Policy(offload_time_ms=7))
        await Leader(world).visit(NAMES[1])
        await asked(8)
        assert leader.gate.stopped(NAMES[1]) is None
        assert len([key for key in manifests_of(world) if f"/{NAMES[1]}/" in key]) == 2

    run_virtual(main())


def test_a_bucket_that_can_t_be_listed_lacks_nothing() -> None:
    async def main() -> None:
        world, _, ledger_id, _ = await named()
        given = no_faults()
        leader = Leader(world, given)
        await leader.visit()
        given.outages = {"objects.list"}
        assert not await leader.gate.look(STREAM, compare=True)
        await leader.gate.record(*await leader.read())
        given.outages = set()
        assert await leader.gate.may_delete_local(await world.context(ledger_id))
        assert len(manifests_of(world)) == 1

    run_virtual(main())


def test_what_only_old_metadata_could_write_anew_is_not_written() -> None:
    async def main() -> None:
        world, claimed, _, leader = await named()
        before = backup(world.metadata)
        await offloaded(world, claimed)
        await leader.visit()
        restore(world.metadata, before)
        leader = Leader(world)
        await leader.visit()
        assert (leader.gate.stopped(STREAM) or "").startswith(RESTORED)
        lose(world)
        for compare in (True, False, True):
            assert not await leader.gate.look(STREAM, compare=compare)
            await leader.gate.record(*await leader.read())
            assert (leader.gate.stopped(STREAM) or "").startswith(RESTORED)
        assert manifests_of(world) == []

    run_virtual(main())


def test_the_cluster_s_own_manifest_is_written_anew_too() -> None:
    async def main() -> None:
        world = World()
        await world.stream()
        cluster = await world.catalog().nodes.ensure_cluster()
        counted = no_faults()
        leader, store = Leader(world, counted), store_of(world)
        await leader.gate.record_cluster()
        await world.catalog().policies.set_level("ns", Policy(offload_time_ms=3))
        await leader.gate.record_cluster()
        _, written = await store.cluster(cluster.cluster_id)
        # Of the newest alone: the one before it has policies of long ago.
        del world.bucket.objects[cluster_key("", cluster.cluster_id, 2)]
        await leader.gate.record_cluster()
        assert await store.newest_of_cluster(cluster.cluster_id) == 1
        await leader.gate.record_cluster(compare=True)
        assert await store.cluster(cluster.cluster_id) == (3, written)
        counted.calls = []
        await leader.gate.record_cluster(compare=True)
        assert [one for one in counted.calls if one.startswith("objects.")] == ["objects.list"]
        # One that another leader wrote is taken.
        await world.catalog().policies.set_level("ns", Policy(offload_time_ms=4))
        await Leader(world).gate.record_cluster()
        await leader.gate.record_cluster(compare=True)
        assert await store.newest_of_cluster(cluster.cluster_id) == 4

    run_virtual(main())


def test_a_leader_compares_the_cluster_s_manifest_as_often_as_it_reads_streams_anew() -> None:
    async def main() -> None:
        world = World()
        leader = leader_of(world, SchedulerLimits(reread_s=100.0))
        asked: list[bool] = []

        async def record_cluster(*, compare: bool = False) -> None:
            asked.append(compare)

        with patch.object(leader._manifests, "record_cluster", record_cluster):
            for _ in range(8):
                await leader.run_pass()
                world.clock.advance(50.0)
        assert asked == [False, False, True, False, True, False, True, False]

    run_virtual(main())


def test_a_list_that_lags_behind_what_was_put_calls_for_nothing_more(monkeypatch) -> None:
    async def main() -> None:
        world, claimed, _, leader = await named()
        listed = ManifestStore._listed

        async def lagging(store: ManifestStore, *asked: Any) -> Any:
            seen_ms = world.clock.wall_ms() - 1000
            return [one for one in await listed(store, *asked) if one.info.modified_ms <= seen_ms]

        monkeypatch.setattr(ManifestStore, "_listed", lagging)
        await offloaded(world, claimed)
        for _ in range(10):
            world.clock.advance(5)
            await leader.visit()
        # Behind the change comes one snapshot, written for nothing, and that is all.
        assert [len(manifests_of(world)), (await newest(world)).gone] == [3, False]
        assert await leader.gate.may_delete_local(await world.context(LedgerId(0)))

    run_virtual(main())


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_gap_that_is_not_mended_at_once_stays_one(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """Who read what is left of a manifest knows no ledger of a part that is missing."""
    monkeypatch.setattr(fmt, "PART_LEDGERS", 2)

    async def main() -> None:
        world, claimed, first, leader = await named()
        rest = [await offloaded(world, claimed) for _ in range(4)]
        await leader.visit()
        part = next(key for key in manifests_of(world) if key.endswith(".part"))
        taken = world.bucket.objects.pop(part)
        other = Leader(world)
        # The metadata can't be read in that pass.
        await other.gate.look(STREAM)
        assert other.gate.stopped(STREAM) is not None
        if comes_back:
            world.bucket.objects[part] = taken
        for ledger_id in (first, *rest[:-1]):
            await trim(world, ledger_id)
        await other.visit()
        assert other.gate.stopped(STREAM) is None
        known = await read_by_another(world)
        assert list(known.ledgers) == rest[-1:]
        assert known.head is not None
        assert await other.gate.let_go(STREAM, claimed.incarnation, first)

    run_virtual(main())
