"""The header of one ledger's index in memory, and who is at work on its file.

Invariant: what ``bounds`` lists is in the file, or dirty in the pool of pages.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from tierlog.model.ids import NO_ENTRY, EntryId, LedgerId
from tierlog_ingest.storage.index.index_format import HeaderPage, IndexHeader, State


class CachedIndex:
    """What is known of one index."""

    __slots__ = (
        "bounds", "gone", "header_dirty", "last_add_confirmed", "last_entry_id", "ledger_id",
        "new", "users", "whole", "writing",
    )  # fmt: skip

    def __init__(self, ledger_id: int, header: HeaderPage | None) -> None:
        self.ledger_id = ledger_id
        self.last_add_confirmed: int = header.last_add_confirmed if header else NO_ENTRY
        self.last_entry_id: int = header.last_entry_id if header else NO_ENTRY
        self.bounds = list(header.bounds) if header else []
        self.new = header is None
        """The file may not be there yet."""
        self.header_dirty = False
        self.whole = True
        """False while it is being rebuilt."""
        self.gone = False
        """Removed, or begun anew: this object is of no use any more."""
        self.users = 0
        self.writing: asyncio.Event | None = None

    def __repr__(self) -> str:
        return f"<CachedIndex {self.ledger_id} {self.header} users={self.users}>"

    @property
    def header(self) -> IndexHeader:
        """What the index says of its ledger."""
        return IndexHeader(
            EntryId(self.last_add_confirmed),
            EntryId(self.last_entry_id),
            self.bounds[-1] if self.bounds else 0,
        )

    @property
    def is_busy(self) -> bool:
        """Whether someone needs it as it is in memory."""
        return bool(self.users or self.writing or self.header_dirty or not self.whole)

    def pack(self) -> bytes:
        """Return the header page as it should be in the file."""
        return HeaderPage(
            ledger_id=LedgerId(self.ledger_id),
            last_add_confirmed=EntryId(self.last_add_confirmed),
            last_entry_id=EntryId(self.last_entry_id),
            bounds=tuple(self.bounds),
            state=State.WHOLE if self.whole else State.REBUILDING,
        ).pack()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep it in memory."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    async def written(self) -> None:
        """Wait until nobody writes the file."""
        while self.writing is not None:
            await self.writing.wait()

    def begin_write(self) -> None:
        """Keep others from writing the file, which nobody does."""
        assert self.writing is None
        self.writing = asyncio.Event()

    def end_write(self) -> None:
        """Let others write the file."""
        assert self.writing is not None
        self.writing.set()
        self.writing = None
