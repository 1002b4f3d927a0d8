"""seeds/004: a writer's state outlives its process; what comes of it is there once and in order."""

import asyncio
import contextlib
from uuid import UUID

import orjson
import pytest

from tests.unit.client.test_partitioned import ORDERS, opened, payloads
from tests.unit.client.world import (
    LOGS,
    WRITER,
    Service,
    on_virtual_time,
    resumed,
    writer_of,
)
from tierlog.adapters.memory.streams import MemoryStream
from tierlog.client import StructuredEvent, WriterState
from tierlog.client.idempotent import Numbers, session_key
from tierlog.model.attributes import AttributeKey
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.ids import INT64_MAX
from tierlog.model.partitions import partition_names, partition_of


def numbered(first, end):
    return [f"event{number:05d}".encode() for number in range(first, end)]


class CrashError(Exception):
    """The producer's process is gone."""


def crash():
    raise CrashError


async def crash_after(writer, events):
    """Send events, and go without a word."""
    with contextlib.suppress(CrashError):
        async with writer:
            for event in events:
                await writer.send(event)
            await asyncio.sleep(0.005)
            crash()


@pytest.mark.covers("E06")
@on_virtual_time
async def test_a_state_says_what_was_sent_and_what_was_acknowledged():
    service = Service()
    service.script = ["ok", "ok", "silent"]
    async with await resumed(service) as writer:
        for event in numbered(0, 5):
            await writer.send(event)
        await writer.flush()
        assert writer.state().streams == {LOGS: Numbers(acked=5, sent=5)}
        service.script = ["silent"]
        for event in numbered(5, 8):
            await writer.send(event)
        await asyncio.sleep(1)
        state = writer.state()
        assert state.streams == {LOGS: Numbers(acked=5, sent=8)}
        assert WriterState.of_document(orjson.loads(orjson.dumps(state.document()))) == state
        service.hung_up.set()


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 2, "writer_id": str(WRITER), "streams": {}},
        {"version": 1, "writer_id": "nobody", "streams": {}},
        {"version": 1, "writer_id": str(WRITER), "streams": {"logs": {"acked_event_number": 1}}},
        {"version": 1, "writer_id": str(WRITER), "streams": []},
        {
            "version": 1,
            "writer_id": str(WRITER),
            "streams": {"logs": {"acked_event_number": -1, "sent_event_number": 0}},
        },
    ],
)
def test_a_state_that_is_none_is_refused(document):
    with pytest.raises(RefusedError):
        WriterState.of_document(document)


def test_a_writer_without_an_id_has_no_state():
    with pytest.raises(RefusedError):
        writer_of(Service(), plain=True).state()


@on_virtual_time
async def test_a_writer_that_was_not_opened_with_a_state_has_none_to_store():
    """Its appends expect no session: nothing would hold back those that are still on their way."""
    on = opened()
    await on.client.create_stream("orders", partitions=2)
    for name in ("logs", "orders"):
        async with on.client.writer(name) as writer:
            await writer.send(b"x")
            with pytest.raises(RefusedError, match="new_writer_state"):
                writer.state()


@pytest.mark.covers("E04")
@on_virtual_time
async def test_a_new_process_learns_how_many_events_are_there_and_goes_on_behind_them():
    service = Service()
    service.script = [*["ok"] * 4, "lost-gone", "lost-gone"]
    await crash_after(await resumed(service), numbered(0, 20))
    there = len(service.events())
    assert 0 < there < 20
    async with await resumed(service) as writer:
        assert writer.resumed_event_number == there
        for event in numbered(there, 30):
            await writer.send(event)
    assert service.events() == numbered(0, 30)


@on_virtual_time
async def test_events_from_the_first_one_on_are_passed_over_where_they_are_there():
    service = Service()
    await crash_after(await resumed(service), numbered(0, 20))
    async with await resumed(service, from_start=True, batch_bytes=50) as writer:
        for event in numbered(0, 30):
            await writer.send(event)
        await writer.flush()
        assert writer.skipped_events == writer.resumed_event_number == 30 - writer.acked_events
    assert service.events() == numbered(0, 30)


@pytest.mark.covers("E04")
@on_virtual_time
async def test_what_the_process_before_left_in_a_queue_never_lands():
    """Its conditions might hold again: the batches of a new process have the same boundaries."""
    service = Service()
    service.script = ["ok", "ok", "ok", *["late"] * 20]
    await crash_after(await resumed(service), numbered(0, 20))
    there = len(service.events())
    async with await resumed(service, from_start=True) as writer:
        assert writer.resumed_event_number == there < 20
        for event in numbered(0, there):
            await writer.send(event)
        await asyncio.sleep(20)
        assert len(service.events()) == there
        for event in numbered(there, 20):
            await writer.send(event)
    assert service.events() == numbered(0, 20)


@on_virtual_time
async def test_the_process_before_is_refused_once_another_one_resumed_its_writer():
    service = Service()

    async def go_on_after_another():
        async with await resumed(service) as before:
            for event in numbered(0, 4):
                await before.send(event)
            await before.flush()
            async with await resumed(service) as writer:
                assert writer.resumed_event_number == 4
            await before.send(b"a ghost's")

    with pytest.raises(RefusedError) as caught:
        await go_on_after_another()
    assert caught.value.reason is Reason.FENCED
    assert service.events() == numbered(0, 4)


@on_virtual_time
async def test_two_that_resume_at_once_do_not_share_a_session():
    service = Service()
    one, other = await resumed(service), await resumed(service)
    async with other:
        await other.send(b"mine")
    with pytest.raises(RefusedError) as caught:
        async with one:
            await one.send(b"mine, too")
    assert caught.value.reason is Reason.FENCED, "number 1 is there, and not from here"
    assert service.events() == [b"mine"]


@on_virtual_time
async def test_a_former_owner_that_still_answers_settles_nothing():
    """It knows the session of before; a number that it does not know of is not settled by it."""
    service = Service()
    one = await resumed(service)
    before = dict(service.stream.attributes)
    async with await resumed(service) as other:
        await other.send(b"mine")
    service.stale = [before, before, before]
    with pytest.raises(RefusedError) as caught:
        async with one:
            await one.send(b"mine, too")
    assert caught.value.reason is Reason.FENCED
    assert service.stale == []
    assert service.events() == [b"mine"]


@on_virtual_time
async def test_a_take_over_goes_by_no_answer_of_before_it():
    service = Service()
    async with await resumed(service) as writer:
        for event in numbered(0, 4):
            await writer.send(event)
    before = dict(service.stream.attributes)
    async with await resumed(service) as writer:
        for event in numbered(4, 8):
            await writer.send(event)
    service.stale = [before, before, before]
    async with await resumed(service) as writer:
        assert (writer.resumed_event_number, service.stale) == (8, [])


@pytest.mark.covers("E04")
@on_virtual_time
async def test_no_session_is_given_twice_where_a_stream_forgets():
    """A restore puts it back, and a stream that is made again has none; queues keep what waits."""
    service = Service()
    service.script = ["ok", *["late"] * 20]
    await crash_after(await resumed(service), numbered(0, 20))
    service.script = []
    again = service.stream = service.streams.by_name[LOGS] = MemoryStream(name=LOGS)
    async with await resumed(service) as writer:
        assert writer.resumed_event_number == 0
        await asyncio.sleep(20)
        assert service.events() == []
        for event in numbered(0, 4):
            await writer.send(event)
    assert (service.stream, service.events()) == (again, numbered(0, 4))


@pytest.mark.parametrize("fate", ["lost-landed", "lost-gone", "late", "refused"])
def test_a_take_over_whose_answer_is_lost_is_made_again(fate):
    @on_virtual_time
    async def test():
        service = Service()
        service.script = [fate, fate]
        async with await resumed(service) as writer:
            await asyncio.sleep(20)
            await writer.send(b"x")
        assert service.events() == [b"x"]
        key = AttributeKey(session_key(WRITER).bytes)
        assert 0 <= service.stream.attributes[key] <= INT64_MAX

    test()


@on_virtual_time
async def test_a_take_over_waits_for_an_owner_that_is_away():
    service = Service()
    service.up = False

    async def come_back():
        await asyncio.sleep(20)
        service.up = True

    async with asyncio.TaskGroup() as group:
        group.create_task(come_back())
        async with await resumed(service) as writer:
            await writer.send(b"x")
    assert service.events() == [b"x"]


@on_virtual_time
async def test_a_take_over_gives_up_after_a_while():
    service = Service()
    service.up = False
    with pytest.raises(RetryableError):
        await resumed(service)


@on_virtual_time
async def test_a_failed_writer_says_that_its_state_knows_more():
    service = Service()
    service.script = ["silent"]

    async def go_away():
        await asyncio.sleep(0.5)
        service.up = False

    async def send():
        async with asyncio.TaskGroup() as group:
            group.create_task(go_away())
            async with writer_of(service, retry_s_max=15.0) as writer:
                await writer.send(b"x")

    with pytest.raises(ExceptionGroup) as caught:
        await send()
    (error,) = caught.value.exceptions
    assert isinstance(error, IndeterminateError)
    assert error.details == {"acknowledged_events": "0", "unknown_events": "1"}
    assert "resume the writer" in error.remedy


KEYS = [b"key-%d" % number for number in range(7)]


def orders(count):
    return [
        StructuredEvent(payload=b"%05d" % number, key=KEYS[number % len(KEYS)])
        for number in range(count)
    ]


@pytest.mark.covers("E05", "E06")
@on_virtual_time
async def test_one_writer_id_has_numbers_of_its_own_in_each_partition():
    on = opened(batch_bytes=30)
    await on.client.create_stream("orders", partitions=3)
    state = on.client.new_writer_state()
    async with on.client.writer("orders", state=state) as writer:
        assert writer.resumed_event_numbers == dict.fromkeys(partition_names(ORDERS, 3), 0)
        for event in orders(100):
            await writer.send(event)
        await writer.flush()
        told = writer.state()
    counts = [
        sum(partition_of(one.key or b"", 3) == index for one in orders(100)) for index in range(3)
    ]
    names = partition_names(ORDERS, 3)
    assert told.writer_id == state.writer_id
    assert told.streams == {
        name: Numbers(acked=count, sent=count) for name, count in zip(names, counts, strict=True)
    }
    for name, count in zip(names, counts, strict=True):
        key = UUID(bytes=state.writer_id.bytes)
        assert await on.client.attributes(name).get([key]) == {key: count}

    async with on.client.writer("orders", state=told, from_start=True) as writer:
        assert list(writer.resumed_event_numbers.values()) == counts
        for event in orders(150):
            await writer.send(event)
        await writer.flush()
        assert (writer.skipped_events, writer.acked_events) == (100, 50)
    found = await payloads(on.client, "orders")
    for index, routed in enumerate(KEYS):
        assert [one.payload for one in found if one.key == routed] == [
            b"%05d" % number for number in range(index, 150, len(KEYS))
        ]


@on_virtual_time
async def test_events_without_a_key_get_to_the_partitions_they_were_in():
    on = opened(batch_bytes=30)
    await on.client.create_stream("orders", partitions=3)
    state = on.client.new_writer_state()
    for count in (70, 200):
        async with on.client.writer("orders", state=state, from_start=True) as writer:
            for number in range(count):
                await writer.send(b"%05d" % number)
    found = [one.payload for one in await payloads(on.client, "orders")]
    assert sorted(found) == [b"%05d" % number for number in range(200)]


@pytest.mark.covers("E05")
@on_virtual_time
async def test_events_without_a_key_get_there_whatever_the_size_of_batches_is_now():
    on = opened(batch_bytes=1000)
    await on.client.create_stream("orders", partitions=3)
    state, sent = on.client.new_writer_state(), [b"%0999d" % number for number in range(400)]
    for count, batch_bytes in ((150, 30_000), (300, None), (400, 500_000)):
        async with on.client.writer(
            "orders", state=state, from_start=True, batch_bytes=batch_bytes
        ) as writer:
            for event in sent[:count]:
                await writer.send(event)
        assert writer.skipped_events == sum(writer.resumed_event_numbers.values())
    found = [one.payload for one in await payloads(on.client, "orders")]
    assert sorted(found) == sent


@on_virtual_time
async def test_a_raw_or_a_plain_writer_is_not_resumed():
    on = opened()
    state = on.client.new_writer_state()
    for options in ({"raw": True}, {"exactly_once": False}):
        with pytest.raises(RefusedError):
            async with on.client.writer("orders", state=state, **options):
                pass
