"""The cache's twin keeps the contract; its troubles are misses."""

import random

import pytest

from tests.contracts.cache_suite import CacheContract
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults


@pytest.fixture
def clock():
    return SimClock()


@pytest.fixture
def cache(clock):
    return MemoryCache(clock)


@pytest.fixture
def connect(cache):
    return cache.connect


@pytest.fixture
def wait(clock):
    async def wait(seconds):
        clock.advance(seconds)

    return wait


class TestMemoryCache(CacheContract):
    pass


async def test_trouble_is_a_miss(cache):
    faults = Faults(random.Random(0))
    client = cache.connect(faults)
    await client.put("a", b"x", ttl_s=60)
    faults.outages.add("cache")
    assert await client.get("a") is None
    await client.put("a", b"y", ttl_s=60)
    faults.outages.clear()
    assert await client.get("a") == b"x"
