"""How much all uploads of a process may hold at once: bytes in memory, parts on their way.

Owns who may fill a block next. Does not own the blocks.

Order: the oldest upload first, as long as it holds fewer than ``LEDGER_PARTS`` blocks, then the
next one; what is left goes to uploads that hold more, the oldest first. So few ledgers are half
read or half written at a time, one whose store hangs keeps the others from nothing for long, and
a ledger that is alone uses all there is.

Invariants:
    * Blocks that are filled or sent take at most ``bytes_max`` together, or one block is alone.
    * At most ``parts_max`` parts are on their way at once.
    * Who comes first in the order is never passed by one that needs less: no upload starves.
    * An upload that ends, however, holds nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

MB: Final = 10**6
MEMORY_BYTES_MAX: Final = 176 * MB
BESIDE_BYTES_MAX: Final = 40 * MB
PARTS_MAX: Final = 4
LEDGER_PARTS: Final = 2


def bytes_for_blocks(memory_bytes_max: int) -> int:
    """Return what of an offloader's memory is for blocks.

    The rest is for what connections receive ahead, side objects that are built, and requests.
    """
    return max(memory_bytes_max - BESIDE_BYTES_MAX, memory_bytes_max // 2)


BYTES_MAX: Final = bytes_for_blocks(MEMORY_BYTES_MAX)


@dataclass(slots=True, eq=False)
class _Waiter:
    share: "UploadShare"
    length: int
    granted: asyncio.Future[None]


class UploadBudget:
    """One for all uploads of a process."""

    def __init__(self, *, bytes_max: int = BYTES_MAX, parts_max: int = PARTS_MAX) -> None:
        assert bytes_max > 0, "a budget of nothing uploads nothing"
        assert parts_max > 0, "parts must be sent"
        self._bytes_max = bytes_max
        self._parts = asyncio.Semaphore(parts_max)
        self._waiters: list[_Waiter] = []
        self._shares = 0
        self.held_bytes = 0
        """What blocks take now."""
        self.held_bytes_peak = 0
        """The most that they ever took at once."""

    def __repr__(self) -> str:
        return f"<UploadBudget {self.held_bytes} of {self._bytes_max} bytes>"

    @contextlib.contextmanager
    def share(self) -> Iterator["UploadShare"]:
        """Give one upload its share for the length of the context."""
        self._shares += 1
        share = UploadShare(self, self._shares)
        try:
            yield share
        finally:
            share.end()

    async def take(self, share: "UploadShare", length: int) -> None:
        """Wait for its turn and for room; see ``UploadShare.take``."""
        waiter = _Waiter(share, length, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._grant()
            elif not waiter.granted.cancelled():
                share.give_back(length)
            raise

    def gave_back(self, length: int) -> None:
        """Take notice that so much is free again."""
        self.held_bytes -= length
        assert self.held_bytes >= 0, "more was given back than taken"
        self._grant()

    def _grant(self) -> None:
        while self._waiters:
            first = min(self._waiters, key=lambda one: one.share.rank)
            if self.held_bytes and self.held_bytes + first.length > self._bytes_max:
                return
            self._waiters.remove(first)
            if first.granted.done():
                continue  # cancelled while it waited
            self.held_bytes += first.length
            self.held_bytes_peak = max(self.held_bytes_peak, self.held_bytes)
            first.share.took(first.length)
            first.granted.set_result(None)

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send one part for the length of the context, once it may."""
        async with self._parts:
            yield


class UploadShare:
    """What one upload holds."""

    def __init__(self, budget: UploadBudget, number: int) -> None:
        self._budget = budget
        self._number = number
        self._held: list[int] = []

    def __repr__(self) -> str:
        return f"<UploadShare {self._number}: {len(self._held)} blocks>"

    @property
    def rank(self) -> tuple[bool, int]:
        """Its place among those that wait; the least comes first."""
        return len(self._held) >= LEDGER_PARTS, self._number

    async def take(self, length: int) -> None:
        """Wait until a block of so many bytes may be filled."""
        await self._budget.take(self, length)

    def took(self, length: int) -> None:
        """Take notice of a grant."""
        self._held.append(length)

    def give_back(self, length: int) -> None:
        """Give back what one block took."""
        self._held.remove(length)
        self._budget.gave_back(length)

    def end(self) -> None:
        """Give back all."""
        for length in list(self._held):
            self.give_back(length)
