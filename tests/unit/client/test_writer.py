"""Protocols, first rule: an answer that was lost is neither success nor failure.

Whatever becomes of answers, every event of a stream with append headers is there exactly once.
"""

import asyncio
import random

import pytest

from tests.unit.client.world import Service, on_virtual_time, writer_of
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


@pytest.mark.parametrize("fate", ["lost-landed", "lost-gone", "refused"])
def test_an_append_that_went_wrong_is_there_once(fate):
    @on_virtual_time
    async def test():
        service = Service()
        service.script = ["ok", fate]
        async with writer_of(service) as writer:
            for event in numbered(12):
                await writer.send(event)
        assert sorted(service.events()) == numbered(12)
        assert writer.resolved_count == (0 if fate == "refused" else 1)

    test()


@on_virtual_time
async def test_what_the_same_owner_may_still_store_is_waited_for():
    service = Service()
    service.script = ["late"]
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    async with writer_of(service) as writer:
        await writer.send(b"only once")
    assert service.events() == [b"only once"]
    assert loop.time() - begun_s >= 10
    assert writer.resolved_count == 1


@on_virtual_time
async def test_a_new_owner_has_recovered_what_was_there_so_nothing_is_waited_for():
    service = Service()
    service.script = ["lost-landed"]
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    async def take_over():
        await asyncio.sleep(0.02)
        service.stream.owner_epoch += 1

    async with asyncio.TaskGroup() as group, writer_of(service) as writer:
        group.create_task(take_over())
        await writer.send(b"only once")
    assert service.events() == [b"only once"]
    assert loop.time() - begun_s < 5


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
        found = service.events()
        assert sorted(found) == events
        assert len(found) == len(set(found))
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
    assert writer.resolved_count == 1


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


@on_virtual_time
async def test_an_owner_that_has_not_heard_of_its_successor_settles_nothing():
    """Where a deposed owner is asked, the present one may still hold what it was sent."""
    service = Service()
    service.script = ["late"]
    service.stream.owner_epoch = 5

    async def know_less_for_a_while():
        await asyncio.sleep(0.005)
        service.stream.owner_epoch = 4
        await asyncio.sleep(2)
        service.stream.owner_epoch = 5

    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    async with asyncio.TaskGroup() as group, writer_of(service) as writer:
        group.create_task(know_less_for_a_while())
        await writer.send(b"only once")
    assert service.events() == [b"only once"]
    assert loop.time() - begun_s >= 10
