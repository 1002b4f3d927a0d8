"""Nothing is trimmed that nobody orders any more (protocols.md section 3, step 10).

Whatever a decision to trim stood on may change between the decision and the transaction, and in
the very moment before the transaction: then nothing goes, and the next pass decides anew.
"""

from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tierlog.catalog import Catalog
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import Tier2Copy
from tierlog.model.policy import Policy

COPY = Tier2Copy(
    format_version=1, data_len=1, index_len=1, index_sha256=b"x", entry_count=1, block_count=1
)
RETENTION = Policy(retention_time_ms=60_000)


async def own_retention_raised(catalog: Catalog, _: LedgerId) -> None:
    await catalog.streams.set_policy(STREAM, Policy(retention_time_ms=10**9))


async def own_retention_taken_back(catalog: Catalog, _: LedgerId) -> None:
    await catalog.streams.set_policy(STREAM, Policy())


async def offload_first(catalog: Catalog, _: LedgerId) -> None:
    await catalog.streams.set_policy(STREAM, Policy(retention_time_ms=60_000, offload_time_ms=1))


async def wish(catalog: Catalog, ledger_id: LedgerId) -> None:
    await catalog.streams.want_offloaded(STREAM, ledger_id)


async def pause(catalog: Catalog, _: LedgerId) -> None:
    await catalog.streams.pause_offload(STREAM, "hold on")


async def size_kept_by_the_cluster(catalog: Catalog, _: LedgerId) -> None:
    await catalog.policies.set_level(None, Policy(retention_size_bytes=10**9))


async def offload_first_by_the_cluster(catalog: Catalog, _: LedgerId) -> None:
    await catalog.policies.set_level(None, Policy(offload_time_ms=1))


CHANGES = [
    own_retention_raised,
    own_retention_taken_back,
    offload_first,
    wish,
    pause,
    size_kept_by_the_cluster,
    offload_first_by_the_cluster,
]


async def check_untouched(world: World, ledger_id: LedgerId) -> None:
    snapshot = await world.catalog().streams.snapshot(STREAM)
    assert [one.ledger_id for one in snapshot.ledgers] == [ledger_id]
    assert snapshot.stream.deleting == ()
    assert (await world.context(ledger_id)).abandoned == ()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_since_the_decision_keeps_what_was_to_go(change):
    async def main():
        world = World()
        claimed = await world.stream(policy=RETENTION)
        ledger_id = await world.seal(claimed, [b"x"])
        catalog, decided = world.catalog(), await world.grounds()
        await change(catalog, ledger_id)
        with pytest.raises(RefusedError, match="was changed since that was decided"):
            await catalog.retention.begin_trim(
                STREAM, claimed.incarnation, [ledger_id], grounds=decided
            )
        await check_untouched(world, ledger_id)

    run_virtual(main())


@pytest.mark.parametrize(
    ("change", "levels_are_there"),
    [
        *((one, True) for one in CHANGES),
        # Without a policy of its own it has none to take back.
        *((one, False) for one in CHANGES if one is not own_retention_taken_back),
    ],
)
def test_a_change_in_the_moment_before_the_transaction_keeps_it_too(
    change, levels_are_there, monkeypatch
):
    async def main():
        world = World()
        claimed = await world.stream(policy=RETENTION if levels_are_there else None)
        ledger_id = await world.seal(claimed, [b"x"])
        catalog, decided = world.catalog(), await world.grounds()
        transact, changed = catalog.store.transact, False

        async def late(operations):
            nonlocal changed
            if not changed:
                changed = True
                await change(world.catalog(), ledger_id)
            await transact(operations)

        monkeypatch.setattr(catalog.store, "transact", late)
        with pytest.raises(RefusedError, match="was changed since that was decided"):
            await catalog.retention.begin_trim(
                STREAM, claimed.incarnation, [ledger_id], grounds=decided
            )
        assert changed
        await check_untouched(world, ledger_id)

    run_virtual(main())


@pytest.mark.parametrize("state", ["local", "offloading", "complete"])
def test_a_ledger_goes_only_with_the_copy_that_is_wanted_of_it(state):
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=1, retention_time_ms=60_000))
        ledger_id = await world.seal(claimed, [b"x"])
        catalog, uuid = world.catalog(), UUID(int=7)
        location = world.offloader().location(ledger_id, uuid)
        if state != "local":
            await catalog.contexts.begin_attempt(
                ledger_id, uuid=uuid, location=location, worker="w"
            )
        if state == "complete":
            await catalog.contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
        trim = catalog.retention.begin_trim(
            STREAM, claimed.incarnation, [ledger_id], grounds=await world.grounds()
        )
        if state == "complete":
            assert await trim == 1
            return
        with pytest.raises(RefusedError, match="is to be offloaded first"):
            await trim
        await check_untouched(world, ledger_id)

    run_virtual(main())


def test_a_paused_stream_is_not_trimmed_even_when_it_was_decided_so():
    async def main():
        world = World()
        claimed = await world.stream(policy=RETENTION)
        ledger_id = await world.seal(claimed, [b"x"])
        await world.catalog().streams.pause_offload(STREAM)
        for deleting in (False, True):
            if deleting:
                await world.catalog().retention.begin_stream_deletion(STREAM)
            with pytest.raises(RefusedError, match="or it is paused"):
                await world.catalog().retention.begin_trim(
                    STREAM, claimed.incarnation, [ledger_id], grounds=await world.grounds()
                )
        await check_untouched(world, ledger_id)

    run_virtual(main())


def test_a_stream_that_is_being_deleted_goes_whatever_its_policy_is():
    async def main():
        world = World()
        claimed = await world.stream(policy=RETENTION)
        ledger_id = await world.seal(claimed, [b"x"])
        catalog = world.catalog()
        await catalog.retention.begin_stream_deletion(STREAM)
        decided = await world.grounds()
        await catalog.policies.set_level(None, Policy(retention_size_bytes=10**9))
        assert await catalog.retention.begin_trim(
            STREAM, claimed.incarnation, [ledger_id], grounds=decided
        )

    run_virtual(main())


def test_a_ledger_that_is_added_meanwhile_holds_nothing_up():
    async def main():
        world = World()
        claimed = await world.stream(policy=RETENTION)
        ledger_id = await world.seal(claimed, [b"x"])
        catalog, decided = world.catalog(), await world.grounds()
        await world.seal(claimed, [b"y"])
        assert await catalog.retention.begin_trim(
            STREAM, claimed.incarnation, [ledger_id], grounds=decided
        )

    run_virtual(main())
