"""``offload_prefix`` returns the position that was reached (seeds/000: asyncOffloadPrefix)."""

import asyncio
from typing import Any, cast

import pytest

from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.admin import MemoryAdministration
from tierlog.adapters.memory.streams import MemoryStreamControl, MemoryStreams
from tierlog.client.client import Client
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog.runtime.settings import Settings

LOGS = StreamName("logs")


class LoopClock:
    def wall_ms(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class SlowAdministration(MemoryAdministration):
    """Each ledger takes ten seconds."""

    async def offload(self, name, before):
        asked = dict(await super().offload(name, before))
        ledgers = [one for one in self._streams.stream(name).ledgers if one.offloaded]
        for number, ledger in enumerate(ledgers):
            ledger.offloaded = False
            asyncio.get_running_loop().call_later(10 * (number + 1), self._done, ledger)
        return asked

    def _done(self, ledger):
        ledger.offloaded = True


class Connections:
    def __init__(self) -> None:
        self.settings = Settings()
        self.streams = MemoryStreams()
        self.control = MemoryStreamControl(self.streams)
        self.admin = SlowAdministration(self.streams)
        self.clock = LoopClock()


async def client_of(ledgers: int) -> Client:
    connections = Connections()
    await connections.control.create_stream(
        LOGS, raw=True, policy=None, exist_ok=False, partitions=0
    )
    for _ in range(ledgers):
        connections.streams.store(LOGS, [b"one", b"two"])
        connections.streams.seal(LOGS)
    return Client(cast("Any", connections))


@pytest.mark.covers("A26", "A27")
def test_the_position_that_was_asked_for_is_reached():
    async def main():
        client = await client_of(3)
        before = Position(LedgerId(2), EntryId(1))
        assert await client.offload_prefix(LOGS, before) == Position(LedgerId(2), EntryId(0))
        assert asyncio.get_running_loop().time() == pytest.approx(20, abs=1)
        assert await client.offload_prefix(LOGS) == Position(LedgerId(2), EntryId(2))

    run_virtual(main())


def test_a_position_that_the_stream_does_not_have_is_refused():
    async def main():
        client = await client_of(3)
        with pytest.raises(RefusedError) as caught:
            await client.offload_prefix(LOGS, Position(LedgerId(99), EntryId(0)))
        assert caught.value.reason is Reason.NO_SUCH_ENTRY

    run_virtual(main())


def test_what_is_not_reached_in_time_is_not_said_to_be():
    async def main():
        client = await client_of(3)
        reached = await client.offload_prefix(LOGS, timeout_s=15)
        assert reached == Position(LedgerId(1), EntryId(0))

    run_virtual(main())


def test_a_stream_without_ledgers_has_no_position():
    async def main():
        assert await (await client_of(0)).offload_prefix(LOGS) is None

    run_virtual(main())


def test_a_partitioned_stream_has_none_either():
    async def main():
        client = await client_of(0)
        await client._connections.control.create_stream(
            StreamName("parts"), raw=True, policy=None, exist_ok=False, partitions=1
        )
        with pytest.raises(RefusedError) as caught:
            await client.offload_prefix("parts")
        assert caught.value.reason is Reason.PARTITIONED

    run_virtual(main())
