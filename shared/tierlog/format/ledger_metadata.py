"""A ledger's metadata as BookKeeper writes it: bare, as in index objects, and as in ZooKeeper.

    in ZooKeeper:  "BookieMetadataFormatVersion" TAB "3" LF   29 + 1 + 1 bytes
                   varint                                     length of the message
                   LedgerMetadataFormat                       tierlog/v1/ledger_metadata.proto
    in an index:   LedgerMetadataFormat

Owns the coding alone. What the fields mean is ``tierlog.model.ledger``'s.

Invariants:
    * What Pulsar wrote is read: only the fields 1 to 6 must be there.
    * Password and cToken are written only when they are set, as Pulsar does.
    * A key id (custom metadata ``tierlog/key-id``) stands only where the digest type is HMAC.
    * A loss on record (``tierlog/lost``) reads ``first-last``, with commas between ranges.
    * Encoding is deterministic; custom metadata is sorted by key (its order carries nothing).
"""

import re
from typing import Final, NoReturn

from google.protobuf.message import DecodeError, EncodeError

from tierlog.format.checksum import Buffer
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import NO_ENTRY, EntryId, NodeId
from tierlog.model.ledger import (
    DIGITS_MAX,
    KEY_KEY_ID,
    KEY_LOST,
    DigestType,
    LedgerMetadata,
    LedgerState,
    Segment,
)
from tierlog.proto.v1.ledger_metadata_pb2 import LedgerMetadataFormat

_FIRST_LINE: Final = b"BookieMetadataFormatVersion\t"
_VARINT_LEN_MAX: Final = 5
# A znode holds at most 1 MiB; nothing larger can be a ledger's metadata.
METADATA_LEN_MAX: Final = 1024 * 1024
_LOST: Final = re.compile(rb"[0-9]{1,19}-[0-9]{1,19}(,[0-9]{1,19}-[0-9]{1,19})*")

assert len(_FIRST_LINE) == 28


def encode_bare(metadata: LedgerMetadata) -> bytes:
    """Return the message alone, as index objects hold it."""
    message = LedgerMetadataFormat(
        quorum_size=metadata.write_quorum,
        ensemble_size=metadata.ensemble_size,
        length=metadata.length,
        last_entry_id=metadata.last_entry_id,
        state=LedgerMetadataFormat.State.ValueType(metadata.state.value),
        ack_quorum_size=metadata.ack_quorum,
    )
    for segment in metadata.segments:
        message.segment.add(ensemble_member=segment.ensemble, first_entry_id=segment.first_entry_id)
    if metadata.digest_type is not None:
        message.digest_type = LedgerMetadataFormat.DigestType.ValueType(metadata.digest_type.value)
    if metadata.password is not None:
        message.password = metadata.password
    if metadata.ctime_ms is not None:
        message.ctime = metadata.ctime_ms
    if metadata.ctoken is not None:
        message.c_token = metadata.ctoken
    for key in sorted(metadata.custom):
        message.custom_metadata.add(key=key, value=metadata.custom[key])
    try:
        return message.SerializeToString(deterministic=True)
    except EncodeError as error:  # pragma: no cover - every required field was set
        raise AssertionError("metadata without a required field") from error


def decode_bare(raw: Buffer) -> LedgerMetadata:
    """Read the message alone, or raise ``CorruptError``."""
    if len(raw) > METADATA_LEN_MAX:
        _corrupt(f"ledger metadata of {len(raw)} bytes")
    message = LedgerMetadataFormat()
    try:
        message.ParseFromString(bytes(raw))
    except DecodeError as error:
        raise CorruptError(
            "ledger metadata is not a LedgerMetadataFormat", remedy="Read another copy"
        ) from error
    if not message.IsInitialized():
        _corrupt("ledger metadata lacks a required field")
    try:
        metadata = _value_of(message)
    except RefusedError as error:
        raise CorruptError(str(error), remedy="Read another copy") from error
    _check(metadata)
    return metadata


def encode_znode(metadata: LedgerMetadata) -> bytes:
    """Return what lies in ZooKeeper."""
    body = encode_bare(metadata)
    first_line = b"%s%d\n" % (_FIRST_LINE, current(Format.LEDGER_METADATA))
    return first_line + _varint(len(body)) + body


def decode_znode(data: Buffer) -> LedgerMetadata:
    """Read what lies in ZooKeeper: ``CorruptError``, or ``RefusedError`` for another version."""
    raw = bytes(data)
    line, newline, rest = raw.partition(b"\n")
    version = line.removeprefix(_FIRST_LINE)
    if not newline or version == line or not version.isdigit() or len(version) > 9:
        _corrupt("ledger metadata without BookKeeper's first line")
    check_version(Format.LEDGER_METADATA, int(version))
    length = shift = 0
    for at, byte in enumerate(rest[:_VARINT_LEN_MAX]):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            body = rest[at + 1 :]
            break
    else:
        _corrupt("ledger metadata cut in its length")
    if len(body) != length:
        _corrupt(f"ledger metadata of {len(body)} bytes where {length} belong")
    return decode_bare(body)


def _value_of(message: LedgerMetadataFormat) -> LedgerMetadata:
    has = message.HasField
    custom = {_text(item.key): item.value for item in message.custom_metadata}
    return LedgerMetadata(
        ensemble_size=message.ensemble_size,
        write_quorum=message.quorum_size,
        # BookKeeper's default, from before there were ack quorums.
        ack_quorum=message.ack_quorum_size if has("ack_quorum_size") else message.quorum_size,
        segments=tuple(
            Segment(
                first_entry_id=EntryId(one.first_entry_id),
                ensemble=tuple(NodeId(_text(member)) for member in one.ensemble_member),
            )
            for one in message.segment
        ),
        state=LedgerState(message.state),
        length=message.length,
        last_entry_id=EntryId(message.last_entry_id) if has("last_entry_id") else NO_ENTRY,
        digest_type=DigestType(message.digest_type) if has("digest_type") else None,
        password=message.password if has("password") else None,
        ctime_ms=message.ctime if has("ctime") else None,
        custom=custom,
        ctoken=message.c_token if has("c_token") else None,
    )


def _text(value: str | bytes) -> str:
    # A proto2 string that is not UTF-8 comes out as bytes.
    if isinstance(value, bytes):
        _corrupt("ledger metadata with a text that is not UTF-8")
    return value


def _check(metadata: LedgerMetadata) -> None:
    firsts = [segment.first_entry_id for segment in metadata.segments]
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        _corrupt(f"ledger metadata with segments that begin at {firsts[:8]}")
    if any(len(segment.ensemble) != metadata.ensemble_size for segment in metadata.segments):
        _corrupt("ledger metadata with an ensemble of another size than it says")
    if metadata.last_entry_id < NO_ENTRY or metadata.length < 0:
        _corrupt(f"ledger metadata with last entry {metadata.last_entry_id}")
    if KEY_KEY_ID in metadata.custom and metadata.digest_type is not DigestType.HMAC:
        _corrupt("ledger metadata that names a key of another digest type than HMAC")
    stripe = metadata.custom.get("tierlog/stripe-entries", b"1")
    if not (stripe.isdigit() and len(stripe) <= DIGITS_MAX and int(stripe) >= 1):
        _corrupt(f"ledger metadata with stripes of {stripe[:20]!r} entries")
    lost = metadata.custom.get(KEY_LOST)
    if lost is not None and _LOST.fullmatch(lost) is None:
        _corrupt(f"ledger metadata that records a loss as {lost[:40]!r}")


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _corrupt(message: str) -> NoReturn:
    raise CorruptError(message, remedy="Read another copy, or restore the metadata")
