"""Manifests that were taken out of the bucket: nothing is deleted by them, and they are made anew.

Must hold (protocols.md section 3): a local copy goes only when a manifest that can be read names
the other one. A leader's memory of a manifest is none.
"""

from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import (
    Leader,
    manifests_of,
    named,
    newest,
    offloaded,
    trim,
)
from tierlog.adapters.memory.faults import Outcome, no_faults
from tierlog.model.policy import Policy
from tierlog.offload.manifests import KnownManifest


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
