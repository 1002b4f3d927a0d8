"""Whether a single object is what an attempt wrote (protocols.md section 3, step 6).

Looks at its size, the number of parts, the index with its digest, and the headers of the first and
the last block; read back in full, at every block and at the digest over all of them, which the
context has of every single object, since the layout has no other checksum.

Invariant: returning means that the object has the blocks that its index names, and, read back in
full, the bytes that were sent. Anything else raises.
"""

import hashlib
from typing import Final, NoReturn

from tierlog.format.index import BlockRange
from tierlog.format.single import (
    BLOCK_HEADER_LEN,
    SingleBlockHeader,
    SingleIndex,
    bad_padding_at,
    walk_entries,
)
from tierlog.model.errors import CorruptError
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload.single_reader import load_single_index
from tierlog.ports.objects import ObjectReads

READ_BACK_BYTES = 4 * 1024 * 1024
REMEDY: Final = (
    "Keep the local copy. An attempt is begun anew; a complete copy is mended with: tierlog scrub "
    "--repair --deep"
)


async def verify_single(
    objects: ObjectReads,
    location: Tier2Location,
    copy: Tier2Copy,
    *,
    part_count: int | None,
    read_back: bool,
) -> None:
    """Raise ``CorruptError`` unless the object is whole, and as ``copy`` says.

    ``part_count``: of how many parts the store says that it was made, where it says so.
    """
    key = location.data_key
    index = await load_single_index(objects, location, copy=copy)
    if index.index_len != copy.index_len or len(index.entries) != copy.block_count:
        _differs(key, f"has {len(index.entries)} blocks behind {index.index_len} bytes of index")
    if index.last_entry_id + 1 != copy.entry_count:
        _differs(key, f"ends with entry {index.last_entry_id}")
    if part_count is not None and part_count != len(index.entries) + 1:
        _differs(key, f"has {part_count} parts and not {len(index.entries) + 1}")
    if read_back:
        await _verify_all(objects, key, index, copy)
        return
    blocks = index.blocks()
    for block in {blocks[0].offset: blocks[0], blocks[-1].offset: blocks[-1]}.values():
        raw = await _bytes(objects, key, block.offset, block.offset + BLOCK_HEADER_LEN)
        _check_header(key, block, raw)


async def _verify_all(objects: ObjectReads, key: str, index: SingleIndex, copy: Tier2Copy) -> None:
    at = index.used_len
    while at < index.index_len:
        stop = min(index.index_len, at + READ_BACK_BYTES)
        bad = bad_padding_at(await _bytes(objects, key, at, stop))
        if bad is not None:
            _differs(key, "has no padding behind its index", at + bad)
        # Pieces are whole pads long, so that the pattern begins anew in each.
        at = stop
    whole = hashlib.sha256()
    for block in index.blocks():
        at, end, rest, left = block.offset, block.offset + block.length, b"", 0
        while at < end:
            stop = min(end, at + READ_BACK_BYTES)
            piece = await _bytes(objects, key, at, stop)
            whole.update(piece)
            if at == block.offset:
                left = _check_header(key, block, piece).entry_count
                rest, piece = b"", piece[BLOCK_HEADER_LEN:]
            at = stop
            rest += piece
            starts, used = walk_entries(rest, left)
            left, rest = left - len(starts), rest[used:]
        if left:
            _differs(key, f"lacks {left} entries of its block", block.offset)
        if bad_padding_at(rest) is not None:
            _differs(key, "has no padding behind the last entry of a block", end - len(rest))
    if copy.data_sha256 and whole.digest() != copy.data_sha256:
        _differs(key, "has other blocks than were written", index.index_len)


def _check_header(key: str, block: BlockRange, raw: bytes) -> SingleBlockHeader:
    try:
        header = SingleBlockHeader.decode(raw)
    except CorruptError as error:
        at = block.offset + int(error.details.get("offset", "0"))
        _differs(key, f"has no block: {error.message}", at)
    found = (header.block_len, header.first_entry_id, header.last_entry_id)
    if found != (block.length, block.first_entry_id, block.last_entry_id):
        _differs(key, "has another block than its index says", block.offset)
    return header


async def _bytes(objects: ObjectReads, key: str, start: int, end: int) -> bytes:
    raw = await objects.get_range(key, start, end - start)
    if raw is None or len(raw) != end - start:
        _differs(key, f"has no bytes {start} to {end}", start)
    return raw


def _differs(key: str, what: str, offset: int = 0) -> NoReturn:
    raise CorruptError(
        f"object {key} {what}",
        remedy=REMEDY,
        details={"object": key, "offset": str(offset)},
    )
