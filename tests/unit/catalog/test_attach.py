"""Staging ledgers in the metadata: made with a mark, attached all or none, or deleted."""

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from tests.unit.catalog.world import MIB, ORDERS, Process, World, on_virtual_time, one_node
from tierlog.adapters.memory.faults import Outcome
from tierlog.catalog.ledgers import PAGE_LEDGERS, TAIL_LEDGERS_MAX, LedgersBehindError
from tierlog.format import paths
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import KEY_STREAM, LedgerMetadata
from tierlog.model.staging import ATTACHED_LEDGERS_MAX, Staging
from tierlog.model.stream import NOT_ATTACHED, Stream

JOB = UUID(int=9 << 100)
ANSWERS = (Outcome.ANSWERED, Outcome.REPLY_LOST, Outcome.REQUEST_LOST, Outcome.REFUSED)


def staging_of(stream: Stream, number: int = 1) -> Staging:
    return Staging(
        stream=stream.name,
        incarnation=stream.incarnation,
        writer_id=JOB,
        number=number,
        block_size=5 * MIB,
    )


def staged_metadata(staging: Staging) -> LedgerMetadata:
    return replace(one_node(), custom=staging.custom(), ctime_ms=7)


async def staged(process: Process, stream: Stream, *, entries: int = 3) -> LedgerId:
    """Stage a ledger, closed unless it is to have -1 entries."""
    bare = process.catalog.bare
    ledger_id = await bare.create(staged_metadata(staging_of(stream)))
    if entries >= 0:
        await bare.close(ledger_id, last_entry_id=EntryId(entries - 1), length=10 * entries)
    return ledger_id


async def refused(process: Process, claimed: Stream, *ledger_ids: LedgerId) -> RefusedError:
    before = await process.catalog.streams.snapshot(ORDERS)
    with pytest.raises(RefusedError) as caught:
        await process.catalog.ledgers.attach(claimed, ledger_ids)
    assert await process.catalog.streams.snapshot(ORDERS) == before, "nothing was changed"
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("outcome", ANSWERS)
@on_virtual_time
async def test_ledgers_become_the_streams_in_one_change_whatever_answer_is_lost(outcome):
    world = World()
    process, claimed = await world.owner()
    catalog = process.catalog
    before = await world.closed_ledger(process, claimed)
    process.faults.next("metadata.transact", outcome)
    first = await staged(process, claimed)
    second = await staged(process, claimed, entries=5)
    assert list(await catalog.bare.list_staging()) == [first, second]
    assert world.server.children(paths.STAGING) == [f"L{one:010d}" for one in (first, second)]
    process.faults.next("metadata.transact", outcome)
    stream = await catalog.ledgers.attach(claimed, [first, second])
    assert [one.ledger_id for one in stream.ledgers] == [before, first, second]
    attached = stream.ledgers[-1]
    assert (attached.closed, attached.last_entry_id, attached.length) == (True, 4, 50)
    assert (attached.opened_ms, attached.block_size) == (7, 5 * MIB)
    assert attached.owner_epoch == claimed.owner_epoch
    # Theirs are older than the closing of what is before them: one was drawn for both.
    drawn = [one.attached_id for one in stream.ledgers]
    assert drawn[0] == NOT_ATTACHED
    assert drawn[1] == drawn[2] > second
    for ledger_id in (first, second):
        metadata = await catalog.ledgers.get(ledger_id)
        assert metadata is not None
        assert metadata.custom[KEY_STREAM] == ORDERS.encode()
        context = await catalog.contexts.get(ledger_id)
        assert context is not None
        assert (context.stream, context.incarnation) == (ORDERS, claimed.incarnation)
    assert await catalog.bare.list_staging() == {}
    assert world.server.children(paths.STAGING) == []
    assert await catalog.bare.list_all() == {}
    # Again: it is there, and stays as it is. No attached ledger is deleted as a bare one.
    assert await catalog.ledgers.attach(claimed, [first, second]) == stream
    with pytest.raises(RefusedError, match="belongs to a stream"):
        await catalog.bare.delete(first)


@on_virtual_time
async def test_nothing_comes_behind_a_ledger_of_a_higher_id_that_is_or_was():
    world = World()
    process, claimed = await world.owner()
    ledgers = process.catalog.ledgers
    early = await staged(process, claimed)
    listed = await world.closed_ledger(process, claimed)
    error = await refused(process, claimed, early)
    assert isinstance(error, LedgersBehindError)
    assert error.details["newest_ledger_id"] == str(listed)
    # One that never had an entry was there, too: somebody may wait at its first one.
    between = await staged(process, claimed)
    empty = await ledgers.new_id()
    await ledgers.open(claimed, empty, one_node(), block_size=5 * MIB)
    closed = await ledgers.close(claimed, empty, last_entry_id=NO_ENTRY, length=0)
    assert [one.ledger_id for one in closed.ledgers] == [listed]
    assert isinstance(await refused(process, claimed, between), LedgersBehindError)
    late = await staged(process, claimed)
    await ledgers.attach(claimed, [late])


@on_virtual_time
async def test_what_was_not_made_for_the_stream_or_is_not_ended_is_refused():
    world = World()
    process, claimed = await world.owner()
    catalog = process.catalog
    other, _ = await catalog.streams.create(StreamName("other"))
    bare = await catalog.bare.create(one_node())
    await catalog.bare.close(bare, last_entry_id=EntryId(2), length=30)
    foreign = await staged(process, other)
    former = await staged(process, replace(claimed, incarnation=UUID(int=5)))
    still_open, empty = (
        await staged(process, claimed, entries=-1),
        await staged(process, claimed, entries=0),
    )
    good = await staged(process, claimed)
    for ledger_id, words in (
        (bare, "no staging ledger of stream orders"),
        (foreign, "no staging ledger of stream orders"),
        (former, "no staging ledger of stream orders"),
        (still_open, "OPEN"),
        (empty, "with 0 entries"),
    ):
        error = await refused(process, claimed, ledger_id, good)
        assert words in error.message
    # All or none: none of these took the good one along.
    assert good in await catalog.bare.list_staging()
    await catalog.ledgers.attach(claimed, [good])


@on_virtual_time
async def test_only_the_owner_attaches():
    world = World()
    process, claimed = await world.owner()
    ledger_id = await staged(process, claimed)
    await world.process().catalog.streams.claim(ORDERS, NodeId("node-2"))
    error = await refused(process, claimed, ledger_id)
    assert error.reason is Reason.FENCED


@on_virtual_time
async def test_what_was_deleted_is_not_attached_and_leaves_no_mark():
    world = World()
    process, claimed = await world.owner()
    first, second = await staged(process, claimed), await staged(process, claimed)
    sweeper = world.process()
    sweeper.faults.next("metadata.transact", Outcome.REPLY_LOST)
    await sweeper.catalog.bare.delete(second)
    error = await refused(process, claimed, first, second)
    assert error.reason is Reason.LEDGER_NOT_FOUND
    assert world.server.children(paths.STAGING) == [f"L{first:010d}"]
    assert await process.catalog.bare.deletion_on_record(second)


@on_virtual_time
async def test_as_many_as_one_change_takes_stay_in_the_tail_of_a_long_list():
    world = World()
    process, claimed = await world.owner()
    for _ in range(TAIL_LEDGERS_MAX):
        await world.closed_ledger(process, claimed)
    ledger_ids = [await staged(process, claimed) for _ in range(ATTACHED_LEDGERS_MAX)]
    process.faults.next("metadata.transact", Outcome.REPLY_LOST)
    stream = await process.catalog.ledgers.attach(claimed, ledger_ids)
    assert [one.ledger_id for one in stream.ledgers[-ATTACHED_LEDGERS_MAX:]] == ledger_ids
    assert len(stream.ledgers) == TAIL_LEDGERS_MAX
    assert [page.ledger_count for page in stream.pages] == [PAGE_LEDGERS]
    snapshot = await process.catalog.streams.snapshot(ORDERS)
    assert len(snapshot.ledgers) == TAIL_LEDGERS_MAX + ATTACHED_LEDGERS_MAX


def test_what_a_ledger_is_for_is_read_as_it_was_written():
    staging = Staging(
        stream=ORDERS, incarnation=UUID(int=3), writer_id=JOB, number=2**60, block_size=5 * MIB
    )
    metadata = staged_metadata(staging)
    assert metadata.is_staging
    assert Staging.of(metadata) == staging
    assert Staging.of(one_node()) is None
    attached = replace(metadata, custom={**metadata.custom, KEY_STREAM: b"orders"})
    assert Staging.of(attached) is None


@on_virtual_time
async def test_what_is_there_is_told_so_though_the_stream_has_another_owner_by_then():
    world = World()
    process, claimed = await world.owner()
    ledger_id = await staged(process, claimed)
    process.faults.next("metadata.transact", Outcome.REPLY_LOST)
    attach = asyncio.create_task(process.catalog.ledgers.attach(claimed, [ledger_id]))
    other = world.process().catalog
    while await other.bare.list_staging():
        await asyncio.sleep(0)
    await other.streams.claim(ORDERS, NodeId("node-2"))
    assert (await attach).listed(ledger_id) is not None
