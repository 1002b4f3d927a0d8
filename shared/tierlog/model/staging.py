"""Staging ledgers: written for a stream before they belong to it (ADR-0031).

A staging ledger is a bare ledger whose metadata says which stream it is meant for, who writes it,
and the number that this writer will have in the stream once it is attached. It is there before its
first byte is, so that whoever cleans up knows of it.

Owns what is said and how it stands in a ledger's custom metadata. Does not own the attach.
"""

from dataclasses import dataclass
from typing import Final, Self
from uuid import UUID

from tierlog.model.errors import CorruptError
from tierlog.model.ids import StreamName
from tierlog.model.ledger import (
    KEY_BLOCK_SIZE,
    KEY_STAGED_BY,
    KEY_STAGED_FOR,
    KEY_STAGED_INCARNATION,
    KEY_STAGED_NUMBER,
    LedgerMetadata,
)

ATTACHED_LEDGERS_MAX: Final = 256
"""So many ledgers are attached in one change: it has to fit one request to the metadata store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """What a staging ledger is for. ``number``: of the writer, once it is attached; from 1."""

    stream: StreamName
    incarnation: UUID
    writer_id: UUID
    number: int
    block_size: int
    """Of the stream when the ledger was made: its entries fit such a block."""

    def custom(self) -> dict[str, bytes]:
        """Return what the ledger's metadata says."""
        return {
            KEY_STAGED_FOR: self.stream.encode(),
            KEY_STAGED_INCARNATION: str(self.incarnation).encode(),
            KEY_STAGED_BY: str(self.writer_id).encode(),
            KEY_STAGED_NUMBER: str(self.number).encode(),
            KEY_BLOCK_SIZE: str(self.block_size).encode(),
        }

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Self | None:
        """Read what a ledger is for; None: it is no staging ledger."""
        if not metadata.is_staging:
            return None
        custom = metadata.custom
        try:
            return cls(
                stream=StreamName(custom[KEY_STAGED_FOR].decode("ascii")),
                incarnation=UUID(custom[KEY_STAGED_INCARNATION].decode("ascii")),
                writer_id=UUID(custom[KEY_STAGED_BY].decode("ascii")),
                number=int(custom[KEY_STAGED_NUMBER]),
                block_size=int(custom[KEY_BLOCK_SIZE]),
            )
        except (KeyError, ValueError) as error:
            raise CorruptError(
                f"the metadata of a staging ledger can't be read: {error!r}",
                remedy="Delete the ledger by its number: tierlog ledger delete",
            ) from error
