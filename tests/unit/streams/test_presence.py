"""A node stays registered: through lost sessions, and after a crash whose session lingers."""

import asyncio
import dataclasses

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import SmallCluster
from tierlog.catalog import Catalog
from tierlog.model.errors import RefusedError
from tierlog.model.ids import NodeId
from tierlog_ingest.presence import Presence

N1 = NodeId("n1")


def client(cluster):
    store = cluster.metadata.connect()
    return store, Catalog.over(store, clock=cluster.clock, ids=cluster.ids)


def presence(cluster, catalog, *, wire="n1:1", patience_s=60.0):
    info = cluster.info(N1)
    info = type(info)(node_id=N1, wire_address=wire, grpc_address="n1:2", http_address="n1:3")
    return Presence(catalog, info, ids=cluster.ids, patience_s=patience_s)


def test_a_lost_session_is_followed_by_another_registration():
    async def main():
        cluster = SmallCluster()
        store, catalog = client(cluster)
        one = presence(cluster, catalog)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(one.run())
            await one.registered.wait()
            assert set(await catalog.nodes.live()) == {"n1"}
            store.expire_session()
            await asyncio.sleep(5)
            assert one.registered.is_set()
            assert set(await catalog.nodes.live()) == {"n1"}
            running.cancel()

    run_virtual(main())


@pytest.mark.parametrize("wire", ["n1:1", "n1:99"])
def test_a_registration_left_by_a_crash_is_outlived_on_the_same_and_on_other_ports(wire):
    async def main():
        cluster = SmallCluster()
        crashed_store, crashed = client(cluster)
        await crashed.nodes.announce(presence(cluster, crashed).info)
        _, catalog = client(cluster)
        one = presence(cluster, catalog, wire=wire)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(one.run())
            await asyncio.sleep(3)
            crashed_store.expire_session()
            await asyncio.sleep(3)
            assert one.registered.is_set()
            live = await catalog.nodes.live()
            assert live[N1].wire_address == wire
            running.cancel()

    run_virtual(main())


def test_another_process_with_the_same_id_is_an_error_once_a_crash_is_ruled_out():
    async def main():
        cluster = SmallCluster()
        _, first = client(cluster)
        await first.nodes.announce(presence(cluster, first).info)
        _, catalog = client(cluster)
        one = presence(cluster, catalog, wire="n1:99", patience_s=20.0)
        with pytest.raises(RefusedError, match="registered already"):
            await one.run()
        assert asyncio.get_running_loop().time() > 20

    run_virtual(main())


def test_a_read_only_node_says_so_and_takes_it_back():
    async def main():
        cluster = SmallCluster()
        _, catalog = client(cluster)
        one = presence(cluster, catalog)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(one.run())
            await one.registered.wait()
            for read_only in (True, False):
                one.amend(dataclasses.replace(one.info, read_only=read_only))
                await asyncio.sleep(1)
                assert one.registered.is_set()
                assert (await catalog.nodes.live())[N1].read_only is read_only
            running.cancel()

    run_virtual(main())


def test_what_a_node_tells_is_waited_for_until_others_can_read_it():
    async def main():
        cluster = SmallCluster()
        _, catalog = client(cluster)
        one = presence(cluster, catalog)
        one.amend(dataclasses.replace(one.info, draining=True))
        assert not await one.told(timeout_s=0.5)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(one.run())
            assert await one.told(timeout_s=0.5)
            one.amend(dataclasses.replace(one.info, draining=False))
            assert await one.told(timeout_s=0.5)
            assert not (await catalog.nodes.live())[N1].draining
            running.cancel()

    run_virtual(main())
