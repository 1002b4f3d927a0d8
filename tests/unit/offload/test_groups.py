"""Work that outlasts who began it: within ``run``, so much of it at once, and its end. Turns."""

import asyncio
import contextlib
import random

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.offload.groups import Outlasting, Turns


class Work:
    """A second of work, which counts how often it began, ended and was given up."""

    def __init__(self) -> None:
        self.begun = self.ended = self.given_up = 0

    async def __call__(self) -> None:
        self.begun += 1
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        self.ended += 1


async def begin_and_go(outlasting, work) -> None:
    """Begin work, and be cancelled in the middle of it."""

    async def wait() -> None:
        await outlasting.begin(work())
        await asyncio.sleep(100)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await wait()


@on_virtual_time
async def test_work_goes_on_when_who_began_it_goes():
    outlasting, work = Outlasting(), Work()
    async with outlasting.run():
        await begin_and_go(outlasting, work)
        await asyncio.sleep(1)
        assert (work.begun, work.ended, work.given_up) == (1, 1, 0)


@on_virtual_time
async def test_so_much_at_once_and_what_is_beside_it_goes_with_who_began_it():
    outlasting, kept, beside = Outlasting(tasks_max=2), Work(), Work()
    async with outlasting.run():
        for _ in range(2):
            await outlasting.begin(kept())
        await begin_and_go(outlasting, beside)
        assert beside.given_up == 1
        await asyncio.sleep(1)
        assert kept.ended == 2
        await begin_and_go(outlasting, kept)
        await asyncio.sleep(1)
        assert kept.ended == 3, "there is room again"


@on_virtual_time
async def test_without_run_it_is_done_by_who_begins_it():
    outlasting, work = Outlasting(), Work()
    await outlasting.begin(work())
    assert work.ended == 1
    await begin_and_go(outlasting, work)
    assert work.given_up == 1


@on_virtual_time
async def test_at_the_end_all_is_given_up_and_may_say_so():
    outlasting, work = Outlasting(), Work()
    loop = asyncio.get_running_loop()
    async with outlasting.run():
        await outlasting.begin(work())
        await asyncio.sleep(0.5)
        await outlasting.begin(work())
        ends_s = loop.time()
    assert loop.time() == ends_s, "the end waits for nothing"
    assert (work.begun, work.given_up, work.ended) == (2, 2, 0)


@pytest.mark.parametrize("seed", range(5))
@on_virtual_time
async def test_turns_never_give_more_than_there_is_and_all_who_stay_come_in_their_order(seed):
    chance, came, most = random.Random(seed), list[int](), list[int]()
    turns = Turns(10, lambda: most.append(turns.taken))

    async def ask(number: int, size: int, patience_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s), turns.room(size):
                came.append(number)
                await asyncio.sleep(chance.random())

    async with asyncio.TaskGroup() as group:
        for number in range(200):
            size = 10 if number == 100 else chance.randint(1, 10)
            patience_s = chance.choice([0.3, 3.0, 1000.0]) if number != 100 else 1000.0
            group.create_task(ask(number, size, patience_s))
    assert came == sorted(came)
    assert 100 in came, "who asks for all of it is not passed by"
    assert (max(most), turns.taken, len(turns._waiting)) == (10, 0, 0)


@pytest.mark.parametrize("ticks", range(4))
@on_virtual_time
async def test_who_goes_in_the_moment_of_its_turn_gives_it_to_the_next(ticks):
    turns = Turns(1)

    async def ask(hold_s: float) -> None:
        async with turns.room(1):
            await asyncio.sleep(hold_s)

    asked = [asyncio.create_task(ask(hold_s)) for hold_s in (1.0, 5.0, 5.0)]
    await asyncio.sleep(0)
    asked[0].cancel()
    for _ in range(ticks):
        await asyncio.sleep(0)
    asked[1].cancel()
    await asyncio.sleep(0.1)
    assert (turns.taken, len(turns._waiting)) == (1, 0), "the third has it"
    await asked[2]
    assert turns.taken == 0


@on_virtual_time
async def test_who_goes_while_others_wait_before_it_leaves_no_trace():
    turns = Turns(1)
    async with turns.room(1), asyncio.TaskGroup() as group:
        first = group.create_task(_wait_for_ever(turns))
        await asyncio.sleep(0)
        for _ in range(100):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await _wait_for_ever(turns)
        assert len(turns._waiting) == 1
        first.cancel()
    assert (turns.taken, len(turns._waiting)) == (0, 0)


async def _wait_for_ever(turns: Turns) -> None:
    async with turns.room(1):
        raise AssertionError("there is none")
