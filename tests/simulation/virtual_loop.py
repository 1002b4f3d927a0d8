"""An event loop whose clock jumps to the next timer instead of waiting for it.

With no sockets and no threads, a run is a pure function of its inputs: same seed, same run.

Invariants:
    * ``loop.time()`` starts at zero and moves only when every task waits.
    * When every task waits and no timer is set, the run ends with ``DeadlockError``, at once.
    * Tasks hash by their number, not by their address, so that sets of tasks (a TaskGroup that
      cancels its children) are walked in the same order in each run.
    * Asking for a thread is an error.
"""

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Never, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task waits, and no timer will ever wake one."""


class OutOfTimeError(RuntimeError):
    """The run was still going on at the virtual time by which it had to be over."""


class _NumberedTask(asyncio.Task[T]):
    """A task whose place in a set depends on when it was made, not on where it lies in memory."""

    def __init__(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, number: int, **more: Any
    ) -> None:
        self._number = number
        super().__init__(coro, **more)

    def __hash__(self) -> int:
        return self._number


class _JumpSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("every task waits, and no timer will ever wake one")
        self._jump(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop for simulations; ``until_s`` ends a run that would go on for ever."""

    def __init__(self, *, until_s: float | None = None) -> None:
        self._now_s = 0.0
        self._until_s = until_s
        self._task_numbers = itertools.count(1)
        super().__init__(_JumpSelector(self._advance))
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: object, func: object, *args: object) -> Never:
        raise RuntimeError(f"a simulation has no threads, but one was asked to run {func!r}")

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds
        if self._until_s is not None and self._now_s > self._until_s:
            until_s, self._until_s = self._until_s, None  # raise once; the clean-up may go on
            raise OutOfTimeError(f"the run is still going on after {until_s} virtual seconds")

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        **more: Any,
    ) -> asyncio.Task[T]:
        return _NumberedTask(coro, number=next(self._task_numbers), loop=loop, **more)


def run_virtual(main: Coroutine[Any, Any, T], *, until_s: float | None = None) -> T:
    """``asyncio.run`` on virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(until_s=until_s)) as runner:
        return runner.run(main)
