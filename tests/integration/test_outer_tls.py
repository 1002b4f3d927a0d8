"""ZooKeeper and Redis over TLS: the real servers, behind something that encrypts.

Names are verified: a server with another certificate, or in plain text, is not spoken to.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import ssl
import threading
import uuid

import pytest

from tests.security.making import Authority
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.redis.cache import RedisCache, connection_of, digest_key, url_of
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata
from tierlog.adapters.zookeeper.metadata import connection_of as zookeeper_connection
from tierlog.model.errors import RetryableError
from tierlog.runtime.settings import RedisSettings, ZooKeeperSettings

pytestmark = pytest.mark.integration


@contextlib.asynccontextmanager
async def encrypted(address, issued, own_port=0):
    """Take TLS connections, and pass on what is in them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    host, _, port = address.rpartition(":")

    async def pass_on(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader, writer):
        behind_reader, behind_writer = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pass_on(reader, behind_writer))
            tasks.create_task(pass_on(behind_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", own_port, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def collect_sockets(before):
    """Collect while this test's warnings are filtered: clients given up end behind it."""
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("asyncio_"):  # the loop's own, which stay
            thread.join(30)
            assert not thread.is_alive(), thread
    gc.collect()


# kazoo leaves the socket of a handshake that failed to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_zookeeper_over_tls(servers, authority, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL + 1, "tierlog.zookeeper")  # records would keep those sockets
    root, before = f"/tls-{uuid.uuid4()}", set(threading.enumerate())
    settings = ZooKeeperSettings.model_validate(
        {"tls": {"enabled": True, "ca_file": str(authority.file)}}
    )
    how = zookeeper_connection(settings)
    plain = servers.endpoints.zookeeper_hosts
    async with encrypted(plain, authority.issue("zookeeper")) as address:
        store = await ZooKeeperMetadata.connect(address + root, how=how)
        await store.create("/made", b"over TLS")
        found = await store.get("/made")
        assert found is not None
        assert found.data == b"over TLS"
        await store.close()
    elsewhere = authority.issue("elsewhere", dns=("elsewhere",), addresses=())
    strange = tmp_path / "strange"
    strange.mkdir()
    for issued in (elsewhere, Authority(strange).issue("zookeeper")):
        async with encrypted(plain, issued) as address:
            with pytest.raises(RetryableError, match="unreachable"):
                await ZooKeeperMetadata.connect(address + root, how=how, connect_timeout_s=1)
    with pytest.raises(RetryableError, match="unreachable"):
        await ZooKeeperMetadata.connect(plain + root, how=how, connect_timeout_s=1)
    await asyncio.to_thread(collect_sockets, before)


async def test_redis_over_tls(servers, authority, tmp_path):
    plain = servers.endpoints.redis_url.removeprefix("redis://").partition("/")[0]
    prefix, clock = f"tls-{uuid.uuid4()}:", SimClock()

    def cache(address):
        settings = RedisSettings.model_validate(
            {
                "url": f"redis://{address}/0",
                "tls": {"enabled": True, "ca_file": str(authority.file)},
            }
        )
        return RedisCache(
            url_of(settings),
            clock=clock,
            key_prefix=prefix,
            timeout_s=2.0,
            how=connection_of(settings),
            secret=digest_key("ours"),
        )

    async with encrypted(plain, authority.issue("redis")) as address:
        good = cache(address)
        await good.put("key", b"value", ttl_s=60)
        assert await good.get("key") == b"value"
        await good.close()
        # Of another authority, behind the same address and in the same file.
        kept = cache(address)
        assert await kept.get("key") == b"value"
        await kept._redis.connection_pool.disconnect()
    folder = tmp_path / "next"
    folder.mkdir()
    following = Authority(folder)
    async with encrypted(plain, following.issue("redis"), int(address.rpartition(":")[2])):
        clock.advance(60)
        assert await kept.get("key") is None
        authority.file.write_bytes(following.file.read_bytes())
        clock.advance(60)
        assert await kept.get("key") == b"value"
        await kept.close()
    elsewhere = following.issue("elsewhere", dns=("elsewhere",), addresses=())
    async with encrypted(plain, elsewhere) as address:
        bad = cache(address)
        assert await bad.get("key") is None
        await bad.close()
