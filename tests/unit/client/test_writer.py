"""Protocols, first rule: an answer that was lost is neither success nor failure.

Whatever becomes of answers, every event of a stream with append headers is there exactly once, in
the order in which it was sent.
"""

import asyncio
import contextlib
import random

import pytest

from tests.unit.client.world import WRITER, Service, on_virtual_time, writer_of
from tierlog.format.entry import decode_entry
from tierlog.model.attributes import EVENT_COUNT, AttributeKey
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position


def numbered(count):
    return [f"event{number:05d}".encode() for number in range(count)]


async def send_all(writer, count):
    async with writer:
        for event in numbered(count):
            await writer.send(event)


@on_virtual_time
async def test_events_arrive_in_order_and_batched():
    service = Service()
    async with writer_of(service) as writer:
        for event in numbered(20):
            await writer.send(event)
        last = await writer.flush()
    assert service.events() == numbered(20)
    assert len(service.ledgers[0]) == 7  # two or three events an entry
    assert last == Position(LedgerId(0), EntryId(6))
    assert (writer.acked_events, writer.acked_bytes) == (20, 200)


@on_virtual_time
async def test_leaving_the_writer_flushes():
    service = Service()
    async with writer_of(service) as writer:
        await writer.send(b"alone")
    assert service.events() == [b"alone"]


@pytest.mark.covers("E03", "E04")
@pytest.mark.parametrize("fate", ["lost-landed", "lost-gone", "refused"])
def test_an_append_that_went_wrong_is_there_once_and_in_its_place(fate):
    @on_virtual_time
    async def test():
        service = Service()
        service.script = ["ok", fate]
        async with writer_of(service) as writer:
            for event in numbered(12):
                await writer.send(event)
        assert service.events() == numbered(12)
        assert writer.resolved_count == (1 if fate == "lost-landed" else 0)
        assert writer.acked_events == writer.acked_event_number == 12

    test()


@pytest.mark.covers("E03")
@on_virtual_time
async def test_a_retry_of_what_is_there_is_acknowledged_without_a_place():
    service = Service()
    service.script = ["lost-landed"]
    async with writer_of(service) as writer:
        await writer.send(b"only once")
        assert await writer.flush() is None, "the owner told its number alone"
        assert (writer.acked_events, writer.in_flight_events) == (1, 0)
        await writer.send(b"another")
        assert await writer.flush() == Position(LedgerId(0), EntryId(1))
    assert service.events() == [b"only once", b"another"]


@pytest.mark.covers("E04")
@on_virtual_time
async def test_what_an_owner_stores_late_is_there_once_and_nobody_waits_for_it():
    service, loop = Service(), asyncio.get_running_loop()
    service.script = ["late"]
    begun_s = loop.time()
    async with writer_of(service) as writer:
        await writer.send(b"only once")
    assert loop.time() - begun_s < 1
    await asyncio.sleep(20)
    assert service.events() == [b"only once"]


@on_virtual_time
async def test_an_event_does_not_linger_for_company():
    service = Service()
    async with writer_of(service, batch_bytes=1000, linger_s=0.5) as writer:
        await writer.send(b"alone")
        await asyncio.sleep(0.4)
        assert service.events() == []
        await asyncio.sleep(0.2)
        assert service.events() == [b"alone"]
        await writer.send(b"two")
        await writer.send(b"three")
        await asyncio.sleep(0.6)
        assert len(service.ledgers[0]) == 2


@on_virtual_time
async def test_a_sender_that_is_cancelled_while_it_waits_for_room_loses_nothing():
    service = Service()
    service.script = ["silent"]
    sent = 0
    async with writer_of(service, batch_bytes=10) as writer:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                for event in numbered(100):
                    sent += 1
                    await writer.send(event)
        assert 0 < sent < 100
        for event in numbered(100)[sent:]:
            await writer.send(event)
    assert service.events() == numbered(100)


@on_virtual_time
async def test_a_writer_that_somebody_else_uses_is_refused():
    service = Service()
    async with writer_of(service) as other:
        for event in numbered(5):
            await other.send(event)
    with pytest.raises(RefusedError) as caught:
        async with writer_of(service) as writer:
            await writer.send(b"mine")
    assert caught.value.reason is Reason.CONDITIONAL_APPEND_FAILED
    assert caught.value.details["event_number"] == "5"
    assert service.events() == numbered(5)


@on_virtual_time
async def test_a_stream_that_lost_what_it_had_acknowledged_is_told():
    service = Service()

    async def lose_and_go_on():
        async with writer_of(service) as writer:
            for event in numbered(6):
                await writer.send(event)
            await writer.flush()
            service.stream.attributes[AttributeKey(WRITER.bytes)] = 3
            await writer.send(b"more")

    with pytest.raises(RefusedError) as caught:
        await lose_and_go_on()
    assert caught.value.reason is Reason.CONDITIONAL_APPEND_FAILED
    assert caught.value.details == {"event_number": "3", "acknowledged_events": "6"}


@on_virtual_time
async def test_what_is_there_in_part_goes_on_with_the_rest():
    """Another batching of the same events got as far as the middle of a batch."""
    service = Service()
    async with writer_of(service, batch_bytes=10) as before:
        for event in numbered(4):
            await before.send(event)
    writer = writer_of(service)
    writer._sent_number = 6
    async with writer:
        for event in numbered(8):
            await writer.send(event)
    assert service.events() == numbered(8)
    assert (writer.acked_events, writer.acked_bytes) == (8, 80)


@pytest.mark.parametrize("fate", ["lost-landed", "lost-gone"])
def test_without_exactly_once_a_doubt_is_told(fate):
    @on_virtual_time
    async def test():
        service = Service()
        service.script = ["ok", fate]
        with pytest.raises(IndeterminateError) as caught:
            await send_all(writer_of(service, plain=True), 6)
        assert caught.value.details["unknown_events"] == "3"
        assert service.stream.attributes == {EVENT_COUNT: len(service.events())}

    test()


@on_virtual_time
async def test_a_writer_outlives_an_ingest_that_is_away_for_a_while():
    service = Service()
    service.up = False

    async def come_back():
        await asyncio.sleep(20)
        service.up = True

    async with asyncio.TaskGroup() as group, writer_of(service) as writer:
        group.create_task(come_back())
        await writer.send(b"patient")
    assert service.events() == [b"patient"]


@on_virtual_time
async def test_a_writer_gives_up_when_nothing_moves_for_too_long():
    service = Service()
    service.up = False
    with pytest.raises(RetryableError) as caught:
        async with writer_of(service, retry_s_max=5.0) as writer:
            await writer.send(b"in vain")
    assert caught.value.reason is Reason.UNAVAILABLE
    assert caught.value.details["acknowledged_events"] == "0"


@on_virtual_time
async def test_what_is_refused_for_good_ends_the_writer_with_the_reason():
    service = Service()
    service.script = ["ok", RefusedError("too large", reason=Reason.TOO_LARGE, remedy="cut it")]
    with pytest.raises(RefusedError) as caught:
        await send_all(writer_of(service), 6)
    assert caught.value.reason is Reason.TOO_LARGE
    assert caught.value.details["acknowledged_events"] == "3"


@pytest.mark.parametrize("fate", ["lost-landed", "lost-gone"])
def test_a_raw_stream_can_not_be_read_back_so_the_doubt_is_told(fate):
    @on_virtual_time
    async def test():
        service = Service()
        service.script = ["ok", fate]
        with pytest.raises(IndeterminateError) as caught:
            await send_all(writer_of(service, raw=True), 6)
        assert caught.value.reason is Reason.APPEND_INDETERMINATE
        assert caught.value.details["acknowledged_events"] == "3"
        assert caught.value.details["unknown_events"] == "3"

    test()


@pytest.mark.covers("E02", "E04")
@pytest.mark.parametrize("seed", range(30))
def test_whatever_becomes_of_answers_every_event_is_there_once(seed):
    @on_virtual_time
    async def test():
        rng = random.Random(seed)
        service = Service()
        fates = ["ok", "ok", "lost-landed", "lost-gone", "refused", "late"]
        service.script = [rng.choice(fates) for _ in range(40)]
        events = numbered(rng.randrange(1, 90))
        async with writer_of(service, retry_s_max=1000.0) as writer:
            for event in events:
                await writer.send(event)
                if rng.random() < 0.1:
                    await writer.flush()
        await asyncio.sleep(20)
        assert service.events() == events
        assert writer.acked_events == len(events)

    test()


@on_virtual_time
async def test_bytes_in_flight_stay_within_their_limit():
    service = Service()
    most = 0
    async with writer_of(service, batch_bytes=10) as writer:
        for event in numbered(100):
            await writer.send(event)
            most = max(most, writer._in_flight_bytes)
    assert 0 < most <= 1000
    assert service.events() == numbered(100)


@on_virtual_time
async def test_many_that_send_at_once_wait_for_room_each_and_share_no_larger_batch():
    service, waited = Service(), 0
    async with writer_of(service, batch_bytes=30) as writer, asyncio.TaskGroup() as senders:
        tasks = [senders.create_task(writer.send(event)) for event in numbered(500)]
        for _ in range(3):
            await asyncio.sleep(0)
        waited = sum(not one.done() for one in tasks)
        assert len(writer._builder) <= 3
    assert waited > 400
    assert sorted(service.events()) == numbered(500)
    entries = [decode_entry(entry) for ledger in service.ledgers for entry in ledger]
    assert max(len(entry.events()) for entry in entries) <= 3
    assert len(entries) < 300, "whoever waited does not go alone"


async def send_with_room(writer):
    async with writer:
        for event in numbered(3):
            await writer.send(event)
        await writer.room(1)


@on_virtual_time
async def test_who_waits_for_room_is_told_what_ended_the_writer():
    service = Service()
    service.script = [RefusedError("no", reason=Reason.PERMISSION_DENIED, remedy="Ask")]
    with pytest.raises(RefusedError):
        await send_with_room(writer_of(service))


@pytest.mark.covers("E01")
@on_virtual_time
async def test_an_append_does_not_wait_for_the_answers_before_it():
    """Several batches are on their way at once, as many as the limit on bytes lets through."""
    service, loop = Service(), asyncio.get_running_loop()
    started_s = loop.time()
    async with writer_of(service, batch_bytes=10) as writer:
        for event in numbered(100):
            await writer.send(event)
    one_after_the_other_s = 100 * 0.01
    assert loop.time() - started_s < one_after_the_other_s / 4
    assert service.events() == numbered(100)


@on_virtual_time
async def test_a_silent_owner_is_left_once_the_stream_has_another_one():
    """Not before: an owner that is slow and still the owner is waited for."""
    service, loop = Service(), asyncio.get_running_loop()
    service.script = ["ok", "silent"]

    async def take_over():
        await asyncio.sleep(3.5)
        service.stream.owner_epoch += 1

    begun_s = loop.time()
    async with asyncio.TaskGroup() as group, writer_of(service) as writer:
        group.create_task(take_over())
        for event in numbered(6):
            await writer.send(event)
    assert service.events() == numbered(6)
    assert 3.5 < loop.time() - begun_s < 5
    assert service.doubts == 4
    assert writer.resolved_count == 0


@on_virtual_time
async def test_an_owner_that_answers_is_not_doubted():
    service = Service()
    async with writer_of(service) as writer:
        for event in numbered(300):
            await writer.send(event)
            await asyncio.sleep(0.05)
        await asyncio.sleep(20)
    assert service.doubts == 0


@on_virtual_time
async def test_doubts_that_nobody_settles_leave_the_append_its_deadline():
    service, loop = Service(), asyncio.get_running_loop()
    service.script = ["silent"]

    async def go_away():
        await asyncio.sleep(0.5)
        service.up = False
        await asyncio.sleep(8)
        service.up = True

    begun_s = loop.time()
    async with asyncio.TaskGroup() as group, writer_of(service) as writer:
        group.create_task(go_away())
        await writer.send(b"only once")
    assert service.events() == [b"only once"]
    assert loop.time() - begun_s >= 10
