"""What people are told of attempts, and the pause of a stream's offloads."""

import pytest

from tests.unit.catalog.world import COPY, ORDERS, World, location, on_virtual_time
from tierlog.adapters.memory.faults import Outcome
from tierlog.catalog.streams import PAUSE_CAUSE_LEN_MAX, check_not_paused
from tierlog.model.errors import RefusedError
from tierlog.model.offload import HISTORY_MAX, AttemptOutcome


async def _ledger(world: World):
    owner, claimed = await world.owner()
    return owner, await world.closed_ledger(owner, claimed)


async def _begin(owner, ledger_id, worker="w"):
    uuid = owner.ids.uuid()
    await owner.catalog.contexts.begin_attempt(
        ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker=worker
    )
    return uuid


@on_virtual_time
async def test_each_attempt_is_told_with_its_worker_its_times_and_its_end():
    owner, ledger_id = await _ledger(World())
    contexts, began_ms = owner.catalog.contexts, owner.clock.wall_ms()
    failed = await _begin(owner, ledger_id, "w1")
    owner.clock.advance(3)
    await contexts.record_error(ledger_id, uuid=failed, error="UNAVAILABLE: request r1")
    owner.clock.advance(1)
    died = await _begin(owner, ledger_id, "w2")
    owner.clock.advance(10)
    third = await _begin(owner, ledger_id, "w3")
    owner.clock.advance(2)
    done = await contexts.complete_attempt(ledger_id, uuid=third, copy=COPY)
    told = [
        (one.uuid, one.worker, one.started_ms - began_ms, one.ended_ms - began_ms, one.outcome)
        for one in done.history
    ]
    assert told == [
        (failed, "w1", 0, 3000, AttemptOutcome.FAILED),
        (died, "w2", 4000, 14000, AttemptOutcome.ABANDONED),
        (third, "w3", 14000, 16000, AttemptOutcome.COMPLETE),
    ]
    assert [one.error for one in done.history] == ["UNAVAILABLE: request r1", "", ""]
    # What is found wrong later is no failure of the attempt.
    late = await contexts.record_error(ledger_id, uuid=third, error="CORRUPT: flipped")
    assert (late.last_error, late.history) == ("CORRUPT: flipped", done.history)
    assert await contexts.get(ledger_id) == late


@on_virtual_time
async def test_the_same_error_twice_is_told_of_both_attempts():
    owner, ledger_id = await _ledger(World())
    contexts = owner.catalog.contexts
    for _ in range(2):
        uuid = await _begin(owner, ledger_id)
        owner.clock.advance(5)
        owner.faults.next("metadata.set", Outcome.REPLY_LOST)
        await contexts.record_error(ledger_id, uuid=uuid, error="same")
    context = await contexts.get(ledger_id)
    assert context is not None
    assert [one.outcome for one in context.history] == [AttemptOutcome.FAILED] * 2
    assert context.last_error_ms == context.history[-1].ended_ms


@on_virtual_time
async def test_only_the_newest_attempts_are_kept():
    owner, ledger_id = await _ledger(World())
    uuids = [await _begin(owner, ledger_id) for _ in range(HISTORY_MAX + 3)]
    context = await owner.catalog.contexts.get(ledger_id)
    assert context is not None
    assert [one.uuid for one in context.history] == uuids[-HISTORY_MAX:]
    assert context.attempt_count == len(uuids)


@on_virtual_time
async def test_a_pause_holds_until_it_is_taken_back():
    world = World()
    owner, _ = await world.owner()
    streams = owner.catalog.streams
    check_not_paused(await streams.get(ORDERS))
    began_ms = owner.clock.wall_ms()
    owner.faults.next("metadata.set", Outcome.REPLY_LOST)
    paused = await streams.pause_offload(ORDERS, "x" * 5000)
    assert paused.offload_pause is not None
    assert paused.offload_pause.since_ms == began_ms
    assert len(paused.offload_pause.cause) == PAUSE_CAUSE_LEN_MAX
    owner.clock.advance(5)
    assert await streams.pause_offload(ORDERS, "again") == paused, "the first one holds"
    with pytest.raises(RefusedError, match="is paused: xxx") as caught:
        check_not_paused(await world.process().catalog.streams.get(ORDERS))
    assert "tierlog offload resume" in caught.value.remedy
    for _ in range(2):
        assert (await streams.resume_offload(ORDERS)).offload_pause is None
    # Each has one number: whoever looks too late knows by that that there was one.
    assert (await streams.get(ORDERS)).offload_pauses == paused.offload_pauses == began_ms
    owner.clock.jump_wall(-3600)
    assert (await streams.pause_offload(ORDERS)).offload_pauses == began_ms + 1
    await streams.resume_offload(ORDERS)
    check_not_paused(await streams.get(ORDERS))
