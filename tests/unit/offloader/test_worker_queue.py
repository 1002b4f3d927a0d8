"""The worker and its queue: pauses, traces, and what can't even be put aside."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, TOPICS, World, bare_ledger
from tierlog.adapters.kafka.common import as_error
from tierlog.adapters.memory.events import MemoryEventPublisher
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.format import paths
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import AttemptOutcome, OffloadState
from tierlog.model.stream import Stream
from tierlog.offload.attempting import LockedError
from tierlog.offload.messages import (
    ERROR_LEN_MAX,
    Trigger,
    parse_request,
    parse_result,
    trace_of,
)
from tierlog.offload.timed import CopyTime
from tierlog.ports.events import Event
from tierlog.proto.v1 import events_pb2 as pb
from tierlog.runtime.worker import WorkerLimits, run_worker

ENTRIES = [b"one", b"three"]
HOUR = 3600.0


async def sealed(world: World):
    claimed = await world.stream()
    return claimed, await world.seal(claimed, ENTRIES)


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ("tierlog.v1.OffloadRequest", True),
        ("urn:tierlog:tierlog.v1.OffloadRequest", True),
        ("https://schemas.example/tierlog.v1.OffloadRequest", True),
        ("https://schemas.example/events.proto#tierlog.v1.OffloadRequest", True),
        ("urn:tierlog:tierlog.v1.OffloadResult", False),
        ("untierlog.v1.OffloadRequest", False),
        ("", False),
    ],
)
def test_the_schema_of_a_request_may_be_named_by_a_uri(schema, taken):
    async def main():
        world = World()
        plain = world.request(*await sealed(world))
        asked = replace(plain, headers={**plain.headers, "ce_dataschema": schema.encode()})
        if taken:
            assert parse_request(asked) == parse_request(plain)
        else:
            with pytest.raises(CorruptError, match="says to be"):
                parse_request(asked)

    run_virtual(main())


def test_a_paused_stream_gets_no_attempt_and_is_told_of():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        await world.catalog().streams.pause_offload(STREAM, "the bucket is moved")
        worker = world.worker()
        await worker.handle(world.request(claimed, ledger_id))
        assert worker.attempts == 0
        assert (await world.context(ledger_id)).state is OffloadState.LOCAL
        (event,) = world.queue.events(TOPICS.completed)
        result = parse_result(event)
        assert result.outcome == pb.OffloadResult.OUTCOME_PAUSED
        assert "the bucket is moved" in result.error_message
        assert not world.queue.events(TOPICS.dead_letter), "nobody has to look at it"
        await world.catalog().streams.resume_offload(STREAM)
        await worker.handle(world.request(claimed, ledger_id))
        assert (await world.context(ledger_id)).complete
        # What is there already is there, paused or not.
        await world.catalog().streams.pause_offload(STREAM)
        await worker.handle(world.request(claimed, ledger_id))
        results = [parse_result(one).outcome for one in world.queue.events(TOPICS.completed)]
        assert results[-1] == pb.OffloadResult.OUTCOME_ALREADY_COMPLETE

    run_virtual(main())


def test_a_copy_that_takes_too_long_is_told_and_ends_in_the_dead_letter_topic():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        # A store, or a throttle, at which it takes longer than a request may.
        copy_time = CopyTime(base_s=1800, bytes_per_s_min=10**6)
        worker = world.worker(deliveries_max=3, part_delay_s=3600.0, copy_time=copy_time)
        source = world.queue.source([TOPICS.requested], group="offloader")
        asked = world.request(claimed, ledger_id)
        await world.queue.publisher().publish(
            asked.topic, key=asked.key, value=asked.value, headers=asked.headers
        )
        stop = asyncio.Event()
        limits = WorkerLimits(in_flight_max=1, drain_s_max=5)
        async with asyncio.TaskGroup() as group:
            group.create_task(run_worker(source, worker.handle, stop=stop, limits=limits))
            await asyncio.sleep(12 * 3600)
            stop.set()
        (letter,) = world.queue.events(TOPICS.dead_letter)
        assert letter.headers["tierlog_attempts"] == b"3"
        (event,) = world.queue.events(TOPICS.completed)
        assert parse_result(event).outcome == pb.OffloadResult.OUTCOME_FAILED
        context = await world.context(ledger_id)
        assert "took longer than 1800 s" in context.last_error
        assert not world.bucket.objects
        assert not world.bucket.uploads
        # The more bytes, the longer it may take.
        slow = CopyTime(base_s=1800, bytes_per_s_min=0.001)
        patient = world.worker(part_delay_s=3600.0, copy_time=slow)
        await patient.handle(world.request(claimed, ledger_id))
        assert (await world.context(ledger_id)).complete

    run_virtual(main())


def test_a_request_that_moves_to_another_worker_outlives_the_one_that_was_at_it():
    """Nothing else asks for that ledger: no policy wants it in tier 2, and no admin."""

    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        asked = world.request(claimed, ledger_id, Trigger.ADMIN)
        await world.queue.publisher().publish(
            asked.topic, key=asked.key, value=asked.value, headers=asked.headers
        )
        slow = asyncio.create_task(world.worker(part_delay_s=HOUR, name="w1").handle(asked))
        await asyncio.sleep(10)
        stop, source = asyncio.Event(), world.queue.source([TOPICS.requested], group="g")
        handle = world.worker(name="w2").handle
        limits = WorkerLimits(in_flight_max=1, drain_s_max=5)
        async with asyncio.TaskGroup() as group:
            group.create_task(run_worker(source, handle, stop=stop, limits=limits))
            # Far longer than the tries of a request that fails take.
            await asyncio.sleep(HOUR / 2)
            assert world.queue.lag(TOPICS.requested, "g") == 1
            slow.cancel()
            await asyncio.sleep(60)
            stop.set()
        assert (await world.context(ledger_id)).complete
        assert world.queue.lag(TOPICS.requested, "g") == 0
        results = [parse_result(one) for one in world.queue.events(TOPICS.completed)]
        assert [(one.outcome, one.worker) for one in results] == [
            (pb.OffloadResult.OUTCOME_COMPLETED, "w2")
        ]

    run_virtual(main())


def test_deliveries_that_met_a_lock_are_no_tries_that_failed(monkeypatch):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        asked = world.request(claimed, ledger_id)
        slow = asyncio.create_task(world.worker(part_delay_s=HOUR, name="w1").handle(asked))
        await asyncio.sleep(10)
        worker = world.worker(deliveries_max=3, name="w2")
        for attempt in range(1, 11):
            with pytest.raises(LockedError):
                await worker.handle(replace(asked, attempt=attempt))
        slow.cancel()
        await asyncio.wait([slow])

        async def fail(*_, **__):
            raise RetryableError("busy")

        monkeypatch.setattr(worker._offloader, "offload", fail)
        for attempt in (11, 12):
            with pytest.raises(RetryableError, match="busy"):
                await worker.handle(replace(asked, attempt=attempt))
        assert not world.queue.events(TOPICS.dead_letter)
        await worker.handle(replace(asked, attempt=13))
        assert len(world.queue.events(TOPICS.dead_letter)) == 1
        # Delivered from the beginning it has all its tries, and no more than that.
        for attempt in (1, 2):
            with pytest.raises(RetryableError, match="busy"):
                await worker.handle(replace(asked, attempt=attempt))
        await worker.handle(replace(asked, attempt=3))
        assert len(world.queue.events(TOPICS.dead_letter)) == 2

    run_virtual(main())


def test_the_trace_of_a_request_is_that_of_its_result_and_of_its_log_lines():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        request = world.request(claimed, ledger_id)
        trace = trace_of(request)
        assert trace is not None
        await world.worker().handle(request)
        (event,) = world.queue.events(TOPICS.completed)
        told = trace_of(event)
        assert told is not None
        assert told.trace_id == trace.trace_id
        assert told.span_id != trace.span_id
        return trace.trace_id.hex()

    with capture_logs(processors=[_with_context]) as lines:
        trace_id = run_virtual(main())
    begun = [one for one in lines if one["event"] in {"attempt.begun", "request.handled"}]
    assert len(begun) == 2
    assert {one["trace_id"] for one in begun} == {trace_id}


def _with_context(logger, name, line):
    import structlog

    return structlog.contextvars.merge_contextvars(logger, name, line)


def test_a_request_without_a_trace_has_a_result_without_one():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        request = world.request(claimed, ledger_id)
        bare = {name: one for name, one in request.headers.items() if name != "traceparent"}
        await world.worker().handle(replace(request, headers=bare))
        (event,) = world.queue.events(TOPICS.completed)
        assert "traceparent" not in event.headers
        assert (await world.context(ledger_id)).complete

    run_virtual(main())


def test_what_can_not_be_put_aside_comes_again_and_holds_nobody_up(monkeypatch):
    """A dead-letter topic that is denied to us loses no event, and ends no worker."""

    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        publish, denied = MemoryEventPublisher.publish, True

        async def refuse(self, topic, *, key, value, headers):
            if denied and topic == TOPICS.dead_letter:
                raise RefusedError("not allowed", reason=Reason.PERMISSION_DENIED)
            await publish(self, topic, key=key, value=value, headers=headers)

        monkeypatch.setattr(MemoryEventPublisher, "publish", refuse)
        publisher = world.queue.publisher()
        garbage = Event(topic=TOPICS.requested, key=b"?", value=b"\xff", headers={})
        for event in (garbage, world.request(claimed, ledger_id)):
            await publisher.publish(
                event.topic, key=event.key, value=event.value, headers=event.headers
            )
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(
                run_worker(
                    world.queue.source([TOPICS.requested], group="g"),
                    world.worker().handle,
                    stop=stop,
                    limits=WorkerLimits(in_flight_max=1, drain_s_max=5),
                )
            )
            await asyncio.sleep(60)
            assert (await world.context(ledger_id)).complete
            assert not world.queue.events(TOPICS.dead_letter)
            denied = False
            await asyncio.sleep(60)
            assert len(world.queue.events(TOPICS.dead_letter)) == 1
            stop.set()
        assert world.queue.lag(TOPICS.requested, "g") == 0

    with capture_logs() as lines:
        run_virtual(main())
    assert next(one for one in lines if one["event"] == "event.refused")["log_level"] == "error"


def test_the_history_has_each_failed_attempt_with_its_error_as_the_store_told_it(monkeypatch):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        worker = world.worker()
        told = RetryableError("write b/k: busy (SlowDown, request ABC123)")

        async def fail(*_, **__):
            raise told

        offload = worker._offloader.offload
        monkeypatch.setattr(worker._offloader, "offload", fail)
        request = world.request(claimed, ledger_id)
        for _ in range(2):
            with pytest.raises(RetryableError):
                await worker.handle(request)
        monkeypatch.setattr(worker._offloader, "offload", offload)
        await worker.handle(request)
        history = (await world.context(ledger_id)).history
        assert [one.outcome for one in history] == [
            AttemptOutcome.FAILED, AttemptOutcome.FAILED, AttemptOutcome.COMPLETE,
        ]  # fmt: skip
        assert all("request ABC123" in one.error for one in history[:2])
        assert {one.worker for one in history} == {"w1"}

    run_virtual(main())


def test_an_error_without_an_end_makes_a_result_with_one(monkeypatch):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        worker = world.worker(deliveries_max=1)

        async def fail(*_, **__):
            raise RetryableError("x" * 10**6)

        monkeypatch.setattr(worker._offloader, "offload", fail)
        await worker.handle(world.request(claimed, ledger_id))
        (event,) = world.queue.events(TOPICS.completed)
        assert len(parse_result(event).error_message) == ERROR_LEN_MAX

    run_virtual(main())


def test_kafka_says_what_it_refuses_for_good():
    from confluent_kafka import KafkaError

    denied = as_error(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), "it", "b:1")
    assert isinstance(denied, RefusedError)


async def trimmed(world: World, claimed: Stream, ledger_id: LedgerId, *, forgotten: bool) -> None:
    retention = world.catalog().retention
    incarnation = claimed.incarnation
    await retention.begin_trim(STREAM, incarnation, [ledger_id], grounds=await world.grounds())
    if forgotten:
        await retention.drop_tier1(ledger_id)
        await retention.finish_trim(STREAM, incarnation, ledger_id)


async def deleted(world: World, claimed: Stream, ledger_id: LedgerId) -> None:
    retention = world.catalog().retention
    await retention.begin_stream_deletion(STREAM)
    await trimmed(world, claimed, ledger_id, forgotten=True)
    await retention.remove_stream(STREAM, claimed.incarnation)


def check_stale(world: World, match: str) -> None:
    """The one request was acknowledged with a result that says why, and nobody has to look."""
    (event,) = world.queue.events(TOPICS.completed)
    result = parse_result(event)
    assert result.outcome == pb.OffloadResult.OUTCOME_STALE
    assert result.error_reason == Reason.LEDGER_NOT_FOUND.value
    assert "came too late" in result.error_message
    assert match in result.error_message
    assert not world.queue.events(TOPICS.dead_letter)
    assert not world.bucket.objects


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_request_for_a_ledger_that_was_trimmed_is_stale(forgotten):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        request = world.request(claimed, ledger_id)
        await trimmed(world, claimed, ledger_id, forgotten=forgotten)
        with capture_logs() as lines:
            await world.worker().handle(request)
        check_stale(world, "trimmed")
        (told,) = [one for one in lines if one["event"] == "request.dropped"]
        assert "came too late" in told["cause"]

    run_virtual(main())


@pytest.mark.parametrize("anew", [False, True])
def test_a_request_for_a_ledger_of_a_stream_that_was_deleted_is_stale(anew):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        request = world.request(claimed, ledger_id)
        await deleted(world, claimed, ledger_id)
        if anew:
            await world.stream()
        await world.worker().handle(request)
        check_stale(world, "made anew" if anew else "not any more")

    run_virtual(main())


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_ledger_that_is_trimmed_between_two_looks_makes_the_request_stale(forgotten, monkeypatch):
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        worker = world.worker()
        begin = worker._catalog.contexts.begin_attempt

        async def late(*args, **named):
            await trimmed(world, claimed, ledger_id, forgotten=forgotten)
            return await begin(*args, **named)

        monkeypatch.setattr(worker._catalog.contexts, "begin_attempt", late)
        await worker.handle(world.request(claimed, ledger_id))
        check_stale(world, "trimmed")

    run_virtual(main())


def test_a_ledger_that_never_was_is_for_someone_to_look_at_whatever_was_trimmed():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        await trimmed(world, claimed, ledger_id, forgotten=True)
        await world.worker().handle(world.request(claimed, LedgerId(ledger_id + 500)))
        await world.worker().handle(world.request(claimed, await bare_ledger(world)))
        results = [parse_result(one).outcome for one in world.queue.events(TOPICS.completed)]
        assert results == [pb.OffloadResult.OUTCOME_REFUSED] * 2
        assert len(world.queue.events(TOPICS.dead_letter)) == 2

    run_virtual(main())


def test_an_attempt_that_fails_when_its_ledger_is_gone_cleans_itself_and_is_no_dead_letter():
    async def main():
        world = World()
        claimed, ledger_id = await sealed(world)
        down = Faults(world.rng)
        worker = world.worker(down, part_delay_s=10.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.handle(world.request(claimed, ledger_id)))
            await asyncio.sleep(5)
            await world.catalog().store.delete(paths.context_path(ledger_id), version=-1)
            down.next("objects.complete_upload", Outcome.REFUSED)
        (event,) = world.queue.events(TOPICS.completed)
        assert parse_result(event).outcome == pb.OffloadResult.OUTCOME_SUPERSEDED
        assert not world.queue.events(TOPICS.dead_letter)
        assert not world.bucket.objects
        assert not world.bucket.uploads

    run_virtual(main())
