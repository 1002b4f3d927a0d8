"""What everyone who reads a topic from end to end must do (ports/event_log.py).

A module that runs the suite gives the fixture ``queue`` of ``events_suite`` with ``log()`` too.
"""

import random

from tierlog.ports.event_log import EventPlace


def placed(one):
    return one.place.partition, one.place.offset


class EventLogContract:
    async def test_a_scan_gives_each_partition_in_order_and_ends(self, queue):
        topic = await queue.topic()
        publisher, log = queue.publisher(), queue.log()
        assert [one async for one in log.scan(topic, newest_max=100)] == []
        for number in range(120):
            await publisher.publish(
                topic, key=b"%d" % (number % 7), value=b"%d" % number, headers={"n": b"%d" % number}
            )
        found = [one async for one in log.scan(topic, newest_max=1000)]
        assert sorted(int(one.event.value) for one in found) == list(range(120))
        assert all(one.event.headers == {"n": one.event.value} for one in found)
        assert all(one.event.topic == topic for one in found)
        for partition in {one.place.partition for one in found}:
            inside = [one for one in found if one.place.partition == partition]
            assert [one.place.offset for one in inside] == list(range(len(inside)))
            numbers = [int(one.event.value) for one in inside]
            assert numbers == sorted(numbers)
        again = [one async for one in log.scan(topic, newest_max=1000)]
        # In which order partitions come is not promised.
        assert sorted(again, key=placed) == sorted(found, key=placed), "as it was"

    async def test_only_the_newest_are_looked_through(self, queue):
        topic = await queue.topic()
        publisher = queue.publisher()
        for number in range(30):
            await publisher.publish(topic, key=b"same", value=b"%d" % number, headers={})
        found = [one async for one in queue.log().scan(topic, newest_max=4)]
        assert [one.event.value for one in found] == [b"26", b"27", b"28", b"29"]

    async def test_one_place_is_read_alone(self, queue):
        topic = await queue.topic()
        publisher, log = queue.publisher(), queue.log()
        for number in range(9):
            await publisher.publish(topic, key=b"%d" % number, value=b"%d" % number, headers={})
        found = [one async for one in log.scan(topic, newest_max=100)]
        random.Random(1).shuffle(found)
        for one in found:
            assert await log.get(topic, one.place) == one
        for place in (EventPlace(0, 10_000), EventPlace(999, 0)):
            assert await log.get(topic, place) is None

    async def test_it_takes_nothing_from_a_group(self, queue):
        topic = await queue.topic()
        await queue.publisher().publish(topic, key=b"k", value=b"v", headers={})
        source = queue.source(topic, group="g")
        assert len([one async for one in queue.log().scan(topic, newest_max=10)]) == 1
        event = await source.take()
        assert event.value == b"v"
        await source.ack(event)
        assert len([one async for one in queue.log().scan(topic, newest_max=10)]) == 1

    async def test_who_stops_early_leaves_nothing_behind(self, queue):
        topic = await queue.topic()
        publisher, log = queue.publisher(), queue.log()
        for number in range(200):
            await publisher.publish(topic, key=b"same", value=b"%d" % number, headers={})
        scan = log.scan(topic, newest_max=1000)
        assert (await anext(scan)).event.value == b"0"
        await scan.aclose()
        assert len([one async for one in log.scan(topic, newest_max=1000)]) == 200
