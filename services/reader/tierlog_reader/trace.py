"""What one read did, step by step: for ``tierlog read explain``.

Owns the steps of the read that a task works on; tasks that it begins note theirs beside. Does
not own what is done: whoever does something says so here, and nothing happens where nobody asks.

Invariant: at most ``STEPS_MAX`` steps are kept; how many more there were is counted.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from tierlog.offload.range_memory import Blank, RangeMemory
from tierlog.offload.turns import Pace, Urgent
from tierlog.ports.filling import length_of
from tierlog.ports.objects import ObjectInfo, ObjectReads

STEPS_MAX: Final = 1000


@dataclass(slots=True, kw_only=True)
class Step:
    """One thing that was done; ``begun_us`` from the read's begin."""

    what: str
    where: str
    begun_us: int
    took_us: int = 0
    start: int | None = None
    length: int | None = None
    outcome: str = ""
    received: int = 0
    """Bytes that came of it."""


@dataclass(slots=True)
class Trace:
    """The steps of one read."""

    begun_s: float
    steps: list[Step] = field(default_factory=list)
    dropped: int = 0


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextlib.contextmanager
def tracing() -> Iterator[Trace]:
    """Note the steps of what is done within the context."""
    trace = Trace(asyncio.get_running_loop().time())
    token = _trace.set(trace)
    try:
        yield trace
    finally:
        _trace.reset(token)


@contextlib.contextmanager
def step(
    what: str, where: str, *, start: int | None = None, length: int | None = None
) -> Iterator[Step]:
    """Note one step, and how long it took; its outcome is the caller's to set, or its error."""
    trace = _trace.get()
    noted = Step(what=what, where=where, begun_us=0, start=start, length=length)
    if trace is None:
        yield noted
        return
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    noted.begun_us = round((begun_s - trace.begun_s) * 1e6)
    if len(trace.steps) < STEPS_MAX:
        trace.steps.append(noted)
    else:
        trace.dropped += 1
    try:
        yield noted
    except BaseException as error:
        noted.outcome = noted.outcome or f"{type(error).__name__}: {error}"
        raise
    finally:
        noted.took_us = round((loop.time() - begun_s) * 1e6)


class TracedReads:
    """Reads of objects that note each request."""

    def __init__(self, objects: ObjectReads) -> None:
        self._objects = objects

    def __repr__(self) -> str:
        return f"TracedReads({self._objects!r})"

    async def head(self, key: str) -> ObjectInfo | None:
        """See ``ObjectReads``."""
        with step("HEAD", key) as noted:
            found = await self._objects.head(key)
            noted.outcome = "not there" if found is None else f"of {found.size} bytes"
            return found

    async def get(
        self, key: str, *, bytes_max: int | None = None
    ) -> tuple[ObjectInfo, bytes] | None:
        """See ``ObjectReads``."""
        with step("GET", key) as noted:
            answer = await self._objects.get(key, bytes_max=bytes_max)
            noted.received = 0 if answer is None else len(answer[1])
            noted.outcome = "not there" if answer is None else f"{noted.received} bytes"
            return answer

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """See ``ObjectReads``."""
        with step("GET range", key, start=start, length=length) as noted:
            body = await self._objects.get_range(key, start, length)
            noted.received = 0 if body is None else len(body)
            noted.outcome = "not there" if body is None else f"{noted.received} bytes"
            return body

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        """See ``ObjectReads``."""
        with step("GET range", key, start=start, length=length_of(targets)) as noted:
            received = await self._objects.get_range_into(key, start, targets)
            noted.received = received or 0
            noted.outcome = "not there" if received is None else f"{received} bytes"
            return received


class TracedMemory:
    """A memory of ranges that notes what it had."""

    def __init__(self, memory: RangeMemory) -> None:
        self._memory = memory

    def __repr__(self) -> str:
        return f"TracedMemory({self._memory!r})"

    def get(self, key: str, start: int, end: int) -> memoryview | None:
        """See ``RangeMemory``."""
        if _trace.get() is None:
            return self._memory.get(key, start, end)
        with step("cache", key, start=start) as noted:
            found = self._memory.get(key, start, end)
            noted.length = len(found) if found is not None else end - start
            noted.received = 0 if found is None else len(found)
            noted.outcome = "miss" if found is None else f"{noted.received} bytes"
            return found

    def known(self, key: str, at: int) -> bool:
        """See ``RangeMemory``."""
        return self._memory.known(key, at)

    def known_end(self, key: str, at: int, end: int) -> int:
        """See ``RangeMemory``."""
        return self._memory.known_end(key, at, end)

    def unknown_end(self, key: str, at: int, end: int) -> int:
        """See ``RangeMemory``."""
        return self._memory.unknown_end(key, at, end)

    def blank(self, key: str, start: int, size: int, *, ahead: bool) -> Blank | None:
        """See ``RangeMemory``."""
        return self._memory.blank(key, start, size, ahead=ahead)

    def forget(self, key: str) -> None:
        """See ``RangeMemory``."""
        self._memory.forget(key)


class TracedPace:
    """Limits of bytes a second that note how long each request waited for them."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __repr__(self) -> str:
        return f"TracedPace({self._pace!r})"

    @property
    def at_once(self) -> int | None:
        """See ``Pace``."""
        return self._pace.at_once

    async def take(self, length: int, request: Urgent) -> None:
        """See ``Pace``."""
        with step("throttle", "reader.tier2_bytes_per_s_max", length=length) as noted:
            await self._pace.take(length, request)
            noted.outcome = f"{length} bytes may come"

    def give_back(self, length: int) -> None:
        """See ``Pace``."""
        self._pace.give_back(length)
