"""Objects of the attribute index in tier 2: their names, and what lists a closed chunk of them.

    [prefix/]streams/<stream>/<incarnation>/attributes/<start, 20 digits>-<epoch>-<uuid>
    [prefix/]streams/<stream>/<incarnation>/attributes/<start, 20 digits>-<epoch>-<uuid>.list

The first is one flush: pages of the index back to back, each with its own checksum, the root last;
its bytes are those of the index from ``start`` on. ``epoch`` is the owner's, the UUID is chance:
no two flushes have one name. Its SHA-256 is in the record, or in the list, that names it.

The second lists the flushes of a closed chunk, integers big-endian:

    offset  length  field
    0       4       magic, 54 4C 41 4C ("TLAL")
    4       2       format version
    6       2       reserved, 0
    8       4       number of objects
    12      32      SHA-256 over bytes 0 to 11 and the rest
    44      72 each an object, ascending: start (8), length (8), owner epoch (8), UUID (16),
                    SHA-256 (32)

Owns names and bytes. Does not own which of them are needed, nor what a page holds.

Invariants:
    * ``parse_attribute_key(prefix, attribute_key(prefix, …))`` gives back what was put in.
    * ``decode_list(encode_list(x)) == x``; bytes that were changed anywhere are ``CorruptError``.
    * No such key is one of an attempt's objects, nor of a manifest.
"""

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple
from uuid import UUID

from tierlog.format import keys
from tierlog.format.keys import key_prefix
from tierlog.format.versions import Format, check_version, current
from tierlog.model.attributes import IndexObject
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import INT64_MAX, StreamName, stream_name

MAGIC: Final = b"TLAL"
_HEADER: Final = Struct(">4sHHI")
_ENTRY: Final = Struct(">QQQ16s32s")
DIGEST_LEN: Final = 32
HEADER_LEN: Final = _HEADER.size + DIGEST_LEN
ENTRY_LEN: Final = _ENTRY.size
assert (HEADER_LEN, ENTRY_LEN) == (44, 72)
LIST_SUFFIX: Final = ".list"
LIST_LEN_MAX: Final = 64 * 1024 * 1024
ROLE_OBJECT: Final = "attributes"
ROLE_LIST: Final = "attributes-list"

_NAME: Final = r"([0-9]{20})-(0|[1-9][0-9]{0,18})-([0-9a-f-]{36})"
_KEY: Final = re.compile(
    rf"streams/([^/]+)/([0-9a-f-]{{36}})/attributes/{_NAME}(\.list)?", re.ASCII
)
_OBJECT_NAME: Final = re.compile(_NAME, re.ASCII)


class AttributeObjectKey(NamedTuple):
    """What a key says."""

    stream: StreamName
    incarnation: UUID
    start: int
    owner_epoch: int
    suffix: UUID
    is_list: bool


def attributes_folder(prefix: str, stream: StreamName, incarnation: UUID) -> str:
    """Return where the attribute index of one incarnation of a stream lies."""
    return f"{key_prefix(prefix)}streams/{stream}/{incarnation}/attributes/"


def attribute_key(folder: str, *, start: int, owner_epoch: int, suffix: UUID) -> str:
    """Return the key of one flush; keys sort by where their bytes lie in the index."""
    assert 0 <= start <= INT64_MAX
    assert 0 <= owner_epoch <= INT64_MAX
    return f"{folder}{start:020d}-{owner_epoch}-{suffix}"


def list_key(folder: str, *, start: int, owner_epoch: int, suffix: UUID) -> str:
    """Return the key of what lists a chunk."""
    return attribute_key(folder, start=start, owner_epoch=owner_epoch, suffix=suffix) + LIST_SUFFIX


def parse_attribute_key(prefix: str, key: str) -> AttributeObjectKey | None:
    """Return what a key says; None when it is none of an attribute index."""
    begin = key_prefix(prefix)
    match = _KEY.fullmatch(key.removeprefix(begin)) if key.startswith(begin) else None
    if match is None:
        return None
    try:
        return AttributeObjectKey(
            stream_name(match[1]),
            UUID(match[2]),
            int(match[3]),
            int(match[4]),
            UUID(match[5]),
            is_list=match[6] is not None,
        )
    except (RefusedError, ValueError):
        return None


def moved_key(folder: str, key: str) -> str:
    """Return the key of the same object where a copied bucket has it."""
    return folder + key.rpartition("/")[2]


def attribute_metadata(*, is_list: bool, stream: StreamName, cluster_id: UUID) -> dict[str, str]:
    """Return the user metadata of an object: whose it is."""
    kind = Format.ATTRIBUTES_LIST if is_list else Format.ATTRIBUTES_OBJECT
    return {
        keys.ROLE: ROLE_LIST if is_list else ROLE_OBJECT,
        keys.FORMAT_VERSION: str(current(kind)),
        keys.MANAGED_LEDGER_NAME: stream,
        keys.CLUSTER_ID: str(cluster_id),
    }


def encode_list(objects: Sequence[IndexObject]) -> bytes:
    """Return the bytes that list a chunk."""
    body = b"".join(_packed(one) for one in objects)
    head = _HEADER.pack(MAGIC, current(Format.ATTRIBUTES_LIST), 0, len(objects))
    return head + hashlib.sha256(head + body).digest() + body


def decode_list(raw: bytes, *, key: str) -> tuple[IndexObject, ...]:
    """Return what a chunk's list names; ``key`` is the list's own."""
    if len(raw) < HEADER_LEN or raw[: len(MAGIC)] != MAGIC:
        raise _corrupt(key, "is no list of a chunk", 0)
    head, body = raw[: _HEADER.size], raw[HEADER_LEN:]
    _, version, _, count = _HEADER.unpack(head)
    if hashlib.sha256(head + body).digest() != raw[_HEADER.size : HEADER_LEN]:
        raise _corrupt(key, "has another digest than it says", _HEADER.size)
    check_version(Format.ATTRIBUTES_LIST, version)
    if len(body) != count * ENTRY_LEN:
        raise _corrupt(key, "has another length than it says", 8)
    folder = key.rpartition("/")[0] + "/"
    found = [_unpacked(folder, entry) for entry in _ENTRY.iter_unpack(body)]
    if any(one.end > other.start for one, other in pairwise(found)):
        raise _corrupt(key, "has objects that overlap", HEADER_LEN)
    return tuple(found)


def _packed(one: IndexObject) -> bytes:
    match = _OBJECT_NAME.fullmatch(one.key.rpartition("/")[2])
    assert match is not None, "only flushes are listed"
    assert int(match[1]) == one.start, "a key says where its bytes lie"
    return _ENTRY.pack(one.start, one.length, int(match[2]), UUID(match[3]).bytes, one.sha256)


def _unpacked(folder: str, entry: tuple[int, int, int, bytes, bytes]) -> IndexObject:
    start, length, owner_epoch, suffix, sha256 = entry
    key = attribute_key(folder, start=start, owner_epoch=owner_epoch, suffix=UUID(bytes=suffix))
    return IndexObject(key=key, start=start, length=length, sha256=sha256)


def _corrupt(key: str, what: str, offset: int) -> CorruptError:
    return CorruptError(
        f"attribute list {key!r} {what}",
        remedy="Bring the object back from another copy of the bucket; without it the attributes "
        "are rebuilt from the stream's entries",
        details={"object": key, "offset": str(offset)},
    )
