"""Who goes to the disk first: append, tail read, compaction, catch-up read.

Owns: the order in which work that waits for the disk gets its turn, and how long it waited. Does
not own the work, nor how much of it there may be: queues, budgets and ``TokenBucket`` do that.

A turn that is asked for at time t with rank r is due at t + r * age_s, and turns are given in the
order in which they are due. That is ageing without any book-keeping:

Invariants:
    * Of two that ask at once, the one with the lower rank goes first.
    * What waited for r * age_s goes before everything that comes later, whatever its rank: nothing
      starves.
    * At most ``width`` turns are taken at any time; with one free and nobody waiting, a turn is
      taken without waiting.

Cancellation: who is cancelled while it waits leaves the queue; a turn that it was just given goes
to the next.
"""

import asyncio
import heapq
import itertools
from enum import IntEnum
from types import TracebackType

from tierlog.ports.clock import Clock


class Work(IntEnum):
    """What the disk is wanted for; the value is its rank."""

    APPEND = 0
    TAIL_READ = 1
    COMPACTION = 2
    CATCH_UP_READ = 3


class DiskGate:
    """Gives turns: ``async with gate.turn(Work.COMPACTION): ...``."""

    def __init__(self, clock: Clock, *, width: int, age_s: float) -> None:
        assert width > 0, "a gate that lets nobody through"
        assert age_s > 0, "without ageing, work of a high rank may wait for ever"
        self._clock = clock
        self._width = width
        self._age_s = age_s
        self._taken = 0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._turns = dict.fromkeys(Work, 0)
        self._waited_s = dict.fromkeys(Work, 0.0)
        self._waited_s_max = dict.fromkeys(Work, 0.0)

    def __repr__(self) -> str:
        return f"<DiskGate taken={self._taken} of {self._width}, waiting={self.waiting}>"

    @property
    def waiting(self) -> int:
        """How many wait for a turn."""
        return sum(not granted.done() for _, _, granted in self._queue)

    def turn(self, work: Work) -> "Turn":
        """Return what to enter before going to the disk, and to leave after it."""
        return Turn(self, work)

    def statistics(self) -> dict[str, float]:
        """Return turns and waiting times of each kind of work."""
        found: dict[str, float] = {"disk_turns_taken": self._taken, "disk_waiting": self.waiting}
        for work in Work:
            name = work.name.lower()
            found[f"disk_{name}_turns"] = self._turns[work]
            found[f"disk_{name}_wait_s"] = self._waited_s[work]
            found[f"disk_{name}_wait_s_max"] = self._waited_s_max[work]
        return found

    async def take(self, work: Work) -> None:
        """Take a turn; ``give_back`` must follow."""
        self._turns[work] += 1
        if self._taken < self._width:
            self._taken += 1
            return
        asked_s = self._clock.monotonic_s()
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        due_s = asked_s + work * self._age_s
        heapq.heappush(self._queue, (due_s, next(self._order), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back()  # it was given just before
            raise
        finally:
            waited_s = self._clock.monotonic_s() - asked_s
            self._waited_s[work] += waited_s
            self._waited_s_max[work] = max(self._waited_s_max[work], waited_s)

    def give_back(self) -> None:
        """End a turn: it goes to whoever is due first, without being free in between."""
        assert self._taken > 0, "a turn is given back once"
        while self._queue:
            _, _, granted = heapq.heappop(self._queue)
            if not granted.done():
                granted.set_result(None)
                return
        self._taken -= 1


class Turn:
    """One turn at the disk."""

    __slots__ = ("_gate", "_work")

    def __init__(self, gate: DiskGate, work: Work) -> None:
        self._gate = gate
        self._work = work

    async def __aenter__(self) -> None:
        await self._gate.take(self._work)

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gate.give_back()
