"""One trouble at one call of one process, chosen by the call's number: nothing here is random.

Owns the points of a run and what can happen at each. A process whose ports go through
``PointFaults`` notes every call it makes; a run without trouble gives the list of all points, and
each further run of the same story takes one of them.
"""

import asyncio
import random
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from tests.simulation.processes import ProcessFaults
from tests.simulation.trace import Trace
from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError

T = TypeVar("T")

STEP_S: Final = 0.01
LATE_S: Final = 5.0
"""So late comes what was sent before a connection went; below the wait before the last sweep."""


class Trouble(Enum):
    """What happens at a point."""

    KILL_BEFORE = "killed before the request is sent"
    KILL_AFTER = "killed after it was done, before the answer"
    DROP_REQUEST = "the request does not arrive, nobody answers"
    DROP_REPLY = "it is done, the answer is lost"
    STOP_BEFORE = "stopped past the session, the request is sent after that"
    STOP_AFTER = "stopped past the session, the answer is read after that"
    LATE = "given up by the caller, done later"
    TWICE = "done twice"
    WIPE = "the queue loses everything"
    WIPE_AND_KILL = "killed, and the queue loses everything"
    REPLAY = "the queue hands everything out again, in another order"


class Call(NamedTuple):
    """One call of a port: its name, and whether it changes anything."""

    name: str
    changes: bool


class Point(NamedTuple):
    """Where what happens."""

    number: int
    trouble: Trouble


_REPEATABLE: Final = frozenset(
    {
        "put",
        "create_upload",
        "upload_part",
        "complete_upload",
        "abort_upload",
        "delete",
        "publish",
    }
)

_KILLED_BEFORE: Final = frozenset({Trouble.KILL_BEFORE, Trouble.WIPE_AND_KILL})
_WHILE_WAITING: Final = _KILLED_BEFORE | {Trouble.WIPE, Trouble.REPLAY, Trouble.STOP_BEFORE}
_FOR_CHANGES: Final = frozenset(
    {Trouble.KILL_AFTER, Trouble.DROP_REQUEST, Trouble.STOP_BEFORE, Trouble.WIPE, Trouble.REPLAY}
)


def fits(trouble: Trouble, call: Call) -> bool:
    """Tell whether something can happen at such a call, and leaves what nothing else leaves.

    ZooKeeper answers in the order of what was sent and repeats nothing, so late and doubled
    requests are the bucket's and the queue's alone. A read leaves the servers as they were, so
    that to die, or to hear nothing, before it and after it is the same.
    """
    port, _, verb = call.name.partition(".")
    if verb == "take":
        return trouble in _WHILE_WAITING
    if trouble is Trouble.TWICE:
        return port in {"objects", "events"} and verb in _REPEATABLE
    if trouble is Trouble.LATE:
        return port == "objects" and verb in _REPEATABLE
    return call.changes or trouble not in _FOR_CHANGES


class PointFaults(ProcessFaults):
    """The calls of one life of one process, one of which may meet its trouble."""

    def __init__(self, trace: Trace, point: Point | None) -> None:
        super().__init__(random.Random(0), trace, {})
        self.calls_made: list[Call] = []
        """Every call so far."""
        self.met = False
        self.on_trouble: Callable[[Trouble], None] = lambda _: None
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._point = point

    async def call(self, name: str, effect: Callable[[], T], *, changes: bool) -> T:
        here = self._trouble_here(Call(name, changes))
        await self._pass(kill=here in _KILLED_BEFORE, stop=here is Trouble.STOP_BEFORE)
        if here in {Trouble.DROP_REQUEST, Trouble.LATE}:
            if here is Trouble.LATE:
                asyncio.get_running_loop().call_later(LATE_S, _unheard, effect)
            await self._pass()
            raise _unanswered(name, in_doubt=changes)
        try:
            if here is Trouble.TWICE:
                _unheard(effect)
            result = effect()
        except TierlogError:
            await self._pass(kill=here is Trouble.KILL_AFTER, stop=here is Trouble.STOP_AFTER)
            if here is Trouble.DROP_REPLY:
                raise _unanswered(name, in_doubt=changes) from None
            raise
        await self._pass(kill=here is Trouble.KILL_AFTER, stop=here is Trouble.STOP_AFTER)
        if here is Trouble.DROP_REPLY:
            raise _unanswered(name, in_doubt=changes)
        self._trace.call(name, "ok")
        return result

    async def step(self, name: str) -> None:
        here = self._trouble_here(Call(name, changes=False))
        await self._pass(kill=here in _KILLED_BEFORE, stop=here is Trouble.STOP_BEFORE)

    def _trouble_here(self, call: Call) -> Trouble | None:
        number = len(self.calls_made)
        if not self.crashed:
            self.calls_made.append(call)
        if self._point is None or self._point.number != number or self.met:
            return None
        self.met = True
        self._trace.note("trouble", at=number, name=call.name, what=self._point.trouble.name)
        self.on_trouble(self._point.trouble)
        return self._point.trouble

    async def _pass(self, *, kill: bool = False, stop: bool = False) -> None:
        # A request takes its time, in which others are at work too.
        await asyncio.sleep(STEP_S)
        if stop:
            self.thawed.clear()
        while not self.thawed.is_set():
            await self.thawed.wait()
        if kill or self.crashed:
            await self._crash()


def _unheard(effect: Callable[[], object]) -> None:
    """Do what nobody waits for."""
    try:
        effect()
    except TierlogError:
        return


def _unanswered(name: str, *, in_doubt: bool) -> TierlogError:
    if in_doubt:
        return IndeterminateError(f"{name} had no answer", remedy="Read back whether it was done")
    return RetryableError(f"{name} had no answer", remedy="Try again")
