"""Bare ledgers in the metadata: one writer, one end, deletions on record, no stream beside them."""

from dataclasses import replace
from uuid import UUID

import pytest

from tests.unit.catalog.world import COPY, NODE, World, location, on_virtual_time, one_node
from tierlog.adapters.memory.faults import Outcome
from tierlog.format import ledger_metadata, paths
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId
from tierlog.model.ledger import KEY_STREAM, KEY_WRITER, LedgerState, Segment

ONE = UUID(int=1)
OTHER = UUID(int=2)
ANSWERS = (Outcome.ANSWERED, Outcome.REPLY_LOST, Outcome.REQUEST_LOST, Outcome.REFUSED)


async def process_of(world: World):
    process = world.process()
    await process.catalog.nodes.ensure_cluster()
    return process


@pytest.mark.covers("D11")
@pytest.mark.parametrize("outcome", ANSWERS)
@on_virtual_time
async def test_its_life_settles_whatever_answer_is_lost(outcome):
    process = await process_of(World())
    bare = process.catalog.bare
    process.faults.next("metadata.create", outcome)
    ledger_id = await bare.create(one_node())
    assert await bare.get(ledger_id) == one_node()
    process.faults.next("metadata.set", outcome)
    claimed = await bare.claim(ledger_id, ONE)
    assert claimed.custom[KEY_WRITER] == str(ONE).encode()
    process.faults.next("metadata.set", outcome)
    closed = await bare.close(ledger_id, last_entry_id=EntryId(2), length=30)
    assert (closed.state, closed.last_entry_id, closed.length) == (LedgerState.CLOSED, 2, 30)
    assert await bare.list_all() == {ledger_id: closed}
    assert await process.catalog.contexts.get(ledger_id) is None
    process.faults.next("metadata.transact", outcome)
    await bare.delete(ledger_id)
    assert await bare.list_all() == {}
    assert await bare.deletion_on_record(ledger_id)
    with pytest.raises(RefusedError) as caught:
        await bare.get(ledger_id)
    assert caught.value.reason is Reason.LEDGER_NOT_FOUND


@on_virtual_time
async def test_a_ledger_has_one_writer_in_its_life():
    world = World()
    bare = (await process_of(world)).catalog.bare
    ledger_id = await bare.create(one_node())
    claimed = await bare.claim(ledger_id, ONE)
    assert await bare.claim(ledger_id, ONE) == claimed
    with pytest.raises(RefusedError) as caught:
        await world.process().catalog.bare.claim(ledger_id, OTHER)
    assert caught.value.reason is Reason.FENCED
    assert await bare.get(ledger_id) == claimed


@pytest.mark.parametrize("closed", [False, True])
@on_virtual_time
async def test_what_is_recovered_or_closed_gets_no_writer(closed):
    process = await process_of(World())
    bare = process.catalog.bare
    ledger_id = await bare.create(one_node())
    await process.catalog.ledgers.begin_recovery(ledger_id)
    if closed:
        await bare.close(ledger_id, last_entry_id=NO_ENTRY, length=0)
    with pytest.raises(RefusedError) as caught:
        await bare.claim(ledger_id, ONE)
    assert caught.value.reason is Reason.FENCED


@pytest.mark.covers("D18")
@on_virtual_time
async def test_whoever_closes_first_decides():
    world = World()
    first, second = await process_of(world), world.process()
    ledger_id = await first.catalog.bare.create(one_node())
    end = await first.catalog.bare.close(ledger_id, last_entry_id=EntryId(4), length=50)
    again = await second.catalog.bare.close(ledger_id, last_entry_id=EntryId(2), length=30)
    assert again == end
    assert await second.catalog.bare.get(ledger_id) == end


@on_virtual_time
async def test_an_empty_ledger_stays_until_it_is_deleted():
    bare = (await process_of(World())).catalog.bare
    ledger_id = await bare.create(one_node())
    closed = await bare.close(ledger_id, last_entry_id=NO_ENTRY, length=0)
    assert (await bare.list_all())[ledger_id] == closed


@on_virtual_time
async def test_recovery_changes_the_last_ensemble_and_what_comes_behind_it():
    process = await process_of(World())
    bare = process.catalog.bare
    nodes = [NodeId(f"n{number}") for number in range(5)]
    before = tuple(
        Segment(first_entry_id=EntryId(first), ensemble=(nodes[first],)) for first in (0, 3)
    )
    ledger_id = await bare.create(replace(one_node(), segments=before))
    # Auto-recovery has moved the first segment since recovery read the metadata.
    now = (Segment(first_entry_id=EntryId(0), ensemble=(nodes[1],)), before[1])
    found = await process.client.get(paths.ledger_path(ledger_id))
    assert found is not None
    moved = replace(one_node(), segments=now)
    data = ledger_metadata.encode_znode(moved)
    await process.client.set(paths.ledger_path(ledger_id), data, version=found.version)
    behind = Segment(first_entry_id=EntryId(6), ensemble=(nodes[4],))
    closed = await bare.close(
        ledger_id, last_entry_id=EntryId(7), length=70, segments=(*before, behind)
    )
    assert closed.segments == (*now, behind)


@on_virtual_time
async def test_a_ledger_of_a_stream_is_left_alone():
    world = World()
    owner, claimed = await world.owner()
    ledger_id = await world.closed_ledger(owner, claimed)
    bare = owner.catalog.bare

    async def is_left_alone() -> None:
        for call in (
            bare.get(ledger_id),
            bare.claim(ledger_id, ONE),
            bare.close(ledger_id, last_entry_id=EntryId(2), length=30),
            bare.delete(ledger_id),
        ):
            with pytest.raises(RefusedError) as caught:
                await call
            assert caught.value.reason is Reason.INVALID_ARGUMENT
            assert "belongs to a stream" in caught.value.message

    await is_left_alone()
    assert await owner.catalog.ledgers.list_ids() == [ledger_id]
    uuid = UUID(int=7)
    contexts = owner.catalog.contexts
    await contexts.begin_attempt(
        ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="worker-1"
    )
    await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    deleting = await contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
    await owner.catalog.ledgers.delete_tier1(ledger_id, deleting)
    assert await owner.catalog.ledgers.list_ids() == []
    await is_left_alone()
    assert not await bare.deletion_on_record(ledger_id)


@on_virtual_time
async def test_the_list_has_bare_ledgers_alone():
    process = await process_of(World())
    bare = process.catalog.bare
    ledger_id = await bare.create(one_node())
    other = replace(one_node(), custom={KEY_STREAM: b"orders"})
    data_path = paths.ledger_path(LedgerId(ledger_id + 1))
    await process.client.create(data_path, ledger_metadata.encode_znode(other))
    assert list(await bare.list_all()) == [ledger_id]


@on_virtual_time
async def test_deleting_twice_is_told_and_an_id_is_never_a_ledger_again():
    world = World()
    process = await process_of(world)
    bare = process.catalog.bare
    ledger_id = await bare.create(one_node())
    await bare.delete(ledger_id)
    for other in (process, world.process()):
        with pytest.raises(RefusedError) as caught:
            await other.catalog.bare.delete(ledger_id)
        assert caught.value.reason is Reason.LEDGER_NOT_FOUND
    assert await bare.create(one_node()) > ledger_id


@on_virtual_time
async def test_an_id_that_was_given_twice_is_refused():
    process = await process_of(World())
    bare = process.catalog.bare
    ledger_id = await bare.create(one_node())
    other = replace(one_node(), segments=(Segment(first_entry_id=EntryId(0), ensemble=(NODE,)),))
    other = replace(other, ctime_ms=1)
    with pytest.raises(RefusedError, match="exists already"):
        await bare.create(other, ledger_id=ledger_id)
    assert await bare.get(ledger_id) == one_node()


@on_virtual_time
async def test_old_deletions_are_forgotten_and_young_ones_kept():
    world = World()
    process = await process_of(world)
    bare, clock = process.catalog.bare, process.clock
    old, young = [await bare.create(one_node()) for _ in range(2)]
    await bare.delete(old)
    clock.advance(100)
    await bare.delete(young)
    assert await bare.forget_deleted(before_ms=clock.wall_ms() - 50_000) == 1
    assert not await bare.deletion_on_record(old)
    assert await bare.deletion_on_record(young)
    assert await world.process().catalog.bare.forget_deleted(before_ms=0) == 0
