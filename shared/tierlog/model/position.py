"""Where in a stream: (ledger id, entry id), ordered by the stream's list of ledgers.

Ledger ids of one stream grow, so positions of one stream compare as tuples.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from tierlog.model.errors import RefusedError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId

# Before a time where a reader is asked to begin; which entry that is, readers find out.
TIME_PREFIX: Final = "time:"
_TEXT: Final = re.compile(r"(\d{1,19}):(\d{1,19})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """An entry's address. ``entry_id`` may be one past a ledger's end: "from there on"."""

    ledger_id: LedgerId
    entry_id: EntryId

    def __post_init__(self) -> None:
        assert 0 <= self.ledger_id <= INT64_MAX
        assert 0 <= self.entry_id <= INT64_MAX

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``LEDGER:ENTRY``, or raise ``RefusedError``."""
        match = _TEXT.fullmatch(text)
        numbers = [int(group) for group in match.groups()] if match else [INT64_MAX + 1]
        if max(numbers) > INT64_MAX:
            raise RefusedError(
                f"{text[:60]!r} is not a position",
                remedy="Give LEDGER:ENTRY, as 12:345",
            )
        return cls(LedgerId(numbers[0]), EntryId(numbers[1]))


class Edge(StrEnum):
    """The two positions that have a name."""

    EARLIEST = "earliest"
    LATEST = "latest"


def parse_position(text: str, *, or_time: bool = False) -> Position | Edge:
    """Read ``earliest``, ``latest`` or ``LEDGER:ENTRY``, or raise ``RefusedError``.

    ``or_time``: whoever asks has looked for ``TIME_PREFIX`` before, and the error names it too.
    """
    if text in set(Edge):
        return Edge(text)
    try:
        return Position.parse(text)
    except RefusedError as error:
        error.remedy += ", or earliest or latest"
        if or_time:
            error.remedy += f", or {TIME_PREFIX}2026-01-31T12:00:00Z"
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedRange:
    """Where entries of one append went within one ledger, both ends included."""

    ledger_id: LedgerId
    first_entry_id: EntryId
    last_entry_id: EntryId

    def __post_init__(self) -> None:
        assert 0 <= self.ledger_id <= INT64_MAX
        assert 0 <= self.first_entry_id <= self.last_entry_id <= INT64_MAX
