"""What an inspection of an object finds: fields, blocks, problems (``tierlog.format.inspect``).

Owns the values, and nothing that reads.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from tierlog.format.checksum import Buffer
from tierlog.format.index import IndexEntry
from tierlog.model.ledger import LedgerMetadata

CHUNK_LEN: Final = 1024 * 1024
# A hostile object must not make the report as large as itself.
PROBLEMS_MAX: Final = 1000
# Behind damage nothing tells which entry comes next.
UNKNOWN_ID: Final = -1


class Range(NamedTuple):
    """Bytes that the inspection asks for."""

    offset: int
    length: int


class ObjectKind(Enum):
    """What an object is, by its magic word."""

    DATA = "data"
    INDEX = "index"
    SIDE = "side"
    SINGLE = "single"
    MANIFEST = "manifest"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the layout and what stands there."""

    offset: int
    length: int
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that the format does not allow."""

    offset: int
    message: str


@dataclass(slots=True, kw_only=True)
class BlockReport:
    """What a block says of itself, and what was found in it."""

    offset: int
    header_len: int
    block_len: int
    first_entry_id: int
    entry_count: int = 0
    payload_len: int = 0
    padding_len: int = 0

    @property
    def last_entry_id(self) -> int:
        """The last whole entry found; one before the first when there is none."""
        return self.first_entry_id + self.entry_count - 1


@dataclass(slots=True, kw_only=True)
class Report:
    """The whole description of an object."""

    kind: ObjectKind
    size: int
    fields: list[Field] = field(default_factory=list)
    blocks: list[BlockReport] = field(default_factory=list)
    mappings: list[IndexEntry] = field(default_factory=list)
    metadata: LedgerMetadata | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems

    @property
    def entry_count(self) -> int:
        """Entries of all blocks."""
        return sum(block.entry_count for block in self.blocks)

    def note(self, offset: int, message: str) -> None:
        """Add a problem, up to a limit."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(Problem(offset, message))


Inspection = Generator[Range, Buffer, Report]
