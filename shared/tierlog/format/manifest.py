"""Manifests: what makes the bucket describe itself (formats.md, "Objects in tier 2").

    [prefix/]streams/<stream>/<incarnation>/<generation, 20 digits>.manifest
    [prefix/]streams/<stream>/<incarnation>/<generation>-<uuid>-<number, 5 digits>.part
    [prefix/]cluster/<cluster id>/<generation>.manifest

Each object, integers big-endian:

    offset  length  field
    0       4       magic, 54 4C 4D 46 ("TLMF")
    4       2       format version
    6       2       kind: 1 a generation of a stream, 2 a part of a snapshot, 3 a cluster
    8       8       generation, from 1 on
    16      4       length of the body
    20      32      SHA-256 over bytes 0 to 19 and the body
    52      …       body: StreamManifestRecord, ManifestPartRecord or ClusterManifestRecord

A generation is a snapshot, which holds every ledger (in itself, and in parts when they are many),
or what changed since the generation before, whose SHA-256 as a whole object it names.

Owns keys and bytes. Does not own which generation is the newest, nor when one is written.

Invariants:
    * ``unpack(pack(x)) == x``; bytes that were changed anywhere are ``CorruptError``.
    * No key of a manifest is the key of an attempt's object (``tierlog.format.keys``).
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

from google.protobuf.message import DecodeError, Message

from tierlog.format.attribute_records import decode_attributes, encode_attributes
from tierlog.format.keys import key_prefix
from tierlog.format.records import (
    UUID_LEN,
    decode_levels,
    encode_levels,
    policy_from_record,
    policy_to_record,
)
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import LEDGER_ID_MAX, EntryId, LedgerId, StreamName, stream_name
from tierlog.model.manifest import (
    ClusterManifest,
    KeptLedger,
    ManifestCopy,
    ManifestHead,
    ManifestLedger,
)
from tierlog.model.node import Cluster
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.stream import ListedLedger, OffloadPause, StreamLifecycle
from tierlog.proto.v1 import manifest_pb2 as pb
from tierlog.proto.v1 import metadata_pb2

MAGIC: Final = b"TLMF"
_HEADER: Final = Struct(">4sHHQI")
DIGEST_LEN: Final = 32
HEADER_LEN: Final = _HEADER.size + DIGEST_LEN
assert HEADER_LEN == 52

# A snapshot's ledgers above this many go into parts of as many: about 3 MB each.
PART_LEDGERS: Final = 8192
# No object of ours is larger; what is, is refused before it is read.
MANIFEST_LEN_MAX: Final = 64 * 1024 * 1024
GENERATION_MAX: Final = 2**63 - 1
assert len(str(GENERATION_MAX)) < 20, "every number begins with a zero"

_Record = TypeVar("_Record", bound=Message)

_STREAM_KEY: Final = re.compile(
    r"streams/([^/]+)/([0-9a-f-]{36})/([0-9]{20})(?:(\.manifest)|-[0-9a-f-]{36}-[0-9]{5}\.part)",
    re.ASCII,
)
_CLUSTER_KEY: Final = re.compile(r"cluster/([0-9a-f-]{36})/([0-9]{20})\.manifest", re.ASCII)


class ManifestKind(IntEnum):
    """What an object with our magic is."""

    STREAM = 1
    PART = 2
    CLUSTER = 3


_KINDS: Final = frozenset(map(int, ManifestKind))


class ManifestKey(NamedTuple):
    """What the key of a stream's manifest, or of a part, says."""

    stream: StreamName
    incarnation: UUID
    generation: int
    is_part: bool


class ClusterKey(NamedTuple):
    """What the key of a cluster's manifest says."""

    cluster_id: UUID
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """A further object of a snapshot."""

    key: str
    sha256: bytes
    length: int
    ledger_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamGeneration:
    """One generation: a snapshot, or what changed."""

    generation: int
    cluster_id: UUID
    written_ms: int
    head: ManifestHead
    snapshot_generation: int
    previous_sha256: bytes = b""
    ledgers: Mapping[LedgerId, KeptLedger]
    removed: tuple[LedgerId, ...] = ()
    parts: tuple[PartRef, ...] = ()

    @property
    def is_snapshot(self) -> bool:
        """Whether it needs no generation before it."""
        return self.snapshot_generation == self.generation


def streams_folder(prefix: str) -> str:
    """Return where all streams' manifests lie."""
    return f"{key_prefix(prefix)}streams/"


def stream_folder(prefix: str, stream: StreamName) -> str:
    """Return where the manifests of every incarnation of a stream lie."""
    return f"{streams_folder(prefix)}{stream}/"


def manifest_folder(prefix: str, stream: StreamName, incarnation: UUID) -> str:
    """Return where the manifests of one incarnation lie."""
    return f"{stream_folder(prefix, stream)}{incarnation}/"


def manifest_key(prefix: str, stream: StreamName, incarnation: UUID, generation: int) -> str:
    """Return the key of a generation; keys sort by generation."""
    assert 1 <= generation <= GENERATION_MAX
    return f"{manifest_folder(prefix, stream, incarnation)}{generation:020d}.manifest"


def part_key(
    prefix: str,
    stream: StreamName,
    incarnation: UUID,
    generation: int,
    *,
    writer: UUID,
    number: int,
) -> str:
    """Return the key of a part; the writer's UUID keeps two leaders' parts apart."""
    folder = manifest_folder(prefix, stream, incarnation)
    return f"{folder}{generation:020d}-{writer}-{number:05d}.part"


def parse_manifest_key(prefix: str, key: str) -> ManifestKey | None:
    """Return what a key says; None when it is none of a stream's manifests."""
    match = _match(_STREAM_KEY, prefix, key)
    if match is None:
        return None
    try:
        name, incarnation = stream_name(match[1]), UUID(match[2])
    except (RefusedError, ValueError):
        return None
    return ManifestKey(name, incarnation, int(match[3]), is_part=match[4] is None)


def clusters_folder(prefix: str) -> str:
    """Return where the manifests of all clusters of a bucket lie."""
    return f"{key_prefix(prefix)}cluster/"


def cluster_key(prefix: str, cluster_id: UUID, generation: int) -> str:
    """Return the key of a generation of a cluster's manifest."""
    assert 1 <= generation <= GENERATION_MAX
    return f"{clusters_folder(prefix)}{cluster_id}/{generation:020d}.manifest"


def parse_cluster_key(prefix: str, key: str) -> ClusterKey | None:
    """Return what a key says; None when it is none of a cluster's manifests."""
    match = _match(_CLUSTER_KEY, prefix, key)
    if match is None:
        return None
    try:
        return ClusterKey(UUID(match[1]), int(match[2]))
    except ValueError:
        return None


def is_manifest_key(prefix: str, key: str) -> bool:
    """Tell whether a key is a manifest's, or that of a part of one."""
    of_stream = parse_manifest_key(prefix, key) is not None
    return of_stream or parse_cluster_key(prefix, key) is not None


def _match(pattern: re.Pattern[str], prefix: str, key: str) -> re.Match[str] | None:
    start = key_prefix(prefix)
    return pattern.fullmatch(key.removeprefix(start)) if key.startswith(start) else None


def pack(kind: ManifestKind, generation: int, body: bytes) -> bytes:
    """Return a whole object."""
    head = _HEADER.pack(MAGIC, current(Format.MANIFEST), kind, generation, len(body))
    return head + hashlib.sha256(head + body).digest() + body


def unpack(raw: bytes, *, key: str = "") -> tuple[ManifestKind, int, bytes]:
    """Return kind, generation and body of an object, checked."""
    if len(raw) < HEADER_LEN or raw[: len(MAGIC)] != MAGIC:
        raise _corrupt(key, "is no manifest", 0)
    head, body = raw[: _HEADER.size], raw[HEADER_LEN:]
    _, version, kind, generation, body_len = _HEADER.unpack(head)
    if hashlib.sha256(head + body).digest() != raw[_HEADER.size : HEADER_LEN]:
        raise _corrupt(key, "has another digest than it says", _HEADER.size)
    # Whole, and yet not known: it is of the future.
    check_version(Format.MANIFEST, version)
    if body_len != len(body) or kind not in _KINDS or not 1 <= generation <= GENERATION_MAX:
        raise _corrupt(key, "has a header that makes no sense", 6)
    return ManifestKind(kind), generation, body


def keep(ledger: ManifestLedger) -> KeptLedger:
    """Return a ledger as manifests keep it; equal ledgers give equal bytes."""
    record = pb.ManifestLedger()
    for item in fields(ListedLedger):
        setattr(record.listed, item.name, getattr(ledger.listed, item.name))
    copy = ledger.copy
    if copy is not None:
        record.copy.uuid = copy.uuid.bytes
        record.copy.complete_ms = copy.complete_ms
        for item in fields(Tier2Location):
            setattr(record.copy.location, item.name, getattr(copy.location, item.name))
        for item in fields(Tier2Copy):
            setattr(record.copy, item.name, getattr(copy.copy, item.name))
    return KeptLedger(
        copy.uuid if copy is not None else None,
        ledger.listed.last_entry_id,
        record.SerializeToString(deterministic=True),
    )


def unkeep(packed: bytes, *, key: str = "") -> ManifestLedger:
    """Invert ``keep``."""
    record = _parsed(pb.ManifestLedger(), packed, key)
    listed, copy = record.listed, None
    if record.HasField("copy"):
        found = record.copy
        copy = ManifestCopy(
            uuid=_uuid(found.uuid, key),
            location=Tier2Location(**_values(Tier2Location, found.location)),
            complete_ms=found.complete_ms,
            copy=Tier2Copy(**_values(Tier2Copy, found)),
        )
    values = _values(ListedLedger, listed)
    values |= {
        "ledger_id": LedgerId(listed.ledger_id),
        "last_entry_id": EntryId(listed.last_entry_id),
        "attached_id": LedgerId(listed.attached_id),
    }
    return ManifestLedger(listed=ListedLedger(**values), copy=copy)


def encode_generation(generation: StreamGeneration) -> bytes:
    """Return the object of a generation."""
    record = pb.StreamManifestRecord(
        cluster_id=generation.cluster_id.bytes,
        written_ms=generation.written_ms,
        head=_head_to_record(generation.head),
        snapshot_generation=generation.snapshot_generation,
        previous_sha256=generation.previous_sha256,
        ledgers=[one.packed for one in generation.ledgers.values()],
        removed=generation.removed,
        parts=[
            pb.ManifestPartRef(
                key=one.key, sha256=one.sha256, length=one.length, ledger_count=one.ledger_count
            )
            for one in generation.parts
        ],
    )
    body = record.SerializeToString(deterministic=True)
    return pack(ManifestKind.STREAM, generation.generation, body)


def decode_generation(raw: bytes, *, key: str = "") -> StreamGeneration:
    """Read the object of a generation."""
    generation, body = _body(raw, ManifestKind.STREAM, key)
    record = _parsed(pb.StreamManifestRecord(), body, key)
    if not 1 <= record.snapshot_generation <= generation:
        raise _corrupt(key, "names a snapshot behind itself", HEADER_LEN)
    if (len(record.previous_sha256) == DIGEST_LEN) is (record.snapshot_generation == generation):
        raise _corrupt(key, "names no generation before it, or too many", HEADER_LEN)
    return StreamGeneration(
        generation=generation,
        cluster_id=_uuid(record.cluster_id, key),
        written_ms=record.written_ms,
        head=_head_of(record.head, key),
        snapshot_generation=record.snapshot_generation,
        previous_sha256=record.previous_sha256,
        ledgers=_kept(record.ledgers, key),
        removed=tuple(map(LedgerId, record.removed)),
        parts=tuple(
            PartRef(
                key=one.key, sha256=one.sha256, length=one.length, ledger_count=one.ledger_count
            )
            for one in record.parts
        ),
    )


def encode_part(
    generation: int, *, cluster_id: UUID, incarnation: UUID, ledgers: Iterable[KeptLedger]
) -> bytes:
    """Return the object of a part."""
    record = pb.ManifestPartRecord(
        cluster_id=cluster_id.bytes,
        incarnation=incarnation.bytes,
        ledgers=[one.packed for one in ledgers],
    )
    body = record.SerializeToString(deterministic=True)
    return pack(ManifestKind.PART, generation, body)


def decode_part(raw: bytes, *, key: str = "") -> Mapping[LedgerId, KeptLedger]:
    """Read the object of a part."""
    _, body = _body(raw, ManifestKind.PART, key)
    return _kept(_parsed(pb.ManifestPartRecord(), body, key).ledgers, key)


def encode_cluster_manifest(manifest: ClusterManifest, *, generation: int, now_ms: int) -> bytes:
    """Return the object of a generation of a cluster's manifest."""
    cluster = manifest.cluster
    record = pb.ClusterManifestRecord(
        cluster_id=cluster.cluster_id.bytes,
        written_ms=now_ms,
        created_ms=cluster.created_ms,
        ledger_id_base=cluster.ledger_id_base,
        policy_levels=encode_levels(manifest.levels),
    )
    body = record.SerializeToString(deterministic=True)
    return pack(ManifestKind.CLUSTER, generation, body)


def decode_cluster_manifest(raw: bytes, *, key: str = "") -> ClusterManifest:
    """Read the object of a generation of a cluster's manifest."""
    _, body = _body(raw, ManifestKind.CLUSTER, key)
    record = _parsed(pb.ClusterManifestRecord(), body, key)
    cluster = Cluster(
        cluster_id=_uuid(record.cluster_id, key),
        created_ms=record.created_ms,
        ledger_id_base=record.ledger_id_base,
    )
    return ClusterManifest(cluster=cluster, levels=decode_levels(record.policy_levels))


def _head_to_record(head: ManifestHead) -> pb.ManifestHead:
    record = pb.ManifestHead(
        stream=head.stream,
        incarnation=head.incarnation.bytes,
        lifecycle=metadata_pb2.StreamLifecycle.ValueType(head.lifecycle.value),
        raw=head.raw,
        created_ms=head.created_ms,
        partitions=head.partitions,
        owner_epoch=head.owner_epoch,
        policy=policy_to_record(head.policy),
        policy_changed_ms=head.policy_changed_ms,
        offload_pauses=head.offload_pauses,
        trimmed_through=head.trimmed_through,
        ledger_id_max=head.ledger_id_max,
    )
    if head.offload_pause is not None:
        record.offload_pause.since_ms = head.offload_pause.since_ms
        record.offload_pause.cause = head.offload_pause.cause
    if head.offload_through is not None:
        record.offload_through = head.offload_through
    if head.trimmed_last is not None:
        record.trimmed_last_entry_id = head.trimmed_last
    if head.attributes is not None:
        record.attributes = encode_attributes(head.attributes)
    return record


def _head_of(record: pb.ManifestHead, key: str) -> ManifestHead:
    pause = record.offload_pause if record.HasField("offload_pause") else None
    try:
        return ManifestHead(
            stream=stream_name(record.stream),
            incarnation=_uuid(record.incarnation, key),
            created_ms=record.created_ms,
            lifecycle=StreamLifecycle(record.lifecycle),
            raw=record.raw,
            partitions=record.partitions,
            owner_epoch=record.owner_epoch,
            policy=policy_from_record(record.policy),
            policy_changed_ms=record.policy_changed_ms,
            offload_pauses=record.offload_pauses,
            offload_through=(
                LedgerId(record.offload_through) if record.HasField("offload_through") else None
            ),
            offload_pause=(
                OffloadPause(since_ms=pause.since_ms, cause=pause.cause)
                if pause is not None
                else None
            ),
            trimmed_through=LedgerId(record.trimmed_through),
            trimmed_last=(
                EntryId(record.trimmed_last_entry_id)
                if record.HasField("trimmed_last_entry_id")
                else None
            ),
            ledger_id_max=LedgerId(record.ledger_id_max),
            attributes=decode_attributes(record.attributes) if record.attributes else None,
        )
    except (RefusedError, ValueError) as error:
        raise _corrupt(key, f"describes no stream ({error})", HEADER_LEN) from error


def _kept(packed: Iterable[bytes], key: str) -> dict[LedgerId, KeptLedger]:
    kept: dict[LedgerId, KeptLedger] = {}
    for one in packed:
        record = _parsed(pb.ManifestLedger(), one, key)
        if not 0 <= record.listed.ledger_id <= LEDGER_ID_MAX:
            raise _corrupt(key, f"names a ledger {record.listed.ledger_id}", HEADER_LEN)
        uuid = _uuid(record.copy.uuid, key) if record.HasField("copy") else None
        kept[LedgerId(record.listed.ledger_id)] = KeptLedger(
            uuid, EntryId(record.listed.last_entry_id), one
        )
    return kept


def _body(raw: bytes, kind: ManifestKind, key: str) -> tuple[int, bytes]:
    found, generation, body = unpack(raw, key=key)
    if found is not kind:
        raise _corrupt(key, f"is a {found.name} where a {kind.name} belongs", 6)
    return generation, body


def _parsed(record: _Record, data: bytes, key: str) -> _Record:
    try:
        record.ParseFromString(data)
    except DecodeError as error:
        raise _corrupt(key, "has a body that can't be read", HEADER_LEN) from error
    return record


def _values(cls: type[Any], record: Message) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(cls)}


def _uuid(raw: bytes, key: str) -> UUID:
    if len(raw) != UUID_LEN:
        raise _corrupt(key, f"has a UUID of {len(raw)} bytes", HEADER_LEN)
    return UUID(bytes=raw)


def _corrupt(key: str, what: str, offset: int) -> CorruptError:
    return CorruptError(
        f"manifest {key!r} {what}",
        remedy="Nothing of the stream is deleted until a manifest is whole; see the how-to "
        "restore-from-a-bucket",
        details={"object": key, "offset": str(offset)},
    )
