"""Waiting for whichever comes first, and helping tasks, without leaving a task behind."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

Answer = TypeVar("Answer")


async def first_of(*events: asyncio.Event) -> None:
    """Return once one of ``events`` is set."""
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()


class Helpers:
    """Tasks that end with a block, whatever ends it. The block's error comes out as itself.

    What a helper raises ends the block, as with a ``TaskGroup``, and comes out in a group.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
        """Begin a task."""
        task = self._group.create_task(work)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        if isinstance(error, Exception):
            kind = error = trace = None
        await self._group.__aexit__(kind, error, trace)
