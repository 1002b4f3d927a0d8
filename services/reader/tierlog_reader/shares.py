"""Memory for answers on their way to clients: who gets room, and who waits for it.

Owns the bytes that are promised to answers, from before they are read until the client has taken
them; and, apart from these, to walks over objects. Does not own the answers, nor memory that is
kept between reads (``memory``).

    who asks                                     gets room
    a client that holds nothing                  when it fits
    one that holds some                          when it would then hold no more than is still free

So ``n`` clients that take nothing hold an ``n + 1``-th each, and as much is left for whoever comes.
All clients of one group, which wait for a limit of their own (``pacing``), are to others as one,
and share with each other what that one would have.

Invariants:
    * What is promised never passes ``bytes_max``; one answer alone is cut to it. Nothing more is
      promised where it would not fit beside what ``beyond`` says that others take of it, but for
      one answer alone: so there is always one that goes out, whose room the next ones then have.
    * Clients that wait take turns. Who is within its share and does not fit is waited for, so
      that small answers of others never starve a large one; who is beyond its share is passed
      over, so that a client that does not take its answers holds up nobody else. Where a group is
      beyond its share, all of it is, and whose turn it was in it is the first of it again.
    * Who waits has what others gave back of ``beyond`` within ``LOOK_S``.
    * Nobody waits longer than ``wait_s_max``: then it is told to come again, RESOURCE_EXHAUSTED.

Cancellation: who stops waiting leaves no trace; room is given back however a read ends.
"""

import asyncio
import contextlib
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from tierlog.model.errors import Reason, RetryableError

Client = Hashable
GroupOf = Callable[[Client], Hashable]
"""Says which group a client is of; None: of none."""
SOONER: Final = (
    "Come again; ask for fewer bytes at once, take answers sooner, or start the reader with a "
    "larger reader.memory_bytes_max"
)

# What others take beyond falls without a word: while somebody waits it is asked for again.
LOOK_S: Final = 1.0


@dataclass(slots=True, eq=False)
class Room:
    """Bytes that are promised to one answer."""

    size: int


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    granted: asyncio.Future[None]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Account:
    """What one client holds, or a group, and who waits in its name."""

    group: "_Account | None" = None
    held: int = 0
    rooms: int = 0
    waiting: deque[_Waiter] = field(default_factory=deque)

    def change(self, size: int, *, rooms: int = 0) -> None:
        """Hold so much more, or less."""
        self.held += size
        self.rooms += rooms
        if self.group is not None:
            self.group.change(size, rooms=rooms)

    def is_within(self, size: int, free: int) -> bool:
        """Say whether so much more is within its share, and within its group's."""
        group = self.group
        return self.is_within_group(size, free) and (group is None or group.is_within(size, free))

    def is_within_group(self, size: int, free: int) -> bool:
        """Say whether so much more is within its share of what its group may have, or of all."""
        left = free if self.group is None else free - self.group.held
        return self.rooms == 0 or self.held + size <= left


class Shares:
    """Room for all answers of one process, or for what else ``what`` says."""

    def __init__(
        self,
        bytes_max: int,
        *,
        wait_s_max: float,
        what: str = "an answer",
        remedy: str = SOONER,
        beyond: Callable[[], int] = lambda: 0,
        group_of: GroupOf = lambda _: None,
    ) -> None:
        assert bytes_max > 0
        self._group_of = group_of
        self.bytes_max = bytes_max
        self._beyond = beyond
        self._what = what
        self._remedy = remedy
        self._wait_s_max = wait_s_max
        # Whose turn it is comes first.
        self._accounts: OrderedDict[Client, _Account] = OrderedDict()
        self._groups: weakref.WeakValueDictionary[Hashable, _Account] = (
            weakref.WeakValueDictionary()
        )
        self._look: asyncio.TimerHandle | None = None
        self.used_bytes = 0
        self.most_used_bytes = 0
        self.waits = 0
        self.refusals = 0

    def __repr__(self) -> str:
        return f"<Shares {self.used_bytes} of {self.bytes_max}, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """How many answers wait for room."""
        return sum(len(account.waiting) for account in self._accounts.values())

    @contextlib.asynccontextmanager
    async def room(self, client: Client, size: int) -> AsyncIterator[Room]:
        """Give room for the length of the context, once there is some."""
        room = await self.take(client, size)
        try:
            yield room
        finally:
            self.give_back(client, room)

    async def take(self, client: Client, size: int) -> Room:
        """Return room once there is some; whoever has it gives it back."""
        size = min(size, self.bytes_max)
        account = self._account(client)
        within = account.is_within(size, self._free_bytes())
        if not self.waiting and within and self._fits(size):
            self._promise(account, size)
            return Room(size)
        self.waits += 1
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        account.waiting.append(waiter)
        self._grant()
        self._look_later()
        try:
            async with asyncio.timeout(self._wait_s_max):
                await waiter.granted
        except BaseException as error:
            self._withdraw(client, account, waiter)
            if isinstance(error, TimeoutError):
                self.refusals += 1
                raise self._exhausted(size) from None
            raise
        return Room(size)

    def shrink(self, client: Client, room: Room, size: int) -> None:
        """Keep only ``size`` bytes of a room: the answer turned out smaller."""
        if size < room.size:
            self._accounts[client].change(size - room.size)
            self.used_bytes -= room.size - size
            room.size = size
            self._grant()

    def give_back(self, client: Client, room: Room) -> None:
        """End a promise."""
        account = self._accounts[client]
        account.change(-room.size, rooms=-1)
        self.used_bytes -= room.size
        assert self.used_bytes >= 0, "more was given back than was promised"
        self._forget_idle(client, account)
        self._grant()

    def _account(self, client: Client) -> _Account:
        if client not in self._accounts:
            name = self._group_of(client)
            group = None if name is None else self._groups.get(name)
            if name is not None and group is None:
                group = self._groups[name] = _Account()
            self._accounts[client] = _Account(group)
        return self._accounts[client]

    def _promise(self, account: _Account, size: int) -> None:
        account.change(size, rooms=1)
        self.used_bytes += size
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)

    def _free_bytes(self) -> int:
        return self.bytes_max - self._beyond() - self.used_bytes

    def _fits(self, size: int) -> bool:
        return self.used_bytes == 0 or size <= self._free_bytes()

    def _grant(self) -> None:
        """Give room to those who wait, in turns, until the first whose turn it is does not fit."""
        granted = True
        while granted:
            granted = False
            beyond: set[_Account | None] = set()
            for client, account in list(self._accounts.items()):
                while account.waiting and account.waiting[0].granted.cancelled():
                    account.waiting.popleft()
                if not account.waiting:
                    continue
                waiter = account.waiting[0]
                free = self._free_bytes()
                if account.group in beyond or not account.is_within_group(waiter.size, free):
                    continue
                if not account.is_within(waiter.size, free):
                    beyond.add(account.group)
                    continue
                if not self._fits(waiter.size):
                    return
                account.waiting.popleft()
                self._promise(account, waiter.size)
                waiter.granted.set_result(None)
                self._accounts.move_to_end(client)
                granted = True

    def _look_later(self) -> None:
        if self._look is None and self.waiting:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._grant()
        self._look_later()

    def _withdraw(self, client: Client, account: _Account, waiter: _Waiter) -> None:
        if waiter.granted.done() and not waiter.granted.cancelled():
            # It came in the very moment in which nobody waited any more.
            self.give_back(client, Room(waiter.size))
            return
        with contextlib.suppress(ValueError):
            account.waiting.remove(waiter)
        self._forget_idle(client, account)
        self._grant()

    def _forget_idle(self, client: Client, account: _Account) -> None:
        # Who is cancelled while it waits may come here when the client has another account.
        if not account.rooms and not account.waiting and self._accounts.get(client) is account:
            del self._accounts[client]

    def _exhausted(self, size: int) -> RetryableError:
        beyond = self._beyond()
        others = f", and other parts hold {beyond} bytes beyond their own" if beyond else ""
        return RetryableError(
            f"there was no room for {self._what} of {size} bytes within {self._wait_s_max:g} s: "
            f"{self.used_bytes} of {self.bytes_max} bytes are promised{others}",
            reason=Reason.RESOURCE_EXHAUSTED,
            remedy=self._remedy,
            retry_after_s=1.0,
        )
