"""What executors list and read of a scrub, and its findings as rows (pure).

Owns cutting streams into looks. Does not own what a look is (``tierlog.offload.scrub``).

Invariant: every ledger of every stream is in exactly one look, and each stream has one at least:
its manifest is read even if it has no ledger.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from tierlog.format.attribute_objects import parse_attribute_key
from tierlog.format.keys import ObjectRole, parse_key
from tierlog.format.manifest import is_manifest_key
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.scrub import KINDS, Finding, FindingKind, ScrubReport
from tierlog.offload.scrub_crew import ListedAttempt, Listing
from tierlog.ports.objects import ObjectInfo


class LookItem(NamedTuple):
    """Ledgers of one stream that are looked at by one task; ``bytes``: how long they are."""

    stream: StreamName
    ledgers: tuple[LedgerId, ...]
    bytes: int


def look_items(
    stream: StreamName, ledgers: Iterable[tuple[LedgerId, int]], *, bytes_max: int
) -> list[LookItem]:
    """Cut a stream's ledgers, with their lengths, into looks of about that many bytes."""
    found: list[LookItem] = []
    some: list[LedgerId] = []
    length = 0
    for ledger_id, size in ledgers:
        if some and length + size > bytes_max:
            found.append(LookItem(stream, tuple(some), length))
            some, length = [], 0
        some.append(ledger_id)
        length += size
    if some or not found:
        found.append(LookItem(stream, tuple(some), length))
    return found


class Lister:
    """Takes listed objects, in the order of keys, and makes a ``Listing`` of them."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._indexes: set[tuple[StreamName, UUID]] = set()
        self._at: tuple[UUID, LedgerId] | None = None
        self._sizes: list[tuple[ObjectRole, int]] = []
        self._found = Listing()

    def __repr__(self) -> str:
        return f"<Lister {self._found.objects} objects>"

    def see(self, info: ObjectInfo) -> None:
        """Take an object."""
        self._found.objects += 1
        parsed = parse_key(self._prefix, info.key)
        if parsed is not None:
            at = (parsed.uuid, parsed.ledger_id)
            if at != self._at:
                self._flush()
                self._at = at
            self._sizes.append((parsed.role, info.size))
            return
        if is_manifest_key(self._prefix, info.key):
            return
        attributes = parse_attribute_key(self._prefix, info.key)
        if attributes is None:
            self._found.foreign += 1
        elif (index := (attributes.stream, attributes.incarnation)) not in self._indexes:
            self._indexes.add(index)
            self._found.index_keys.append(info.key)

    def _flush(self) -> None:
        if self._at is not None:
            self._found.attempts.append(ListedAttempt(*self._at, tuple(self._sizes)))
        self._at, self._sizes = None, []

    def listing(self) -> Listing:
        """Return what was seen."""
        self._flush()
        return self._found


def joined(listings: Iterable[Listing]) -> Listing:
    """Return several listings as one."""
    found = Listing()
    for one in listings:
        found.objects += one.objects
        found.foreign += one.foreign
        found.attempts += one.attempts
        found.index_keys += one.index_keys
    return found


def finding_row(finding: Finding) -> dict[str, Any]:
    """Return a finding as ``tierlog scrub`` shows it, and ``--from-report`` takes it."""
    return {
        "kind": finding.kind.value,
        "stream": finding.stream or None,
        "ledger_id": None if finding.ledger_id is None else int(finding.ledger_id),
        "uuid": None if finding.uuid is None else str(finding.uuid),
        "key": finding.key or None,
        "cause": finding.cause,
        "remedy": finding.remedy,
    }


def report_rows(report: ScrubReport) -> list[dict[str, Any]]:
    """Return the findings, and what could not be looked at."""
    rows = [finding_row(one) for one in report.findings]
    empty: Sequence[str] = ("stream", "ledger_id", "uuid", "key")
    remedy = "Scrub again once it answers"
    rows += [
        {"kind": "unread", **dict.fromkeys(empty), "cause": cause, "remedy": remedy}
        for cause in report.unread
    ]
    return rows


def report_counts(report: ScrubReport) -> dict[str, int]:
    """Return the counts of a report, one of each kind of finding among them."""
    kinds = {f"found_{kind.value.replace('-', '_')}": report.counts[kind] for kind in KINDS}
    return {
        "objects": report.objects,
        "uploads": report.uploads,
        "streams": report.streams,
        "ledgers": report.ledgers,
        "copies_checked": report.copies_checked,
        "bytes_read": report.bytes_read,
        "elsewhere": report.elsewhere,
        "unread": report.unread_count + report.counts[FindingKind.NOT_CHECKED],
        "remaining": report.remaining,
        **kinds,
    }
