"""Entry frames, as they lie in runs and in data blocks (seeds/000, "Payload format").

    offset  size  field
         0     4  entry_len   bytes of entry_data alone; negative: not a frame (padding)
         4     8  entry_id    grows by one from frame to frame
        12     …  entry_data  entry_len bytes

Integers are big-endian and signed. Frames lie back to back.

Owns: packing, stamping and checking of frames, vectorised over their offsets where there are
many; the only loop over many is ``walk_frames``, for bytes that come without offsets, and it leaps
over frames of one length. Does not own who gives the ids.

Invariants, for frames with their offsets:
    * ``offsets[0] == 0`` and ``offsets[i + 1] == offsets[i] + 12 + entry_len[i]``.
    * The last frame ends where the buffer ends.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierlog.format.checksum import Buffer
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import INT64_MAX

ENTRY_LEN_OFFSET: Final = 0
ENTRY_LEN_LEN: Final = 4
ENTRY_ID_OFFSET: Final = ENTRY_LEN_OFFSET + ENTRY_LEN_LEN
ENTRY_ID_LEN: Final = 8
FRAME_HEADER_LEN: Final = ENTRY_ID_OFFSET + ENTRY_ID_LEN

ENTRY_LEN_MAX: Final = 2**31 - 1
FEW_ENTRIES: Final = 16  # up to so many, a loop writes them quicker
FEW_FRAMES: Final = 32  # from about there on, arrays are quicker than a loop
ALIKE_FRAMES: Final = 32  # after so many of one length, more are looked for at once

Offsets = NDArray[np.uint32]

_FRAME_HEADER: Final = Struct(">iq")
_ID: Final = Struct(">q")
_LEN_TYPE: Final = np.dtype(">i4")
_ID_TYPE: Final = np.dtype(">i8")
_HEADER_TYPE: Final = np.dtype([("entry_len", _LEN_TYPE), ("entry_id", _ID_TYPE)])
_HEADER_BYTES: Final = np.dtype((np.void, FRAME_HEADER_LEN))

assert FRAME_HEADER_LEN == _FRAME_HEADER.size == 12
assert _LEN_TYPE.itemsize == ENTRY_LEN_LEN
assert _ID_TYPE.itemsize == ENTRY_ID_LEN
assert _HEADER_TYPE.itemsize == FRAME_HEADER_LEN


def pack_entries(entries: Sequence[Buffer], first_entry_id: int = 0) -> tuple[bytearray, Offsets]:
    """Frame ``entries`` back to back; return the frames and the offset of each."""
    count = len(entries)
    if count == 0:
        return bytearray(), np.zeros(0, np.uint32)
    if count <= FEW_ENTRIES:
        return _pack_few(entries, first_entry_id)
    lens = np.fromiter(map(len, entries), np.int64, count)
    ends = np.cumsum(lens + FRAME_HEADER_LEN)
    _check_frames_len(count, int(ends[-1]))
    offsets = np.zeros(count, np.uint32)
    offsets[1:] = ends[:-1]
    # Joining with an empty header before every entry copies each byte once, in C.
    frames = bytearray(FRAME_HEADER_LEN).join((b"", *entries))
    assert len(frames) == int(ends[-1]), "entries are buffers of bytes"
    _windows(frames, _LEN_TYPE, ENTRY_LEN_OFFSET)[offsets] = lens
    stamp_ids(frames, offsets, first_entry_id)
    return frames, offsets


def _pack_few(entries: Sequence[Buffer], first_entry_id: int) -> tuple[bytearray, Offsets]:
    """Pack like ``pack_entries``; a loop is quicker than arrays for so few."""
    lens = list(map(len, entries))
    length = sum(lens) + FRAME_HEADER_LEN * len(lens)
    _check_frames_len(len(lens), length)
    assert 0 <= first_entry_id <= INT64_MAX - len(lens) + 1, "entry ids fit 63 bits"
    frames = bytearray(FRAME_HEADER_LEN).join((b"", *entries))
    assert len(frames) == length, "entries are buffers of bytes"
    starts, at = [], 0
    for entry_id, entry_len in enumerate(lens, first_entry_id):
        starts.append(at)
        _FRAME_HEADER.pack_into(frames, at, entry_len, entry_id)
        at += FRAME_HEADER_LEN + entry_len
    return frames, np.array(starts, np.uint32)


def _check_frames_len(count: int, frames_len: int) -> None:
    if frames_len > ENTRY_LEN_MAX:
        raise RefusedError(
            f"{count} entries, {frames_len} bytes with their frames, are too much for one set",
            remedy="Pack fewer entries at once",
        )


def stamp_ids(frames: bytearray | memoryview, offsets: Offsets, first_entry_id: int) -> None:
    """Write growing ids, from ``first_entry_id`` on, into the (writable) frames."""
    count = len(offsets)
    if count == 0:
        return
    assert 0 <= first_entry_id <= INT64_MAX - count + 1, "entry ids fit 63 bits"
    if count <= FEW_ENTRIES:
        for entry_id, start in enumerate(offsets.tolist(), first_entry_id):
            _ID.pack_into(frames, start + ENTRY_ID_OFFSET, entry_id)
        return
    ids = np.arange(first_entry_id, first_entry_id + count, dtype=np.int64)
    _windows(frames, _ID_TYPE, ENTRY_ID_OFFSET)[offsets] = ids


def check_frames(frames: Buffer, offsets: Offsets, first_entry_id: int) -> None:
    """Raise ``CorruptError`` unless ``frames`` are whole, as offsets say, with growing ids."""
    count, frames_len = len(offsets), len(frames)
    if count == 0:
        if frames_len:
            _corrupt("frames without offsets", offset=0)
        return
    if frames_len > ENTRY_LEN_MAX or first_entry_id < 0 or first_entry_id > INT64_MAX - count + 1:
        _corrupt("frames over their limits", offset=0)
    if count <= FEW_FRAMES:
        _check_few(frames, offsets, first_entry_id)
        return
    starts = offsets.astype(np.int64)
    ends = np.append(starts[1:], frames_len)
    lens = ends - starts - FRAME_HEADER_LEN
    # Before any look at the frames: after this, every offset leaves room for a header.
    if starts[0] != 0 or bool((lens < 0).any()):
        bad = 0 if starts[0] != 0 else int(np.argmax(lens < 0))
        _corrupt("frame offsets out of order", offset=int(starts[bad]))
    wrong = _windows(frames, _LEN_TYPE, ENTRY_LEN_OFFSET)[starts] != lens
    if bool(wrong.any()):
        _corrupt("frame length differs from its offset", offset=int(starts[np.argmax(wrong)]))
    ids = np.arange(first_entry_id, first_entry_id + count, dtype=np.int64)
    wrong = _windows(frames, _ID_TYPE, ENTRY_ID_OFFSET)[starts] != ids
    if bool(wrong.any()):
        _corrupt("entry id out of sequence", offset=int(starts[np.argmax(wrong)]))


def _check_few(frames: Buffer, offsets: Offsets, first_entry_id: int) -> None:
    """Check like ``check_frames``; a loop is quicker than arrays for so few."""
    starts = offsets.tolist()
    ends = [*starts[1:], len(frames)]
    if starts[0] != 0:
        _corrupt("frame offsets out of order", offset=starts[0])
    for start, end in zip(starts, ends, strict=True):
        if end - start < FRAME_HEADER_LEN:
            _corrupt("frame offsets out of order", offset=start)
    for entry_id, (start, end) in enumerate(zip(starts, ends, strict=True), first_entry_id):
        entry_len, found = _FRAME_HEADER.unpack_from(frames, start)
        if entry_len != end - start - FRAME_HEADER_LEN:
            _corrupt("frame length differs from its offset", offset=start)
        if found != entry_id:
            _corrupt("entry id out of sequence", offset=start)


class FrameSets(NamedTuple):
    """Where several sets of frames lie in one buffer; a value each for every set."""

    counts: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    first_entry_ids: Sequence[int]


def frame_sets_agree(buffer: Buffer, offsets: Offsets, sets: FrameSets) -> bool:
    """Whether each of several sets of frames, none of them empty, passes ``check_frames``.

    ``offsets`` are those of all sets, one after the other, each from its own set's start.
    """
    counts = np.array(sets.counts, np.int64)
    stops = counts.cumsum()
    firsts = stops - counts
    starts = np.array(sets.starts, np.int64)
    places = np.repeat(starts, counts)
    places += offsets
    ends = np.empty_like(places)
    ends[:-1] = places[1:]
    ends[stops - 1] = sets.ends
    lens = ends - places
    lens -= FRAME_HEADER_LEN
    # Before any look at the frames: after this, every place leaves room for a header.
    if not np.array_equal(places[firsts], starts) or int(lens.min()) < 0:
        return False
    assert int(lens.max()) <= ENTRY_LEN_MAX, "sets are runs, whose length was checked"
    # Headers as they must be, compared as bytes: three times as quick as field by field. No length
    # is too large for its field, since no set is.
    expected = np.empty(len(places), _HEADER_TYPE)
    expected["entry_len"] = lens
    ids = np.repeat(np.array(sets.first_entry_ids, np.int64) - firsts, counts)
    ids += np.arange(len(places))
    expected["entry_id"] = ids
    found = _windows(buffer, _HEADER_BYTES, ENTRY_LEN_OFFSET)[places]
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def walk_frames(buffer: Buffer, first_entry_id: int, *, start: int = 0) -> Offsets:
    """Return the offsets in ``buffer`` of the whole frames from ``start`` on.

    Stops at padding (a negative length) and at a frame that the buffer cuts; ``frames_end``
    tells where. Raises ``CorruptError`` at an id that is not the next one.
    """
    parts: list[Offsets] = []
    at, entry_id = start, first_entry_id
    while True:
        offsets, end = _walk_some(buffer, at, entry_id)
        parts.append(np.array(offsets, np.uint32))
        count = len(offsets)
        entry_id += count
        if count < ALIKE_FRAMES:
            return np.concatenate(parts) if len(parts) > 1 else parts[0]
        frame_len = end - offsets[-1]
        if end - at == count * frame_len and (alike := _alike(buffer, end, frame_len, entry_id)):
            parts.append(np.arange(end, end + alike * frame_len, frame_len, dtype=np.uint32))
            entry_id += alike
            end += alike * frame_len
        at = end


def _walk_some(buffer: Buffer, at: int, entry_id: int) -> tuple[list[int], int]:
    """Walk over ``ALIKE_FRAMES`` frames, fewer at the end; return their offsets, and behind."""
    offsets: list[int] = []
    last, unpack = len(buffer) - FRAME_HEADER_LEN, _FRAME_HEADER.unpack_from
    for expected in range(entry_id, entry_id + ALIKE_FRAMES):
        if at > last:
            break
        entry_len, found = unpack(buffer, at)
        if entry_len < 0:
            break
        if found != expected:
            _corrupt(f"entry id {found} where {expected} belongs", offset=at)
        if entry_len > last - at:
            break
        offsets.append(at)
        at += FRAME_HEADER_LEN + entry_len
    return offsets, at


def _alike(buffer: Buffer, at: int, frame_len: int, entry_id: int) -> int:
    """Count whole frames from ``at`` on that have this length and the next ids.

    Looks at twice as many each time, so that no more is looked at in vain than was found.
    """
    count, most = 0, ALIKE_FRAMES
    while True:
        here, following = at + count * frame_len, entry_id + count
        size = min(most, (len(buffer) - here) // frame_len, INT64_MAX - following)
        if size <= 0:
            return count
        headers = np.ndarray((size,), _HEADER_TYPE, buffer, here, (frame_len,))
        ids = np.arange(following, following + size, dtype=np.int64)
        right = headers["entry_len"] == frame_len - FRAME_HEADER_LEN
        right &= headers["entry_id"] == ids
        if not right.all():
            return count + int(right.argmin())
        count, most = count + size, 2 * most


def frames_end(buffer: Buffer, offsets: Offsets, *, start: int = 0) -> int:
    """Return where the last of the frames at ``offsets`` ends; ``start`` when there is none."""
    if len(offsets) == 0:
        return start
    last = int(offsets[-1])
    return last + FRAME_HEADER_LEN + entry_len_at(buffer, last)


def entry_len_at(buffer: Buffer, offset: int) -> int:
    """Return the length of the entry framed at ``offset``; negative: no frame is there."""
    return int.from_bytes(buffer[offset : offset + ENTRY_LEN_LEN], "big", signed=True)


def _windows(buffer: Buffer, kind: np.dtype[Any], offset: int) -> NDArray[Any]:
    """View ``buffer`` as a ``kind`` at every byte from ``offset`` on, for unaligned gathers."""
    count = len(buffer) - offset - kind.itemsize + 1
    return np.ndarray((count,), kind, buffer, offset, (1,))


def _corrupt(message: str, *, offset: int) -> None:
    raise CorruptError(
        f"{message}, at byte {offset} of the frames",
        remedy="Read another copy",
        details={"offset": str(offset)},
    )
