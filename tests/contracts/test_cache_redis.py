"""Redis keeps the cache's contract; dead, slow, spoilt or cheated, it is an empty one, cheaply.

Design: architecture.md (Redis holds only what can be recomputed), reliability.md C2 (down, slow,
flushed, poisoned).
"""

import asyncio
import time
import uuid

import pytest
from redis.asyncio import Redis

from tests.contracts.cache_suite import CacheContract
from tests.contracts.proxy import Proxy
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.redis.cache import RedisCache
from tierlog.adapters.system import SystemClock

pytestmark = pytest.mark.integration


@pytest.fixture
def url(servers):
    return servers.endpoints.redis_url


@pytest.fixture
def prefix():
    return f"contract-{uuid.uuid4()}:"


@pytest.fixture
async def given():
    clients: list[RedisCache] = []
    yield clients
    for client in clients:
        await client.close()


@pytest.fixture
def connect(url, prefix, given):
    def connect(address=url, clock=None, **options):
        given.append(
            RedisCache(address, clock=clock or SystemClock(), key_prefix=prefix, **options)
        )
        return given[-1]

    return connect


@pytest.fixture
async def redis(url):
    client = Redis.from_url(url)
    yield client
    await client.aclose()


@pytest.fixture
def wait():
    return asyncio.sleep


class TestRedisCache(CacheContract):
    pass


async def test_a_dead_server_costs_nothing_after_the_first_call(connect, free_port):
    clock = SimClock()
    cache = connect(f"redis://127.0.0.1:{free_port}/0", clock)
    assert await cache.get("a") is None
    began = time.perf_counter()
    for _ in range(1000):
        assert await cache.get("a") is None
        await cache.put("a", b"x", ttl_s=60)
    assert time.perf_counter() - began < 0.5


async def test_a_silent_server_is_given_up_in_time_and_found_again(connect, url):
    clock = SimClock()
    async with Proxy(url.removeprefix("redis://").partition("/")[0]) as proxy:
        cache = connect(f"redis://{proxy.address}/0", clock, timeout_s=0.2)
        await cache.put("a", b"x", ttl_s=60)
        assert await cache.get("a") == b"x"
        proxy.hold()
        began = time.perf_counter()
        assert await cache.get("a") is None
        assert time.perf_counter() - began < 1
        proxy.restore()
        assert await cache.get("a") is None  # not asked yet
        clock.advance(1.0)
        assert await cache.get("a") == b"x"
        assert await cache.get("a") == b"x"


async def test_while_it_is_away_one_call_at_a_time_tries(connect, free_port):
    clock = SimClock()
    cache = connect(f"redis://127.0.0.1:{free_port}/0", clock)
    tries = 0
    original = cache._redis.getrange

    def count(*args):
        nonlocal tries
        tries += 1
        return original(*args)

    cache._redis.getrange = count
    await cache.get("a")
    assert tries == 1
    clock.advance(1.0)
    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(cache.get("a"))
    assert tries == 2
    clock.advance(1.9)
    await cache.get("a")
    assert tries == 2  # the second wait is longer
    clock.advance(0.2)
    await cache.get("a")
    assert tries == 3


async def test_what_is_not_ours_is_a_miss(connect, redis, prefix):
    cache = connect(value_bytes_max=1000)
    await cache.put("a", b"good", ttl_s=60)
    await cache.put("b", b"other", ttl_s=60)
    swapped = await redis.get(f"{prefix}b")
    for poison in (b"", b"short", b"x" * 500, b"x" * 5_000_000, swapped):
        await redis.set(f"{prefix}a", poison)
        assert await cache.get("a") is None
    await redis.delete(f"{prefix}a")
    await redis.rpush(f"{prefix}a", "a list")
    assert await cache.get("a") is None
    assert await cache.get("b") == b"other"  # a poisoned key is no outage


async def test_with_a_secret_nobody_else_can_write(connect):
    ours, theirs = connect(secret=b"ours"), connect(secret=b"theirs")
    await theirs.put("a", b"forged", ttl_s=60)
    assert await ours.get("a") is None
    await ours.put("a", b"true", ttl_s=60)
    assert await ours.get("a") == b"true"


async def test_too_large_a_value_is_not_kept(connect, redis, prefix):
    cache = connect(value_bytes_max=1000)
    await cache.put("a", b"x" * 1001, ttl_s=60)
    assert await redis.exists(f"{prefix}a") == 0
    await cache.put("a", b"x" * 1000, ttl_s=60)
    assert await cache.get("a") == b"x" * 1000


async def test_many_at_once(connect):
    cache = connect(timeout_s=5)
    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(cache.put(f"{number}", b"%d" % number, ttl_s=60))
    assert [await cache.get(f"{number}") for number in range(200)] == [
        b"%d" % number for number in range(200)
    ]
