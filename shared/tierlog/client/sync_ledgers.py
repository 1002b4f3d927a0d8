"""Bare ledgers for programs without an event loop: the same calls, blocking.

with SyncLedgers() as ledgers:
    with ledgers.create() as ledger:
        ledger.append(b"one")
    for entry in ledgers.open(ledger.ledger_id).entries():
        print(entry.entry_id, entry.data)
"""

from collections.abc import Iterable, Iterator, Mapping

from tierlog.client.blocking import BACKGROUND, Blocking, Closing, iterate, send_all
from tierlog.client.ledger_reader import LedgerEntry, LedgerReader
from tierlog.client.ledger_writer import LedgerAppender
from tierlog.client.ledgers import Ledgers, LedgerShape, open_ledgers
from tierlog.format.checksum import Buffer
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata
from tierlog.runtime.settings import Settings


class SyncLedgerAppender(Closing):
    """``LedgerAppender``, blocking."""

    def __init__(self, appender: LedgerAppender) -> None:
        self._appender = appender

    @property
    def ledger_id(self) -> LedgerId:
        """The ledger's id."""
        return self._appender.ledger_id

    @property
    def last_add_confirmed(self) -> EntryId:
        """The last entry that is acknowledged; -1: none."""
        return self._appender.last_add_confirmed

    def append(self, entry: Buffer) -> EntryId:
        """See ``LedgerAppender.append``."""
        return BACKGROUND.run(self._appender.append(entry))

    def append_all(self, entries: Iterable[Buffer]) -> EntryId:
        """Append many, with few hops to the loop; return the last one's id once all are there."""
        send_all(entries, self._appender.send)
        return self.flush()

    def flush(self) -> EntryId:
        """See ``LedgerAppender.flush``."""
        return BACKGROUND.run(self._appender.flush())

    def close(self) -> LedgerMetadata:
        """See ``LedgerAppender.close``."""
        return BACKGROUND.run(self._appender.close())


class SyncLedgerReader:
    """``LedgerReader``, blocking."""

    def __init__(self, reader: LedgerReader) -> None:
        self._reader = reader

    @property
    def ledger_id(self) -> LedgerId:
        """The ledger's id."""
        return self._reader.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as of the last look."""
        return self._reader.metadata

    @property
    def closed(self) -> bool:
        """Whether the ledger was closed at the last look."""
        return self._reader.closed

    def last_add_confirmed(self) -> EntryId:
        """See ``LedgerReader.last_add_confirmed``."""
        return BACKGROUND.run(self._reader.last_add_confirmed())

    def entries(
        self, first: int = 0, last: int | None = None, *, follow: bool = False
    ) -> Iterator[LedgerEntry]:
        """See ``LedgerReader.entries``."""
        return iterate(self._reader.entries(first, last, follow=follow))


class SyncLedgers(Blocking):
    """``Ledgers``, blocking."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self._ledgers: Ledgers = self.enter(open_ledgers(settings))

    def create(
        self,
        shape: LedgerShape | None = None,
        *,
        custom: Mapping[str, bytes] | None = None,
        key_id: str | None = None,
    ) -> SyncLedgerAppender:
        """See ``Ledgers.create``."""
        made = BACKGROUND.run(self._ledgers.create(shape, custom=custom, key_id=key_id))
        return SyncLedgerAppender(made)

    def make(
        self,
        shape: LedgerShape | None = None,
        *,
        custom: Mapping[str, bytes] | None = None,
        key_id: str | None = None,
    ) -> LedgerId:
        """See ``Ledgers.make``."""
        return BACKGROUND.run(self._ledgers.make(shape, custom=custom, key_id=key_id))

    def write(self, ledger_id: int) -> SyncLedgerAppender:
        """See ``Ledgers.write``."""
        return SyncLedgerAppender(BACKGROUND.run(self._ledgers.write(ledger_id)))

    def open(self, ledger_id: int, *, recover: bool = False) -> SyncLedgerReader:
        """See ``Ledgers.open``."""
        return SyncLedgerReader(BACKGROUND.run(self._ledgers.open(ledger_id, recover=recover)))

    def recover(self, ledger_id: int) -> LedgerMetadata:
        """See ``Ledgers.recover``."""
        return BACKGROUND.run(self._ledgers.recover(ledger_id))

    def accept_loss(self, ledger_id: int, *, by: str, wait_s: float) -> LedgerMetadata:
        """See ``Ledgers.accept_loss``."""
        return BACKGROUND.run(self._ledgers.accept_loss(ledger_id, by=by, wait_s=wait_s))

    def delete(self, ledger_id: int) -> None:
        """See ``Ledgers.delete``."""
        BACKGROUND.run(self._ledgers.delete(ledger_id))

    def ledgers(self) -> Mapping[LedgerId, LedgerMetadata]:
        """See ``Ledgers.ledgers``."""
        return BACKGROUND.run(self._ledgers.ledgers())
