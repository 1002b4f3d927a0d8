"""Errors out of task groups as what they are, and work that outlasts who asked for it.

A TaskGroup wraps what its tasks raise. Callers here catch Tierlog's kinds; ``plain_errors``
gives them the first one, with the group as its cause.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the first error of a group instead of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from group


class Outlasting:
    """Work that goes on, within ``run``, when whoever asked for it is cancelled.

    Invariants:
        * Who asks gets the outcome or the error, which is nobody else's.
        * When ``run`` has ended nothing goes on. Who still waited then, and who asks without
          ``run``, does the work in its own task.
    """

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Outlasting {len(self._tasks)} at work>"

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Let work go on for as long as the context lasts."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                for task in self._tasks:
                    task.cancel()

    async def do(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return what ``work`` returns; it may begin a second time, after ``run``."""
        if self._group is None:
            return await work()
        landed: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        task = self._group.create_task(_land(work, landed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task})
        return landed.result() if landed.done() else await work()


async def _land(work: Callable[[], Awaitable[Result]], landed: "asyncio.Future[Result]") -> None:
    try:
        landed.set_result(await work())
    except Exception as error:  # noqa: BLE001 - whoever asked raises it
        landed.set_exception(error)
        landed.exception()  # perhaps nobody waits any more
