"""The gate of every format that is kept or sent: which versions exist, are written, are read.

Owns the list of formats and their version numbers. Does not own what a version means: the module
of that format does.

Invariants:
    * A format's number, and a version's number, is never used again for anything else.
    * What is written is also read: ``current in readable``.
    * An unknown version is refused, never guessed at.
"""

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from tierlog.model.errors import RefusedError, TierlogError

_NUMBER: Final = re.compile(r"\d{1,9}", re.ASCII)


class Format(IntEnum):
    """Everything with a version of its own. Numbers are never reused."""

    RUN = 1
    APPEND_HEADER = 2
    STREAM_RECORD = 3
    LEDGER_PAGE = 4
    CONTEXT_RECORD = 5
    CLUSTER_RECORD = 6
    NODE_RECORD = 7
    COOKIE = 8
    WIRE = 9
    DATA_OBJECT = 10
    INDEX_OBJECT = 11
    SIDE_OBJECT = 12
    JOURNAL = 13
    LEDGER_FILE = 14
    LEDGER_METADATA = 15
    MANIFEST = 16
    FENCE_FILE = 17
    CLOUD_EVENT = 18
    PROGRESS_RECORD = 19
    ENTRY_LOG = 20
    LEDGER_INDEX = 21
    UNDERREPLICATED_RECORD = 22
    DRAINING_RECORD = 23
    AUDIT_RECORD = 24
    POLICIES_RECORD = 25
    SCRUB_RECORD = 28
    SINGLE_OBJECT = 26
    EVENT_EXPORT = 27
    ATTRIBUTES_RECORD = 29
    ATTRIBUTES_OBJECT = 30
    ATTRIBUTES_LIST = 31
    ATTRIBUTES_PAGE = 32
    EXPORT_LOG = 40
    WRITER_STATE = 41
    ENDPOINTS_FILE = 42


class Versions(NamedTuple):
    """What is written, and what is read."""

    current: int
    readable: frozenset[int]

    def common_with(self, readable: Iterable[int]) -> int | None:
        """Return the newest version that both sides read; None where there is none."""
        return max(self.readable.intersection(readable), default=None)


def _only(version: int) -> Versions:
    return Versions(version, frozenset({version}))


GATE: Final[Mapping[Format, Versions]] = {
    Format.RUN: _only(1),
    Format.APPEND_HEADER: _only(1),
    Format.STREAM_RECORD: _only(1),
    Format.LEDGER_PAGE: _only(1),
    Format.CONTEXT_RECORD: _only(1),
    Format.CLUSTER_RECORD: _only(1),
    Format.NODE_RECORD: _only(1),
    Format.COOKIE: _only(1),
    # 1 had one run a message; 2 had no conditions, which a server of it would pass over.
    Format.WIRE: _only(3),
    # Pulsar's number, in the objects' user metadata.
    Format.DATA_OBJECT: _only(1),
    Format.INDEX_OBJECT: _only(1),
    Format.SIDE_OBJECT: _only(1),
    Format.JOURNAL: _only(1),
    # Reserved: a file per ledger was what a storage node had before its entry logs.
    Format.LEDGER_FILE: _only(1),
    # BookKeeper's number; its versions 1 and 2 are texts that Tierlog never wrote.
    Format.LEDGER_METADATA: _only(3),
    Format.MANIFEST: _only(1),
    # 2 keeps nothing of the ledger ids that were seen.
    Format.FENCE_FILE: Versions(3, frozenset({2, 3})),
    Format.CLOUD_EVENT: _only(1),
    Format.PROGRESS_RECORD: _only(1),
    Format.ENTRY_LOG: _only(1),
    Format.LEDGER_INDEX: _only(1),
    Format.UNDERREPLICATED_RECORD: _only(1),
    Format.DRAINING_RECORD: _only(1),
    Format.AUDIT_RECORD: _only(1),
    Format.POLICIES_RECORD: _only(1),
    Format.SCRUB_RECORD: _only(1),
    # The number in user metadata, too: the month of the text, which Pulsar never counts up to.
    Format.SINGLE_OBJECT: _only(201804),
    Format.EVENT_EXPORT: _only(1),
    Format.ATTRIBUTES_RECORD: _only(1),
    Format.ATTRIBUTES_OBJECT: _only(1),
    Format.ATTRIBUTES_LIST: _only(1),
    Format.ATTRIBUTES_PAGE: _only(1),
    Format.EXPORT_LOG: _only(1),
    Format.WRITER_STATE: _only(1),
    Format.ENDPOINTS_FILE: _only(1),
}

assert set(GATE) == set(Format)
assert all(versions.current in versions.readable for versions in GATE.values())


def current(kind: Format) -> int:
    """Return the version that is written."""
    return GATE[kind].current


def check_version(
    kind: Format,
    found: int,
    *,
    error: type[TierlogError] = RefusedError,
    versions: Versions | None = None,
) -> None:
    """Raise ``error`` unless ``found`` can be read, by the gate or else by ``versions``.

    A record whose checksum was verified before has a version of the future: ``RefusedError``.
    Where damage looks the same, the caller asks for ``CorruptError``.
    """
    readable = (versions or GATE[kind]).readable
    if found in readable:
        return
    name = kind.name.lower().replace("_", " ")
    known = ", ".join(str(version) for version in sorted(readable))
    raise error(
        f"{name} has format version {found}, and this Tierlog reads {known}",
        remedy="Upgrade this process to the version that wrote it",
        details={"format": kind.name, "found": str(found), "readable": known},
    )


def readable_of(error: TierlogError, kind: Format) -> frozenset[int]:
    """Return what a peer said that it reads, when it refused a version; else nothing."""
    if error.details.get("format") != kind.name:
        return frozenset()
    told = error.details.get("readable", "").split(",")
    return frozenset(int(one) for one in told if _NUMBER.fullmatch(one.strip()))
