"""Virtual time: a run takes no real time, and one seed replays it (style.md 47)."""

import asyncio
import random
import time

import pytest

from tests.simulation.virtual_loop import DeadlockError, OutOfTimeError, run_virtual


def test_hours_pass_at_once():
    async def main():
        await asyncio.sleep(10 * 3600)
        async with asyncio.timeout(50 * 3600):
            await asyncio.sleep(40 * 3600)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run_virtual(main()) == pytest.approx(50 * 3600)
    assert time.perf_counter() - began < 1


def test_timers_fire_in_order_and_time_stands_still_meanwhile():
    async def main():
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, str]] = []

        async def note(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append((loop.time(), name))

        async with asyncio.TaskGroup() as group:
            for name, delay_s in [("c", 3), ("a", 1), ("b", 2), ("a2", 1)]:
                group.create_task(note(name, delay_s))
        return seen

    assert run_virtual(main()) == [(1, "a"), (1, "a2"), (2, "b"), (3, "c")]


def test_deadlock_is_loud():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run_virtual(main())


def test_deadlock_of_a_child_is_loud():
    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())

    with pytest.raises(DeadlockError):
        run_virtual(main())


def test_a_run_without_end_is_ended():
    async def main():
        while True:
            await asyncio.sleep(1)

    with pytest.raises(OutOfTimeError):
        run_virtual(main(), until_s=100)


def test_threads_are_refused():
    async def main():
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="no threads"):
        run_virtual(main())


def test_timeouts_are_virtual():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(60)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 30


def test_one_seed_replays_a_run():
    async def main(rng: random.Random) -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        trace: list[tuple[float, int]] = []

        async def walk(number: int) -> None:
            try:
                for _ in range(rng.randrange(20)):
                    await asyncio.sleep(rng.random())
                    trace.append((loop.time(), number))
                if number == 7:
                    raise ValueError
                await asyncio.sleep(1000)
            finally:
                trace.append((loop.time(), -number))  # the order of cancellation

        async def walk_all() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(1, 50):
                    group.create_task(walk(number))

        with pytest.raises(ExceptionGroup):
            await walk_all()
        return trace

    first = run_virtual(main(random.Random(1)))
    ballast = [object() for _ in range(10_000)]  # other addresses the second time
    assert run_virtual(main(random.Random(1))) == first
    assert run_virtual(main(random.Random(2))) != first
    del ballast
