"""What lies in an object of tier 2, byte for byte, whatever state it is in.

Owns the description that ``tierlog object inspect`` prints: fields with offsets, names and
values, a table of blocks, and every problem found. Of a side object's rows it shows all where one
page holds them, and else what each column of a page spans. Does not own fetching: the inspection
is a generator that asks for ranges and is sent their bytes; ``inspect_object`` and
``inspect_object_async`` feed it from a function.

Invariants:
    * Damage is a ``Problem``, never an error. Only an object of which nothing shows that it is
      ours is refused (``RefusedError``).
    * At most ``CHUNK_LEN`` bytes of a data object are held at once, whatever its size; payloads
      of entries longer than that are not even read.
    * A problem's offset is a byte of the object.
"""

from collections.abc import Awaitable, Callable, Generator
from struct import Struct
from typing import Any, Final

import numpy as np

from tierlog.format.block import (
    BLOCK_HEADER_LEN,
    BLOCK_LEN_OFFSET,
    BLOCK_MAGIC,
    FIRST_ENTRY_ID_OFFSET,
    HEADER_LEN_OFFSET,
    MAGIC_OFFSET,
    PADDING,
    ZEROS_OFFSET,
    BlockHeader,
    bad_padding_at,
)
from tierlog.format.checksum import Buffer
from tierlog.format.frame import FRAME_HEADER_LEN, entry_len_at, frames_end, walk_frames
from tierlog.format.grains import GrainColumns
from tierlog.format.index import (
    BLOCK_COUNT_MAX,
    COUNT_OFFSET,
    DATA_HEADER_LEN_OFFSET,
    DATA_LEN_OFFSET,
    INDEX_HEADER_LEN,
    INDEX_LEN_MAX,
    INDEX_LEN_OFFSET,
    INDEX_MAGIC,
    MAPPING_LEN,
    METADATA_LEN_OFFSET,
    IndexEntry,
    ObjectIndex,
)
from tierlog.format.inspect_manifest import manifest_fields
from tierlog.format.inspect_report import (
    CHUNK_LEN,
    PROBLEMS_MAX,
    UNKNOWN_ID,
    BlockReport,
    Field,
    Inspection,
    ObjectKind,
    Problem,
    Range,
    Report,
)
from tierlog.format.inspect_single import inspect_single, is_single
from tierlog.format.ledger_metadata import decode_bare
from tierlog.format.manifest import MAGIC as MANIFEST_MAGIC
from tierlog.format.manifest import MANIFEST_LEN_MAX
from tierlog.format.side import (
    DATA_LEN_OFFSET as SIDE_DATA_LEN_OFFSET,
)
from tierlog.format.side import (
    ENTRY_COUNT_OFFSET,
    GRAIN_COUNT_OFFSET,
    GRAIN_LEN_OFFSET,
    LEDGER_ID_OFFSET,
    PAGE_COUNT_OFFSET,
    PAGE_HEADER_LEN,
    ROWS_A_PAGE,
    SIDE_FIXED_LEN,
    SIDE_HEADER_LEN_MAX,
    SIDE_LEN_OFFSET,
    SIDE_MAGIC,
    UUID_OFFSET,
    SideHeader,
)
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.model.ids import EntryId

__all__ = [
    "CHUNK_LEN",
    "PROBLEMS_MAX",
    "UNKNOWN_ID",
    "BlockReport",
    "Field",
    "Inspection",
    "ObjectKind",
    "Problem",
    "Range",
    "Report",
    "compare",
    "inspect_object",
    "inspect_object_async",
    "inspection_of",
]

_BLOCK_FIELDS: Final = Struct(">Iqqq")
_INDEX_FIELDS: Final = Struct(">Iiqqii")
_MAPPING: Final = Struct(">qiq")
assert BLOCK_HEADER_LEN < CHUNK_LEN
assert _INDEX_FIELDS.size == INDEX_HEADER_LEN


def inspect_object(read: Callable[[int, int], Buffer], size: int) -> Report:
    """Describe the object of ``size`` bytes whose ranges ``read(offset, length)`` returns."""
    inspection = inspection_of(size)
    wanted = next(inspection)
    while True:
        try:
            wanted = inspection.send(_whole(read(wanted.offset, wanted.length), wanted))
        except StopIteration as done:
            return _report_of(done)


async def inspect_object_async(read: Callable[[int, int], Awaitable[Buffer]], size: int) -> Report:
    """``inspect_object`` for ranges that must be waited for."""
    inspection = inspection_of(size)
    wanted = next(inspection)
    while True:
        data = _whole(await read(wanted.offset, wanted.length), wanted)
        try:
            wanted = inspection.send(data)
        except StopIteration as done:
            return _report_of(done)


def _whole(data: Buffer, wanted: Range) -> Buffer:
    if len(data) != wanted.length:
        raise RetryableError(
            f"read {len(data)} bytes at {wanted.offset} where the object has {wanted.length}",
            remedy="Inspect it again: it changed meanwhile",
        )
    return data


def _report_of(done: StopIteration) -> Report:
    report = done.value
    assert isinstance(report, Report)
    return report


def inspection_of(size: int) -> Inspection:
    """Describe an object; yields the ranges it needs and returns the report."""
    head = yield Range(0, min(size, INDEX_HEADER_LEN))
    magic = int.from_bytes(head[:4], "big") if len(head) >= 4 else -1
    if magic == INDEX_MAGIC:
        return (yield from _inspect_index(size))
    if is_single(head):
        return (yield from inspect_single(size))
    if bytes(head[:4]) == SIDE_MAGIC:
        return (yield from _inspect_side(size))
    if bytes(head[:4]) == MANIFEST_MAGIC:
        return (yield from _inspect_manifest(size))
    # A data object whose first bytes are damaged still has its header length at 4.
    if magic == BLOCK_MAGIC or bytes(head[4:12]) == BLOCK_HEADER_LEN.to_bytes(8, "big"):
        return (yield from _inspect_data(size))
    raise RefusedError(
        f"object of {size} bytes is neither a data, nor an index, nor a side, nor a single "
        f"object, nor a manifest: it begins with {bytes(head[:4]).hex() or 'nothing'}",
        remedy=f"Data objects begin with {BLOCK_MAGIC:08x}, index objects with {INDEX_MAGIC:08x}, "
        f"side objects with {SIDE_MAGIC.hex()}, manifests with {MANIFEST_MAGIC.hex()}",
    )


# --- data objects ---------------------------------------------------------------------------------


def _inspect_data(size: int) -> Inspection:
    report = Report(kind=ObjectKind.DATA, size=size)
    at, next_entry_id = 0, 0
    while at < size:
        if len(report.blocks) == BLOCK_COUNT_MAX:
            report.note(at, f"more than {BLOCK_COUNT_MAX} blocks")
            break
        problems = len(report.problems)
        block = yield from _inspect_block(report, at, next_entry_id)
        if block is None:
            at = _after_damage(report, at)
            next_entry_id = UNKNOWN_ID
            continue
        report.blocks.append(block)
        damaged = len(report.problems) > problems
        next_entry_id = UNKNOWN_ID if damaged else block.last_entry_id + 1
        at += block.block_len
    _check_lengths(report)
    return report


def _inspect_block(
    report: Report, at: int, next_entry_id: int
) -> Generator[Range, Buffer, BlockReport | None]:
    """Describe the block at ``at``; None when its header can't be believed."""
    head = yield Range(at, min(BLOCK_HEADER_LEN, report.size - at))
    number = len(report.blocks)
    if len(head) >= _BLOCK_FIELDS.size:
        magic, header_len, block_len, first = _BLOCK_FIELDS.unpack_from(head)
        name = f"block[{number}]"
        report.fields += (
            Field(at + MAGIC_OFFSET, 4, f"{name}.magic_word", f"{magic:08x}"),
            Field(at + HEADER_LEN_OFFSET, 8, f"{name}.header_len", str(header_len)),
            Field(at + BLOCK_LEN_OFFSET, 8, f"{name}.block_len", str(block_len)),
            Field(at + FIRST_ENTRY_ID_OFFSET, 8, f"{name}.first_entry_id", str(first)),
        )
    try:
        header = BlockHeader.decode(head)
    except CorruptError as error:
        report.note(at + int(error.details["offset"]), error.message)
        return None
    if any(head[ZEROS_OFFSET:]):
        report.note(at + ZEROS_OFFSET, "block header is not zero behind its fields")
    if next_entry_id not in (UNKNOWN_ID, header.first_entry_id):
        report.note(
            at + FIRST_ENTRY_ID_OFFSET,
            f"block begins with entry {header.first_entry_id} where {next_entry_id} belongs",
        )
    block = BlockReport(
        offset=at,
        header_len=header.header_len,
        block_len=header.block_len,
        first_entry_id=header.first_entry_id,
    )
    if at + block.block_len > report.size:
        report.note(
            report.size, f"object is cut: block {number} goes to byte {at + block.block_len}"
        )
    yield from _scan_frames(report, block)
    return block


def _scan_frames(report: Report, block: BlockReport) -> Generator[Range, Buffer, None]:
    """Count the block's entries without holding more than a chunk of it."""
    at, end = block.offset + block.header_len, block.offset + block.block_len
    stop = min(end, report.size)
    while at < stop:
        chunk = memoryview((yield Range(at, min(CHUNK_LEN, stop - at))))
        entry_id = block.first_entry_id + block.entry_count
        chunk_at = at
        try:
            offsets = walk_frames(chunk, entry_id)
        except CorruptError as error:
            bad = int(error.details["offset"])
            report.note(at + bad, error.message.partition(", at byte")[0])
            offsets = walk_frames(chunk[:bad], entry_id)
            chunk, stop = chunk[:bad], at + bad
        used = frames_end(chunk, offsets)
        block.entry_count += len(offsets)
        block.payload_len += used - FRAME_HEADER_LEN * len(offsets)
        at += used
        if at >= stop:
            break
        rest = chunk[used:]
        if len(rest) >= FRAME_HEADER_LEN:
            entry_len = entry_len_at(rest, 0)
            if entry_len < 0:
                break
            at = _skip_entry(report, block, at, entry_len, end)
            if at < 0:
                return
        elif chunk_at + len(chunk) >= stop:
            break
    yield from _scan_padding(report, block, at, stop, end)


def _skip_entry(report: Report, block: BlockReport, at: int, entry_len: int, end: int) -> int:
    """Count an entry longer than a chunk without reading it; -1 when the block can't hold it."""
    follower = at + FRAME_HEADER_LEN + entry_len
    if follower > end:
        report.note(at, f"entry of {entry_len} bytes crosses the end of its block")
        return -1
    if follower > report.size:
        return -1  # the object is cut, which was noted
    block.entry_count += 1
    block.payload_len += entry_len
    return follower


def _scan_padding(
    report: Report, block: BlockReport, start: int, stop: int, end: int
) -> Generator[Range, Buffer, None]:
    if block.entry_count == 0:
        report.note(start, "block without entries")
    if stop < end:
        return  # the frames end in damage or in a cut, which was noted: padding is elsewhere
    block.padding_len = stop - start
    at = start
    # Chunks are whole pads long, so that the pattern begins anew in each.
    chunk_len = CHUNK_LEN - CHUNK_LEN % len(PADDING)
    while at < stop:
        chunk = yield Range(at, min(chunk_len, stop - at))
        bad = bad_padding_at(chunk)
        if bad is not None:
            report.note(at + bad, "bytes behind the last entry are not padding")
            return
        at += len(chunk)


def _after_damage(report: Report, at: int) -> int:
    """Return where to go on: blocks have one length, so that of the first one helps."""
    return at + report.blocks[0].block_len if report.blocks else report.size


def _check_lengths(report: Report) -> None:
    if not report.blocks:
        return
    size = report.blocks[0].block_len
    for number, block in enumerate(report.blocks[:-1]):
        if block.block_len != size:
            report.note(
                block.offset + BLOCK_LEN_OFFSET,
                f"block {number} has {block.block_len} bytes, the first one {size}",
            )
    last = report.blocks[-1]
    if last.block_len > size:
        report.note(last.offset + BLOCK_LEN_OFFSET, "last block is longer than those before it")


def compare(index: Report, data: Report) -> list[Problem]:
    """Return where an index object and its data object contradict each other."""
    assert (index.kind, data.kind) == (ObjectKind.INDEX, ObjectKind.DATA)
    found = [(one.first_entry_id, one.offset) for one in data.blocks]
    named = [(one.first_entry_id, one.offset) for one in index.mappings]
    problems = [
        Problem(block[1], f"block {number} begins with entry {block[0]}, the index says {mapping}")
        for number, (block, mapping) in enumerate(zip(found, named, strict=False))
        if block != mapping
    ]
    if len(found) != len(named):
        problems.append(Problem(data.size, f"{len(found)} blocks, the index names {len(named)}"))
    ledger = index.metadata
    if ledger is not None:
        payload_len = sum(block.payload_len for block in data.blocks)
        if (data.entry_count, payload_len) != (ledger.last_entry_id + 1, ledger.length):
            counted = f"{data.entry_count} entries of {payload_len} bytes"
            promised = f"{ledger.last_entry_id + 1} of {ledger.length}"
            problems.append(Problem(data.size, f"{counted}, the index promises {promised}"))
    return problems


# --- index objects --------------------------------------------------------------------------------


def _inspect_index(size: int) -> Inspection:
    report = Report(kind=ObjectKind.INDEX, size=size)
    if size > INDEX_LEN_MAX:
        report.note(INDEX_LEN_MAX, f"index object of {size} bytes is over its limit")
    raw = bytes((yield Range(0, min(size, INDEX_LEN_MAX))))
    if len(raw) < INDEX_HEADER_LEN:
        report.note(len(raw), "index object is cut in its header")
        return report
    magic, index_len, data_len, header_len, count, metadata_len = _INDEX_FIELDS.unpack_from(raw)
    report.fields += (
        Field(0, 4, "index_magic_word", f"{magic:08x}"),
        Field(INDEX_LEN_OFFSET, 4, "index_len", str(index_len)),
        Field(DATA_LEN_OFFSET, 8, "data_object_length", str(data_len)),
        Field(DATA_HEADER_LEN_OFFSET, 8, "data_header_length", str(header_len)),
        Field(COUNT_OFFSET, 4, "index_entry_count", str(count)),
        Field(METADATA_LEN_OFFSET, 4, "segment_metadata_len", str(metadata_len)),
    )
    if index_len > size:
        report.note(size, f"object is cut: the index goes to byte {index_len}")
    _inspect_metadata(report, raw, metadata_len)
    _inspect_mappings(report, raw, metadata_len, count)
    try:
        ObjectIndex.decode(raw)
    except CorruptError as error:
        report.note(int(error.details.get("offset", INDEX_HEADER_LEN)), error.message)
    return report


def _inspect_metadata(report: Report, raw: bytes, metadata_len: int) -> None:
    end = INDEX_HEADER_LEN + metadata_len
    if not INDEX_HEADER_LEN <= end <= len(raw):
        report.note(METADATA_LEN_OFFSET, f"metadata of {metadata_len} bytes does not fit")
        return
    try:
        report.metadata = decode_bare(raw[INDEX_HEADER_LEN:end])
    except CorruptError as error:
        report.note(INDEX_HEADER_LEN, error.message)
        return
    ledger, at = report.metadata, INDEX_HEADER_LEN
    shown = {
        "state": ledger.state.name,
        "length": ledger.length,
        "last_entry_id": ledger.last_entry_id,
        "ensemble/write/ack": f"{ledger.ensemble_size}/{ledger.write_quorum}/{ledger.ack_quorum}",
        "digest_type": ledger.digest_type.name if ledger.digest_type is not None else "none",
        "ctime_ms": ledger.ctime_ms,
    }
    shown |= {
        f"segment[{one.first_entry_id}]": " ".join(one.ensemble)[:200] for one in ledger.segments
    }
    shown |= {
        f"custom[{key[:80]}]": value[:200].decode(errors="replace")
        for key, value in sorted(ledger.custom.items())
    }
    # The fields of a protobuf have no place of their own: all stand where the message does.
    report.fields += (
        Field(at, metadata_len, f"segment_metadata.{name}", str(value))
        for name, value in shown.items()
    )


def _inspect_mappings(report: Report, raw: bytes, metadata_len: int, count: int) -> None:
    at = INDEX_HEADER_LEN + metadata_len
    if metadata_len < 0 or count < 0:
        return
    for number in range(count):
        if at + MAPPING_LEN > len(raw):
            report.note(len(raw), f"mapping {number} of {count} is cut")
            return
        first, part, offset = _MAPPING.unpack_from(raw, at)
        report.fields += (
            Field(at, 8, f"mapping[{number}].first_entry_id", str(first)),
            Field(at + 8, 4, f"mapping[{number}].part_number", str(part)),
            Field(at + 12, 8, f"mapping[{number}].offset", str(offset)),
        )
        report.mappings.append(
            IndexEntry(first_entry_id=EntryId(first), part_number=part, offset=offset)
        )
        at += MAPPING_LEN


# --- side objects ---------------------------------------------------------------------------------


def _inspect_side(size: int) -> Inspection:
    report = Report(kind=ObjectKind.SIDE, size=size)
    raw = bytes((yield Range(0, min(size, SIDE_HEADER_LEN_MAX))))
    try:
        header = SideHeader.decode(raw)
    except (CorruptError, RefusedError) as error:
        report.note(int(error.details.get("offset", "0")), error.message)
        return report
    _note_side_header(report, header)
    if header.side_len != size:
        report.note(min(size, header.side_len), f"object of {header.side_len} bytes has {size}")
    for number in range(header.page_count):
        start, end = header.page_place(number)
        if end > size:
            report.note(size, f"object is cut in page {number} of {header.page_count}")
            break
        page = yield Range(start, end - start)
        try:
            rows = header.decode_page(page, number)
        except CorruptError as error:
            report.note(int(error.details["offset"]), error.message)
            continue
        _note_side_page(report, number, start, rows)
        if header.page_count == 1:
            _note_side_rows(report, start, rows)
    return report


def _note_side_header(report: Report, header: SideHeader) -> None:
    pages, at = header.page_count, SIDE_FIXED_LEN
    report.fields += (
        Field(0, 4, "magic", SIDE_MAGIC.decode()),
        Field(SIDE_LEN_OFFSET, 8, "side_len", str(header.side_len)),
        Field(SIDE_DATA_LEN_OFFSET, 8, "data_len", str(header.data_len)),
        Field(ENTRY_COUNT_OFFSET, 8, "entry_count", str(header.entry_count)),
        Field(LEDGER_ID_OFFSET, 8, "ledger_id", str(header.ledger_id)),
        Field(UUID_OFFSET, 16, "uuid", str(header.uuid)),
        Field(GRAIN_LEN_OFFSET, 4, "grain_len", str(header.grain_len)),
        Field(GRAIN_COUNT_OFFSET, 4, "grain_count", str(header.grain_count)),
        Field(PAGE_COUNT_OFFSET, 4, "page_count", str(pages)),
        Field(at, 8 * pages, "directory.first_entry_id", _span(header.first_entry_ids)),
        Field(at + 8 * pages, 8 * pages, "directory.publish_ms_max", _span(header.publish_ms_max)),
    )


def _note_side_page(report: Report, number: int, start: int, rows: GrainColumns) -> None:
    name, at = f"page[{number}]", start + PAGE_HEADER_LEN
    grain, count = ROWS_A_PAGE * number, len(rows.crcs)
    report.fields.append(
        Field(start, PAGE_HEADER_LEN, name, f"grains {grain} to {grain + count - 1}")
    )
    for column, values in rows.by_name().items():
        length = values.itemsize * count
        report.fields.append(Field(at, length, f"{name}.{column}", _span(values)))
        at += length


def _note_side_rows(report: Report, start: int, rows: GrainColumns) -> None:
    count, at = len(rows.crcs), start + PAGE_HEADER_LEN
    for column, values in rows.by_name().items():
        width, shown = values.itemsize, "08x" if column == "crcs" else "d"
        report.fields += (
            Field(at + width * number, width, f"grain[{number}].{column}", f"{value:{shown}}")
            for number, value in enumerate(values.tolist())
        )
        at += width * count


def _span(values: "np.ndarray[Any, Any]") -> str:
    return f"{values[0]} to {values[-1]}"


def _inspect_manifest(size: int) -> Inspection:
    report = Report(kind=ObjectKind.MANIFEST, size=size)
    raw = bytes((yield Range(0, min(size, MANIFEST_LEN_MAX))))
    try:
        report.fields += (Field(*one) for one in manifest_fields(raw))
    except (CorruptError, RefusedError) as error:
        report.note(int(error.details.get("offset", "0")), error.message)
    return report
