"""How a read was answered: which tier, which objects, which requests, and how long each took.

Invariant: what is told is of a read that was really done, within a client's limits as any other;
what it returned is thrown away.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from tierlog.model.ids import StreamName
from tierlog.model.position import Edge, Position
from tierlog_reader.chunk import Answer, Budget
from tierlog_reader.places import Tier
from tierlog_reader.seek import Time, TimeSeek
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Client
from tierlog_reader.trace import Trace, tracing

REQUESTS: Final = frozenset({"HEAD", "GET", "GET range"})


class ExplainedStep(BaseModel):
    """One thing that was done. Steps of tasks beside each other overlap in time."""

    what: str
    where: str
    start: int | None
    length: int | None
    outcome: str
    begun_us: int
    took_us: int


class Explained(BaseModel):
    """A read and its steps."""

    stream: str
    asked: str
    first: str | None
    """The first entry that was read; None: there is none, for now."""
    entries: int
    bytes: int
    next: str
    tier: str | None
    tier_reason: str
    objects: list[str]
    requests: int
    requested_bytes: int
    cached_bytes: int
    took_us: int
    steps: list[ExplainedStep]
    steps_dropped: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What is told of an answer, without its frames."""

    resume: Position | Edge
    first: Position | None = None
    count: int = 0
    frames_len: int = 0
    tier: Tier | None = None


async def explain(
    reads: ServedReads,
    seek: TimeSeek,
    client: Client,
    stream: StreamName,
    where: Position | Edge | Time,
    budget: Budget,
) -> Explained:
    """Read once, and tell how."""
    loop = asyncio.get_running_loop()
    with tracing() as trace:
        begun_s = loop.time()
        start = await seek.start(stream, where)
        answer, room = await reads.read(client, stream, start, budget)
        took_us = round((loop.time() - begun_s) * 1e6)
        found = _found(answer)
        del answer  # whoever waits for metadata holds nothing
        room.leave()
    asked = f"time:{where.publish_ms}" if isinstance(where, Time) else str(where)
    reason = "nothing is there yet"
    if found.first is not None and found.tier is not None:
        reason = await reads.source.why(stream, found.first.ledger_id, found.tier)
    return _told(stream, asked, found, reason, trace, took_us)


def _found(answer: Answer) -> _Found:
    chunk = answer.chunk
    if chunk is None:
        return _Found(resume=answer.resume)
    first = Position(chunk.ledger_id, chunk.first_entry_id)
    return _Found(answer.resume, first, chunk.count, chunk.frames_len, chunk.tier)


def _told(
    stream: StreamName, asked: str, found: _Found, reason: str, trace: Trace, took_us: int
) -> Explained:
    steps = trace.steps
    requests = [one for one in steps if one.what in REQUESTS]
    cached = [one for one in steps if one.what == "cache" and one.outcome != "miss"]
    return Explained(
        stream=stream,
        asked=asked,
        first=str(found.first) if found.first is not None else None,
        entries=found.count,
        bytes=found.frames_len,
        next=str(found.resume),
        tier=found.tier.value if found.tier is not None else None,
        tier_reason=reason,
        objects=sorted({one.where for one in [*requests, *cached]}),
        requests=len(requests),
        requested_bytes=sum(one.received for one in requests),
        cached_bytes=sum(one.received for one in cached),
        took_us=took_us,
        steps=[
            ExplainedStep(
                what=one.what,
                where=one.where,
                start=one.start,
                length=one.length,
                outcome=one.outcome,
                begun_us=one.begun_us,
                took_us=one.took_us,
            )
            for one in steps
        ],
        steps_dropped=trace.dropped,
    )
