"""seeds/004: whatever becomes of answers and processes, each event is there once and in order."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.client.test_partitioned import opened, payloads
from tests.unit.client.world import Service, on_virtual_time, resumed
from tierlog.client import StructuredEvent

FATES = st.sampled_from(["ok", "ok", "ok", "lost-landed", "lost-gone", "late", "refused"])


class CrashError(Exception):
    """The producer's process is gone."""


def crash():
    raise CrashError


async def live(service, events, *, batch_bytes, crash_after, wait_s):
    """Resume, send from the first event on, and crash once so many are behind us."""
    with contextlib.suppress(CrashError):
        async with await resumed(
            service, from_start=True, batch_bytes=batch_bytes, retry_s_max=1000.0
        ) as writer:
            for done, event in enumerate(events):
                if done == crash_after:
                    await asyncio.sleep(wait_s)
                    crash()
                await writer.send(event)


@pytest.mark.covers("E02", "E03", "E04")
@given(
    fates=st.lists(FATES, max_size=60),
    crashes=st.lists(
        st.tuples(st.integers(0, 60), st.integers(10, 60), st.sampled_from([0.0, 0.005, 0.3])),
        max_size=4,
    ),
    count=st.integers(0, 60),
)
def test_each_event_is_there_once_and_in_order(fates, crashes, count):
    @on_virtual_time
    async def test():
        service = Service()
        service.script = list(fates)
        events = [b"event%05d" % number for number in range(count)]
        for crash_after, batch_bytes, wait_s in crashes:
            await live(
                service, events, batch_bytes=batch_bytes, crash_after=crash_after, wait_s=wait_s
            )
            found = service.events()
            assert found == events[: len(found)]
        await live(service, events, batch_bytes=30, crash_after=None, wait_s=0)
        await asyncio.sleep(20)
        assert service.events() == events

    test()


@pytest.mark.covers("E05")
@given(
    lives=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 600_000)), min_size=1, max_size=4),
    sizes=st.lists(st.integers(0, 120_000), min_size=1, max_size=8),
    keyed=st.sets(st.integers(0, 7)),
    partitions=st.integers(1, 4),
)
def test_in_partitions_each_event_is_there_once_whatever_the_batches(
    lives, sizes, keyed, partitions
):
    """Some have keys, and some take turns; each life has batches of another size."""
    events = [
        StructuredEvent(
            payload=b"%05d" % number + bytes(sizes[number % len(sizes)]),
            key=b"%d" % (number % 3) if number % 8 in keyed else None,
        )
        for number in range(max(count for count, _ in lives))
    ]

    @on_virtual_time
    async def test():
        on = opened()
        await on.client.create_stream("orders", partitions=partitions)
        state, there = on.client.new_writer_state(), 0
        for count, batch_bytes in lives:
            async with on.client.writer(
                "orders", state=state, from_start=True, batch_bytes=batch_bytes
            ) as writer:
                for event in events[:count]:
                    await writer.send(event)
                await writer.flush()
                assert writer.skipped_events == min(count, there)
            there = max(count, there)
        found = [one.payload for one in await payloads(on.client, "orders")]
        assert sorted(found) == [one.payload for one in events]

    test()
