"""One event loop in one background thread for the whole process, for programs without a loop.

A call hands its coroutine to that loop and waits; interrupting the wait cancels the coroutine.
"""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")


class Background:
    """The process's loop; started by the first call, gone with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run ``work`` on the loop and wait for its result."""
        pending = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return pending.result()
        except BaseException:
            pending.cancel()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="tierlog-client", daemon=True
                ).start()
            return self._loop


BACKGROUND: Final = Background()

HOP_ITEMS: Final = 4096


def send_all(items: Iterable[Item], send: Callable[[Item], Awaitable[object]]) -> None:
    """Send many, with few hops to the loop; ``items`` is iterated over here.

    Each is sent once, whatever interrupts it: what the loop was given is never given again.
    """

    async def hop(some: list[Item]) -> None:
        for item in some:
            await send(item)

    held: list[Item] = []
    try:
        for item in items:
            held.append(item)
            if len(held) == HOP_ITEMS:
                some, held = held, []
                BACKGROUND.run(hop(some))
    except Exception:
        # Also what came before an item that ``items`` refused to give.
        BACKGROUND.run(hop(held))
        raise
    BACKGROUND.run(hop(held))


class _Holder:
    """Keeps an async context open in a task of its own, between two blocking calls."""

    def __init__(self, context: AbstractAsyncContextManager[Any]) -> None:
        self._context = context
        self._leave = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._hold())

    async def value(self) -> Any:  # noqa: ANN401 - whatever the context gives
        """Return what the context gave."""
        return await self._ready

    async def leave(self) -> None:
        """Leave the context; raises what leaving raises."""
        self._leave.set()
        await self._task

    async def _hold(self) -> None:
        try:
            async with self._context as value:
                self._ready.set_result(value)
                await self._leave.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)


class Closing(ABC):
    """Closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> object:
        """End it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # What went wrong first is what is told.
            with contextlib.suppress(Exception):
                self.close()


class Blocking(Closing):
    """A context that was entered on the background loop."""

    def __init__(self) -> None:
        self._holder: _Holder | None = None

    def enter(self, context: AbstractAsyncContextManager[Any]) -> Any:  # noqa: ANN401
        """Enter a context; ``close`` leaves it. Return what it gives."""

        async def enter() -> tuple[_Holder, Any]:
            holder = _Holder(context)
            return holder, await holder.value()

        self._holder, value = BACKGROUND.run(enter())
        return value

    def close(self) -> None:
        """Leave the context."""
        if self._holder is not None:
            holder, self._holder = self._holder, None
            BACKGROUND.run(holder.leave())


def iterate(items: AsyncIterator[Item]) -> Iterator[Item]:
    """Iterate from outside the loop."""

    async def one() -> tuple[Item] | None:
        try:
            return (await anext(items),)
        except StopAsyncIteration:
            return None

    while (taken := BACKGROUND.run(one())) is not None:
        yield taken[0]
