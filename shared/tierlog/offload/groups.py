"""Errors out of task groups as what they are, and work that outlasts who began it.

A TaskGroup wraps what its tasks raise. Callers here catch Tierlog's kinds; ``plain_errors``
gives them the first one, with the group as its cause; ``within`` a timeout that groups don't upset.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Final

# What nobody waits for any more takes connections and memory: no more of it than this.
TASKS_MAX: Final = 64


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


@contextlib.asynccontextmanager
async def within(patience: asyncio.Timeout) -> AsyncIterator[None]:
    """Enter a timeout that ends with TimeoutError also where a group failed inside of it.

    Python 3.11 counts the failure of a group that is waited for as one more cancellation, for
    good: a timeout around it then takes its own for somebody else's, and passes it on.
    """
    try:
        async with patience:
            yield
    except asyncio.CancelledError as error:
        # If others cancelled too, whoever is told of the time ends all the same.
        if patience.expired():
            raise TimeoutError from error
        raise


class Outlasting:
    """Work that goes on, within ``run``, when whoever began it is cancelled.

    Work tells its outcome by itself, to all who wait for it, and also that it was given up: it
    raises nothing but that it was cancelled.

    Invariants:
        * At most ``tasks_max`` are kept so. What is begun beside them, or without ``run``, is given
          up by who is cancelled.
        * When ``run`` has ended nothing goes on. Nothing is given up before its first step.
    """

    def __init__(self, *, tasks_max: int = TASKS_MAX) -> None:
        self._tasks_max = tasks_max
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Outlasting {len(self._tasks)} of {self._tasks_max} at work>"

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Let what is begun go on for as long as the context lasts."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                # A task that is cancelled before its first step can't tell that it was given up.
                await asyncio.sleep(0)
                for task in self._tasks:
                    task.cancel()

    async def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin work, and wait for it where it can't go on by itself."""
        if self._group is None or len(self._tasks) >= self._tasks_max:
            await work
            return
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
