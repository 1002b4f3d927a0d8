"""Work that outlasts who asked for it: its outcome, its errors, and its end."""

import asyncio

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.offload.groups import Outlasting


class Work:
    """A second of work, which counts how often it began and ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = self.ended = 0
        self.error = error

    async def __call__(self) -> str:
        self.begun += 1
        await asyncio.sleep(1)
        self.ended += 1
        if self.error is not None:
            raise self.error
        return "done"


@pytest.mark.parametrize("running", [True, False])
@on_virtual_time
async def test_who_asks_gets_the_outcome_or_the_error_and_nobody_else_does(running):
    outlasting, right, wrong = Outlasting(), Work(), Work(ValueError("not that"))

    async def ask_for_both():
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(outlasting.do(right))
            with pytest.raises(ValueError, match="not that"):
                await outlasting.do(wrong)
        assert asked.result() == "done"

    if running:
        async with outlasting.run():
            await ask_for_both()
    else:
        await ask_for_both()
    assert (right.begun, wrong.begun) == (1, 1)


@pytest.mark.parametrize("error", [None, ValueError("nobody hears it")])
@on_virtual_time
async def test_work_goes_on_when_who_asked_is_cancelled(error):
    outlasting, work = Outlasting(), Work(error)
    async with outlasting.run():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await outlasting.do(work)
        assert (work.begun, work.ended) == (1, 0)
        await asyncio.sleep(1)
        assert (work.begun, work.ended) == (1, 1)


@on_virtual_time
async def test_at_the_end_nothing_goes_on_and_who_still_waits_does_it_alone():
    outlasting, left, waited_for = Outlasting(), Work(), Work()
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        async with outlasting.run():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await outlasting.do(left)
            asked = group.create_task(outlasting.do(waited_for))
            await asyncio.sleep(0.1)
            ends_s = loop.time()
        assert loop.time() == ends_s, "the end waits for nothing"
    assert asked.result() == "done"
    assert (left.begun, left.ended) == (1, 0)
    assert (waited_for.begun, waited_for.ended) == (2, 1)
