"""Topics on a real broker: made explicitly, checked, brought to what they should be; and what
strangers put into them.

Design: reliability.md B24 (a poison message blocks the partition).
"""

import asyncio
import time
import uuid
from dataclasses import replace
from typing import Any

import pytest

from tests.contracts import raw_kafka
from tierlog.adapters.kafka.event_log import KafkaEventLog
from tierlog.adapters.kafka.publisher import KafkaPublisher
from tierlog.adapters.kafka.source import KafkaEventSource
from tierlog.adapters.kafka.topics import apply_topics, ensure_topics
from tierlog.model.errors import CorruptError, Reason, RetryableError
from tierlog.offload.messages import VALUE_LEN_MAX, Stationery, Topics, parse_request
from tierlog.offload.topics import TopicSpec, queue_specs
from tierlog.ports.event_log import EventPlace
from tierlog.wiring.build import system_clock, system_ids

pytestmark = pytest.mark.integration


@pytest.fixture
def bootstrap(servers) -> str:
    return str(servers.endpoints.kafka_bootstrap)


@pytest.fixture
def topics() -> Topics:
    return Topics.of(f"topics-{uuid.uuid4()}")


def specs_of(topics: Topics, *, partitions: int = 2) -> list[TopicSpec]:
    return queue_specs(
        topics,
        partitions=partitions,
        replication_factor=1,
        retention_s=3600,
        dead_letter_retention_s=7200,
    )


async def test_topics_are_made_as_specified_and_then_nothing_differs(bootstrap, topics):
    specs = specs_of(topics)
    before = await apply_topics(bootstrap, specs, dry_run=True)
    assert [[one.what for one in report.left] for report in before] == [["topic"]] * 3
    assert all(report.found is None and not report.done for report in before)
    made = await apply_topics(bootstrap, specs)
    assert [[one.what for one in report.done] for report in made] == [["topic"]] * 3
    assert not [one for report in made for one in report.left]
    again = await apply_topics(bootstrap, specs)
    assert not [one for report in again for one in (*report.done, *report.left)]
    requested = again[0].found
    assert requested is not None
    assert (requested.partitions, requested.replication_factor) == (2, 1)
    assert requested.config["retention.ms"] == "3600000"


async def test_partitions_are_added_and_retention_is_set_and_nothing_is_taken_away(
    bootstrap, topics
):
    await apply_topics(bootstrap, specs_of(topics))
    more = [replace(one, config={**one.config, "retention.ms": "5000"})
            for one in specs_of(topics, partitions=5)]  # fmt: skip
    told = await apply_topics(bootstrap, more, dry_run=True)
    assert [one.what for one in told[0].left] == ["partitions", "retention.ms"]
    done = await apply_topics(bootstrap, more)
    assert [one.what for one in done[0].done] == ["partitions", "retention.ms"]
    assert not [one for report in done for one in report.left]
    fewer = await apply_topics(bootstrap, specs_of(topics, partitions=3))
    assert [(one.what, one.found, one.wanted) for one in fewer[0].left] == [
        ("partitions", "5", "3")
    ]
    after = (await apply_topics(bootstrap, more, dry_run=True))[0].found
    assert after is not None
    assert after.partitions == 5


async def test_services_make_what_is_missing_and_change_nothing_else(bootstrap, topics):
    specs = specs_of(topics)
    await apply_topics(bootstrap, specs[:1])
    created = await ensure_topics(bootstrap, specs_of(topics, partitions=2))
    assert sorted(created) == sorted([topics.completed, topics.dead_letter])
    other = [replace(one, config={**one.config, "retention.ms": "1"}) for one in specs]
    assert await ensure_topics(bootstrap, other) == []
    (report, *_) = await apply_topics(bootstrap, specs, dry_run=True)
    assert not report.left


async def test_a_broker_that_is_away_is_unavailable_in_time(topics, free_port):
    async with asyncio.timeout(10):
        with pytest.raises(RetryableError) as caught:
            await apply_topics(f"127.0.0.1:{free_port}", specs_of(topics), timeout_s=1)
        assert caught.value.reason is Reason.UNAVAILABLE
        log = KafkaEventLog(f"127.0.0.1:{free_port}", timeout_s=1)
        with pytest.raises(RetryableError) as caught:
            await log.get(topics.dead_letter, EventPlace(0, 0))
        assert caught.value.reason is Reason.UNAVAILABLE


async def test_a_topic_that_is_not_there_is_unavailable_and_not_empty(bootstrap, topics):
    log = KafkaEventLog(bootstrap, timeout_s=5)
    with pytest.raises(RetryableError, match="has no topic"):
        assert [one async for one in log.scan(topics.dead_letter, newest_max=5)] == []
    with pytest.raises(RetryableError, match="has no topic"):
        await log.get(topics.dead_letter, EventPlace(0, 0))


HOSTILE: dict[str, dict[str, Any]] = {
    "a header's name that is not UTF-8": {"headers": [(b"\xff\xfe", b"x"), (b"ce_id", b"1")]},
    "a header without a value": {"headers": [(b"ce_specversion", None)]},
    "a header without a name": {"headers": [(b"", b"x")]},
    "a name with a zero in it": {"headers": [(b"a\0b", b"x")]},
    "neither key nor value": {"key": None, "value": None},
    "a key that is not UTF-8": {"key": b"\xff\xfe", "value": b"\xff"},
    "as large as the broker takes": {"key": b"k", "value": bytes(1_040_000)},
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_what_strangers_put_into_a_topic_is_put_aside_and_holds_nobody_up(
    bootstrap, topics, what
):
    await apply_topics(bootstrap, specs_of(topics, partitions=1))
    await raw_kafka.produce(bootstrap, topics.requested, 0, **HOSTILE[what])
    await raw_kafka.produce(bootstrap, topics.requested, 0, key=b"next", value=b"")
    source = KafkaEventSource(bootstrap, [topics.requested], group=topics.requested)
    publisher = KafkaPublisher(bootstrap, publish_timeout_s=10)
    stationery = Stationery(topics, source="test", clock=system_clock(), ids=system_ids())
    try:
        async with asyncio.timeout(30):
            event = await source.take()
            with pytest.raises(CorruptError) as caught:
                parse_request(event)
            topic, key, value, headers = stationery.dead_letter(event, caught.value)
            await publisher.publish(topic, key=key, value=value, headers=headers)
            await source.ack(event)
            assert (await source.take()).key == b"next"
            log = KafkaEventLog(bootstrap)
            (stored,) = [one async for one in log.scan(topics.dead_letter, newest_max=5)]
        assert stored.event.key == event.key
        assert stored.event.value == event.value[:VALUE_LEN_MAX]
        assert stored.event.headers["tierlog_error_reason"] == b"CORRUPT"
    finally:
        await source.close()
        await publisher.close()


async def test_a_header_s_name_that_is_no_text_comes_after_many_that_are(bootstrap, topics):
    """What the library does with it depends on how often it was called: it may end the process."""
    await apply_topics(bootstrap, specs_of(topics, partitions=1))
    plain, bad = [(b"name", b"1")], [(b"\xff\xfe", b"x"), (b"name", b"1")]
    for headers in [plain] * 40 + [bad, plain]:
        await raw_kafka.produce(bootstrap, topics.requested, 0, key=b"k", headers=headers)
    source = KafkaEventSource(bootstrap, [topics.requested], group=topics.requested)
    try:
        async with asyncio.timeout(30):
            taken = [(await source.take()).headers for _ in range(42)]
        assert taken == [{"name": b"1"}] * 40 + [{}, {"name": b"1"}]
    finally:
        await source.close()


async def test_what_the_raw_producer_sends_is_what_is_read(bootstrap, topics):
    await apply_topics(bootstrap, specs_of(topics, partitions=1))
    headers = [(b"one", b"1"), (b"two", b"\xff")]
    await raw_kafka.produce(bootstrap, topics.requested, 0, key=b"k", value=b"v", headers=headers)
    log = KafkaEventLog(bootstrap)
    stored = await log.get(topics.requested, EventPlace(0, 0))
    assert stored is not None
    assert (stored.event.key, stored.event.value) == (b"k", b"v")
    assert stored.event.headers == {"one": b"1", "two": b"\xff"}
    assert abs(stored.stored_ms - time.time() * 1000) < 60_000
