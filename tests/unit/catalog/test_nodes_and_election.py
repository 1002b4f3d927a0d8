"""The cluster's identity, live nodes, leadership and locks: what lives with a session."""

import asyncio
from dataclasses import replace

import pytest

from tests.unit.catalog.world import NODE, World, on_virtual_time
from tierlog.adapters.memory.faults import Outcome
from tierlog.catalog.election import CourtesyLock, Election
from tierlog.format import paths
from tierlog.model.errors import RefusedError
from tierlog.model.ids import NodeId
from tierlog.model.node import NodeInfo
from tierlog.model.offload import SchedulerProgress

INFO = NodeInfo(
    node_id=NODE,
    wire_address="127.0.0.1:4101",
    grpc_address="127.0.0.1:4102",
    http_address="127.0.0.1:4103",
)


@pytest.mark.covers("D49")
@on_virtual_time
async def test_the_first_process_names_the_cluster_and_its_layout_for_all():
    world = World()
    clusters = [await world.process().catalog.nodes.ensure_cluster() for _ in range(3)]
    assert clusters == [clusters[0]] * 3
    layout = world.server.get(paths.LAYOUT)
    assert layout is not None
    assert b"HierarchicalLedgerManagerFactory" in layout.data


@pytest.mark.covers("D48", "D57")
@on_virtual_time
async def test_the_flat_layout_is_refused_with_a_remedy():
    world = World()
    process = world.process()
    await process.client.create(
        paths.LAYOUT, b"1\norg.apache.bookkeeper.meta.FlatLedgerManagerFactory:1"
    )
    with pytest.raises(RefusedError, match="root of its own"):
        await process.catalog.nodes.ensure_cluster()


@on_virtual_time
async def test_a_node_is_live_for_as_long_as_its_session():
    world = World()
    node, other = world.process(), world.process()
    lost = await node.catalog.nodes.announce(INFO)
    assert await other.catalog.nodes.live() == {NODE: INFO}
    node.client.abandon()
    await lost.wait()
    assert await other.catalog.nodes.live() == {}


@on_virtual_time
async def test_an_announcement_whose_answer_was_lost_stands_once():
    world = World()
    node = world.process()
    node.faults.next("metadata.create_ephemeral", Outcome.REPLY_LOST)
    await node.catalog.nodes.announce(INFO)
    assert await node.catalog.nodes.live() == {NODE: INFO}


@on_virtual_time
async def test_the_entry_of_the_process_before_a_crash_is_seen_to_go():
    """It may read the same, so whoever announces watches it, and announces again."""
    world = World()
    crashed, restarted = world.process(), world.process()
    await crashed.catalog.nodes.announce(INFO)
    crashed.client.abandon()
    nodes = restarted.catalog.nodes
    await nodes.announce(INFO)
    changed = await nodes.watch_announced(INFO)
    assert changed is not None
    await changed.wait()
    assert await nodes.watch_announced(INFO) is None
    assert await nodes.live() == {}
    await nodes.announce(INFO)
    await asyncio.sleep(60)
    assert await nodes.live() == {NODE: INFO}


@on_virtual_time
async def test_a_read_only_node_moves_to_the_folder_that_nobody_writes_to_and_back():
    world = World()
    nodes = world.process().catalog.nodes
    await nodes.announce(INFO)
    read_only = replace(INFO, read_only=True)
    for info, here, there in (
        (read_only, paths.AVAILABLE_READONLY, paths.AVAILABLE),
        (INFO, paths.AVAILABLE, paths.AVAILABLE_READONLY),
    ):
        await nodes.amend(info)
        await nodes.announce(info)
        assert await nodes.live() == {NODE: info}
        assert NODE in (await world.process().client.children(here) or [])
        assert NODE not in (await world.process().client.children(there) or [])


@on_virtual_time
async def test_two_processes_can_not_be_one_node():
    world = World()
    await world.process().catalog.nodes.announce(INFO)
    other = NodeInfo(node_id=NODE, wire_address="x:1", grpc_address="x:2", http_address="x:3")
    with pytest.raises(RefusedError, match=r"127\.0\.0\.1:4101"):
        await world.process().catalog.nodes.announce(other)
    await world.process().catalog.nodes.announce(
        NodeInfo(node_id=NodeId("node-2"), wire_address="", grpc_address="", http_address="")
    )


@on_virtual_time
async def test_one_leads_and_the_next_follows_when_its_session_ends():
    world = World()
    first, second = world.process(), world.process()
    lost = await Election(first.client, first.ids, office="test").win()
    election = Election(second.client, second.ids, office="test")
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(election.win())
        await asyncio.sleep(100)
        assert not waiting.done()
        first.client.expire_session()
        await asyncio.sleep(0.1)
        assert lost.is_set()
        assert waiting.done()


@on_virtual_time
async def test_whoever_resigns_lets_the_next_lead_at_once():
    world = World()
    first, second = world.process(), world.process()
    leading = Election(first.client, first.ids, office="test")
    await leading.win()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(Election(second.client, second.ids, office="test").win())
        await asyncio.sleep(1)
        await leading.resign()
        await asyncio.sleep(0.1)
        assert waiting.done()


@on_virtual_time
async def test_a_candidate_whose_standing_was_answered_by_nothing_stands_once():
    world = World()
    process = world.process()
    process.faults.next("metadata.create_ephemeral", Outcome.REPLY_LOST)
    await Election(process.client, process.ids, office="test").win()
    assert len(world.server.children(f"{paths.ROOT}/election/test") or []) == 1


@on_virtual_time
async def test_a_leader_that_lost_its_session_stands_again_behind_the_others():
    world = World()
    first, second = world.process(), world.process()
    one = Election(first.client, first.ids, office="test")
    two = Election(second.client, second.ids, office="test")
    await one.win()
    async with asyncio.TaskGroup() as group:
        follows = group.create_task(two.win())
        await asyncio.sleep(1)
        first.client.expire_session()
        again = group.create_task(one.win())
        await asyncio.sleep(1)
        assert follows.done()
        assert not again.done()
        await two.resign()
        await asyncio.sleep(1)
        assert again.done()


@on_virtual_time
async def test_a_lock_is_held_by_one_until_it_is_released_or_its_session_ends():
    world = World()
    first, second = world.process(), world.process()
    path = paths.ledger_lock_path(7)
    mine = CourtesyLock(first.client, path, first.ids.uuid())
    other = CourtesyLock(second.client, path, second.ids.uuid())
    assert await mine.take()
    assert await mine.take()
    assert not await other.take()
    await other.release()
    assert not await other.take()
    await mine.release()
    assert await other.take()
    second.client.expire_session()
    assert await mine.take()


@on_virtual_time
async def test_a_lock_that_goes_with_its_session_just_as_it_is_released_is_released(monkeypatch):
    world = World()
    first, second = world.process(), world.process()
    path = paths.ledger_lock_path(7)
    mine = CourtesyLock(first.client, path, first.ids.uuid())
    assert await mine.take()
    get = first.client.get

    async def get_and_expire(path):
        found = await get(path)
        first.client.expire_session()
        return found

    monkeypatch.setattr(first.client, "get", get_and_expire)
    assert await mine.release()
    assert await CourtesyLock(second.client, path, second.ids.uuid()).take()


@on_virtual_time
async def test_a_lock_whose_answer_was_lost_is_read_back():
    world = World()
    first, second = world.process(), world.process()
    path = paths.ledger_lock_path(7)
    first.faults.next("metadata.create_ephemeral", Outcome.REPLY_LOST)
    assert await CourtesyLock(first.client, path, first.ids.uuid()).take()
    second.faults.next("metadata.create_ephemeral", Outcome.REPLY_LOST)
    assert not await CourtesyLock(second.client, path, second.ids.uuid()).take()


@on_virtual_time
async def test_progress_outlives_its_leader_and_never_goes_back():
    world = World()
    first, second = world.process(), world.process()
    assert await first.catalog.progress.load() == SchedulerProgress()
    further = SchedulerProgress(progress_ms=2_000)
    first.faults.next("metadata.create", Outcome.REPLY_LOST)
    await first.catalog.progress.save(further)
    await second.catalog.progress.save(SchedulerProgress(progress_ms=1_000))
    assert await second.catalog.progress.load() == further
    second.faults.next("metadata.set", Outcome.REPLY_LOST)
    await second.catalog.progress.save(SchedulerProgress(progress_ms=3_000))
    assert (await first.catalog.progress.load()).progress_ms == 3_000


@on_virtual_time
async def test_a_candidate_that_resigns_while_nothing_answers_goes_with_its_session():
    world = World()
    first, second = world.process(), world.process()
    leading = Election(first.client, first.ids, office="test")
    await leading.win()
    first.faults.outages.add("metadata")
    await leading.resign()
    first.client.abandon()
    async with asyncio.timeout(10):
        await Election(second.client, second.ids, office="test").win()
