"""Protocols section 1, create, close, fencing's first step and delete: what metadata must hold."""

import asyncio
from dataclasses import replace

import pytest

from tests.unit.catalog.world import (
    COPY,
    MIB,
    ORDERS,
    Process,
    World,
    location,
    on_virtual_time,
    one_node,
)
from tierlog.adapters.memory.faults import FaultRates, Outcome
from tierlog.catalog import Catalog
from tierlog.format import paths
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId
from tierlog.model.ledger import LedgerState
from tierlog.model.offload import OffloadState
from tierlog.model.stream import Stream
from tierlog.ports.metadata import Put, VersionConflictError


@pytest.mark.covers("D52")
@on_virtual_time
async def test_ids_come_from_ephemeral_sequential_nodes_and_never_twice():
    world = World()
    first, second = world.process(), world.process()
    await first.catalog.nodes.ensure_cluster()
    ids = [await one.catalog.ledgers.new_id() for one in (first, second) * 5]
    assert ids == sorted(set(ids))
    assert world.server.children(paths.IDGEN) == []


@on_virtual_time
async def test_an_id_whose_answer_was_lost_is_given_to_nobody():
    world = World()
    process = world.process()
    await process.catalog.nodes.ensure_cluster()
    first = await process.catalog.ledgers.new_id()
    process.faults.next("metadata.create_ephemeral", Outcome.REPLY_LOST)
    process.faults.next("metadata.delete", Outcome.REPLY_LOST)
    assert await process.catalog.ledgers.new_id() > first + 1


@on_virtual_time
async def test_a_base_keeps_a_restored_cluster_from_repeating_an_id():
    process = World().process()
    await process.catalog.nodes.ensure_cluster(ledger_id_base=7_000_000)
    assert await process.catalog.ledgers.new_id() >= 7_000_000


@on_virtual_time
async def test_a_base_is_raised_in_a_cluster_that_is_there_and_never_lowered():
    world = World()
    first, second = world.process(), world.process()
    cluster = await first.catalog.nodes.ensure_cluster()
    assert await first.catalog.ledgers.new_id() < 7_000_000
    assert not await second.catalog.scrubs.is_restored()
    for verb in ("create", "set"):
        first.faults.next(f"metadata.{verb}", Outcome.REPLY_LOST)
    raised = await first.catalog.nodes.ensure_cluster(ledger_id_base=7_000_000)
    assert await second.catalog.scrubs.is_restored(), "nothing else tells what was forgotten"
    assert raised.cluster_id == cluster.cluster_id
    for process in (first, second):
        assert (await process.catalog.nodes.ensure_cluster()).ledger_id_base == 7_000_000
        assert await process.catalog.ledgers.new_id() >= 7_000_000


@on_virtual_time
async def test_looking_how_far_ids_are_takes_none_and_sees_a_raised_base():
    world = World()
    process = world.process()
    ledgers, nodes = process.catalog.ledgers, process.catalog.nodes
    assert await ledgers.next_id() == 0, "nothing was ever made"
    for base in (0, 7_000_000):
        await nodes.ensure_cluster(ledger_id_base=base)
        for _ in range(3):
            changes = world.server.changes
            looked = [await ledgers.next_id() for _ in range(3)]
            assert world.server.changes == changes
            assert looked == [await ledgers.new_id()] * 3


@on_virtual_time
async def test_a_late_owner_makes_no_ghost_of_a_stream_that_was_removed():
    world = World()
    owner, claimed = await world.owner()
    admin = world.process().catalog
    await admin.retention.begin_stream_deletion(ORDERS)
    await admin.retention.remove_stream(ORDERS, claimed.incarnation)
    with pytest.raises(RefusedError) as caught:
        await owner.catalog.ledgers.open(claimed, LedgerId(1), one_node(), block_size=5 * MIB)
    assert caught.value.reason is Reason.STREAM_NOT_FOUND
    assert await admin.streams.names() == []
    assert not [path for path in world.server.dump() if path.startswith(f"{paths.STREAMS}/")]
    assert (await admin.streams.create(ORDERS))[1]


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_is_removed_while_its_owner_opens_a_ledger(seed):
    refused: list[Reason] = []

    async def open_late(owner: Process, claimed: Stream) -> None:
        try:
            await owner.catalog.ledgers.open(claimed, LedgerId(1), one_node(), block_size=5 * MIB)
        except RefusedError as error:
            refused.append(error.reason)

    @on_virtual_time
    async def check() -> None:
        world = World()
        owner, claimed = await world.owner()
        other = Process(world.server, seed)
        for faults in (owner.faults, other.faults):
            faults.rates = FaultRates(delay_s_max=0.05)
            lossy = replace(faults.rates, request_lost=0.2, reply_lost=0.2)
            faults.rates_by_prefix["metadata.transact"] = lossy
        retention = other.catalog.retention
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(open_late(owner, claimed))
            await retention.begin_stream_deletion(ORDERS)
            removed = True
            try:
                await retention.remove_stream(ORDERS, claimed.incarnation)
            except RefusedError:
                removed = False
        assert refused == ([Reason.STREAM_NOT_FOUND] if removed else [])
        left = [path for path in world.server.dump() if path.startswith(f"{paths.STREAMS}/")]
        assert left == ([] if removed else [paths.stream_path(ORDERS)])

    check()


@pytest.mark.covers("D11")
@on_virtual_time
async def test_a_ledger_its_context_and_its_place_appear_together_and_go_in_order():
    world = World()
    owner, claimed = await world.owner()
    ledgers, contexts = owner.catalog.ledgers, owner.catalog.contexts
    ledger_id = await ledgers.new_id()
    stream = await ledgers.open(claimed, ledger_id, one_node(), block_size=5 * MIB)
    assert [one.ledger_id for one in stream.ledgers] == [ledger_id]
    assert await ledgers.get(ledger_id) == one_node()
    context = await contexts.get(ledger_id)
    assert context is not None
    assert (context.state, context.uuid) == (OffloadState.LOCAL, None)
    assert await ledgers.list_ids() == [ledger_id]
    stream = await ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=30)
    metadata = await ledgers.get(ledger_id)
    assert metadata is not None
    assert metadata.state is LedgerState.CLOSED
    listed = stream.ledgers[-1]
    assert (listed.closed, listed.last_entry_id, listed.length) == (True, 2, 30)
    assert (metadata.last_entry_id, metadata.length) == (2, 30)


@on_virtual_time
async def test_opening_and_closing_settle_whatever_answer_is_lost():
    for outcome in (Outcome.REPLY_LOST, Outcome.REQUEST_LOST, Outcome.REFUSED):
        world = World()
        owner, claimed = await world.owner()
        ledgers = owner.catalog.ledgers
        ledger_id = await ledgers.new_id()
        owner.faults.next("metadata.transact", outcome)
        await ledgers.open(claimed, ledger_id, one_node(), block_size=5 * MIB)
        owner.faults.next("metadata.transact", outcome)
        stream = await ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=30)
        assert [(one.ledger_id, one.last_entry_id) for one in stream.ledgers] == [(ledger_id, 2)]
        assert await ledgers.list_ids() == [ledger_id]


def test_a_crash_at_any_step_of_opening_and_closing_leaves_all_or_nothing():
    steps = 0
    while True:
        steps += 1
        world = World()
        if not _crash_after(world, steps):
            break
        _check_whole(world)
    assert steps > 20


def _crash_after(world: World, steps: int) -> bool:
    """Open and close a ledger in a process that dies at that step; False when it lived."""
    import asyncio

    lived = True

    @on_virtual_time
    async def main():
        nonlocal lived
        owner, claimed = await world.owner()
        owner.faults.crash_after(steps)

        async def work():
            await world.closed_ledger(owner, claimed)

        task = asyncio.get_running_loop().create_task(work())
        owner.faults.on_crash = task.cancel
        try:
            await task
        except asyncio.CancelledError:
            lived = False

    main()
    return not lived


@on_virtual_time
async def _check_whole(world: World):
    catalog = world.process().catalog
    ids = await catalog.ledgers.list_ids()
    snapshot = await catalog.streams.snapshot(ORDERS)
    assert [one.ledger_id for one in snapshot.ledgers] == ids
    for listed in snapshot.ledgers:
        metadata = await catalog.ledgers.get(listed.ledger_id)
        assert metadata is not None
        assert listed.closed == (metadata.state is LedgerState.CLOSED)
        assert listed.last_entry_id == metadata.last_entry_id
        assert await catalog.contexts.get(listed.ledger_id) is not None


@on_virtual_time
async def test_a_closed_ledger_without_entries_leaves_the_list_and_all_else():
    world = World()
    owner, claimed = await world.owner()
    kept = await world.closed_ledger(owner, claimed)
    ledgers = owner.catalog.ledgers
    empty = await ledgers.new_id()
    await ledgers.open(claimed, empty, one_node(), block_size=5 * MIB)
    owner.faults.next("metadata.transact", Outcome.REPLY_LOST)
    stream = await ledgers.close(claimed, empty, last_entry_id=NO_ENTRY, length=0)
    assert [one.ledger_id for one in stream.ledgers] == [kept]
    assert await ledgers.list_ids() == [kept]
    assert await owner.catalog.contexts.get(empty) is None


@pytest.mark.covers("A03")
@on_virtual_time
async def test_a_closed_ledger_keeps_the_end_it_was_closed_with():
    world = World()
    owner, claimed = await world.owner()
    ledger_id = await world.closed_ledger(owner, claimed)
    ledgers = owner.catalog.ledgers
    before = await ledgers.get(ledger_id)
    stream = await ledgers.close(claimed, ledger_id, last_entry_id=EntryId(9), length=90)
    assert stream.ledgers[-1].last_entry_id == 2
    assert await ledgers.begin_recovery(ledger_id) == before
    assert await ledgers.get(ledger_id) == before


@on_virtual_time
async def test_recovery_begins_on_an_open_ledger_once_and_on_no_ledger_never():
    world = World()
    owner, claimed = await world.owner()
    ledgers = owner.catalog.ledgers
    ledger_id = await ledgers.new_id()
    await ledgers.open(claimed, ledger_id, one_node(), block_size=5 * MIB)
    other = world.process().catalog.ledgers
    for catalog in (other, ledgers):
        metadata = await catalog.begin_recovery(ledger_id)
        assert metadata is not None
        assert metadata.state is LedgerState.IN_RECOVERY
    assert await ledgers.begin_recovery(LedgerId(4711)) is None


@on_virtual_time
async def test_an_owner_whose_ledger_went_into_recovery_sees_it_when_it_writes_to_the_znode():
    """Recovery moves the znode's version: whatever was planned on the open ledger conflicts."""
    world = World()
    owner, claimed = await world.owner()
    ledger_id = await owner.catalog.ledgers.new_id()
    await owner.catalog.ledgers.open(claimed, ledger_id, one_node(), block_size=5 * MIB)
    path = paths.ledger_path(ledger_id)
    seen = await owner.client.get(path)
    assert seen is not None
    await world.process().catalog.ledgers.begin_recovery(ledger_id)
    with pytest.raises(VersionConflictError):
        await owner.client.transact([Put(path, b"a new ensemble", seen.version)])


async def _complete(catalog: Catalog, process: Process, ledger_id: LedgerId):
    uuid = process.ids.uuid()
    await catalog.contexts.begin_attempt(
        ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="w"
    )
    await catalog.contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    return uuid


@pytest.mark.covers("A31")
@on_virtual_time
async def test_the_local_copy_goes_with_its_flag_in_one_transaction():
    for outcome in (Outcome.ANSWERED, Outcome.REPLY_LOST, Outcome.REQUEST_LOST):
        world = World()
        owner, claimed = await world.owner()
        ledger_id = await world.closed_ledger(owner, claimed)
        catalog = owner.catalog
        uuid = await _complete(catalog, owner, ledger_id)
        deleting = await catalog.contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
        assert not deleting.bookkeeper_deleted
        assert await catalog.ledgers.list_ids() == [ledger_id]
        owner.faults.next("metadata.transact", outcome)
        deleted = await catalog.ledgers.delete_tier1(ledger_id, deleting)
        assert deleted.bookkeeper_deleted
        assert deleted.state is OffloadState.TIER1_DELETED
        assert await catalog.ledgers.list_ids() == []
        assert await catalog.ledgers.delete_tier1(ledger_id, deleting) == deleted
        snapshot = await catalog.streams.snapshot(ORDERS)
        assert [one.ledger_id for one in snapshot.ledgers] == [ledger_id]


@pytest.mark.covers("A08", "B01")
@on_virtual_time
async def test_no_local_copy_is_deleted_before_the_ledger_is_tagged_complete():
    world = World()
    owner, claimed = await world.owner()
    ledger_id = await world.closed_ledger(owner, claimed)
    catalog, uuid = owner.catalog, owner.ids.uuid()
    with pytest.raises(RefusedError):
        await catalog.contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
    begun = await catalog.contexts.begin_attempt(
        ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="w"
    )
    with pytest.raises(RefusedError):
        await catalog.contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
    with pytest.raises(RefusedError):
        await catalog.ledgers.delete_tier1(ledger_id, begun)
    assert await catalog.ledgers.list_ids() == [ledger_id]


@on_virtual_time
async def test_a_ledger_without_a_context_is_not_deleted():
    world = World()
    owner, claimed = await world.owner()
    ledger_id = await world.closed_ledger(owner, claimed)
    uuid = await _complete(owner.catalog, owner, ledger_id)
    deleting = await owner.catalog.contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
    await owner.client.delete(paths.context_path(ledger_id), version=-1)
    with pytest.raises(RefusedError) as caught:
        await owner.catalog.ledgers.delete_tier1(ledger_id, deleting)
    assert caught.value.reason is Reason.LEDGER_NOT_FOUND
    assert await owner.catalog.ledgers.list_ids() == [ledger_id]


@on_virtual_time
async def test_a_list_that_can_not_be_read_is_an_error_and_not_empty():
    from tierlog.model.errors import RetryableError

    world = World()
    owner, claimed = await world.owner()
    await world.closed_ledger(owner, claimed)
    for verb in ("sync", "children"):
        owner.faults.next(f"metadata.{verb}", Outcome.REFUSED)
        with pytest.raises(RetryableError):
            await owner.catalog.ledgers.list_ids()
