"""Runs: consecutive frames of one ledger, cut once by its owner, the same bytes everywhere.

    offset  size  field
         0     4  magic               "TLRN"
         4     1  version             1
         5     1  flags               bit 0: signed, there is an hmac; others zero
         6     2  header_len          80, or 112 when signed
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
        76     4  crc32c              over all other bytes of the run
        80    32  hmac                only when signed: HMAC-SHA-256 with the ledger's key, over
                                      bytes 0 to 75, the offsets and the frames
         …     …  offsets             count x u32, from the first frame's first byte
         …     …  frames              frames_len bytes (tierlog.format.frame)

Integers are big-endian; ids, epoch and times signed. The first 16 bytes tell how long it all is.

Owns: coding and cutting of runs. Does not own when they move, or who may write them.

Invariants of a ``Run``, however it was made:
    * Its offsets and frames passed ``check_frames``, its checksum is right.
    * It has at least one frame, and never crosses a stripe.
    * It is at most ``run_bytes_max`` of frames, or a single frame.
    * Whether its ``hmac`` is right is another question: who has the key asks it (``check_mac``).

A producer's *draft* is a run with ledger 0, first entry 0, epoch 0 and LAC -1, never signed:
``cut_runs`` writes the real ids into the copies that it makes anyway. Whoever has no key, as a
storage node, still finds damage by the checksum; only the ``hmac`` shows what was made on purpose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple, Self

import numpy as np

from tierlog.format.authentication import MAC_LEN, LedgerKey
from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.frame import (
    FRAME_HEADER_LEN,
    FrameSets,
    Offsets,
    check_frames,
    frame_sets_agree,
    stamp_ids,
)
from tierlog.format.versions import Format, check_version, current
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import INT64_MAX, NO_ENTRY, EntryId, LedgerId

RUN_MAGIC: Final = b"TLRN"
LEN_UNKNOWN: Final = -1  # in drafts, and in runs cut from a copy in tier 2
FLAG_HMAC: Final = 0x01

_PREFIX: Final = Struct(">4sBBHII")
_IDS: Final = Struct(">qqqqqqqI")
_HEADER: Final = Struct(">4sBBHIIqqqqqqqII")
_CRC: Final = Struct(">I")

RUN_PREFIX_LEN: Final = 16
IDS_OFFSET: Final = RUN_PREFIX_LEN
IDS_LEN: Final = 7 * 8 + 4
CRC_OFFSET: Final = IDS_OFFSET + IDS_LEN
CRC_LEN: Final = 4
RUN_HEADER_LEN: Final = CRC_OFFSET + CRC_LEN
MAC_OFFSET: Final = RUN_HEADER_LEN
SIGNED_HEADER_LEN: Final = MAC_OFFSET + MAC_LEN
OFFSET_LEN: Final = 4
FEW_RUNS: Final = 8  # from about there on, checking the frames of all at once is quicker

RUN_BYTES_MAX: Final = 64 * 1024
# The largest entry that fits the largest block (2 GiB - 1, with a header of 128) is one run.
RUN_FRAMES_LEN_MAX: Final = 2**31 - 1 - 128
RUN_COUNT_MAX: Final = 2**24
RUN_LEN_MAX: Final = SIGNED_HEADER_LEN + OFFSET_LEN * RUN_COUNT_MAX + RUN_FRAMES_LEN_MAX

assert _PREFIX.size == RUN_PREFIX_LEN
assert _IDS.size == IDS_LEN
assert CRC_OFFSET == 76
assert _HEADER.size == RUN_HEADER_LEN == 80

_START: Final = (RUN_MAGIC, current(Format.RUN), 0, RUN_HEADER_LEN)
_SIGNED_START: Final = (RUN_MAGIC, current(Format.RUN), FLAG_HMAC, SIGNED_HEADER_LEN)
_STARTS: Final = (_START, _SIGNED_START)
_FLAGS_OFFSET: Final = 5


class RunHeader(NamedTuple):
    """What is known of a run without looking at its frames, in the order of the bytes.

    A tuple, since offloads and replays make so many of them.
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody misses
    frames_len: int
    ledger_id: LedgerId
    first_entry_id: EntryId
    last_add_confirmed: EntryId
    owner_epoch: int
    publish_ms_min: int
    publish_ms_max: int
    ledger_len: int
    """As BookKeeper's ``length``: a closing owner need not read from the ledger's start."""

    def check(self) -> None:
        """Raise ``CorruptError`` unless the values agree; both sides of the codec call it."""
        count, frames_len, ledger_id, first, lac, epoch, low, high, ledger_len = self
        least = FRAME_HEADER_LEN * count
        if not (1 <= count <= RUN_COUNT_MAX and least <= frames_len <= RUN_FRAMES_LEN_MAX):
            _corrupt(f"run of {count} frames in {frames_len} bytes", offset=8)
        if not (
            0 <= ledger_id <= INT64_MAX
            and 0 <= first <= INT64_MAX - count + 1
            and NO_ENTRY <= lac <= INT64_MAX
            and 0 <= epoch <= INT64_MAX
        ):
            _corrupt("run with an id out of bounds", offset=IDS_OFFSET)
        if not 0 <= low <= high <= INT64_MAX:
            _corrupt("run with publish times out of order", offset=48)
        if not (frames_len - least <= ledger_len <= INT64_MAX or ledger_len == LEN_UNKNOWN):
            _corrupt("run longer than its ledger", offset=64)

    @property
    def last_entry_id(self) -> EntryId:
        """The id of the run's last entry."""
        # Unchecked, since so many are asked for: a call of EntryId costs as much as all of this.
        last: EntryId = self.first_entry_id + self.count - 1  # type: ignore[assignment]
        return last

    def pack(self, *, signed: bool = False) -> bytes:
        """Return the header without its checksum, nor what follows that."""
        self.check()
        start = _SIGNED_START if signed else _START
        return _PREFIX.pack(*start, self.count, self.frames_len) + _IDS.pack(
            self.ledger_id,
            self.first_entry_id,
            self.last_add_confirmed,
            self.owner_epoch,
            self.publish_ms_min,
            self.publish_ms_max,
            self.ledger_len,
            0,
        )


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """A run with its views: nothing is copied out of ``encoded``.

    It never changes; "frozen" would double the time that it takes to make one.
    """

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
        kind = "signed run" if self.is_signed else "Run"
        return f"<{kind} {span}, {one.frames_len} bytes, LAC {one.last_add_confirmed}>"

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

    @property
    def is_signed(self) -> bool:
        """Whether there is an ``hmac``, right or wrong."""
        return bool(self.encoded[_FLAGS_OFFSET] & FLAG_HMAC)

    def check_mac(self, key: LedgerKey) -> None:
        """Raise ``CorruptError`` unless the run was signed with this key, all of it."""
        view = self.encoded
        if not self.is_signed:
            _corrupt(f"{self} of a ledger with a key is not signed", offset=_FLAGS_OFFSET)
        if not key.agrees(
            view[:CRC_OFFSET], view[SIGNED_HEADER_LEN:], view[MAC_OFFSET:SIGNED_HEADER_LEN]
        ):
            _corrupt(f"{self} was not signed with key {key.key_id}", offset=MAC_OFFSET)

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
        return _encoded_len(prefix, 0, len_max)

    @classmethod
    def decode(cls, buffer: Buffer) -> Self:
        """Read the run that is exactly ``buffer``; structure and checksum are verified."""
        encoded = memoryview(buffer)
        length = cls.encoded_len(encoded)
        if len(encoded) != length:
            _corrupt(f"run of {length} bytes in a buffer of {len(encoded)}", offset=0)
        header = _checked_header(encoded, 0, length)
        return cls(header, encoded, *_checked_frames(encoded, header, length))

    @classmethod
    def restore(cls, buffer: Buffer) -> Self:
        """Read a run that was verified before, out of bytes that another checksum covers.

        Only the header is looked at again: replays of a journal read very many.
        """
        encoded = memoryview(buffer)
        length = cls.encoded_len(encoded)
        if len(encoded) != length:
            _corrupt(f"run of {length} bytes in a buffer of {len(encoded)}", offset=0)
        header = RunHeader._make(_HEADER.unpack_from(encoded)[len(_START) : -2])
        header.check()
        frames_at = length - header.frames_len
        raw = np.frombuffer(encoded[frames_at - OFFSET_LEN * header.count : frames_at], ">u4")
        return cls(header, encoded, encoded[frames_at:], raw.astype(np.uint32))


def _encoded_len(buffer: Buffer, at: int, len_max: int) -> int:
    magic, version, flags, header_len, count, frames_len = _PREFIX.unpack_from(buffer, at)
    if (magic, version, flags, header_len) not in _STARTS:
        if magic != RUN_MAGIC:
            _corrupt("not a run", offset=0)
        check_version(Format.RUN, version, error=CorruptError)
        _corrupt(f"run with unknown flags {flags:#x} or header of {header_len}", offset=5)
    length: int = header_len + OFFSET_LEN * count + frames_len
    if count > RUN_COUNT_MAX or frames_len > RUN_FRAMES_LEN_MAX or length > len_max:
        _corrupt(f"run of {count} frames in {frames_len} bytes is over its limit", offset=8)
    return length


def _checked_header(view: memoryview, at: int, end: int) -> RunHeader:
    """Return the header of the run from ``at`` to ``end``; it and the checksum are right."""
    fields = _HEADER.unpack_from(view, at)
    if crc32c(view[at + RUN_HEADER_LEN : end], crc32c(view[at : at + CRC_OFFSET])) != fields[-1]:
        _corrupt("run whose checksum differs", offset=CRC_OFFSET)
    if fields[-2]:
        _corrupt("run with a reserved field set", offset=CRC_OFFSET - CRC_LEN)
    header = RunHeader._make(fields[len(_START) : -2])
    header.check()
    return header


def _checked_frames(view: memoryview, header: RunHeader, end: int) -> tuple[memoryview, Offsets]:
    """Return the frames of the run that ends at ``end``, and their offsets."""
    frames_at = end - header.frames_len
    raw = np.frombuffer(view[frames_at - OFFSET_LEN * header.count : frames_at], ">u4")
    frames, offsets = view[frames_at:end], raw.astype(np.uint32)
    check_frames(frames, offsets, header.first_entry_id)
    return frames, offsets


class RunsTaken(NamedTuple):
    """The whole and good runs at the start of a buffer."""

    runs: list[Run]
    length: int
    """Bytes of these runs; what follows is cut, or bad, or nothing."""
    error: CorruptError | None
    """What is wrong with what follows; None where more bytes may make it whole."""


def take_runs(
    buffer: Buffer, *, len_max: int = RUN_LEN_MAX, count_max: int | None = None
) -> RunsTaken:
    """Read the runs that lie back to back at the start of ``buffer``, verified.

    Ends after ``count_max`` of them, before a run that the buffer cuts, and before what is bad;
    what that means is the caller's to judge.
    """
    view, at = memoryview(buffer), 0
    last = len(view) - RUN_PREFIX_LEN
    headers: list[RunHeader] = []
    bounds = [0]
    error: CorruptError | None = None
    try:
        while at <= last and len(headers) != count_max:
            at += _encoded_len(view, at, len_max)
            if at > len(view):
                break
            headers.append(_checked_header(view, bounds[-1], at))
            bounds.append(at)
    except CorruptError as damage:
        error = damage
    runs = _with_frames(view, headers, bounds) if headers else []
    if runs is None:
        runs, error = _decoded_singly(view, bounds)
    return RunsTaken(runs, bounds[len(runs)], error)


def _with_frames(view: memoryview, headers: list[RunHeader], bounds: list[int]) -> list[Run] | None:
    """Return runs whose headers and checksums are right; None: frames of one are not.

    The frames of many are checked at once, since a call for each run costs more than its bytes.
    """
    if len(headers) <= FEW_RUNS:
        try:
            return [
                Run(header, view[begin:end], *_checked_frames(view, header, end))
                for header, (begin, end) in zip(headers, pairwise(bounds), strict=True)
            ]
        except CorruptError:
            return None
    counts = [header.count for header in headers]
    places = [end - header.frames_len for end, header in zip(bounds[1:], headers, strict=True)]
    columns = b"".join(
        view[place - OFFSET_LEN * count : place]
        for place, count in zip(places, counts, strict=True)
    )
    offsets = np.frombuffer(columns, ">u4").astype(np.uint32)
    ids = [header.first_entry_id for header in headers]
    sets = FrameSets(counts, places, bounds[1:], ids)
    if not frame_sets_agree(view, offsets, sets):
        return None
    runs, begin, first = [], bounds[0], 0
    for header, place, end in zip(headers, places, bounds[1:], strict=True):
        own = offsets[first : first + header.count]
        runs.append(Run(header, view[begin:end], view[place:end], own))
        begin, first = end, first + header.count
    return runs


def _decoded_singly(view: memoryview, bounds: list[int]) -> tuple[list[Run], CorruptError | None]:
    runs: list[Run] = []
    for start, end in pairwise(bounds):
        try:
            runs.append(Run.decode(view[start:end]))
        except CorruptError as damage:
            return runs, damage
    return runs, None


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
    key: LedgerKey | None = None,
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
    return _encoded(header, offsets, memoryview(frames), key, stamps=False)


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
    key: LedgerKey | None = None,
) -> list[Run]:
    """Cut checked frames into runs and give the entries their ids, in the runs' own copies.

    ``length_before``: payload bytes of the ledger before these; None: not known. ``key``: the
    ledger's, which signs the runs.
    """
    assert run_bytes_max > 0
    assert stripe_entries > 0
    view, runs = memoryview(frames), []
    for start, stop, begin, end in _cuts(
        offsets, len(frames), first_entry_id, run_bytes_max, stripe_entries
    ):
        ledger_len = LEN_UNKNOWN
        if length_before is not None:
            ledger_len = length_before + end - FRAME_HEADER_LEN * stop
        header = RunHeader(
            ledger_id=LedgerId(ledger_id),
            first_entry_id=EntryId(first_entry_id + start),
            count=stop - start,
            last_add_confirmed=EntryId(last_add_confirmed),
            owner_epoch=owner_epoch,
            publish_ms_min=publish_ms_min,
            publish_ms_max=publish_ms_max,
            frames_len=end - begin,
            ledger_len=ledger_len,
        )
        own = offsets[start:stop] - np.uint32(begin)
        runs.append(_encoded(header, own, view[begin:end], key))
    return runs


def _cuts(
    offsets: Offsets, frames_len: int, first_entry_id: int, run_bytes_max: int, stripe_entries: int
) -> Iterator[tuple[int, int, int, int]]:
    """Iterate over the runs that frames are cut into: entries from, to, and bytes from, to."""
    count = len(offsets)
    left = min(RUN_COUNT_MAX, stripe_entries - first_entry_id % stripe_entries)
    if count == 1 or (0 < count <= left and frames_len <= run_bytes_max):
        yield 0, count, 0, frames_len  # as nearly all are
        return
    bounds = np.append(offsets, frames_len).astype(np.int64)
    start = 0
    while start < count:
        begin = int(bounds[start])
        stop = int(np.searchsorted(bounds, begin + run_bytes_max, "right")) - 1
        stripe_end = stripe_entries - (first_entry_id + start) % stripe_entries
        stop = max(start + 1, min(stop, start + stripe_end, start + RUN_COUNT_MAX))
        yield start, stop, begin, int(bounds[stop])
        start = stop


def _encoded(
    header: RunHeader,
    offsets: Offsets,
    frames: memoryview,
    key: LedgerKey | None,
    *,
    stamps: bool = True,
) -> Run:
    packed, columns = header.pack(signed=key is not None), offsets.astype(">u4").tobytes()
    codes = bytes(CRC_LEN if key is None else CRC_LEN + MAC_LEN)
    encoded = memoryview(bytearray(b"").join((packed, codes, columns, frames)))
    own = encoded[len(packed) + len(codes) + len(columns) :]
    if stamps:
        stamp_ids(own, offsets, header.first_entry_id)
    if key is not None:
        code = key.code_of(packed, encoded[SIGNED_HEADER_LEN:])
        encoded[MAC_OFFSET:SIGNED_HEADER_LEN] = code
    _CRC.pack_into(encoded, CRC_OFFSET, crc32c(encoded[RUN_HEADER_LEN:], crc32c(packed)))
    return Run(header, encoded.toreadonly(), own.toreadonly(), offsets)


def _corrupt(message: str, *, offset: int) -> None:
    raise CorruptError(
        f"{message}, at byte {offset}",
        remedy="Read another copy",
        details={"offset": str(offset)},
    )
