"""Whether a copy in tier 2 is what an attempt wrote (protocols.md section 3, step 6).

Looks at sizes, the number of parts, the index and its digest, and the headers of the first and
the last block; each part's checksum was verified by the store when it took the part.

Invariant: returning means that the data object has the length and the blocks that the index
names, and the index the digest that the context names. Anything else raises.
"""

import hashlib
import re
from typing import Final, NoReturn

from tierlog.format import keys
from tierlog.format.block import BLOCK_HEADER_LEN, BlockHeader
from tierlog.format.index import BlockRange, ObjectIndex
from tierlog.format.keys import ObjectRole
from tierlog.model.errors import CorruptError
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.ports.objects import ObjectStore

# What S3 puts behind the digest in the ETag of an object made of parts.
_PART_COUNT: Final = re.compile(r"-(\d+)\"?$", re.ASCII)


async def verify_copy(objects: ObjectStore, location: Tier2Location, copy: Tier2Copy) -> None:
    """Raise ``CorruptError`` unless both objects are there, whole, and as ``copy`` says."""
    found = await objects.get(location.index_key)
    if found is None:
        _differs(location.index_key, "is not there")
    info, raw = found
    keys.check_object_metadata(info.metadata, ObjectRole.INDEX, key=location.index_key)
    if hashlib.sha256(raw).digest() != copy.index_sha256:
        _differs(location.index_key, "has another digest than the ledger's context")
    index = ObjectIndex.decode(raw)
    if index.data_len != copy.data_len or len(index.entries) != copy.block_count:
        _differs(location.index_key, f"names {index.data_len} bytes, not {copy.data_len}")
    if index.last_entry_id + 1 != copy.entry_count:
        _differs(location.index_key, f"ends with entry {index.last_entry_id}")
    await _verify_data(objects, location.data_key, index)


async def _verify_data(objects: ObjectStore, key: str, index: ObjectIndex) -> None:
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
    objects: ObjectStore, key: str, index: ObjectIndex, block: BlockRange
) -> None:
    raw = await objects.get_range(key, block.offset, BLOCK_HEADER_LEN)
    if raw is None or len(raw) != BLOCK_HEADER_LEN:
        _differs(key, f"has no block at byte {block.offset}")
    header = BlockHeader.decode(raw)
    expected = (block.length, block.first_entry_id, index.data_header_len)
    if (header.block_len, header.first_entry_id, header.header_len) != expected:
        _differs(key, f"has another block than its index says at byte {block.offset}")


def _differs(key: str, what: str) -> NoReturn:
    raise CorruptError(
        f"object {key} {what}",
        remedy="Keep the local copy; the ledger is offloaded again",
        details={"object": key},
    )
