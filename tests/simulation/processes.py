"""A simulated process: its clock, its faults, its tasks, and how it dies and comes back.

Invariants:
    * Each task belongs to the process in whose context it was made; a crash ends them all.
    * From a crash on no port of the process takes effect: not even what its clean-up asks for.
    * A process that was started again shares nothing with its former life but disk and name.
"""

import asyncio
import contextvars
import random
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from tests.simulation.trace import CURRENT, Trace
from tierlog.adapters.memory.clock import SIM_EPOCH_MS
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.ports.files import DiskFailedError

T = TypeVar("T")

BURY_ROUNDS_MAX = 10_000


class HostClock:
    """A host's clocks: a wall clock that may be wrong, a monotonic one that begins at a boot."""

    def __init__(self) -> None:
        self.skew_s = 0.0
        """How wrong the wall clock is."""
        self._booted_s = 0.0

    def __repr__(self) -> str:
        return f"<HostClock skew={self.skew_s:g} s>"

    def wall_ms(self) -> int:
        return SIM_EPOCH_MS + round((_loop_time_s() + self.skew_s) * 1000)

    def monotonic_s(self) -> float:
        return _loop_time_s() - self._booted_s

    def set_wall(self, skew_s: float) -> None:
        """Set the wall clock, right or wrong."""
        self.skew_s = skew_s

    def boot(self, rng: random.Random) -> None:
        """Begin to count anew, from anywhere."""
        self._booted_s = _loop_time_s() - rng.uniform(0, 1e6)


def _only_unavailable(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_only_unavailable(one) for one in error.exceptions)
    return isinstance(error, RetryableError | IndeterminateError)


def _disk_failed(error: BaseException) -> bool:
    """Tell whether a process ended because its disk did, as it must."""
    if isinstance(error, BaseExceptionGroup):
        return any(_disk_failed(one) for one in error.exceptions)
    return isinstance(error, DiskFailedError)


def _loop_time_s() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0


class ProcessFaults(Faults):
    """Faults whose every call leaves a line in the trace."""

    def __init__(self, rng: random.Random, trace: Trace, rates: dict[str, FaultRates]) -> None:
        super().__init__(rng, rates_by_prefix=rates)
        self._trace = trace

    async def call(self, name: str, effect: Callable[[], T], *, changes: bool) -> T:
        try:
            result = await super().call(name, effect, changes=changes)
        except TierlogError as error:
            self._trace.call(name, type(error).__name__)
            raise
        self._trace.call(name, "ok")
        return result


class Tasks:
    """The tasks of all processes, by process, in the order of their making."""

    def __init__(self) -> None:
        self._of: dict[str, dict[asyncio.Task[Any], None]] = {}

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch every task that ``loop`` makes from now on."""
        make = loop.get_task_factory()
        assert make is not None, "a simulation's loop has its own tasks"

        def factory(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> Any:
            task: Any = make(loop, coro, **more)
            context = more.get("context")
            name = context.get(CURRENT, "world") if context is not None else CURRENT.get()
            mine = self._of.setdefault(name, {})
            mine[task] = None
            task.add_done_callback(lambda _: mine.pop(task, None))
            return task

        loop.set_task_factory(factory)

    def alive(self, name: str) -> list[asyncio.Task[Any]]:
        """Return the process's tasks that are not done."""
        return [task for task in self._of.get(name, {}) if not task.done()]


class SimProcess:
    """A process; what it does is ``main``. ``release`` gives up what is outside of it."""

    def __init__(self, name: str, *, trace: Trace, tasks: Tasks, rng: random.Random) -> None:
        self.name = name
        self.clock = HostClock()
        self.rng = rng
        self.trace = trace
        self.tasks = tasks
        self.rates: dict[str, FaultRates] = {}
        self.boots = 0
        self.running = False
        self.ready = asyncio.Event()
        """Set by ``main`` once the process does its work."""
        self.crashed = asyncio.Event()
        self.failure: BaseException | None = None
        """What ended ``main`` though nobody crashed or stopped it: a bug."""
        self.faults = ProcessFaults(rng, trace, self.rates)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} boot={self.boots} running={self.running}>"

    async def main(self) -> None:
        """Be the process, until cancelled."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go, as a dead process does, of connections, sessions and what was not synced."""

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine as a task of this process, though someone else asks for it."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, self.name)
        return asyncio.get_running_loop().create_task(work, context=context)

    def start(self) -> None:
        """Start it, for the first time or again."""
        assert not self.running
        self.boots += 1
        self.running = True
        self.ready, self.crashed = asyncio.Event(), asyncio.Event()
        self.clock.boot(self.rng)
        self.faults = ProcessFaults(self.rng, self.trace, self.rates)
        self.faults.on_crash = self._fell
        self.trace.note("process.started", process=self.name, boot=self.boots)
        self.spawn(self._live())

    async def _live(self) -> None:
        try:
            await self.main()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            if self.faults.crashed:
                return
            self.trace.note("process.failed", process=self.name, error=repr(error))
            if _disk_failed(error):
                self.trace.note("disk.failed", process=self.name)
            elif self.ready.is_set() or not _only_unavailable(error):
                self.failure = error
                for line in traceback.format_exception(error):
                    self.trace.detail(line)
            # A process that could not start is started again by whoever supervises it.
            self.crash()

    def crash(self) -> None:
        """Die now."""
        if self.running:
            self.faults.crashed = True
            self._fell()

    def _fell(self) -> None:
        self.running = False
        self.trace.note("process.crashed", process=self.name, step=self.faults.steps)
        self.release()
        for task in self.tasks.alive(self.name):
            task.cancel()
        self.crashed.set()

    async def bury(self) -> None:
        """Wait until nothing of the dead process runs any more.

        What its clean-up asks of a port never returns, so it is cancelled there again.
        """
        assert not self.running
        for _ in range(BURY_ROUNDS_MAX):
            left = self.tasks.alive(self.name)
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        raise AssertionError(f"{self.name} does not end: {self.tasks.alive(self.name)}")
