"""What compaction needs of the rest of the node, and what it is told of rebuilt indexes.

Owns: these contracts. ``EntryLogs`` is ``Logs``, ``LedgerCache`` is ``Index``, ``SpaceWatch`` is
``Space``; the node is ``Node``.
"""

import contextlib
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from collections.abc import Set as AbstractSet
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierlog.format.run import Run
from tierlog.model.ids import EntryId, LedgerId
from tierlog_ingest.storage.entrylog.entry_log import Location, LogInfo
from tierlog_ingest.storage.index.index_format import IndexHeader
from tierlog_ingest.storage.space import Level

T = TypeVar("T")

Found = list[tuple[int, Run]]


class Logs(Protocol):
    """The entry logs, as compaction uses them."""

    @property
    def usage(self) -> Mapping[int, Mapping[int, int]]:
        """Bytes by ledger of each log with a map."""
        ...

    @property
    def damaged_logs(self) -> Mapping[int, Collection[object]]:
        """Bad places that were found, by log."""
        ...

    @property
    def unmapped(self) -> AbstractSet[int]:
        """Logs whose ledgers are not known."""
        ...

    def logs(self) -> Sequence[LogInfo]:
        """Return all that are not retired."""
        ...

    def written_to(self) -> AbstractSet[int]:
        """Return the logs that something is appended to."""
        ...

    async def append(
        self, runs: Sequence[Run], *, writer: Literal["flush", "compaction"]
    ) -> list[Location]:
        """Write runs to the writer's log."""
        ...

    async def seal(self, writer: Literal["flush", "compaction"]) -> None:
        """End the writer's log."""
        ...

    def scan(self, log_id: int, *, window_len: int) -> AsyncGenerator[Found, None]:
        """Iterate over all good runs."""
        ...

    async def scan_map(self, log_id: int) -> bool:
        """Find out what an unmapped log holds, if it is whole."""
        ...

    def forget_ledgers(self, ledger_ids: Collection[int]) -> None:
        """Count runs as garbage."""
        ...

    def retire(self, log_id: int) -> None:
        """Leave a log out of ``state``."""
        ...

    async def remove(self, log_id: int) -> None:
        """Remove a retired log that ``state`` does not list."""
        ...


class Index(Protocol):
    """The ledger cache, as compaction uses it."""

    async def header(self, ledger_id: LedgerId) -> IndexHeader | None:
        """Return what the index says of a ledger; None where there is none."""
        ...

    async def slots(
        self, ledger_id: LedgerId, first_entry_id: EntryId, count_max: int
    ) -> NDArray[np.uint64]:
        """Return slots from an entry on, up to the end of a page; zeros where absent."""
        ...

    async def replace(
        self,
        ledger_id: LedgerId,
        first_entry_id: EntryId,
        count: int,
        old_slot: int,
        new_slot: int,
    ) -> bool:
        """Let entries that have ``old_slot`` have ``new_slot``; False if there was none."""
        ...


class Node(Protocol):
    """What compaction asks of the node."""

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` to its end, whatever becomes of the caller."""
        ...

    async def mark(self, begin: Callable[[], None] | None = None) -> None:
        """Make everything durable that the journal holds, and replace ``state``.

        ``begin`` is called once no other mark is under way, before the index is flushed; no index
        is rebuilt from then on until ``state`` is written. That lists as unsettled what
        ``Compactor.unsettled`` says after ``begin``, and what it says at the end.
        """
        ...

    def is_freed(self, ledger_id: LedgerId) -> bool:
        """Tell whether a ledger was deleted for ever, durably."""
        ...

    def has_whole_index(self, ledger_id: LedgerId) -> bool:
        """Tell whether a ledger's index may be asked, as far as is known."""
        ...

    async def rebuild_index(self, ledger_id: LedgerId) -> None:
        """Build a damaged index anew from the logs, under ``Rebuilds.one``."""
        ...


class Space(Protocol):
    """What compaction asks of the disks."""

    @property
    def level(self) -> Level:
        """How the node stands."""
        ...

    async def look(self) -> Level:
        """Measure now."""
        ...

    def refused(self) -> None:
        """Take note that a disk was full when something had to be written."""
        ...

    async def copy_room(self) -> int:
        """Return how many bytes compaction may write."""
        ...


class Rebuilds:
    """Whether an index was rebuilt meanwhile."""

    def __init__(self) -> None:
        self._begun = 0
        self._active = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Enter before a rebuild asks which logs there are; leave when its slots are set."""
        self._begun += 1
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    def stamp(self) -> int | None:
        """Return what ``none_since`` needs; None: one is under way."""
        return None if self._active else self._begun

    def none_since(self, stamp: int | None) -> bool:
        """Tell whether there was none since."""
        return stamp is not None and not self._active and self._begun == stamp
