"""Tasks that are the node's own: they end with it, and not with who asked for them.

Invariant: no error of a caller's ends the node; what ends it is ``DiskFailedError``, and defects.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from tierlog.model.errors import RetryableError, TierlogError

T = TypeVar("T")


class OwnTasks:
    """A node's task group, while there is one."""

    def __init__(self) -> None:
        self._tasks: asyncio.TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<OwnTasks {'running' if self._tasks is not None else 'none'}>"

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Use this group from now on."""
        self._tasks = tasks

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin ``work``, which raises no ``TierlogError``."""
        try:
            if self._tasks is not None:
                return self._tasks.create_task(work)
        except RuntimeError:
            pass  # the group has ended
        work.close()
        raise RetryableError("the storage node is not serving", remedy="Use another node")

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` to its end, whatever becomes of the caller; its errors are the caller's."""
        result, error = await asyncio.shield(self.spawn(_guarded(work)))
        if error is not None:
            raise error
        return cast("T", result)


async def _guarded(work: Coroutine[Any, Any, T]) -> tuple[T | None, TierlogError | None]:
    try:
        return await work, None
    except TierlogError as error:
        return None, error
