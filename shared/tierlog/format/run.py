"""Runs: consecutive frames of one ledger, cut once by its owner, the same bytes everywhere.

    offset  size  field
         0     4  magic               "TLRN"
         4     1  version             1
         5     1  flags               bit 0: authenticated by an HMAC (reserved); others zero
         6     2  header_len          80
         8     4  count               frames, at least 1
        12     4  frames_len          bytes of all frames
        16     8  ledger_id
        24     8  first_entry_id
        32     8  last_add_confirmed  -1: none
        40     8  owner_epoch
        48     8  publish_ms_min      0, 0: none known
        56     8  publish_ms_max
        64     8  ledger_len          payload bytes of the ledger, this run included; -1: unknown
        72     4  zeros
        76     4  crc32c              over bytes 0 to 75, the offsets and the frames
        80     …  offsets             count x u32, from the first frame's first byte
         …     …  frames              frames_len bytes (tierlog.format.frame)

Integers are big-endian; ids, epoch and times signed. The first 16 bytes tell how long it all is.

Owns: coding and cutting of runs. Does not own when they move, or who may write them.

Invariants of a ``Run``, however it was made:
    * Its offsets and frames passed ``check_frames``, its checksum is right.
    * It has at least one frame, and never crosses a stripe.
    * It is at most ``run_bytes_max`` of frames, or a single frame.

A producer's *draft* is a run with ledger 0, first entry 0, epoch 0 and LAC -1: ``cut_runs`` writes
the real ids into the copies that it makes anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple, Self

import numpy as np

from tierlog.format.checksum import Buffer, crc32c, crc32c_of
from tierlog.format.frame import FRAME_HEADER_LEN, Offsets, check_frames, stamp_ids
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import INT64_MAX, NO_ENTRY, EntryId, LedgerId

RUN_MAGIC: Final = b"TLRN"
LEN_UNKNOWN: Final = -1  # in drafts, and in runs cut from a copy in tier 2
FLAG_HMAC: Final = 0x01  # reserved: refused until there are keys

_PREFIX: Final = Struct(">4sBBHII")
_IDS: Final = Struct(">qqqqqqqI")

RUN_PREFIX_LEN: Final = 16
IDS_OFFSET: Final = RUN_PREFIX_LEN
IDS_LEN: Final = 7 * 8 + 4
CRC_OFFSET: Final = IDS_OFFSET + IDS_LEN
CRC_LEN: Final = 4
RUN_HEADER_LEN: Final = CRC_OFFSET + CRC_LEN
OFFSET_LEN: Final = 4

RUN_BYTES_MAX: Final = 64 * 1024
# The largest entry that fits the largest block (2 GiB - 1, with a header of 128) is one run.
RUN_FRAMES_LEN_MAX: Final = 2**31 - 1 - 128
RUN_COUNT_MAX: Final = 2**24
RUN_LEN_MAX: Final = RUN_HEADER_LEN + OFFSET_LEN * RUN_COUNT_MAX + RUN_FRAMES_LEN_MAX

assert _PREFIX.size == RUN_PREFIX_LEN
assert _IDS.size == IDS_LEN
assert CRC_OFFSET == 76
assert RUN_HEADER_LEN == 80


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What is known of a run without looking at its frames."""

    ledger_id: LedgerId
    first_entry_id: EntryId
    count: int
    last_add_confirmed: EntryId
    owner_epoch: int
    publish_ms_min: int
    publish_ms_max: int
    frames_len: int
    ledger_len: int
    """As BookKeeper's ``length``: a closing owner need not read from the ledger's start."""

    def __post_init__(self) -> None:
        # Checked here, so that both sides of the codec enforce it.
        if not (
            1 <= self.count <= RUN_COUNT_MAX
            and FRAME_HEADER_LEN * self.count <= self.frames_len <= RUN_FRAMES_LEN_MAX
        ):
            _corrupt(f"run of {self.count} frames in {self.frames_len} bytes", offset=8)
        if not (
            0 <= self.ledger_id <= INT64_MAX
            and 0 <= self.first_entry_id <= INT64_MAX - self.count + 1
            and NO_ENTRY <= self.last_add_confirmed <= INT64_MAX
            and 0 <= self.owner_epoch <= INT64_MAX
        ):
            _corrupt("run with an id out of bounds", offset=IDS_OFFSET)
        if not 0 <= self.publish_ms_min <= self.publish_ms_max <= INT64_MAX:
            _corrupt("run with publish times out of order", offset=48)
        payload_len = self.frames_len - FRAME_HEADER_LEN * self.count
        if self.ledger_len != LEN_UNKNOWN and not payload_len <= self.ledger_len <= INT64_MAX:
            _corrupt("run longer than its ledger", offset=64)

    @property
    def last_entry_id(self) -> EntryId:
        """The id of the run's last entry."""
        return EntryId(self.first_entry_id + self.count - 1)

    def pack(self) -> bytes:
        """Return the header without its checksum."""
        prefix = _PREFIX.pack(
            RUN_MAGIC, current(Format.RUN), 0, RUN_HEADER_LEN, self.count, self.frames_len
        )
        return prefix + _IDS.pack(
            self.ledger_id,
            self.first_entry_id,
            self.last_add_confirmed,
            self.owner_epoch,
            self.publish_ms_min,
            self.publish_ms_max,
            self.ledger_len,
            0,
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Run:
    """A run with its views: nothing is copied out of ``encoded``."""

    header: RunHeader
    encoded: memoryview
    frames: memoryview
    offsets: Offsets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.encoded == other.encoded

    def __hash__(self) -> int:
        return hash(self.header)

    def __repr__(self) -> str:
        one = self.header
        span = f"{one.ledger_id}:{one.first_entry_id}-{one.last_entry_id}"
        return f"<Run {span}, {one.frames_len} bytes, LAC {one.last_add_confirmed}>"

    @property
    def first_entry_id(self) -> EntryId:
        """The id of the first entry."""
        return self.header.first_entry_id

    @property
    def last_entry_id(self) -> EntryId:
        """The id of the last entry."""
        return self.header.last_entry_id

    @property
    def payload_len(self) -> int:
        """Bytes of entry data, without frames."""
        return self.header.frames_len - FRAME_HEADER_LEN * self.header.count

    def frames_between(self, first_entry_id: int, last_entry_id: int) -> memoryview:
        """Return the frames of these entries, both ends included, which must be in the run."""
        assert self.first_entry_id <= first_entry_id <= last_entry_id <= self.last_entry_id
        start = int(self.offsets[first_entry_id - self.first_entry_id])
        return self.frames[start : self._end_of(last_entry_id)]

    def entry(self, entry_id: int) -> memoryview:
        """Return the data of one entry, which must be in the run."""
        assert self.first_entry_id <= entry_id <= self.last_entry_id
        start = int(self.offsets[entry_id - self.first_entry_id])
        return self.frames[start + FRAME_HEADER_LEN : self._end_of(entry_id)]

    def entries(self) -> Iterator[memoryview]:
        """Iterate over the data of all entries."""
        starts = self.offsets.tolist()
        for start, end in zip(starts, [*starts[1:], len(self.frames)], strict=True):
            yield self.frames[start + FRAME_HEADER_LEN : end]

    def _end_of(self, entry_id: int) -> int:
        follower = entry_id - self.first_entry_id + 1
        return int(self.offsets[follower]) if follower < self.header.count else len(self.frames)

    @staticmethod
    def encoded_len(prefix: Buffer, *, len_max: int = RUN_LEN_MAX) -> int:
        """Return a run's whole length from its first ``RUN_PREFIX_LEN`` bytes, checked."""
        if len(prefix) < RUN_PREFIX_LEN:
            _corrupt(f"run cut after {len(prefix)} bytes", offset=0)
        magic, version, flags, header_len, count, frames_len = _PREFIX.unpack_from(prefix)
        if magic != RUN_MAGIC:
            _corrupt("not a run", offset=0)
        check_version(Format.RUN, version, error=CorruptError)
        if flags or header_len != RUN_HEADER_LEN:
            _corrupt(f"run with unknown flags {flags:#x} or header of {header_len}", offset=5)
        length = RUN_HEADER_LEN + OFFSET_LEN * int(count) + int(frames_len)
        if count > RUN_COUNT_MAX or frames_len > RUN_FRAMES_LEN_MAX or length > len_max:
            _corrupt(f"run of {count} frames in {frames_len} bytes is over its limit", offset=8)
        return length

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the run that is exactly ``buffer``; structure and checksum are verified."""
        encoded = memoryview(buffer)
        length = cls.encoded_len(encoded)
        if len(encoded) != length:
            _corrupt(f"run of {length} bytes in a buffer of {len(encoded)}", offset=0)
        (expected,) = _CRC.unpack_from(encoded, CRC_OFFSET)
        if crc32c(encoded[RUN_HEADER_LEN:], crc32c(encoded[:CRC_OFFSET])) != expected:
            _corrupt("run whose checksum differs", offset=CRC_OFFSET)
        count, frames_len = _COUNTS.unpack_from(encoded, 8)
        ledger_id, first, lac, epoch, low, high, ledger_len, zeros = _IDS.unpack_from(
            encoded, IDS_OFFSET
        )
        if zeros:
            _corrupt("run with a reserved field set", offset=CRC_OFFSET - 4)
        header = RunHeader(
            ledger_id=ledger_id,
            first_entry_id=first,
            count=count,
            last_add_confirmed=lac,
            owner_epoch=epoch,
            publish_ms_min=low,
            publish_ms_max=high,
            frames_len=frames_len,
            ledger_len=ledger_len,
        )
        frames_offset = RUN_HEADER_LEN + OFFSET_LEN * count
        raw = np.frombuffer(encoded[RUN_HEADER_LEN:frames_offset], ">u4")
        frames, offsets = encoded[frames_offset:], raw.astype(np.uint32)
        check_frames(frames, offsets, first)
        return cls(header, encoded, frames, offsets)


_CRC: Final = Struct(">I")
_COUNTS: Final = Struct(">II")


class RunsTaken(NamedTuple):
    """The whole and good runs at the start of a buffer."""

    runs: list[Run]
    length: int
    """Bytes of these runs; what follows is cut, or bad, or nothing."""
    error: CorruptError | None
    """What is wrong with what follows; None where more bytes may make it whole."""


def take_runs(buffer: Buffer, *, len_max: int = RUN_LEN_MAX) -> RunsTaken:
    """Read the runs that lie back to back at the start of ``buffer``, verified.

    Ends before a run that the buffer cuts, and before what is bad; both are the caller's to judge.
    """
    view, at = memoryview(buffer), 0
    runs: list[Run] = []
    try:
        while len(view) - at >= RUN_PREFIX_LEN:
            end = at + Run.encoded_len(view[at : at + RUN_PREFIX_LEN], len_max=len_max)
            if end > len(view):
                break
            runs.append(Run.decode(view[at:end]))
            at = end
    except CorruptError as error:
        return RunsTaken(runs, at, error)
    return RunsTaken(runs, at, None)


def build_run(
    frames: Buffer,
    offsets: Offsets,
    *,
    ledger_id: int = 0,
    first_entry_id: int = 0,
    last_add_confirmed: int = NO_ENTRY,
    owner_epoch: int = 0,
    publish_ms_min: int = 0,
    publish_ms_max: int = 0,
    ledger_len: int = LEN_UNKNOWN,
) -> Run:
    """Make one run of ``frames``, whose ids must be right already. The defaults make a draft."""
    if len(offsets) == 0 or len(offsets) > RUN_COUNT_MAX or len(frames) > RUN_FRAMES_LEN_MAX:
        raise RefusedError(
            f"{len(offsets)} entries in {len(frames)} bytes do not make a run",
            reason=Reason.TOO_LARGE,
            remedy=f"A run has 1 to {RUN_COUNT_MAX} entries in {RUN_FRAMES_LEN_MAX} bytes",
        )
    check_frames(frames, offsets, first_entry_id)
    header = RunHeader(
        ledger_id=LedgerId(ledger_id),
        first_entry_id=EntryId(first_entry_id),
        count=len(offsets),
        last_add_confirmed=EntryId(last_add_confirmed),
        owner_epoch=owner_epoch,
        publish_ms_min=publish_ms_min,
        publish_ms_max=publish_ms_max,
        frames_len=len(frames),
        ledger_len=ledger_len,
    )
    packed, columns = header.pack(), offsets.astype(">u4").tobytes()
    crc = _CRC.pack(crc32c_of((packed, columns, frames)))
    encoded = memoryview(b"".join((packed, crc, columns, frames)))
    return Run(header, encoded, encoded[RUN_HEADER_LEN + len(columns) :], offsets)


def cut_runs(  # noqa: PLR0913 - the fields of a run's header
    frames: Buffer,
    offsets: Offsets,
    *,
    ledger_id: int,
    first_entry_id: int,
    last_add_confirmed: int,
    owner_epoch: int,
    publish_ms_min: int = 0,
    publish_ms_max: int = 0,
    run_bytes_max: int = RUN_BYTES_MAX,
    stripe_entries: int,
    length_before: int | None = None,
) -> list[Run]:
    """Cut checked frames into runs and give the entries their ids, in the runs' own copies.

    ``length_before``: payload bytes of the ledger before these; None: not known.
    """
    assert run_bytes_max > 0
    assert stripe_entries > 0
    count, view = len(offsets), memoryview(frames)
    bounds = np.append(offsets, len(frames)).astype(np.int64)
    runs, start = [], 0
    while start < count:
        begin = int(bounds[start])
        stop = int(np.searchsorted(bounds, begin + run_bytes_max, "right")) - 1
        stripe_end = stripe_entries - (first_entry_id + start) % stripe_entries
        stop = max(start + 1, min(stop, start + stripe_end, start + RUN_COUNT_MAX))
        ledger_len = LEN_UNKNOWN
        if length_before is not None:
            ledger_len = length_before + int(bounds[stop]) - FRAME_HEADER_LEN * stop
        header = RunHeader(
            ledger_id=LedgerId(ledger_id),
            first_entry_id=EntryId(first_entry_id + start),
            count=stop - start,
            last_add_confirmed=EntryId(last_add_confirmed),
            owner_epoch=owner_epoch,
            publish_ms_min=publish_ms_min,
            publish_ms_max=publish_ms_max,
            frames_len=int(bounds[stop]) - begin,
            ledger_len=ledger_len,
        )
        own = (bounds[start:stop] - begin).astype(np.uint32)
        runs.append(_stamped(header, own, view[begin : int(bounds[stop])]))
        start = stop
    return runs


def _stamped(header: RunHeader, offsets: Offsets, frames: memoryview) -> Run:
    packed, columns = header.pack(), offsets.astype(">u4").tobytes()
    encoded = memoryview(bytearray(b"").join((packed, bytes(CRC_LEN), columns, frames)))
    own = encoded[RUN_HEADER_LEN + len(columns) :]
    stamp_ids(own, offsets, header.first_entry_id)
    _CRC.pack_into(encoded, CRC_OFFSET, crc32c(encoded[RUN_HEADER_LEN:], crc32c(packed)))
    return Run(header, encoded.toreadonly(), own.toreadonly(), offsets)


def _corrupt(message: str, *, offset: int) -> None:
    raise CorruptError(
        f"{message}, at byte {offset}",
        remedy="Read another copy",
        details={"offset": str(offset)},
    )
