"""What a side object says of each grain, counted while the data object's bytes go by.

Owns the counting: the checksum of every grain, the first entry that begins in it, its publish
times; the checksum of every part beside them, out of the same look at the bytes. Does not own
the bytes of side objects (``tierlog.format.side``), nor of data objects.

Who fills blocks hands over every byte of the data object once, in order: ``add`` for headers and
padding, ``add_frames`` for whole frames, ``end_part`` behind a block's last byte.

Invariants:
    * Grain g is the bytes from ``g * grain_len`` on, whatever lies there; the last may be shorter.
    * A call costs the same however many entries the frames have.
    * A run's publish times count for the grains in which its entries begin.
"""

import hashlib
from array import array
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierlog.format.checksum import Buffer, CrcJoiner, crc32c, crc32c_joined
from tierlog.format.frame import Offsets
from tierlog.model.ids import INT64_MAX

GRAIN_LEN: Final = 64 * 1024

assert array("I").itemsize == 4
assert array("q").itemsize == 8

Int64s = NDArray[np.int64]
UInt32s = NDArray[np.uint32]


class GrainColumns(NamedTuple):
    """A row for every grain.

    ``first_entry_ids``: the first entry that begins in the grain or behind it; the number of
    entries when there is none. ``entry_offsets``: where that entry's frame begins, from the
    grain's start; the object's end when there is none. Times are 0, 0 where none is known.
    """

    first_entry_ids: Int64s
    entry_offsets: UInt32s
    crcs: UInt32s
    publish_ms_min: Int64s
    publish_ms_max: Int64s

    def by_name(self) -> "dict[str, NDArray[np.integer[Any]]]":
        """Return all columns with their names, in the order of the bytes."""
        return dict(zip(self._fields, self, strict=True))

    def between(self, start: int, stop: int) -> "GrainColumns":
        """Return the rows from ``start`` on and before ``stop``."""
        return GrainColumns._make(column[start:stop] for column in self)


class GrainSums:
    """Counts what goes by; ``columns`` gives what was counted, once all did."""

    def __init__(self, grain_len: int = GRAIN_LEN, *, with_sha256: bool = False) -> None:
        assert grain_len > 0
        self.grain_len: Final = grain_len
        self.data_len = 0
        self._sha256 = hashlib.sha256() if with_sha256 else None
        # Of the bytes since the later of a grain's and a part's beginning.
        self._crc = 0
        self._crc_len = 0
        self._room = grain_len
        # What came before those: of the part, and of the grain where a part ended within it.
        self._part_crc = 0
        self._grain_crc = 0
        self._join = _joiner(grain_len)
        self._crcs = array("I")
        # The start of the first grain that has no entry yet.
        self._wanted = 0
        self._firsts = array("q")
        self._offsets = array("I")
        self._mins = array("q")
        self._maxs = array("q")

    def __repr__(self) -> str:
        return f"<GrainSums {self.data_len} bytes, {len(self._crcs)} grains>"

    def add(self, buffer: Buffer) -> None:
        """Count bytes that hold no entry: a block's header, its padding."""
        length = len(buffer)
        if self._sha256 is not None:
            self._sha256.update(buffer)
        self.data_len += length
        if length < self._room:
            self._crc = crc32c(buffer, self._crc)
            self._crc_len += length
            self._room -= length
            return
        view, at = memoryview(buffer), 0
        while length - at >= self._room:
            end = at + self._room
            self._crc = crc32c(view[at:end], self._crc)
            self._crc_len += self._room
            self._end_grain()
            at = end
        if at < length:
            self._crc = crc32c(view[at:], self._crc)
            self._crc_len += length - at
            self._room -= length - at

    def add_frames(
        self,
        frames: Buffer,
        offsets: Offsets,
        first_entry_id: int,
        publish_ms_min: int = 0,
        publish_ms_max: int = 0,
    ) -> None:
        """Count whole frames; only differences between ``offsets``, one a frame, matter."""
        start, base = self.data_len, int(offsets[0])
        if publish_ms_max:
            last_start = start + int(offsets[-1]) - base
            self._note_times(start, last_start, publish_ms_min, publish_ms_max)
        end = start + len(frames)
        while self._wanted < end:
            number = 0
            if self._wanted > start:
                # Of the column's own type: an integer of Python's would convert all of it.
                number = int(offsets.searchsorted(np.uint32(self._wanted - start + base)))
                if number == len(offsets):
                    break
            at = start + int(offsets[number]) - base
            self._note_entry(first_entry_id + number, at, at // self.grain_len + 1)
        self.add(frames)

    def end_part(self) -> int:
        """Return the checksum of all bytes since the last call."""
        part = self._part_crc
        if self._crc_len:
            part = crc32c_joined(part, self._crc, self._crc_len)
            self._grain_crc = crc32c_joined(self._grain_crc, self._crc, self._crc_len)
        self._part_crc = self._crc = self._crc_len = 0
        return part

    def columns(self, entry_count: int) -> GrainColumns:
        """Return a row for every grain of the data object, whose last byte was added."""
        self.end_part()
        crcs = self._crcs[:]
        if self._room < self.grain_len:
            crcs.append(self._grain_crc)
        self._note_entry(entry_count, self.data_len, len(crcs))
        self._grow_times(len(crcs))
        mins, maxs = np.array(self._mins), np.array(self._maxs)
        mins[maxs == 0] = 0
        return GrainColumns(
            np.array(self._firsts, np.int64),
            np.array(self._offsets, np.uint32),
            np.array(crcs, np.uint32),
            mins.astype(np.int64),
            maxs.astype(np.int64),
        )

    def sha256(self) -> bytes:
        """Return the digest of all bytes; empty when it was not wanted."""
        return self._sha256.digest() if self._sha256 is not None else b""

    def _end_grain(self) -> None:
        crc, length = self._crc, self._crc_len
        if length == self.grain_len:
            self._part_crc = self._join(self._part_crc, crc)
            self._crcs.append(crc)
        else:
            self._part_crc = crc32c_joined(self._part_crc, crc, length)
            self._crcs.append(crc32c_joined(self._grain_crc, crc, length))
        self._crc = self._crc_len = self._grain_crc = 0
        self._room = self.grain_len

    def _note_entry(self, entry_id: int, at: int, grains: int) -> None:
        """Note an entry that begins at ``at`` as the first of all grains up to ``grains``."""
        for number in range(len(self._firsts), grains):
            self._firsts.append(entry_id)
            self._offsets.append(at - number * self.grain_len)
        self._wanted = max(self._wanted, grains * self.grain_len)

    def _note_times(self, start: int, last_start: int, low: int, high: int) -> None:
        number, last = start // self.grain_len, last_start // self.grain_len
        mins, maxs = self._mins, self._maxs
        if len(maxs) <= last:
            self._grow_times(last + 1)
        while number <= last:
            if low < mins[number]:  # noqa: PLR1730 - once a run, at half the cost of min()
                mins[number] = low
            if high > maxs[number]:  # noqa: PLR1730
                maxs[number] = high
            number += 1

    def _grow_times(self, grains: int) -> None:
        missing = grains - len(self._maxs)
        self._mins.extend([INT64_MAX] * missing)
        self._maxs.extend([0] * missing)


@lru_cache(maxsize=16)
def _joiner(length: int) -> CrcJoiner:
    return CrcJoiner(length)
