"""One trace over real processes and a real broker, as a collector gets it by OTLP."""

import asyncio
import json
from collections import defaultdict

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = [pytest.mark.integration]

WANTED = {
    "append": "ingest",
    "ledger": "ingest",
    "ledger.close": "ingest",
    "offload.request": "scheduler",
    "offload.process": "offloader",
    "offload.attempt": "offloader",
    "offload.part": "offloader",
    "offload.verify": "offloader",
    "offload.complete": "offloader",
}


class Collector:
    """Takes spans: their names by trace, and the service of each."""

    def __init__(self):
        self.spans: dict[bytes, set[tuple[str, str]]] = defaultdict(set)
        self.url = ""

    async def take(self, request):
        body = ExportTraceServiceRequest.FromString(await request.read())
        for resource in body.resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            service = named["service.name"].removeprefix("tierlog-")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.trace_id].add((span.name, service))
        return web.Response(body=b"", content_type="application/x-protobuf")


@pytest.fixture
async def collector():
    found = Collector()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/traces", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield found
    await runner.cleanup()


async def test_a_ledgers_way_through_all_processes_is_one_trace(cli, start_nodes, collector):
    cluster = await start_nodes(
        1,
        TIERLOG_TRACING__ENABLED="true",
        TIERLOG_TRACING__ENDPOINT_URL=collector.url,
        TIERLOG_TRACING__APPEND_EVERY="1",
    )
    state = cluster.state_dir
    (await cli("append", "traced", stdin=b"one\ntwo\n", state_dir=state)).check(0)
    (await cli("stream", "seal", "traced", state_dir=state)).check(0)
    (await cli("offload", "run", "traced", "--wait", state_dir=state)).check(0)
    shown = await cli("ledger", "ls", "traced", "-o", "json", state_dir=state)
    assert len(json.loads(shown.check(0).stdout)) == 1
    async with asyncio.timeout(60):
        while not any(set(WANTED.items()) <= found for found in collector.spans.values()):
            await asyncio.sleep(0.2)
    (whole,) = [found for found in collector.spans.values() if set(WANTED.items()) <= found]
    assert whole == set(WANTED.items())
