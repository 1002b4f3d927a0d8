"""What requests wait for before they begin: a turn among so many at once, and a pace.

Owns the order in which they come. Does not own requests (``ranges``), nor limits (``pacing``).

Invariant: a turn is had by one, and given back once, also where whoever waits for it is cancelled.
"""

import asyncio
from typing import Protocol


class Urgent(Protocol):
    """What waits for a turn."""

    @property
    def urgent(self) -> bool:
        """A reader waits for it."""
        ...


class Pace(Protocol):
    """What requests wait for before they have a turn: limits of bytes a second."""

    @property
    def at_once(self) -> int | None:
        """How long one request ahead of its reader may be; None: as long as it likes."""
        ...

    async def take(self, length: int, request: Urgent) -> None:
        """Wait until so many bytes may come, for the stream that this task spends on."""
        ...

    def give_back(self, length: int) -> None:
        """Take back a payment of this task's stream: the bytes are not asked for."""
        ...


class Turns:
    """So many requests at once; who waits comes in order, those that a reader waits for first."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: dict[asyncio.Future[None], Urgent] = {}

    async def take(self, request: Urgent) -> None:
        """Wait for a turn; nothing is awaited between having it and this one's end."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = request
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:
                self.give_back()
            raise

    def give_back(self) -> None:
        """Let the next one begin; a reader may have come to wait for it meanwhile."""
        # Who was cancelled is here until its task takes a step.
        turns = [one for one in self._waiting if not one.done()]
        if not turns:
            self._free += 1
            return
        turn = next((one for one in turns if self._waiting[one].urgent), turns[0])
        del self._waiting[turn]
        turn.set_result(None)
