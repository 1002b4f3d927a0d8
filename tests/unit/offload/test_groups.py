"""Work that outlasts who began it: within ``run``, so much of it at once, and its end; limits."""

import asyncio

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.offload.groups import Outlasting, plain_errors, within


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


async def failed_and_slow_to_clean_up() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.1)
        raise ValueError

    try:
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
    except ValueError:
        await asyncio.sleep(100)


@on_virtual_time
async def test_a_time_limit_is_told_as_one_also_behind_a_group_that_failed():
    with pytest.raises(TimeoutError):
        async with within(asyncio.timeout(1)):
            await failed_and_slow_to_clean_up()


@on_virtual_time
async def test_who_is_cancelled_before_the_time_is_over_is_cancelled():
    async def limited() -> None:
        async with within(asyncio.timeout(1)):
            await failed_and_slow_to_clean_up()

    task = asyncio.create_task(limited())
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
