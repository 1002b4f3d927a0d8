"""gRPC of the reader: small reads, following, bounds (proto/tierlog/v1/reader.proto).

Invariants:
    * An answer holds room in memory until its call is over; of a call that follows, until the
      transport has taken it, which waits for the client: one answer at a time, piece by piece.
    * A client that takes nothing is left (``tierlog.runtime.rpc``). Then one piece, which the
      transport keeps until the call is over, holds room, and nothing else of the answer does.
    * What is made of an answer is within its room: one message object an entry, beside its bytes.
      The loop is given up between some of them.
    * While entries are sent they are bytes: the message that they were made as is gone by then,
      and with the last of an answer that follows, the answer.
    * A call that stops at the end has all that ``bounds`` then says, or fails: what nobody gives is
      not taken for the end.
    * ``resume`` of an answer is the token that every call, and HTTP's ``from``, goes on with.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import grpc

from tierlog.format.frame import FRAME_HEADER_LEN, walk_frames
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId, stream_name
from tierlog.model.position import Edge, Position
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog.runtime.rpc import MESSAGE_BYTES_MAX
from tierlog_reader import metrics
from tierlog_reader.chunk import Answer, Chunk
from tierlog_reader.limits import ENTRIES_MAX, WAIT_MS_MAX, ReadLimits
from tierlog_reader.memory import COPIES_OF_AN_ANSWER
from tierlog_reader.pages import OBJECT_BYTES
from tierlog_reader.places import not_whole
from tierlog_reader.seek import Time, TimeSeek, parse_start
from tierlog_reader.sending import PIECE_BYTES
from tierlog_reader.served import HeldRoom, ServedReads

BYTES_DEFAULT: Final = 1024 * 1024
# An answer must fit a message, with room for its own fields.
BYTES_MAX: Final = MESSAGE_BYTES_MAX * 3 // 4
FOLLOW_WAIT_MS: Final = 10_000
# Entries that are made without giving up the loop: a few milliseconds.
ENTRIES_AT_ONCE: Final = 1000
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Reader"].full_name
REQUEST_BYTES_MAX: Final = 64 * 1024
"""A request names a stream and places, and no more."""


class ReaderServicer:
    """Reads over gRPC. A position that is left out means: the beginning of the stream."""

    def __init__(self, reads: ServedReads, seek: TimeSeek, limits: ReadLimits) -> None:
        self._reads = reads
        self._seek = seek
        self._limits = limits

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add its calls to a server: as the generated code does, but for answers of bytes."""
        calls: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Read": grpc.unary_unary_rpc_method_handler(
                self.Read, request_deserializer=pb.ReadRequest.FromString
            ),
            "Follow": grpc.unary_stream_rpc_method_handler(
                self.Follow, request_deserializer=pb.FollowRequest.FromString
            ),
            "GetBounds": grpc.unary_unary_rpc_method_handler(
                self.GetBounds,
                request_deserializer=pb.GetBoundsRequest.FromString,
                response_serializer=pb.GetBoundsResponse.SerializeToString,
            ),
        }
        server.add_registered_method_handlers(SERVICE, calls)

    async def Read(  # noqa: N802 - the name in the .proto file
        self, request: pb.ReadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        """Return entries from a position on: a ``ReadResponse``."""
        bytes_max = _bounded("bytes_max", request.bytes_max, INT64_MAX) or BYTES_DEFAULT
        budget = self._limits.budget(
            entries_max=_bounded("entries_max", request.entries_max, ENTRIES_MAX) or ENTRIES_MAX,
            bytes_max=min(bytes_max, BYTES_MAX),
            wait_ms=_bounded("wait_ms", request.wait_ms, WAIT_MS_MAX),
        )
        stream = stream_name(request.stream)
        where = await self._seek.start(stream, _start(request))
        client = _client_of(context, stream)
        answer, room = await self._reads.read(
            client, stream, where, budget, entry_bytes=OBJECT_BYTES
        )
        _leave_at_end(context, room)
        answer = _fitting(_joined(answer))
        return await _response(answer)

    async def Follow(  # noqa: N802 - the name in the .proto file
        self, request: pb.FollowRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[bytes, None]:
        """Give entries as they come, until so many, or up to a position, as ``ReadResponse``."""
        stream = stream_name(request.stream)
        left = _bounded("entries_max", request.entries_max, INT64_MAX) or INT64_MAX
        until = _position_of(request.until, "until") if request.HasField("until") else None
        where = await self._seek.start(stream, _start(request))
        client, end = _client_of(context, stream), None
        if where is Edge.LATEST:
            # Told at once: who calls again goes on there, and misses nothing.
            where = await self._reads.source.latest(stream)
            yield pb.ReadResponse(next=_record(where), resume=str(where)).SerializeToString()
        while left > 0 and not (until is not None and _is_at(where, until)):
            entries_max = min(left, ENTRIES_MAX)
            bytes_max = _bounded("bytes_max", request.bytes_max, INT64_MAX) or BYTES_DEFAULT
            budget = self._limits.budget(
                entries_max=entries_max,
                bytes_max=min(bytes_max, BYTES_MAX),
                wait_ms=0 if request.stop_at_end else FOLLOW_WAIT_MS,
                following=True,
            )
            answer, room = await self._reads.read(
                client, stream, where, budget, entry_bytes=OBJECT_BYTES
            )
            where, sending_len = answer.resume, 0
            nothing_more = answer.chunk is None and request.stop_at_end
            try:
                pieces = _pieces(_before(_joined(answer), until))
                del answer  # the last of its pieces is sent when it is gone
                for count, piece in pieces:
                    left -= count
                    sending_len = len(piece)
                    yield piece
                    sending_len = 0
                    del piece
            finally:
                if sending_len:
                    room.shrink(COPIES_OF_AN_ANSWER * sending_len)
                    _leave_at_end(context, room)
                else:
                    room.leave()
            if nothing_more:
                told, end = end, end or (await self._reads.source.bounds(stream))[1]
                if not isinstance(end, Position) or _is_at(where, end):
                    return
                if told is not None:
                    raise not_whole(stream, where, end)

    async def GetBounds(  # noqa: N802 - the name in the .proto file
        self, request: pb.GetBoundsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetBoundsResponse:
        """Return where a stream begins and ends."""
        first, behind = await self._reads.source.bounds(stream_name(request.stream))
        return pb.GetBoundsResponse(first=_record(first), next=_record(behind))


def _leave_at_end(context: grpc.aio.ServicerContext[Any, Any], room: HeldRoom) -> None:
    # Any callable will do, whatever the library's types say.
    def over(_: object) -> None:
        room.leave()

    context.add_done_callback(over)  # type: ignore[arg-type]


def _check_fits(where: Position, length: int) -> None:
    if length > BYTES_MAX:
        raise RefusedError(
            f"entry {where} has {length} bytes",
            reason=Reason.TOO_LARGE,
            remedy="Read it over HTTP: GET /v1/streams/{stream}/runs",
        )


def _joined(answer: Answer) -> Answer:
    """Return an answer whose frames are one buffer; those that they were can go."""
    chunk = answer.chunk
    if chunk is None or len(chunk.frames) == 1:
        return answer
    return replace(answer, chunk=replace(chunk, frames=(b"".join(chunk.frames),)))


def _fitting(answer: Answer) -> Answer:
    """Return what of an answer fits one message: runs come whole, so it may be longer."""
    chunk = answer.chunk
    if chunk is None or chunk.frames_len <= BYTES_MAX:
        return answer
    assert len(chunk.frames) == 1
    frames = memoryview(chunk.frames[0])
    ends = [*walk_frames(frames, chunk.first_entry_id)[1:].tolist(), len(frames)]
    _check_fits(Position(chunk.ledger_id, chunk.first_entry_id), ends[0])
    count = bisect_right(ends, BYTES_MAX)
    kept = replace(chunk, count=count, frames=(frames[: ends[count - 1]],))
    return replace(answer, chunk=kept, resume=kept.end)


def _before(answer: Answer, until: Position | None) -> Answer:
    """Return what of an answer lies before a position: no more is sent, or counted as served."""
    chunk, resume = answer.chunk, answer.resume
    if chunk is None or until is None or not isinstance(resume, Position):
        return answer
    if chunk.end <= until:
        return replace(answer, resume=min(resume, until))
    if until <= Position(chunk.ledger_id, chunk.first_entry_id):
        return replace(answer, chunk=None)
    assert len(chunk.frames) == 1
    frames, count = memoryview(chunk.frames[0]), until.entry_id - chunk.first_entry_id
    end = int(walk_frames(frames, chunk.first_entry_id)[count])
    return replace(answer, chunk=replace(chunk, count=count, frames=(frames[:end],)), resume=until)


async def _response(answer: Answer) -> bytes:
    metrics.count(answer)
    response = pb.ReadResponse(next=_record(answer.resume), resume=str(answer.resume))
    if answer.chunk is not None:
        response.tier = answer.chunk.tier.value
        for number, (here, data) in enumerate(_entries_of(answer.chunk), 1):
            response.entries.add(position=_record(here), data=data)
            if number % ENTRIES_AT_ONCE == 0:
                await asyncio.sleep(0)
    return response.SerializeToString()


def _pieces(answer: Answer) -> Iterator[tuple[int, bytes]]:
    """Give an answer in messages of about ``PIECE_BYTES``, and how many entries each has: some."""
    chunk = answer.chunk
    if chunk is None:
        return
    metrics.count(answer)
    piece, length = pb.ReadResponse(tier=chunk.tier.value), 0
    for here, data in _entries_of(chunk):
        if piece.entries and length + len(data) > PIECE_BYTES:
            made = _going_on(piece, here)
            piece, length = pb.ReadResponse(tier=chunk.tier.value), 0
            yield made
            del made
        _check_fits(here, FRAME_HEADER_LEN + len(data))
        piece.entries.add(position=_record(here), data=data)
        length += OBJECT_BYTES + len(data)
    if piece.entries:
        made = _going_on(piece, answer.resume)
        del answer, chunk, piece
        yield made


def _going_on(piece: pb.ReadResponse, resume: Position | Edge) -> tuple[int, bytes]:
    """Say in a message where the next one begins; return how many entries it has, and its bytes."""
    piece.resume = str(resume)
    if isinstance(resume, Position):
        piece.next.ledger_id, piece.next.entry_id = resume.ledger_id, resume.entry_id
    return len(piece.entries), piece.SerializeToString()


def _start(request: pb.ReadRequest | pb.FollowRequest) -> Position | Edge | Time:
    if request.resume:
        return parse_start(request.resume)
    if not request.HasField("from"):
        return Edge.EARLIEST
    return _position_of(getattr(request, "from"), "from")


def _position_of(record: pb.PositionRecord, name: str) -> Position:
    if record.ledger_id < 0 or record.entry_id < 0:
        raise RefusedError(f"{name} is negative", remedy="Give a position that was handed out")
    return Position(LedgerId(record.ledger_id), EntryId(record.entry_id))


def _is_at(where: Position | Edge, until: Position) -> bool:
    return isinstance(where, Position) and where >= until


def _client_of(context: grpc.aio.ServicerContext[Any, Any], stream: str) -> tuple[str, str]:
    """Return in whose name a call takes memory: a machine's, for one stream."""
    return context.peer().rpartition(":")[0], stream


def _bounded(name: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise RefusedError(f"{name} = {value} is not in 0..{most}", remedy=f"Change {name}")
    return value


def _record(where: Position | Edge) -> pb.PositionRecord | None:
    if isinstance(where, Edge):
        return None
    return pb.PositionRecord(ledger_id=where.ledger_id, entry_id=where.entry_id)


def _entries_of(chunk: Chunk) -> Iterator[tuple[Position, bytes]]:
    assert len(chunk.frames) == 1
    frames = memoryview(chunk.frames[0])
    bounds = walk_frames(frames, chunk.first_entry_id).tolist()
    bounds.append(len(frames))
    for step, (start, end) in enumerate(pairwise(bounds)):
        here = Position(chunk.ledger_id, EntryId(chunk.first_entry_id + step))
        yield here, bytes(frames[start + FRAME_HEADER_LEN : end])
