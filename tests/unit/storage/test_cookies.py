"""Cookies (protocols.md section 2): "A directory without the node's cookie, or with another's, is
refused. Formatting gives a node a new id; no id is used twice."
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import make_run, opened
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.catalog.draining import DrainingCatalog
from tierlog.format import paths
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import NodeId
from tierlog_ingest.storage.cookies import COOKIE_PATH, check_cookie
from tierlog_ingest.storage.formatting import format_directories

CLUSTER, OTHER = UUID(int=1), UUID(int=2)
N1, N2 = NodeId("n1"), NodeId("n2")


class World:
    def __init__(self):
        self.metadata = MemoryMetadata()
        self.disk = self.new_disk()
        self.ids = SeededIds(random.Random(1))

    def new_disk(self):
        return MemoryDisk(random.Random(1))

    def check(self, *, disk=None, cluster_id=CLUSTER, node_id=N1, faults=None, disk_faults=None):
        async def once():
            files = (disk or self.disk).mount(disk_faults)
            store = self.metadata.connect(faults)
            return await check_cookie(
                files, store, self.ids, cluster_id=cluster_id, node_id=node_id
            )

        return run_virtual(once())


@pytest.fixture
def world():
    return World()


def test_a_fresh_node_is_formatted_once(world):
    cookie = world.check()
    assert (cookie.cluster_id, cookie.node_id) == (CLUSTER, N1)
    world.disk.crash()
    assert world.check() == cookie
    world.disk.write_whole("state", b"data")
    assert world.check() == cookie
    assert world.check(disk=world.new_disk(), node_id=N2).instance_id != cookie.instance_id


def test_a_lost_directory_is_not_served_as_if_empty(world):
    world.check()
    for data in ((), ("state",)):
        disk = world.new_disk()
        for name in data:
            disk.write_whole(name, b"data")
        with pytest.raises(RefusedError, match="no cookie") as caught:
            world.check(disk=disk)
        assert "repair" in caught.value.remedy


def test_another_nodes_disk_and_another_cluster_are_refused(world):
    world.check()
    with pytest.raises(RefusedError, match="belongs to node n1"):
        world.check(node_id=N2)
    with pytest.raises(RefusedError, match="cluster"):
        world.check(cluster_id=OTHER)


def test_an_older_format_of_the_same_node_is_refused(world):
    world.check()
    old = world.disk
    world.metadata = MemoryMetadata()
    world.disk = world.new_disk()
    world.check()
    with pytest.raises(RefusedError, match="older format"):
        world.check(disk=old)


def test_data_that_the_metadata_store_does_not_know_is_refused(world):
    world.check()
    world.disk.write_whole("state", b"data")
    world.metadata = MemoryMetadata()
    with pytest.raises(RefusedError, match="does not know"):
        world.check()
    world.disk = world.new_disk()
    world.disk.write_whole("state", b"data")
    with pytest.raises(RefusedError, match="no cookie"):
        world.check()


def test_a_damaged_cookie_is_refused(world):
    world.check()
    world.disk.write_whole(COOKIE_PATH, b"\xff\xff")
    with pytest.raises(CorruptError):
        world.check()


def test_a_directory_that_was_emptied_takes_a_new_node_and_never_the_old_one(world):
    async def live():
        async with opened(world.disk) as node:
            await node.add(make_run(1, 0))

    world.check()
    run_virtual(live(), until_s=100)
    steps = 0
    while world.disk.exists(COOKIE_PATH) or world.disk.exists("state"):
        steps += 1

        async def crash(step=steps):
            faults = Faults(random.Random(step))
            faults.crash_after(step)
            faults.on_crash = world.disk.crash
            async with asyncio.timeout(60):
                await format_directories([world.disk.mount(faults)])

        with contextlib.suppress(TimeoutError):
            run_virtual(crash())
        if not world.disk.exists(COOKIE_PATH):
            with pytest.raises(RefusedError, match="no cookie"):
                world.check()
        if world.disk.exists("state"):
            with pytest.raises(RefusedError):
                world.check(node_id=N2)
    assert steps > 5
    assert world.check(node_id=N2).node_id == N2


def test_an_answer_that_was_lost_is_read_back(world):
    for outcome in (Outcome.REPLY_LOST, Outcome.REQUEST_LOST):
        world.metadata, world.disk = MemoryMetadata(), world.new_disk()
        faults = Faults(random.Random(1))
        faults.next("metadata.create", outcome)
        cookie = world.check(faults=faults)
        assert world.check() == cookie


@pytest.mark.parametrize("step", range(1, 26))
def test_a_format_that_is_cut_short_is_gone_on_with(world, step):
    async def crash():
        faults = Faults(random.Random(step))
        faults.crash_after(step)
        faults.on_crash = world.disk.crash
        async with asyncio.timeout(60):
            await check_cookie(
                world.disk.mount(faults),
                world.metadata.connect(faults),
                world.ids,
                cluster_id=CLUSTER,
                node_id=N1,
            )

    with contextlib.suppress(TimeoutError):
        run_virtual(crash())
    cookie = world.check()
    assert cookie == world.check()
    assert paths.cookie_path(N1) in world.metadata.dump()


def test_the_id_of_a_node_that_was_decommissioned_is_never_used_again(world):
    world.check()
    store = world.metadata.connect()
    draining = DrainingCatalog(store, clock=SimClock(), ids=world.ids)
    run_virtual(draining.begin(N1))
    assert world.check().node_id == N1, "while it is emptied it may start again"
    run_virtual(draining.finish(N1))
    for disk in (world.disk, world.new_disk()):
        with pytest.raises(RefusedError, match="was decommissioned"):
            world.check(disk=disk)
    assert world.check(disk=world.new_disk(), node_id=N2).node_id == N2
