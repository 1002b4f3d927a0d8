"""What a side object says of each grain, counted while the data object's bytes go by.

Owns the counting: the checksum of every grain, the first entry that begins in it, its publish
times; the checksum of every part beside them, out of the same look at the bytes. Does not own
the bytes of side objects (``tierlog.format.side``), nor of data objects.

Who fills blocks hands over every byte of the data object once, in order: ``add`` for headers and
padding, ``add_frames`` for whole frames, ``end_part`` behind a block's last byte.

Bytes are looked at as they come, for their checksum; the rest is counted once a part, for all of
its frames together: a run of frames is short, and what it costs beside its bytes comes again with
every one.

Invariants:
    * Grain g is the bytes from ``g * grain_len`` on, whatever lies there; the last may be shorter.
    * Nothing is done for each entry, nor held for each beside the offsets that came with a run;
      those are held until the part ends, as its bytes are.
    * A run's publish times count for the grains in which its entries begin.
"""

import hashlib
from array import array
from collections.abc import Sequence
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


Frames = tuple[int, int, Offsets, int, int]
"""Whole frames that went by: where in the object, first entry, offsets, publish times' bounds.

A plain one, since naming the fields of so many took as long as counting them.
"""


class GrainSums:
    """Counts what goes by; ``columns`` gives what was counted, once all did."""

    def __init__(self, grain_len: int = GRAIN_LEN, *, with_sha256: bool = False) -> None:
        assert grain_len > 0
        self.grain_len: Final = grain_len
        self.data_len = 0
        self._sha256 = hashlib.sha256() if with_sha256 else None
        self._join = _joiner(grain_len)
        # Of the part that goes by: where it began, its checksum so far, what that was at each
        # border of a grain, and its frames.
        self._part_start = 0
        self._crc = 0
        self._crcs_at_borders = array("I")
        self._frames: list[Frames] = []
        # How much the grain that goes by still lacks; the checksum of what earlier parts had of it.
        self._room = grain_len
        self._begun_crc = 0
        # Of all parts before it.
        self._crcs = array("I")
        self._firsts = array("q")
        self._offsets = array("I")
        self._mins = array("q")
        self._maxs = array("q")

    def __repr__(self) -> str:
        return f"<GrainSums {self.data_len} bytes, {len(self._crcs)} grains>"

    def add(self, buffer: Buffer) -> None:
        """Count bytes that hold no entry: a block's header, its padding."""
        length, room, crc = len(buffer), self._room, self._crc
        if self._sha256 is not None:
            self._sha256.update(buffer)
        self.data_len += length
        at = 0
        if length >= room:
            buffer = memoryview(buffer)
            while length - at >= room:
                crc = crc32c(buffer[at : at + room], crc)
                self._crcs_at_borders.append(crc)
                at += room
                room = self.grain_len
            buffer = buffer[at:]
        if at < length:
            crc = crc32c(buffer, crc)
        self._crc = crc
        self._room = room - (length - at)

    def add_frames(
        self,
        frames: Buffer,
        offsets: Offsets,
        first_entry_id: int,
        publish_ms_min: int = 0,
        publish_ms_max: int = 0,
    ) -> None:
        """Count whole frames; only differences between ``offsets``, one a frame, matter."""
        start = self.data_len
        self.add(frames)
        self._frames.append((start, first_entry_id, offsets, publish_ms_min, publish_ms_max))

    def end_part(self) -> int:
        """Return the checksum of all bytes since the last call."""
        part, length = self._crc, self.data_len - self._part_start
        self._end_grains(part, length)
        self._end_frames()
        self._crc, self._part_start = 0, self.data_len
        return part

    def columns(self, entry_count: int) -> GrainColumns:
        """Return a row for every grain of the data object, whose last byte was added."""
        crcs = self.crcs()
        self._note_last(entry_count, len(crcs))
        self._grow_times(len(crcs))
        mins, maxs = np.array(self._mins), np.array(self._maxs)
        mins[maxs == 0] = 0
        return GrainColumns(
            np.array(self._firsts, np.int64),
            np.array(self._offsets, np.uint32),
            crcs,
            mins.astype(np.int64),
            maxs.astype(np.int64),
        )

    def crcs(self) -> UInt32s:
        """Return the checksum of every grain, the last one as far as it was added."""
        self.end_part()
        last = [self._begun_crc] if self._room < self.grain_len else []
        return np.array([*self._crcs, *last], np.uint32)

    def sha256(self) -> bytes:
        """Return the digest of all bytes; empty when it was not wanted."""
        return self._sha256.digest() if self._sha256 is not None else b""

    def _end_grains(self, part: int, length: int) -> None:
        """Make the checksums of grains out of the part's own at their borders."""
        if not self._crcs_at_borders:
            self._begun_crc = crc32c_joined(self._begun_crc, part, length)
            return
        at_borders = np.array(self._crcs_at_borders, np.uint32)
        behind = self.grain_len - self._room
        first_len = length - behind - (len(at_borders) - 1) * self.grain_len
        self._crcs.append(crc32c_joined(self._begun_crc, int(at_borders[0]), first_len))
        # What joins a checksum to what is before it takes that off again.
        self._crcs.frombytes(self._join(at_borders[:-1], at_borders[1:]).tobytes())
        self._begun_crc = crc32c_joined(int(at_borders[-1]), part, behind) if behind else 0
        self._crcs_at_borders = array("I")

    def _end_frames(self) -> None:
        """Find each grain's first entry, and its publish times, among the part's frames."""
        if not self._frames:
            return
        starts, firsts, offsets, lows, highs = zip(*self._frames, strict=True)
        begun = np.array(starts, np.int64)
        origins = begun - np.array([of.item(0) for of in offsets], np.int64)
        lasts = origins + np.array([of.item(-1) for of in offsets], np.int64)
        self._note_firsts(begun, origins, firsts, offsets, lasts.item(-1))
        high = np.array(highs, np.int64)
        if (timed := high > 0).any():
            low = np.array(lows, np.int64)
            self._note_times(begun[timed], lasts[timed], low[timed], high[timed])
        self._frames = []

    def _note_firsts(
        self,
        starts: Int64s,
        origins: Int64s,
        firsts: Sequence[int],
        offsets: Sequence[Offsets],
        last_start: int,
    ) -> None:
        """Note the first entry of each grain that begins at the last frame or before it.

        ``origins``: where offset 0 of each run of frames would lie.
        """
        known = len(self._firsts)
        borders = np.arange(known, last_start // self.grain_len + 1) * self.grain_len
        # What began before the part's first frame has that one for its first entry.
        runs = np.maximum(np.searchsorted(starts, borders, "right") - 1, 0)
        # Of the offsets' own type: an integer of Python's would convert a column for each look.
        wanted = np.maximum(borders, starts[runs]) - origins[runs]
        begins = origins.tolist()
        of_borders = zip(borders.tolist(), runs.tolist(), wanted.astype(np.uint32), strict=True)
        for border, run, offset in of_borders:
            number = int(offsets[run].searchsorted(offset))
            if number == len(offsets[run]):
                run, number = run + 1, 0  # noqa: PLW2901 - behind its last frame is the next run
            self._firsts.append(firsts[run] + number)
            self._offsets.append(begins[run] + offsets[run].item(number) - border)

    def _note_last(self, entry_count: int, grains: int) -> None:
        """Note that behind the last entry's start there is none, in ``grains`` grains in all."""
        for number in range(len(self._firsts), grains):
            self._firsts.append(entry_count)
            self._offsets.append(self.data_len - number * self.grain_len)

    def _note_times(self, starts: Int64s, lasts: Int64s, lows: Int64s, highs: Int64s) -> None:
        grains, stops = starts // self.grain_len, lasts // self.grain_len
        self._grow_times(int(stops[-1]) + 1)
        mins = np.frombuffer(self._mins, np.int64)
        maxs = np.frombuffer(self._maxs, np.int64)
        while len(grains):
            np.minimum.at(mins, grains, lows)
            np.maximum.at(maxs, grains, highs)
            more = grains < stops
            grains, stops, lows, highs = grains[more] + 1, stops[more], lows[more], highs[more]

    def _grow_times(self, grains: int) -> None:
        missing = grains - len(self._maxs)
        self._mins.extend([INT64_MAX] * missing)
        self._maxs.extend([0] * missing)


@lru_cache(maxsize=16)
def _joiner(length: int) -> CrcJoiner:
    return CrcJoiner(length)
