"""A semaphore of which each holder takes several: never too much, in order, and who goes."""

import asyncio
import contextlib
import random

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.offload.semaphore import WeightedSemaphore


@pytest.mark.parametrize("seed", range(5))
@on_virtual_time
async def test_it_never_gives_more_than_there_is_and_all_who_stay_come_in_their_order(seed):
    chance, came, most = random.Random(seed), list[int](), list[int]()
    semaphore = WeightedSemaphore(10, lambda: most.append(semaphore.taken))

    async def ask(number: int, size: int, patience_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s), semaphore.room(size):
                came.append(number)
                await asyncio.sleep(chance.random())

    async with asyncio.TaskGroup() as group:
        for number in range(200):
            size = 10 if number == 100 else chance.randint(1, 10)
            patience_s = chance.choice([0.3, 3.0, 1000.0]) if number != 100 else 1000.0
            group.create_task(ask(number, size, patience_s))
    assert came == sorted(came)
    assert 100 in came, "who asks for all of it is not passed by"
    assert (max(most), semaphore.taken, len(semaphore._waiting)) == (10, 0, 0)


@pytest.mark.parametrize("ticks", range(4))
@on_virtual_time
async def test_who_goes_in_the_moment_of_its_turn_gives_it_to_the_next(ticks):
    semaphore = WeightedSemaphore(1)

    async def ask(hold_s: float) -> None:
        async with semaphore.room(1):
            await asyncio.sleep(hold_s)

    asked = [asyncio.create_task(ask(hold_s)) for hold_s in (1.0, 5.0, 5.0)]
    await asyncio.sleep(0)
    asked[0].cancel()
    for _ in range(ticks):
        await asyncio.sleep(0)
    asked[1].cancel()
    await asyncio.sleep(0.1)
    assert (semaphore.taken, len(semaphore._waiting)) == (1, 0), "the third has it"
    await asked[2]
    assert semaphore.taken == 0


@on_virtual_time
async def test_who_goes_while_others_wait_before_it_leaves_no_trace():
    semaphore = WeightedSemaphore(1)
    async with semaphore.room(1), asyncio.TaskGroup() as group:
        first = group.create_task(_wait_for_ever(semaphore))
        await asyncio.sleep(0)
        for _ in range(100):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await _wait_for_ever(semaphore)
        assert len(semaphore._waiting) == 1
        first.cancel()
    assert (semaphore.taken, len(semaphore._waiting)) == (0, 0)


async def _wait_for_ever(semaphore: WeightedSemaphore) -> None:
    async with semaphore.room(1):
        raise AssertionError("there is none")
