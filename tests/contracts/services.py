"""The services' ports of one cluster, for the suites of streams, reads and administration."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest

from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.model.errors import Reason, TierlogError
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.position import AppendedRange, Edge
from tierlog.ports.admin import Administration
from tierlog.ports.reads import FramesAnswer, StreamReads
from tierlog.ports.streams import AppendChannel, StreamControl

WAIT_S = 10.0
READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The ports; ``connect`` opens a channel for appends; ``give_away`` makes a live node that
    is not the one behind ``control`` a stream's owner."""

    control: StreamControl
    reads: StreamReads
    admin: Administration
    connect: Callable[[StreamName, asyncio.TaskGroup], Awaitable[AppendChannel]]
    give_away: Callable[[StreamName, NodeId], AbstractAsyncContextManager[None]]

    async def create(self, stream: StreamName, *, raw: bool = True) -> None:
        """Create a stream that is not there."""
        assert await self.control.create_stream(stream, raw=raw, policy=None, exist_ok=False)

    @contextlib.asynccontextmanager
    async def channel(self, stream: StreamName) -> AsyncIterator[AppendChannel]:
        """Give a channel to the stream's owner."""
        async with asyncio.TaskGroup() as tasks:
            channel = await self.connect(stream, tasks)
            try:
                yield channel
            finally:
                await channel.close()

    async def append(self, stream: StreamName, entries: list[bytes]) -> list[AppendedRange]:
        """Append one draft."""
        async with self.channel(stream) as channel:
            return await channel.append(stream, draft_of(entries), deadline_s=WAIT_S)

    async def fill(self, stream: StreamName, *ledgers: list[bytes]) -> list[LedgerId]:
        """Create a stream with these sealed ledgers; return their ids."""
        await self.create(stream)
        for entries in ledgers:
            await self.append(stream, entries)
            assert await self.control.seal(stream) is not None
        return [LedgerId(one["ledger_id"]) for one in (await self.admin.stream(stream))["ledgers"]]

    async def read_all(self, stream: StreamName, count: int) -> list[FramesAnswer]:
        """Read from the beginning on until there are ``count`` entries."""
        found: list[FramesAnswer] = []
        async with asyncio.timeout(WAIT_S):
            while sum(one.count for one in found) < count:
                answer = await self.reads.read(
                    stream,
                    found[-1].resume if found else Edge.EARLIEST,
                    bytes_max=READ_BYTES,
                    wait_s=1.0,
                )
                if answer.count:
                    found.append(answer)
        return found


Open = Callable[[], AbstractAsyncContextManager[Services]]


def draft_of(entries: list[bytes]) -> Run:
    """Return a draft of these entries."""
    frames, offsets = pack_entries(entries)
    return build_run(frames, offsets)


@contextlib.contextmanager
def refused(reason: Reason) -> Iterator[pytest.ExceptionInfo[TierlogError]]:
    """Expect an error of that reason."""
    with pytest.raises(TierlogError) as caught:
        yield caught
    assert caught.value.reason is reason, caught.value
    assert caught.value.remedy
