"""Trimming in the metadata: a prefix at once, the rest step by step, whatever gets lost between."""

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.catalog import ledgers
from tierlog.catalog.contexts import LAST_ERROR_LEN_MAX
from tierlog.catalog.retention import TRIM_LEDGERS_MAX
from tierlog.format import paths, records
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.offload import (
    HISTORY_MAX,
    AttemptOutcome,
    OffloadState,
    PastAttempt,
    Tier2Copy,
)
from tierlog.model.stream import Stream

COPY = Tier2Copy(
    format_version=1, data_len=1, index_len=1, index_sha256=b"x", entry_count=1, block_count=1
)
SHAKY = FaultRates(refused=0.05, request_lost=0.05, reply_lost=0.05)


async def filled(world: World, count: int) -> tuple[Stream, list[LedgerId]]:
    claimed = await world.stream()
    return claimed, [await world.seal(claimed, [b"x"]) for _ in range(count)]


async def listed(world: World) -> list[LedgerId]:
    snapshot = await world.catalog().streams.snapshot(STREAM)
    return [one.ledger_id for one in snapshot.ledgers]


def test_a_prefix_leaves_the_list_and_stands_in_deleting():
    async def main():
        world = World()
        claimed, ids = await filled(world, 4)
        retention = world.catalog().retention
        assert (
            await retention.begin_trim(
                STREAM, claimed.incarnation, ids[:2], grounds=await world.grounds()
            )
            == 2
        )
        assert await listed(world) == ids[2:]
        stream = (await world.catalog().streams.snapshot(STREAM)).stream
        assert list(stream.deleting) == ids[:2]
        for ledger_id in ids[:2]:
            context = await world.context(ledger_id)
            assert context.state is OffloadState.TRIMMING
            assert await world.catalog().ledgers.get(ledger_id) is not None
        # The owner goes on as if nothing had happened.
        more = await world.seal(claimed, [b"y"])
        assert await listed(world) == [*ids[2:], more]

    run_virtual(main())


def test_contexts_that_are_long_go_in_as_many_transactions_as_they_need():
    async def main():
        world = World()
        claimed, ids = await filled(world, TRIM_LEDGERS_MAX)
        store, told = world.catalog().store, "x" * LAST_ERROR_LEN_MAX
        past = PastAttempt(
            uuid=UUID(int=1),
            worker="w",
            started_ms=1,
            ended_ms=2,
            outcome=AttemptOutcome.FAILED,
            error=told,
        )
        for ledger_id in ids:
            path = paths.context_path(ledger_id)
            found = await store.get(path)
            assert found is not None
            context = records.decode_context(found.data)
            longer = replace(context, last_error=told, history=(past,) * HISTORY_MAX)
            await store.set(path, records.encode_context(longer), version=found.version)
        retention, grounds = world.catalog().retention, await world.grounds()
        count = await retention.begin_trim(STREAM, claimed.incarnation, ids, grounds=grounds)
        assert count == len(ids)
        assert await listed(world) == []
        stream = (await world.catalog().streams.snapshot(STREAM)).stream
        assert list(stream.deleting) == ids

    run_virtual(main())


def test_only_a_prefix_goes_and_never_what_is_open():
    async def main():
        world = World()
        claimed, ids = await filled(world, 3)
        is_open = await world.seal(claimed, [b"y"], close=False)
        retention = world.catalog().retention
        assert (
            await retention.begin_trim(
                STREAM, claimed.incarnation, ids[1:], grounds=await world.grounds()
            )
            == 0
        )
        assert await listed(world) == [*ids, is_open]
        with pytest.raises(RefusedError, match="is open"):
            await retention.begin_trim(
                STREAM, claimed.incarnation, [*ids, is_open], grounds=await world.grounds()
            )
        assert await listed(world) == [*ids, is_open]
        with pytest.raises(RefusedError) as caught:
            await retention.begin_trim(STREAM, UUID(int=5), ids, grounds=await world.grounds())
        assert caught.value.reason is Reason.STREAM_NOT_FOUND

    run_virtual(main())


def test_a_ledger_that_is_being_deleted_locally_holds_the_rest_back():
    async def main():
        world = World()
        claimed, ids = await filled(world, 2)
        contexts, offloader = world.catalog().contexts, world.offloader()
        uuid = UUID(int=7)
        location = offloader.location(ids[0], uuid)
        await contexts.begin_attempt(ids[0], uuid=uuid, location=location, worker="w")
        await contexts.complete_attempt(ids[0], uuid=uuid, copy=COPY)
        await contexts.begin_tier1_deletion(ids[0], uuid=uuid)
        retention = world.catalog().retention
        with pytest.raises(RefusedError, match="TIER1_DELETING to TRIMMING"):
            await retention.begin_trim(
                STREAM, claimed.incarnation, ids, grounds=await world.grounds()
            )
        assert await listed(world) == ids

    run_virtual(main())


def test_trimming_and_offloading_exclude_each_other_by_the_state():
    async def main():
        world = World()
        claimed, (ledger_id,) = await filled(world, 1)
        contexts, offloader = world.catalog().contexts, world.offloader()
        uuid, later = UUID(int=7), UUID(int=8)
        location = offloader.location(ledger_id, uuid)
        await contexts.begin_attempt(ledger_id, uuid=uuid, location=location, worker="w")
        await world.catalog().retention.begin_trim(
            STREAM, claimed.incarnation, [ledger_id], grounds=await world.grounds()
        )
        context = await world.context(ledger_id)
        assert [one.uuid for one in context.abandoned] == [uuid]
        assert context.uuid is None
        with pytest.raises(RefusedError):
            await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
        with pytest.raises(RefusedError):
            await contexts.begin_attempt(ledger_id, uuid=later, location=location, worker="w")

    run_virtual(main())


def test_nothing_is_forgotten_while_something_is_left():
    async def main():
        world = World()
        claimed, (ledger_id, _) = await filled(world, 2)
        catalog = world.catalog()
        retention, contexts = catalog.retention, catalog.contexts
        uuid = UUID(int=7)
        location = world.offloader().location(ledger_id, uuid)
        await contexts.begin_attempt(ledger_id, uuid=uuid, location=location, worker="w")
        with pytest.raises(RefusedError, match="not trimmed"):
            await retention.drop_tier1(ledger_id)
        await retention.begin_trim(
            STREAM, claimed.incarnation, [ledger_id], grounds=await world.grounds()
        )
        for step in (
            lambda: retention.drop_tier1(ledger_id),
            lambda: contexts.strike_off(ledger_id, uuid),
        ):
            with pytest.raises(RefusedError, match="not wholly deleted"):
                await retention.finish_trim(STREAM, claimed.incarnation, ledger_id)
            await step()
        assert await catalog.ledgers.get(ledger_id) is None
        assert await catalog.bare.deletion_on_record(ledger_id)
        await retention.finish_trim(STREAM, claimed.incarnation, ledger_id)
        await retention.finish_trim(STREAM, claimed.incarnation, ledger_id)
        assert await contexts.get(ledger_id) is None
        assert (await catalog.streams.get(STREAM)).deleting == ()

    run_virtual(main())


@pytest.mark.parametrize("taken", [1, 3, 4, 5, 9, 14, 20])
def test_pages_go_ledger_by_ledger_and_whole(taken, monkeypatch):
    monkeypatch.setattr(ledgers, "TAIL_LEDGERS_MAX", 6)
    monkeypatch.setattr(ledgers, "PAGE_LEDGERS", 4)

    async def main():
        world = World()
        claimed, ids = await filled(world, 20)
        store, retention = world.catalog().store, world.catalog().retention
        count = await retention.begin_trim(
            STREAM, claimed.incarnation, ids[:taken], grounds=await world.grounds()
        )
        assert count == taken
        assert await listed(world) == ids[taken:]
        stream = await world.catalog().streams.get(STREAM)
        found, _, pages = await world.catalog().streams.watch_snapshot(STREAM, {})
        assert [one.ledger_id for one in found.ledgers] == ids[taken:]
        again, _, _ = await world.catalog().streams.watch_snapshot(STREAM, pages)
        assert again.ledgers == found.ledgers
        names = await store.children(paths.pages_path(STREAM))
        assert [int(name) for name in names or []] == [one.page_number for one in stream.pages]
        more = [await world.seal(claimed, [b"y"]) for _ in range(12)]
        assert await listed(world) == [*ids[taken:], *more]

    run_virtual(main())


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_get_lost_and_two_that_do_them_at_once_end_the_same(seed):
    async def main():
        world = World(seed=seed)
        claimed, ids = await filled(world, 5)

        async def trim() -> None:
            retention = world.catalog(Faults(world.rng, rates=SHAKY)).retention
            await retention.begin_trim(
                STREAM, claimed.incarnation, ids[:3], grounds=await world.grounds()
            )
            for ledger_id in ids[:3]:
                try:
                    await retention.drop_tier1(ledger_id)
                    await retention.finish_trim(STREAM, claimed.incarnation, ledger_id)
                except RefusedError as error:
                    # The other one has forgotten it already.
                    assert "has no context" in error.message  # noqa: PT017

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(trim())
        assert await listed(world) == ids[3:]
        stream = await world.catalog().streams.get(STREAM)
        assert stream.deleting == ()
        for ledger_id in ids[:3]:
            assert await world.catalog().contexts.get(ledger_id) is None
            assert await world.catalog().ledgers.get(ledger_id) is None

    run_virtual(main())


def test_many_ledgers_go_in_transactions_of_a_bounded_size():
    async def main():
        world = World()
        claimed, ids = await filled(world, TRIM_LEDGERS_MAX + 3)
        changes = world.metadata.changes
        count = await world.catalog().retention.begin_trim(
            STREAM, claimed.incarnation, ids, grounds=await world.grounds()
        )
        assert count == len(ids)
        assert world.metadata.changes == changes + 2
        assert await listed(world) == []

    run_virtual(main())


def test_a_stream_is_removed_once_it_is_empty_and_its_name_is_free():
    async def main():
        world = World()
        claimed, ids = await filled(world, 2)
        catalog = world.catalog()
        retention, streams = catalog.retention, catalog.streams
        with pytest.raises(RefusedError, match="not being deleted"):
            await retention.remove_stream(STREAM, claimed.incarnation)
        _, told = await catalog.policies.watch()
        await retention.begin_stream_deletion(STREAM)
        assert told.is_set()
        for refused in (
            streams.create(STREAM),
            streams.claim(STREAM, NodeId("n2")),
            world.seal(claimed, [b"late"]),
        ):
            with pytest.raises(RefusedError) as caught:
                await refused
            assert caught.value.reason is Reason.STREAM_NOT_FOUND
        with pytest.raises(RefusedError, match="not empty"):
            await retention.remove_stream(STREAM, claimed.incarnation)
        await retention.begin_trim(STREAM, claimed.incarnation, ids, grounds=await world.grounds())
        for ledger_id in ids:
            await retention.drop_tier1(ledger_id)
            await retention.finish_trim(STREAM, claimed.incarnation, ledger_id)
        await retention.remove_stream(STREAM, claimed.incarnation)
        await retention.remove_stream(STREAM, claimed.incarnation)
        assert await streams.names() == []
        anew, created = await streams.create(STREAM)
        assert created
        # A leader that learns late must not remove the new one.
        await retention.remove_stream(STREAM, claimed.incarnation)
        assert (await streams.get(STREAM)).incarnation == anew.incarnation

    run_virtual(main())


def test_an_open_ledger_of_a_stream_that_is_being_deleted_is_still_recovered():
    async def main():
        world = World()
        claimed, _ = await filled(world, 1)
        await world.seal(claimed, [b"y"], close=False)
        catalog = world.catalog()
        await catalog.retention.begin_stream_deletion(STREAM)
        again = await catalog.streams.claim(STREAM, NodeId("n2"))
        assert again.owner_epoch == claimed.owner_epoch + 1

    run_virtual(main())
