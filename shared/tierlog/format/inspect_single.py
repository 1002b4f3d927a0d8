"""What lies in an object of the single-object layout, whatever state it is in.

Part of ``tierlog.format.inspect``, with its invariants; the layout is ``tierlog.format.single``'s.
"""

from collections.abc import Generator
from struct import Struct
from typing import Final

from tierlog.format.checksum import Buffer
from tierlog.format.inspect_report import (
    CHUNK_LEN,
    BlockReport,
    Field,
    Inspection,
    ObjectKind,
    Range,
    Report,
)
from tierlog.format.ledger_metadata import decode_bare
from tierlog.format.single import (
    BLOCK_HEADER_LEN,
    BLOCK_LEN_OFFSET,
    COUNT_OFFSET,
    ENTRY_COUNT_OFFSET,
    ENTRY_LEN_LEN,
    FIRST_ENTRY_ID_OFFSET,
    INDEX_HEADER_LEN,
    INDEX_LEN_OFFSET,
    INDEX_MAGIC,
    MAGIC_OFFSET,
    METADATA_LEN_OFFSET,
    PADDING,
    SingleBlockHeader,
    SingleIndex,
    bad_padding_at,
    used_len_at,
    walk_entries,
)
from tierlog.model.errors import CorruptError, RefusedError

_INDEX_FIELDS: Final = Struct(">Iiii")
_BLOCK_FIELDS: Final = Struct(">Iiiq")
_MAPPING_LEN: Final = 20


def is_single(head: Buffer) -> bool:
    """Tell by its first bytes whether an object is one of this layout."""
    return int.from_bytes(head[:4], "big") == INDEX_MAGIC


def inspect_single(size: int) -> Inspection:
    """Describe the index, then every block that it names."""
    report = Report(kind=ObjectKind.SINGLE, size=size)
    index = yield from _inspect_index(report)
    if index is None:
        return report
    yield from _inspect_padding(report, index.used_len, min(index.index_len, size))
    for number, block in enumerate(index.blocks()):
        report.mappings.append(index.entries[number])
        yield from _inspect_block(
            report, number, block.offset, block.length, (block.first_entry_id, block.last_entry_id)
        )
    return report


def _inspect_index(report: Report) -> Generator[Range, Buffer, SingleIndex | None]:
    head = yield Range(0, min(report.size, INDEX_HEADER_LEN))
    if len(head) < INDEX_HEADER_LEN:
        report.note(len(head), "object is cut in its index's header")
        return None
    magic, index_len, count, metadata_len = _INDEX_FIELDS.unpack_from(head)
    report.fields += (
        Field(MAGIC_OFFSET, 4, "index_magic_word", f"{magic:08x}"),
        Field(INDEX_LEN_OFFSET, 4, "index_len", str(index_len)),
        Field(COUNT_OFFSET, 4, "index_entry_count", str(count)),
        Field(METADATA_LEN_OFFSET, 4, "segment_metadata_len", str(metadata_len)),
    )
    try:
        used_len = used_len_at(head)
        if used_len > report.size:
            report.note(report.size, f"object is cut: its index goes to byte {used_len}")
            return None
        raw = bytes((yield Range(0, used_len)))
        metadata_end = INDEX_HEADER_LEN + metadata_len
        report.metadata = decode_bare(raw[INDEX_HEADER_LEN:metadata_end])
        index = SingleIndex.decode(raw, report.size)
    except (CorruptError, RefusedError) as error:
        report.note(int(error.details.get("offset", "0")), error.message)
        return None
    ledger = index.metadata
    report.fields.append(
        Field(
            INDEX_HEADER_LEN,
            metadata_len,
            "segment_metadata",
            f"{ledger.last_entry_id + 1} entries of {ledger.length} bytes, {ledger.state.name}",
        )
    )
    for number, one in enumerate(index.entries):
        at = metadata_end + _MAPPING_LEN * number
        report.fields += (
            Field(at, 8, f"mapping[{number}].first_entry_id", str(one.first_entry_id)),
            Field(at + 8, 4, f"mapping[{number}].block", str(one.part_number)),
            Field(at + 12, 8, f"mapping[{number}].offset", str(one.offset)),
        )
    return index


def _inspect_block(
    report: Report, number: int, at: int, length: int, promised: tuple[int, int]
) -> Generator[Range, Buffer, None]:
    """Describe a block; ``promised``: its first and last entry, as the index has them."""
    head = yield Range(at, BLOCK_HEADER_LEN)
    magic, block_len, entry_count, first = _BLOCK_FIELDS.unpack_from(head)
    name = f"block[{number}]"
    report.fields += (
        Field(at + MAGIC_OFFSET, 4, f"{name}.magic_word", f"{magic:08x}"),
        Field(at + BLOCK_LEN_OFFSET, 4, f"{name}.block_len", str(block_len)),
        Field(at + ENTRY_COUNT_OFFSET, 4, f"{name}.block_entry_count", str(entry_count)),
        Field(at + FIRST_ENTRY_ID_OFFSET, 8, f"{name}.first_entry_id", str(first)),
    )
    try:
        header = SingleBlockHeader.decode(head)
    except CorruptError as error:
        report.note(at + int(error.details["offset"]), error.message)
        return
    found = (header.block_len, header.first_entry_id, header.last_entry_id)
    if found != (length, *promised):
        report.note(
            at,
            f"block of {found[0]} bytes with entries {found[1]} to {found[2]}, where the index "
            f"has {length} bytes with {promised[0]} to {promised[1]}",
        )
    block = BlockReport(
        offset=at,
        header_len=BLOCK_HEADER_LEN,
        block_len=header.block_len,
        first_entry_id=header.first_entry_id,
    )
    report.blocks.append(block)
    end = yield from _scan_entries(report, block, header.entry_count, at + length)
    if end is not None:
        block.padding_len = at + length - end
        yield from _inspect_padding(report, end, at + length)


def _scan_entries(
    report: Report, block: BlockReport, count: int, end: int
) -> Generator[Range, Buffer, int | None]:
    """Count a block's entries, a chunk at a time; return where they end, None: in damage."""
    at = block.offset + BLOCK_HEADER_LEN
    while block.entry_count < count:
        if end - at < ENTRY_LEN_LEN:
            report.note(at, f"entry {block.last_entry_id + 1} is missing at its block's end")
            return None
        chunk = memoryview((yield Range(at, min(CHUNK_LEN, end - at))))
        starts, used = walk_entries(chunk, count - block.entry_count)
        if not starts:
            entry_len = int.from_bytes(chunk[:ENTRY_LEN_LEN], "big", signed=True)
            if entry_len < 0:
                report.note(at, f"entry {block.last_entry_id + 1} is missing: padding is there")
                return None
            if entry_len > end - at - ENTRY_LEN_LEN:
                report.note(at, f"entry of {entry_len} bytes crosses the end of its block")
                return None
            # Longer than a chunk: its payload is not read.
            starts, used = [0], ENTRY_LEN_LEN + entry_len
        block.entry_count += len(starts)
        block.payload_len += used - ENTRY_LEN_LEN * len(starts)
        at += used
    return at


def _inspect_padding(report: Report, start: int, end: int) -> Generator[Range, Buffer, None]:
    at = start
    # Chunks are whole pads long, so that the pattern begins anew in each.
    chunk_len = CHUNK_LEN - CHUNK_LEN % len(PADDING)
    while at < end:
        chunk = yield Range(at, min(chunk_len, end - at))
        bad = bad_padding_at(chunk)
        if bad is not None:
            report.note(at + bad, "bytes are not padding where padding belongs")
            return
        at += len(chunk)
