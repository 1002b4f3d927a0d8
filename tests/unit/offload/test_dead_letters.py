"""Requests that were put aside: shown whole, brought back, and never in the way of others.

Design: protocols.md section 3, step 8; reliability.md B24 (a poison message) and C2.
"""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tierlog.adapters.memory.events import MemoryEventLog
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.offload.dead_letters import DeadLetters, LetterState, parse_place
from tierlog.offload.messages import OffloadRequest, parse_request, parse_result, trace_of
from tierlog.ports.event_log import EventPlace
from tierlog.ports.events import Event
from tierlog.proto.v1 import events_pb2 as pb

ENTRIES = [b"one", b"two"]


def office(world: World, *, newest_max: int = 1000, faults: Faults | None = None) -> DeadLetters:
    return DeadLetters(
        MemoryEventLog(world.queue),
        world.queue.publisher(faults),
        world.stationery,
        newest_max=newest_max,
    )


async def put_aside(world: World, event: Event, error: TierlogError | None = None) -> EventPlace:
    """Put an event aside, as a worker does."""
    error = error or RetryableError("the store is away", remedy="Look at it")
    before = {one.place for one in world.queue.stored(TOPICS.dead_letter)}
    topic, key, value, headers = world.stationery.dead_letter(event, error)
    await world.queue.publisher().publish(topic, key=key, value=value, headers=headers)
    (place,) = {one.place for one in world.queue.stored(TOPICS.dead_letter)} - before
    return place


async def with_ledger(world: World):
    claimed = await world.stream()
    ledger_id = await world.seal(claimed, ENTRIES)
    return world.request(claimed, ledger_id), ledger_id


def test_a_letter_is_shown_with_its_request_its_error_and_its_trace():
    async def main():
        world = World()
        request, ledger_id = await with_ledger(world)
        place = await put_aside(world, request)
        (letter,) = await office(world).find()
        assert letter.place == place
        assert (letter.stream, letter.ledger_id) == ("logs", ledger_id)
        assert (letter.state, letter.attempts, letter.cut) == (LetterState.WAITING, 1, False)
        assert (letter.reason, letter.topic) == ("UNAVAILABLE", TOPICS.requested)
        assert "the store is away" in letter.error
        trace = trace_of(request)
        assert trace is not None
        assert letter.trace_id == trace.trace_id.hex()
        again, event = await office(world).get(place)
        assert again == letter
        assert event.value == request.value

    run_virtual(main())


def test_a_replay_brings_the_request_back_in_its_trace_and_a_worker_does_it():
    async def main():
        world = World()
        request, ledger_id = await with_ledger(world)
        place = await put_aside(world, request)
        assert (await office(world).replay(place)).state is LetterState.REPLAYED
        (came,) = world.queue.events(TOPICS.requested)
        assert (came.key, came.value) == (request.key, request.value)
        assert came.headers["tierlog_replay_of"] == str(place).encode()
        assert trace_of(came) == trace_of(request)
        assert not [name for name in came.headers if "error" in name]
        await world.worker().handle(came)
        (result,) = world.queue.events(TOPICS.completed)
        assert parse_result(result).outcome == pb.OffloadResult.OUTCOME_COMPLETED
        traces = {trace_of(one).trace_id for one in (request, result)}  # type: ignore[union-attr]
        assert len(traces) == 1
        assert (await world.context(ledger_id)).complete
        assert await office(world).find() == [], "nothing waits"
        (letter,) = await office(world).find(state=None)
        assert letter.state is LetterState.REPLAYED
        assert letter.marked_ms == world.clock.wall_ms()

    run_virtual(main())


def test_what_fails_again_is_a_letter_of_its_own_that_names_the_first():
    async def main():
        world = World()
        request, _ = await with_ledger(world)
        first = await put_aside(world, request)
        await office(world).replay(first)
        (came,) = world.queue.events(TOPICS.requested)
        second = await put_aside(world, came)
        (waiting,) = await office(world).find()
        assert (waiting.place, waiting.replay_of) == (second, str(first))

    run_virtual(main())


def test_a_letter_that_is_no_request_is_not_replayed_but_dismissed():
    async def main():
        world = World()
        garbage = Event(topic=TOPICS.requested, key=b"\xff\xfe", value=b"\x00", headers={})
        place = await put_aside(world, garbage, CorruptError("no request"))
        (letter,) = await office(world).find()
        assert (letter.stream, letter.ledger_id, letter.is_request) == (None, None, False)
        with pytest.raises(RefusedError, match="is no offload request") as caught:
            await office(world).replay(place)
        assert f"tierlog dlq dismiss {place}" in caught.value.remedy
        assert not world.queue.events(TOPICS.requested)
        assert (await office(world).find()) == [letter], "nothing half-done"
        await office(world).dismiss(place)
        assert await office(world).find() == []
        (dismissed,) = await office(world).find(state=LetterState.DISMISSED)
        assert dismissed.place == place

    run_virtual(main())


def test_a_replay_of_many_is_bounded_and_says_how_many_it_did_not_come_to(monkeypatch):
    monkeypatch.setattr("tierlog.offload.dead_letters.REPLAYED_AT_ONCE_MAX", 2)

    async def main():
        world = World()
        request, _ = await with_ledger(world)
        places = [await put_aside(world, request) for _ in range(3)]
        done = await office(world).replay_waiting()
        assert (done.replayed, done.left) == (tuple(places[:2]), 1)
        done = await office(world).replay_waiting()
        assert (done.replayed, done.left) == (tuple(places[2:]), 0)

    run_virtual(main())


def test_what_waits_is_replayed_by_stream_and_reason_and_the_rest_is_told():
    async def main():
        world = World()
        request, _ = await with_ledger(world)
        wanted = await put_aside(world, request)
        other_reason = await put_aside(world, request, RefusedError("no"))
        garbage = Event(topic=TOPICS.requested, key=b"?", value=b"\x00", headers={})
        bad = await put_aside(world, garbage)
        done = await office(world).replay_waiting(stream="logs", reason="UNAVAILABLE")
        assert (done.replayed, done.refused) == ((wanted,), ())
        done = await office(world).replay_waiting(stream="elsewhere")
        assert (done.replayed, done.refused) == ((), ())
        done = await office(world).replay_waiting()
        assert done.replayed == (other_reason,)
        assert [place for place, _ in done.refused] == [bad]
        assert len(world.queue.events(TOPICS.requested)) == 2

    run_virtual(main())


def test_a_crash_between_the_replay_and_its_mark_leaves_the_letter_waiting():
    async def main():
        world = World()
        request, ledger_id = await with_ledger(world)
        place = await put_aside(world, request)
        faults = Faults(random.Random(1))
        faults.next("events.publish", Outcome.ANSWERED)
        faults.next("events.publish", Outcome.REQUEST_LOST)
        with pytest.raises(RetryableError):
            await office(world, faults=faults).replay(place)
        assert [one.place for one in await office(world).find()] == [place]
        await office(world).replay(place)
        worker = world.worker()
        for event in world.queue.events(TOPICS.requested):
            await worker.handle(event)
        assert (worker.attempts, worker.completed) == (1, 1), "asked twice, done once"
        assert (await world.context(ledger_id)).complete

    run_virtual(main())


def test_places_that_hold_no_letter():
    async def main():
        world = World()
        request, _ = await with_ledger(world)
        place = await put_aside(world, request)
        await office(world).dismiss(place)
        mark = next(
            one.place for one in world.queue.stored(TOPICS.dead_letter) if one.place != place
        )
        for nowhere in (EventPlace(0, 10**6), EventPlace(77, 0), mark):
            with pytest.raises(RefusedError) as caught:
                await office(world).replay(nowhere)
            assert caught.value.reason is Reason.NO_SUCH_ENTRY

    run_virtual(main())


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "1:x", "-1:2", "1:2:3", "²:1", "1 :2"])
def test_what_is_no_place(text):
    with pytest.raises(RefusedError, match="is not the place"):
        parse_place(text)


def test_a_place_reads_as_it_is_written():
    assert parse_place(str(EventPlace(3, 2**62))) == EventPlace(3, 2**62)
    with pytest.raises(RefusedError) as caught:
        parse_place("1:" + "9" * 5000)
    assert caught.value.reason is Reason.NO_SUCH_ENTRY


def test_only_the_newest_letters_are_looked_through_and_values_are_not_kept():
    async def main():
        world = World()
        large = Event(topic=TOPICS.requested, key=b"same", value=bytes(60_000), headers={})
        for _ in range(200):
            await put_aside(world, large)
        assert len(await office(world, newest_max=7).find()) == 7
        tracemalloc.start()
        letters = await office(world).find()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(letters) == 200
        assert kept < 2_000_000

    run_virtual(main())


@pytest.mark.parametrize(
    "event",
    [
        Event(topic="t", key=bytes(900_000), value=b"", headers={}),
        Event(topic="t", key=b"", value=bytes(1_000_000), headers={}),
        Event(topic="t", key=b"", value=b"", headers={"h": bytes(900_000)}),
        Event(topic="t", key=b"", value=b"", headers={"h" * 900_000: b""}),
        Event(topic="t", key=b"", value=b"", headers={f"h{n}": bytes(300) for n in range(3000)}),
    ],
    ids=["key", "value", "header", "header name", "headers"],
)
def test_whatever_kafka_took_can_be_put_aside(event):
    """Else whoever meets it can't get rid of it, and meets it for ever."""
    world = World()
    _, key, value, headers = world.stationery.dead_letter(event, CorruptError("x" * 100_000))
    size = len(key) + len(value) + sum(len(name) + len(one) for name, one in headers.items())
    assert size < 300_000
    cut = len(event.value) > len(value) or len(event.key) > len(key)
    assert ("tierlog_cut_from_bytes" in headers) == cut


def test_whoever_asks_forges_no_header_of_ours():
    world = World()
    forged = {
        "tierlog_dead_letter": b"dismissed",
        "tierlog_dead_letter_of": b"0:0",
        "tierlog_cut_from_bytes": b"5",
        "tierlog_attempts": b"99",
        "own": b"kept",
    }
    event = Event(topic="t", key=b"", value=b"", headers=forged)
    _, _, _, headers = world.stationery.dead_letter(event, CorruptError("no"))
    assert headers["tierlog_attempts"] == b"1"
    assert headers["own"] == b"kept"
    assert not [name for name in headers if "dead_letter" in name or "cut" in name]


hostile_headers = st.dictionaries(
    st.sampled_from(
        ["ce_specversion", "ce_id", "ce_source", "ce_type", "ce_subject", "ce_time",
         "ce_dataschema", "content-type", "traceparent", "tierlog_dead_letter",
         "tierlog_dead_letter_of", "tierlog_attempts", "x"]
    ),
    st.binary(max_size=20)
    | st.sampled_from(
        [b"1.0", b"2.0", b"tierlog.v1.OffloadRequest", b"application/protobuf", b"0:0",
         b"2026-01-01T00:00:00Z", b"12345678-1234-5678-1234-567812345678", b"dismissed"]
    ),
)  # fmt: skip
requests = st.builds(
    lambda stream, incarnation, ledger_id, trigger, count: pb.OffloadRequest(
        stream=stream,
        incarnation=incarnation,
        ledger_id=ledger_id,
        trigger=trigger,
        requested_ms=count,
        request_count=count,
    ).SerializeToString(),
    st.text(max_size=10),
    st.binary(max_size=16) | st.binary(min_size=16, max_size=16),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from(["time", "size", "admin", "soon", ""]),
    st.integers(-(2**31), 2**31 - 1),
)


@given(value=st.binary(max_size=200) | requests, headers=hostile_headers, key=st.binary())
def test_whatever_is_in_the_topic_is_a_request_or_refused_and_can_be_shown(value, headers, key):
    event = Event(topic=TOPICS.requested, key=key, value=value, headers=headers)
    try:
        assert isinstance(parse_request(event), OffloadRequest)
    except (CorruptError, RefusedError) as refusal:
        told = str(refusal)
        assert refusal.remedy in told  # noqa: PT017 - either is right

    async def main():
        world = World()
        place = await put_aside(world, event)
        (letter,) = await office(world).find(state=None)
        assert letter.place == place

    run_virtual(main())
