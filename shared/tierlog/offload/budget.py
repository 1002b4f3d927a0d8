"""How much all uploads of a process may hold at once: bytes in memory, parts on their way.

Owns who may fill a block next, and who may send one. Does not own the blocks.

Order of blocks: the oldest upload first, as long as it holds fewer than ``LEDGER_PARTS``, then the
next one; what is left goes to uploads that hold more, the oldest first. So few ledgers are half
read or half written at a time, one whose store hangs keeps the others from nothing for long, and
a ledger that is alone uses all there is.

Order of parts: the oldest upload that has none on its way, then the oldest. Between the tries of
a part others may send: whoever's store hangs gives its leave back with each try that fails.

Invariants:
    * Blocks that are filled or sent take at most ``bytes_max`` together, or one block is alone.
    * At most ``parts_max`` parts are on their way at once; where that is several, the last leave
      is not for an upload that has all others while another one holds a block.
    * Who comes first in the order of blocks is never passed by one that needs less: no upload
      starves.
    * An upload that ends, however, holds nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

MB: Final = 10**6
MEMORY_BYTES_MAX: Final = 188 * MB
BESIDE_BYTES_MAX: Final = 40 * MB
PARTS_MAX: Final = 4
LEDGER_PARTS: Final = 2


def bytes_for_blocks(memory_bytes_max: int) -> int:
    """Return what of an offloader's memory is for blocks.

    The rest is for what connections receive ahead, side objects that are built, and requests.
    """
    return max(memory_bytes_max - BESIDE_BYTES_MAX, memory_bytes_max // 2, 1)


BYTES_MAX: Final = bytes_for_blocks(MEMORY_BYTES_MAX)


@dataclass(slots=True, eq=False)
class _Waiter:
    share: "UploadShare"
    granted: asyncio.Future[None]
    length: int = 0


class UploadBudget:
    """One for all uploads of a process."""

    def __init__(self, *, bytes_max: int = BYTES_MAX, parts_max: int = PARTS_MAX) -> None:
        assert bytes_max > 0, "a budget of nothing uploads nothing"
        assert parts_max > 0, "parts must be sent"
        self._bytes_max = bytes_max
        self._parts_max = parts_max
        self._waiters: list[_Waiter] = []
        self._senders: list[_Waiter] = []
        self._shares: list[UploadShare] = []
        self._begun = 0
        self.held_bytes = 0
        """What blocks take now."""
        self.held_bytes_peak = 0
        """The most that they ever took at once."""

    def __repr__(self) -> str:
        return f"<UploadBudget {self.held_bytes} of {self._bytes_max} bytes>"

    @contextlib.contextmanager
    def share(self) -> Iterator["UploadShare"]:
        """Give one upload its share for the length of the context."""
        self._begun += 1
        share = UploadShare(self, self._begun)
        self._shares.append(share)
        try:
            yield share
        finally:
            self._shares.remove(share)
            share.end()

    async def take(self, share: "UploadShare", length: int) -> None:
        """Wait for its turn and for room; see ``UploadShare.take``."""
        waiter = _Waiter(share, asyncio.get_running_loop().create_future(), length)
        await self._granted(waiter, self._waiters, self._grant, lambda: share.give_back(length))

    async def take_leave(self, share: "UploadShare") -> None:
        """Wait until one more part of it may be sent."""
        waiter = _Waiter(share, asyncio.get_running_loop().create_future())
        await self._granted(
            waiter, self._senders, self._grant_leaves, lambda: self.gave_leave_back(share)
        )

    async def _granted(
        self,
        waiter: _Waiter,
        waiters: list[_Waiter],
        grant: Callable[[], None],
        give_back: Callable[[], None],
    ) -> None:
        """Wait for a grant; who is cancelled has none."""
        waiters.append(waiter)
        grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter in waiters:
                waiters.remove(waiter)
                grant()
            elif not waiter.granted.cancelled():
                give_back()
            raise

    def gave_back(self, length: int) -> None:
        """Take notice that so much is free again."""
        self.held_bytes -= length
        assert self.held_bytes >= 0, "more was given back than taken"
        self._grant()
        # What was kept for an upload that holds nothing any more is free too.
        self._grant_leaves()

    def gave_leave_back(self, share: "UploadShare") -> None:
        """Take notice that a part of it is on its way no more."""
        share.sent_at_once -= 1
        assert share.sent_at_once >= 0, "more leaves were given back than taken"
        self._grant_leaves()

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

    def _grant_leaves(self) -> None:
        while sum(one.sent_at_once for one in self._shares) < self._parts_max:
            may_send = [one for one in self._senders if self._may_send(one.share)]
            if not may_send:
                return
            first = min(may_send, key=lambda one: one.share.rank_of_parts)
            self._senders.remove(first)
            if first.granted.done():
                continue  # cancelled while it waited
            first.share.sent_at_once += 1
            first.granted.set_result(None)

    def _may_send(self, share: "UploadShare") -> bool:
        """Tell whether another upload that holds blocks would still have a part to send."""
        alone = not any(one.holds_blocks for one in self._shares if one is not share)
        return alone or share.sent_at_once < max(1, self._parts_max - 1)


class UploadShare:
    """What one upload holds."""

    def __init__(self, budget: UploadBudget, number: int) -> None:
        self._budget = budget
        self._number = number
        self._held: list[int] = []
        self.sent_at_once = 0
        """Its parts that are on their way."""

    def __repr__(self) -> str:
        return f"<UploadShare {self._number}: {len(self._held)} blocks>"

    @property
    def rank(self) -> tuple[bool, int]:
        """Its place among those that wait for room; the least comes first."""
        return len(self._held) >= LEDGER_PARTS, self._number

    @property
    def rank_of_parts(self) -> tuple[bool, int]:
        """Its place among those that wait to send; the least comes first."""
        return self.sent_at_once > 0, self._number

    @property
    def holds_blocks(self) -> bool:
        """Whether it has a block that is filled, or sent."""
        return bool(self._held)

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

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator["Leave"]:
        """Send one part for the length of the context, once it may."""
        leave = Leave(self._budget, self)
        await leave.take()
        try:
            yield leave
        finally:
            leave.give_back()

    def end(self) -> None:
        """Give back all."""
        for length in list(self._held):
            self.give_back(length)


class Leave:
    """The leave to send one part."""

    def __init__(self, budget: UploadBudget, share: UploadShare) -> None:
        self._budget = budget
        self._share = share
        self._held = False

    def __repr__(self) -> str:
        return f"<Leave of {self._share}: {'held' if self._held else 'lent'}>"

    async def take(self) -> None:
        """Wait for it."""
        await self._budget.take_leave(self._share)
        self._held = True

    def give_back(self) -> None:
        """Have it no more; a second time does nothing."""
        if self._held:
            self._held = False
            self._budget.gave_leave_back(self._share)

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Let others send for the length of the context, and wait for one's turn at its end."""
        self.give_back()
        yield
        await self.take()
