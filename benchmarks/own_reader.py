"""A reader in the process that measures, put together as the reader service is, without transports.

Plain clients of S3, and Apache Pulsar's reader, have the bytes in the process that asks the store
for them; so does whoever reads with this one. What is called ``read_…`` runs in children.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from common import Meter, Result
from reading import READ_BYTES
from tierlog.client.reading import StreamReader
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.position import Edge, Position
from tierlog.ports.reads import FramesAnswer
from tierlog.runtime.settings import load_settings
from tierlog.wiring.reader import open_reader_parts
from tierlog_reader.chunk import Budget
from tierlog_reader.engine import running_reads
from tierlog_reader.memory import PIECES_BYTES, parts_of
from tierlog_reader.places import Tier
from tierlog_reader.served import ServedReads

CLIENT: Final = "bench"
ENTRIES_MAX: Final = 1_000_000

Stream = Mapping[str, Any]
"""Its name, and how many entries of how many bytes in all it has."""


class OwnReads:
    """``StreamReads`` of the reader of this process."""

    def __init__(self, reads: ServedReads) -> None:
        self._reads = reads

    async def read(
        self,
        stream: StreamName,
        where: Position | Edge,
        *,
        bytes_max: int,
        entries_max: int | None = None,
        wait_s: float = 0.0,
    ) -> FramesAnswer:
        """See ``StreamReads``."""
        budget = Budget(entries_max=entries_max or ENTRIES_MAX, bytes_max=bytes_max, wait_s=wait_s)
        answer, room = await self._reads.read(CLIENT, stream, where, budget)
        chunk = answer.chunk
        if chunk is None:
            return FramesAnswer(resume=answer.resume)
        frames = memoryview(b"".join(chunk.frames))  # a copy, as a service's answer is one
        room.leave()
        return FramesAnswer(
            resume=answer.resume,
            ledger_id=chunk.ledger_id,
            first_entry_id=EntryId(chunk.first_entry_id),
            count=chunk.count,
            frames=frames,
            tier=str(chunk.tier),
            raw=answer.raw,
        )

    async def bounds(self, stream: StreamName) -> tuple[Position | Edge, Position | Edge]:
        """See ``StreamReads``."""
        return await self._reads.source.bounds(stream)

    async def close(self) -> None:
        """See ``StreamReads``."""


@contextlib.asynccontextmanager
async def own_reader() -> AsyncIterator[ServedReads]:
    """Run a reader with this process's settings."""
    settings = load_settings()
    async with (
        open_reader_parts(settings, pieces_bytes_max=PIECES_BYTES) as parts,
        running_reads(settings, parts, parts_of(settings.reader)) as reads,
    ):
        yield reads


async def read_frames(parameters: Mapping[str, Stream]) -> Result:
    """Read ``warm``, then measured all frames of ``whole`` (in a child)."""
    async with own_reader() as reads:
        await _take_frames(reads, **parameters["warm"])
        meter = Meter()
        await _take_frames(reads, **parameters["whole"])
        return meter.result(parameters["whole"]["bytes"])


async def read_entries_twice(parameters: Mapping[str, Stream]) -> Result:
    """Read ``warm``, then twice, measured, every entry of ``whole`` as an object (in a child)."""
    whole, measured = parameters["whole"], []
    async with own_reader() as reads:
        await _take_frames(reads, **parameters["warm"])
        for _ in range(2):
            meter = Meter()
            await _take_entries(reads, **whole)
            measured.append(meter.result(whole["bytes"]))
    return twice(*measured)


def twice(cold: Result, again: Result) -> Result:
    """Return what was measured of two reads of the same."""
    return {**cold, **{f"again_{name}": value for name, value in again.items()}}


async def _take_frames(reads: ServedReads, stream: str, entries: int, **lengths: int) -> None:
    budget = Budget(entries_max=entries, bytes_max=READ_BYTES, wait_s=1.0)
    expected = lengths["bytes"] + entries * FRAME_HEADER_LEN
    where: Position | Edge = Edge.EARLIEST
    length = 0
    while length < expected:
        answer, room = await reads.read(CLIENT, StreamName(stream), where, budget)
        assert answer.chunk is not None, where
        assert answer.chunk.tier is Tier.TIER2, answer.chunk.tier
        length, where = length + answer.chunk.frames_len, answer.resume
        room.leave()
    assert length == expected, (length, expected)


async def _take_entries(reads: ServedReads, stream: str, entries: int, **lengths: int) -> None:
    count = length = 0
    async for entry in StreamReader(StreamName(stream), OwnReads(reads)).entries():
        assert entry.tier == Tier.TIER2, entry.tier
        count += 1
        length += len(entry.data)
    assert (count, length) == (entries, lengths["bytes"]), (count, length)
