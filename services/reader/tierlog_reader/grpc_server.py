"""gRPC of the reader: small reads and bounds (proto/tierlog/v1/reader.proto)."""

from typing import Any, Final

import grpc

from tierlog.format.frame import FRAME_HEADER_LEN, walk_frames
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId, stream_name
from tierlog.model.position import Edge, Position
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog.proto.v1 import reader_pb2_grpc
from tierlog.runtime.rpc import MESSAGE_BYTES_MAX
from tierlog_reader import metrics
from tierlog_reader.chunk import Chunk
from tierlog_reader.http import ENTRIES_MAX, WAIT_MS_MAX, ReadLimits
from tierlog_reader.source import StreamSource

BYTES_DEFAULT: Final = 1024 * 1024
# An answer must fit a message, with room for its own fields.
BYTES_MAX: Final = MESSAGE_BYTES_MAX * 3 // 4


class ReaderServicer(reader_pb2_grpc.ReaderServicer):
    """Reads over gRPC. A position that is left out means: the beginning of the stream."""

    def __init__(self, source: StreamSource, limits: ReadLimits) -> None:
        self._source = source
        self._limits = limits

    async def Read(  # noqa: N802 - the name in the .proto file
        self, request: pb.ReadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReadResponse:
        """Return entries from a position on."""
        budget = self._limits.budget(
            entries_max=_bounded("entries_max", request.entries_max, ENTRIES_MAX) or ENTRIES_MAX,
            bytes_max=_bounded("bytes_max", request.bytes_max, INT64_MAX) or BYTES_DEFAULT,
            wait_ms=_bounded("wait_ms", request.wait_ms, WAIT_MS_MAX),
        )
        where = _position(request) if request.HasField("from") else Edge.EARLIEST
        answer = await self._source.read(stream_name(request.stream), where, budget)
        metrics.count(answer)
        response = pb.ReadResponse(next=_record(answer.resume))
        if answer.chunk is not None:
            _check_fits(answer.chunk)
            response.tier = answer.chunk.tier.value
            _add_entries(response, answer.chunk)
        return response

    async def GetBounds(  # noqa: N802 - the name in the .proto file
        self, request: pb.GetBoundsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetBoundsResponse:
        """Return where a stream begins and ends."""
        first, behind = await self._source.bounds(stream_name(request.stream))
        return pb.GetBoundsResponse(first=_record(first), next=_record(behind))


def _check_fits(chunk: Chunk) -> None:
    if chunk.frames_len > BYTES_MAX:
        raise RefusedError(
            f"entry {chunk.ledger_id}:{chunk.first_entry_id} has {chunk.frames_len} bytes",
            reason=Reason.TOO_LARGE,
            remedy="Read it over HTTP: GET /v1/streams/{stream}/runs",
        )


def _position(request: pb.ReadRequest) -> Position:
    record: pb.PositionRecord = getattr(request, "from")
    if record.ledger_id < 0 or record.entry_id < 0:
        raise RefusedError("from is negative", remedy="Give a position that was handed out")
    return Position(LedgerId(record.ledger_id), EntryId(record.entry_id))


def _bounded(name: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise RefusedError(f"{name} = {value} is not in 0..{most}", remedy=f"Change {name}")
    return value


def _record(where: Position | Edge) -> pb.PositionRecord | None:
    if isinstance(where, Edge):
        return None
    return pb.PositionRecord(ledger_id=where.ledger_id, entry_id=where.entry_id)


def _add_entries(response: pb.ReadResponse, chunk: Chunk) -> None:
    frames = b"".join(chunk.frames)
    starts = walk_frames(frames, chunk.first_entry_id).tolist()
    ends = [*starts[1:], len(frames)]
    for step, (start, end) in enumerate(zip(starts, ends, strict=True)):
        response.entries.add(
            position=pb.PositionRecord(
                ledger_id=chunk.ledger_id, entry_id=chunk.first_entry_id + step
            ),
            data=frames[start + FRAME_HEADER_LEN : end],
        )
