"""Clocks and ids, real and simulated: one only moves forward, ids differ, one seed repeats them."""

import asyncio
import random
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.system import SystemClock, SystemIds


@pytest.fixture(params=[SystemClock, SimClock])
def clock(request):
    return request.param()


@pytest.fixture(params=[SystemIds, lambda: SeededIds(random.Random(1))])
def ids(request):
    return request.param()


async def test_both_clocks_go_on_while_one_waits(clock):
    wall_ms, monotonic_s = clock.wall_ms(), clock.monotonic_s()
    await asyncio.sleep(0.05)
    assert 0.04 < clock.monotonic_s() - monotonic_s < 5
    assert 40 < clock.wall_ms() - wall_ms < 5000
    assert 1_600_000_000_000 < wall_ms < 4_000_000_000_000


def test_a_simulated_wall_clock_can_be_set_wrong_and_the_other_can_not():
    async def main():
        clock = SimClock(wall_ms=1_000_000)
        await asyncio.sleep(10)
        clock.jump_wall(-5 * 3600)
        await asyncio.sleep(1)
        clock.jump_wall(10 * 3600)
        clock.advance(0.5)
        return clock.wall_ms(), clock.monotonic_s()

    assert run_virtual(main()) == (1_000_000 + 11_500 + 5 * 3600 * 1000, 11.5)


def test_ids_differ_and_are_random_uuids(ids):
    drawn = {ids.uuid() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(isinstance(each, UUID) and each.version == 4 for each in drawn)
    assert all(2.0 <= ids.uniform(2.0, 3.0) <= 3.0 for _ in range(1000))


def test_one_seed_repeats_the_ids():
    one, same, other = (SeededIds(random.Random(seed)) for seed in (1, 1, 2))
    first = [one.uuid() for _ in range(10)]
    assert [same.uuid() for _ in range(10)] == first
    assert [other.uuid() for _ in range(10)] != first
