"""ZooKeeper keeps the metadata contract; lost answers, sessions and servers are told as lost."""

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
from kazoo.client import KazooClient

from tests.contracts.metadata_suite import MetadataContract
from tests.contracts.proxy import Proxy
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.ports.metadata import Versioned

pytestmark = pytest.mark.integration


@pytest.fixture
def root():
    return f"/contract-{uuid.uuid4()}"


@pytest.fixture
def hosts(servers):
    return servers.endpoints.zookeeper_hosts


@pytest.fixture
async def connect(hosts):
    clients: list[ZooKeeperMetadata] = []

    async def connect(address: str = hosts, **options) -> ZooKeeperMetadata:
        clients.append(await ZooKeeperMetadata.connect(address, **options))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()


@pytest.fixture
async def proxy(hosts) -> AsyncIterator[Proxy]:
    async with Proxy(hosts) as proxy:
        yield proxy


@pytest.fixture
def expire(hosts):
    async def expire(client: ZooKeeperMetadata) -> None:
        """End the session as ZooKeeper's own tests do: take it over, then close it."""
        session = client._client.client_id

        def take_over_and_close() -> None:
            other = KazooClient(hosts, client_id=session)
            other.start()
            other.stop()
            other.close()

        await asyncio.to_thread(take_over_and_close)

    return expire


class TestZooKeeperMetadata(MetadataContract):
    pass


async def test_unreachable_is_unavailable_in_time_and_names_the_hosts(free_port):
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(RetryableError) as caught:
        await ZooKeeperMetadata.connect(f"127.0.0.1:{free_port}", connect_timeout_s=1)
    assert loop.time() - began < 5
    assert caught.value.reason is Reason.UNAVAILABLE
    assert f"127.0.0.1:{free_port}" in str(caught.value)
    assert "TIERLOG_ZOOKEEPER__HOSTS" in caught.value.remedy


@pytest.mark.parametrize("hosts", ["", "/root", "a:b", ":1", "host:99999", "a,,b"])
async def test_what_names_no_hosts_is_refused(hosts):
    with pytest.raises(RefusedError, match="can't be read") as caught:
        await ZooKeeperMetadata.connect(hosts)
    assert "TIERLOG_ZOOKEEPER__HOSTS" in caught.value.remedy


async def test_a_dropped_reply_of_a_change_is_indeterminate_and_was_done(connect, proxy, root):
    store = await connect(proxy.address)
    await store.create(f"{root}/a", b"one")
    proxy.drop_replies_and_cut()
    with pytest.raises(IndeterminateError):
        await store.set(f"{root}/a", b"two", version=0)
    proxy.restore()
    # The same client reads back through its next connection, in the same session.
    assert not store.session_lost.is_set()
    await store.sync(f"{root}/a")
    assert await store.get(f"{root}/a") == Versioned(b"two", 1)


async def test_a_dropped_request_is_indeterminate_and_was_not_done(connect, proxy, root):
    store = await connect(proxy.address)
    await store.create(f"{root}/a", b"one")
    proxy.drop_requests_and_cut()
    with pytest.raises(IndeterminateError):
        await store.set(f"{root}/a", b"two", version=0)
    proxy.restore()
    await store.sync(f"{root}/a")
    assert await store.get(f"{root}/a") == Versioned(b"one", 0)


async def test_a_read_survives_a_lost_connection(connect, proxy, root):
    store = await connect(proxy.address)
    await store.create(f"{root}/a", b"one")
    proxy.cut()
    assert await store.get(f"{root}/a") == Versioned(b"one", 0)


async def test_while_away_nothing_is_sent_and_watches_fire(connect, proxy, root):
    store = await connect(proxy.address, session_timeout_s=2)
    await store.create(f"{root}/a", b"one")
    _, changed = await store.watch(f"{root}/a")
    _, children_changed = await store.watch_children(root)
    await proxy.stop()
    async with asyncio.timeout(10):
        await changed.wait()
        await children_changed.wait()
    with pytest.raises(RetryableError) as caught:
        await store.set(f"{root}/a", b"two", version=0)
    assert proxy.address in str(caught.value)
    with pytest.raises(RetryableError):
        await store.get(f"{root}/a")


async def test_watching_again_and_again_keeps_one_watch(connect, root):
    store = await connect()
    await store.create(f"{root}/a", b"")
    for _ in range(50):
        await store.watch(f"{root}/a")
        await store.watch_children(root)
        await store.watch(f"{root}/missing")
    kept = sum(len(watchers) for watchers in store._client._data_watchers.values())
    assert kept == 2
    assert len(store._watches) == 3


@pytest.mark.covers("D20")
async def test_of_a_list_of_servers_one_that_runs_is_enough(connect, hosts, free_port, root):
    store = await connect(f"127.0.0.1:{free_port},{hosts}")
    await store.create(root, b"x")
    assert await store.get(root) == Versioned(b"x", 0)


async def test_a_chroot_is_made(connect, hosts, root):
    inside = await connect(f"{hosts}{root}")
    await inside.create("/a/b", b"x")
    assert await inside.create_ephemeral("/a/n-", b"", sequential=True) == "/a/n-0000000001"
    outside = await connect()
    await outside.sync(root)
    assert await outside.get(f"{root}/a/b") == Versioned(b"x", 0)


async def test_many_changes_at_once_keep_their_order(connect, root):
    store = await connect()
    await store.create(f"{root}/a", b"")
    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(store.set(f"{root}/a", b"%d" % number, version=number))
    assert await store.get(f"{root}/a") == Versioned(b"199", 200)


async def test_a_server_killed_and_started_again_is_found(connect, servers, root):
    store = await connect(session_timeout_s=10)
    await store.create(f"{root}/a", b"one")
    await store.create_ephemeral(f"{root}/mine", b"")
    lost = store.session_lost
    loop = asyncio.get_running_loop()
    killed_s = loop.time()
    servers.kill("zookeeper")
    await servers.restart("zookeeper")
    async with asyncio.timeout(30):
        while True:
            # A server that just starts takes connections that it does not serve yet.
            try:
                await store.sync(root)
            except RetryableError:
                continue
            break
    in_time = loop.time() - killed_s < 10
    assert await store.get(f"{root}/a") == Versioned(b"one", 0)
    assert await store.set(f"{root}/a", b"two", version=0) == 1
    # The session outlives the server when that comes back in time; else its end is told.
    if in_time:
        assert not lost.is_set()
    mine = await store.get(f"{root}/mine")
    assert mine == (None if lost.is_set() else Versioned(b"", 0))
