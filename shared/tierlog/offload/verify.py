"""Whether a copy in tier 2 is what an attempt wrote (protocols.md section 3, step 6).

Looks at sizes, the number of parts, the index and the side object with their digests, whether
both agree, the headers of the first and the last block, and, as far as it is told to, at the data
itself: each part's checksum was verified by the store when it took the part, and reading back
says whether the store still has those bytes.

Invariant: returning means that the data object has the length and the blocks that the index
names, that index and side object have the digests that the context names, and that every grain
that was read back is what was written. Anything else raises.
"""

import hashlib
import re
from collections.abc import Sequence
from enum import Enum
from typing import Final, NoReturn, Self

import numpy as np

from tierlog.format import keys
from tierlog.format.block import BLOCK_HEADER_LEN, BlockHeader
from tierlog.format.checksum import crc32c
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.index import BlockRange, ObjectIndex
from tierlog.format.keys import ObjectRole
from tierlog.format.side import SideObject
from tierlog.model.errors import CorruptError
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.policy import READ_BACKS, Policy
from tierlog.offload.side_reader import check_side_header
from tierlog.offload.single_verify import REMEDY, verify_single
from tierlog.ports.objects import ObjectReads

# What S3 puts behind the digest in the ETag of an object made of parts.
_PART_COUNT: Final = re.compile(r"-(\d+)\"?$", re.ASCII)
SAMPLED_GRAINS: Final = 8
READ_BACK_BYTES: Final = 4 * 1024 * 1024


class ReadBack(Enum):
    """How much of the data is read back to be verified."""

    NONE = "none"
    SAMPLE = "sample"
    FULL = "full"

    @classmethod
    def by(cls, policy: Policy) -> Self | None:
        """Return what a policy says; None: it is left to the settings."""
        return None if policy.read_back is None else cls(policy.read_back)


assert set(READ_BACKS) < {one.value for one in ReadBack}


def is_read_whole(location: Tier2Location, copy: Tier2Copy) -> bool:
    """Tell whether a full read-back compares every byte of the data with what was written."""
    return bool(copy.side_len) or (location.is_single and bool(copy.data_sha256))


async def verify_copy(
    objects: ObjectReads,
    location: Tier2Location,
    copy: Tier2Copy,
    *,
    read_back: ReadBack = ReadBack.NONE,
) -> None:
    """Raise ``CorruptError`` unless all objects are there, whole, and as ``copy`` says.

    Without a side object nothing says what the data must be, and it is not read back; of a
    single object its context does, for all of it at once.
    """
    if location.is_single:
        await _verify_single(objects, location, copy, read_back)
        return
    raw = await _digested(
        objects, location.index_key, ObjectRole.INDEX, copy.index_sha256, copy.index_len
    )
    index = ObjectIndex.decode(raw)
    if index.data_len != copy.data_len or len(index.entries) != copy.block_count:
        _differs(location.index_key, f"names {index.data_len} bytes, not {copy.data_len}")
    if index.last_entry_id + 1 != copy.entry_count:
        _differs(location.index_key, f"ends with entry {index.last_entry_id}")
    side = await _verify_side(objects, location, copy, index) if copy.side_len else None
    await _verify_data(objects, location.data_key, index)
    if side is not None:
        await _verify_grains(objects, location, copy, side, read_back)


async def _verify_single(
    objects: ObjectReads, location: Tier2Location, copy: Tier2Copy, read_back: ReadBack
) -> None:
    info = await objects.head(location.data_key)
    if info is None:
        _differs(location.data_key, "is not there")
    found = _PART_COUNT.search(info.etag)
    await verify_single(
        objects,
        location,
        copy,
        part_count=int(found[1]) if found is not None else None,
        read_back=read_back is ReadBack.FULL,
    )


async def _digested(
    objects: ObjectReads, key: str, role: ObjectRole, sha256: bytes, length: int
) -> bytes:
    """Return a whole object that has the digest and the length which the context names."""
    found = await objects.get(key, bytes_max=length)
    if found is None:
        _differs(key, "is not there")
    info, raw = found
    keys.check_object_metadata(info.metadata, role, key=key)
    if len(raw) != length or hashlib.sha256(raw).digest() != sha256:
        _differs(key, "has another digest than the ledger's context")
    return raw


async def _verify_side(
    objects: ObjectReads, location: Tier2Location, copy: Tier2Copy, index: ObjectIndex
) -> SideObject:
    key = location.side_key
    raw = await _digested(objects, key, ObjectRole.SIDE, copy.side_sha256, copy.side_len)
    side = SideObject.decode(raw)
    check_side_header(side.header, location, index, copy)
    if copy.side_header_sha256:
        header_sha256 = hashlib.sha256(raw[: side.header.header_len]).digest()
        if header_sha256 != copy.side_header_sha256:
            _differs(key, "has a header of another digest than the ledger's context")
    _check_block_starts(key, side, index)
    return side


def _check_block_starts(key: str, side: SideObject, index: ObjectIndex) -> None:
    """Raise ``CorruptError`` unless the first entry of every block lies where the index says."""
    blocks, size = index.blocks(), side.header.grain_len
    firsts = np.array([one.first_entry_id for one in blocks])
    places = np.array([one.offset for one in blocks]) + index.data_header_len
    rows = np.searchsorted(side.columns.first_entry_ids, firsts, "right") - 1
    begin = rows * size + side.columns.entry_offsets[rows]
    before = firsts - side.columns.first_entry_ids[rows]
    wrong = (places // size != rows) | (begin + FRAME_HEADER_LEN * before > places)
    wrong |= (before == 0) & (begin != places)
    if bool(wrong.any()):
        block = blocks[int(np.argmax(wrong))]
        _differs(key, f"has entry {block.first_entry_id} elsewhere than the index")


async def _verify_grains(
    objects: ObjectReads,
    location: Tier2Location,
    copy: Tier2Copy,
    side: SideObject,
    read_back: ReadBack,
) -> None:
    """Read back what is to be read back, and compare."""
    count, size = side.header.grain_count, side.header.grain_len
    spans: Sequence[tuple[int, int]] = ()
    if read_back is ReadBack.FULL:
        step = max(1, READ_BACK_BYTES // size)
        spans = [(start, min(start + step, count)) for start in range(0, count, step)]
    elif read_back is ReadBack.SAMPLE:
        spans = [(number, number + 1) for number in sampled(count, copy.side_sha256)]
    whole = hashlib.sha256() if read_back is ReadBack.FULL and copy.data_sha256 else None
    for start, stop in spans:
        begin, end = start * size, min(stop * size, side.header.data_len)
        body = await objects.get_range(location.data_key, begin, end - begin)
        if body is None or len(body) != end - begin:
            _differs(location.data_key, f"has no bytes {begin} to {end}")
        check_grains(location.data_key, side, start, body)
        if whole is not None:
            whole.update(body)
    if whole is not None and whole.digest() != copy.data_sha256:
        _differs(location.data_key, "has another digest than the ledger's context")


def sampled(count: int, seed: bytes) -> list[int]:
    """Return which grains are read back: the first, the last, and some that ``seed`` picks."""
    picked = {0, count - 1}
    for number in range(SAMPLED_GRAINS - len(picked)):
        drawn = hashlib.sha256(seed + bytes([number])).digest()
        picked.add(int.from_bytes(drawn[:8], "big") % count)
    return sorted(picked)


def check_grains(
    key: str, side: SideObject, first: int, body: bytes | bytearray | memoryview
) -> None:
    """Raise ``CorruptError`` unless ``body`` is what was written from grain ``first`` on."""
    view, size = memoryview(body), side.header.grain_len
    for start in range(0, len(body), size):
        grain = first + start // size
        if crc32c(view[start : start + size]) != int(side.columns.crcs[grain]):
            _differs(key, f"differs from what was written in grain {grain}", grain * size)


async def _verify_data(objects: ObjectReads, key: str, index: ObjectIndex) -> None:
    info = await objects.head(key)
    if info is None:
        _differs(key, "is not there")
    keys.check_object_metadata(info.metadata, ObjectRole.DATA, key=key)
    if info.size != index.data_len:
        _differs(key, f"has {info.size} bytes and not {index.data_len}")
    parts = _PART_COUNT.search(info.etag)
    if parts is not None and int(parts[1]) != len(index.entries):
        _differs(key, f"has {parts[1]} parts and not {len(index.entries)}")
    blocks = index.blocks()
    for block in {blocks[0].offset: blocks[0], blocks[-1].offset: blocks[-1]}.values():
        await _verify_block_header(objects, key, index, block)


async def _verify_block_header(
    objects: ObjectReads, key: str, index: ObjectIndex, block: BlockRange
) -> None:
    raw = await objects.get_range(key, block.offset, BLOCK_HEADER_LEN)
    if raw is None or len(raw) != BLOCK_HEADER_LEN:
        _differs(key, f"has no block at byte {block.offset}")
    try:
        header = BlockHeader.decode(raw)
    except CorruptError as error:
        at = block.offset + int(error.details.get("offset", "0"))
        raise CorruptError(
            f"object {key}: {error.message}",
            remedy=error.remedy,
            details={"object": key, "offset": str(at)},
        ) from error
    expected = (block.length, block.first_entry_id, index.data_header_len)
    if (header.block_len, header.first_entry_id, header.header_len) != expected:
        _differs(key, f"has another block than its index says at byte {block.offset}")


def _differs(key: str, what: str, offset: int = 0) -> NoReturn:
    raise CorruptError(
        f"object {key} {what}",
        remedy=REMEDY,
        details={"object": key, "offset": str(offset)},
    )
