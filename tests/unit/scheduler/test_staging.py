"""What was staged by jobs that are gone is deleted, and nothing else."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.catalog.test_attach import staged, staged_metadata, staging_of
from tests.unit.catalog.world import (
    NODE,
    ORDERS,
    World,
    backup_of,
    on_virtual_time,
    one_node,
    put_back,
)
from tests.unit.offload import world as offloading
from tests.unit.scheduler.test_scheduler import scheduler
from tests.unit.streams.test_owner_attach import attached, attaching, stage
from tierlog.adapters.memory.faults import Outcome
from tierlog.format import paths
from tierlog.model.errors import RetryableError
from tierlog.model.ledger import KEY_STAGED_NUMBER
from tierlog.model.node import NodeInfo
from tierlog_scheduler.staging import StagingSweeper

AGE_S = 3600.0
INFO = NodeInfo(node_id=NODE, wire_address="n:1", grpc_address="n:2", http_address="n:3")


async def made(world):
    """Return a catalog with two staging ledgers that are old, one that is young, a bare one."""
    process, claimed = await world.owner()
    await process.catalog.nodes.announce(INFO)
    old = [await staged(process, claimed), await staged(process, claimed, entries=-1)]
    # The clocks of ``staged`` stood at 7 ms.
    now_ms = process.clock.wall_ms()
    young = await process.catalog.bare.create(
        replace(staged_metadata(staging_of(claimed)), ctime_ms=now_ms)
    )
    bare = await process.catalog.bare.create(replace(one_node(), ctime_ms=7))
    return process, claimed, old, young, bare


def sweeper_of(process, *, stopped=lambda name: None, leading=lambda: True):
    return StagingSweeper(
        process.catalog,
        leading=leading,
        stopped=stopped,
        clock=process.clock,
        age_s=AGE_S,
        again_s=60.0,
    )


@on_virtual_time
async def test_only_what_is_staged_and_old_goes_at_the_second_look():
    process, claimed, old, young, bare = await made(World())
    sweeper = sweeper_of(process)
    assert await sweeper.sweep() == []
    attached = old.pop(0)
    await process.catalog.ledgers.attach(claimed, [attached])
    assert await sweeper.sweep() == old
    assert await sweeper.sweep() == []
    assert list(await process.catalog.bare.list_staging()) == [young]
    assert list(await process.catalog.bare.list_all()) == [young, bare]
    assert await process.catalog.ledgers.get(attached) is not None


@on_virtual_time
async def test_nothing_goes_while_deletions_of_its_stream_are_stopped():
    process, _, old, _, _ = await made(World())
    why = {ORDERS: "metadata older than the manifest"}
    sweeper = sweeper_of(process, stopped=why.get)
    for _ in range(3):
        assert await sweeper.sweep() == []
    why.clear()
    assert await sweeper.sweep() == []
    assert await sweeper.sweep() == old


@on_virtual_time
async def test_nothing_goes_by_metadata_from_a_backup_until_a_scrub_was_asked_to_repair():
    """They call staged what was attached since, and no manifest names it before it has a copy."""
    world = World()
    process, claimed, old, _, _ = await made(world)
    backup = backup_of(world.server)
    await process.catalog.ledgers.attach(claimed, [old[0]])
    put_back(world.server, backup)
    await process.catalog.scrubs.note_behind()
    sweeper = sweeper_of(process)
    with capture_logs() as logs:
        for _ in range(3):
            assert await sweeper.sweep() == []
    told = [one for one in logs if one["event"] == "staging.kept"]
    assert [one["count"] for one in told] == [2] * 3
    assert "tierlog scrub --repair" in told[0]["remedy"], "else they stay for ever, and why?"
    mark = await process.catalog.scrubs.mark()
    assert mark is not None
    assert await process.catalog.scrubs.note_repaired(mark)
    await process.catalog.nodes.announce(INFO)
    assert await sweeper.sweep() == []
    assert await sweeper.sweep() == old


@on_virtual_time
async def test_nothing_goes_while_no_storage_node_is_up_to_tell_of_a_backup():
    """The scheduler came back first, over an old disk of ZooKeeper: nobody can have marked it."""
    world = World()
    process, claimed, old, _, _ = await made(world)
    backup = backup_of(world.server)
    await process.catalog.ledgers.attach(claimed, [old[0]])
    put_back(world.server, backup)
    sweeper = sweeper_of(process)
    with capture_logs() as logs:
        for _ in range(3):
            assert await sweeper.sweep() == []
    assert [one["count"] for one in logs if one["event"] == "staging.kept"] == [2] * 3
    await process.catalog.nodes.announce(INFO)
    assert await sweeper.sweep() == [], "it needs some time to look"
    await process.catalog.scrubs.note_behind()
    assert await sweeper.sweep() == []


@on_virtual_time
async def test_one_that_can_not_be_deleted_keeps_no_other_one():
    process, _, old, _, _ = await made(World())
    sweeper = sweeper_of(process)
    await sweeper.sweep()
    delete = process.catalog.bare.delete

    async def first_fails(ledger_id):
        if ledger_id == old[0]:
            raise RetryableError("away", remedy="Again")
        await delete(ledger_id)

    process.catalog.bare.delete = first_fails
    process.faults.next("metadata.transact", Outcome.REPLY_LOST)
    assert await sweeper.sweep() == old[1:]
    process.catalog.bare.delete = delete
    assert await sweeper.sweep() == old[:1]


@on_virtual_time
async def test_one_that_can_not_be_read_keeps_no_other_one():
    process, claimed, old, _, _ = await made(World())
    bad, store = await staged(process, claimed), process.catalog.store
    found = await store.get(paths.ledger_path(bad))
    assert found is not None
    await store.set(paths.ledger_path(bad), b"\xff", version=found.version)
    await store.create(f"{paths.STAGING}/of somebody else", b"")
    sweeper = sweeper_of(process)
    with capture_logs() as logs:
        assert await sweeper.sweep() == []
        assert await sweeper.sweep() == old
    assert [one["name"] for one in logs if one["event"] == "staging.kept"][:2] == [
        paths.staging_path(bad).rpartition("/")[2],
        "of somebody else",
    ]


@pytest.mark.parametrize("leads", [True, False])
@on_virtual_time
async def test_it_runs_while_it_leads_until_it_is_to_stop(leads):
    process, _, old, young, _ = await made(World())
    sweeper = sweeper_of(process, leading=lambda: leads)
    if leads:  # the first look meets a store that is away
        process.faults.next("metadata.children", Outcome.REFUSED)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sweeper.run(stop))
        await asyncio.sleep(200)
        stop.set()
    left = list(await process.catalog.bare.list_staging())
    assert left == ([young] if leads else [*old, young])


@on_virtual_time
async def test_nothing_goes_before_the_leader_has_read_the_stream_and_its_manifest():
    world = offloading.World()
    claimed = await world.stream()
    catalog = world.catalog()
    await catalog.nodes.announce(INFO)
    ledger_id = await catalog.bare.create(staged_metadata(staging_of(claimed)))
    leader = scheduler(world)
    sweeper = StagingSweeper(
        catalog,
        leading=lambda: True,
        stopped=leader.kept_beside_passes,
        clock=world.clock,
        age_s=AGE_S,
        again_s=60.0,
    )

    async def swept():
        return await sweeper.sweep() + await sweeper.sweep()

    assert await swept() == [], "it does not lead"
    leader.leading = True
    path = paths.stream_path(claimed.name)
    found = await catalog.store.get(path)
    assert found is not None
    for broken in (False, True):
        # Each time a term begins: what was known before counts for nothing.
        await leader.begin()
        assert await swept() == [], "it has read nothing"
        if broken:
            await catalog.store.set(path, b"\xff", version=-1)
            await leader.run_pass()
            assert await swept() == [], "it could not read the stream"
    await catalog.store.set(path, found.data, version=-1)
    await leader.run_pass()
    assert await swept() == [ledger_id]


@on_virtual_time
async def test_one_whose_metadata_can_not_be_read_keeps_no_other_one():
    process, claimed, old, _, _ = await made(World())
    custom = {**staging_of(claimed).custom(), KEY_STAGED_NUMBER: b"none"}
    odd = await process.catalog.bare.create(replace(one_node(), custom=custom, ctime_ms=7))
    sweeper = sweeper_of(process)
    await sweeper.sweep()
    assert await sweeper.sweep() == old
    assert odd in await process.catalog.bare.list_staging()


def test_by_metadata_from_a_backup_no_commit_takes_the_one_before_it_for_what_others_left():
    """They call staged what was attached since, and the query goes on with its next number."""

    async def main():
        async with attaching() as (cluster, _, _, staging):
            catalog = cluster.catalog()
            attached_since = await stage(staging, b"a")
            await catalog.scrubs.note_behind()
            await attached(staging, await stage(staging, b"b", number=2), number=2)
            assert list(await catalog.bare.list_staging()) == [attached_since]
            mark = await catalog.scrubs.mark()
            assert mark is not None
            await catalog.scrubs.note_repaired(mark)
            await attached(staging, await stage(staging, b"c", number=3), number=3)
            assert await catalog.bare.list_staging() == {}

    run_virtual(main())
