"""REST of offloads for people: status, every attempt, leftovers, pause and resume."""

from contextlib import asynccontextmanager
from dataclasses import fields

import pytest

from tests.unit.offload.scrubs import runner
from tests.unit.offload.world import STREAM, TOPICS, World
from tests.unit.scheduler.test_api import ask
from tests.unit.scheduler.test_scheduler import ENTRIES, scheduler
from tierlog.adapters.memory.events import MemoryEventLog
from tierlog.model.errors import RetryableError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadState
from tierlog.model.partitions import partition_names
from tierlog.model.policy import NO_LEVELS, Policy
from tierlog.model.trimming import TrimGrounds
from tierlog.offload.dead_letters import DeadLetters, Letter
from tierlog.offload.driver import BlockOffloader
from tierlog.runtime.http import serve_http
from tierlog_scheduler import attempts_api
from tierlog_scheduler.app import build_app


def letters(world: World) -> DeadLetters:
    return DeadLetters(
        MemoryEventLog(world.queue), world.queue.publisher(), world.stationery, newest_max=100
    )


@asynccontextmanager
async def served(world: World):
    import aiohttp

    app = build_app(
        world.catalog(),
        scheduler(world),
        letters(world),
        world.manifests(),
        runner(world),
        checks={},
    )
    async with (
        serve_http(app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        yield session


@pytest.fixture
def world():
    return World()


async def test_the_status_says_how_far_it_is_and_what_is_in_the_way(world, monkeypatch):
    claimed = await world.stream()
    ledgers = [await world.seal(claimed, ENTRIES) for _ in range(3)]
    opened = await world.seal(claimed, [b"open"], close=False)
    path = f"/v1/streams/{STREAM}/offload"
    async with served(world) as session:
        (at_first,) = (await ask(session, "GET", path))["streams"]
        assert at_first["position"] == f"{ledgers[0]}:0"
        assert at_first["states"] == {"LOCAL": 3}
        assert at_first["waiting_bytes"] == 3 * sum(map(len, ENTRIES))
        assert (at_first["wanted"], at_first["offload_through"]) == (0, None)
        await ask(session, "POST", path, json={"before": f"{ledgers[2]}:0"})
        (asked,) = (await ask(session, "GET", path))["streams"]
        assert (asked["wanted"], asked["offload_through"]) == (2, ledgers[1])
        await world.worker().handle(world.request(claimed, ledgers[0]))
        await fail(world, claimed, ledgers[1])
        (half,) = (await ask(session, "GET", path))["streams"]
        assert (half["position"], half["wanted"]) == (f"{ledgers[1]}:0", 1)
        assert half["states"] == {"COMPLETE": 1, "OFFLOADING": 1, "LOCAL": 1}
        (failing,) = half["failing"]
        assert (failing["ledger_id"], failing["attempts"]) == (ledgers[1], 1)
        assert "request R1" in failing["last_error"]
        assert half["failing_count"] == 1
        monkeypatch.setattr(attempts_api, "FAILING_MAX", 0)
        (cut,) = (await ask(session, "GET", path))["streams"]
        assert (cut["failing"], cut["failing_count"], cut["doubted_count"]) == ([], 1, 0)
        for ledger_id in ledgers[1:]:
            await world.worker().handle(world.request(claimed, ledger_id))
        (done,) = (await ask(session, "GET", path))["streams"]
        assert (done["position"], done["wanted"]) == (f"{opened}:0", 0)
        assert (done["failing"], done["oldest_waiting_ms"]) == ([], None)


async def fail(world: World, claimed, ledger_id: LedgerId) -> None:
    """Make an attempt that fails as a store says."""
    worker = world.worker(name="w-unlucky")

    async def refuse(*_, **__):
        raise RetryableError("write b/k: busy (SlowDown, request R1)")

    worker._offloader.offload = refuse  # type: ignore[method-assign]
    with pytest.raises(RetryableError):
        await worker.handle(world.request(claimed, ledger_id))


async def test_a_copy_that_was_found_damaged_is_told_with_what_helps(world):
    claimed = await world.stream()
    sound, damaged = [await world.seal(claimed, ENTRIES) for _ in range(2)]
    for ledger_id in (sound, damaged):
        await world.worker().handle(world.request(claimed, ledger_id))
    uuid = (await world.context(damaged)).uuid
    assert uuid is not None
    await world.catalog().contexts.doubt(damaged, uuid=uuid, cause="missing-object: not there")
    found_ms = (await world.context(damaged)).doubt.found_ms
    async with served(world) as session:
        (status,) = (await ask(session, "GET", f"/v1/streams/{STREAM}/offload"))["streams"]
        (one,) = status["doubted"]
        assert (one["ledger_id"], one["doubted_ms"]) == (damaged, found_ms)
        assert "missing-object: not there" in one["doubt"]
        assert "tierlog scrub --repair --deep" in one["doubt"]
        shown = await ask(session, "GET", f"/v1/ledgers/{damaged}")
        assert (shown["offload"]["doubt"], shown["offload"]["doubted_ms"]) == (
            one["doubt"],
            found_ms,
        )
        other = await ask(session, "GET", f"/v1/ledgers/{sound}")
        assert (other["offload"]["doubt"], other["offload"]["doubted_ms"]) == (None, None)
        (explained,) = [
            step
            for step in (await ask(session, "GET", f"/v1/streams/{STREAM}/policy/explain"))[
                "ledgers"
            ]
            if (step["ledger_id"], step["what"]) == (damaged, "delete local copy")
        ]
        assert (explained["in_ms"], explained["why"]) == (None, one["doubt"])


async def test_every_attempt_is_told_of_a_stream_and_of_a_ledger(world):
    claimed = await world.stream()
    ledger_id = await world.seal(claimed, ENTRIES)
    await world.seal(claimed, ENTRIES)
    await fail(world, claimed, ledger_id)
    await world.worker().handle(world.request(claimed, ledger_id))
    async with served(world) as session:
        (one,) = (await ask(session, "GET", f"/v1/streams/{STREAM}/attempts"))["ledgers"]
        assert one == await ask(session, "GET", f"/v1/ledgers/{ledger_id}/attempts")
        assert (one["ledger_id"], one["attempt_count"]) == (ledger_id, 2)
        failed, done = one["attempts"]
        assert (failed["worker"], failed["outcome"]) == ("w-unlucky", "FAILED")
        assert "request R1" in failed["error"]
        assert (done["worker"], done["outcome"], done["error"]) == ("w1", "COMPLETE", "")
        for attempt in (failed, done):
            assert attempt["duration_ms"] == attempt["ended_ms"] - attempt["started_ms"]
        await ask(session, "GET", "/v1/ledgers/9999/attempts", status=404)


async def test_leftovers_are_told_until_they_are_struck_off(world):
    claimed = await world.stream()
    ledger_id = await world.seal(claimed, ENTRIES)
    for _ in range(2):
        await fail(world, claimed, ledger_id)
    path = f"/v1/streams/{STREAM}/leftovers"
    async with served(world) as session:
        (left,) = (await ask(session, "GET", path))["leftovers"]
        assert (left["ledger_id"], left["bucket"]) == (ledger_id, "b")
        catalog = world.catalog()
        (abandoned,) = (await world.context(ledger_id)).abandoned
        assert left["uuid"] == str(abandoned.uuid)
        assert left["swept_ms"] == (abandoned.swept_ms or None)
        await catalog.contexts.strike_off(ledger_id, abandoned.uuid)
        assert (await ask(session, "GET", path))["leftovers"] == []


async def test_the_copy_of_a_trimmed_ledger_is_a_leftover_until_it_is_deleted(world):
    claimed = await world.stream()
    gone, kept = [await world.seal(claimed, ENTRIES) for _ in range(2)]
    for ledger_id in (gone, kept):
        await world.worker().handle(world.request(claimed, ledger_id))
    uuid = (await world.context(gone)).uuid
    catalog = world.catalog()
    grounds = TrimGrounds.of(await catalog.streams.get(STREAM), NO_LEVELS)
    await catalog.retention.begin_trim(STREAM, claimed.incarnation, [gone], grounds=grounds)
    path = f"/v1/streams/{STREAM}/leftovers"
    async with served(world) as session:
        (left,) = (await ask(session, "GET", path))["leftovers"]
        assert (left["ledger_id"], left["uuid"]) == (gone, str(uuid))
        assert left["swept_ms"] is None
        await catalog.contexts.strike_off(gone, uuid)
        assert (await ask(session, "GET", path))["leftovers"] == []


async def test_a_pause_stops_requests_and_deletions_and_a_resume_lets_them_go_on(world):
    policy = Policy(offload_time_ms=0, deletion_lag_ms=0)
    claimed = await world.stream(policy=policy)
    done, waiting = [await world.seal(claimed, ENTRIES) for _ in range(2)]
    await world.worker().handle(world.request(claimed, done))
    leader = scheduler(world)
    await leader.begin()
    path = f"/v1/streams/{STREAM}/offload"
    async with served(world) as session:
        await ask(session, "POST", f"{path}/pause", json={"cause": "why"})
        await ask(session, "POST", f"{path}/pause", json={"cause": "later"})
        (paused,) = (await ask(session, "GET", path))["streams"]
        assert paused["pause"]["cause"] == "why"
        refused = await ask(session, "POST", path, status=400)
        assert "paused: why" in refused["detail"]
        assert "tierlog offload resume" in refused["remedy"]
        world.clock.advance(3600)
        for _ in range(3):
            await leader.run_pass()
        assert not world.queue.events(TOPICS.requested)
        assert await world.catalog().ledgers.get(done) is not None, "not deleted"
        (resumed,) = (await ask(session, "POST", f"{path}/resume"))["streams"]
        assert resumed["pause"] is None
        await leader.run_pass()
        assert len(world.queue.events(TOPICS.requested)) == 1
        world.clock.advance(3600)
        await leader.run_pass()
        assert await world.catalog().ledgers.get(done) is None
        assert await world.catalog().ledgers.get(waiting) is not None


@pytest.mark.parametrize("stop", ["pause", "stream", "cluster"])
async def test_what_is_stopped_while_a_copy_is_read_back_is_not_deleted(world, monkeypatch, stop):
    claimed = await world.stream(policy=Policy(offload_time_ms=0))
    ledger_id = await world.seal(claimed, ENTRIES)
    await world.worker().handle(world.request(claimed, ledger_id))
    catalog = world.catalog()
    await catalog.policies.set_level(None, Policy(deletion_lag_ms=0))
    verify, verified = BlockOffloader.verify, []

    async def verify_slowly(self, *args, **how):
        await verify(self, *args, **how)
        verified.append(args[0])
        if stop == "pause":
            await catalog.streams.pause_offload(STREAM, "the bucket looks wrong")
        elif stop == "stream":
            await catalog.streams.set_policy(STREAM, Policy(offload_time_ms=0, deletion_lag_ms=-1))
        else:
            await catalog.policies.set_level(None, Policy(deletion_lag_ms=-1))

    monkeypatch.setattr(BlockOffloader, "verify", verify_slowly)
    leader = scheduler(world)
    await leader.begin()
    for _ in range(3):
        await leader.run_pass()
    assert verified == [ledger_id], "and never again"
    assert await catalog.ledgers.get(ledger_id) is not None
    assert (await world.context(ledger_id)).state is OffloadState.COMPLETE
    await catalog.streams.resume_offload(STREAM)
    await catalog.streams.set_policy(STREAM, Policy(deletion_lag_ms=0))

    async def verify_and_wish(self, *args, **how):
        await verify(self, *args, **how)
        await catalog.streams.want_offloaded(STREAM, ledger_id)

    monkeypatch.setattr(BlockOffloader, "verify", verify_and_wish)
    await leader.run_pass()
    assert await catalog.ledgers.get(ledger_id) is None, "a wish stops nothing"


async def test_a_partitioned_stream_is_told_and_paused_by_its_partitions(world):
    await world.stream()
    name = StreamName("parts")
    await world.catalog().streams.create(name, partitions=2)
    async with served(world) as session:
        paused = await ask(session, "POST", f"/v1/streams/{name}/offload/pause")
        assert [one["stream"] for one in paused["streams"]] == partition_names(name, 2)
        assert all(one["pause"] for one in paused["streams"])
        for one in (name, *partition_names(name, 2)):
            assert (await world.catalog().streams.get(one)).offload_pause is not None


async def test_a_partition_that_is_gone_keeps_no_other_one_from_a_pause(world):
    await world.stream()
    catalog, name = world.catalog(), StreamName("parts")
    await catalog.streams.create(name, partitions=3)
    first, gone, last = partition_names(name, 3)
    marked = await catalog.retention.begin_stream_deletion(gone)
    await catalog.retention.remove_stream(gone, marked.incarnation)
    async with served(world) as session:
        path = f"/v1/streams/{name}"
        for what in ("pause", "resume"):
            told = await ask(session, "POST", f"{path}/offload/{what}")
            assert [one["stream"] for one in told["streams"]] == [first, last]
            for one in (name, first, last):
                paused = (await catalog.streams.get(one)).offload_pause is not None
                assert paused == (what == "pause")
        for what in ("offload", "attempts", "leftovers", "policy/explain"):
            await ask(session, "GET", f"{path}/{what}")
        assert (await ask(session, "POST", f"{path}/offload"))["ledgers"] == []
        await ask(session, "PUT", f"{path}/policy", json={"offload_time_ms": 1000})
        assert (await catalog.streams.get(last)).policy.offload_time_ms == 1000


async def test_what_is_not_there_is_told_as_such(world):
    await world.stream()
    async with served(world) as session:
        for method, path in (
            ("GET", "offload"), ("GET", "attempts"), ("GET", "leftovers"),
            ("POST", "offload/pause"), ("POST", "offload/resume"),
        ):  # fmt: skip
            problem = await ask(session, method, f"/v1/streams/none/{path}", status=404)
            assert problem["reason"] == "STREAM_NOT_FOUND"
        body = {"because": "x"}
        await ask(session, "POST", f"/v1/streams/{STREAM}/offload/pause", status=400, json=body)


async def test_dead_letters_are_listed_shown_replayed_and_dismissed(world):
    claimed = await world.stream()
    ledger_id = await world.seal(claimed, ENTRIES)
    request = world.request(claimed, ledger_id)
    failure = RetryableError("the store is away (request R2)")
    for event in (request, request):
        topic, key, value, headers = world.stationery.dead_letter(event, failure)
        await world.queue.publisher().publish(topic, key=key, value=value, headers=headers)
    root = "/v1/dead-letters"
    async with served(world) as session:
        found = (await ask(session, "GET", f"{root}?state=waiting"))["dead_letters"]
        assert [one["ledger_id"] for one in found] == [ledger_id] * 2
        first, second = (one["place"] for one in found)
        shown = await ask(session, "GET", f"{root}/{first}")
        names = [one.name for one in fields(Letter)]
        assert [list(one) for one in found] == [names] * 2, "all that is known of a letter"
        assert list(shown) == [*names, "headers", "value_hex"]
        assert shown["value_hex"] == request.value.hex()
        assert shown["headers"]["ce_type"] == TOPICS.requested
        assert "request R2" in shown["error"]
        assert (await ask(session, "POST", f"{root}/{first}/replay"))["state"] == "replayed"
        assert len(world.queue.events(TOPICS.requested)) == 1
        assert (await ask(session, "POST", f"{root}/{second}/dismiss"))["state"] == "dismissed"
        assert (await ask(session, "GET", f"{root}?state=waiting"))["dead_letters"] == []
        states = {
            one["place"]: one["state"] for one in (await ask(session, "GET", root))["dead_letters"]
        }
        assert states == {first: "replayed", second: "dismissed"}
        assert (await ask(session, "GET", f"{root}?limit=1"))["left_off"] == 1
        done = await ask(session, "POST", f"{root}/replay", json={"stream": str(STREAM)})
        assert done == {"replayed": [], "refused": [], "left": 0}
        for path, status in (("0:12345", 404), ("nowhere", 400)):
            for method, rest in (("GET", ""), ("POST", "/replay"), ("POST", "/dismiss")):
                await ask(session, method, f"{root}/{path}{rest}", status=status)
        await ask(session, "GET", f"{root}?state=lost", status=400)
