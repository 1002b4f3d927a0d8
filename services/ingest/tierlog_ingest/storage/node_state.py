"""What a node keeps beside journal and ledgers: the mark, fences, freed ids. One file.

    offset  size  field
         0     4  magic            "TLND"
         4     4  version          1
         8     8  mark_segment     the journal is replayed from this segment on
        16     8  limbo_ceiling    ledgers up to this id may lack entries; -1: none
        24     4  fence_count
        28     4  freed_count
        32     …  fences           fence_count x ledger_id 8, ascending
         …     …  freed            freed_count x (first 8, last 8), ascending, apart
         …     4  crc32c           over all before

Integers are big-endian and signed, the checksum and counts unsigned.

Owns: the set of freed ids, and the file, which is replaced atomically. Does not own when it is
written: ``node`` does, at each checkpoint.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import Final

from tierlog.format.checksum import crc32c
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError
from tierlog.ports.files import Files

STATE_PATH: Final = "state"
_TEMPORARY_PATH: Final = "state.new"
_MAGIC: Final = b"TLND"
_HEADER: Final = Struct(">4sIqqII")
_ID: Final = Struct(">q")
_INTERVAL: Final = Struct(">qq")
_CRC: Final = Struct(">I")
assert _HEADER.size == 32

NO_LIMBO: Final = -1


class IntervalSet:
    """Integers, kept as intervals that neither overlap nor touch."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._intervals = list(intervals)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._intervals, (number, 2**63)) - 1
        return at >= 0 and number <= self._intervals[at][1]

    def __repr__(self) -> str:
        return f"<IntervalSet of {len(self._intervals)} intervals>"

    def add(self, number: int) -> None:
        """Put a number in."""
        if number in self:
            return
        at = bisect_right(self._intervals, (number, number))
        first = last = number
        if at < len(self._intervals) and self._intervals[at][0] == number + 1:
            last = self._intervals.pop(at)[1]
        if at and self._intervals[at - 1][1] == number - 1:
            at -= 1
            first = self._intervals.pop(at)[0]
        self._intervals.insert(at, (first, last))

    def intervals(self) -> tuple[tuple[int, int], ...]:
        """Return all of it."""
        return tuple(self._intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The file as a value."""

    mark_segment: int
    limbo_ceiling: int
    fences: tuple[int, ...]
    freed: tuple[tuple[int, int], ...]


def encode_state(state: NodeState) -> bytes:
    """Return the file's bytes."""
    pieces = [
        _HEADER.pack(
            _MAGIC,
            current(Format.FENCE_FILE),
            state.mark_segment,
            state.limbo_ceiling,
            len(state.fences),
            len(state.freed),
        ),
        *(_ID.pack(one) for one in state.fences),
        *(_INTERVAL.pack(*one) for one in state.freed),
    ]
    data = b"".join(pieces)
    return data + _CRC.pack(crc32c(data))


def decode_state(data: bytes) -> NodeState:
    """Invert ``encode_state``, or raise ``CorruptError``."""
    damaged = CorruptError(
        f"the node's file {STATE_PATH!r} is damaged",
        remedy="Format the node anew, and let the others repair what it held",
    )
    if len(data) < _HEADER.size + _CRC.size or crc32c(data[:-4]) != _CRC.unpack(data[-4:])[0]:
        raise damaged
    magic, version, mark_segment, limbo_ceiling, fence_count, freed_count = _HEADER.unpack_from(
        data
    )
    if magic != _MAGIC:
        raise damaged
    check_version(Format.FENCE_FILE, version)
    fences_end = _HEADER.size + fence_count * _ID.size
    freed_end = fences_end + freed_count * _INTERVAL.size
    if freed_end + _CRC.size != len(data):
        raise damaged
    return NodeState(
        mark_segment=mark_segment,
        limbo_ceiling=limbo_ceiling,
        fences=tuple(one for (one,) in _ID.iter_unpack(data[_HEADER.size : fences_end])),
        freed=tuple((a, b) for a, b in _INTERVAL.iter_unpack(data[fences_end:freed_end])),
    )


async def read_state(files: Files) -> NodeState | None:
    """Read the file; None when there is none."""
    try:
        file = await files.open(STATE_PATH)
    except FileNotFoundError:
        return None
    try:
        return decode_state(await file.read(0, await file.size()))
    finally:
        await file.close()


async def write_state(files: Files, state: NodeState) -> None:
    """Replace the file, durably."""
    with contextlib.suppress(FileNotFoundError):
        await files.remove(_TEMPORARY_PATH)
    file = await files.open(_TEMPORARY_PATH, create=True)
    try:
        await file.write_and_sync(0, [encode_state(state)])
    finally:
        await file.close()
    await files.rename(_TEMPORARY_PATH, STATE_PATH)
    await files.sync_directory("")
