"""Nodes that a service makes with a username are for that identity alone, on a real ZooKeeper."""

from __future__ import annotations

import contextlib

import pytest

from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.system import SystemIds
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata, connection_of
from tierlog.catalog import Catalog
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import StreamName
from tierlog.ports.metadata import Create
from tierlog.runtime.settings import ZooKeeperSettings

pytestmark = pytest.mark.integration


@contextlib.asynccontextmanager
async def connected(hosts, **identity):
    settings = ZooKeeperSettings.model_validate({"hosts": hosts, **identity})
    store = await ZooKeeperMetadata.connect(hosts, how=connection_of(settings))
    try:
        yield store
    finally:
        await store.close()


async def _denied(work):
    with pytest.raises(RefusedError) as caught:
        await work
    assert caught.value.reason is Reason.PERMISSION_DENIED


async def test_nobody_else_reads_or_changes_them(zookeeper_corner):
    own = {"username": "tierlog", "password": "hush"}
    async with connected(zookeeper_corner, **own) as store:
        catalog = Catalog.over(store, clock=SimClock(), ids=SystemIds())
        await catalog.streams.ensure_roots()
        await catalog.nodes.ensure_cluster()
        stream, _ = await catalog.streams.create(StreamName("orders"), raw=False)
        assert stream.name == "orders"
        await store.create("/made", b"ours")
        await store.create_ephemeral("/fleeting", b"ours")
        await store.transact([Create("/in-a-transaction", b"ours")])
        hosts, _, root = zookeeper_corner.partition("/")
        for stranger in ({}, {"username": "tierlog", "password": "guess"}):
            with pytest.raises(RefusedError) as caught:
                async with connected(zookeeper_corner, **stranger):
                    pass
            assert caught.value.reason is Reason.PERMISSION_DENIED
            async with connected(hosts, **stranger) as other:
                for path in ("made", "fleeting", "in-a-transaction", "tierlog", "ledgers"):
                    await _denied(other.get(f"/{root}/{path}"))
                    await _denied(other.children(f"/{root}/{path}"))
                    await _denied(other.set(f"/{root}/{path}", b"theirs", version=0))
                await _denied(other.create(f"/{root}/made/below", b"theirs"))
                await _denied(other.delete(f"/{root}/made", version=0))
        found = await store.get("/made")
        assert found is not None
        assert found.data == b"ours"
    async with connected(zookeeper_corner, **own) as again:
        found = await again.get("/in-a-transaction")
        assert found is not None
