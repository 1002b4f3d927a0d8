"""Adds that have to ask the disk first, one after the other for each ledger.

Invariants:
    * Adds of one ledger are done in the order in which they came; while any waits, all later ones
      wait behind it.
    * A ledger for which nothing waits costs nothing.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from tierlog.format.run import Run
from tierlog.model.errors import RetryableError, TierlogError
from tierlog.model.ids import LedgerId
from tierlog_ingest.storage.answers import copy_outcome, failed
from tierlog_ingest.storage.own_tasks import OwnTasks

Add = Callable[[Run, bool], Awaitable["asyncio.Future[None]"]]


class _Turn(NamedTuple):
    run: Run
    recovery: bool
    answer: "asyncio.Future[None]"


class Turns:
    """Who waits, by ledger. ``add`` does one add; its future is the answer."""

    def __init__(self, add: Add, tasks: OwnTasks) -> None:
        self._add = add
        self._tasks = tasks
        self._waiting: dict[LedgerId, deque[_Turn]] = {}
        self.bytes = 0
        """Bytes of runs that wait."""

    def __contains__(self, ledger_id: LedgerId) -> bool:
        return ledger_id in self._waiting

    def __repr__(self) -> str:
        return f"<Turns ledgers={len(self._waiting)} bytes={self.bytes}>"

    def queue(self, run: Run, *, recovery: bool) -> "asyncio.Future[None]":
        """Add a run once its turn comes."""
        ledger_id = run.header.ledger_id
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns = self._waiting.get(ledger_id)
        if turns is None:
            turns = self._waiting[ledger_id] = deque()
            try:
                taking = self._tasks.spawn(self._take(ledger_id, turns))
            except TierlogError as error:
                del self._waiting[ledger_id]
                return failed(error)
            # Cancelled before its first step, a task does not even come to its ``finally``.
            taking.add_done_callback(lambda _: self._end(ledger_id, turns))
        turns.append(_Turn(run, recovery, answer))
        self.bytes += len(run.encoded)
        return answer

    async def _take(self, ledger_id: LedgerId, turns: deque[_Turn]) -> None:
        try:
            while turns:
                turn = turns[0]
                try:
                    added = await self._add(turn.run, turn.recovery)
                except TierlogError as error:
                    added = failed(error)
                added.add_done_callback(partial(copy_outcome, target=turn.answer))
                turns.popleft()
                self.bytes -= len(turn.run.encoded)
        finally:
            self._end(ledger_id, turns)

    def _end(self, ledger_id: LedgerId, turns: deque[_Turn]) -> None:
        if self._waiting.get(ledger_id) is not turns:
            return
        del self._waiting[ledger_id]
        stopped = RetryableError("the node stops", remedy="Use another node")
        for turn in turns:
            self.bytes -= len(turn.run.encoded)
            copy_outcome(failed(stopped), turn.answer)
