"""Names and numbers that identify things, each of its own type so that none is mistaken."""

import re
from typing import Final, NewType

from tierlog.model.errors import RefusedError

LedgerId = NewType("LedgerId", int)
EntryId = NewType("EntryId", int)
NodeId = NewType("NodeId", str)
StreamName = NewType("StreamName", str)

NO_ENTRY: Final = EntryId(-1)
"""Last entry id, or LAC, of a ledger that has no entry."""

INT64_MAX: Final = 2**63 - 1
# A ledger's path has ten digits (seeds/003, "Ledger metadata": %10d).
LEDGER_ID_MAX: Final = 10**10 - 1

READONLY_NAME: Final = "readonly"
"""The one name that no storage node may have: it is a folder's, beside the nodes'."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def stream_name(text: str) -> StreamName:
    """Check ``text`` as a stream's name, or raise ``RefusedError``."""
    if _NAME.fullmatch(text) is None:
        raise RefusedError(
            f"stream name {text[:140]!r} is not allowed",
            remedy="Use 1 to 128 of A-Z a-z 0-9 . _ -, the first a letter or a digit",
        )
    return StreamName(text)


def node_id(text: str) -> NodeId:
    """Check ``text`` as a storage node's id, or raise ``RefusedError``."""
    if _NAME.fullmatch(text) is None or text == READONLY_NAME:
        raise RefusedError(
            f"node id {text[:140]!r} is not allowed",
            remedy="Use 1 to 128 of A-Z a-z 0-9 . _ -, the first a letter or a digit; "
            f"{READONLY_NAME!r} is a folder's name",
        )
    return NodeId(text)


def namespace_of(name: StreamName) -> str:
    """Return the part of a stream's name before its first dot; empty when there is no dot."""
    head, dot, _ = name.partition(".")
    return head if dot else ""
