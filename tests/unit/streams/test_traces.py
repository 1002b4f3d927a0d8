"""One trace from an append to the end of the copy's life, over three processes and a queue.

The SDK's own exporter in memory takes the spans; each process has a tracer of its own, and they
share nothing but metadata, queue and bucket.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,no-untyped-call"

import asyncio
import contextlib
from uuid import UUID

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import ALONE, STREAM, SmallCluster, draft
from tests.unit.offload.gates import OpenGate
from tierlog.adapters.memory.events import MemoryEvents
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.adapters.otel import OtelTracer
from tierlog.format.envelope import Traceparent
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import OffloadState
from tierlog.model.policy import Policy
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.manifests import BucketGuard, ManifestStore
from tierlog.offload.messages import OffloadRequest, Stationery, Topics, Trigger, trace_of
from tierlog.ports.events import Event
from tierlog.ports.tracing import CALLER, NO_TRACER, LedgerLife, within
from tierlog.runtime.redaction import learn_secrets
from tierlog.runtime.settings import Settings
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog.wiring.tracing import open_tracer
from tierlog_ingest.streams.appends import QueueBudget
from tierlog_ingest.streams.owners import Owners
from tierlog_ingest.streams.parts import OwnerParts
from tierlog_offloader.worker import OffloadWorker, WorkerSettings
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits

TOPICS = Topics.of("t")
LIMITS = SchedulerLimits(interval_s=1, request_again_s=60, sweep_again_s=300)
AT_ONCE = Policy(offload_time_ms=0, deletion_lag_ms=0)
LIFE = LedgerLife(UUID(int=5), LedgerId(3))
PLACE = Traceparent(trace_id=bytes(range(1, 17)), span_id=bytes(range(1, 9)))


def tracer(exporter, service="test", **options):
    return OtelTracer(SimpleSpanProcessor(exporter), service=service, **options)


class World(SmallCluster):
    """A cluster with a bucket and a queue; ``exporter`` has the spans of all its processes."""

    def __init__(self, **options):
        super().__init__(1)
        self.bucket = MemoryObjects(self.clock)
        self.queue = MemoryEvents(self.rng)
        self.exporter = InMemorySpanExporter()
        self.options = options

    def tracer(self, service):
        if self.options.get("off"):
            return NO_TRACER
        return tracer(self.exporter, service, **{"append_every": 1, **self.options})

    def spans(self, name=None):
        return [one for one in self.exporter.get_finished_spans() if name in {None, one.name}]

    def offloader(self):
        settings = Tier2Settings(bucket="b", cluster_id=UUID(int=7))
        return BlockOffloader(self.bucket.connect(), settings)

    def stationery(self, source):
        return Stationery(TOPICS, source=source, clock=self.clock, ids=self.ids)

    def scheduler(self):
        return Scheduler(
            catalog=self.catalog(),
            offloader=self.offloader(),
            publisher=self.queue.publisher(),
            stationery=self.stationery("scheduler"),
            manifests=OpenGate(),
            clock=self.clock,
            ids=self.ids,
            limits=LIMITS,
            tracer=self.tracer("scheduler"),
        )

    def worker(self):
        catalog = self.catalog()
        nodes = self.directory(catalog)
        manifests = ManifestStore(
            self.bucket.connect(), cluster_id=UUID(int=7), clock=self.clock, ids=self.ids
        )
        return OffloadWorker(
            catalog=catalog,
            open_ledger=lambda one, metadata: Tier1ReadHandle(one, metadata, nodes),
            offloader=self.offloader(),
            guard=BucketGuard(manifests),
            publisher=self.queue.publisher(),
            stationery=self.stationery("w1"),
            clock=self.clock,
            ids=self.ids,
            settings=WorkerSettings(name="w1"),
            tracer=self.tracer("offloader"),
        )

    @contextlib.asynccontextmanager
    async def owners(self):
        catalog = self.catalog()
        parts = OwnerParts(
            node_id="n1",
            catalog=catalog,
            nodes=self.directory(catalog),
            recovery=self.recovery(catalog),
            clock=self.clock,
            ids=self.ids,
            settings=ALONE,
            budget=QueueBudget(1 << 20),
            tracer=self.tracer("ingest"),
        )
        owners = Owners(parts)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(owners.run())
            await asyncio.sleep(0)
            yield owners
            await owners.drain()

    async def live(self):
        """Append, close, offload and delete locally; returns the ledger and its stream."""
        catalog = await self.start(policy=AT_ONCE)
        async with self.owners() as owners:
            (span,) = await owners.submit(STREAM, draft(b"one", b"two"))
            await asyncio.sleep(3)
            await owners.seal(STREAM)
        stop = asyncio.Event()
        source = self.queue.source([TOPICS.requested], group="offloader")
        limits = WorkerLimits(in_flight_max=1, drain_s_max=5)
        async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.scheduler().run(stop))
            tasks.create_task(run_worker(source, self.worker().handle, stop=stop, limits=limits))
            while True:
                context = await catalog.contexts.get(span.ledger_id)
                if context.state is OffloadState.TIER1_DELETED:
                    break
                await asyncio.sleep(1)
            stop.set()
        return span.ledger_id, (await catalog.streams.snapshot(STREAM)).stream


def _parents(spans):
    """Return each span's name with that of the span above it."""
    names = {one.context.span_id: one.name for one in spans}
    return {(one.name, names.get(one.parent.span_id) if one.parent else None) for one in spans}


def test_one_trace_from_append_to_the_local_copys_end():
    world = World()
    ledger_id, stream = run_virtual(world.live())
    spans = world.spans()
    assert len({one.context.trace_id for one in spans}) == 1
    life = LedgerLife(stream.incarnation, ledger_id).traceparent(1.0)
    assert spans[0].context.trace_id == int.from_bytes(life.trace_id, "big")
    assert _parents(spans) == {
        ("ledger", None),
        ("append", "ledger"),
        ("ledger.close", "ledger"),
        ("offload.request", "ledger"),
        ("offload.process", "offload.request"),
        ("offload.attempt", "offload.process"),
        ("offload.part", "offload.attempt"),
        ("offload.verify", "offload.attempt"),
        ("offload.complete", "offload.process"),
        ("tier1.delete", "ledger"),
        ("offload.verify", "tier1.delete"),
    }
    services = {one.name: one.resource.attributes["service.name"] for one in spans}
    assert services["append"] == "tierlog-ingest"
    assert services["offload.request"] == services["tier1.delete"] == "tierlog-scheduler"
    assert services["offload.part"] == "tierlog-offloader"
    assert all(one.status.status_code is not StatusCode.ERROR for one in spans)
    (part,) = world.spans("offload.part")
    assert part.attributes["tierlog.part"] == 1
    assert part.attributes["tierlog.bytes"] > 0
    (request,) = world.spans("offload.request")
    assert request.attributes["messaging.destination.name"] == TOPICS.requested
    (first,) = world.spans("ledger")
    assert first.attributes["tierlog.ledger_id"] == ledger_id
    assert first.end_time - first.start_time >= 3e9, "from the ledger's opening on"


def test_the_request_on_the_queue_carries_the_trace_and_so_does_the_result():
    world = World()
    ledger_id, stream = run_virtual(world.live())
    life = LedgerLife(stream.incarnation, ledger_id).traceparent(1.0)
    for topic in (TOPICS.requested, TOPICS.completed):
        (event,) = world.queue.events(topic)
        place = trace_of(event)
        assert place.trace_id == life.trace_id
        assert place.sampled
        assert place.span_id != life.span_id


def test_without_a_tracer_all_works_and_a_request_begins_a_trace_of_its_own():
    world = World(off=True)
    run_virtual(world.live())
    assert world.spans() == []
    (event,) = world.queue.events(TOPICS.requested)
    assert trace_of(event).sampled


def test_of_the_ledgers_a_share_is_traced_by_all_or_by_none():
    world = World(ledgers_share=0.0)
    run_virtual(world.live())
    assert world.spans() == []
    (event,) = world.queue.events(TOPICS.requested)
    assert not trace_of(event).sampled
    lives = [LedgerLife(UUID(int=number), LedgerId(number)) for number in range(2000)]
    sampled = [one.traceparent(0.25).sampled for one in lives]
    assert 400 < sum(sampled) < 600
    assert sum(one.traceparent(1.0).sampled for one in lives) == len(lives)
    assert len({one.traceparent(1.0).trace_id for one in lives}) == len(lives)


def test_one_in_so_many_appends_has_a_span_with_a_link_to_its_caller():
    world = World(append_every=3)

    async def main():
        await world.start()
        async with world.owners() as owners:
            for number in range(7):
                CALLER.set(PLACE if number == 5 else None)
                await owners.submit(STREAM, draft(b"%d" % number))
            CALLER.set(None)
        return world.spans("append")

    plain, called = run_virtual(main())
    assert [len(plain.links), len(called.links)] == [0, 1]
    assert called.links[0].context.trace_id == int.from_bytes(PLACE.trace_id, "big")
    assert called.attributes["tierlog.entries"] == 1


def test_no_append_is_watched_when_none_is_wanted():
    world = World(append_every=0)
    run_virtual(world.live())
    assert world.spans("append") == []
    assert len(world.spans("ledger")) == 1


def test_a_request_of_somebody_else_is_followed_in_their_trace():
    world = World()

    async def main():
        catalog = await world.start()
        async with world.owners() as owners:
            (span,) = await owners.submit(STREAM, draft(b"one"))
        snapshot = await catalog.streams.snapshot(STREAM)
        request = OffloadRequest(
            stream=STREAM,
            incarnation=snapshot.stream.incarnation,
            ledger_id=span.ledger_id,
            trigger=Trigger.ADMIN,
            requested_ms=1,
        )
        topic, key, value, headers = world.stationery("them").request(request, PLACE)
        world.exporter.clear()
        await world.worker().handle(Event(topic=topic, key=key, value=value, headers=headers))

    run_virtual(main())
    (process,) = world.spans("offload.process")
    assert process.context.trace_id == int.from_bytes(PLACE.trace_id, "big")
    assert process.parent.span_id == int.from_bytes(PLACE.span_id, "big")
    assert world.spans("offload.complete")[0].context.trace_id == process.context.trace_id


def test_an_error_is_told_without_its_secrets_and_without_a_stack():
    exporter = InMemorySpanExporter()
    learn_secrets(["pl4nted-in-an-error"])
    one = tracer(exporter)
    error = RetryableError("said pl4nted-in-an-error", reason=Reason.UNAVAILABLE, remedy="wait")
    with pytest.raises(RetryableError), one.span("outer", parent=LIFE), within("inner"):
        raise error
    with pytest.raises(KeyError), one.span("bug", parent=LIFE):
        {}["pl4nted-in-an-error"]
    for span in exporter.get_finished_spans():
        assert span.status.status_code is StatusCode.ERROR
        assert span.events == ()
        assert "pl4nted" not in span.to_json()
    assert exporter.get_finished_spans()[0].status.description == "UNAVAILABLE: said ***"
    assert exporter.get_finished_spans()[-1].status.description == "KeyError"


def test_outside_of_a_span_nothing_is_traced():
    with within("alone", x=1) as span:
        span.set(y=2)
        assert span.traceparent is None
    with NO_TRACER.span("none", parent=LIFE, first=True) as span:
        assert span.traceparent is None


async def test_tracing_is_off_by_default_and_refuses_headers_that_are_none():
    async with open_tracer(Settings(), "test") as found:
        assert found is NO_TRACER
    wanted = Settings.model_validate({"tracing": {"enabled": True, "headers": "nonsense"}})
    with pytest.raises(RefusedError, match="NAME=VALUE"):
        async with open_tracer(wanted, "test"):
            raise AssertionError("never")


async def test_spans_reach_a_collector_by_http():
    """A server takes what OTLP sends; a collector that is away holds up nobody."""
    from aiohttp import web
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[tuple[str, ExportTraceServiceRequest]] = []

    async def take(request):
        body = ExportTraceServiceRequest.FromString(await request.read())
        taken.append((request.headers["authorization"], body))
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    tracing = {
        "enabled": True,
        "endpoint_url": f"http://127.0.0.1:{port}/v1/traces",
        "headers": "authorization=Bearer hush",
        "export_timeout_s": 5,
    }
    try:
        settings = Settings.model_validate({"tracing": tracing})
        async with open_tracer(settings, "offloader", instance="w1") as found:
            with found.span("work", parent=LIFE, part=3):
                pass
    finally:
        await runner.cleanup()
    ((authorization, body),) = taken
    assert authorization == "Bearer hush"
    (sent,) = body.resource_spans
    named = {one.key: one.value.string_value for one in sent.resource.attributes}
    assert (named["service.name"], named["service.instance.id"]) == ("tierlog-offloader", "w1")
    assert sent.scope_spans[0].spans[0].trace_id == LIFE.traceparent(1.0).trace_id
