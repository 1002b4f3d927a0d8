"""The record of a stream's attributes in ZooKeeper, and in manifests (tierlog/v1/metadata.proto).

Invariants: as in ``tierlog.format.records``, and a record is never longer than
``RECORD_LEN_MAX``: ZooKeeper takes a megabyte, and gives it to each who asks.
"""

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from tierlog.format.checksum import Buffer
from tierlog.format.decoding import decoded
from tierlog.format.versions import Format, current
from tierlog.model.attribute_record import (
    AttributesRecord,
    GivenUp,
    KeptRoot,
    KeyRange,
    LostKeys,
)
from tierlog.model.attributes import (
    KEY_LEN,
    AttributeKey,
    IndexChunk,
    IndexObject,
    IndexRoot,
)
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog.proto.v1 import metadata_pb2 as pb

RECORD_LEN_MAX: Final = 512 * 1024
_DIGEST_LEN: Final = 32


def encode_attributes(record: AttributesRecord) -> bytes:
    """Return the data of a stream's znode of attributes."""
    data = pb.AttributesRecord(
        version=current(Format.ATTRIBUTES_RECORD),
        incarnation=record.incarnation.bytes,
        generation=record.generation,
        newest=_root_to_record(record.newest),
        ends=[_root_to_record(one) for one in record.ends],
        chunks=[
            pb.IndexChunkRecord(
                key=one.key,
                sha256=one.sha256,
                start=one.start,
                end=one.end,
                object_count=one.object_count,
            )
            for one in record.chunks
        ],
        objects=[
            pb.IndexObjectRecord(key=one.key, start=one.start, length=one.length, sha256=one.sha256)
            for one in record.objects
        ],
        loss_accepted=record.loss_accepted,
        given_up=[
            pb.GivenUpRecord(
                ledger_id=one.ledger_id, first_entry_id=one.first, last_entry_id=one.last
            )
            for one in record.given_up
        ],
        lost_keys=[
            pb.LostKeysRecord(
                through=pb.TrimmedEnd(
                    ledger_id=one.through.ledger_id, entry_id=one.through.entry_id
                ),
                first_key=one.keys.first,
                last_key=one.keys.last,
            )
            for one in record.lost_keys
        ],
    ).SerializeToString(deterministic=True)
    if len(data) > RECORD_LEN_MAX:
        raise RefusedError(
            f"the record of a stream's attributes has {len(data)} bytes, more than "
            f"{RECORD_LEN_MAX}: {len(record.chunks)} chunks, {len(record.objects)} objects",
            reason=Reason.TOO_LARGE,
            remedy="Close chunks earlier: lower "
            "TIERLOG_INGEST__OWNER__ATTRIBUTES__CHUNK_OBJECTS_MAX",
            details={"length": str(len(data)), "limit": str(RECORD_LEN_MAX)},
        )
    return data


def decode_attributes(data: Buffer) -> AttributesRecord:
    """Read a stream's znode of attributes."""
    return decoded(pb.AttributesRecord(), data, Format.ATTRIBUTES_RECORD, _record_of)


def _record_of(record: pb.AttributesRecord) -> AttributesRecord:
    return AttributesRecord(
        incarnation=UUID(bytes=record.incarnation),
        generation=record.generation,
        newest=_root_of(record.newest),
        ends=tuple(map(_root_of, record.ends)),
        chunks=tuple(
            IndexChunk(
                key=one.key,
                sha256=_digest(one.sha256),
                start=one.start,
                end=one.end,
                object_count=one.object_count,
            )
            for one in record.chunks
        ),
        objects=tuple(
            IndexObject(key=one.key, start=one.start, length=one.length, sha256=_digest(one.sha256))
            for one in record.objects
        ),
        loss_accepted=record.loss_accepted,
        given_up=tuple(map(_given_up_of, record.given_up)),
        lost_keys=tuple(map(_lost_keys_of, record.lost_keys)),
    )


def _given_up_of(record: pb.GivenUpRecord) -> GivenUp:
    assert 0 <= record.first_entry_id <= record.last_entry_id
    return GivenUp(
        LedgerId(record.ledger_id), EntryId(record.first_entry_id), EntryId(record.last_entry_id)
    )


def _lost_keys_of(record: pb.LostKeysRecord) -> LostKeys:
    assert len(record.first_key) == len(record.last_key) == KEY_LEN
    place = record.through
    return LostKeys(
        Position(LedgerId(place.ledger_id), EntryId(place.entry_id)),
        KeyRange(AttributeKey(record.first_key), AttributeKey(record.last_key)),
    )


def _root_to_record(kept: KeptRoot) -> pb.KeptRootRecord:
    root = kept.root
    record = pb.KeptRootRecord(
        core=[pb.AttributeValue(key=key, value=value) for key, value in sorted(kept.core.items())],
        root_offset=root.root_offset,
        root_length=root.root_length,
        start=root.start,
        end=root.end,
        count=root.count,
    )
    if kept.through is not None:
        record.through.ledger_id = kept.through.ledger_id
        record.through.entry_id = kept.through.entry_id
    return record


def _root_of(record: pb.KeptRootRecord) -> KeptRoot:
    through: Position | None = None
    if record.HasField("through"):
        place = record.through
        through = Position(LedgerId(place.ledger_id), EntryId(place.entry_id))
    assert 0 <= record.start <= record.root_offset <= record.end
    assert record.root_offset + record.root_length <= record.end
    return KeptRoot(
        through=through,
        core=_core_of(record.core),
        root=IndexRoot(
            root_offset=record.root_offset,
            root_length=record.root_length,
            start=record.start,
            end=record.end,
            count=record.count,
        ),
    )


def _core_of(record: Sequence[pb.AttributeValue]) -> Mapping[AttributeKey, int]:
    assert all(len(one.key) == KEY_LEN for one in record)
    return {AttributeKey(one.key): one.value for one in record}


def _digest(raw: bytes) -> bytes:
    if len(raw) != _DIGEST_LEN:
        raise CorruptError(f"a digest of {len(raw)} bytes", remedy="Restore the metadata")
    return raw
