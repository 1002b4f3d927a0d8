"""The frame of the wire: a protobuf header with a body beside it.

    offset  size        field
         0     4        frame_len   bytes after this field
         4     4        header_len  bytes of the header
         8     …        header      header_len bytes: a WireFrame (proto/tierlog/v1/wire.proto)
         …     …        body        frame_len - 4 - header_len bytes

The body of a WireAddRuns is ``count`` encoded runs back to back, and nothing else. The bytes of
a run tell how long it is (``tierlog.format.run``); those of all end with the frame.

    offset  size        field
         0     n0       run         request ``request_id``
        n0     n1       run         request ``request_id + 1``
         …     …        …           up to ``request_id + count - 1``

Integers are big-endian and unsigned.

Owns: writing a frame's head, and finding frames in a stream of bytes. Does not own what a header
says (``tierlog.wire.messages``) nor where bytes come from (``tierlog.adapters.tcp``).

Invariants:
    * ``4 + header_len <= frame_len <= frame_len_max`` and ``header_len <= header_len_max``,
      checked as soon as both numbers are there, before anything is allocated for them.
    * A buffer, once a frame was handed out of it, is written only behind that frame; so a
      body stays what it is for as long as it is referenced.
    * Memory of a decoder: one chunk and at most one frame that is not whole yet.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.ports.files import Buffer
from tierlog.ports.transport import Frame

FRAME_LEN_OFFSET: Final = 0
FRAME_LEN_LEN: Final = 4
HEADER_LEN_OFFSET: Final = FRAME_LEN_OFFSET + FRAME_LEN_LEN
HEADER_LEN_LEN: Final = 4
HEAD_LEN: Final = HEADER_LEN_OFFSET + HEADER_LEN_LEN

_HEAD: Final = Struct(">II")
assert _HEAD.size == HEAD_LEN == 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """What a decoder takes. ``chunk_len`` is how much it asks of the network at once."""

    frame_len_max: int = 8 * 1024 * 1024
    header_len_max: int = 64 * 1024
    chunk_len: int = 256 * 1024

    def __post_init__(self) -> None:
        assert self.header_len_max > 0
        assert self.header_len_max + HEADER_LEN_LEN <= self.frame_len_max < 2**32
        assert self.chunk_len > HEAD_LEN


DEFAULT_LIMITS: Final = FrameLimits()


def frame_len(header: Buffer, body: Sequence[Buffer] = ()) -> int:
    """Return the bytes that the frame takes on the wire, its head included."""
    return HEAD_LEN + len(header) + sum(map(len, body))


def encode_head(*, header_len: int, body_len: int, limits: FrameLimits = DEFAULT_LIMITS) -> bytes:
    """Return the head of a frame, or raise ``RefusedError`` TOO_LARGE."""
    length = HEADER_LEN_LEN + header_len + body_len
    if length > limits.frame_len_max or header_len > limits.header_len_max:
        raise RefusedError(
            f"a frame of {header_len} bytes of header and {body_len} of body is over its limit",
            reason=Reason.TOO_LARGE,
            remedy=f"Send at most {limits.frame_len_max} bytes at once",
            details={"frame_len_max": str(limits.frame_len_max)},
        )
    return _HEAD.pack(length, header_len)


class FrameDecoder:
    """Finds frames in bytes that come in pieces of any size.

    Ask for ``buffer()``, write into it, tell ``wrote(count)``, then take ``frames``.
    """

    def __init__(self, limits: FrameLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._chunk = memoryview(bytearray(limits.chunk_len))
        self._start = 0  # of the first frame that is not whole yet
        self._end = 0  # of what was written
        self._failed = False
        self.frames: deque[Frame] = deque()
        """Whole frames, in order; whoever reads takes them out."""

    def __repr__(self) -> str:
        return f"FrameDecoder(frames={len(self.frames)}, partial_len={self.partial_len})"

    @property
    def partial_len(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return self._end - self._start

    def buffer(self) -> memoryview:
        """Return where to write the next bytes to; never empty."""
        if self._end == len(self._chunk):
            self._renew(self._limits.chunk_len)
        return self._chunk[self._end :]

    def wrote(self, count: int) -> None:
        """Take note of ``count`` bytes written to ``buffer()``. ``CorruptError`` at a bad head."""
        if self._failed:
            return  # behind a bad head there are no frames to find
        self._end += count
        assert self._end <= len(self._chunk)
        while self.partial_len >= HEAD_LEN:
            length, header_len = _HEAD.unpack_from(self._chunk, self._start)
            try:
                self._check(length, header_len)
            except CorruptError:
                self._failed, self._start, self._end = True, 0, 0
                raise
            end = self._start + FRAME_LEN_LEN + length
            if end > self._end:
                if end > len(self._chunk):
                    self._renew(max(FRAME_LEN_LEN + length, self._limits.chunk_len))
                return
            header_start = self._start + HEAD_LEN
            header_end = header_start + header_len
            header = bytes(self._chunk[header_start:header_end])
            self.frames.append(Frame(header, self._chunk[header_end:end]))
            self._start = end

    def feed(self, data: Buffer) -> None:
        """Copy ``data`` in, for whoever has its bytes already."""
        view = memoryview(data)
        while view:
            target = self.buffer()
            count = min(len(target), len(view))
            target[:count] = view[:count]
            self.wrote(count)
            view = view[count:]

    def _check(self, length: int, header_len: int) -> None:
        limits = self._limits
        if length > limits.frame_len_max or header_len > limits.header_len_max:
            raise CorruptError(
                f"a frame claims {length} bytes, {header_len} of them header",
                remedy=f"Speak the wire's protocol, with at most {limits.frame_len_max} a frame",
            )
        if header_len + HEADER_LEN_LEN > length:
            raise CorruptError(
                f"a frame of {length} bytes claims a header of {header_len}",
                remedy="Speak the wire's protocol",
            )

    def _renew(self, length: int) -> None:
        # The old chunk belongs to the bodies that were handed out of it.
        chunk, partial = memoryview(bytearray(length)), self._chunk[self._start : self._end]
        chunk[: len(partial)] = partial
        self._chunk, self._start, self._end = chunk, 0, len(partial)
        assert self._end < len(self._chunk)
