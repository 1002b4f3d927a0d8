"""What lies in a bucket, by stream, kind and age; and what it costs (pure).

Owns the kinds, the ages, and the sums. Does not own listing (``usage``), nor prices
(``tierlog.model.prices``).

Invariant: each object is counted once, under one kind; of what nobody names the kind says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple
from uuid import UUID

from tierlog.format.attribute_objects import parse_attribute_key
from tierlog.format.keys import ObjectRole, key_prefix, parse_key
from tierlog.format.manifest import is_manifest_key, parse_manifest_key
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import ManifestLedger
from tierlog.model.prices import offload_requests, single_requests
from tierlog.ports.objects import ObjectInfo

DAY_MS: Final = 86_400_000
AGES: Final = (1, 7, 30, 90, 365)
"""Days; what is older than the last is the last age."""


class Kind(StrEnum):
    """What an object is."""

    COPY = "copy"
    """Of a copy that a manifest names."""
    EXPORT = "export"
    """An export copy beside one."""
    UNNAMED = "unnamed"
    """Of an attempt that no manifest names: at work, left over, or not in a manifest yet."""
    MANIFEST = "manifest"
    ATTRIBUTES = "attributes"
    FOREIGN = "foreign"
    """Nothing of ours, by its key."""


class NamedLedger(NamedTuple):
    """A closed ledger as its stream's manifest has it; ``uuid`` None: no copy is named."""

    ledger_id: LedgerId
    uuid: UUID | None
    opened_ms: int
    closed_ms: int
    length: int
    entries: int
    data_len: int
    block_size: int
    block_count: int


class Place(NamedTuple):
    """Where something is counted."""

    stream: str
    kind: Kind
    age: str


@dataclass(slots=True)
class Used:
    """What is counted there. ``requests``: what making the objects took, if nothing failed."""

    ledgers: int = 0
    entries: int = 0
    objects: int = 0
    bytes: int = 0
    requests: int = 0

    def add(self, other: "Used") -> None:
        """Add other counts."""
        self.ledgers += other.ledgers
        self.entries += other.entries
        self.objects += other.objects
        self.bytes += other.bytes
        self.requests += other.requests


Named = Mapping[tuple[LedgerId, UUID], tuple[StreamName, NamedLedger]]
Sums = dict[Place, Used]


def named_ledger(ledger: ManifestLedger) -> NamedLedger:
    """Return what is counted of a ledger."""
    listed, copy = ledger.listed, ledger.copy
    return NamedLedger(
        listed.ledger_id,
        copy.uuid if copy is not None else None,
        listed.opened_ms,
        listed.closed_ms,
        listed.length,
        listed.entry_count,
        copy.copy.data_len if copy is not None else 0,
        listed.block_size,
        copy.copy.block_count if copy is not None else 0,
    )


def names_of(streams: Iterable[tuple[StreamName, Sequence[NamedLedger]]]) -> Named:
    """Return the copies that manifests name."""
    return {
        (one.ledger_id, one.uuid): (stream, one)
        for stream, ledgers in streams
        for one in ledgers
        if one.uuid is not None
    }


def shards(prefix: str) -> list[str]:
    """Return beginnings of keys that together hold all that begin with ASCII, each one once.

    Attempts begin with a UUID, so that sixteen of them hold about as many each. Nothing of ours
    begins otherwise; what does is in no list, since no store is asked for what lies behind a key.
    """
    return [f"{key_prefix(prefix)}{chr(sign)}" for sign in range(0x20, 0x7F)]


def shard_weight(beginning: str) -> int:
    """Return how much there may be to list: attempts, and manifests; little else."""
    return 16 if beginning[-1:] in "0123456789abcdefs" else 1


def age_of(since_ms: int, now_ms: int) -> str:
    """Return how old something is, as people say it."""
    days, low = (now_ms - since_ms) / DAY_MS, 0
    for high in AGES:
        if days < high:
            return f"{low} to {high} d"
        low = high
    return f"over {low} d"


def count(info: ObjectInfo, named: Named, *, prefix: str, now_ms: int) -> tuple[Place, Used]:
    """Return where an object is counted, and as what."""
    one = Used(objects=1, bytes=info.size, requests=1)
    parsed = parse_key(prefix, info.key)
    if parsed is None:
        stream, kind = _beside(info.key, prefix)
        return Place(stream, kind, age_of(info.modified_ms, now_ms)), one
    found = named.get((parsed.ledger_id, parsed.uuid))
    if found is None:
        return Place("", Kind.UNNAMED, age_of(info.modified_ms, now_ms)), one
    stream, ledger = found
    age = age_of(ledger.closed_ms, now_ms)
    if parsed.role is ObjectRole.EXPORT:
        return Place(stream, Kind.EXPORT, age), one
    if parsed.role in (ObjectRole.DATA, ObjectRole.SINGLE):
        one.ledgers, one.entries = 1, ledger.entries
        one.requests = sum(_requests_of(parsed.role, ledger).values())
    else:
        # The data object's requests are those of all that its offload wrote.
        one.requests = 0
    return Place(stream, Kind.COPY, age), one


def _requests_of(role: ObjectRole, ledger: NamedLedger) -> Mapping[tuple[str, str], int]:
    if role is ObjectRole.SINGLE:
        return single_requests(ledger.block_count)
    return offload_requests(ledger.data_len, ledger.block_size)


def _beside(key: str, prefix: str) -> tuple[str, Kind]:
    manifest = parse_manifest_key(prefix, key)
    if manifest is not None:
        return manifest.stream, Kind.MANIFEST
    if is_manifest_key(prefix, key):
        return "", Kind.MANIFEST
    attributes = parse_attribute_key(prefix, key)
    if attributes is not None:
        return attributes.stream, Kind.ATTRIBUTES
    return "", Kind.FOREIGN


def add(sums: Sums, place: Place, used: Used) -> None:
    """Add counts to sums."""
    sums.setdefault(place, Used()).add(used)
