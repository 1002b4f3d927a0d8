"""The offloaders' queue on a real Kafka: slow uploads, rebalances, drains, poison, strangers.

Design: protocols.md section 3, step 8; reliability.md B23 (max.poll.interval exceeded), B24 (poison
message), C2 (rebalance in mid-upload, poison event, duplicates).
"""

import asyncio
import contextlib
import json
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.integration.test_offload_crash import STREAM, filled
from tests.integration.test_offload_on_servers import Place, some_entries
from tests.plugins.fix_corner import environment_of
from tierlog.adapters.kafka.source import KafkaEventSource
from tierlog.client import open_client
from tierlog.embedded.nodes import quorum_environment
from tierlog.embedded.ports import Ports
from tierlog.embedded.services import EmbeddedServices, ServiceSpec, service_spec
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadContext
from tierlog.model.policy import MIB, Policy
from tierlog.offload.dead_letters import LetterState
from tierlog.offload.messages import Topics, parse_result, trace_of
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import apply_queue_topics, open_dead_letters
from tierlog.wiring.offload import open_offload_parts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "request_offload.py"


def lag(settings: Settings) -> int:
    """Return how many requests the offloaders' group has not committed; blocks.

    A consumer that never joins asks. (An admin client's own call for it kills the process when the
    group's coordinator is moving, in librdkafka 2.16.)
    """
    kafka, topic = settings.kafka, Topics.of(settings.kafka.topic_prefix).requested
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "group.id": kafka.offloader_group}
    )
    try:
        places = [TopicPartition(topic, number) for number in range(kafka.partitions)]
        left = 0
        for one in consumer.committed(places, timeout=10):
            bounds = consumer.get_watermark_offsets(one, timeout=10)
            assert bounds is not None
            left += bounds[1] - max(0, one.offset)
        return left
    finally:
        consumer.close()


async def until_no_lag(settings: Settings, *, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(KafkaException):  # it is only just back
                if not await asyncio.to_thread(lag, settings):
                    return
            await asyncio.sleep(0.2)


def impatient(settings: Settings, *, part_delay_s: float) -> Settings:
    """Return settings under which an upload takes longer than Kafka waits for a poll."""
    return settings.model_copy(
        update={
            "kafka": settings.kafka.model_copy(update={"poll_interval_max_s": 6.0}),
            "offloader": settings.offloader.model_copy(update={"part_delay_s": part_delay_s}),
        }
    )


async def test_an_upload_longer_than_the_poll_interval_is_one_attempt_and_is_committed(
    corner: Settings,
):
    settings = impatient(corner, part_delay_s=8.0)
    async with open_offload_parts(settings) as parts:
        place = Place(settings, parts, {})
        claimed = await place.stream()
        ledger_id = await place.seal(claimed, some_entries(1, total=12 * MIB))
        began_s = time.monotonic()
        async with place.working():
            await place.ask(claimed, ledger_id)
            context = await place.until_complete(ledger_id)
            assert time.monotonic() - began_s > 8, "it was to take longer than the interval"
            await until_no_lag(settings)
        assert (context.attempt_count, context.abandoned) == (1, ())
        await place.check_bucket()


async def test_a_member_that_joins_in_mid_upload_takes_none_of_it_away(corner: Settings):
    settings = impatient(corner, part_delay_s=3.0)
    async with open_offload_parts(settings) as parts:
        place = Place(settings, parts, {})
        claimed = await place.stream()
        first = [await place.seal(claimed, some_entries(n, total=12 * MIB)) for n in range(2)]
        async with place.working():
            for ledger_id in first:
                await place.ask(claimed, ledger_id)
            await begun(place, first[0])
            async with place.working():  # joins, takes some partitions, leaves again
                later = await place.seal(claimed, some_entries(9, total=MIB))
                await place.ask(claimed, later)
                for ledger_id in (*first, later):
                    await place.until_complete(ledger_id)
            await until_no_lag(settings)
        for ledger_id in (*first, later):
            context = await parts.catalog.contexts.get(ledger_id)
            assert context is not None
            assert context.complete
            assert context.attempt_count <= 2
            await place.check(ledger_id)


class Polling:
    """The first member of the group polls only while ``going`` is set; its heart beats on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members: list[KafkaEventSource] = []
        self.going = threading.Event()
        self.going.set()
        look = KafkaEventSource._pause_or_resume

        def look_late(source: KafkaEventSource, consumer: Consumer) -> None:
            if source not in self.members:
                self.members.append(source)
            if source is self.members[0]:
                self.going.wait()
            look(source, consumer)

        monkeypatch.setattr(KafkaEventSource, "_pause_or_resume", look_late)

    def held(self, member: int) -> int:
        """Return how many partitions a member takes for its own."""
        return len(self.members[member]._holdings) if member < len(self.members) else 0


async def test_a_member_that_does_not_poll_in_time_loses_all_and_doubles_nothing(
    corner: Settings, monkeypatch
):
    settings, polling = impatient(corner, part_delay_s=11.0), Polling(monkeypatch)
    async with open_offload_parts(settings) as parts:
        place = Place(settings, parts, {})
        claimed = await place.stream()
        ledger_id = await place.seal(claimed, some_entries(1, total=12 * MIB))
        try:
            async with place.working():
                await place.ask(claimed, ledger_id)
                first = await begun(place, ledger_id)
                async with place.working():
                    polling.going.clear()
                    async with asyncio.timeout(40):
                        while polling.held(1) < settings.kafka.partitions:
                            await asyncio.sleep(0.1)
                    assert not (await of(place, ledger_id)).complete, "still in mid-upload"
                    await place.until_complete(ledger_id)
                    await until_no_lag(settings)
                    assert polling.held(0) == settings.kafka.partitions, "it was not told yet"
                    polling.going.set()
        finally:
            polling.going.set()
        again = await of(place, ledger_id)
        assert (again.uuid, again.attempt_count, again.abandoned) == (first.uuid, 1, ())
        await place.check(ledger_id)
        await place.check_bucket()


async def of(place: Place, ledger_id: LedgerId) -> OffloadContext:
    context = await place.parts.catalog.contexts.get(ledger_id)
    assert context is not None
    return context


async def test_a_broker_away_in_mid_upload_costs_no_second_attempt(corner: Settings, servers):
    """What is complete is complete; that it is so is told, and committed, once Kafka is back."""
    settings = impatient(corner, part_delay_s=3.0)
    async with open_offload_parts(settings) as parts:
        place = Place(settings, parts, {})
        claimed = await place.stream()
        ledger_id = await place.seal(claimed, some_entries(4, total=12 * MIB))
        async with place.working():
            await place.ask(claimed, ledger_id)
            await begun(place, ledger_id)
            servers.kill("kafka")
            try:
                context = await place.until_complete(ledger_id)
            finally:
                await servers.restart("kafka")
            assert context.attempt_count == 1
            await until_no_lag(settings, seconds=90)
        again = await parts.catalog.contexts.get(ledger_id)
        assert again is not None
        assert (again.attempt_count, again.uuid) == (1, context.uuid)
        assert await results_of(settings, ledger_id)
        await place.check_bucket()


async def begun(place: Place, ledger_id: LedgerId) -> OffloadContext:
    async with asyncio.timeout(30):
        while True:
            context = await place.parts.catalog.contexts.get(ledger_id)
            if context is not None and context.uuid is not None:
                return context
            await asyncio.sleep(0.1)


async def test_poison_among_requests_is_put_aside_exactly_and_holds_none_up(corner: Settings):
    rng = random.Random(5)
    async with open_offload_parts(corner) as parts:
        place = Place(corner, parts, {})
        claimed = await place.stream()
        ledgers = [await place.seal(claimed, some_entries(n, total=50_000)) for n in range(6)]
        asked = [ledger_id for ledger_id in ledgers for _ in range(rng.randint(1, 3))]
        rng.shuffle(asked)
        poison = 0
        for number, ledger_id in enumerate(asked):
            await place.ask(claimed, ledger_id)
            if number % 3 == 0:
                poison += 1
                await parts.publisher.publish(
                    place.topics.requested, key=rng.randbytes(4), value=rng.randbytes(50),
                    headers={"ce_specversion": rng.choice([b"1.0", b"9.0", b"\xff"])},
                )  # fmt: skip
        letters = open_dead_letters(corner, parts.publisher, place.stationery)
        for _ in range(2):  # the second worker finds nothing to do again
            async with place.working():
                for ledger_id in ledgers:
                    await place.until_complete(ledger_id)
                await until_no_lag(corner)
        found = await letters.find(state=None)
        assert len(found) == poison
        assert {one.state for one in found} == {LetterState.WAITING}
        assert not any(one.is_request for one in found)
        counts = [(await parts.catalog.contexts.get(one)).attempt_count for one in ledgers]  # type: ignore[union-attr]
        assert counts == [1] * len(ledgers)
        await place.check_bucket()


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[EmbeddedServices]:
    embedded = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    yield embedded
    await embedded.stop()


@contextlib.asynccontextmanager
async def uploading(
    services: EmbeddedServices, corner: Settings, folder: Path, **env: str
) -> AsyncIterator[tuple[Place, LedgerId]]:
    """Give a ledger of three blocks in the middle of its upload by a process."""
    common = {
        **environment_of(corner),
        **quorum_environment(1, {}),
        "TIERLOG_INGEST__DATA_DIR": str(folder / "data"),
        "TIERLOG_SCHEDULER__INTERVAL_S": "0.5",
        "TIERLOG_SCHEDULER__REQUEST_AGAIN_S": "60",
    }
    ports = Ports(folder / "ports.json")

    def spec(kind: str, *purposes: str, **more: str) -> ServiceSpec:
        return service_spec(kind, ports=ports.take(kind, list(purposes)), env={**common, **more})

    ingest = spec("ingest", "http", "grpc", "wire")
    await services.start([ingest, spec("scheduler", "http"), spec("offloader", "http", **env)])
    await filled(ingest.ports["grpc"])
    async with open_offload_parts(corner) as parts:
        place = Place(corner, parts, {})
        async with asyncio.timeout(30):
            while not await parts.objects.list_uploads(corner.s3.key_prefix):
                await asyncio.sleep(0.1)
        (listed,) = (await parts.catalog.streams.snapshot(STREAM)).ledgers
        yield place, listed.ledger_id


async def test_sigterm_lets_an_upload_end_and_commits_it(
    services: EmbeddedServices, corner: Settings, tmp_path: Path
):
    slow = {"TIERLOG_OFFLOADER__PART_DELAY_S": "2", "TIERLOG_OFFLOADER__DRAIN_S_MAX": "60"}
    async with uploading(services, corner, tmp_path, **slow) as (place, ledger_id):
        child = services.children["offloader"]
        child.signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await child.wait() == 0
        context = await place.parts.catalog.contexts.get(ledger_id)
        assert context is not None
        assert (context.complete, context.attempt_count) == (True, 1)
        assert await asyncio.to_thread(lag, corner) == 0


async def test_sigterm_gives_up_what_takes_too_long_and_another_worker_does_it(
    services: EmbeddedServices, corner: Settings, tmp_path: Path
):
    slow = {
        "TIERLOG_OFFLOADER__PART_DELAY_S": "600",
        "TIERLOG_OFFLOADER__DRAIN_S_MAX": "1",
        "TIERLOG_OFFLOADER__GIVE_UP_S_MAX": "2",
    }
    async with uploading(services, corner, tmp_path, **slow) as (place, ledger_id):
        child = services.children["offloader"]
        began_s = time.monotonic()
        child.signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await child.wait() == 0
        assert time.monotonic() - began_s < 15
        assert b"worker.drain_cut_short" in services.log("offloader").read_bytes()
        assert await asyncio.to_thread(lag, corner) == 1, "committed only after the effect"
        await services.restart("offloader", env={"TIERLOG_OFFLOADER__PART_DELAY_S": "0"})
        # At once, from the queue: its lock went with it, and the scheduler asks much later.
        context = await place.until_complete(ledger_id, seconds=30)
        assert context.attempt_count == 2
        await until_no_lag(corner)


async def test_a_stranger_asks_over_the_queue_and_follows_the_trace(cluster):
    """docs/examples/request_offload.py has no code of ours, and is answered."""
    stream, settings = "queue-stranger", cluster.settings
    async with open_client(settings) as client:
        policy = Policy(offload_time_ms=10**10, offload_size_bytes=10**15)
        await client.create_stream(stream, policy=policy)
        async with client.writer(stream) as writer:
            await writer.send(b"an event")
        await client.seal(stream)
        await apply_queue_topics(settings, dry_run=False)
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLE), stream,
            "--rest", f"http://{settings.client.scheduler_http_address}",
            "--kafka", settings.kafka.bootstrap_servers, "--prefix", settings.kafka.topic_prefix,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        (told,) = out.decode().splitlines()
        trace_id = told.split()[-1]

        async def complete() -> bool:
            (ledger,) = (await client.stream(stream))["ledgers"]
            return bool(ledger["complete"])

        await cluster.until(complete, what="the stranger's request")
        (ledger,) = await client.attempts(stream)
        assert ledger["attempt_count"] == 1
    results = await results_of(settings, ledger["ledger_id"])
    assert results == [(trace_id, "OUTCOME_COMPLETED")]


async def results_of(settings: Settings, ledger_id: int) -> list[tuple[str, str]]:
    """Return trace and outcome of what was told of a ledger."""
    from tierlog.adapters.kafka.event_log import KafkaEventLog
    from tierlog.proto.v1 import events_pb2 as pb

    log = KafkaEventLog(settings.kafka.bootstrap_servers)
    found: list[tuple[str, str]] = []
    async with asyncio.timeout(30):
        while not found:
            async for one in log.scan(
                Topics.of(settings.kafka.topic_prefix).completed, newest_max=1000
            ):
                result, trace = parse_result(one.event), trace_of(one.event)
                if result.ledger_id == ledger_id and trace is not None:
                    name = pb.OffloadResult.Outcome.Name(result.outcome)
                    found.append((trace.trace_id.hex(), name))
    return found


async def test_the_commands_of_queue_and_offload(cli, cluster):
    stream, state = "queue-commands", cluster.state_dir
    env = {
        "TIERLOG_KAFKA__BOOTSTRAP_SERVERS": cluster.settings.kafka.bootstrap_servers,
        "TIERLOG_KAFKA__TOPIC_PREFIX": cluster.settings.kafka.topic_prefix,
    }

    async def run(*words: str, code: int = 0, **more: str):
        done = (await cli(*words, "-o", "json", state_dir=state, **env, **more)).check(code)
        return json.loads(done.stdout) if code == 0 else done.stderr

    shown = await run("topics", "apply")
    assert [one["topic"].removeprefix("cluster.offload.") for one in shown] == [
        "requested.v1", "completed.v1", "requested.v1.dlq",
    ]  # fmt: skip
    assert not [one for one in shown if one["differs"]]
    assert not [one for one in await run("topics", "show", "--check") if one["done"]]
    fewer = await run("topics", "apply", code=1, TIERLOG_KAFKA__PARTITIONS="1")
    assert "partitions: 12, wanted 1" in fewer

    async with open_client(cluster.settings) as client:
        await client.create_stream(stream)
        async with client.writer(stream) as writer:
            await writer.send(b"an event")
        ledger_id = await client.seal(stream)
    (paused,) = await run("offload", "pause", stream, "--cause", "a look")
    assert paused["pause"]["cause"] == "a look"
    assert "paused: a look" in await run("offload", "run", stream, code=2)
    (resumed,) = await run("offload", "resume", stream)
    assert (resumed["pause"], resumed["states"]) == (None, {"LOCAL": 1})
    await run("offload", "run", stream)
    (status,) = await run("offload", "status", stream, "-w")
    assert (status["wanted"], status["position"]) == (0, f"{ledger_id}:1")
    (attempt,) = await run("offload", "attempts", stream)
    assert (attempt["ledger_id"], attempt["outcome"]) == (ledger_id, "COMPLETE")
    assert await run("offload", "attempts", stream, "--ledger", "999999") == []
    assert await run("offload", "gc", stream, "-w") == []
    await run("offload", "status", "-w", code=2)

    await dead_letters(run, cluster, stream)


async def dead_letters(run, cluster, stream: str) -> None:
    """What is put aside is listed, shown, replayed and dismissed."""
    async with open_offload_parts(cluster.settings) as parts:
        topic = Topics.of(cluster.settings.kafka.topic_prefix).requested
        snapshot = await parts.catalog.streams.snapshot(StreamName(stream))
        place = Place(cluster.settings, parts, {})
        await place.ask(snapshot.stream, LedgerId(10**9))
        await parts.publisher.publish(topic, key=b"?", value=b"\xff garbage", headers={})
        async with asyncio.timeout(30):
            while len(found := await run("dlq", "list")) < 2:
                await asyncio.sleep(0.2)
    wanted = next(one for one in found if one["stream"] == stream)
    garbage = next(one for one in found if one["key"] == "?")
    assert [one["place"] for one in await run("dlq", "list", "--stream", stream)] == [
        wanted["place"]
    ]
    assert (await run("dlq", "show", garbage["place"]))["value_hex"].startswith("ff")
    assert "no offload request" in await run("dlq", "replay", garbage["place"], code=2)
    assert (await run("dlq", "replay", wanted["place"]))["state"] == "replayed"
    async with asyncio.timeout(30):  # it asks for what is not there: it comes back
        while not (again := await run("dlq", "list", "--stream", stream)):
            await asyncio.sleep(0.2)
    assert again[0]["replay_of"] == wanted["place"]
    for one in (again[0], garbage):
        assert (await run("dlq", "dismiss", one["place"]))["state"] == "dismissed"
    assert await run("dlq", "list", "--stream", stream) == []
    assert len(await run("dlq", "list", "--all", "--stream", stream)) == 2
    assert await run("dlq", "replay", "--all", "--stream", stream) == {
        "replayed": [],
        "refused": [],
        "left": 0,
    }
    for words, code in ((("replay",), 2), (("show", "0:99999999"), 3), (("show", "x"), 2)):
        await run("dlq", *words, code=code)
