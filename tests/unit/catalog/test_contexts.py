"""Protocols section 3: attempts in the metadata; "at most one attempt per ledger is complete"."""

import asyncio
from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest

from tests.unit.catalog.world import COPY, Process, World, location, on_virtual_time
from tierlog.adapters.memory.faults import Outcome
from tierlog.format import paths, records
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import TRANSITIONS, AttemptOutcome, OffloadContext, OffloadState


async def _begun(world: World):
    owner, claimed = await world.owner()
    ledger_id = await world.closed_ledger(owner, claimed)
    uuid = owner.ids.uuid()
    context = await owner.catalog.contexts.begin_attempt(
        ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="worker-1"
    )
    return owner, ledger_id, uuid, context


@pytest.mark.covers("A14", "A29")
@on_virtual_time
async def test_the_context_holds_the_uuid_of_the_newest_attempt_and_its_place():
    world = World()
    owner, ledger_id, first, _ = await _begun(world)
    second = owner.ids.uuid()
    await owner.catalog.contexts.begin_attempt(
        ledger_id, uuid=second, location=location(second, ledger_id), worker="worker-2"
    )
    context = await world.process().catalog.contexts.get(ledger_id)
    assert context is not None
    assert context.uuid == second
    assert context.location == location(second, ledger_id)
    assert [(one.uuid, one.location) for one in context.abandoned] == [
        (first, location(first, ledger_id))
    ]
    assert (context.attempt_count, context.last_worker) == (2, "worker-2")


@pytest.mark.covers("A30", "A32")
@on_virtual_time
async def test_completing_sets_the_flag_and_the_time_of_success():
    world = World()
    owner, ledger_id, uuid, begun = await _begun(world)
    assert (begun.complete, begun.timestamp_ms) == (False, 0)
    owner.clock.advance(5)
    now_ms = owner.clock.wall_ms()
    await owner.catalog.contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    context = await world.process().catalog.contexts.get(ledger_id)
    assert context is not None
    assert (context.complete, context.timestamp_ms, context.copy) == (True, now_ms, COPY)
    assert context.state is OffloadState.COMPLETE
    assert not context.bookkeeper_deleted


@pytest.mark.covers("A16")
@on_virtual_time
async def test_of_concurrent_attempts_only_the_newest_completes():
    """A superseded attempt is refused for certain, and stands among the abandoned."""
    world = World()
    owner, ledger_id, first, _ = await _begun(world)
    second = owner.ids.uuid()
    contexts = owner.catalog.contexts
    await contexts.begin_attempt(
        ledger_id, uuid=second, location=location(second, ledger_id), worker="worker-2"
    )
    with pytest.raises(RefusedError, match="superseded"):
        await contexts.complete_attempt(ledger_id, uuid=first, copy=COPY)
    done = await contexts.complete_attempt(ledger_id, uuid=second, copy=COPY)
    with pytest.raises(RefusedError, match="superseded"):
        await contexts.complete_attempt(ledger_id, uuid=first, copy=COPY)
    assert done.uuid == second
    assert [one.uuid for one in done.abandoned] == [first]


@on_virtual_time
async def test_an_attempt_that_is_given_up_is_abandoned_and_no_other_one():
    owner, ledger_id, uuid, _ = await _begun(World())
    contexts = owner.catalog.contexts
    before = await contexts.get(ledger_id)
    assert await contexts.give_up_attempt(ledger_id, uuid=owner.ids.uuid()) == before
    owner.faults.next("metadata.set", Outcome.REPLY_LOST)
    given_up = await contexts.give_up_attempt(ledger_id, uuid=uuid)
    assert (given_up.state, given_up.uuid, given_up.location) == (OffloadState.LOCAL, None, None)
    assert [(one.uuid, one.swept_ms) for one in given_up.abandoned] == [(uuid, 0)]
    assert [one.outcome for one in given_up.history] == [AttemptOutcome.ABANDONED]
    with pytest.raises(RefusedError, match="superseded"):
        await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    again = owner.ids.uuid()
    place = location(again, ledger_id)
    await contexts.begin_attempt(ledger_id, uuid=again, location=place, worker="w")
    done = await contexts.complete_attempt(ledger_id, uuid=again, copy=COPY)
    assert await contexts.give_up_attempt(ledger_id, uuid=again) == done


@on_virtual_time
async def test_a_complete_ledger_takes_no_further_attempt():
    owner, ledger_id, uuid, _ = await _begun(World())
    contexts = owner.catalog.contexts
    await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    late = owner.ids.uuid()
    with pytest.raises(RefusedError, match="COMPLETE"):
        await contexts.begin_attempt(
            ledger_id, uuid=late, location=location(late, ledger_id), worker="late"
        )


@on_virtual_time
async def test_a_lost_answer_to_begin_or_complete_is_decided_by_content():
    for outcome in (Outcome.REPLY_LOST, Outcome.REQUEST_LOST):
        world = World()
        owner, claimed = await world.owner()
        ledger_id = await world.closed_ledger(owner, claimed)
        contexts, uuid = owner.catalog.contexts, owner.ids.uuid()
        owner.faults.next("metadata.set", outcome)
        begun = await contexts.begin_attempt(
            ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="w"
        )
        assert (begun.uuid, begun.abandoned, begun.attempt_count) == (uuid, (), 1)
        owner.faults.next("metadata.set", outcome)
        done = await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
        assert done.complete
        assert await contexts.get(ledger_id) == done


Begin = Callable[[Process, UUID], Awaitable[OffloadContext]]


async def _superseded_before_it_knew(
    world: World, ledger_id: LedgerId, begin: Begin
) -> tuple[UUID, UUID, OffloadContext]:
    """Begin something whose answer is lost, and the same by another before it is read back."""
    slow, other = world.process(), world.process()
    late, newest = slow.ids.uuid(), other.ids.uuid()
    slow.faults.next("metadata.set", Outcome.REPLY_LOST)

    async def late_one() -> None:
        with pytest.raises(RefusedError, match="superseded"):
            await begin(slow, late)

    async with asyncio.TaskGroup() as group:
        group.create_task(late_one())
        found = None
        while found is None or not found.names(late):
            found = await other.catalog.contexts.get(ledger_id)
        await begin(other, newest)
    context = await other.catalog.contexts.get(ledger_id)
    assert context is not None
    return late, newest, context


@on_virtual_time
async def test_an_attempt_that_was_superseded_before_it_knew_that_it_began_begins_no_more():
    """Else it is the newest and among the abandoned, whose objects are deleted."""
    world = World()
    owner, claimed = await world.owner()
    ledger_id = await world.closed_ledger(owner, claimed)

    async def begin(process: Process, uuid: UUID) -> OffloadContext:
        return await process.catalog.contexts.begin_attempt(
            ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="w"
        )

    late, newest, context = await _superseded_before_it_knew(world, ledger_id, begin)
    assert (context.uuid, [one.uuid for one in context.abandoned]) == (newest, [late])


@on_virtual_time
async def test_neither_does_a_repair():
    world = World()
    owner, ledger_id, damaged, _ = await _begun(world)
    await owner.catalog.contexts.complete_attempt(ledger_id, uuid=damaged, copy=COPY)

    async def begin(process: Process, uuid: UUID) -> OffloadContext:
        return await process.catalog.contexts.begin_repair(
            ledger_id,
            damaged=damaged,
            uuid=uuid,
            location=location(uuid, ledger_id),
            worker="w",
        )

    late, newest, context = await _superseded_before_it_knew(world, ledger_id, begin)
    assert context.repair is not None
    assert (context.repair.uuid, [one.uuid for one in context.abandoned]) == (newest, [late])


@on_virtual_time
async def test_many_workers_at_once_leave_one_newest_and_the_rest_abandoned():
    world = World()
    owner, claimed = await world.owner()
    ledger_id = await world.closed_ledger(owner, claimed)
    uuids = []

    async def begin():
        worker = world.process()
        uuid = worker.ids.uuid()
        uuids.append(uuid)
        await worker.catalog.contexts.begin_attempt(
            ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="w"
        )

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(begin())
    context = await owner.catalog.contexts.get(ledger_id)
    assert context is not None
    assert context.attempt_count == 8
    assert {context.uuid} | {one.uuid for one in context.abandoned} == set(uuids)
    assert len(context.abandoned) == 7


@on_virtual_time
async def test_an_abandoned_attempt_is_swept_then_struck_off():
    owner, ledger_id, first, _ = await _begun(World())
    contexts, second = owner.catalog.contexts, owner.ids.uuid()
    await contexts.begin_attempt(
        ledger_id, uuid=second, location=location(second, ledger_id), worker="w"
    )
    owner.clock.advance(60)
    swept = await contexts.mark_swept(ledger_id, first)
    assert swept.swept_at(first) == owner.clock.wall_ms()
    struck = await contexts.strike_off(ledger_id, first)
    assert struck.abandoned == ()
    assert await contexts.strike_off(ledger_id, first) == struck
    assert await contexts.mark_swept(ledger_id, first) == struck
    assert struck.uuid == second


@on_virtual_time
async def test_an_error_is_kept_for_the_attempt_it_belongs_to_and_cut_to_a_limit():
    owner, ledger_id, uuid, _ = await _begun(World())
    contexts = owner.catalog.contexts
    kept = await contexts.record_error(ledger_id, uuid=uuid, error="x" * 5000)
    assert kept.last_error == "x" * 2000
    other = await contexts.record_error(ledger_id, uuid=owner.ids.uuid(), error="not mine")
    assert other.last_error == kept.last_error
    done = await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    assert done.last_error == ""


@on_virtual_time
async def test_a_doubt_is_of_the_complete_copy_alone_and_ends_with_it():
    owner, ledger_id, uuid, begun = await _begun(World())
    contexts = owner.catalog.contexts
    # Nothing is complete yet: the attempt may still be at work.
    assert await contexts.doubt(ledger_id, uuid=uuid, cause="early") == begun
    done = await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    assert await contexts.doubt(ledger_id, uuid=owner.ids.uuid(), cause="another's") == done
    doubted = await contexts.doubt(ledger_id, uuid=uuid, cause="x" * 5000)
    assert doubted.doubt is not None
    assert (doubted.doubt.cause, doubted.doubt.found_ms) == ("x" * 2000, owner.clock.wall_ms())
    assert await contexts.get(ledger_id) == doubted
    with pytest.raises(RefusedError, match="found damaged"):
        await contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
    second = owner.ids.uuid()
    place = location(second, ledger_id)
    repairing = await contexts.begin_repair(
        ledger_id, damaged=uuid, uuid=second, location=place, worker="scrub"
    )
    assert repairing.doubt == doubted.doubt
    repaired = await contexts.complete_repair(ledger_id, uuid=second, copy=COPY)
    assert repaired.doubt is None
    assert await contexts.doubt(ledger_id, uuid=uuid, cause="the old one's") == repaired


@on_virtual_time
async def test_a_doubt_that_is_newer_than_the_look_stays_whatever_answers_are_lost():
    for outcome in (Outcome.REPLY_LOST, Outcome.REQUEST_LOST):
        owner, ledger_id, uuid, _ = await _begun(World())
        contexts = owner.catalog.contexts
        done = await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
        marks = []
        for cause in ("first", "first", "second"):
            owner.faults.next("metadata.set", outcome)
            doubt = (await contexts.doubt(ledger_id, uuid=uuid, cause=cause)).doubt
            assert doubt is not None
            marks.append(doubt.mark)
        for mark in marks[:-1]:
            kept = await contexts.find_sound(ledger_id, mark=mark)
            assert kept.doubt is not None
            assert kept.doubt.cause == "second"
        owner.faults.next("metadata.set", outcome)
        assert await contexts.find_sound(ledger_id, mark=marks[-1]) == done


@on_virtual_time
async def test_workers_never_create_contexts():
    world = World()
    process = world.process()
    uuid = process.ids.uuid()
    with pytest.raises(RefusedError) as caught:
        await process.catalog.contexts.begin_attempt(
            LedgerId(7), uuid=uuid, location=location(uuid, LedgerId(7)), worker="w"
        )
    assert caught.value.reason is Reason.LEDGER_NOT_FOUND
    assert await process.catalog.contexts.get(LedgerId(7)) is None


@pytest.mark.parametrize("state", list(OffloadState))
def test_an_attempt_begins_only_in_states_that_allow_one(state):
    """Trimming, completion and deletion of a ledger exclude a new attempt by its state."""

    @on_virtual_time
    async def main():
        world = World()
        owner, claimed = await world.owner()
        ledger_id = await world.closed_ledger(owner, claimed)
        path = paths.context_path(ledger_id)
        context = await owner.catalog.contexts.get(ledger_id)
        assert context is not None
        stored = OffloadContext(
            stream=context.stream,
            incarnation=context.incarnation,
            ledger_id=ledger_id,
            state=state,
        )
        await owner.client.set(path, records.encode_context(stored), version=0)
        uuid = owner.ids.uuid()
        begin = owner.catalog.contexts.begin_attempt(
            ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="w"
        )
        if OffloadState.OFFLOADING in TRANSITIONS[state]:
            assert (await begin).state is OffloadState.OFFLOADING
        else:
            with pytest.raises(RefusedError):
                await begin
            assert await owner.catalog.contexts.get(ledger_id) == stored

    main()


@on_virtual_time
async def test_a_record_of_a_future_version_is_refused_and_left_alone():
    owner, ledger_id, uuid, _ = await _begun(World())
    path = paths.context_path(ledger_id)
    found = await owner.client.get(path)
    assert found is not None
    future = b"\x08\x63" + found.data[2:]  # field 1, the version, says 99
    await owner.client.set(path, future, version=found.version)
    with pytest.raises(RefusedError, match="99"):
        await owner.catalog.contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    assert (await owner.client.get(path)) == (future, found.version + 1)
