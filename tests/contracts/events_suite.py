"""What every queue must do (ports/events.py), whoever it is.

A module that runs the suite subclasses ``EventsContract`` and gives a fixture ``queue`` with
``await topic()`` (a fresh one, of several partitions), ``publisher()`` and
``source(topic, group=…, backoff=…)``; it closes what it gave.
"""

import asyncio
from collections import Counter

from tierlog.adapters.offsets import Backoff
from tierlog.ports.events import Event, EventSource

QUICK = Backoff(first_s=0.2, max_s=0.4)
QUIET_S = 1.5
"""When nothing came for so long, nothing comes."""


class EventsContract:
    async def test_what_is_published_is_taken_whole(self, queue):
        topic = await queue.topic()
        publisher, source = queue.publisher(), queue.source(topic, group="g")
        headers = {"ce_id": b"1", "traceparent": b"00-aa-bb-01"}
        await publisher.publish(topic, key=b"stream/7", value=b"\x00\xff", headers=headers)
        event = await _take(source)
        assert event == Event(topic=topic, key=b"stream/7", value=b"\x00\xff", headers=headers)
        assert event.attempt == 1
        await source.ack(event)
        assert await _drain(source) == []

    async def test_events_wait_for_the_first_member(self, queue):
        topic = await queue.topic()
        await _publish(queue.publisher(), topic, 5)
        source = queue.source(topic, group="late")
        assert await _values(source, 5) == _numbers(5)

    async def test_the_order_within_a_key_is_kept(self, queue):
        topic = await queue.topic()
        publisher, source = queue.publisher(), queue.source(topic, group="g")
        for number in range(20):
            await publisher.publish(topic, key=b"same", value=b"%d" % number, headers={})
        taken = [await _take(source) for _ in range(20)]
        assert [event.value for event in taken] == _numbers(20)

    async def test_groups_get_everything_each(self, queue):
        topic = await queue.topic()
        one, other = queue.source(topic, group="one"), queue.source(topic, group="other")
        await _publish(queue.publisher(), topic, 5)
        assert await _values(one, 5) == _numbers(5)
        assert await _values(other, 5) == _numbers(5)

    async def test_what_was_acknowledged_is_not_delivered_to_the_next_member(self, queue):
        topic = await queue.topic()
        await _publish(queue.publisher(), topic, 6)
        first = queue.source(topic, group="g")
        for _ in range(6):
            await first.ack(await _take(first))
        await first.close()
        second = queue.source(topic, group="g")
        await _publish(queue.publisher(), topic, 1, begin=6)
        assert await _values(second, 1) == [b"6"]
        assert await _drain(second) == []

    async def test_what_was_not_acknowledged_is_delivered_again(self, queue):
        topic = await queue.topic()
        publisher = queue.publisher()
        for number in range(4):
            await publisher.publish(topic, key=b"same", value=b"%d" % number, headers={})
        first = queue.source(topic, group="g")
        taken = [await _take(first) for _ in range(4)]
        await first.ack(taken[0])
        await first.ack(taken[2])  # beyond a gap: it can't be committed
        await first.close()
        second = queue.source(topic, group="g")
        assert await _values(second, 3) == [b"1", b"2", b"3"]

    async def test_retry_later_waits_and_counts(self, queue):
        topic = await queue.topic()
        source = queue.source(topic, group="g", backoff=QUICK)
        await _publish(queue.publisher(), topic, 1)
        loop = asyncio.get_running_loop()
        event = await _take(source)
        for attempt, wait_s in ((2, 0.2), (3, 0.4), (4, 0.4)):
            began = loop.time()
            await source.retry_later(event)
            event = await _take(source)
            assert loop.time() - began >= wait_s * 0.99
            assert (event.attempt, event.value) == (attempt, b"0")
        await source.ack(event)
        assert await _drain(source) == []

    async def test_a_retried_event_holds_no_other_up(self, queue):
        topic = await queue.topic()
        source = queue.source(topic, group="g", backoff=QUICK)
        publisher = queue.publisher()
        for number in range(3):
            await publisher.publish(topic, key=b"same", value=b"%d" % number, headers={})
        await source.retry_later(await _take(source))
        assert [(await _take(source)).value for _ in range(3)] == [b"1", b"2", b"0"]

    async def test_a_cancelled_take_loses_nothing(self, queue):
        topic = await queue.topic()
        source = queue.source(topic, group="g")
        publisher = queue.publisher()
        await _publish(publisher, topic, 1, begin=100)
        assert (await _take(source)).value == b"100"  # it is assigned by now
        taken: list[bytes] = []
        for number in range(30):
            await publisher.publish(topic, key=b"%d" % number, value=b"%d" % number, headers={})
            taking = asyncio.create_task(source.take())
            await asyncio.sleep(0.001 * (number % 7))
            taking.cancel()
            await asyncio.wait([taking])
            if not taking.cancelled():
                taken.append(taking.result().value)
        taken += [event.value for event in await _drain(source)]
        assert Counter(taken) == Counter(_numbers(30))

    async def test_a_mark_tells_how_many_events_a_topic_has_had(self, queue):
        topic = await queue.topic()
        publisher, source = queue.publisher(), queue.source(topic, group="g")
        await _publish(publisher, topic, 12)  # each partition has a leader by now
        before = await publisher.mark(topic)
        await _publish(publisher, topic, 3, begin=12)
        for _ in range(15):
            await source.ack(await _take(source))
        after = await publisher.mark(topic)
        assert before.topic_id == after.topic_id != ""
        assert (sum(before.ends.values()), sum(after.ends.values())) == (12, 15)
        assert not before.is_lost_in(after)
        assert after.is_lost_in(before)

    async def test_members_share_and_a_leaver_hands_over(self, queue):
        topic = await queue.topic()
        publisher = queue.publisher()
        first = queue.source(topic, group="g")
        await _publish(publisher, topic, 1, begin=1000)
        await first.ack(await _take(first))
        second = queue.source(topic, group="g")
        shares: dict[EventSource, Counter[bytes]] = {first: Counter(), second: Counter()}

        async def consume(source: EventSource) -> None:
            while True:
                event = await source.take()
                await source.ack(event)
                shares[source][event.value] += 1

        published = 0
        consuming = {source: asyncio.create_task(consume(source)) for source in shares}
        async with asyncio.timeout(60):
            while not all(shares.values()):  # until both have got some
                await _publish(publisher, topic, 10, begin=published)
                published += 10
                await asyncio.sleep(0.2)
        consuming[first].cancel()
        await first.close()
        await _publish(publisher, topic, 40, begin=published)
        published += 40
        async with asyncio.timeout(60):
            while set(shares[first] + shares[second]) != set(_numbers(published)):
                await asyncio.sleep(0.1)
        consuming[second].cancel()
        together = sum((shares[first] + shares[second]).values())
        assert together - published <= 10  # handing over may repeat a few, and lost none


def _numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def _publish(publisher, topic: str, count: int, *, begin: int = 0) -> None:
    for number in range(begin, begin + count):
        await publisher.publish(topic, key=b"%d" % number, value=b"%d" % number, headers={})


async def _take(source: EventSource) -> Event:
    async with asyncio.timeout(30):
        return await source.take()


async def _values(source: EventSource, count: int) -> list[bytes]:
    return sorted([(await _take(source)).value for _ in range(count)], key=int)


async def _drain(source: EventSource) -> list[Event]:
    events: list[Event] = []
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                events.append(await source.take())
        except TimeoutError:
            return events
