"""Thresholds over REST: levels, what comes of them, and the deletion of a stream."""

import asyncio

import pytest
from fastapi import FastAPI

from tests.unit.offload.gates import OpenGate
from tests.unit.offload.scrubs import runner
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.test_api import ask, served
from tests.unit.scheduler.test_scheduler import ENTRIES, scheduler
from tierlog.catalog.retention import RetentionCatalog
from tierlog.format import paths
from tierlog.model.errors import RefusedError
from tierlog.model.ids import NodeId, StreamName
from tierlog.model.partitions import partition_names
from tierlog.model.policy import MINUTE_MS, Policy
from tierlog.model.stream import StreamLifecycle
from tierlog_scheduler.metrics import AGE, LAG, SchedulerCollector
from tierlog_scheduler.policy_api import PolicyApi

PAID = StreamName("shop.paid")


@pytest.mark.covers("A34", "A35", "A37")
async def test_thresholds_of_a_namespace_hold_for_its_streams_in_both_units():
    world = World()
    await world.stream(PAID)
    await world.stream(STREAM)
    path = "/v1/policies/namespaces/shop"
    async with served(world) as session:
        seed = {"offloadTimeInMinutes": 5, "retentionSizeInMB": -1, "offloadSizeInMB": 7}
        own = (await ask(session, "PUT", path, json=seed))["own"]
        assert own["offload_time_ms"] == 5 * MINUTE_MS
        assert own["offload_size_bytes"] == 7 * 2**20
        assert own["retention_size_bytes"] == -1
        found = await ask(session, "GET", f"/v1/streams/{PAID}/policy")
        assert found["effective"]["offload_time_ms"] == 5 * MINUTE_MS
        assert found["levels"]["offload_time_ms"] == "namespace shop"
        other = await ask(session, "GET", f"/v1/streams/{STREAM}/policy")
        assert other["effective"]["offload_time_ms"] is None
        levels = await ask(session, "GET", "/v1/policies")
        assert levels["namespaces"].keys() == {"shop"}
        problem = await ask(
            session, "PUT", "/v1/policies/cluster", status=422, json={"retentionTimeInMinutes": 5}
        )
        assert problem["reason"] == "POLICY_INVALID"
        assert problem["details"]["below"] == "namespace shop"
        assert await ask(session, "GET", "/v1/policies") == levels
        await ask(session, "PUT", "/v1/policies/namespaces/a.b", status=400, json={})
        for garbage in ({"offloadTime": 1}, {"offload_time_ms": "soon"}, [1]):
            await ask(session, "PUT", path, status=400, json=garbage)
        await ask(session, "PUT", "/v1/policies/cluster", json={"deletion_lag_ms": 9})
        cluster = await ask(session, "GET", "/v1/policies/cluster")
        assert (cluster["namespace"], cluster["effective"]["deletion_lag_ms"]) == (None, 9)


@pytest.mark.parametrize(
    "path",
    [f"/v1/streams/{PAID}/policy", "/v1/policies/cluster", "/v1/policies/namespaces/shop"],
)
async def test_a_change_leaves_what_others_changed_meanwhile(path):
    world = World()
    await world.stream(PAID)
    async with served(world) as session:
        changes = [{"retentionTimeInMinutes": 9}, {"offload_time_ms": 5}, {"deletion_lag_ms": -1}]
        await asyncio.gather(*(ask(session, "PATCH", path, json=one) for one in changes))
        own = (await ask(session, "PATCH", path, json={"deletion_lag_ms": None}))["own"]
        told = {name: value for name, value in own.items() if value is not None}
        assert told == {"retention_time_ms": 9 * MINUTE_MS, "offload_time_ms": 5}
        await ask(session, "PATCH", path, status=422, json={"retention_time_ms": 5})
        await ask(session, "PATCH", path, status=400, json={"retention": 5})
        assert (await ask(session, "PATCH", path, json={}))["own"] == own


async def test_what_is_kept_and_read_back_of_copies_is_set_at_each_level():
    world = World()
    await world.stream(PAID)
    async with served(world) as session:
        path = f"/v1/streams/{PAID}/policy"
        before = await ask(session, "GET", path)
        for name in ("data_sha256", "read_back"):
            assert (before["effective"][name], before["levels"][name]) == (None, "settings")
        await ask(session, "PUT", "/v1/policies/cluster", json={"read_back": "full"})
        shop = {"data_sha256": True, "read_back": "sample"}
        await ask(session, "PUT", "/v1/policies/namespaces/shop", json=shop)
        found = await ask(session, "PUT", path, json={"data_sha256": False})
        assert (found["own"]["data_sha256"], found["own"]["read_back"]) == (False, None)
        explained = await ask(session, "GET", f"{path}/explain")
        said = {one["name"]: (one["value"], one["level"]) for one in explained["thresholds"]}
        assert said["data_sha256"] == (False, "stream")
        assert said["data_sha256"][0] is False, "and no number"
        assert said["read_back"] == ("sample", "namespace shop")
        problem = await ask(session, "PUT", path, status=422, json={"read_back": "none"})
        assert (problem["reason"], problem["details"]["bound"]) == ("POLICY_INVALID", "read_back")
        await ask(session, "PUT", path, status=400, json={"data_sha256": "perhaps"})
        assert await ask(session, "GET", path) == found


async def test_explain_says_which_level_and_what_happens_when():
    world = World()
    claimed = await world.stream(PAID, policy=Policy(deletion_lag_ms=60_000))
    first = await world.seal(claimed, ENTRIES)
    second = await world.seal(claimed, ENTRIES, close=False)
    catalog = world.catalog()
    await catalog.policies.set_level("shop", Policy(offload_time_ms=0, retention_time_ms=10**9))
    async with served(world) as session:
        path = f"/v1/streams/{PAID}/policy/explain"
        found = await ask(session, "GET", path)
        assert (found["stream"], found["namespace"], found["paused"]) == (PAID, "shop", False)
        levels = {one["name"]: (one["value"], one["level"]) for one in found["thresholds"]}
        assert levels["deletion_lag_ms"] == (60_000, "stream")
        assert levels["offload_time_ms"] == (0, "namespace shop")
        steps = {(one["ledger_id"], one["what"]): one for one in found["ledgers"]}
        assert steps[first, "offload"]["in_ms"] == 0
        assert steps[first, "trim"]["in_ms"] > 0
        at_ms = steps[second, "seal"]["at_ms"]
        assert at_ms > world.clock.wall_ms()
        await world.worker().handle(world.request(claimed, first))
        await catalog.streams.pause_offload(PAID, "by hand")
        found = await ask(session, "GET", path)
        steps = {(one["ledger_id"], one["what"]): one for one in found["ledgers"]}
        assert found["paused"]
        assert "paused" in steps[first, "delete local copy"]["why"]
        await ask(session, "GET", "/v1/streams/none/policy/explain", status=404)


async def test_explain_of_a_partitioned_stream_says_what_comes_of_all_its_partitions():
    world = World()
    await world.stream()
    catalog = world.catalog()
    await catalog.streams.create(PAID, partitions=3, policy=Policy(offload_time_ms=10**9))
    names = partition_names(PAID, 3)
    made = {}
    for name in names[:2]:
        claimed = await catalog.streams.claim(name, NodeId("n1"))
        made[name] = await world.seal(claimed, ENTRIES)
        world.clock.advance(3600)
    await catalog.streams.pause_offload(names[1], "by hand")
    loads = 0
    leader = scheduler(world)
    load = leader._catalog.progress.load

    async def counted():
        nonlocal loads
        loads += 1
        return await load()

    leader._catalog.progress.load = counted  # type: ignore[method-assign]
    leader.deletions_stopped = {names[1]: "a gap", names[2]: "a gap"}.get  # type: ignore[assignment,method-assign]
    api = PolicyApi(catalog, leader)
    found = await api.explain(PAID)
    steps = [(one.stream, one.ledger_id, one.what) for one in found.ledgers]
    assert [one for one in steps if one[2] == "offload"] == [
        (name, ledger_id, "offload") for name, ledger_id in made.items()
    ]
    assert found.stream == PAID
    assert found.oldest_byte_age_ms == pytest.approx(7200_000, abs=60_000), "the oldest of all"
    assert found.paused, "one of them is"
    assert found.deletions_stopped == f"{names[1]}: a gap; and of 1 more"
    assert found.unexpected_error is None
    assert {one.name: one.value for one in found.thresholds}["offload_time_ms"] == 10**9
    assert loads == 1, "what the leader remembers is long"
    (own,) = {one.stream for one in (await api.explain(names[0])).ledgers}
    assert own == names[0]
    # Another admin deletes it meanwhile.
    gone = await catalog.retention.begin_stream_deletion(names[2])
    await catalog.retention.remove_stream(names[2], gone.incarnation)
    assert len((await api.explain(PAID)).ledgers) == len(steps)


async def test_a_stream_that_is_deleted_tells_how_much_is_left():
    world = World()
    claimed = await world.stream()
    await world.seal(claimed, ENTRIES)
    await world.seal(claimed, ENTRIES)
    leader = scheduler(world)
    await leader.begin()
    async with served(world) as session:
        path = f"/v1/streams/{STREAM}"
        for _ in range(2):
            left = await ask(session, "DELETE", path, status=202)
            assert (left["ledgers_left"], left["paused"]) == (2, False)
        shown = await ask(session, "GET", path)
        assert shown["lifecycle"] == "DELETING"
        for _ in range(4):
            await leader.run_pass()
        await ask(session, "DELETE", path, status=404)
        await world.stream(PAID)
        await world.catalog().streams.pause_offload(PAID)
        assert (await ask(session, "DELETE", f"/v1/streams/{PAID}", status=202))["paused"]
        await world.catalog().streams.resume_offload(PAID)
        await leader.run_pass()
        assert (await ask(session, "GET", "/v1/streams"))["streams"] == []


async def test_a_partitioned_stream_is_deleted_with_its_partitions():
    world = World()
    await world.stream()
    catalog = world.catalog()
    name = StreamName("parts")
    await catalog.streams.create(name, partitions=2)
    leader = scheduler(world)
    await leader.begin()
    async with served(world) as session:
        await ask(session, "DELETE", f"/v1/streams/{name}", status=202)
        for _ in range(3):
            await leader.run_pass()
    assert await catalog.streams.names() == [STREAM]


async def test_a_partitioned_stream_is_there_until_all_of_its_partitions_are_gone():
    """Asking again shows what is left, whichever of them goes first, and what keeps it."""
    world = World()
    catalog = world.catalog()
    await world.stream()
    name = StreamName("parts")
    await catalog.streams.create(name, raw=True, partitions=3)
    parts = partition_names(name, 3)
    claimed = await catalog.streams.claim(parts[1], NodeId("n1"))
    await world.seal(claimed, ENTRIES)
    await catalog.streams.pause_offload(parts[1])
    leader = scheduler(world)
    await leader.begin()
    async with served(world) as session:
        path = f"/v1/streams/{name}"
        for _ in range(3):
            left = await ask(session, "DELETE", path, status=202)
            assert (left["ledgers_left"], left["paused"]) == (1, True)
            await leader.run_pass()
        assert await catalog.streams.names() == [STREAM, name, parts[1]]
        shown = await ask(session, "GET", path)
        assert [one["stream"] for one in shown["partition_streams"]] == [parts[1]]
        await catalog.streams.resume_offload(parts[1])
        assert not (await ask(session, "DELETE", path, status=202))["paused"]
        for _ in range(6):
            await leader.run_pass()
        await ask(session, "DELETE", path, status=404)
    assert await catalog.streams.names() == [STREAM]


async def test_a_partition_that_may_not_be_deleted_keeps_the_whole(monkeypatch):
    world = World()
    await world.stream()
    catalog = world.catalog()
    name = StreamName("parts")
    await catalog.streams.create(name, partitions=2)
    bad, whole = partition_names(name, 2)[0], RetentionCatalog.begin_stream_deletion

    async def refused(self, one):
        if one == bad:
            raise RefusedError("its record is full")
        return await whole(self, one)

    monkeypatch.setattr(RetentionCatalog, "begin_stream_deletion", refused)
    async with served(world) as session:
        await ask(session, "DELETE", f"/v1/streams/{name}", status=400)
        assert (await catalog.streams.get(name)).lifecycle is StreamLifecycle.ACTIVE
        monkeypatch.undo()
        await ask(session, "DELETE", f"/v1/streams/{name}", status=202)
    for one in (name, *partition_names(name, 2)):
        assert (await catalog.streams.get(one)).lifecycle is StreamLifecycle.DELETING


SHOWN = 7


async def test_what_is_behind_is_a_metric_of_the_leader_alone_and_by_stream_where_wanted():
    world = World()
    claimed = await world.stream(policy=Policy(offload_time_ms=10**9))
    await world.seal(claimed, ENTRIES)
    kept = await world.stream(StreamName("kept"))
    await world.seal(kept, ENTRIES)
    for number in range(SHOWN + 5):
        await world.catalog().streams.create(
            StreamName(f"n{number}"), policy=Policy(offload_time_ms=10**9)
        )
    leader = scheduler(world, manifests=OpenGate())
    await leader.begin()
    world.clock.advance(3600)
    await leader.run_pass()
    assert f"tierlog_{AGE}" not in {one.name for one in collector_of(leader).collect()}
    leader.leading = True
    found = {one.name: one for one in collector_of(leader).collect()}
    assert found[f"tierlog_{AGE}"].samples[0].value == pytest.approx(3600, abs=5)
    assert found["tierlog_offload_lag_ledgers"].samples[0].value == 1
    assert found[f"tierlog_{LAG}"].samples[0].value > 0
    states = {one.labels["state"]: one.value for one in found["tierlog_ledgers"].samples}
    assert {name: count for name, count in states.items() if count} == {"sealed": 2}
    assert not [one for one in found.values() if any("stream" in has.labels for has in one.samples)]
    collector = collector_of(leader, streams_max=SHOWN)
    found = {one.name: one for one in collector.collect()}
    ages = {one.labels["stream"]: one.value for one in found[f"tierlog_stream_{AGE}"].samples}
    assert ages[STREAM] == pytest.approx(3600, abs=5)
    assert "kept" not in ages
    assert len(ages) == SHOWN
    assert found["tierlog_scheduler_leading"].samples[0].value == 1


async def test_streams_that_can_not_be_read_are_a_metric_and_stand_as_they_were_known():
    world = World()
    claimed = await world.stream(policy=Policy(offload_time_ms=10**9))
    ledger_id = await world.seal(claimed, ENTRIES)
    await world.stream(StreamName("kept"))
    leader = scheduler(world, manifests=OpenGate())
    await leader.begin()
    leader.leading = True
    await leader.run_pass()
    assert values_of(leader)["tierlog_scheduler_streams_unread"] == 0
    before = values_of(leader)
    path = paths.context_path(ledger_id)
    store = world.catalog().store
    found = await store.get(path)
    assert found is not None
    await store.set(path, b"\xff" * 20, version=found.version)
    for _ in range(2):
        world.clock.advance(1800)
        await leader.run_pass()
    after = values_of(leader)
    assert after["tierlog_scheduler_streams_unread"] == 1
    assert after[f"tierlog_{AGE}"] == pytest.approx(before[f"tierlog_{AGE}"] + 3600, abs=60)
    assert after[f"tierlog_{LAG}"] == before[f"tierlog_{LAG}"] > 0
    # One that leads since then knows no more than that.
    await leader.begin()
    await leader.run_pass()
    assert values_of(leader)["tierlog_scheduler_streams_unread"] == 1
    assert values_of(leader)[f"tierlog_{AGE}"] == 0
    await store.set(path, found.data, version=-1)
    await leader.run_pass()
    assert values_of(leader)["tierlog_scheduler_streams_unread"] == 0
    assert values_of(leader)[f"tierlog_{AGE}"] > 3600


async def test_a_new_leader_says_nothing_of_lags_before_it_knows_them(monkeypatch):
    world = World()
    claimed = await world.stream(policy=Policy(offload_time_ms=10**9))
    await world.seal(claimed, ENTRIES)
    gate = OpenGate()
    leader = scheduler(world, manifests=gate)
    waits, go_on = asyncio.Event(), asyncio.Event()

    async def look(name, *, compare=False):
        waits.set()
        await go_on.wait()
        return False

    monkeypatch.setattr(gate, "look", look)
    for _ in range(2):
        await leader.begin()
        leader.leading = True
        waits.clear()
        go_on.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(leader.run_pass())
            await waits.wait()
            known = values_of(leader)
            assert known["tierlog_scheduler_leading"] == 1
            assert not [one for one in known if "offload" in one or "unread" in one]
            go_on.set()
        assert values_of(leader)["tierlog_offload_lag_ledgers"] == 1


def values_of(leader):
    return {one.name: one.samples[0].value for one in collector_of(leader).collect()}


def collector_of(leader, *, streams_max=0):
    return SchedulerCollector(leader, OpenGate(), runner(World()), streams_max=streams_max)


def test_every_route_is_described():
    app = FastAPI()
    PolicyApi(World().catalog(), scheduler(World())).add_routes(app)
    described = app.openapi()["paths"]
    assert described.keys() >= {"/v1/policies/cluster", "/v1/streams/{name}/policy/explain"}
    for path in described.values():
        assert all(method["description"] for method in path.values())
