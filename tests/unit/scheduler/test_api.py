"""The admin REST API (seeds/000: "a admin rest endpoint … to which a managed ledger position can
be passed"): what it shows, what it takes, and problem+json for what it refuses."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.unit.catalog.world import location
from tests.unit.offload.world import STREAM, TOPICS, World, bare_ledger
from tests.unit.scheduler.test_scheduler import ENTRIES, scheduler
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import StreamName
from tierlog.model.partitions import partition_names
from tierlog.model.policy import Policy
from tierlog.runtime.http import build_http_app, serve_http
from tierlog_scheduler.api import AdminApi
from tierlog_scheduler.policy_api import PolicyApi


@asynccontextmanager
async def served(world: World):
    app = build_http_app("test", checks={})
    catalog, answering = world.catalog(), scheduler(world)
    AdminApi(catalog, answering).add_routes(app)
    PolicyApi(catalog, answering).add_routes(app)
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        yield session


async def ask(session, method, path, *, status=200, **more):
    async with session.request(method, path, **more) as answer:
        body = await answer.json(content_type=None)
        assert answer.status == status, body
        if status >= 400:
            assert answer.content_type == "application/problem+json"
            assert body["remedy"] or body["reason"] == "INVALID_ARGUMENT"
        return body


@pytest.fixture
def world():
    return World()


@pytest.mark.covers("A29", "A30", "A31", "A32")
async def test_streams_and_ledgers_show_tiers_states_and_attempts(world):
    claimed = await world.stream()
    first = await world.seal(claimed, ENTRIES)
    await world.seal(claimed, [b"open"], close=False)
    await world.worker().handle(world.request(claimed, first))
    await world.catalog().streams.create(StreamName("other"), raw=True)
    total = sum(map(len, ENTRIES))
    async with served(world) as session:
        streams = (await ask(session, "GET", "/v1/streams"))["streams"]
        assert [one["stream"] for one in streams] == ["logs", "other"]
        assert streams[0] | {"owner_epoch": 1} == {
            "stream": "logs",
            "ledgers": 2,
            "entries": len(ENTRIES),
            "bytes": total,
            "tier1_bytes": total,
            "tier2_bytes": total,
            "owner": "n1",
            "owner_epoch": 1,
            "raw": False,
            "partitions": 0,
        }
        shown = await ask(session, "GET", f"/v1/streams/{STREAM}")
        sealed, is_open = shown["ledgers"]
        assert (sealed["state"], sealed["offload_state"]) == ("CLOSED", "COMPLETE")
        assert (sealed["tier1"], sealed["tier2"], sealed["attempts"]) == (True, True, 1)
        assert (is_open["state"], is_open["tier2"], is_open["complete"]) == ("OPEN", False, False)
        ledger = await ask(session, "GET", f"/v1/ledgers/{first}")
        assert ledger["metadata"]["last_entry_id"] == len(ENTRIES) - 1
        assert ledger["offload"]["uuid"] == sealed["uuid"]
        (offload,) = (await ask(session, "GET", "/v1/offloads"))["offloads"]
        assert offload["state"] == "COMPLETE"
        assert offload["timestamp_ms"] == (await world.context(first)).timestamp_ms
        assert offload["data_key"] in world.bucket.objects
        for query in ("?stream=other", "?state=tier1_deleted"):
            assert (await ask(session, "GET", f"/v1/offloads{query}"))["offloads"] == []


async def test_offloads_are_those_of_a_stream_or_state_read_many_at_once(world):
    name = StreamName("many")
    await world.catalog().streams.create(name, partitions=2)
    made = {}
    for one in ("logs", *partition_names(name, 2)):
        claimed = await world.stream(StreamName(one))
        made[one] = [await world.seal(claimed, ENTRIES) for _ in range(3)]
        for ledger_id in made[one]:
            await world.worker().handle(world.request(claimed, ledger_id))
    catalog = world.catalog()
    reads = most = 0
    peek = catalog.contexts.peek

    async def counted(ledger_id):
        nonlocal reads, most
        reads += 1
        most = max(most, reads)
        try:
            await asyncio.sleep(0)
            return await peek(ledger_id)
        finally:
            reads -= 1

    catalog.contexts.peek = counted
    api = AdminApi(catalog, scheduler(world))

    async def found(**asked):
        shown = (await api.offloads(**asked)).offloads
        return [one.ledger_id for one in shown]

    of_many = [one for name, ledgers in made.items() if name != "logs" for one in ledgers]
    assert await found(stream="logs") == made["logs"]
    assert await found(stream="many") == of_many
    assert sorted(await found()) == sorted([*made["logs"], *of_many])
    assert most == len(made["logs"]) + len(of_many), "not one after the other"
    assert await found(state="complete", stream="logs") == made["logs"]
    assert await found(state="TIER1_DELETED") == []
    with pytest.raises(RefusedError, match="'typo'") as caught:
        await found(state="typo")
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert "OFFLOADING" in caught.value.remedy
    with pytest.raises(RefusedError) as caught:
        await found(stream="none")
    assert caught.value.reason is Reason.STREAM_NOT_FOUND


async def test_offloads_that_are_local_are_those_that_were_tried_or_asked_for(world):
    claimed = await world.stream()
    tried, sealed, there = [await world.seal(claimed, ENTRIES) for _ in range(3)]
    await world.worker().handle(world.request(claimed, there))
    contexts = world.catalog().contexts
    uuid = world.ids.uuid()
    place = location(uuid, tried)
    await contexts.begin_attempt(tried, uuid=uuid, location=place, worker="w")
    await contexts.record_error(tried, uuid=uuid, error="the bucket is full")
    await contexts.give_up_attempt(tried, uuid=uuid)
    api = AdminApi(world.catalog(), scheduler(world))

    async def found(state=None):
        return [one.ledger_id for one in (await api.offloads(state=state)).offloads]

    shown, complete = (await api.offloads()).offloads
    assert (shown.ledger_id, complete.ledger_id) == (tried, there)
    assert (shown.state, shown.attempts, shown.last_error) == ("LOCAL", 1, "the bucket is full")
    assert len(shown.abandoned) == 1
    assert await found("local") == [tried, sealed]
    assert await found("complete") == [there]


@pytest.mark.covers("A26", "A27", "A33", "B01")
async def test_offload_before_a_position(world):
    claimed = await world.stream()
    ledgers = [await world.seal(claimed, ENTRIES) for _ in range(3)]
    path = f"/v1/streams/{STREAM}/offload"
    async with served(world) as session:
        done = await ask(session, "POST", path, json={"before": f"{ledgers[1]}:0"})
        assert done == {
            "stream": STREAM,
            "position": f"{ledgers[1]}:0",
            "ledgers": [ledgers[0]],
            "requested": [ledgers[0]],
        }
        assert len(world.queue.events(TOPICS.requested)) == 1
        everything = await ask(session, "POST", path, json={"before": None})
        assert everything["ledgers"] == ledgers
        assert everything["position"] == f"{ledgers[2]}:{len(ENTRIES)}"
        assert (await ask(session, "POST", path))["ledgers"] == ledgers
        await ask(session, "POST", path, status=400, json={"before": "latest"})
        await ask(session, "POST", path, status=404, json={"before": "99:0"})
        await ask(session, "POST", path, status=400, json={"befor": None})
        await ask(session, "POST", path, status=400, data=b"{not json")
        await ask(session, "POST", "/v1/streams/none/offload", status=404, json={})


@pytest.mark.covers("A36", "A38", "B01")
async def test_policy_in_both_units(world):
    await world.stream(policy=Policy(ledger_bytes_max=10**6))
    path = f"/v1/streams/{STREAM}/policy"
    async with served(world) as session:
        before = await ask(session, "GET", path)
        assert before["own"]["ledger_bytes_max"] == 10**6
        assert before["own"]["offload_time_ms"] is None
        assert before["effective"]["deletion_lag_ms"] == 4 * 3600 * 1000
        seed = {
            "offloadTimeInMinutes": 5,
            "offloadSizeInMB": 10,
            "retentionTimeInMinutes": 6,
            "retentionSizeInMB": 11,
        }
        own = (await ask(session, "PUT", path, json=seed))["own"]
        assert own["offload_time_ms"] == 5 * 60_000
        assert own["offload_size_bytes"] == 10 * 2**20
        assert own["retention_time_ms"] == 6 * 60_000
        assert own["retention_size_bytes"] == 11 * 2**20
        assert own["ledger_bytes_max"] is None
        kept = (await world.catalog().streams.snapshot(STREAM)).stream.policy
        assert kept.offload_size_bytes == 10 * 2**20

        for refused in (
            {"offloadTimeInMinutes": 6, "retentionTimeInMinutes": 6},
            {"offloadSizeInMB": 12, "retentionSizeInMB": 11},
            {"offload_time_ms": 60_000, "retentionTimeInMinutes": 1},
            {"deletion_lag_ms": -2},
            {"offloadTimeInMinutes": -2},
            {"block_size": 1000},
        ):
            problem = await ask(session, "PUT", path, status=422, json=refused)
            assert problem["reason"] == "POLICY_INVALID"
            assert problem["details"]["bound"]
        for garbage in (
            {"offloadTimeInMinutes": 5, "offload_time_ms": 5},
            {"offloadTimeInMinutes": "soon"},
            {"offloadTimeInHours": 5},
            {"offloadTimeInMinutes": True},
            {"retention_time_ms": True},
            {"read_back": False},
            {"offloadSizeInMB": 10**4299},
            [1],
        ):
            await ask(session, "PUT", path, status=400, json=garbage)
        for number in ("1e400", "-1e400", "1e308", "NaN", "1e20"):
            body = f'{{"offloadTimeInMinutes": {number}}}'
            json = {"content-type": "application/json"}
            problem = await ask(session, "PUT", path, status=400, data=body, headers=json)
            assert "64 bits" in problem["detail"]
        assert (await world.catalog().streams.snapshot(STREAM)).stream.policy == kept


async def test_a_bare_ledger_is_shown_without_a_stream(world):
    await world.stream()
    bare = await bare_ledger(world)
    async with served(world) as session:
        shown = await ask(session, "GET", f"/v1/ledgers/{bare}")
        assert (shown["ledger_id"], shown["stream"], shown["offload"]) == (bare, None, None)
        metadata = shown["metadata"]
        assert (metadata["state"], metadata["last_entry_id"]) == ("CLOSED", 0)
        await world.catalog().bare.delete(bare)
        await ask(session, "GET", f"/v1/ledgers/{bare}", status=404)


async def test_what_is_not_there_is_told_as_such(world):
    await world.stream()
    async with served(world) as session:
        for path, reason in (
            ("/v1/streams/none", "STREAM_NOT_FOUND"),
            ("/v1/streams/none/policy", "STREAM_NOT_FOUND"),
            ("/v1/ledgers/12345", "LEDGER_NOT_FOUND"),
        ):
            assert (await ask(session, "GET", path, status=404))["reason"] == reason
        for path in ("/v1/streams/-bad", "/v1/ledgers/x", "/v1/ledgers/-1"):
            await ask(session, "GET", path, status=400)
        await ask(session, "GET", "/v1/nothing", status=404)
