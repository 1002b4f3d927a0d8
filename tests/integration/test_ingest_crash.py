"""Ingest as a real process on a real disk: what was acknowledged survives ``kill -9``.

Protocols.md section 1: whoever starts again claims, recovers by fence and close what is not
closed, and only then goes on; an acknowledged entry is never lost and keeps its id.
"""

# mypy: disable-error-code="union-attr,var-annotated,assignment"

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import pytest

from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.rpc.ingest import GrpcStreamControl
from tierlog.adapters.rpc.storage_node import ControlConnector
from tierlog.adapters.system import SystemIds
from tierlog.adapters.tcp import TcpTransport
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata
from tierlog.catalog import Catalog
from tierlog.embedded.nodes import quorum_environment
from tierlog.embedded.ports import Ports
from tierlog.embedded.services import EmbeddedServices, service_spec
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.ledger import LedgerState
from tierlog.model.policy import MIB, Policy
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_PRODUCER

pytestmark = pytest.mark.integration

STREAM = StreamName("crash.test")


@pytest.fixture
async def services(tmp_path: Path):
    embedded = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    yield embedded
    await embedded.stop()


@pytest.fixture
def spec(zookeeper_corner, tmp_path: Path):
    env = {
        "TIERLOG_ZOOKEEPER__HOSTS": zookeeper_corner,
        **quorum_environment(1, {}),
        "TIERLOG_INGEST__DATA_DIR": str(tmp_path / "data"),
    }
    ports = Ports(tmp_path / "ports.json").take("ingest", ["http", "grpc", "wire"])
    return service_spec("ingest", ports=ports, env=env)


@pytest.fixture
async def catalog(zookeeper_corner):
    store = await ZooKeeperMetadata.connect(zookeeper_corner)
    yield Catalog.over(store, clock=SimClock(), ids=SystemIds())
    await store.close()


@contextlib.asynccontextmanager
async def control_of(spec):
    control = GrpcStreamControl(f"127.0.0.1:{spec.ports['grpc']}", timeout_s=20.0)
    try:
        yield control
    finally:
        await control.close()


async def ask(request):
    """Return status and JSON of an answer."""
    async with request as answer:
        return answer.status, await answer.json()


async def until_all_closed(catalog, name=STREAM, seconds=30.0):
    """Return the stream's ledgers once all are closed."""
    async with asyncio.timeout(seconds):
        while True:
            ledgers = (await catalog.streams.snapshot(name)).ledgers
            if all(one.closed for one in ledgers):
                return ledgers
            await asyncio.sleep(0.2)


async def read_all(catalog, name=STREAM):
    """Return the entries by (ledger id, entry id)."""
    nodes = NodeDirectory(catalog.nodes.live, ControlConnector())
    found = {}
    try:
        for listed in (await catalog.streams.snapshot(name)).ledgers:
            metadata = await catalog.ledgers.get(listed.ledger_id)
            assert metadata.state is LedgerState.CLOSED
            assert metadata.last_entry_id == listed.last_entry_id
            handle = Tier1ReadHandle(listed.ledger_id, metadata, nodes)
            length = 0
            async for runs in handle.read_runs(EntryId(0), listed.last_entry_id):
                for run in runs:
                    length += run.payload_len
                    for step, entry in enumerate(run.entries()):
                        found[listed.ledger_id, run.first_entry_id + step] = bytes(entry)
            assert length == listed.length
    finally:
        await nodes.close()
    return found


def payload(number: int) -> bytes:
    return b"%08d" % number * (1 + number % 500)


async def append_until_cut(control, stream, *, window=64, cut_after, cut):
    """Append drafts with many in flight; return what was acknowledged when it ended."""
    owner = await control.find_owner(stream)
    acknowledged: dict[tuple[int, int], bytes] = {}
    slots = asyncio.Semaphore(window)
    lost = asyncio.Event()

    async def one(client, first):
        entries = [payload(first * 10 + step) for step in range(10)]
        frames, offsets = pack_entries(entries)
        try:
            ranges = await client.append(stream, build_run(frames, offsets), deadline_s=10.0)
        except (IndeterminateError, RetryableError):
            lost.set()
            return
        finally:
            slots.release()
        places = [
            (part.ledger_id, entry_id)
            for part in ranges
            for entry_id in range(part.first_entry_id, part.last_entry_id + 1)
        ]
        acknowledged.update(zip(places, entries, strict=True))
        if len(acknowledged) >= cut_after and not lost.is_set():
            lost.set()
            cut()

    async with asyncio.TaskGroup() as tasks:
        client = await WireClient.connect(
            TcpTransport(),
            owner.wire_address,
            Hello(cluster_id=owner.cluster_id, role=ROLE_PRODUCER),
            tasks=tasks,
        )
        async with asyncio.TaskGroup() as appends:
            number = 0
            while not lost.is_set():
                await slots.acquire()
                appends.create_task(one(client, number))
                number += 1
        await client.close()
    assert number * 10 > len(acknowledged), "some were in flight"
    return acknowledged


@pytest.mark.covers("A03", "D09", "D18", "D22", "D37")
async def test_killed_in_mid_append_nothing_acknowledged_is_lost(services, spec, catalog):
    await services.start([spec])
    everything = {}
    async with control_of(spec) as control:
        policy = Policy(ledger_entries_max=3000)
        assert await control.create_stream(STREAM, raw=True, policy=policy, exist_ok=False)
        for round_number in range(3):
            acknowledged = await append_until_cut(
                control,
                STREAM,
                cut_after=4000 + 500 * round_number,
                cut=lambda: services.kill("ingest"),
            )
            assert not everything.keys() & acknowledged.keys(), "no id is given twice"
            everything |= acknowledged
            await services.restart("ingest")
            # Without any append: the start itself recovers what was left open.
            await until_all_closed(catalog)
            found = await read_all(catalog)
            missing = {place for place, entry in everything.items() if found.get(place) != entry}
            assert missing == set()
    assert len((await catalog.streams.snapshot(STREAM)).ledgers) > 3


async def test_a_drain_closes_the_open_ledger_before_the_process_ends(services, spec, catalog):
    await services.start([spec])
    async with control_of(spec) as control:
        await control.create_stream(STREAM, raw=True, policy=None, exist_ok=False)
        ranges = await control.append(STREAM, [b"one", b"two"])
        assert [(one.first_entry_id, one.last_entry_id) for one in ranges] == [(0, 1)]
        assert (await catalog.ledgers.get(ranges[0].ledger_id)).state is LedgerState.OPEN
    child = services.children["ingest"]
    await services.stop()
    assert child.exit_code == 0
    (closed,) = (await catalog.streams.snapshot(STREAM)).ledgers
    assert (closed.closed, closed.last_entry_id, closed.length) == (True, 1, 6)


async def test_calls_and_their_errors_over_grpc_and_http(services, spec, catalog):
    await services.start([spec])
    async with control_of(spec) as control, aiohttp.ClientSession() as http:
        with pytest.raises(RefusedError) as caught:
            await control.append(STREAM, [b"x"])
        assert caught.value.reason is Reason.STREAM_NOT_FOUND
        with pytest.raises(RefusedError) as caught:
            await control.create_stream(StreamName("-no"), raw=True, policy=None, exist_ok=True)
        assert caught.value.reason is Reason.INVALID_ARGUMENT
        policy = Policy(block_size=5 * MIB)
        assert await control.create_stream(STREAM, raw=True, policy=policy, exist_ok=True)
        assert not await control.create_stream(STREAM, raw=True, policy=policy, exist_ok=True)
        with pytest.raises(TierlogError) as caught:
            await control.append(STREAM, [bytes(5 * MIB - 139)])
        assert caught.value.reason is Reason.TOO_LARGE
        assert caught.value.details["limit"] == str(5 * MIB - 140)
        await control.append(STREAM, [bytes(5 * MIB - 140)])

        base = f"http://127.0.0.1:{spec.ports['http']}"
        _, owner = await ask(http.get(f"{base}/v1/streams/{STREAM}/owner"))
        assert (owner["node_id"], owner["owner_epoch"]) == ("node-1", 1)
        _, status = await ask(http.get(f"{base}/v1/status"))
        assert status["registered"]
        assert status["streams"][0]["last_add_confirmed"] == 0
        _, sealed = await ask(http.post(f"{base}/v1/streams/{STREAM}/seal"))
        assert sealed["ledger_id"] == status["streams"][0]["open_ledger"]
        assert await control.seal(STREAM) is None
        assert len(await read_all(catalog)) == 1
        code, problem = await ask(http.get(f"{base}/v1/streams/none/owner"))
        assert (code, problem["reason"]) == (404, "STREAM_NOT_FOUND")
        async with http.get(f"{base}/metrics") as metrics:
            assert "tierlog_ingest_streams 1.0" in await metrics.text()
