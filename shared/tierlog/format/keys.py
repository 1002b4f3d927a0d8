"""Names of objects in tier 2, and what is written beside their bytes (formats.md, "Objects").

    [prefix/]<uuid>-ledger-<ledger id>          the data object
    [prefix/]<uuid>-ledger-<ledger id>-index    the index object
    [prefix/]<uuid>-ledger-<ledger id>-side     the side object (tierlog.format.side)
    [prefix/]<uuid>-ledger-<ledger id>-single   instead of those, the layout of one object
                                                (tierlog.format.single)
    [prefix/]<uuid>-ledger-<ledger id>-export.ndjson
                                                the export copy, beside either
                                                (tierlog.format.export)

User metadata, lower-case as S3 hands it back: Pulsar's, and the cluster's id.

Owns names and metadata. Does not own which of the objects are still wanted.

Invariant: ``parse_key(prefix, key_of(…))`` gives back UUID, ledger and role.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple
from uuid import UUID

from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import INT64_MAX, LedgerId, StreamName
from tierlog.model.offload import Tier2Location

ROLE: Final = "role"
FORMAT_VERSION: Final = "s3managedledgeroffloaderformatversion"
MANAGED_LEDGER_NAME: Final = "managedledgername"
SOFTWARE_VERSION: Final = "s3managedledgeroffloadersoftwareversion"
SOFTWARE_GITSHA: Final = "s3managedledgeroffloadersoftwaregitsha"
PULSAR_CLUSTER_NAME: Final = "pulsarclustername"
CLUSTER_ID: Final = "tierlogclusterid"

# What Pulsar gives its index objects. Its data objects get application/unknown, which is only
# what its library falls back to.
CONTENT_TYPE: Final = "application/octet-stream"

_NAME: Final = re.compile(
    r"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"
    r"-ledger-(0|[1-9][0-9]{0,18})(|-index|-side|-single|-export\.ndjson)",
    re.ASCII,
)


class ObjectRole(Enum):
    """Which of an attempt's objects it is."""

    DATA = "data"
    INDEX = "index"
    SIDE = "side"
    SINGLE = "single"
    EXPORT = "export"


_SUFFIXES: Final = {
    ObjectRole.DATA: "",
    ObjectRole.INDEX: "-index",
    ObjectRole.SIDE: "-side",
    ObjectRole.SINGLE: "-single",
    ObjectRole.EXPORT: "-export.ndjson",
}
_ROLES: Final = {suffix: role for role, suffix in _SUFFIXES.items()}
_FORMATS: Final = {
    ObjectRole.DATA: Format.DATA_OBJECT,
    ObjectRole.INDEX: Format.INDEX_OBJECT,
    ObjectRole.SIDE: Format.SIDE_OBJECT,
    ObjectRole.SINGLE: Format.SINGLE_OBJECT,
    ObjectRole.EXPORT: Format.EVENT_EXPORT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKeys:
    """The keys that one attempt may have."""

    data: str
    index: str
    side: str
    single: str
    export: str

    @property
    def every(self) -> tuple[str, ...]:
        """All of them, what makes a copy readable first: so are they deleted."""
        return self.index, self.single, self.side, self.data, self.export


class ParsedKey(NamedTuple):
    """What a key says."""

    uuid: UUID
    ledger_id: LedgerId
    role: ObjectRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Who wrote an object."""

    version: str
    gitsha: str = "unknown"


def key_prefix(prefix: str) -> str:
    """Return a deployment's prefix as keys begin with it: empty, or with one slash at its end."""
    trimmed = prefix.strip("/")
    return f"{trimmed}/" if trimmed else ""


def object_keys(prefix: str, uuid: UUID, ledger_id: LedgerId) -> ObjectKeys:
    """Return where an attempt's objects lie."""
    assert 0 <= ledger_id <= INT64_MAX
    stem = f"{key_prefix(prefix)}{uuid}-ledger-{ledger_id}"
    return ObjectKeys(**{role.value: stem + _SUFFIXES[role] for role in ObjectRole})


def roles_of(location: Tier2Location) -> dict[ObjectRole, str]:
    """Return the keys of the objects that make a copy."""
    if location.is_single:
        return {ObjectRole.SINGLE: location.data_key}
    found = {ObjectRole.DATA: location.data_key, ObjectRole.INDEX: location.index_key}
    return found | ({ObjectRole.SIDE: location.side_key} if location.side_key else {})


def export_key(location: Tier2Location) -> str:
    """Return where the export copy of an attempt lies, if there is one."""
    return stem_of(location) + _SUFFIXES[ObjectRole.EXPORT]


def stem_of(location: Tier2Location) -> str:
    """Return what the keys of all objects of an attempt begin with."""
    return location.data_key.removesuffix(_SUFFIXES[ObjectRole.SINGLE])


def parse_key(prefix: str, key: str) -> ParsedKey | None:
    """Return what a key says; None when it is not the key of an attempt's object."""
    start = key_prefix(prefix)
    match = _NAME.fullmatch(key.removeprefix(start)) if key.startswith(start) else None
    if match is None or int(match[2]) > INT64_MAX:
        return None
    return ParsedKey(UUID(match[1]), LedgerId(int(match[2])), _ROLES[match[3]])


def object_metadata(
    role: ObjectRole,
    *,
    stream: StreamName,
    cluster_id: UUID,
    cluster_name: str,
    software: Software,
) -> dict[str, str]:
    """Return the user metadata of an object, which Pulsar reads too."""
    return {
        ROLE: role.value,
        FORMAT_VERSION: str(current(_FORMATS[role])),
        MANAGED_LEDGER_NAME: stream,
        SOFTWARE_VERSION: software.version,
        SOFTWARE_GITSHA: software.gitsha,
        PULSAR_CLUSTER_NAME: cluster_name,
        CLUSTER_ID: str(cluster_id),
    }


def check_object_metadata(metadata: Mapping[str, str], role: ObjectRole, *, key: str = "") -> None:
    """Raise ``CorruptError`` when an object isn't ours, ``RefusedError`` on another version."""
    known = {name.lower(): value for name, value in metadata.items()}
    version = known.get(FORMAT_VERSION, "")
    if not re.fullmatch(r"[0-9]{1,9}", version, re.ASCII):
        raise CorruptError(
            f"object {key!r} does not say its format version, so it is not one of ours",
            remedy="Check the key, and that nothing between here and S3 drops user metadata",
            details={"key": key},
        )
    check_version(_FORMATS[role], int(version))
    # Pulsar writes the role; an object without one is taken at its key's word.
    found = known.get(ROLE, role.value)
    if found != role.value:
        raise CorruptError(
            f"object {key!r} is a {found[:40]} object where a {role.value} object belongs",
            remedy="Check the key",
            details={"key": key},
        )


def cluster_of(metadata: Mapping[str, str]) -> UUID | None:
    """Return the cluster that wrote an object; None when it was not Tierlog."""
    known = {name.lower(): value for name, value in metadata.items()}
    try:
        return UUID(known[CLUSTER_ID])
    except (KeyError, ValueError):
        return None


def require_key(prefix: str, key: str) -> ParsedKey:
    """Return what a key says, or raise ``RefusedError``."""
    parsed = parse_key(prefix, key)
    if parsed is None:
        raise RefusedError(
            f"{key[:200]!r} is not the key of an offloaded ledger",
            remedy="Keys are <uuid>-ledger-<id>, with nothing or one of "
            f"{', '.join(sorted(suffix for suffix in _ROLES if suffix))} behind",
        )
    return parsed
