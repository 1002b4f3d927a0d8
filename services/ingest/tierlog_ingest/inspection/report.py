"""What an inspection found, as values.

Invariant: every problem names its file, the byte, and what becomes of it (``Verdict``).
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from tierlog_ingest.storage.entrylog.entry_log import LogLength
from tierlog_ingest.storage.journal.format import JournalPosition


class Verdict(StrEnum):
    """What becomes of a problem when a node starts over the directory."""

    REFUSED = "refused"
    """The node does not start."""
    DAMAGED = "damaged"
    """Something can't be served: it answers UNKNOWN, and other nodes' copies repair it."""
    REBUILT = "rebuilt"
    """Derived from what is whole: the node makes it anew by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One bad place."""

    path: str
    offset: int
    what: str
    verdict: Verdict


@dataclass(slots=True)
class JournalFound:
    """The journal, from the mark on."""

    segments: int = 0
    mark: JournalPosition | None = None
    end: JournalPosition | None = None
    torn: bool = False
    """A group was under way when the node ended; it was not acknowledged."""
    records: Counter[str] = field(default_factory=Counter)
    run_bytes: int = 0
    entries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFound:
    """One entry log."""

    directory: int
    listed: LogLength
    runs: int
    entries: int
    run_bytes: int
    ledgers: int


@dataclass(slots=True, kw_only=True)
class LedgerFound:
    """What the node has of one ledger: in logs, and in the journal behind the mark."""

    ledger_id: int
    entries: int = 0
    """In logs; entries that were written more than once count once in an index."""
    payload_bytes: int = 0
    last_entry_id: int = -1
    last_add_confirmed: int = -1
    journal_entries: int = 0
    fenced: bool = False


@dataclass(slots=True)
class NodeFound:
    """Everything."""

    problems: list[Problem] = field(default_factory=list)
    journal: JournalFound = field(default_factory=JournalFound)
    logs: list[LogFound] = field(default_factory=list)
    ledgers: dict[int, LedgerFound] = field(default_factory=dict)
    index_files: int = 0
    index_pages: int = 0
    index_slots: int = 0
    freed_ids: int = 0
    limbo: bool = False
    """Damage that was found at an earlier start: what is not there is unknown, not absent."""
    doubtful: list[int] = field(default_factory=list)
    """As limbo, for single ledgers."""

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def ledger(self, ledger_id: int) -> LedgerFound:
        """Return a ledger's line, made when it is missing."""
        found = self.ledgers.get(ledger_id)
        if found is None:
            found = self.ledgers[ledger_id] = LedgerFound(ledger_id=ledger_id)
        return found

    def report(self, path: str, offset: int, what: str, verdict: Verdict = Verdict.DAMAGED) -> None:
        """Take note of a problem."""
        self.problems.append(Problem(path=path, offset=offset, what=what, verdict=verdict))
