"""Reads for clients: each within its room of the process's memory, until it was taken.

Owns taking room before a read and giving it back. Does not own who gets room (``shares``), nor
reading (``source``).

Invariants:
    * Nothing is read for a client before it has room for it, and the room lasts until ``leave``.
    * An entry alone may be longer than was asked for. It is kept only once there is room for that,
      and it is not even read before, where its length can be told (``Budget.alone_max``).
    * Who waits at the tail holds none: it is taken once there is something to read.
"""

from dataclasses import replace
from typing import Final

from tierlog.format.run import RUN_BYTES_MAX
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.position import Edge, Position
from tierlog.offload.tier2_reader import EntryTooLongError
from tierlog.ports.reads import ServedLedgers
from tierlog_reader.chunk import Answer, Budget
from tierlog_reader.memory import COPIES_OF_AN_ANSWER
from tierlog_reader.shares import Client, Room, Shares
from tierlog_reader.source import StreamSource

# A row of a list of ledgers: what it is made of, and its text; 807 were measured.
LEDGER_ROW_BYTES: Final = 900
# Whoever asks for less may get as much: runs come whole.
ROOM_BYTES_MIN: Final = RUN_BYTES_MAX


class HeldRoom:
    """The room of one answer; given up while its read waits, and at the end."""

    def __init__(self, shares: Shares, client: Client, size: int) -> None:
        self._shares = shares
        self._client = client
        self._size = size
        self._room: Room | None = None

    def __repr__(self) -> str:
        return f"<HeldRoom of {self._client}: {self._room}>"

    async def enter(self) -> None:
        """Have room from here on; a second time does nothing."""
        if self._room is None:
            self._room = await self._shares.take(self._client, self._size)

    def leave(self) -> None:
        """Have none from here on; a second time does nothing."""
        room, self._room = self._room, None
        if room is not None:
            self._shares.give_back(self._client, room)

    def holds(self, size: int) -> bool:
        """Say whether it is room for so many bytes, or all that one answer can have."""
        held = self._room.size if self._room is not None else 0
        return held >= min(size, self._shares.bytes_max)

    def shrink(self, size: int) -> None:
        """Keep only so much."""
        if self._room is not None:
            self._shares.shrink(self._client, self._room, size)


class ServedReads:
    """Reads of streams for clients that are told apart."""

    def __init__(self, source: StreamSource, shares: Shares) -> None:
        self.source = source
        self._shares = shares

    def __repr__(self) -> str:
        return f"<ServedReads {self._shares!r}>"

    async def read(
        self,
        client: Client,
        stream: StreamName,
        where: Position | Edge,
        budget: Budget,
        *,
        entry_bytes: int = 0,
    ) -> tuple[Answer, HeldRoom]:
        """Return what follows ``where``, and its room, which the caller gives back.

        ``entry_bytes``: what the caller makes of each entry takes so much beside its bytes. Of all
        entries that is no more than ``bytes_max``, too.
        """
        while True:
            bytes_max = max(ROOM_BYTES_MIN, budget.bytes_max)
            if entry_bytes:
                fitting = max(1, bytes_max // entry_bytes)
                budget = replace(budget, entries_max=min(budget.entries_max, fitting))
            objects_len = entry_bytes * budget.entries_max
            size = COPIES_OF_AN_ANSWER * bytes_max + objects_len
            room = HeldRoom(self._shares, client, size)
            alone_max = None  # one answer can't have more room
            if size < self._shares.bytes_max:
                alone_max = (size - entry_bytes) // COPIES_OF_AN_ANSWER
            within = replace(budget, room=room, alone_max=alone_max)
            try:
                answer = await self.source.read(stream, where, within)
            except EntryTooLongError as error:
                room.leave()
                where = Position(error.ledger_id, error.entry_id)
                budget = replace(budget, bytes_max=error.frame_len)
                continue
            except BaseException:
                room.leave()
                raise
            chunk = answer.chunk
            if chunk is None:
                room.leave()
                return answer, room
            needed = COPIES_OF_AN_ANSWER * chunk.frames_len + entry_bytes * chunk.count
            if room.holds(needed):
                room.shrink(needed)
                return answer, room
            room.leave()
            where = Position(chunk.ledger_id, chunk.first_entry_id)
            budget = replace(budget, bytes_max=chunk.frames_len)
            del answer, chunk  # whoever waits for room holds nothing

    async def ledgers(
        self, client: Client, stream: StreamName, first: LedgerId, *, count_max: int
    ) -> tuple[ServedLedgers, HeldRoom]:
        """Return a stream's ledgers from an id on, and their room, which the caller gives back."""
        room = HeldRoom(self._shares, client, 0)

        def room_for(count: int) -> HeldRoom:
            nonlocal room
            room = HeldRoom(self._shares, client, LEDGER_ROW_BYTES * count)
            return room

        try:
            found = await self.source.ledgers(stream, first, count_max=count_max, room_for=room_for)
        except BaseException:
            room.leave()
            raise
        return found, room

    def room(self, client: Client, bytes_max: int) -> HeldRoom:
        """Return room for an answer, to be entered."""
        return HeldRoom(self._shares, client, COPIES_OF_AN_ANSWER * bytes_max)
