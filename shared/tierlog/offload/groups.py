"""Errors out of task groups as what they are, work that outlasts who began it, and room in turns.

A TaskGroup wraps what its tasks raise. Callers here catch Tierlog's kinds; ``plain_errors``
gives them the first one, with the group as its cause.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
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


class Turns:
    """Room for so many at once, in the order in which it was asked for.

    ``on_taken`` is called when some was taken, before whoever has it goes on.

    Invariants:
        * ``taken <= room_max``. Who waits has none, so that nobody waits for whoever waits.
        * Who asks for much is not passed by those who ask for little.
        * Who is cancelled while it waits leaves no trace.
    """

    def __init__(self, room_max: int, on_taken: Callable[[], None] = lambda: None) -> None:
        assert room_max > 0
        self._room_max = room_max
        self._on_taken = on_taken
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.taken = 0

    def __repr__(self) -> str:
        return f"<Turns {self.taken} of {self._room_max} taken, {len(self._waiting)} waiting>"

    @contextlib.asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[None]:
        """Give room for the length of the context, once it is there."""
        assert 0 < size <= self._room_max, "it would wait for ever"
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.cancel() or granted.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove((size, granted))
            else:
                self.taken -= size
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size, granted = self._waiting[0]
            if not granted.cancelled() and self.taken + size > self._room_max:
                return
            self._waiting.popleft()
            if not granted.cancelled():
                self.taken += size
                self._on_taken()
                granted.set_result(None)
